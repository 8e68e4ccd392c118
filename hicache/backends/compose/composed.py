"""What all compositions have in common: parts, each opened and closed once, and totals over them.

`ComposedBackend` is the base of them all. `CopyingBackend` is the base of those that keep the same page on several
parts: it moves pages between them in the background and removes them from all.

Locking design: as `envelope`. The fields are set by the constructor and hold objects that lock themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import BackendError
from ...frame import FrameCodec, PageBuffer
from ..base import BackendStatistics, Composite, GetOutcome, StorageBackend, Usage
from ..envelope import Compound
from ..registry import PartSpec, open_spec
from .copier import Copier, CopyStatistics, parents_read
from .late import LatePart
from .merge import merged_exists, merged_has

_log = logging.getLogger(__name__)

# Closing a composition writes what waits to be copied for this long at most. An engine has 5 s for its whole shutdown,
# and a call of a part that hangs may take 3 of them.
CLOSE_COPIES_S = 1.5
# What `errors` counts when a part raises instead of answering, which no guarded one does.
INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a composition under its name."""

    name: str
    backend: StorageBackend


def open_parts(codec: FrameCodec, specs: Sequence[PartSpec]) -> list[Part]:
    """Open all parts, or none: if one fails, those before it are closed. One that is optional may come later.

    Blocks and raises as `open_spec`.
    """
    opened: list[Part] = []
    try:
        for spec in specs:
            opened.append(Part(spec.name, _open_part(codec, spec)))
    except BaseException:
        close_parts(opened)
        raise
    return opened


def close_parts(parts: Sequence[Part]) -> None:
    """Close parts of which no composition came. Raises nothing: the error that matters is the one under way."""
    for part in parts:
        with contextlib.suppress(BackendError):
            part.backend.close()


def _open_part(codec: FrameCodec, spec: PartSpec) -> StorageBackend:
    if spec.optional:
        return LatePart(codec, spec.name, lambda: open_spec(spec.backend, codec))
    return open_spec(spec.backend, codec)


class ComposedBackend(Compound):
    """A backend made of several. Its statistics count as `corrupt` the pages that no part had whole, under the one
    reason `every_copy`; each part's own statistics have the reasons. See Compound for the rest."""

    def __init__(self, codec: FrameCodec, parts: Sequence[Part]) -> None:
        super().__init__(codec)
        self._parts = tuple(part.backend for part in parts)
        self._names = tuple(part.name for part in parts)

    @property
    def parts(self) -> Sequence[StorageBackend]:
        """See Composite."""
        return self._parts

    @property
    def names(self) -> Sequence[str]:
        """The names of the parts, in the order of `parts`."""
        return self._names

    def statistics(self) -> BackendStatistics:
        """See StorageBackend, and this class."""
        found = super().statistics()
        damaged = found.gets.get(GetOutcome.CORRUPT, 0)
        return replace(found, corrupt={"every_copy": damaged} if damaged else {})

    def shut(self) -> None:
        """See Envelope. Closes every part, also if one of them raises; raises the first such BackendError."""
        self._before_parts_close()
        failures: list[BackendError] = []
        for name, part in zip(self._names, self._parts, strict=True):
            try:
                part.close()
            except BackendError as error:
                _log.warning("storage part %s failed to close: %s", name, error)
                failures.append(error)
        if failures:
            raise failures[0]

    @abstractmethod
    def _before_parts_close(self) -> None:
        """End what still uses the parts. No verb is under way any more."""


class CopyingBackend(ComposedBackend):
    """A composition in which a page may be on several parts. Each part has a copier that brings it pages, of which
    `copy_bytes_max` bytes may wait. Raises InvalidInput for less than one page."""

    def __init__(self, codec: FrameCodec, parts: Sequence[Part], copy_bytes_max: int) -> None:
        super().__init__(codec, parts)
        self._copiers: list[Copier] = []
        try:
            for part in parts:
                self._copiers.append(Copier(part.backend, part.name, copy_bytes_max))
        except BaseException:
            self._stop_copying()
            raise

    def copies(self) -> dict[str, CopyStatistics]:
        """By part: what was copied to it in the background, and what was not."""
        return {name: copier.statistics() for name, copier in zip(self._names, self._copiers, strict=True)}

    def _copy_read(
        self, part: int, positions: Sequence[int], keys: Sequence[bytes], pages: Sequence[PageBuffer], epoch: int
    ) -> None:
        """Have the pages at `positions` of a batch that was just read copied to a part."""
        if positions:
            self._copiers[part].submit(
                [keys[p] for p in positions], [pages[p] for p in positions],
                parents_read(keys, pages, positions), epoch,
            )  # fmt: skip

    def _in_order(self) -> Sequence[StorageBackend]:
        """The parts in the order in which they are asked."""
        return self._parts

    def prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope. A page counts if any part has it: a prefix may go on from one part to another and back."""
        return merged_exists(self._in_order(), keys, deadline)

    def has(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Envelope. A page counts if any part has it."""
        return merged_has(self._in_order(), keys, deadline)

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope. Removes the pages from all parts; a page on several of them counts once.

        Looks first which pages are on which part: the counts of parts alone do not tell how many different pages they
        speak of.
        """
        *others, last = self._parts
        with self._forgetting(keys, deadline):
            held = merged_has(others, keys, deadline)
            for part in others:
                part.delete(keys, deadline=deadline)
            last.delete(list(itertools.compress(keys, held)), deadline=deadline)
            alone = [key for key, there in zip(keys, held, strict=True) if not there]
            return sum(held) + last.delete(alone, deadline=deadline)

    def remove_all(self, deadline: float) -> int:
        """See Envelope. Clears all parts; the pages of the fullest one are counted, as by `usage`."""
        with self._forgetting(None, deadline):
            return max([part.clear(deadline=deadline) for part in self._parts])

    @contextlib.contextmanager
    def _forgetting(self, keys: Sequence[bytes] | None, deadline: float) -> Iterator[None]:
        with contextlib.ExitStack() as doors:
            for copier in self._copiers:
                doors.enter_context(copier.forgetting(keys, deadline))
            yield

    def measure(self) -> Usage:
        """See Envelope. That of the fullest part, so at least so many different pages: those on several parts count
        once. What each part holds is its own usage."""
        return max((part.usage() for part in self._parts), key=lambda usage: usage.pages)

    def check(self) -> None:
        """Raise InvariantError if the copiers contradict themselves. REQUIRES: no verb is under way."""
        for copier in self._copiers:
            copier.check()

    def _before_parts_close(self) -> None:
        self._stop_copying()

    def _stop_copying(self) -> None:
        """Write what waits, within CLOSE_COPIES_S, and end the copiers."""
        stop_at = time.monotonic() + CLOSE_COPIES_S
        for copier in self._copiers:
            copier.stop(stop_at)
        for copier in self._copiers:
            copier.close()


def copies_of(backend: StorageBackend, prefix: str = "") -> Mapping[str, CopyStatistics]:
    """What all compositions in `backend` copy in the background, by the part that it goes to; a part inside a part is
    called `outer/inner`, and all names begin with `prefix`. Does not block."""
    found: dict[str, CopyStatistics] = {}
    if isinstance(backend, CopyingBackend):
        found.update({prefix + name: copies for name, copies in backend.copies().items()})
    if isinstance(backend, ComposedBackend):
        for name, part in zip(backend.names, backend.parts, strict=True):
            found.update(copies_of(part, f"{prefix}{name}/"))
    elif isinstance(backend, Composite):
        for part in backend.parts:
            found.update(copies_of(part, prefix))
    return found

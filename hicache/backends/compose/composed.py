"""The common base of all compositions: parts, each opened and closed once, and totals over them.

Locking design: as `envelope`. The fields are set by the constructor and hold objects that lock themselves.
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ...errors import BackendError
from ...frame import FrameCodec
from ..base import BackendStatistics, GetOutcome, StorageBackend
from ..envelope import Compound
from ..registry import Options, open_spec, part_specs

_log = logging.getLogger(__name__)

# The error kind that is counted when a part raises an exception. A guarded part never does.
INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a composition, with its name."""

    name: str
    backend: StorageBackend


class ComposedBackend(Compound):
    """A backend made of several. Its statistics count a page as `corrupt`, with the reason `every_copy`, if no part had
    a sound copy; the statistics of each part have the reasons. See Compound for the rest."""

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
        """See Envelope. Closes every part, even if one raises; then raises the first BackendError."""
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
        """Stop the threads that use the parts. REQUIRES: no verb is in flight."""


Composed = TypeVar("Composed", bound=ComposedBackend)


def open_composed(
    type_name: str, codec: FrameCodec, options: Options, compose: Callable[[list[Part]], Composed]
) -> Composed:
    """Open all parts listed in `options` of the composition `type_name`, and compose them. If that fails, the open
    parts are closed and the error is raised.

    Blocks and raises as `open_spec` and `compose` do.
    """
    with contextlib.ExitStack() as undo:
        parts: list[Part] = []
        for name, spec in part_specs(type_name, options).items():
            parts.append(Part(name, open_spec(spec, codec)))
            undo.callback(_close_quietly, parts[-1])
        composed = compose(parts)
        undo.pop_all()
    return composed


def _close_quietly(part: Part) -> None:
    with contextlib.suppress(BackendError):  # an earlier error is being raised, and that one matters
        part.backend.close()

"""What all compositions have in common: parts, each opened and closed once, and totals over them.

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

# What `errors` counts when a part raises instead of answering, which a guarded part does not do.
INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a composition under its name."""

    name: str
    backend: StorageBackend


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
        """End the threads that use the parts. REQUIRES: no verb is in flight."""


Composed = TypeVar("Composed", bound=ComposedBackend)


def open_composed(
    type_name: str, codec: FrameCodec, options: Options, compose: Callable[[list[Part]], Composed]
) -> Composed:
    """Open all parts that `options` of the composition `type_name` list, and compose them. If a part cannot be opened
    or composed, those that are open are closed again, and the error is raised.

    Blocks and raises as `open_spec`, and as `compose`.
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
    with contextlib.suppress(BackendError):  # the error that matters is the one that is being raised
        part.backend.close()

"""The operator's overrides of breakers, for open stores and for stores opened later.

Locking design: one thread at a time changes it. `modes` refers to a dictionary that is replaced, never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...config.guard import Override
from ..base import StorageBackend
from .backend import GuardedBackend
from .calls import Direction
from .leaves import named_leaves


class Overrides:
    """The overrides by direction and store; store None means all stores. The latest override of a store wins."""

    def __init__(self) -> None:
        self.modes: Mapping[tuple[Direction, str | None], Override] = {}

    def force(
        self, direction: Direction, mode: Override, store: str | None, backends: Iterable[StorageBackend]
    ) -> None:
        """Switch a direction of a store on or off, or return it to its breaker. `backends` are all open backends. Does
        not block."""
        modes = dict(self.modes)
        if store is None:
            modes = {key: other for key, other in modes.items() if key[0] is not direction}
        modes[direction, store] = mode
        self.modes = modes
        for backend in backends:
            self.apply(backend)
        if mode is Override.AUTO and (store is None or (direction, None) not in modes):
            self.modes = {key: other for key, other in modes.items() if key != (direction, store)}

    def apply(self, backend: StorageBackend) -> None:
        """Apply the overrides to the guards in `backend`. Does not block."""
        for name, guard in named_leaves(backend) if self.modes else ():
            for direction in Direction:
                mode = self.modes.get((direction, name), self.modes.get((direction, None)))
                if mode is not None and isinstance(guard, GuardedBackend):
                    guard.override(direction, mode)

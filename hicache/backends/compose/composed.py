"""The common base of all compositions: parts, each opened and closed once.

Locking design: the fields are set by the constructor and hold objects that lock themselves.
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...clock import Clock
from ...errors import BackendError
from ...frame import FrameCodec
from ..base import EvictionListener
from ..registry import Options, open_spec, part_specs
from ..storage import Storage, StoreGroup
from ..store import Store

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a composition, with its name."""

    name: str
    storage: Storage


class Composed(StoreGroup):
    """Storage made of several parts, which it owns. Its parts count and limit each call."""

    def __init__(self, codec: FrameCodec, parts: Sequence[Part]) -> None:
        super().__init__(codec, None)
        self._parts = tuple(part.storage for part in parts)
        self._names = tuple(part.name for part in parts)
        self._stores = tuple(store for part in self._parts for store in part.stores)

    @property
    def stores(self) -> tuple[Store, ...]:
        return self._stores

    @property
    def named_parts(self) -> list[tuple[str, Storage]]:
        """The parts with their names, in the order of reads."""
        return list(zip(self._names, self._parts, strict=True))

    def watch_evictions(self, listener: EvictionListener) -> None:
        for part in self._parts:
            part.watch_evictions(listener)

    def close(self) -> None:
        """See Verbs. Closes every part, even if one raises; then raises the first BackendError."""
        self._before_parts_close()
        failures: list[BackendError] = []
        for name, part in self.named_parts:
            try:
                part.close()
            except BackendError as error:
                _log.warning("storage part %s failed to close: %s", name, error)
                failures.append(error)
        if failures:
            raise failures[0]

    @abstractmethod
    def _before_parts_close(self) -> None:
        """Stop the threads that use the parts. Idempotent."""


Made = TypeVar("Made", bound=Composed)


def open_composed(
    type_name: str, codec: FrameCodec, options: Options, compose: Callable[[list[Part]], Made], clock: Clock
) -> Made:
    """Open all parts listed in `options` of the composition `type_name`, and compose them. If that fails, the open
    parts are closed and the error is raised.

    Blocks and raises as `open_spec` and `compose` do.
    """
    parts: list[Part] = []
    try:
        for name, spec in part_specs(type_name, options).items():
            parts.append(Part(name, open_spec(spec, codec, clock)))
        return compose(parts)
    except BaseException:
        for part in reversed(parts):
            with contextlib.suppress(BackendError):  # an earlier error is being raised, and that one matters
                part.storage.close()
        raise

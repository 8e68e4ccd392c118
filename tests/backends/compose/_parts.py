"""Helpers of the composition tests: names of parts, waiting for copies, and a side door to all parts."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.backends.base import StorageBackend
from hicache.backends.compose import LevelsBackend, Part
from hicache.backends.compose.composed import ComposedBackend
from hicache.backends.testing import Store
from tests.waiting import wait_for

from .._troubled import CODEC

PAGE = CODEC.frame_bytes
COPIES = 64 * PAGE
# Backends that the worlds of the tests opened; closed after each test.
OPENED: list[ComposedBackend] = []


def named(*backends: StorageBackend) -> list[Part]:
    """Return parts with the names `part-0`, `part-1`, ..."""
    return [Part(f"part-{number}", backend) for number, backend in enumerate(backends)]


def settle(composed: LevelsBackend) -> None:
    """Wait until no copies are waiting."""
    wait_for(lambda: not any(copies.waiting for copies in composed.copies().values()))
    composed.check()


def side_door(composed: ComposedBackend, stores: Sequence[Store]) -> Store:
    """Return a side door that reads from the first part that has the page, and writes to all parts that have it.

    A write waits for background copies first, otherwise a copy could follow the damage.
    """

    def read(key: bytes) -> bytes | None:
        return next((raw for store in stores if (raw := store.read(key)) is not None), None)

    def write(key: bytes, data: bytes) -> None:
        if isinstance(composed, LevelsBackend):
            settle(composed)
        for store in stores:
            if store.read(key) is not None:
                store.write(key, data)

    return Store(composed, read, write)

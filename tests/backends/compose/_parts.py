"""Helpers of the composition tests: names of parts, waiting for copies, and a side door to all parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hicache.backends.compose import Levels, Part, Shards
from hicache.backends.compose.composed import Composed
from hicache.backends.compose.sharded import ShardCodec
from hicache.backends.memory import MemoryDriver
from hicache.backends.storage import Storage
from hicache.backends.store import Store
from hicache.frame import FrameCodec
from hicache_lab.conformance import Subject, bare, memory_subject
from tests.waiting import wait_for

from .._troubled import CODEC

PAGE = CODEC.frame_bytes
COPIES = 64 * PAGE
# Room for a few pages of the largest size in the contract.
ROOM = 8 << 20
# Backends that the worlds of the tests opened; closed after each test.
OPENED: list[Composed] = []


def stores_of(drivers: Sequence[MemoryDriver], codec: FrameCodec = CODEC) -> list[Store]:
    """Return the bare store of each driver."""
    return [bare(driver, codec) for driver in drivers]


def named(*backends: Storage) -> list[Part]:
    """Return parts with the names `part-0`, `part-1`, ..."""
    return [Part(f"part-{number}", backend) for number, backend in enumerate(backends)]


def settle(composed: Levels) -> None:
    """Wait until no copies are waiting."""
    wait_for(lambda: not any(copies.waiting for copies in composed.copies().values()))
    composed.check()


def side_door(composed: Composed, stores: Sequence[Subject]) -> Subject:
    """Return a side door that reads from the first part that has the page, and writes to all parts that have it.

    A write waits for background copies first, otherwise a copy could follow the damage.
    """

    def read(key: bytes) -> bytes | None:
        return next((raw for store in stores if (raw := store.read(key)) is not None), None)

    def write(key: bytes, data: bytes) -> None:
        if isinstance(composed, Levels):
            settle(composed)
        for store in stores:
            if store.read(key) is not None:
                store.write(key, data)

    return Subject(composed, read, write)


def memory(codec: FrameCodec) -> Subject:
    driver = MemoryDriver()
    return memory_subject(bare(driver, codec), driver)


def levels(codec: FrameCodec, *stores: Subject) -> Subject:
    return side_door(Levels(codec, named(*(store.backend for store in stores)), cascade_bytes_max=ROOM), stores)


def sharded(codec: FrameCodec, open_part: Callable[[FrameCodec, int], Subject], count: int) -> Subject:
    shard_codec = ShardCodec(codec)
    stores = [open_part(shard_codec, number) for number in range(count)]
    return side_door(Shards(shard_codec, named(*(store.backend for store in stores))), stores)

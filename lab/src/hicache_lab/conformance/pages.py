"""Helpers for tests of stores: fixtures, pages whose bytes follow from their keys, and verbs that check them."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import pytest
import xxhash

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.driver import Driver
from hicache.backends.memory import MemoryDriver
from hicache.backends.registry import BackendSpec, Options, open_spec
from hicache.backends.storage import Storage
from hicache.backends.store import UNGUARDED, Store
from hicache.frame import HEADER_BYTES, FrameCodec, PageBuffer, PageView
from hicache_lab.clocks import ManualClock

T = TypeVar("T")

PAYLOAD_BYTES = 5000
NAMESPACE = hashlib.sha256(b"a namespace").digest()
OTHER_NAMESPACE = hashlib.sha256(b"another namespace").digest()
HIT, MISS, CORRUPT, GET_ERROR = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT, GetOutcome.ERROR
STORED, PRESENT, SET_ERROR = SetOutcome.STORED, SetOutcome.PRESENT, SetOutcome.ERROR
# Longer than any wait in a test.
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Subject:
    """Storage under test, with direct access to its stored bytes."""

    backend: Storage
    read: Callable[[bytes], bytes | None]
    write: Callable[[bytes, bytes], None]


OpenStore: TypeAlias = Callable[[FrameCodec], Subject]


def bare(driver: Driver[Any], codec: FrameCodec) -> Store:
    """Return the store of a driver without breaker, retries and limits, so that each call reaches the driver once."""
    return Store(driver, codec, UNGUARDED, name=type(driver).__name__.removesuffix("Driver").lower())


def store_of(make: Callable[..., Driver[Any]], codec: FrameCodec, *arguments: Any, **keywords: Any) -> Store:
    """Return the bare store of the driver that `make` opens for a codec."""
    return bare(make(codec, *arguments, **keywords), codec)


def memory_store(codec: FrameCodec, capacity_bytes: int | None = None) -> Store:
    """Return an empty store in memory."""
    return bare(MemoryDriver(capacity_bytes), codec)


def memory_subject(backend: Storage, driver: MemoryDriver) -> Subject:
    """Return storage, whose pages are in a memory driver, with access to its stored bytes."""
    space = backend.codec.namespace
    return Subject(backend, functools.partial(driver.peek, space), functools.partial(driver.poke, space))


def driver_of(storage: Storage, kind: type[T]) -> T:
    """Return the driver of a store, which is of this kind."""
    assert isinstance(storage, Store) and isinstance(storage.driver, kind)
    return storage.driver


def open_backend(type_name: str, codec: FrameCodec, options: Options) -> Storage:
    """Open a configured store without a guard. Raises as `open_spec`."""
    return open_spec(BackendSpec(type_name, options, guard=None), codec)


class ContractFixtures:
    """The fixture `open_store`, which a subclass must override, and the fixtures derived from it."""

    @pytest.fixture
    @abstractmethod
    def open_store(self) -> OpenStore:
        """Return a function that opens this test's store for the namespace of a codec."""

    @pytest.fixture
    def codec(self) -> FrameCodec:
        """Return a codec whose time stands still, so that two seals of a page give the same bytes."""
        return FrameCodec(NAMESPACE, PAYLOAD_BYTES, clock=ManualClock())

    @pytest.fixture
    def store(self, open_store: OpenStore, codec: FrameCodec) -> Iterator[Subject]:
        store = open_store(codec)
        yield store
        store.backend.close()

    @pytest.fixture
    def seed(self) -> int:
        """Return the seed of a random test: TEST_SEED if set, else a new one, which is printed."""
        seed = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(2**32)))
        print(f"TEST_SEED={seed} replays this")
        return seed


def soon(seconds: float = WAIT_S) -> float:
    """Return a deadline that is late enough for any step of a test."""
    return time.monotonic() + seconds


def make_keys(count: int, name: str = "page") -> list[bytes]:
    """Return the keys of a chain."""
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count)]


def payload_of(key: bytes, payload_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Return the payload of a key, so that a wrong page is detected. As in 16-bit KV, every second byte is noise."""
    payload = bytearray(hashlib.shake_128(key).digest(payload_bytes))
    payload[1::2] = key[:1] * (payload_bytes // 2)
    return bytes(payload)


def full_frames(codec: FrameCodec, keys: Sequence[bytes]) -> list[memoryview]:
    """Return unsealed frames with the payloads of `keys`."""
    frames = empty_frames(codec, len(keys))
    for key, frame in zip(keys, frames, strict=True):
        frame[HEADER_BYTES : HEADER_BYTES + codec.payload_bytes] = payload_of(key, codec.payload_bytes)
    return frames


def empty_frames(codec: FrameCodec, count: int) -> list[memoryview]:
    """Return frames of zeros."""
    return [memoryview(bytearray(codec.frame_bytes)) for _ in range(count)]


def in_parts(codec: FrameCodec, frame: memoryview, parts: int = 5) -> PageView:
    """Return a copy of an unsealed frame's page in `parts` parts of unequal length with gaps between them."""
    step = codec.payload_bytes // parts
    lengths = [step - 3] + [step] * (parts - 2) + [codec.payload_bytes - step * (parts - 1) + 3]
    memory, found, start = memoryview(bytearray(codec.payload_bytes + 64 * parts)), [], 0
    payload = frame[HEADER_BYTES : HEADER_BYTES + codec.payload_bytes]
    for number, length in enumerate(lengths):
        part = memory[start + 64 * number :][:length]
        part[:] = payload[start : start + length]
        found.append(part)
        start += length
    return PageView(memoryview(bytearray(HEADER_BYTES)), found)


def full_views(codec: FrameCodec, keys: Sequence[bytes]) -> list[PageView]:
    """Return unsealed pages in parts with the payloads of `keys`."""
    return [in_parts(codec, frame) for frame in full_frames(codec, keys)]


def empty_views(codec: FrameCodec, count: int) -> list[PageView]:
    """Return pages of zeros, in other parts than those of `full_views`."""
    return [in_parts(codec, frame, parts=7) for frame in empty_frames(codec, count)]


def holds(codec: FrameCodec, key: bytes, page: PageBuffer) -> bool:
    """True if `page` holds the right payload of `key`."""
    if isinstance(page, PageView):
        return b"".join(page.parts) == payload_of(key, codec.payload_bytes)
    return page[HEADER_BYTES : HEADER_BYTES + codec.payload_bytes] == payload_of(key, codec.payload_bytes)


def sealed(codec: FrameCodec, keys: Sequence[bytes], parent: bytes | None = None) -> list[bytes]:
    """Return the stored bytes of a chain."""
    frames, parents = full_frames(codec, keys), [parent, *keys[:-1]]
    return [bytes(codec.seal(k, frame, parent=p)) for k, frame, p in zip(keys, frames, parents, strict=True)]


def forged(codec: FrameCodec, key: bytes, parent: bytes) -> bytes:
    """Return the page of `key` as a process without keys can forge it: with any parent and a correct checksum.

    REQUIRES: the tag of `codec` is XXH3-128, and it stores pages as they are.
    """
    (frame,) = full_frames(codec, [key])
    codec.seal(key, frame)
    frame[88:120] = parent
    frame[8:24] = xxhash.xxh3_128_digest(frame[24 : HEADER_BYTES + codec.payload_bytes])
    return bytes(frame)


def store_chain(
    store: Subject, keys: Sequence[bytes], parent: bytes | None = None, errors: list[str] | None = None
) -> list[SetOutcome]:
    """Store the pages of `keys` as one batch."""
    frames = full_frames(store.backend.codec, keys)
    return store.backend.batch_set(keys, frames, parent=parent, deadline=soon(), errors=errors)


def load(store: Subject, keys: Sequence[bytes], errors: list[str] | None = None) -> list[GetOutcome]:
    """Read pages and assert that each hit is the right page."""
    frames = empty_frames(store.backend.codec, len(keys))
    outcomes = store.backend.batch_get(keys, frames, deadline=soon(), errors=errors)
    for key, frame, outcome in zip(keys, frames, outcomes, strict=True):
        assert outcome is not HIT or holds(store.backend.codec, key, frame), "a wrong page was served"
    return outcomes


def exists(store: Subject, keys: Sequence[bytes], errors: list[str] | None = None) -> int:
    """Return how many of `keys` are stored before the first missing one."""
    return store.backend.batch_exists(keys, deadline=soon(), errors=errors)


def delete(store: Subject, keys: Sequence[bytes], errors: list[str] | None = None) -> int:
    """Remove pages; return how many were stored."""
    return store.backend.delete(keys, deadline=soon(), errors=errors)


def churn(store: Subject, keys: Sequence[bytes], dice: random.Random, rounds: int) -> None:
    """Store, read and delete runs of `keys` at random; a hit with wrong bytes fails in `load`."""
    for _ in range(rounds):
        first = dice.randrange(len(keys))
        some = keys[first : first + dice.randrange(1, 6)]
        action = dice.randrange(10)
        if action < 4:
            assert set(store_chain(store, some)) <= {STORED, PRESENT}
        elif action < 9:
            assert set(load(store, some)) <= {HIT, MISS}
        else:
            delete(store, some)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0 .. count - 1)` concurrently; raise the exception of the first call that fails."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]

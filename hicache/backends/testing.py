"""The conformance suite of storage backends. A backend is one if it passes.

    class TestMine(BackendContract):
        @pytest.fixture
        def open_store(self, tmp_path):
            def open_it(codec):
                backend = MyBackend(codec, ...)
                return Store(backend, read=..., write=...)
            return open_it

`open_store` opens the same, at first empty, store again and again, each time as a given codec sees it. `read` and
`write` are a side door to the raw stored bytes of a key, so that a store is not tested through itself.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import pytest

from ..errors import InvalidInput
from ..frame import HEADER_BYTES, FrameCodec, TagKind
from .base import GetOutcome, SetOutcome, StorageBackend

PAYLOAD_BYTES = 5000
NAMESPACE = hashlib.sha256(b"a namespace").digest()
OTHER_NAMESPACE = hashlib.sha256(b"another namespace").digest()
HIT, MISS, CORRUPT, GET_ERROR = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT, GetOutcome.ERROR
STORED, PRESENT, SET_ERROR = SetOutcome.STORED, SetOutcome.PRESENT, SetOutcome.ERROR
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Store:
    """A backend and the side door to what it stores."""

    backend: StorageBackend
    read: Callable[[bytes], bytes | None]
    write: Callable[[bytes, bytes], None]


OpenStore: TypeAlias = Callable[[FrameCodec], Store]


def soon(seconds: float = _WAIT_S) -> float:
    """A deadline far enough for anything a test does."""
    return time.monotonic() + seconds


def make_keys(count: int, name: str = "page") -> list[bytes]:
    """Keys of a chain."""
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count)]


def payload_of(key: bytes, payload_bytes: int = PAYLOAD_BYTES) -> bytes:
    """The one right payload of a key, so that a wrong page is seen."""
    return hashlib.shake_128(key).digest(payload_bytes)


def full_frames(codec: FrameCodec, keys: list[bytes]) -> list[memoryview]:
    """Unsealed frames that hold the payloads of `keys`."""
    frames = empty_frames(codec, len(keys))
    for key, frame in zip(keys, frames, strict=True):
        frame[HEADER_BYTES : HEADER_BYTES + codec.payload_bytes] = payload_of(key, codec.payload_bytes)
    return frames


def empty_frames(codec: FrameCodec, count: int) -> list[memoryview]:
    """Frames of zeros."""
    return [memoryview(bytearray(codec.frame_bytes)) for _ in range(count)]


def holds(codec: FrameCodec, key: bytes, frame: memoryview) -> bool:
    """True if `frame` holds the right payload of `key`."""
    return frame[HEADER_BYTES : HEADER_BYTES + codec.payload_bytes] == payload_of(key, codec.payload_bytes)


def store_chain(store: Store, keys: list[bytes], parent: bytes | None = None) -> list[SetOutcome]:
    """Store the pages of `keys` as one batch."""
    frames = full_frames(store.backend.codec, keys)
    return store.backend.batch_set(keys, frames, parent=parent, deadline=soon())


def load(store: Store, keys: list[bytes]) -> list[GetOutcome]:
    """Read pages and assert that each hit is the right page."""
    frames = empty_frames(store.backend.codec, len(keys))
    outcomes = store.backend.batch_get(keys, frames, deadline=soon())
    for key, frame, outcome in zip(keys, frames, outcomes, strict=True):
        assert outcome is not HIT or holds(store.backend.codec, key, frame), "a wrong page was served"
    return outcomes


class BackendContract:
    """Subclass it in a test module and give it the fixture `open_store`."""

    @pytest.fixture
    @abstractmethod
    def open_store(self) -> OpenStore:
        """Opens the store of this test as a codec's namespace sees it."""

    @pytest.fixture
    def codec(self) -> FrameCodec:
        return FrameCodec(NAMESPACE, PAYLOAD_BYTES)

    @pytest.fixture
    def store(self, open_store: OpenStore, codec: FrameCodec) -> Iterator[Store]:
        store = open_store(codec)
        yield store
        store.backend.close()

    def test_a_stored_page_comes_back_byte_for_byte(self, store: Store) -> None:
        keys = make_keys(5)
        assert store_chain(store, keys) == [STORED] * 5
        assert load(store, keys) == [HIT] * 5

    def test_the_stored_object_is_the_sealed_frame(self, store: Store) -> None:
        keys = make_keys(1)
        frames = full_frames(store.backend.codec, keys)
        parent = hashlib.sha256(b"parent").digest()
        store.backend.batch_set(keys, frames, parent=parent, deadline=soon())
        raw = store.read(keys[0])
        assert raw is not None
        assert raw == frames[0]
        assert store.backend.codec.check(keys[0], memoryview(raw)) is None
        assert parent in raw[:HEADER_BYTES]

    def test_storing_again_is_present_and_changes_nothing(self, store: Store) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        before = [store.read(key) for key in keys]
        assert store_chain(store, keys) == [PRESENT] * 3
        assert [store.read(key) for key in keys] == before

    def test_a_batch_of_old_and_new_pages_stores_the_new_ones(self, store: Store) -> None:
        keys = make_keys(6)
        store_chain(store, [keys[1], keys[4]])
        assert store_chain(store, keys) == [STORED, PRESENT, STORED, STORED, PRESENT, STORED]
        assert load(store, keys) == [HIT] * 6

    def test_a_key_twice_in_a_batch_is_stored_once(self, store: Store) -> None:
        (key,) = make_keys(1)
        assert store_chain(store, [key, key]) == [STORED, PRESENT]
        assert store.backend.usage().pages == 1

    def test_empty_batches_are_fine(self, store: Store) -> None:
        assert store.backend.batch_set([], [], parent=None, deadline=soon()) == []
        assert store.backend.batch_get([], [], deadline=soon()) == []
        assert store.backend.batch_exists([], deadline=soon()) == 0
        assert store.backend.delete([], deadline=soon()) == 0

    @pytest.mark.parametrize("hole", [0, 1, 3, 6, 7])
    def test_exists_stops_at_the_first_hole(self, store: Store, hole: int) -> None:
        keys = make_keys(8)
        store_chain(store, keys[:hole] + keys[hole + 1 :])
        assert store.backend.batch_exists(keys, deadline=soon()) == hole

    def test_exists_of_all_and_of_none(self, store: Store) -> None:
        keys = make_keys(8)
        assert store.backend.batch_exists(keys, deadline=soon()) == 0
        store_chain(store, keys)
        assert store.backend.batch_exists(keys, deadline=soon()) == 8

    def test_missing_pages_are_misses_among_hits(self, store: Store) -> None:
        keys = make_keys(5)
        store_chain(store, [keys[0], keys[2], keys[4]])
        assert load(store, keys) == [HIT, MISS, HIT, MISS, HIT]

    def test_delete_removes_and_counts_what_was_there(self, store: Store) -> None:
        keys = make_keys(4)
        store_chain(store, keys[:3])
        assert store.backend.delete(keys[1:], deadline=soon()) == 2
        assert load(store, keys) == [HIT, MISS, MISS, MISS]
        assert store.read(keys[1]) is None

    def test_a_deleted_page_can_be_stored_again(self, store: Store) -> None:
        keys = make_keys(2)
        store_chain(store, keys)
        store.backend.delete(keys, deadline=soon())
        assert store_chain(store, keys) == [STORED, STORED]
        assert load(store, keys) == [HIT, HIT]

    @pytest.mark.parametrize("where", ["magic", "tag", "key", "namespace", "payload start", "payload end"])
    def test_a_flipped_bit_makes_a_page_corrupt_and_removes_it(self, store: Store, where: str) -> None:
        offset = {
            "magic": 0, "tag": 10, "key": 60, "namespace": 125, "payload start": HEADER_BYTES,
            "payload end": HEADER_BYTES + PAYLOAD_BYTES - 1,
        }[where]  # fmt: skip
        keys = make_keys(3)
        store_chain(store, keys)
        raw = bytearray(store.read(keys[1]) or b"")
        raw[offset] ^= 0x10
        self._refuses(store, keys, bytes(raw))

    @pytest.mark.parametrize("change", ["empty", "cut", "one byte less", "one byte more", "doubled", "zeros", "text"])
    def test_an_object_of_other_bytes_is_corrupt_and_removed(self, store: Store, change: str) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        raw = store.read(keys[1])
        assert raw is not None
        damaged = {
            "empty": b"", "cut": raw[: HEADER_BYTES + 10], "one byte less": raw[:-1], "one byte more": raw + b"\0",
            "doubled": raw + raw, "zeros": bytes(len(raw)), "text": b"x" * len(raw),
        }[change]  # fmt: skip
        self._refuses(store, keys, damaged)

    def test_the_page_of_another_key_is_corrupt_and_removed(self, store: Store) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        self._refuses(store, keys, store.read(keys[2]) or b"")

    def test_the_page_of_another_namespace_is_corrupt_and_removed(self, store: Store) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        other = FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES)
        (frame,) = full_frames(other, [keys[1]])
        other.seal(keys[1], frame)
        self._refuses(store, keys, bytes(frame))

    def test_a_page_without_a_tag_is_not_believed_by_a_reader_that_wants_one(self, store: Store) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        weak = FrameCodec(NAMESPACE, PAYLOAD_BYTES, tag=TagKind.NONE)
        (frame,) = full_frames(weak, [keys[1]])
        weak.seal(keys[1], frame)
        self._refuses(store, keys, bytes(frame))

    def _refuses(self, store: Store, keys: list[bytes], raw: bytes) -> None:
        """With `raw` in place of `keys[1]`: that one is corrupt, counted, removed, and can be stored again."""
        store.write(keys[1], raw)
        assert load(store, keys) == [HIT, CORRUPT, HIT]
        assert sum(store.backend.statistics().corrupt.values()) == 1
        assert store.read(keys[1]) is None
        assert load(store, keys) == [HIT, MISS, HIT]
        assert store_chain(store, keys) == [PRESENT, STORED, PRESENT]
        assert load(store, keys) == [HIT, HIT, HIT]

    def test_without_a_tag_a_flipped_payload_goes_through(self, open_store: OpenStore) -> None:
        """The control of the tests above: it is the tag that finds the damage."""
        codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, tag=TagKind.NONE)
        store = open_store(codec)
        (key,) = make_keys(1)
        store_chain(store, [key])
        raw = bytearray(store.read(key) or b"")
        raw[HEADER_BYTES + 5] ^= 1
        store.write(key, bytes(raw))
        (frame,) = empty_frames(codec, 1)
        assert store.backend.batch_get([key], [frame], deadline=soon()) == [HIT]
        assert not holds(codec, key, frame)
        store.backend.close()

    def test_a_keyed_reader_believes_only_pages_made_with_its_key(self, open_store: OpenStore) -> None:
        keyed = open_store(FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_key=b"k" * 32))
        keys = make_keys(3)
        store_chain(keyed, keys)
        assert load(keyed, keys) == [HIT] * 3
        for number, codec in enumerate([
            FrameCodec(NAMESPACE, PAYLOAD_BYTES), FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_key=b"x" * 32),
        ]):  # fmt: skip
            (frame,) = full_frames(codec, [keys[number]])
            codec.seal(keys[number], frame)
            keyed.write(keys[number], bytes(frame))
        assert load(keyed, keys) == [CORRUPT, CORRUPT, HIT]
        keyed.backend.close()

    def test_after_its_deadline_a_verb_does_nothing(self, store: Store) -> None:
        keys = make_keys(3)
        store_chain(store, keys[:2])
        past = time.monotonic() - 1.0
        frames = full_frames(store.backend.codec, keys)
        assert store.backend.batch_exists(keys, deadline=past) == 0
        assert store.backend.batch_get(keys, frames, deadline=past) == [GET_ERROR] * 3
        assert store.backend.batch_set(keys, frames, parent=None, deadline=past) == [SET_ERROR] * 3
        assert store.backend.delete(keys, deadline=past) == 0
        assert load(store, keys) == [HIT, HIT, MISS]

    def test_a_deadline_may_be_infinite(self, store: Store) -> None:
        keys = make_keys(2)
        frames = full_frames(store.backend.codec, keys)
        assert store.backend.batch_set(keys, frames, parent=None, deadline=math.inf) == [STORED] * 2
        assert store.backend.batch_exists(keys, deadline=math.inf) == 2
        assert store.backend.batch_get(keys, frames, deadline=math.inf) == [HIT] * 2
        assert store.backend.delete(keys, deadline=math.inf) == 2

    def test_wrong_arguments_are_refused(self, store: Store) -> None:
        keys, codec = make_keys(2), store.backend.codec
        frames = full_frames(codec, keys)
        short = memoryview(bytearray(codec.frame_bytes - 1))
        with pytest.raises(InvalidInput):
            store.backend.batch_get(keys, frames[:1], deadline=soon())
        with pytest.raises(InvalidInput):
            store.backend.batch_set(keys, frames[:1], parent=None, deadline=soon())
        with pytest.raises(InvalidInput):
            store.backend.batch_get(keys, [frames[0], short], deadline=soon())
        with pytest.raises(InvalidInput):
            store.backend.batch_set([keys[0], b"short"], frames, parent=None, deadline=soon())
        with pytest.raises(InvalidInput):
            store.backend.batch_exists([b"../../etc/passwd"], deadline=soon())
        with pytest.raises(InvalidInput):
            store.backend.delete([b""], deadline=soon())
        assert store.backend.usage().pages == 0

    def test_usage_follows_what_is_stored(self, store: Store) -> None:
        keys, size = make_keys(4), store.backend.codec.frame_bytes
        assert (store.backend.usage().pages, store.backend.usage().bytes) == (0, 0)
        store_chain(store, keys)
        store_chain(store, keys)
        assert (store.backend.usage().pages, store.backend.usage().bytes) == (4, 4 * size)
        store.backend.delete(keys[3:], deadline=soon())
        assert (store.backend.usage().pages, store.backend.usage().bytes) == (3, 3 * size)

    def test_statistics_count_outcomes_and_bytes(self, store: Store) -> None:
        keys, size = make_keys(4), store.backend.codec.frame_bytes
        store_chain(store, keys[:3])
        store_chain(store, keys[:1])
        load(store, keys)
        found = store.backend.statistics()
        assert (found.sets[STORED], found.sets[PRESENT]) == (3, 1)
        assert (found.gets[HIT], found.gets[MISS]) == (3, 1)
        assert (found.read_bytes, found.written_bytes) == (3 * size, 3 * size)
        assert (dict(found.errors), dict(found.corrupt), found.evicted_pages) == ({}, {}, 0)

    def test_verbs_after_close_report_errors(self, store: Store) -> None:
        keys = make_keys(2)
        store_chain(store, keys)
        store.backend.close()
        store.backend.close()
        frames = full_frames(store.backend.codec, keys)
        assert store.backend.batch_exists(keys, deadline=soon()) == 0
        assert store.backend.batch_get(keys, frames, deadline=soon()) == [GET_ERROR] * 2
        assert store.backend.batch_set(keys, frames, parent=None, deadline=soon()) == [SET_ERROR] * 2
        assert store.backend.delete(keys, deadline=soon()) == 0

    def test_threads_on_the_same_keys_see_whole_pages_or_none(self, store: Store) -> None:
        seed = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(2**32)))
        print(f"TEST_SEED={seed} replays this")
        keys = make_keys(12)
        _in_threads(6, lambda number: _churn(store, keys, random.Random(seed + number), rounds=40))
        store.backend.delete(keys, deadline=soon())
        assert store.backend.usage().pages == 0

    def test_close_during_use_waits_and_loses_nothing(self, store: Store) -> None:
        keys = make_keys(12)
        running = threading.Barrier(4)

        def use(number: int) -> None:
            if number == 3:
                running.wait(_WAIT_S)
                store.backend.close()
                return
            store_chain(store, keys[number * 4 : number * 4 + 4])
            running.wait(_WAIT_S)
            while HIT in load(store, keys) or STORED in store_chain(store, keys):
                pass

        _in_threads(4, use)
        assert load(store, keys) == [GET_ERROR] * 12


def _churn(store: Store, keys: list[bytes], dice: random.Random, rounds: int) -> None:
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
            store.backend.delete(some, deadline=soon())


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0 .. count - 1)` at once, and raise what the first of them to fail raised."""
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
        thread.join(_WAIT_S)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]

"""Contract tests at the limits: large and odd pages, long batches, short deadlines, frames that are reused at once."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest

from hicache.frame import FrameCodec, PageBuffer

from .damage import damaged
from .pages import (
    CORRUPT,
    GET_ERROR,
    HIT,
    MISS,
    NAMESPACE,
    PRESENT,
    SET_ERROR,
    STORED,
    ContractFixtures,
    OpenStore,
    Subject,
    delete,
    empty_frames,
    empty_views,
    exists,
    full_frames,
    full_views,
    holds,
    load,
    make_keys,
    sealed,
    soon,
    store_chain,
)

# More than any part of a driver handles at once: a pipeline, a page of a listing, a pool of connections.
MANY_PAGES = 300
_CANARY = b"\xa5" * 512
# Time that a batch of 60 pages has: too short to begin, and to end.
_LEFT_MS = (0.05, 0.5, 5)


class BoundsContract(ContractFixtures):
    """A part of `SoleDriverContract`. `late` are the outcomes of pages that a call could not move in time."""

    late: ClassVar[frozenset[str]] = frozenset({GET_ERROR, SET_ERROR})

    @pytest.mark.parametrize("payload_bytes", [1, 3840, 3841, (1 << 20) + 1])
    def test_pages_of_any_size_come_back(self, open_store: OpenStore, payload_bytes: int) -> None:
        """A payload of 3840 bytes fills a frame exactly; one more byte takes one more block."""
        store = open_store(FrameCodec(NAMESPACE, payload_bytes))
        keys = make_keys(3)
        assert store_chain(store, keys) == [STORED] * 3
        assert load(store, keys) == [HIT] * 3
        store.backend.close()

    def test_a_long_batch_is_found_exactly_and_read(self, store: Subject) -> None:
        keys, done = make_keys(MANY_PAGES), 0
        for length in (1, 17, 150, MANY_PAGES - 1, MANY_PAGES):
            assert store_chain(store, keys[done:length], keys[done - 1] if done else None) == [STORED] * (length - done)
            done = length
            assert exists(store, keys) == length
        assert load(store, keys) == [HIT] * MANY_PAGES
        assert store.backend.usage().pages == MANY_PAGES
        assert delete(store, keys) == MANY_PAGES
        assert (exists(store, keys), store.backend.usage().pages) == (0, 0)

    def test_no_byte_outside_a_frame_is_written(self, store: Subject) -> None:
        """Frames are slices of one pool: for any object length, the neighbours' bytes stay unchanged."""
        codec, keys = store.backend.codec, make_keys(3)
        step = codec.frame_bytes + len(_CANARY)
        for longer_by in (0, 1, 4096, 100_000):
            store_chain(store, keys)
            store.write(keys[1], (store.read(keys[1]) or b"") + bytes(longer_by))
            pool = bytearray((bytes(codec.frame_bytes) + _CANARY) * 3)
            frames = [memoryview(pool)[at * step : at * step + codec.frame_bytes] for at in range(3)]
            outcomes = store.backend.batch_get(keys, frames, deadline=soon())
            assert outcomes == [HIT, CORRUPT if longer_by else HIT, HIT], longer_by
            assert [bytes(pool[(at + 1) * step - len(_CANARY) : (at + 1) * step]) for at in range(3)] == [_CANARY] * 3

    def test_a_late_read_no_longer_writes_the_frames(self, open_store: OpenStore) -> None:
        codec = FrameCodec(NAMESPACE, 100_000)
        store, keys = open_store(codec), make_keys(60)
        store_chain(store, keys)
        for left_ms in _LEFT_MS:
            frames = empty_frames(codec, len(keys))
            outcomes = store.backend.batch_get(keys, frames, deadline=time.monotonic() + left_ms / 1000)
            assert set(outcomes) <= {HIT, *self.late}
            hits = [at for at, outcome in enumerate(outcomes) if outcome is HIT]
            assert all(holds(codec, keys[at], frames[at]) for at in hits)
            for frame in frames:
                frame[:] = b"\xee" * codec.frame_bytes
            # Bytes still in flight have arrived when another read of as many pages is complete.
            assert load(store, keys) == [HIT] * len(keys)
            assert all(frame == b"\xee" * codec.frame_bytes for frame in frames)
        store.backend.close()

    def test_a_late_store_no_longer_reads_the_frames(self, open_store: OpenStore) -> None:
        """Changes to the frames after the return never reach the store: each page is the right one or missing."""
        codec = FrameCodec(NAMESPACE, 100_000)
        store = open_store(codec)
        for left_ms in _LEFT_MS:
            keys = make_keys(60, f"{left_ms} ms")
            frames = full_frames(codec, keys)
            outcomes = store.backend.batch_set(keys, frames, parent=None, deadline=time.monotonic() + left_ms / 1000)
            for frame in frames:
                frame[:] = b"\xee" * codec.frame_bytes
            assert set(outcomes) <= {STORED, *self.late}
            found = load(store, keys)
            assert set(found) <= {HIT, MISS} and store.backend.statistics().corrupt == {}
            assert all(found[at] is HIT for at, outcome in enumerate(outcomes) if outcome is STORED)
            assert set(store_chain(store, keys)) <= {STORED, PRESENT}
            assert load(store, keys) == [HIT] * len(keys)
        store.backend.close()

    def test_a_batch_may_mix_frames_and_pages_in_parts(self, store: Subject) -> None:
        codec, keys = store.backend.codec, make_keys(4)
        frames, views = full_frames(codec, keys), full_views(codec, keys)
        pages: list[PageBuffer] = [frames[0], views[1], frames[2], views[3]]
        assert store.backend.batch_set(keys, pages, parent=None, deadline=soon()) == [STORED] * 4
        assert [store.read(key) for key in keys] == sealed(codec, keys)
        frames, views = empty_frames(codec, 4), empty_views(codec, 4)
        mixed: list[PageBuffer] = [views[0], frames[1], views[2], frames[3]]
        assert store.backend.batch_get(keys, mixed, deadline=soon()) == [HIT] * 4
        assert all(holds(codec, key, page) for key, page in zip(keys, mixed, strict=True))

    def test_damage_to_pages_read_into_parts_is_found_and_removed(self, store: Subject) -> None:
        codec, keys = store.backend.codec, make_keys(3)
        for damage in ("payload end", "doubled"):
            store_chain(store, keys)
            store.write(keys[1], damaged(codec, keys, store.read(keys[1]) or b"", damage))
            read = empty_views(codec, 3)
            assert store.backend.batch_get(keys, read, deadline=soon()) == [HIT, CORRUPT, HIT], damage
            assert holds(codec, keys[0], read[0]) and holds(codec, keys[2], read[2])
            assert store.read(keys[1]) is None

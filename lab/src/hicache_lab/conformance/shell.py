"""The contract of `Store` over any driver: what the shell does for all of them, so it is tested over one or two.

A test module subclasses `StoreContract` and adds the fixture `open_store`, as for a `DriverContract`.
"""

from __future__ import annotations

import pytest

from hicache.errors import InvalidInput
from hicache.frame import HEADER_BYTES, FrameCodec, PageBuffer, PageView, TagKind

from .damage import DAMAGES, damaged
from .encodings import EncodingsContract
from .pages import (
    CORRUPT,
    GET_ERROR,
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    SET_ERROR,
    STORED,
    OpenStore,
    Subject,
    delete,
    empty_frames,
    full_frames,
    holds,
    in_parts,
    load,
    make_keys,
    soon,
    store_chain,
)


class StoreContract(EncodingsContract):
    """Arguments, verification of pages in all encodings, damage of all kinds, statistics. See the module's docstring.
    """

    def test_wrong_arguments_are_rejected(self, store: Subject) -> None:
        backend, codec, keys = store.backend, store.backend.codec, make_keys(2)
        frames = full_frames(codec, keys)
        view = in_parts(codec, frames[1])
        wrong: list[list[PageBuffer]] = [
            [frames[0]],
            [frames[0], memoryview(bytearray(codec.frame_bytes - 1))],
            [frames[0], PageView(view.header[1:], view.parts)],
            [frames[0], PageView(view.header, view.parts[1:])],
            [frames[0], PageView(view.header, [*view.parts, memoryview(bytearray(1))])],
            [frames[0], PageView(view.header, [memoryview(bytes(PAYLOAD_BYTES))])],
        ]
        for bad in wrong:
            with pytest.raises(InvalidInput):
                backend.batch_get(keys, bad, deadline=soon())
            with pytest.raises(InvalidInput):
                backend.batch_set(keys, bad, parent=None, deadline=soon())
        for parent in (*keys, b"short"):  # a page would be its own ancestor, directly or through the batch
            with pytest.raises(InvalidInput):
                backend.batch_set(keys, frames, parent=parent, deadline=soon())
        with pytest.raises(InvalidInput):
            backend.batch_set([keys[0], b"short"], frames, parent=None, deadline=soon())
        for verb in (backend.batch_exists, backend.batch_has, backend.batch_touch, backend.delete):
            for key in (b"", b"short", b"../../etc/passwd"):
                with pytest.raises(InvalidInput):
                    verb([key], deadline=soon())
        assert backend.usage().pages == 0

    def test_every_wrong_object_is_corrupt_and_removed(self, store: Subject) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        for number, damage in enumerate(DAMAGES, 1):
            store.write(keys[1], damaged(store.backend.codec, keys, store.read(keys[1]) or b"", damage))
            assert load(store, keys) == [HIT, CORRUPT, HIT], damage
            assert sum(store.backend.statistics().corrupt.values()) == number
            assert store.read(keys[1]) is None
            assert load(store, keys) == [HIT, MISS, HIT]
            assert store_chain(store, keys) == [PRESENT, STORED, PRESENT]

    def test_without_a_tag_a_flipped_payload_goes_through(self, open_store: OpenStore) -> None:
        """The control of the test above: the tag detects the damage."""
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

    def test_statistics_count_outcomes_and_bytes(self, store: Subject) -> None:
        keys, size = make_keys(4), store.backend.codec.frame_bytes
        store_chain(store, keys[:3])
        store_chain(store, keys[:1])
        load(store, keys)
        found = store.backend.statistics()
        assert (found.sets[STORED], found.sets[PRESENT]) == (3, 1)
        assert (found.gets[HIT], found.gets[MISS]) == (3, 1)
        assert (found.read_bytes, found.written_bytes) == (3 * size, 3 * size)
        assert (dict(found.errors), dict(found.corrupt), found.evicted_pages) == ({}, {}, 0)

    def test_a_late_call_counts_one_error_per_page_and_a_late_lookup_one(self, store: Subject) -> None:
        backend, keys, past = store.backend, make_keys(3), soon(-1)
        frames = full_frames(backend.codec, keys)
        backend.batch_get(keys, frames, deadline=past)
        backend.batch_set(keys, frames, parent=None, deadline=past)
        for look_up in (backend.batch_exists, backend.batch_has, backend.delete):
            look_up(keys, deadline=past)
        backend.clear(deadline=past)
        found = backend.statistics()
        assert (found.gets, found.sets) == ({GET_ERROR: 3}, {SET_ERROR: 3})
        assert found.errors == {"deadline": 10}

    def test_storing_does_not_change_the_payloads(self, store: Subject) -> None:
        codec, keys = store.backend.codec, make_keys(3)
        frames = full_frames(codec, keys)
        for expected in ([STORED] * 3, [PRESENT] * 3):
            assert store.backend.batch_set(keys, frames, parent=None, deadline=soon()) == expected
            assert all(holds(codec, key, frame) for key, frame in zip(keys, frames, strict=True))

    def test_a_page_that_was_read_can_be_stored_unchanged(self, store: Subject) -> None:
        """As a second level does with pages read from the first one."""
        codec, keys = store.backend.codec, make_keys(3)
        store_chain(store, keys)
        frames = empty_frames(codec, 3)
        assert store.backend.batch_get(keys, frames, deadline=soon()) == [HIT] * 3
        delete(store, keys)
        assert store.backend.batch_set(keys, frames, parent=None, deadline=soon()) == [STORED] * 3
        assert load(store, keys) == [HIT] * 3

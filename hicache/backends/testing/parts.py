"""Contract tests of pages in foreign memory: their objects are those of frames, and read back into either."""

from __future__ import annotations

import pytest

from ...errors import InvalidInput
from ...frame import HEADER_BYTES, FrameCodec, PageBuffer, PageView
from .fixtures import ContractFixtures
from .forms import FORM_CODECS
from .pages import (
    CORRUPT,
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    STORED,
    OpenStore,
    Store,
    empty_frames,
    full_frames,
    holds,
    in_parts,
    load,
    make_keys,
    soon,
    store_chain,
)

_CODECS = {
    "plain": FrameCodec(NAMESPACE, PAYLOAD_BYTES), "gmac": FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[b"k" * 32]),
    **FORM_CODECS,
}  # fmt: skip


def _views(codec: FrameCodec, keys: list[bytes]) -> list[PageView]:
    return [in_parts(codec, frame) for frame in full_frames(codec, keys)]


def _empty_views(codec: FrameCodec, count: int) -> list[PageView]:
    return [in_parts(codec, frame, parts=7) for frame in empty_frames(codec, count)]


class PartsContract(ContractFixtures):
    """A part of `SoleBackendContract`."""

    @pytest.mark.parametrize("form", _CODECS)
    def test_pages_in_parts_and_frames_are_the_same_pages(self, open_store: OpenStore, form: str) -> None:
        codec = _CODECS[form]
        store, keys = open_store(codec), make_keys(6)
        views = _views(codec, keys)
        assert store.backend.batch_set(keys[:3], views[:3], parent=None, deadline=soon()) == [STORED] * 3
        assert all(holds(codec, key, view) for key, view in zip(keys, views, strict=True)), "storing changed a page"
        assert store_chain(store, keys[3:], keys[2]) == [STORED] * 3
        assert load(store, keys) == [HIT] * 6
        read = _empty_views(codec, 6)
        assert store.backend.batch_get(keys, read, deadline=soon()) == [HIT] * 6
        assert all(holds(codec, key, view) for key, view in zip(keys, read, strict=True))
        assert all(codec.is_sealed(key, view) for key, view in zip(keys, read, strict=True))
        assert store.backend.batch_set(keys, read, parent=None, deadline=soon()) == [PRESENT] * 6
        store.backend.close()

    def test_a_page_in_parts_is_stored_as_its_frame_is(self, store: Store) -> None:
        codec, keys = store.backend.codec, make_keys(2)
        store.backend.batch_set(keys, _views(codec, keys), parent=None, deadline=soon())
        in_store = [store.read(key) for key in keys]
        store.backend.delete(keys, deadline=soon())
        store_chain(store, keys)
        assert [store.read(key) for key in keys] == in_store

    def test_a_batch_may_mix_frames_and_pages_in_parts(self, store: Store) -> None:
        codec, keys = store.backend.codec, make_keys(4)
        frames, views = full_frames(codec, keys), _views(codec, keys)
        pages: list[PageBuffer] = [frames[0], views[1], frames[2], views[3]]
        assert store.backend.batch_set(keys, pages, parent=None, deadline=soon()) == [STORED] * 4
        frames, views = empty_frames(codec, 4), _empty_views(codec, 4)
        mixed: list[PageBuffer] = [views[0], frames[1], views[2], frames[3]]
        assert store.backend.batch_get(keys, mixed, deadline=soon()) == [HIT] * 4
        assert all(holds(codec, key, page) for key, page in zip(keys, mixed, strict=True))

    @pytest.mark.parametrize("where", ["header", "first part", "last part", "length"])
    def test_damage_to_a_page_that_is_read_into_parts_is_found_and_removed(self, store: Store, where: str) -> None:
        codec, keys = store.backend.codec, make_keys(3)
        store_chain(store, keys)
        raw = bytearray(store.read(keys[1]) or b"")
        if where == "length":
            raw += bytes(4096)
        else:
            raw[{"header": 60, "first part": HEADER_BYTES, "last part": HEADER_BYTES + PAYLOAD_BYTES - 1}[where]] ^= 1
        store.write(keys[1], bytes(raw))
        read = _empty_views(codec, 3)
        assert store.backend.batch_get(keys, read, deadline=soon()) == [HIT, CORRUPT, HIT]
        assert holds(codec, keys[0], read[0]) and holds(codec, keys[2], read[2])
        assert store.read(keys[1]) is None
        assert load(store, keys) == [HIT, MISS, HIT]

    def test_pages_in_parts_of_a_wrong_length_are_refused(self, store: Store) -> None:
        codec, keys = store.backend.codec, make_keys(1)
        (good,) = _views(codec, keys)
        for bad in (
            PageView(good.header[1:], good.parts), PageView(good.header, good.parts[1:]),
            PageView(good.header, [*good.parts, memoryview(bytearray(1))]),
            PageView(good.header, [memoryview(bytes(PAYLOAD_BYTES))]),
        ):  # fmt: skip
            with pytest.raises(InvalidInput):
                store.backend.batch_set(keys, [bad], parent=None, deadline=soon())
            with pytest.raises(InvalidInput):
                store.backend.batch_get(keys, [bad], deadline=soon())
        assert store.backend.usage().pages == 0

    def test_single_pages_can_be_asked_for(self, store: Store) -> None:
        keys = make_keys(5)
        store_chain(store, [keys[0], keys[3]])
        asked = [keys[4], keys[3], keys[1], keys[0], keys[3]]
        assert store.backend.batch_has(asked, deadline=soon()) == [False, True, False, True, True]
        assert store.backend.batch_has([], deadline=soon()) == []
        assert store.backend.batch_has(asked, deadline=soon(-1)) == [False] * 5
        with pytest.raises(InvalidInput):
            store.backend.batch_has([b"short"], deadline=soon())

    def test_clear_removes_all_pages_of_one_namespace(self, open_store: OpenStore) -> None:
        ours = open_store(FrameCodec(NAMESPACE, PAYLOAD_BYTES))
        theirs = open_store(FrameCodec(bytes(31) + b"\1", PAYLOAD_BYTES))
        keys = make_keys(7)
        store_chain(ours, keys)
        store_chain(theirs, keys[:4])
        assert ours.backend.clear(deadline=soon(-1)) == 0
        assert ours.backend.clear(deadline=soon()) == 7
        assert (load(ours, keys), load(theirs, keys)) == ([MISS] * 7, [HIT] * 4 + [MISS] * 3)
        assert ours.backend.clear(deadline=soon()) == 0
        assert store_chain(ours, keys) == [STORED] * 7
        ours.backend.close()
        assert ours.backend.batch_has(keys, deadline=soon()) == [False] * 7
        assert ours.backend.clear(deadline=soon()) == 0
        theirs.backend.close()

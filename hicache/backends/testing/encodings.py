"""Contract tests of encoded pages: compressed, encrypted or both, under changing keys, and from and into memory in
several parts."""

from __future__ import annotations

import hashlib

import pytest

from ...frame import (
    HEADER_BYTES,
    Compression,
    Damage,
    FrameCodec,
    FrameHeader,
    PageBuffer,
    TagStream,
    frame_bytes,
    header_of,
)
from .pages import (
    CORRUPT,
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    STORED,
    ContractFixtures,
    OpenStore,
    Subject,
    delete,
    empty_views,
    full_frames,
    full_views,
    holds,
    load,
    make_keys,
    sealed,
    soon,
    store_chain,
)

_OLD_KEY, _NEW_KEY = b"o" * 32, b"n" * 32
_PACKED = {
    "zstd": FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=Compression()),
    "zstd+gmac": FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[_NEW_KEY], compression=Compression()),
    "gcm": FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[_NEW_KEY]),
    "zstd+gcm": FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[_NEW_KEY], compression=Compression()),
}
_PLAIN = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
_CODECS = {"plain": _PLAIN, "gmac": FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[_NEW_KEY]), **_PACKED}


class _WithoutZstd(FrameCodec):
    """A codec as in an installation without the extra `compression`."""

    def accept(
        self, key: bytes, page: PageBuffer, stored_bytes: int, arrived: TagStream | None = None
    ) -> Damage | None:
        header = FrameHeader.parse(header_of(page))
        damage = super().accept(key, page, stored_bytes, arrived)
        return Damage.NO_ZSTD if damage is None and header is not None and header.encoding else damage


class EncodingsContract(ContractFixtures):
    """A part of `StoreContract`. Needs the extra `compression`."""

    @pytest.mark.parametrize("name", _CODECS)
    def test_the_stored_object_is_the_sealed_page(self, open_store: OpenStore, name: str) -> None:
        codec = _CODECS[name]
        store, keys = open_store(codec), make_keys(5)
        frames = full_frames(codec, keys)
        before = [bytes(frame) for frame in frames]
        parent = hashlib.sha256(b"parent").digest()
        assert store.backend.batch_set(keys, frames, parent=parent, deadline=soon()) == [STORED] * 5
        if name in _PACKED:
            assert [bytes(frame) for frame in frames] == before, "encoding a page for storage changed its frame"
        for key, frame, above in zip(keys, frames, [parent, *keys], strict=False):
            raw = store.read(key)
            assert raw is not None
            header = FrameHeader.parse(raw)
            assert header is not None and header.parent_key == above
            assert (raw == frame) is (name not in _PACKED)
            assert len(raw) == frame_bytes(header.stored_bytes)
            assert (len(raw) < codec.frame_bytes) is ("zstd" in name)
            assert codec.check(key, memoryview(raw)) is None
        assert load(store, keys) == [HIT] * 5
        assert store_chain(store, keys) == [PRESENT] * 5
        store.backend.close()

    @pytest.mark.parametrize("name", ["plain", *_PACKED])
    def test_usage_counts_the_stored_bytes(self, open_store: OpenStore, name: str) -> None:
        store, keys = open_store(_CODECS[name]), make_keys(4)
        assert (store.backend.usage().pages, store.backend.usage().bytes) == (0, 0)
        store_chain(store, keys)
        store_chain(store, keys)
        lengths = [len(store.read(key) or b"") for key in keys]
        assert (store.backend.usage().pages, store.backend.usage().bytes) == (4, sum(lengths))
        delete(store, keys[3:])
        assert (store.backend.usage().pages, store.backend.usage().bytes) == (3, sum(lengths[:3]))
        store.backend.close()

    @pytest.mark.parametrize("name", _PACKED)
    def test_damage_to_an_encoded_page_is_found_and_removed(self, open_store: OpenStore, name: str) -> None:
        store, keys = open_store(_PACKED[name]), make_keys(3)
        store_chain(store, keys)
        offsets = {"tag": 10, "nonce": 30, "form": 39, "key id": 41, "key": 60, "stored length": 152, "label": 170}
        for number, change in enumerate((*offsets, "payload start", "payload end", "cut", "grown", "another"), 1):
            raw = bytearray(store.read(keys[1]) or b"")
            header = FrameHeader.parse(bytes(raw))
            assert header is not None
            if change == "another":
                raw = bytearray(store.read(keys[2]) or b"")
            elif change == "grown":
                raw += bytes(4096)
            elif change == "cut":
                raw = raw[: max(len(raw) - 4096, HEADER_BYTES + 50)]  # not every store accepts an empty object
            else:
                end = HEADER_BYTES + header.stored_bytes - 1
                raw[offsets.get(change, HEADER_BYTES if change == "payload start" else end)] ^= 0x10
            store.write(keys[1], bytes(raw))
            assert load(store, keys) == [HIT, CORRUPT, HIT], change
            assert sum(store.backend.statistics().corrupt.values()) == number, change
            assert store.read(keys[1]) is None, change
            assert store_chain(store, keys) == [PRESENT, STORED, PRESENT], change
        assert load(store, keys) == [HIT] * 3
        store.backend.close()

    def test_one_store_holds_compressed_and_plain_pages(self, store: Subject) -> None:
        keys = make_keys(4)
        store_chain(store, keys)
        for key, packed in zip(keys[2:], sealed(_PACKED["zstd"], keys[2:], keys[1]), strict=True):
            store.write(key, packed)
        assert load(store, keys) == [HIT] * 4

    def test_a_page_that_only_this_reader_cannot_use_is_a_miss_and_stays(self, open_store: OpenStore) -> None:
        keys = make_keys(3)
        store = open_store(_WithoutZstd(NAMESPACE, PAYLOAD_BYTES))
        store_chain(store, keys)
        (packed,) = sealed(_PACKED["zstd"], keys[1:2], keys[0])
        store.write(keys[1], packed)
        assert load(store, keys) == [HIT, MISS, HIT]
        assert sum(store.backend.statistics().corrupt.values()) == 0
        assert any(Damage.NO_ZSTD in name for name in store.backend.statistics().errors)
        assert store.read(keys[1]) == packed
        store.backend.close()

    @pytest.mark.parametrize("kind", ["mac_keys", "encryption_keys"])
    def test_only_pages_made_with_one_of_its_keys_are_accepted(self, open_store: OpenStore, kind: str) -> None:
        """A reader of encrypted pages rejects a page with a MAC of the same key that is not encrypted."""

        def codec(*keys: bytes) -> FrameCodec:
            if kind == "mac_keys":
                return FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=keys)
            return FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=keys)

        store, keys = open_store(codec(_NEW_KEY, _OLD_KEY)), make_keys(5)
        store_chain(store, keys)
        for key, other in zip(keys, (codec(_OLD_KEY), codec(b"x" * 32), _PLAIN, _PACKED["zstd+gmac"]), strict=False):
            store.write(key, sealed(other, [key])[0])
        assert load(store, keys) == [HIT, CORRUPT, CORRUPT, HIT if kind == "mac_keys" else CORRUPT, HIT]
        assert sum(store.backend.statistics().corrupt.values()) == (2 if kind == "mac_keys" else 3)
        store.backend.close()

    @pytest.mark.parametrize("name", _CODECS)
    def test_pages_in_parts_and_frames_are_the_same_pages(self, open_store: OpenStore, name: str) -> None:
        codec = _CODECS[name]
        store, keys = open_store(codec), make_keys(6)
        views = full_views(codec, keys)
        assert store.backend.batch_set(keys[:3], views[:3], parent=None, deadline=soon()) == [STORED] * 3
        assert all(holds(codec, key, view) for key, view in zip(keys, views, strict=True)), "storing changed a page"
        assert store_chain(store, keys[3:], keys[2]) == [STORED] * 3
        assert load(store, keys) == [HIT] * 6
        read = empty_views(codec, 6)
        assert store.backend.batch_get(keys, read, deadline=soon()) == [HIT] * 6
        assert all(holds(codec, key, view) for key, view in zip(keys, read, strict=True))
        assert all(codec.is_sealed(key, view) for key, view in zip(keys, read, strict=True))
        assert store.backend.batch_set(keys, read, parent=None, deadline=soon()) == [PRESENT] * 6
        store.backend.close()

    @pytest.mark.parametrize("where", ["header", "first part", "last part", "length"])
    def test_damage_to_a_page_read_into_parts_is_found_and_removed(self, store: Subject, where: str) -> None:
        codec, keys = store.backend.codec, make_keys(3)
        store_chain(store, keys)
        raw = bytearray(store.read(keys[1]) or b"")
        if where == "length":
            raw += bytes(4096)
        else:
            raw[{"header": 60, "first part": HEADER_BYTES, "last part": HEADER_BYTES + PAYLOAD_BYTES - 1}[where]] ^= 1
        store.write(keys[1], bytes(raw))
        read = empty_views(codec, 3)
        assert store.backend.batch_get(keys, read, deadline=soon()) == [HIT, CORRUPT, HIT]
        assert holds(codec, keys[0], read[0]) and holds(codec, keys[2], read[2])
        assert store.read(keys[1]) is None
        assert load(store, keys) == [HIT, MISS, HIT]

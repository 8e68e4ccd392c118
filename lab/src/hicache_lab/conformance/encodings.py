"""Contract tests of encoded pages: compressed, encrypted or both, and from and into memory in several parts."""

from __future__ import annotations

import hashlib

import pytest

from hicache.frame import (
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

_KEY = b"n" * 32
_PACKED = {
    "zstd": FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=Compression()),
    "zstd+gmac": FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[_KEY], compression=Compression()),
    "gcm": FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[_KEY]),
    "zstd+gcm": FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[_KEY], compression=Compression()),
}
_CODECS = {
    "plain": FrameCodec(NAMESPACE, PAYLOAD_BYTES), "gmac": FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[_KEY]),
    **_PACKED,
}


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

    def test_damage_to_an_encoded_page_is_found_and_removed(self, open_store: OpenStore) -> None:
        """The tests of the codec damage each byte of each encoding."""
        store, keys = open_store(_PACKED["zstd+gcm"]), make_keys(3)
        store_chain(store, keys)
        for number, change in enumerate(("flipped", "cut", "grown", "another"), 1):
            raw = store.read(keys[1]) or b""
            flipped = raw[:HEADER_BYTES] + bytes([raw[HEADER_BYTES] ^ 0x10]) + raw[HEADER_BYTES + 1 :]
            wrong = {"flipped": flipped, "cut": raw[:-4096], "grown": raw + bytes(4096), "another": store.read(keys[2])}
            store.write(keys[1], wrong[change] or raw[: HEADER_BYTES + 50])  # not every store accepts an empty object
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

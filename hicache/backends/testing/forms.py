"""Contract tests of stored forms: pages that are compressed, encrypted or both, and keys that change."""

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
from .fixtures import ContractFixtures
from .pages import (
    CORRUPT,
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    STORED,
    OpenStore,
    full_frames,
    load,
    make_keys,
    soon,
    store_chain,
)

_OLD_KEY, _NEW_KEY = b"o" * 32, b"n" * 32
_ZSTD = Compression()
FORM_CODECS = {
    "zstd": FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=_ZSTD),
    "zstd+gmac": FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[_NEW_KEY], compression=_ZSTD),
    "gcm": FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[_NEW_KEY]),
    "zstd+gcm": FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[_NEW_KEY], compression=_ZSTD),
}


class _WithoutZstd(FrameCodec):
    """A codec as it is where the extra `compression` is missing."""

    def accept(
        self, key: bytes, page: PageBuffer, stored_bytes: int, arrived: TagStream | None = None
    ) -> Damage | None:
        header = FrameHeader.parse(header_of(page))
        damage = super().accept(key, page, stored_bytes, arrived)
        return Damage.NO_ZSTD if damage is None and header is not None and header.form else damage


class FormsContract(ContractFixtures):
    """A part of `SoleBackendContract`. Needs the extra `compression`."""

    @pytest.mark.parametrize("form", FORM_CODECS)
    def test_the_stored_object_is_the_sealed_form(self, open_store: OpenStore, form: str) -> None:
        codec = FORM_CODECS[form]
        store = open_store(codec)
        keys = make_keys(5)
        frames = full_frames(codec, keys)
        before = [bytes(frame) for frame in frames]
        parent = hashlib.sha256(b"parent").digest()
        assert store.backend.batch_set(keys, frames, parent=parent, deadline=soon()) == [STORED] * 5
        assert [bytes(frame) for frame in frames] == before, "a frame that is stored in another form stays plain"
        for key, frame, above in zip(keys, before, [parent, *keys], strict=False):
            raw = store.read(key)
            assert raw is not None
            header = FrameHeader.parse(raw)
            assert header is not None and header.parent_key == above
            assert len(raw) == frame_bytes(header.stored_bytes)
            assert (len(raw) < codec.frame_bytes) is ("zstd" in form)
            assert raw != frame and codec.check(key, memoryview(raw)) is None
        assert load(store, keys) == [HIT] * 5
        assert store_chain(store, keys) == [PRESENT] * 5
        store.backend.close()

    @pytest.mark.parametrize("form", FORM_CODECS)
    def test_usage_follows_the_bytes_that_are_really_stored(self, open_store: OpenStore, form: str) -> None:
        store = open_store(FORM_CODECS[form])
        keys = make_keys(4)
        store_chain(store, keys)
        lengths = [len(store.read(key) or b"") for key in keys]
        usage = store.backend.usage()
        assert (usage.pages, usage.bytes) == (4, sum(lengths))
        store.backend.delete(keys[3:], deadline=soon())
        usage = store.backend.usage()
        assert (usage.pages, usage.bytes) == (3, sum(lengths[:3]))
        store.backend.close()

    @pytest.mark.parametrize("form", FORM_CODECS)
    def test_damage_to_a_stored_form_is_found_and_removed(self, open_store: OpenStore, form: str) -> None:
        store = open_store(FORM_CODECS[form])
        keys = make_keys(3)
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
                raw = raw[: max(len(raw) - 4096, HEADER_BYTES + 50)]  # not every store keeps an object without bytes
            else:
                end = HEADER_BYTES + header.stored_bytes - 1
                raw[offsets.get(change, HEADER_BYTES if change == "payload start" else end)] ^= 0x10
            store.write(keys[1], bytes(raw))
            assert load(store, keys) == [HIT, CORRUPT, HIT], change
            assert sum(store.backend.statistics().corrupt.values()) == number, change
            assert store.read(keys[1]) is None, change
            assert load(store, keys) == [HIT, MISS, HIT], change
            assert store_chain(store, keys) == [PRESENT, STORED, PRESENT], change
        assert load(store, keys) == [HIT] * 3
        store.backend.close()

    def test_compressed_and_plain_pages_live_in_one_store(self, open_store: OpenStore) -> None:
        keys = make_keys(4)
        plain, packed = open_store(FrameCodec(NAMESPACE, PAYLOAD_BYTES)), FORM_CODECS["zstd"]
        store_chain(plain, keys[:2])
        for number, key in enumerate(keys[2:], 2):
            (frame,) = full_frames(packed, [key])
            store_chain(plain, [key])
            plain.write(key, bytes(packed.seal(key, frame, parent=keys[number - 1])))
        assert load(plain, keys) == [HIT] * 4
        plain.backend.close()

    def test_a_page_that_only_this_reader_cannot_use_is_a_miss_and_stays(self, open_store: OpenStore) -> None:
        keys = make_keys(3)
        store = open_store(_WithoutZstd(NAMESPACE, PAYLOAD_BYTES))
        store_chain(store, keys)
        (frame,) = full_frames(FORM_CODECS["zstd"], [keys[1]])
        packed = bytes(FORM_CODECS["zstd"].seal(keys[1], frame, parent=keys[0]))
        store.write(keys[1], packed)
        assert load(store, keys) == [HIT, MISS, HIT]
        assert sum(store.backend.statistics().corrupt.values()) == 0
        assert any(Damage.NO_ZSTD in name for name in store.backend.statistics().errors)
        assert store.read(keys[1]) == packed
        store.backend.close()

    def test_only_encrypted_pages_are_believed_where_there_is_an_encryption_key(self, open_store: OpenStore) -> None:
        codec = FORM_CODECS["gcm"]
        store = open_store(codec)
        keys = make_keys(5)
        store_chain(store, keys)
        others = (
            FrameCodec(NAMESPACE, PAYLOAD_BYTES),
            FORM_CODECS["zstd+gmac"],
            FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[_OLD_KEY]),
        )
        for key, other in zip(keys, others, strict=False):
            (frame,) = full_frames(other, [key])
            store.write(key, bytes(other.seal(key, frame)))
        assert load(store, keys) == [CORRUPT] * 3 + [HIT] * 2
        assert sum(store.backend.statistics().corrupt.values()) == 3
        store.backend.close()

    @pytest.mark.parametrize("kind", ["mac_keys", "encryption_keys"])
    def test_a_second_key_is_believed_while_keys_are_changed(self, open_store: OpenStore, kind: str) -> None:
        def codec(*keys: bytes) -> FrameCodec:
            if kind == "mac_keys":
                return FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=keys)
            return FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=keys)

        store = open_store(codec(_NEW_KEY, _OLD_KEY))
        keys = make_keys(4)
        store_chain(store, keys)
        for key, other in ((keys[1], codec(_OLD_KEY)), (keys[2], codec(b"x" * 32))):
            (frame,) = full_frames(other, [key])
            store.write(key, bytes(other.seal(key, frame)))
        assert load(store, keys) == [HIT, HIT, CORRUPT, HIT]
        store.backend.close()

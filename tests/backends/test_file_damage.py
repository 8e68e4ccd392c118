"""Stored damage of every kind is found, and nothing sound is taken for damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.testing import (
    CORRUPT,
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    STORED,
    empty_frames,
    full_frames,
    load,
    make_keys,
    soon,
    store_chain,
)
from hicache.frame import HEADER_BYTES, Compression, FrameCodec, FrameHeader, TagKind, frame_bytes
from hicache.geometry import KVGeometry, KVLayout, PageShape, Piece
from hicache.keys import Namespace
from tests.seeds import rng, seeds

from ._files import CODEC, FORMS, MAC_KEY, PAGE, open_file

pytestmark = pytest.mark.long

CODECS = {**FORMS, "gmac": FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[MAC_KEY])}
# Of each form.
CLEAN_READS = 20_000
PAYLOAD_FLIPS = 400
# The tag covers every byte from its nonce to the end of the payload, and is compared itself.
HEADER_BITS = HEADER_BYTES * 8


@pytest.mark.parametrize("name", CODECS)
def test_every_flipped_bit_of_the_header_is_found(tmp_path: Path, name: str) -> None:
    codec = CODECS[name]
    store = open_file(tmp_path / "s", codec)
    (key,) = make_keys(1)
    store_chain(store, [key])
    good = store.read(key) or b""
    for bit in range(HEADER_BITS):
        raw = bytearray(good)
        raw[bit // 8] ^= 1 << bit % 8
        store.write(key, bytes(raw))
        assert load(store, [key]) == [CORRUPT], f"bit {bit}"
        assert store.read(key) is None
    assert sum(store.backend.statistics().corrupt.values()) == HEADER_BITS
    store.write(key, good)
    assert load(store, [key]) == [HIT]
    store.backend.close()


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("name", CODECS)
def test_random_flips_in_the_payload_are_found(tmp_path: Path, name: str, seed: int) -> None:
    dice = rng(seed)
    store = open_file(tmp_path / "s", CODECS[name])
    keys = make_keys(8)
    store_chain(store, keys)
    good = {key: store.read(key) or b"" for key in keys}
    length = min(header.stored_bytes for raw in good.values() if (header := FrameHeader.parse(raw)) is not None)
    for _ in range(PAYLOAD_FLIPS // 8):
        for key in keys:
            raw = bytearray(good[key])
            for place in dice.sample(range(length), dice.choice((1, 1, 2, 50))):
                raw[HEADER_BYTES + place] ^= 1 << dice.randrange(8)
            store.write(key, bytes(raw))
        assert load(store, keys) == [CORRUPT] * 8
    store.backend.close()


@pytest.mark.parametrize("name", CODECS)
def test_a_page_that_is_read_in_pieces_is_checked_whole(tmp_path: Path, name: str) -> None:
    """Large pages are hashed piece by piece while they are read; a flip on either side of an edge is found."""
    mib = 1 << 20
    codec = large_codec(name, 3 * mib + 76)
    store = open_file(tmp_path / "s", codec)
    (key,) = make_keys(1)
    store_chain(store, [key])
    good = store.read(key) or b""
    assert load(store, [key]) == [HIT]
    header = FrameHeader.parse(good)
    assert header is not None and len(good) == frame_bytes(header.stored_bytes)
    end = HEADER_BYTES + header.stored_bytes
    for place in (23, 24, mib - 1, mib, *(edge for edge in (2 * mib - 1, 2 * mib, 3 * mib) if edge < end), end - 1):
        raw = bytearray(good)
        raw[place] ^= 0x40
        store.write(key, bytes(raw))
        assert load(store, [key]) == [CORRUPT], f"byte {place}"
    store.write(key, good)
    assert load(store, [key]) == [HIT]
    store.backend.close()


def test_without_a_tag_a_payload_flip_is_not_found(tmp_path: Path) -> None:
    """The control: with the tag off the same damage is served."""
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, tag=TagKind.NONE)
    store = open_file(tmp_path / "s", codec)
    (key,) = make_keys(1)
    store_chain(store, [key])
    raw = bytearray(store.read(key) or b"")
    raw[-4000] ^= 1
    store.write(key, bytes(raw))
    assert store.backend.batch_get([key], empty_frames(codec, 1), deadline=soon()) == [HIT]
    store.backend.close()


def large_codec(name: str, payload_bytes: int) -> FrameCodec:
    """As CODECS[name], for another length."""
    compression = Compression() if "zstd" in name else None
    if "gcm" in name:
        return FrameCodec(NAMESPACE, payload_bytes, encryption_keys=[MAC_KEY], compression=compression)
    return FrameCodec(
        NAMESPACE, payload_bytes, mac_keys=[MAC_KEY] if name == "gmac" else [], compression=compression
    )


@pytest.mark.parametrize("length", [0, 1, 35, 127, 128, 255, 256, 257, 4095, 4096, PAGE - 1, PAGE + 1, PAGE * 2])
def test_a_file_of_another_length_is_corrupt(tmp_path: Path, length: int) -> None:
    store = open_file(tmp_path / "s")
    keys = make_keys(2)
    store_chain(store, keys)
    raw = store.read(keys[0]) or b""
    store.write(keys[0], (raw + raw)[:length])
    assert load(store, keys) == [CORRUPT, HIT]
    assert store.backend.statistics().corrupt == {"size": 1}
    store.backend.close()


@pytest.mark.parametrize("name", CODECS)
def test_pages_swapped_with_each_other_are_corrupt(tmp_path: Path, name: str) -> None:
    store = open_file(tmp_path / "s", CODECS[name])
    keys = make_keys(6)
    store_chain(store, keys)
    raw = [store.read(key) or b"" for key in keys]
    for key, data in zip(keys, raw[1:] + raw[:1], strict=True):
        store.write(key, data)
    assert load(store, keys) == [CORRUPT] * 6
    assert store.backend.statistics().corrupt == {"page_key": 6}
    store.backend.close()


GEOMETRY = KVGeometry(layers=2, heads=2, head_dim=16, page_size=8)
HOME = Namespace("model-a", GEOMETRY, weights_epoch=3, tp_rank=0, tp_size=2)
STRANGERS = {
    "rank": Namespace("model-a", GEOMETRY, weights_epoch=3, tp_rank=1, tp_size=2),
    "size": Namespace("model-a", GEOMETRY, weights_epoch=3, tp_rank=0, tp_size=4),
    "stage": Namespace("model-a", GEOMETRY, weights_epoch=3, tp_size=2, pp_rank=1, pp_size=2),
    "epoch": Namespace("model-a", GEOMETRY, weights_epoch=4, tp_size=2),
    "model": Namespace("model-b", GEOMETRY, weights_epoch=3, tp_size=2),
    "scales": Namespace("model-a", GEOMETRY, weights_epoch=3, kv_scales="other", tp_size=2),
    "layout": Namespace("model-a", KVGeometry(4, 2, 16, 8, layout=KVLayout.MLA), weights_epoch=3, tp_size=2),
    "dtype": Namespace("model-a", KVGeometry(2, 2, 16, 8, dtype="float16"), weights_epoch=3, tp_size=2),
    "heads": Namespace("model-a", KVGeometry(2, 4, 8, 8), weights_epoch=3, tp_size=2),
    "shared": replace(HOME, ranks_share_pages=True),
    "order": replace(HOME, element_order="heads_tokens_dim"),
    "engine": replace(HOME, engine_layout="vllm/HNC/bf16/block16"),
    "quantisation": replace(HOME, quantisation="fp8_e4m3/per-head"),
    "hash": replace(HOME, key_hash="sha256_cbor/seed 0"),
    "context": replace(HOME, cp_size=2),
    "context rank": replace(HOME, cp_rank=1, cp_size=2),
    "decode context": replace(HOME, dcp_size=2),
    "decode context rank": replace(HOME, dcp_rank=1, dcp_size=2),
    "pieces": replace(HOME, geometry=GEOMETRY.shape),
    "one piece": replace(HOME, geometry=PageShape(8, (Piece("kv", GEOMETRY.payload_bytes),))),
}


@pytest.mark.parametrize("options", [
    {}, {"compression": Compression()}, {"encryption_keys": [MAC_KEY], "compression": Compression()},
], ids=["plain", "zstd", "zstd+gcm"])  # fmt: skip
@pytest.mark.parametrize("name", STRANGERS)
def test_a_page_of_another_engine_is_not_seen_and_not_believed(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    home = FrameCodec(HOME.digest, GEOMETRY.payload_bytes, **options)
    stranger = FrameCodec(STRANGERS[name].digest, GEOMETRY.payload_bytes, **options)
    keys = make_keys(3)
    ours, theirs = open_file(tmp_path / "s", home), open_file(tmp_path / "s", stranger)
    store_chain(theirs, keys)
    assert ours.backend.batch_exists(keys, deadline=soon()) == 0
    assert load(ours, keys) == [MISS] * 3
    store_chain(ours, keys)
    for key in keys:
        ours.write(key, theirs.read(key) or b"")
    assert load(ours, keys) == [CORRUPT] * 3
    assert ours.backend.statistics().corrupt == {"namespace": 3}
    assert load(theirs, keys) == [HIT] * 3
    ours.backend.close()
    theirs.backend.close()


@pytest.mark.parametrize("name", STRANGERS)
def test_a_page_of_an_engine_with_an_equal_namespace_is_found(tmp_path: Path, name: str) -> None:
    """Control of the test before: the field keeps engines apart where it differs, and not where it is equal."""
    keys = make_keys(3)
    for expected in (STORED, PRESENT):
        codec = FrameCodec(replace(STRANGERS[name]).digest, GEOMETRY.payload_bytes)
        store = open_file(tmp_path / "s", codec)
        assert store_chain(store, keys) == [expected] * 3
        assert load(store, keys) == [HIT] * 3
        store.backend.close()


def test_strangers_are_strangers_to_each_other_too() -> None:
    assert len({namespace.digest for namespace in (HOME, *STRANGERS.values())}) == 1 + len(STRANGERS)


def test_a_page_forged_without_the_key_is_refused(tmp_path: Path) -> None:
    """Who can write the directory can make a frame with a right checksum, but not one with a right MAC."""
    (key,) = make_keys(1)
    (forged,) = full_frames(CODEC, [key])
    CODEC.seal(key, forged)
    for name, expected in (("gmac", CORRUPT), ("gcm", CORRUPT), ("plain", HIT)):
        store = open_file(tmp_path / name, CODECS[name])
        store_chain(store, [key])
        store.write(key, bytes(forged))
        assert load(store, [key]) == [expected]
        store.backend.close()


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("name", CODECS)
def test_many_clean_reads_raise_no_alarm(tmp_path: Path, name: str, seed: int) -> None:
    codec = large_codec(name, 1000 if "zstd" not in name else 5000)
    store = open_file(tmp_path / "s", codec)
    keys = make_keys(500, f"seed {seed}")
    assert store_chain(store, keys) == [STORED] * 500
    frames = empty_frames(codec, 500)
    for _ in range(CLEAN_READS // 500):
        assert set(store.backend.batch_get(keys, frames, deadline=soon())) == {HIT}
    found = store.backend.statistics()
    assert (found.gets[HIT], dict(found.corrupt), dict(found.errors)) == (CLEAN_READS, {}, {})
    store.backend.close()

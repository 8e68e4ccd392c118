"""Stored damage of every kind is detected, and no sound page is reported as damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.backends.testing import (
    CORRUPT,
    HIT,
    NAMESPACE,
    PAYLOAD_BYTES,
    STORED,
    empty_frames,
    load,
    make_keys,
    soon,
    store_chain,
)
from hicache.frame import HEADER_BYTES, Compression, FrameCodec, FrameHeader, frame_bytes
from tests.seeds import seeds

from ._files import FORMS, MAC_KEY, Faulty, open_file

pytestmark = pytest.mark.long

CODECS = {**FORMS, "gmac": FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[MAC_KEY])}
# For each encoding.
CLEAN_READS = 20_000
PAYLOAD_FLIPS = 400
# The tag covers every byte from its nonce to the end of the payload, and is compared itself.
HEADER_BITS = HEADER_BYTES * 8


@pytest.mark.parametrize("name", CODECS)
def test_a_page_read_in_pieces_is_checked_as_a_whole(tmp_path: Path, name: str) -> None:
    """Large pages are hashed piece by piece while they are read; a flip on either side of an edge is detected."""
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
    edges = (mib, mib + 4096, 2 * mib, 2 * mib + 8192, 3 * mib)  # the longest page is read in three equal pieces
    for place in (23, 24, *(edge + side for edge in edges for side in (-1, 0) if edge < end), end - 1):
        raw = bytearray(good)
        raw[place] ^= 0x40
        store.write(key, bytes(raw))
        assert load(store, [key]) == [CORRUPT], f"byte {place}"
    store.write(key, good)
    assert load(store, [key]) == [HIT]


def test_a_large_page_is_read_in_equal_pieces(tmp_path: Path) -> None:
    """A header must not cost an extra call if the payload is a multiple of the piece size."""
    lengths: list[int] = []
    system = Faulty(lambda name, _, args: lengths.append(sum(map(len, args[1]))) if name == "preadv" else None)
    store = open_file(tmp_path / "s", large_codec("gmac", 2 << 20), system=system)
    plain = open_file(tmp_path / "plain", FrameCodec(NAMESPACE, 2 << 20), system=system)
    for where in (store, plain):
        store_chain(where, keys := make_keys(1))
        lengths.clear()
        assert load(where, keys) == [HIT]
        assert lengths == ([(2 << 20) + 4096] if where is store else [(1 << 20) + 4096, 1 << 20])


def large_codec(name: str, payload_bytes: int) -> FrameCodec:
    """Return CODECS[name] for another payload length."""
    compression = Compression() if "zstd" in name else None
    if "gcm" in name:
        return FrameCodec(NAMESPACE, payload_bytes, encryption_keys=[MAC_KEY], compression=compression)
    return FrameCodec(
        NAMESPACE, payload_bytes, mac_keys=[MAC_KEY] if name == "gmac" else [], compression=compression
    )


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

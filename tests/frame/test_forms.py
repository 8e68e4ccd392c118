"""Encodings: compressed and encrypted pages are read back unchanged, or rejected."""

from __future__ import annotations

import gc
import json
import struct
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from hicache.frame import (
    FRAME_ALIGN,
    HEADER_BYTES,
    Compression,
    Damage,
    Encoding,
    FrameCodec,
    FrameHeader,
    PageView,
    TagKind,
    TagStream,
    frame_bytes,
)
from hicache.frame.buffers import IDLE_MAX, BufferPool, fill
from tests.seeds import rng, seeds

from .modes import CIPHER, CODECS, KEY, MAC, NAMESPACE, PAYLOAD, arrived, filled, payload_in, smooth_payload

MODES = pytest.mark.parametrize("name", CODECS)
NOISE = rng(7).randbytes(PAYLOAD)
SMOOTH = smooth_payload()


def stored_page(codec: FrameCodec, payload: bytes = SMOOTH, key: bytes = KEY) -> bytes:
    return bytes(codec.seal(key, filled(codec, payload), parent=b"p" * 32))


def read(codec: FrameCodec, stored: bytes | memoryview) -> bytes:
    """Return the payload of a page, which must be accepted."""
    frame = arrived(codec, stored)
    assert codec.accept(KEY, frame, len(stored)) is None
    return bytes(payload_in(codec, frame))


def in_parts(codec: FrameCodec, frame: memoryview) -> PageView:
    """Return a page in `frame` with its payload in two parts."""
    payload = payload_in(codec, frame)
    return PageView(frame[:HEADER_BYTES], [payload[:1000], payload[1000:]])


def accept(codec: FrameCodec, stored: bytes | bytearray | memoryview, key: bytes = KEY) -> Damage | None:
    return codec.accept(key, arrived(codec, stored), len(stored))


def keys_of(name: str) -> dict[str, Any]:
    """Return the keys of a codec of CODECS."""
    return {"mac_keys": [MAC]} if "gmac" in name else {"encryption_keys": [CIPHER]} if "gcm" in name else {}


# Pages that are read back


@MODES
@pytest.mark.parametrize("payload", [SMOOTH, NOISE, bytes(PAYLOAD)], ids=["smooth", "noise", "zeros"])
def test_a_page_comes_back_byte_for_byte(name: str, payload: bytes) -> None:
    codec = CODECS[name]
    stored = stored_page(codec, payload)
    assert codec.fits(len(stored)) and codec.check(KEY, memoryview(stored)) is None
    frame = arrived(codec, stored)
    assert codec.accept(KEY, frame, len(stored)) is None
    assert payload_in(codec, frame) == payload
    assert codec.is_sealed(KEY, frame)


@MODES
@pytest.mark.parametrize("size", [1, 2, 4096 - HEADER_BYTES, 4097 - HEADER_BYTES, 8192 - HEADER_BYTES, 8193])
def test_pages_of_any_size_come_back(name: str, size: int) -> None:
    codec = FrameCodec(NAMESPACE, size, compression=CODECS[name]._compression, **keys_of(name))
    for payload in (bytes(size), NOISE[:size]):
        assert read(codec, stored_page(codec, payload)) == payload


@pytest.mark.parametrize("name", ["zstd", "zstd+gmac", "zstd+gcm"])
def test_compressible_pages_take_fewer_blocks_and_others_are_stored_plain(name: str) -> None:
    codec = CODECS[name]
    short, long = stored_page(codec, SMOOTH), stored_page(codec, NOISE)
    assert len(short) < codec.frame_bytes and not len(short) % FRAME_ALIGN
    assert len(long) == codec.frame_bytes
    header = FrameHeader.parse(short)
    assert header is not None and header.object_bytes == len(short)
    assert header.encoding == Encoding.ZSTD | Encoding.BYTE_PLANES and header.payload_bytes == PAYLOAD
    assert short[HEADER_BYTES + header.stored_bytes :] == bytes(len(short) - HEADER_BYTES - header.stored_bytes)
    plain = FrameHeader.parse(long)
    assert plain is not None and (plain.encoding, plain.stored_bytes) == (0, PAYLOAD)


def test_a_payload_of_odd_length_is_compressed_without_planes() -> None:
    codec = FrameCodec(NAMESPACE, PAYLOAD - 1, compression=Compression())
    stored = stored_page(codec, bytes(PAYLOAD - 1))
    header = FrameHeader.parse(stored)
    assert header is not None and header.encoding == Encoding.ZSTD
    assert accept(codec, stored) is None


@pytest.mark.parametrize("keys", [{}, {"mac_keys": [MAC]}, {"encryption_keys": [CIPHER]}], ids=["none", "mac", "gcm"])
def test_a_reader_needs_no_configuration_to_read_compressed_pages(keys: dict[str, list[bytes]]) -> None:
    writer = FrameCodec(NAMESPACE, PAYLOAD, compression=Compression(), **keys)  # type: ignore[arg-type]
    reader = FrameCodec(NAMESPACE, PAYLOAD, **keys)  # type: ignore[arg-type]
    for one, other in ((writer, reader), (reader, writer)):
        assert read(other, stored_page(one)) == SMOOTH


# Buffers


def test_a_plain_page_is_stored_from_its_frame_without_a_copy() -> None:
    for name in ("xxh3", "gmac"):
        codec = CODECS[name]
        frame = filled(codec, SMOOTH)
        assert codec.seal(KEY, frame) is frame
    codec = CODECS["zstd"]
    frame = filled(codec, NOISE)
    assert codec.seal(KEY, frame) is frame


@pytest.mark.parametrize("name", ["gcm", "zstd", "zstd+gmac", "zstd+gcm"])
def test_the_frame_stays_plain_while_its_encoding_differs(name: str) -> None:
    codec = CODECS[name]
    frame = filled(codec, SMOOTH)
    before = bytes(frame)
    stored = codec.seal(KEY, frame)
    assert bytes(frame) == before
    assert SMOOTH[:64] not in bytes(stored)


@pytest.mark.parametrize("name", ["gcm", "zstd+gcm"])
def test_nothing_of_the_payload_can_be_read_from_an_encrypted_page(name: str) -> None:
    payload = b"a prompt that nobody else may read; " * (PAYLOAD // 36)
    codec = FrameCodec(NAMESPACE, len(payload), encryption_keys=[CIPHER], compression=CODECS[name]._compression)
    assert b"nobody" not in stored_page(codec, payload)
    assert b"nobody" in stored_page(FrameCodec(NAMESPACE, len(payload)), payload), "the control: plain pages show it"


@pytest.mark.parametrize("name", ["gcm", "zstd", "zstd+gmac", "zstd+gcm"])
def test_a_page_that_was_read_can_be_stored_again_by_any_codec(name: str) -> None:
    """As when pages are copied from one level of a composition to another."""
    codec = CODECS[name]
    stored = stored_page(codec)
    frame = arrived(codec, stored)
    codec.accept(KEY, frame, len(stored))
    header = FrameHeader.parse(frame)
    assert header is not None and (header.tag_kind, header.encoding, header.parent_key) == (TagKind.NONE, 0, b"p" * 32)
    for other in CODECS.values():
        again = other.seal(KEY, memoryview(bytearray(frame)), parent=b"p" * 32)
        assert accept(other, again) is None, "the header of a verified page does not count as a seal"
    assert CODECS["xxh3"].check(KEY, frame) is Damage.TAG_KIND


def test_two_seals_of_a_page_share_no_nonce_and_two_encryptions_no_bytes() -> None:
    for codec in (CODECS["gmac"], CODECS["gcm"]):
        one, other = stored_page(codec), stored_page(codec)
        assert one[24:36] != other[24:36]
    assert sum(a == b for a, b in zip(one[256:13_000], other[256:13_000], strict=True)) < PAYLOAD // 50


def test_encoded_pages_do_not_share_memory_while_they_are_held() -> None:
    codec = CODECS["zstd+gcm"]
    held = [codec.seal(KEY, filled(codec, smooth_payload(seed))) for seed in range(2 * IDLE_MAX)]
    for seed, stored in enumerate(held):
        assert read(codec, stored) == smooth_payload(seed)


def test_threads_seal_and_accept_with_one_codec_at_once() -> None:
    codec = CODECS["zstd+gcm"]
    payloads = [smooth_payload(seed) for seed in range(4)]

    def work(number: int) -> int:
        turns = [payloads[(number + turn) % 4] for turn in range(60)]
        return sum(read(codec, codec.seal(KEY, filled(codec, payload))) != payload for payload in turns)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [0] * 4


def test_a_buffer_is_reused_only_when_no_part_of_it_is_held() -> None:
    pool = BufferPool(8192)
    whole = pool.take()
    part = whole[100:200]
    part[:] = b"x" * 100
    del whole
    other = pool.take()
    other[:] = bytes(8192)
    assert part == b"x" * 100
    address = _address(part) - 100
    assert address % FRAME_ALIGN == 0 and _address(other) != address
    del part
    assert _address(pool.take()) == address


def test_bytes_fill_several_buffers_and_the_rest_stays_free() -> None:
    first, second, last = (memoryview(bytearray(size)) for size in (3, 4, 2))
    rest = fill([first, second, last], b"abcd")
    assert (bytes(first), bytes(second)) == (b"abc", b"d\0\0\0") and [len(one) for one in rest] == [3, 2]


def test_buffers_beyond_the_limit_of_the_pool_are_freed() -> None:
    pool = BufferPool(1 << 20)
    tracemalloc.start()
    held = [pool.take() for _ in range(3 * IDLE_MAX)]
    del held
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < (IDLE_MAX + 1) << 20


def _address(view: memoryview) -> int:
    import numpy as np  # noqa: PLC0415

    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


# Pages that are rejected


@pytest.mark.long
@MODES
def test_the_tag_covers_every_bit_of_header_and_stored_payload(name: str) -> None:
    codec = CODECS[name]
    stored = bytearray(stored_page(codec))
    header = FrameHeader.parse(memoryview(stored))
    assert header is not None
    for position in range(HEADER_BYTES + header.stored_bytes):
        for bit in range(8) if position < HEADER_BYTES else (position % 8,):
            stored[position] ^= 1 << bit
            assert accept(codec, stored) is not None, f"bit {bit} of byte {position}"
            assert codec.check(KEY, memoryview(stored)) is not None, f"bit {bit} of byte {position}"
            stored[position] ^= 1 << bit
    assert accept(codec, stored) is None


@MODES
def test_a_page_with_missing_or_extra_blocks_is_refused(name: str) -> None:
    codec = CODECS[name]
    stored = stored_page(codec)
    for length in range(FRAME_ALIGN, codec.frame_bytes + 1, FRAME_ALIGN):
        if length != len(stored):
            other = stored.ljust(length, b"\0")[:length]
            assert accept(codec, other) is codec.check(KEY, memoryview(other)) is Damage.SIZE
    for length in (0, 1, HEADER_BYTES, FRAME_ALIGN - 1, FRAME_ALIGN + 1, codec.frame_bytes + FRAME_ALIGN):
        assert not codec.fits(length)
        frame = memoryview(bytearray(codec.frame_bytes))
        assert codec.accept(KEY, frame, length) is Damage.SIZE
        assert codec.check(KEY, memoryview(stored.ljust(length, b"\0")[:length])) is Damage.SIZE
        assert codec.accept(KEY, in_parts(codec, frame), length) is Damage.SIZE


@MODES
def test_a_page_is_bound_to_its_key_and_namespace_in_every_encoding(name: str) -> None:
    codec = CODECS[name]
    stored = stored_page(codec)
    assert accept(codec, stored, b"x" * 32) is Damage.PAGE_KEY
    forged = stored[:56] + b"x" * 32 + stored[88:]
    assert accept(codec, forged, b"x" * 32) is Damage.TAG
    for other, damage in (((b"o" * 32, PAYLOAD), Damage.NAMESPACE), ((NAMESPACE, PAYLOAD - 1), Damage.LENGTH)):
        assert FrameCodec(*other, **keys_of(name)).accept(KEY, arrived(codec, stored), len(stored)) is damage


def test_a_reader_with_an_encryption_key_rejects_plain_pages() -> None:
    reader = CODECS["gcm"]
    for name in ("xxh3", "gmac", "zstd", "zstd+gmac"):
        assert accept(reader, stored_page(CODECS[name])) is Damage.TAG_KIND
    for name in ("xxh3", "gmac", "zstd"):
        assert accept(CODECS[name], stored_page(reader)) is Damage.TAG_KIND
    stranger = FrameCodec(NAMESPACE, PAYLOAD, encryption_keys=[b"o" * 32])
    assert accept(reader, stored_page(stranger)) is Damage.ENCRYPTION_KEY


def test_a_mac_key_and_an_encryption_key_have_different_ids() -> None:
    mac, cipher = (FrameHeader.parse(stored_page(codec)) for codec in (
        FrameCodec(NAMESPACE, PAYLOAD, mac_keys=[MAC]), FrameCodec(NAMESPACE, PAYLOAD, encryption_keys=[MAC]),
    ))
    assert mac is not None and cipher is not None and mac.key_id != cipher.key_id


def test_during_a_change_of_encryption_keys_pages_of_both_are_read() -> None:
    new, old = bytes(range(32)), CIPHER
    before, between, after = (FrameCodec(NAMESPACE, PAYLOAD, encryption_keys=k) for k in ([old], [new, old], [new]))
    assert accept(between, stored_page(before)) is None
    assert accept(after, stored_page(between)) is None
    assert accept(after, stored_page(before)) is Damage.ENCRYPTION_KEY


def forged(codec: FrameCodec, body: bytes, *, form: int = Encoding.ZSTD, stored: int | None = None) -> bytes:
    """Return a page with a correct checksum around any body, as an attacker with write access to the store can."""
    page = bytearray(stored_page(FrameCodec(NAMESPACE, codec.payload_bytes), bytes(codec.payload_bytes)))
    page[HEADER_BYTES:] = body
    page[39] = form
    page[152:160] = struct.pack("<Q", len(body) if stored is None else stored)
    page += bytes(frame_bytes(len(body)) - len(page))
    stream = TagStream()
    stream.add(memoryview(page))
    page[8:24] = stream.digest()
    return bytes(page)


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 28))


@pytest.mark.parametrize(
    ("body", "form", "damage"),
    [
        (zstandard.ZstdCompressor().compress(SMOOTH[:-1]), Encoding.ZSTD, Damage.COMPRESSION),
        (zstandard.ZstdCompressor().compress(SMOOTH + b"x"), Encoding.ZSTD, Damage.COMPRESSION),
        (zstandard.ZstdCompressor(write_content_size=False).compress(SMOOTH), Encoding.ZSTD, Damage.COMPRESSION),
        (zstandard.ZstdCompressor().compress(SMOOTH)[:-5], Encoding.ZSTD, Damage.COMPRESSION),
        (BOMB, Encoding.ZSTD, Damage.COMPRESSION),
        (b"", Encoding.ZSTD, Damage.LENGTH),
        (b"no zstd at all" * 50, Encoding.ZSTD, Damage.COMPRESSION),
        (b"\x50\x2a\x4d\x18\x10\0\0\0" + bytes(16), Encoding.ZSTD, Damage.COMPRESSION),
        (SMOOTH, Encoding.BYTE_PLANES, Damage.HEADER),
        (SMOOTH, 4, Damage.HEADER),
        (SMOOTH[:-1], 0, Damage.LENGTH),
    ],
    ids=["short", "long", "no size", "cut", "bomb", "empty", "text", "skippable", "planes alone", "form 4", "plain"],
)
def test_a_page_that_does_not_expand_to_its_payload_is_refused(body: bytes, form: int, damage: Damage) -> None:
    codec = CODECS["xxh3"]
    assert accept(codec, forged(codec, body, form=form)) is damage


def test_the_forger_of_these_tests_can_forge() -> None:
    """The control of the test above: a valid zstd frame under a correct checksum is read."""
    codec = CODECS["xxh3"]
    page = forged(codec, zstandard.ZstdCompressor().compress(SMOOTH))
    assert read(codec, page) == SMOOTH
    assert accept(CODECS["gmac"], page) is Damage.TAG_KIND


@pytest.mark.parametrize("stored", [0, 1, PAYLOAD, PAYLOAD + 1, 2**32, 2**63, 2**64 - 1])
def test_a_false_stored_length_is_refused(stored: int) -> None:
    codec = CODECS["xxh3"]
    page = forged(codec, zstandard.ZstdCompressor().compress(SMOOTH), stored=stored)
    assert accept(codec, page) in (Damage.LENGTH, Damage.SIZE, Damage.COMPRESSION, Damage.TAG)


_PEAK = """
import json, re, sys
import zstandard
from hicache.frame import FrameCodec

def peak_mib():
    # Of this program: what getrusage tells includes the process that started it.
    return int(re.search(r"VmHWM:\\s+([0-9]+) kB", open("/proc/self/status").read())[1]) >> 10

payload_bytes, pages, bomb = json.load(sys.stdin)
pages = [bytes.fromhex(page) for page in pages]
codec = FrameCodec(b"n" * 32, payload_bytes)
frame = memoryview(bytearray(codec.frame_bytes))
before = peak_mib()
for page in pages:
    frame[: len(page)] = page
    print(codec.accept(b"k" * 32, frame, len(page)))
print(peak_mib() - before)
assert len(zstandard.ZstdDecompressor().decompress(bytes.fromhex(bomb))) == 1 << 28
print(peak_mib() - before)
"""


def test_no_page_makes_a_reader_allocate_memory() -> None:
    """Bombs, announced and unannounced, and a window of a gigabyte. Control: expanding without limits."""
    codec = FrameCodec(NAMESPACE, 100_000)
    parameters = zstandard.ZstdCompressionParameters(window_log=30, write_content_size=True)
    wide = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=100_000)
    honest = zstandard.ZstdCompressor().compress(bytes(100_000))
    bodies = [honest, BOMB, wide.compress(bytes(100_000)) + wide.flush(), honest + BOMB]
    pages = [forged(codec, body).hex() for body in bodies]
    job = json.dumps((codec.payload_bytes, pages, BOMB.hex())).encode()
    ended = subprocess.run([sys.executable, "-c", _PEAK], input=job, capture_output=True, check=True, timeout=300)
    *damage, taken, control = ended.stdout.decode().split()
    assert damage[:2] == ["None", "compression"]
    assert int(taken) < 16
    assert int(control) > 200


@pytest.mark.long
@MODES
@given(data=st.data())
def test_any_bytes_are_a_page_or_damage(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    page = bytearray(stored_page(codec))
    for _ in range(data.draw(st.integers(0, 4))):
        start = data.draw(st.integers(0, len(page) - 1) | st.integers(0, HEADER_BYTES - 1))
        piece = data.draw(st.binary(max_size=40))
        page[start : start + len(piece)] = piece
    blocks = data.draw(st.integers(0, 4))
    page = bytearray(data.draw(st.sampled_from([bytes(page), b"", bytes(len(page))])).ljust(blocks * FRAME_ALIGN))
    if len(page) > codec.frame_bytes:
        return
    frame = arrived(codec, page)
    damage = codec.accept(KEY, frame, len(page))
    assert damage is None or isinstance(damage, Damage)
    if damage is None:
        assert payload_in(codec, frame) == SMOOTH


@pytest.mark.parametrize("seed", seeds(1))
def test_any_zstd_like_bytes_under_a_right_checksum_are_a_page_or_damage(seed: int) -> None:
    """An attacker can make a correct checksum without a key, so zstd itself must handle any bytes."""
    dice = rng(seed)
    codec = CODECS["xxh3"]
    good = zstandard.ZstdCompressor().compress(SMOOTH)
    refused = 0
    for _ in range(400):
        body = bytearray(good)
        for _ in range(dice.randrange(1, 4)):
            body[dice.randrange(len(body) if dice.random() < 0.5 else 20)] = dice.randrange(256)
        refused += accept(codec, forged(codec, bytes(body), form=dice.choice((1, 3)))) is not None
    assert refused > 100


def test_without_a_tag_a_changed_payload_is_accepted_in_every_encoding() -> None:
    """Negative control: only the tag detects the change."""
    codec = FrameCodec(NAMESPACE, PAYLOAD, tag=TagKind.NONE)
    stored = bytearray(stored_page(codec))
    stored[HEADER_BYTES] ^= 1
    assert accept(codec, stored) is None


# Pieces


@pytest.mark.parametrize("name", ["xxh3", "zstd"])
@pytest.mark.parametrize("piece", [1, 100, 255, 256, 257, 4096, 1 << 20])
def test_a_page_may_arrive_in_pieces_of_any_size(name: str, piece: int) -> None:
    codec = CODECS[name]
    for change in (None, 30, HEADER_BYTES + 5):
        stored = bytearray(stored_page(codec))
        if change is not None:
            stored[change] ^= 1
        frame, stream = arrived(codec, stored), codec.stream()
        assert stream is not None
        for start in range(0, len(stored), piece):
            stream.add(frame[start : min(start + piece, len(stored))])
        damage = codec.accept(KEY, frame, len(stored), stream)
        assert damage is (None if change is None else Damage.TAG)


# The optional package

_WITHOUT_ZSTANDARD = """
import sys
sys.modules["zstandard"] = None
from hicache.errors import ConfigError
from hicache.frame import Compression, Damage, FrameCodec
stored = sys.stdin.buffer.read()
codec = FrameCodec(b"n" * 32, int(sys.argv[1]))
frame = memoryview(bytearray(codec.frame_bytes))
frame[: len(stored)] = stored
damage = codec.accept(b"k" * 32, frame, len(stored))
assert damage is Damage.NO_ZSTD and damage.is_unsupported, damage
try:
    FrameCodec(b"n" * 32, 1000, compression=Compression())
except ConfigError as error:
    print(error)
"""


def test_without_zstd_compressed_pages_are_unsupported_and_compression_refused() -> None:
    command = [sys.executable, "-c", _WITHOUT_ZSTANDARD, str(PAYLOAD)]
    ended = subprocess.run(command, input=stored_page(CODECS["zstd"]), capture_output=True, check=False, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"pip install -e '.[compression]'" in ended.stdout
    assert not any(damage.is_unsupported for damage in Damage if damage is not Damage.NO_ZSTD)


@MODES
@pytest.mark.parametrize("payload", [SMOOTH, NOISE], ids=["smooth", "noise"])
def test_a_page_in_parts_is_stored_and_read_as_one_in_a_frame(name: str, payload: bytes) -> None:
    codec = CODECS[name]
    written = in_parts(codec, filled(codec, payload))
    stored = b"".join(codec.seal_buffers(KEY, written, parent=b"p" * 32))
    assert codec.check(KEY, memoryview(stored)) is None and read(codec, stored) == payload
    assert len(stored) == len(stored_page(codec, payload))
    target = arrived(codec, stored)
    assert codec.accept(KEY, in_parts(codec, target), len(stored)) is None
    assert payload_in(codec, target) == payload
    frame = memoryview(bytearray(b"\xff" * codec.frame_bytes))
    codec.gather(written, frame)
    assert payload_in(codec, frame) == payload and not any(frame[HEADER_BYTES + PAYLOAD :]), "old bytes in the padding"
    damaged = arrived(codec, stored)
    damaged[len(stored) // 2] ^= 1
    assert codec.accept(KEY, in_parts(codec, damaged), len(stored)) is Damage.TAG

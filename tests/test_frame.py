"""The frame: what a seal proves, and to whom."""

from __future__ import annotations

import random

import pytest

from hicache.errors import InvalidInput
from hicache.frame import HEADER_BYTES, Damage, FrameCodec, FrameHeader, TagKind, frame_bytes, unseal

NAMESPACE = b"n" * 32
KEY = b"k" * 32
MAC = b"secret key of thirty-two bytes!!"
PAYLOAD = 1000


def sealed(codec: FrameCodec, key: bytes = KEY, parent: bytes | None = None) -> memoryview:
    frame = memoryview(bytearray(codec.frame_bytes))
    frame[HEADER_BYTES : HEADER_BYTES + PAYLOAD] = random.Random(1).randbytes(PAYLOAD)
    codec.seal(key, frame, parent=parent)
    return frame


@pytest.fixture(params=[None, MAC], ids=["checksum", "mac"])
def codec(request: pytest.FixtureRequest) -> FrameCodec:
    return FrameCodec(NAMESPACE, PAYLOAD, mac_key=request.param)


def test_a_frame_is_padded_to_whole_blocks() -> None:
    assert frame_bytes(1) == 4096
    assert frame_bytes(4096 - HEADER_BYTES) == 4096
    assert frame_bytes(4096 - HEADER_BYTES + 1) == 8192
    assert frame_bytes(2 << 20) == (2 << 20) + 4096


def test_a_sealed_frame_is_believed(codec: FrameCodec) -> None:
    assert codec.check(KEY, sealed(codec)) is None


def test_an_unsealed_frame_is_not(codec: FrameCodec) -> None:
    frame = sealed(codec)
    unseal(frame)
    assert codec.check(KEY, frame) is Damage.NOT_A_FRAME


def test_every_bit_of_header_and_payload_is_covered(codec: FrameCodec) -> None:
    frame = sealed(codec)
    for position in range(HEADER_BYTES + PAYLOAD):
        for bit in range(8) if position < HEADER_BYTES else (position % 8,):
            frame[position] ^= 1 << bit
            assert codec.check(KEY, frame) is not None, f"bit {bit} of byte {position}"
            frame[position] ^= 1 << bit
    assert codec.check(KEY, frame) is None


def test_without_a_tag_a_changed_payload_goes_through() -> None:
    """Negative control: what the tag is for."""
    codec = FrameCodec(NAMESPACE, PAYLOAD, tag=TagKind.NONE)
    frame = sealed(codec)
    frame[HEADER_BYTES] ^= 1
    assert codec.check(KEY, frame) is None


def test_a_page_is_bound_to_its_key_and_namespace(codec: FrameCodec) -> None:
    frame = sealed(codec)
    assert codec.check(b"x" * 32, frame) is Damage.PAGE_KEY
    mac = MAC if codec.tag_kind is TagKind.AES_256_GMAC else None
    assert FrameCodec(b"o" * 32, PAYLOAD, mac_key=mac).check(KEY, frame) is Damage.NAMESPACE
    assert FrameCodec(NAMESPACE, PAYLOAD - 1, mac_key=mac).check(KEY, frame) is Damage.LENGTH


def test_a_forger_without_the_key_is_not_believed() -> None:
    keyed = FrameCodec(NAMESPACE, PAYLOAD, mac_key=MAC)
    assert keyed.check(KEY, sealed(FrameCodec(NAMESPACE, PAYLOAD))) is Damage.TAG_KIND
    assert keyed.check(KEY, sealed(FrameCodec(NAMESPACE, PAYLOAD, mac_key=b"o" * 32))) is Damage.MAC_KEY
    assert FrameCodec(NAMESPACE, PAYLOAD).check(KEY, sealed(keyed)) is Damage.TAG_KIND


def test_two_seals_of_one_page_never_share_a_nonce() -> None:
    codec = FrameCodec(NAMESPACE, PAYLOAD, mac_key=MAC)
    assert bytes(sealed(codec)[24:36]) != bytes(sealed(codec)[24:36])


def test_sealing_a_sealed_frame_changes_nothing(codec: FrameCodec) -> None:
    frame = sealed(codec, parent=b"p" * 32)
    before = bytes(frame)
    codec.seal(KEY, frame, parent=b"p" * 32)
    assert bytes(frame) == before
    codec.seal(b"x" * 32, frame)
    assert codec.check(b"x" * 32, frame) is None


def test_a_header_can_be_read_without_believing_it(codec: FrameCodec) -> None:
    header = FrameHeader.parse(sealed(codec, parent=b"p" * 32))
    assert header is not None
    assert (header.page_key, header.parent_key, header.namespace) == (KEY, b"p" * 32, NAMESPACE)
    assert header.payload_bytes == PAYLOAD
    assert FrameHeader.parse(b"short") is None
    assert FrameHeader.parse(bytes(HEADER_BYTES)) is None


def test_a_codec_that_cannot_work_is_refused() -> None:
    with pytest.raises(InvalidInput):
        FrameCodec(b"short", PAYLOAD)
    with pytest.raises(InvalidInput):
        FrameCodec(NAMESPACE, 0)
    with pytest.raises(InvalidInput):
        FrameCodec(NAMESPACE, PAYLOAD, mac_key=b"short")
    with pytest.raises(InvalidInput):
        FrameCodec(NAMESPACE, PAYLOAD, tag=TagKind.AES_256_GMAC)

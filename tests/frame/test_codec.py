"""The frame: what a seal proves to which reader."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import InvalidInput
from hicache.frame import HEADER_BYTES, Damage, FrameCodec, FrameHeader, PageView, TagKind, frame_bytes, unseal
from hicache.frame.header import MAGIC, VERSION_AND_KIND

NAMESPACE = b"n" * 32
KEY = b"k" * 32
MAC = b"secret key of thirty-two bytes!!"
PAYLOAD = 1000


def sealed(codec: FrameCodec, key: bytes = KEY, parent: bytes | None = None) -> memoryview:
    frame = memoryview(bytearray(codec.frame_bytes))
    frame[HEADER_BYTES : HEADER_BYTES + PAYLOAD] = random.Random(1).randbytes(PAYLOAD)
    codec.seal(key, frame, parent=parent)
    return frame


@pytest.fixture(params=[[], [MAC]], ids=["checksum", "mac"])
def codec(request: pytest.FixtureRequest) -> FrameCodec:
    return FrameCodec(NAMESPACE, PAYLOAD, mac_keys=request.param)


def test_a_frame_is_padded_to_whole_blocks() -> None:
    assert frame_bytes(1) == 4096
    assert frame_bytes(4096 - HEADER_BYTES) == 4096
    assert frame_bytes(4096 - HEADER_BYTES + 1) == 8192
    assert frame_bytes(2 << 20) == (2 << 20) + 4096


def test_a_page_is_never_its_own_parent(codec: FrameCodec) -> None:
    with pytest.raises(InvalidInput, match="its own parent"):
        sealed(codec, KEY, parent=KEY)
    frame = sealed(codec, KEY, parent=b"p" * 32)
    frame[88:120] = KEY
    assert codec.check(KEY, frame) is Damage.PARENT_KEY
    assert codec.accept(KEY, frame, len(frame)) is Damage.PARENT_KEY


def test_an_unsealed_frame_is_not(codec: FrameCodec) -> None:
    frame = sealed(codec)
    unseal(frame)
    assert codec.check(KEY, frame) is Damage.NOT_A_FRAME


def test_during_a_key_change_pages_of_both_keys_are_accepted() -> None:
    new, old = bytes(range(32)), MAC
    before, between, after = (FrameCodec(NAMESPACE, PAYLOAD, mac_keys=keys) for keys in ([old], [new, old], [new]))
    assert between.check(KEY, sealed(before)) is None
    assert after.check(KEY, sealed(between)) is None
    assert after.check(KEY, sealed(before)) is Damage.MAC_KEY
    assert before.check(KEY, sealed(between)) is Damage.MAC_KEY
    frame = sealed(before)
    between.seal(KEY, frame)
    assert after.check(KEY, frame) is None, "a page of the old key gets the new key when it is stored again"


def test_a_tag_of_one_key_under_the_id_of_another_is_rejected() -> None:
    new, old = bytes(range(32)), MAC
    codec = FrameCodec(NAMESPACE, PAYLOAD, mac_keys=[new, old])
    frame = sealed(FrameCodec(NAMESPACE, PAYLOAD, mac_keys=[old]))
    frame[40:48] = sealed(codec)[40:48]
    assert codec.check(KEY, frame) is Damage.TAG


def test_sealing_a_sealed_frame_changes_nothing(codec: FrameCodec) -> None:
    frame = sealed(codec, parent=b"p" * 32)
    before = bytes(frame)
    codec.seal(KEY, frame, parent=b"p" * 32)
    assert bytes(frame) == before
    codec.seal(b"x" * 32, frame)
    assert codec.check(b"x" * 32, frame) is None


class Interrupted(FrameCodec):
    """A codec whose seals are interrupted, by a signal, when the rest of the header is written."""

    def _tag(self, key_id: bytes, nonce: bytes, covered: Sequence[memoryview]) -> bytes:
        raise KeyboardInterrupt


@pytest.mark.parametrize("was_sealed", [False, True])
@pytest.mark.parametrize("keys", [[], [MAC]], ids=["checksum", "mac"])
def test_an_interrupted_seal_leaves_an_unsealed_page(keys: list[bytes], was_sealed: bool) -> None:
    """A page that claims to be sealed would be stored with a wrong tag, and lost at its next read."""
    codec, interrupted = (kind(NAMESPACE, PAYLOAD, mac_keys=keys) for kind in (FrameCodec, Interrupted))
    frame = sealed(codec, b"x" * 32) if was_sealed else memoryview(bytearray(codec.frame_bytes))
    for page in (frame, PageView(frame[:HEADER_BYTES], [frame[HEADER_BYTES : HEADER_BYTES + PAYLOAD]])):
        with pytest.raises(KeyboardInterrupt):
            interrupted.seal_buffers(KEY, page)
        assert not codec.is_sealed(KEY, page) and not codec.is_sealed(b"x" * 32, page)
        assert codec.check(KEY, frame) is Damage.NOT_A_FRAME
        codec.seal_buffers(KEY, page)
        assert codec.check(KEY, frame) is None
        codec.seal(b"x" * 32, frame)


def test_a_codec_reads_the_claim_of_a_page_that_it_could_verify(codec: FrameCodec) -> None:
    frame = sealed(codec, parent=b"p" * 32)
    assert codec.claim_of(frame) == (KEY, b"p" * 32)
    assert codec.claim_of(sealed(codec)) == (KEY, None)
    assert FrameCodec(b"o" * 32, PAYLOAD).claim_of(frame) is None
    assert codec.claim_of(sealed(FrameCodec(NAMESPACE, PAYLOAD, tag=TagKind.NONE))) is None
    for offset in (0, VERSION_AND_KIND.start):
        other = memoryview(bytearray(frame))
        other[offset] ^= 1
        assert codec.claim_of(other) is None


def test_a_header_can_be_parsed_without_verifying_it(codec: FrameCodec) -> None:
    header = FrameHeader.parse(sealed(codec, parent=b"p" * 32))
    assert header is not None
    assert (header.page_key, header.parent_key, header.namespace) == (KEY, b"p" * 32, NAMESPACE)
    assert header.payload_bytes == PAYLOAD
    assert FrameHeader.parse(b"short") is None
    assert FrameHeader.parse(bytes(HEADER_BYTES)) is None


def test_label_and_weights_epoch_are_not_part_of_a_pages_identity() -> None:
    frame = sealed(FrameCodec(NAMESPACE, PAYLOAD, weights_epoch=2**64 - 1, label="a model"))
    header = FrameHeader.parse(frame)
    assert header is not None and (header.weights_epoch, header.label) == (2**64 - 1, "a model")
    assert FrameCodec(NAMESPACE, PAYLOAD, weights_epoch=3, label="the same").check(KEY, frame) is None
    frame[160] ^= 1
    assert FrameCodec(NAMESPACE, PAYLOAD).check(KEY, frame) is Damage.TAG


@pytest.mark.parametrize(
    ("given", "shown"),
    [("x" * 40, "x" * 32), ("\u00e9" * 20, "\u00e9" * 16), ("a" + "\u20ac" * 11, "a" + "\u20ac" * 10), ("", ""),
     ("\x1b[2J\n", "?[2J?"), ("half \ud800", "half ?")],
)
def test_a_label_is_cut_to_whole_printable_characters(given: str, shown: str) -> None:
    header = FrameHeader.parse(sealed(FrameCodec(NAMESPACE, PAYLOAD, label=given)))
    assert header is not None and header.label == shown


def test_a_foreign_label_is_shown_without_control_characters() -> None:
    frame = sealed(FrameCodec(NAMESPACE, PAYLOAD))
    frame[168:174] = b"\x1b[2J\xff\n"
    header = FrameHeader.parse(frame)
    assert header is not None and header.label.isprintable()


@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_a_printable_header_or_none(noise: bytes, starts_well: bool) -> None:
    header = FrameHeader.parse((MAGIC if starts_well else b"") + noise)
    assert header is None or (header.label.isprintable() and header.object_bytes > 0)


@pytest.mark.parametrize(
    ("namespace", "size", "options"),
    [
        (b"short", PAYLOAD, {}), (NAMESPACE, 0, {}), (NAMESPACE, PAYLOAD, {"mac_keys": [b"short"]}),
        (NAMESPACE, PAYLOAD, {"mac_keys": [MAC, b"b" * 32, b"c" * 32]}),
        (NAMESPACE, PAYLOAD, {"mac_keys": [MAC], "encryption_keys": [MAC]}),
        (NAMESPACE, PAYLOAD, {"weights_epoch": -1}), (NAMESPACE, PAYLOAD, {"tag": TagKind.AES_256_GMAC}),
        (NAMESPACE, PAYLOAD, {"tag": TagKind.AES_256_GCM}),
    ],
)
def test_invalid_options_of_a_codec_are_refused(namespace: bytes, size: int, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        FrameCodec(namespace, size, **options)

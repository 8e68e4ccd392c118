"""The time of storing in the header of a page: written once, and kept by every later seal of the same page."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.frame import HEADER_BYTES, FrameCodec, FrameHeader, PageView, header_of, stored_time, unseal
from hicache.frame.codec import FrameCodec as Codec
from hicache_lab.clocks import ManualClock
from tests.frame.modes import CIPHER, CODECS, KEY, MAC, NAMESPACE, PAYLOAD, accept_into, codecs, filled, smooth_payload

PARENT = b"p" * 32
OTHER = b"o" * 32
HOUR_S = 3600.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=[*CODECS])
def codec(request: pytest.FixtureRequest, clock: ManualClock) -> Codec:
    """A codec of each encoding, with a clock that moves."""
    return codecs(clock=clock)[request.param]


def read_back(codec: FrameCodec, stored: memoryview) -> memoryview:
    """Return a frame with the page as a reader has it."""
    return accept_into(codec, bytes(stored))


def test_a_page_has_the_time_at_which_it_was_sealed_first(codec: Codec, clock: ManualClock) -> None:
    stored = codec.seal(KEY, filled(codec, smooth_payload()), parent=PARENT)
    began_s = int(clock.wall_s())
    header = FrameHeader.parse(stored)
    assert header is not None and (header.stored_s, stored_time(stored)) == (began_s, began_s)
    frame = read_back(codec, stored)
    assert stored_time(frame) == began_s, "reading keeps it"
    clock.advance(HOUR_S)
    again = codec.seal(KEY, frame, parent=PARENT)
    assert stored_time(again) == began_s and stored_time(read_back(codec, again)) == began_s


def test_a_sealed_frame_keeps_its_time_under_another_parent_tag_or_encoding(clock: ManualClock) -> None:
    began_s = int(clock.wall_s())
    frame = filled(plain := codecs(clock=clock)["xxh3"], smooth_payload())
    plain.seal(KEY, frame)
    clock.advance(HOUR_S)
    for name in CODECS:
        other = codecs(clock=clock)[name]
        stored = other.seal(KEY, memoryview(bytearray(frame)), parent=PARENT)
        assert stored_time(stored) == began_s
        assert stored_time(read_back(other, stored)) == began_s


def test_another_page_or_a_changed_payload_in_the_frame_gets_the_present_time(
    codec: Codec, clock: ManualClock
) -> None:
    frame = read_back(codec, codec.seal(KEY, filled(codec, smooth_payload())))
    clock.advance(HOUR_S)
    now_s = int(clock.wall_s())
    assert stored_time(codec.seal(OTHER, memoryview(bytearray(frame)))) == now_s
    unseal(frame)
    assert stored_time(codec.seal(KEY, frame)) == now_s


def test_a_page_in_parts_keeps_its_time(codec: Codec, clock: ManualClock) -> None:
    began_s = int(clock.wall_s())
    payload = memoryview(bytearray(smooth_payload()))
    page = PageView(memoryview(bytearray(HEADER_BYTES)), [payload[:1000], payload[1000:]])
    first = b"".join(codec.seal_buffers(KEY, page))
    frame = read_back(codec, memoryview(first))
    page.scatter(frame)
    assert stored_time(header_of(page)) == began_s
    clock.advance(HOUR_S)
    again = b"".join(codec.seal_buffers(KEY, page, parent=PARENT))
    assert (stored_time(first), stored_time(again)) == (began_s, began_s)
    unseal(page.header)
    assert stored_time(b"".join(codec.seal_buffers(KEY, page))) == int(clock.wall_s())


@pytest.mark.parametrize("keys", [{}, {"mac_keys": [MAC]}, {"encryption_keys": [CIPHER]}])
def test_a_tag_added_later_does_not_make_a_page_younger(clock: ManualClock, keys: dict[str, Any]) -> None:
    codec = FrameCodec(NAMESPACE, PAYLOAD, clock=clock, **keys)
    began_s = int(clock.wall_s())
    frame = read_back(codec, codec.seal(KEY, filled(codec, smooth_payload()), parent=PARENT))
    clock.advance(HOUR_S)
    FrameCodec(NAMESPACE, PAYLOAD, clock=clock).ensure_tag(KEY, frame)
    assert stored_time(frame) == began_s

"""One codec for each encoding of stored pages, for tests that apply to all of them."""

from __future__ import annotations

from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.frame import HEADER_BYTES, Compression, FrameCodec
from hicache.frame.codec import FrameCodec as Codec
from tests.seeds import rng

NAMESPACE = b"n" * 32
KEY = b"k" * 32
MAC = b"secret key of thirty-two bytes!!"
CIPHER = b"another secret of 32 bytes here!"
PAYLOAD = 13_000


def codecs(
    namespace: bytes = NAMESPACE, payload_bytes: int = PAYLOAD, clock: Clock = SYSTEM_CLOCK
) -> dict[str, Codec]:
    """Return one codec per mode, by name."""
    zstd = Compression()
    return {
        "xxh3": FrameCodec(namespace, payload_bytes, clock=clock),
        "gmac": FrameCodec(namespace, payload_bytes, mac_keys=[MAC], clock=clock),
        "gcm": FrameCodec(namespace, payload_bytes, encryption_keys=[CIPHER], clock=clock),
        "zstd": FrameCodec(namespace, payload_bytes, compression=zstd, clock=clock),
        "zstd without planes": FrameCodec(
            namespace, payload_bytes, compression=Compression(byte_planes=False), clock=clock
        ),
        "zstd+gmac": FrameCodec(namespace, payload_bytes, mac_keys=[MAC], compression=zstd, clock=clock),
        "zstd+gcm": FrameCodec(namespace, payload_bytes, encryption_keys=[CIPHER], compression=zstd, clock=clock),
    }


CODECS = codecs()


def smooth_payload(seed: int = 1, payload_bytes: int = PAYLOAD) -> bytes:
    """Return bytes that compress well: few different high bytes, and all values of low bytes."""
    dice = rng(seed)
    return bytes(dice.randrange(256) if place % 2 == 0 else dice.randrange(3) for place in range(payload_bytes))


def filled(codec: FrameCodec, payload: bytes) -> memoryview:
    """Return an unsealed frame with a payload."""
    frame = memoryview(bytearray(codec.frame_bytes))
    frame[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    return frame


def arrived(codec: FrameCodec, stored: bytes | bytearray | memoryview) -> memoryview:
    """Return a frame with an encoded page that has just arrived, followed by garbage."""
    frame = memoryview(bytearray(b"\xee" * codec.frame_bytes))
    frame[: len(stored)] = stored
    return frame


def payload_in(codec: FrameCodec, frame: memoryview) -> memoryview:
    return frame[HEADER_BYTES : HEADER_BYTES + codec.payload_bytes]


def accept_into(codec: FrameCodec, stored: bytes) -> memoryview:
    """Return a frame with the page `KEY` as a reader has it."""
    frame = arrived(codec, stored)
    assert codec.accept(KEY, frame, len(stored)) is None
    return frame

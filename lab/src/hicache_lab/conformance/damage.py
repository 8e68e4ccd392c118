"""Wrong objects in the place of a page."""

from __future__ import annotations

from hicache.frame import HEADER_BYTES, FrameCodec, TagKind

from .pages import NAMESPACE, OTHER_NAMESPACE, PAYLOAD_BYTES, forged, sealed

# The offsets at which a bit of a page is flipped.
_FLIPS = {
    "magic": 0, "tag": 10, "key": 60, "namespace": 125, "payload start": HEADER_BYTES,
    "payload end": HEADER_BYTES + PAYLOAD_BYTES - 1,
}
# The kinds of wrong objects in the place of a page.
DAMAGES = (
    *_FLIPS, "empty", "cut", "one byte less", "one byte more", "doubled", "zeros", "text", "another key",
    "another namespace", "its own parent", "without a tag",
)


def damaged(codec: FrameCodec, keys: list[bytes], raw: bytes, damage: str) -> bytes:
    """Return the object `raw` of `keys[1]` with `damage`, one of DAMAGES."""
    if damage in _FLIPS:
        flipped = bytearray(raw)
        flipped[_FLIPS[damage]] ^= 0x10
        return bytes(flipped)
    return {
        "empty": b"", "cut": raw[: HEADER_BYTES + 10], "one byte less": raw[:-1], "one byte more": raw + b"\0",
        "doubled": raw + raw, "zeros": bytes(len(raw)), "text": b"x" * len(raw),
        "another key": sealed(codec, keys[2:])[0],
        "another namespace": sealed(FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES), keys[1:2])[0],
        "its own parent": forged(codec, keys[1], parent=keys[1]),
        "without a tag": sealed(FrameCodec(NAMESPACE, PAYLOAD_BYTES, tag=TagKind.NONE), keys[1:2])[0],
    }[damage]

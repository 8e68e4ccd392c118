"""The first 256 bytes of a frame, the frame keys, and the reasons for which a reader rejects a page.

There are at most two keys: the current one, which seals and verifies, and during a change of keys another one, which
only verifies. A header names its key by 8 bytes of a hash, so a reader picks the right key and never tries both. MAC
keys and encryption keys have different ids, and a key is used for only one of the two.

Each page has a nonce of 96 random bits. Under one key, the probability that any two of n pages have the same nonce is
about n**2 / 2**97. NIST SP 800-38D allows n = 2**32 pages per key, where it is 2**-33. Change the key before that: this
is 32 PiB of 8 MiB pages.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import InvalidInput
from ..keys import FORMAT_VERSION, PAGE_KEY_BYTES, require_epoch

HEADER_BYTES = 256
FRAME_ALIGN = 4096  # required by direct I/O and cudaHostRegister
MAGIC = b"HICACHE\x00"
NO_PARENT = bytes(PAGE_KEY_BYTES)
NONCE_BYTES = 12  # the length for which GCM needs no further hashing
NO_NONCE = bytes(NONCE_BYTES)
LABEL_BYTES = 32  # enough for the name of a model
FRAME_KEY_BYTES = 32
KEY_ID_BYTES = 8
NO_KEY_ID = bytes(KEY_ID_BYTES)
# The current key and one more: a change of keys needs two, and old keys should not accumulate.
KEYS_MAX = 2

# magic, tag | nonce, version, tag kind, encoding, key id, payload bytes, page key, parent key, namespace, stored
# payload bytes, weights epoch, label, time of storing
_HEADER = struct.Struct("<8s16s12sHBB8sQ32s32s32sQQ32sQ")
# Offsets of the fields that codecs write and compare one by one.
TAG: Final = slice(8, 24)
NONCE: Final = slice(24, 36)
VERSION_AND_KIND: Final = slice(36, 39)
ENCODING: Final = 39
KEY_ID: Final = slice(40, 48)
LENGTH_AND_KEY: Final = slice(48, 88)
KEY: Final = slice(56, 88)
PARENT: Final = slice(88, 120)
NAMESPACE: Final = slice(120, 152)
STORED: Final = slice(152, 160)
METADATA: Final = slice(160, 200)
# Of a page that is sealed again, this field stays.
STORED_TIME: Final = slice(200, 208)
# All fields that a seal determines: these decide whether a frame is already sealed.
FIXED: Final = slice(36, 200)
# The tag covers the bytes from here on.
COVERED_FROM: Final = NONCE.start


class TagKind(enum.IntEnum):
    """The kind of tag by which a reader verifies a frame. docs/benchmarks.md has the cost per byte."""

    NONE = 0  # not verified: only for measuring the cost of verification
    XXH3_128 = 1  # finds damage, not forgery; the default
    AES_256_GMAC = 2  # keyed: write access to the store is not enough to forge a page
    AES_256_GCM = 3  # keyed and encrypted: read access to the store reveals only the length of the payload


class Encoding(enum.IntFlag):
    """The encoding of the stored payload; plain if no bit is set. The tag covers the payload as stored."""

    ZSTD = 1  # a zstd frame
    BYTE_PLANES = 2  # of 16-bit elements, all first bytes and then all second bytes; only together with ZSTD


# The encodings that a reader supports.
ENCODINGS: Final = frozenset({Encoding(0), Encoding.ZSTD, Encoding.ZSTD | Encoding.BYTE_PLANES})


class Damage(enum.StrEnum):
    """Why a page was rejected: the label `reason` of the corruption counter."""

    NOT_A_FRAME = "not_a_frame"
    VERSION = "version"
    TAG_KIND = "tag_kind"
    MAC_KEY = "mac_key"
    ENCRYPTION_KEY = "encryption_key"
    LENGTH = "length"
    PAGE_KEY = "page_key"
    PARENT_KEY = "parent_key"
    NAMESPACE = "namespace"
    HEADER = "header"
    SIZE = "size"
    TAG = "tag"
    COMPRESSION = "compression"
    NO_ZSTD = "no_zstd"

    @property
    def is_unsupported(self) -> bool:
        """True if the page may be valid but this installation cannot use it. Such a page is not removed."""
        return self is Damage.NO_ZSTD


def frame_bytes(payload_bytes: int) -> int:
    """Return the bytes of a whole frame, a multiple of 4096."""
    return -(-(HEADER_BYTES + payload_bytes) // FRAME_ALIGN) * FRAME_ALIGN


def encode_metadata(weights_epoch: int, label: str) -> bytes:
    """Return the header fields that show an operator whose page this is. They are not part of the page's identity,
    which is the namespace digest.

    A label is cut to 32 bytes of UTF-8. Raises InvalidInput for an epoch that is not an unsigned 64-bit integer.
    """
    epoch = require_epoch(weights_epoch)
    cut = printable(label).encode(errors="replace")[:LABEL_BYTES].decode(errors="ignore")
    return struct.pack(f"<Q{LABEL_BYTES}s", epoch, cut.encode())


def printable(text: str) -> str:
    """Return `text` without characters that could move a terminal's cursor or end a log line."""
    return "".join(char if char.isprintable() else "?" for char in text)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """An unverified header, for `hicache inspect` and for rebuilding an index.

    `payload_bytes` is the length of the page's payload, `stored_bytes` the length of the payload as stored. `label` is
    always printable. `stored_s` is the Unix time when the page was first stored, 0 if unknown.
    """

    tag: bytes
    version: int
    tag_kind: int
    encoding: int
    key_id: bytes
    payload_bytes: int
    page_key: bytes
    parent_key: bytes
    namespace: bytes
    stored_bytes: int
    weights_epoch: int
    label: str
    stored_s: int

    @classmethod
    def parse(cls, data: bytes | memoryview) -> FrameHeader | None:
        """Return the header at the start of `data`, or None if `data` does not start with a header."""
        if len(data) < _HEADER.size or data[:8] != MAGIC:
            return None
        _, tag, _, version, kind, encoding, key_id, payload, key, parent, namespace, stored, epoch, label, time_s = (
            _HEADER.unpack_from(data)
        )
        text = printable(label.rstrip(b"\0").decode(errors="replace"))
        return cls(tag, version, kind, encoding, key_id, payload, key, parent, namespace, stored, epoch, text, time_s)

    @property
    def object_bytes(self) -> int:
        """The length of the stored object according to the header. Use it only for comparison: it is not verified."""
        return frame_bytes(self.stored_bytes)


def stored_time(header: bytes | memoryview) -> int:
    """Return the Unix time when the page with this header, or this frame, was first stored; 0 if unknown."""
    return int.from_bytes(header[STORED_TIME], "little")


def pack_start(kind: TagKind, encoding: Encoding, key_id: bytes, payload_bytes: int) -> bytes:
    """Return the fields from the version to the payload's length."""
    return struct.pack("<HBB8sQ", FORMAT_VERSION, kind, encoding, key_id, payload_bytes)


def pack_fixed(start: bytes, key: bytes, parent: bytes, namespace: bytes, stored_bytes: int, metadata: bytes) -> bytes:
    """Return all fields of a header except magic, tag, nonce and time. `start` is the result of `pack_start`."""
    return b"".join((start, key, parent, namespace, struct.pack("<Q", stored_bytes), metadata))


_DOMAINS = {TagKind.AES_256_GMAC: b"hicache.mac_key_id", TagKind.AES_256_GCM: b"hicache.encryption_key_id"}


def key_id(kind: TagKind, key: bytes) -> bytes:
    """Return the 8 bytes by which a header names `key`. They do not reveal the key."""
    return hashlib.sha256(_DOMAINS[kind] + key).digest()[:KEY_ID_BYTES]


def key_table(kind: TagKind, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
    """Return the keys by their ids, the sealing key first. Raises InvalidInput for a wrong length or too many keys."""
    what = "MAC" if kind is TagKind.AES_256_GMAC else "encryption"
    if len(keys) > KEYS_MAX:
        raise InvalidInput(f"frame: {len(keys)} {what} keys; at most the current and one more can be in use")
    for key in keys:
        if len(key) != FRAME_KEY_BYTES:
            raise InvalidInput(f"frame: the {what} key must be {FRAME_KEY_BYTES} bytes, got {len(key)}")
    return {key_id(kind, key): key for key in keys}

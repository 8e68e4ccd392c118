"""The first 256 bytes of a frame, the keys that they name, and the reasons for which a reader refuses a page.

There are two keys at most: the current one, which seals, and while keys are being changed another one, which proves.
A header names its key by 8 bytes of a hash, so a reader takes the right one at once and never tries both. The key of
tags and the key of encryption are named apart, and a key serves for one of the two.

Each page takes a nonce of 96 random bits. Under one key, the chance that any two of n pages share one is about
n**2 / 2**97; NIST SP 800-38D allows n = 2**32 pages a key, at which it is 2**-33. Change the key before that: it is
32 PiB of 8 MiB pages.
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
FRAME_ALIGN = 4096  # what direct I/O and cudaHostRegister ask for
MAGIC = b"HICACHE\x00"
NO_PARENT = bytes(PAGE_KEY_BYTES)
NONCE_BYTES = 12  # the length for which GCM needs no further hashing
NO_NONCE = bytes(NONCE_BYTES)
LABEL_BYTES = 32  # enough for the name of a model
FRAME_KEY_BYTES = 32
KEY_ID_BYTES = 8
NO_KEY_ID = bytes(KEY_ID_BYTES)
# The current key and one more: a change of keys needs two, and a third would be one nobody remembers to remove.
KEYS_MAX = 2

# magic, tag | nonce, version, tag kind, encoding, key id, payload bytes, page key, parent key, namespace, stored
# payload bytes, weights epoch, label
_HEADER = struct.Struct("<8s16s12sHBB8sQ32s32s32sQQ32s")
# Where the fields are that codecs write and compare one by one.
TAG: Final = slice(8, 24)
NONCE: Final = slice(24, 36)
VERSION_AND_KIND: Final = slice(36, 39)
ENCODING: Final = 39
KEY_ID: Final = slice(40, 48)
LENGTH_AND_KEY: Final = slice(48, 88)
PARENT: Final = slice(88, 120)
NAMESPACE: Final = slice(120, 152)
STORED: Final = slice(152, 160)
METADATA: Final = slice(160, 200)
# All that a seal writes but for tag and nonce.
FIXED: Final = slice(36, _HEADER.size)
# What the tag covers begins here.
COVERED_FROM: Final = NONCE.start


class TagKind(enum.IntEnum):
    """How a frame proves its bytes. The price per byte is in docs/benchmarks.md."""

    NONE = 0  # not checked: only for measuring what the check costs
    XXH3_128 = 1  # finds damage, not forgery; the default
    AES_256_GMAC = 2  # keyed: who can write the store cannot make a page that is believed
    AES_256_GCM = 3  # keyed, and the payload is encrypted: who can read the store learns nothing of it but its length


class Encoding(enum.IntFlag):
    """How the stored payload differs from that of the page; plain if no bit is set. The tag covers what is stored."""

    ZSTD = 1  # a zstd frame
    BYTE_PLANES = 2  # of 16-bit elements, all first bytes and then all second bytes; only together with ZSTD


# What a reader knows how to undo.
ENCODINGS: Final = frozenset({Encoding(0), Encoding.ZSTD, Encoding.ZSTD | Encoding.BYTE_PLANES})


class Damage(enum.StrEnum):
    """Why a page was refused; the `reason` label of the corruption counter."""

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
        """Whether it is this installation that cannot use the page, with which nothing is wrong: it is left alone."""
        return self is Damage.NO_ZSTD


def frame_bytes(payload_bytes: int) -> int:
    """Bytes of a whole frame, a multiple of 4096."""
    return -(-(HEADER_BYTES + payload_bytes) // FRAME_ALIGN) * FRAME_ALIGN


def encode_metadata(weights_epoch: int, label: str) -> bytes:
    """What tells an operator whose page this is: it is no part of its identity, which the namespace digest is.

    A label is cut to 32 bytes of UTF-8. Raises InvalidInput for an epoch that is not an unsigned 64-bit integer.
    """
    epoch = require_epoch(weights_epoch)
    cut = printable(label).encode(errors="replace")[:LABEL_BYTES].decode(errors="ignore")
    return struct.pack(f"<Q{LABEL_BYTES}s", epoch, cut.encode())


def printable(text: str) -> str:
    """Return `text` without what could move a terminal's cursor or end a line of a log."""
    return "".join(char if char.isprintable() else "?" for char in text)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A header as read, believed by nobody: for `hicache inspect` and for rebuilding an index.

    `payload_bytes` is the length of the page's payload, `stored_bytes` that of the payload as stored; `label` is
    printable, whatever lay there.
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

    @classmethod
    def parse(cls, data: bytes | memoryview) -> FrameHeader | None:
        """The header at the start of `data`, or None if there is none."""
        if len(data) < _HEADER.size or data[:8] != MAGIC:
            return None
        _, tag, _, version, kind, encoding, key_id, payload, key, parent, namespace, stored, epoch, label = (
            _HEADER.unpack_from(data)
        )
        text = printable(label.rstrip(b"\0").decode(errors="replace"))
        return cls(tag, version, kind, encoding, key_id, payload, key, parent, namespace, stored, epoch, text)

    @property
    def object_bytes(self) -> int:
        """How long the stored object has to be. For comparing only: a header may say anything."""
        return frame_bytes(self.stored_bytes)


def pack_start(kind: TagKind, encoding: Encoding, key_id: bytes, payload_bytes: int) -> bytes:
    """The fields from the version to the payload's length."""
    return struct.pack("<HBB8sQ", FORMAT_VERSION, kind, encoding, key_id, payload_bytes)


def pack_fixed(start: bytes, key: bytes, parent: bytes, namespace: bytes, stored_bytes: int, metadata: bytes) -> bytes:
    """All fields of a header but magic, tag and nonce; `start` is what `pack_start` made."""
    return b"".join((start, key, parent, namespace, struct.pack("<Q", stored_bytes), metadata))


_DOMAINS = {TagKind.AES_256_GMAC: b"hicache.mac_key_id", TagKind.AES_256_GCM: b"hicache.encryption_key_id"}


def key_id(kind: TagKind, key: bytes) -> bytes:
    """The 8 bytes under which a header names `key`, which they do not betray."""
    return hashlib.sha256(_DOMAINS[kind] + key).digest()[:KEY_ID_BYTES]


def key_table(kind: TagKind, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
    """The keys by their ids, the one that seals first. Raises InvalidInput for a wrong length or too many keys."""
    what = "MAC" if kind is TagKind.AES_256_GMAC else "encryption"
    if len(keys) > KEYS_MAX:
        raise InvalidInput(f"frame: {len(keys)} {what} keys; at most the current and one more can be in use")
    for key in keys:
        if len(key) != FRAME_KEY_BYTES:
            raise InvalidInput(f"frame: the {what} key must be {FRAME_KEY_BYTES} bytes, got {len(key)}")
    return {key_id(kind, key): key for key in keys}

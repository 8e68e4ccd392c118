"""The frame: one page in the form in which it lies in host memory, in a file, under a Redis key or in an S3 object.

    [ header 256 bytes | payload | zero padding up to a multiple of 4096 ]

A frame is either unsealed (its magic is zero) or sealed for exactly the payload it holds. Whoever writes a payload
unseals the frame first; `seal` on a sealed frame costs a comparison. The grammar is in docs/formats/frame.md.

A reader builds the header it expects and compares: nothing in a stored header steers a length, an address or an
allocation. The tag covers the header behind it and the payload, so a page is bound to its key and its namespace.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import struct
from dataclasses import dataclass

import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .errors import InvalidInput
from .keys import FORMAT_VERSION, PAGE_KEY_BYTES

HEADER_BYTES = 256
FRAME_ALIGN = 4096  # what direct I/O and cudaHostRegister ask for
MAC_KEY_BYTES = 32
MAGIC = b"HICACHE\x00"
NO_PARENT = bytes(PAGE_KEY_BYTES)
_NO_NONCE = bytes(12)

# magic, tag | nonce, version, tag kind, flags, MAC key id, payload bytes, page key, parent key, namespace
_HEADER = struct.Struct("<8s16s12sHBB8sQ32s32s32s")
_TAG = slice(8, 24)
_NONCE = slice(24, 36)
_FIXED = slice(36, _HEADER.size)  # what a reader knows beforehand, but for the parent
_PARENT = slice(88, 120)


class TagKind(enum.IntEnum):
    """How a frame proves its bytes. The price per byte is in docs/benchmarks.md."""

    NONE = 0  # not checked: only for measuring what the check costs
    XXH3_128 = 1  # finds damage, not forgery; the default
    AES_256_GMAC = 2  # keyed: who can write the store cannot make a page that is believed


class Damage(enum.StrEnum):
    """Why a frame was refused; the `reason` label of the corruption counter."""

    NOT_A_FRAME = "not_a_frame"
    VERSION = "version"
    TAG_KIND = "tag_kind"
    MAC_KEY = "mac_key"
    LENGTH = "length"
    PAGE_KEY = "page_key"
    NAMESPACE = "namespace"
    HEADER = "header"
    TAG = "tag"


def frame_bytes(payload_bytes: int) -> int:
    """Bytes of a whole frame, a multiple of 4096."""
    return -(-(HEADER_BYTES + payload_bytes) // FRAME_ALIGN) * FRAME_ALIGN


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A header as read, believed by nobody: for `hicache inspect` and for rebuilding an index."""

    tag: bytes
    version: int
    tag_kind: int
    mac_key_id: bytes
    payload_bytes: int
    page_key: bytes
    parent_key: bytes
    namespace: bytes

    @classmethod
    def parse(cls, data: bytes | memoryview) -> FrameHeader | None:
        """The header at the start of `data`, or None if there is none."""
        if len(data) < _HEADER.size or data[:8] != MAGIC:
            return None
        _, tag, _, version, kind, _, key_id, payload, key, parent, namespace = _HEADER.unpack_from(data)
        return cls(tag, version, kind, key_id, payload, key, parent, namespace)


class TagStream:
    """The tag of a frame that arrives piece by piece: hashing each piece while it is in the cache of the processor is
    a tenth faster than going over an 8 MiB frame a second time. For one frame and one thread."""

    def __init__(self, covered: slice) -> None:
        self._covered = covered
        self._state = xxhash.xxh3_128()

    def add(self, frame: memoryview, start: int, end: int) -> None:
        """Take in the bytes `start` to `end` of the frame. REQUIRES: each piece begins where the last one ended."""
        self._state.update(frame[max(start, self._covered.start) : min(end, self._covered.stop)])

    def digest(self) -> bytes:
        """The tag of all that was taken in."""
        return self._state.digest()


class FrameCodec:
    """Seals and checks the frames of one namespace. Thread-safe: holds nothing that changes.

    With a `mac_key` (32 bytes) frames carry AES-256-GMAC (NIST SP 800-38D) under a fresh random nonce and nothing
    weaker is believed; without one they carry XXH3-128 (or no tag, if `tag` says so). Raises InvalidInput for a key of
    another length, a payload without bytes, or AES_256_GMAC without a key.
    """

    def __init__(
        self,
        namespace: bytes,
        payload_bytes: int,
        *,
        tag: TagKind = TagKind.XXH3_128,
        mac_key: bytes | None = None,
    ) -> None:
        if len(namespace) != PAGE_KEY_BYTES:
            raise InvalidInput(f"frame: the namespace digest must be {PAGE_KEY_BYTES} bytes, got {len(namespace)}")
        if payload_bytes < 1:
            raise InvalidInput(f"frame: a payload of {payload_bytes} bytes cannot hold a page")
        if mac_key is not None and len(mac_key) != MAC_KEY_BYTES:
            raise InvalidInput(f"frame: the MAC key must be {MAC_KEY_BYTES} bytes, got {len(mac_key)}")
        if mac_key is None and tag is TagKind.AES_256_GMAC:
            raise InvalidInput("frame: AES_256_GMAC needs a MAC key")
        self.namespace = namespace
        self.payload_bytes = payload_bytes
        self.frame_bytes = frame_bytes(payload_bytes)
        self.tag_kind = tag if mac_key is None else TagKind.AES_256_GMAC
        self._cipher = None if mac_key is None else AESGCM(mac_key)
        key_id = bytes(8) if mac_key is None else hashlib.sha256(b"hicache.mac_key_id" + mac_key).digest()[:8]
        self._constant = struct.pack("<HBB8sQ", FORMAT_VERSION, self.tag_kind, 0, key_id, payload_bytes)
        self._covered = slice(_NONCE.start, HEADER_BYTES + payload_bytes)

    def seal(self, key: bytes, frame: memoryview, *, parent: bytes | None = None) -> memoryview:
        """The stored form of the page in `frame`: what a backend writes, a multiple of 4096 bytes and at most as long.

        Writes the header of an unsealed frame and leaves one that is sealed for `key` alone. `parent` is the key of the
        page before this one, None for the first page of a chain. Mutates the first 256 bytes of `frame`; what is
        returned may be `frame` itself. REQUIRES: the payload is complete and nobody writes it meanwhile.
        """
        fixed = self._constant + key + (parent or NO_PARENT) + self.namespace
        if frame[:8] == MAGIC and frame[_FIXED] == fixed:
            return frame
        nonce = _NO_NONCE if self._cipher is None else os.urandom(12)
        frame[:HEADER_BYTES] = (bytes(24) + nonce + fixed).ljust(HEADER_BYTES, b"\0")
        frame[_TAG] = self._tag(nonce, frame)
        frame[: len(MAGIC)] = MAGIC  # last, so that an interrupted seal leaves an unsealed frame
        return frame

    def is_sealed(self, key: bytes, frame: memoryview) -> bool:
        """Whether `frame` says that it is the page `key` of this namespace; proves nothing, costs a microsecond."""
        return frame[:8] == MAGIC and frame[56:88] == key and frame[120:152] == self.namespace

    def stream(self) -> TagStream | None:
        """For `check`, where a frame arrives in pieces; None where its tag has to be computed over the whole."""
        return TagStream(self._covered) if self.tag_kind is TagKind.XXH3_128 else None

    def fits(self, stored_bytes: int) -> bool:
        """Whether an object of so many bytes may be a page. What does not fit is damage, and is never read."""
        return stored_bytes == self.frame_bytes

    def accept(
        self, key: bytes, frame: memoryview, stored_bytes: int, arrived: TagStream | None = None
    ) -> Damage | None:
        """None if the stored form of the page `key` lies in the first bytes of `frame`, else what is wrong with it.

        After None the frame holds the page as it was given to `seal`; after damage its bytes mean nothing. `arrived`,
        if given, comes from `stream` and has taken in exactly those bytes.
        """
        if not self.fits(stored_bytes):
            return Damage.LENGTH
        return self.check(key, frame, arrived)

    def check(self, key: bytes, frame: memoryview, arrived: TagStream | None = None) -> Damage | None:
        """None if `frame` provably is the page `key` of this namespace, else what is wrong with it. Mutates nothing.

        REQUIRES: `frame` is as long as this codec's frames, and nobody writes it meanwhile; `arrived`, if given, comes
        from `stream` and has taken in the whole frame.
        """
        header = bytes(frame[:HEADER_BYTES])
        constant, parent_end = self._constant, _PARENT.stop
        if (
            header[36 : 36 + len(constant)] != constant
            or header[56:88] != key
            or header[parent_end : _HEADER.size] != self.namespace
            or not header.startswith(MAGIC)
        ):
            return self._first_difference(header, key)
        if self.tag_kind is TagKind.NONE:
            return None
        tag = self._tag(header[_NONCE], frame) if arrived is None else arrived.digest()
        if not hmac.compare_digest(header[_TAG], tag):
            return Damage.TAG
        return None

    def _tag(self, nonce: bytes, frame: memoryview) -> bytes:
        if self._cipher is not None:
            return self._cipher.encrypt(nonce, b"", frame[self._covered])
        if self.tag_kind is TagKind.NONE:
            return bytes(16)
        return xxhash.xxh3_128_digest(frame[self._covered])

    def _first_difference(self, header: bytes, key: bytes) -> Damage:
        found = FrameHeader.parse(header)
        if found is None:
            return Damage.NOT_A_FRAME
        expected_key_id = self._constant[4:12]
        for damage, differs in (
            (Damage.VERSION, found.version != FORMAT_VERSION),
            (Damage.TAG_KIND, found.tag_kind != self.tag_kind),
            (Damage.MAC_KEY, found.mac_key_id != expected_key_id),
            (Damage.LENGTH, found.payload_bytes != self.payload_bytes),
            (Damage.PAGE_KEY, found.page_key != key),
            (Damage.NAMESPACE, found.namespace != self.namespace),
        ):
            if differs:
                return damage
        return Damage.HEADER


def unseal(frame: memoryview) -> None:
    """Mark the payload of `frame` as new: the next `seal` computes its tag again."""
    frame[:8] = bytes(8)

"""Encodes pages for storage, and verifies pages that are read back.

A page is stored as it is in its frame, unless the codec compresses or encrypts it. Then the encoded page is made in
another buffer and the frame stays plain. A page is read into the frame, verified, and then decoded in place.

Locking design: a codec is immutable except for its buffer pool, and a buffer has one borrower (see `BufferPool`).
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Sequence

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ..clock import SYSTEM_CLOCK, Clock
from ..errors import InvalidInput
from ..keys import FORMAT_VERSION, PAGE_KEY_BYTES
from .buffers import BufferPool, PageBuffer, PageView, header_of
from .compression import Compression, compress, expand, is_available, join_planes, require_zstandard, split_planes
from .header import (
    COVERED_FROM,
    ENCODING,
    ENCODINGS,
    FIXED,
    FRAME_ALIGN,
    HEADER_BYTES,
    KEY,
    KEY_ID,
    LENGTH_AND_KEY,
    MAGIC,
    METADATA,
    NAMESPACE,
    NO_KEY_ID,
    NO_NONCE,
    NO_PARENT,
    NONCE,
    NONCE_BYTES,
    PARENT,
    STORED,
    STORED_TIME,
    TAG,
    VERSION_AND_KIND,
    Damage,
    Encoding,
    FrameHeader,
    TagKind,
    encode_metadata,
    frame_bytes,
    key_table,
    pack_fixed,
    pack_start,
    printable,
)

_NO_TAG = bytes(16)
# The helper knows XXH3 only for more than 240 bytes, header included.
_HELPED_BYTES_MIN = 241


class TagStream:
    """The tag of a page that arrives in pieces. Hashing each piece while it is in the processor's cache is a tenth
    faster than a second pass over an 8 MiB frame. For one page and one thread."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self._header = bytearray()  # the part that has arrived, if it arrives in pieces
        self._left: int | None = None  # bytes that are still missing; None before the header is complete

    def add(self, piece: memoryview) -> None:
        """Add the next bytes of the page, of any number."""
        # The header is compared later. A wrong length makes a wrong tag, but never reads beyond these bytes.
        if self._left is None and not self._header and len(piece) >= HEADER_BYTES:
            # One update for header and payload: each update releases the interpreter's lock, which costs more than the
            # hash of a small page.
            self._left = HEADER_BYTES - COVERED_FROM + int.from_bytes(piece[STORED], "little")
            piece = piece[COVERED_FROM:]
        elif self._left is None:
            missing = HEADER_BYTES - len(self._header)
            self._header += piece[:missing]
            if len(self._header) < HEADER_BYTES:
                return
            self._state.update(memoryview(self._header)[COVERED_FROM:])
            self._left = int.from_bytes(self._header[STORED], "little")
            piece = piece[missing:]
        if self._left:
            self._state.update(piece[: self._left])
            self._left -= min(self._left, len(piece))

    def digest(self) -> bytes:
        """Return the tag of the bytes added so far."""
        return self._state.digest()


class FrameCodec:
    """Seals and verifies the pages of one namespace. Thread-safe.

    Tags: XXH3-128, or the kind `tag`. With `mac_keys` (32 bytes each; the first one seals, a second one is accepted
    too) pages carry AES-256-GMAC (NIST SP 800-38D) under a fresh random nonce, and weaker tags are rejected. With
    `encryption_keys` instead, pages are encrypted by AES-256-GCM, and only encrypted pages are accepted.

    `compression` compresses a page if that saves at least one block. Every codec reads compressed and plain pages.
    `weights_epoch` and `label` are for people who look at a store; the tag covers them, but readers do not compare
    them. A page keeps the time at which it was first sealed, by `clock`.

    Raises InvalidInput for keys of another length or number, an empty payload, and a tag that needs a key without one;
    ConfigError if compression is not installed.
    """

    def __init__(  # noqa: PLR0913 - the formats of pages are independent of each other
        self, namespace: bytes, payload_bytes: int, *, tag: TagKind = TagKind.XXH3_128, mac_keys: Sequence[bytes] = (),
        encryption_keys: Sequence[bytes] = (), compression: Compression | None = None, weights_epoch: int = 0,
        label: str = "", clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if len(namespace) != PAGE_KEY_BYTES:
            raise InvalidInput(f"frame: the namespace digest must be {PAGE_KEY_BYTES} bytes, got {len(namespace)}")
        if payload_bytes < 1:
            raise InvalidInput(f"frame: a payload of {payload_bytes} bytes cannot hold a page")
        if compression is not None:
            require_zstandard()
        self.namespace = namespace
        self.clock = clock
        self.payload_bytes = payload_bytes
        self.frame_bytes = frame_bytes(payload_bytes)
        self.tag_kind, keys = _tag_and_keys(tag, mac_keys, encryption_keys)
        self._key_id = next(iter(keys), NO_KEY_ID)
        self._ciphers = {name: AESGCM(key) for name, key in keys.items()}
        self._algorithms = {name: algorithms.AES256(key) for name, key in keys.items()}
        self._known_ids = frozenset(keys) or frozenset({NO_KEY_ID})
        self._encrypts = self.tag_kind is TagKind.AES_256_GCM
        self._compression = compression
        self.weights_epoch = weights_epoch
        self.label = printable(label)
        self._metadata = encode_metadata(weights_epoch, label)
        self._version_and_kind = struct.pack("<HB", FORMAT_VERSION, self.tag_kind)
        self._length = payload_bytes.to_bytes(8, "little")
        self._start = pack_start(self.tag_kind, Encoding(0), self._key_id, payload_bytes)
        self._buffers = BufferPool(self.frame_bytes)
        # The padding of a page in parts: zeros are written, and the bytes that are read are ignored.
        padding_bytes = self.frame_bytes - HEADER_BYTES - payload_bytes
        self._zeros = memoryview(bytes(padding_bytes))
        self._ignored = memoryview(bytearray(padding_bytes))

    @property
    def transforms(self) -> bool:
        """True if the stored bytes may differ from the frame."""
        return self._encrypts or self._compression is not None

    def seal(self, key: bytes, frame: memoryview, *, parent: bytes | None = None) -> memoryview:
        """Return the encoded page for a backend to write: a multiple of 4096 bytes, at most as long as `frame`.

        Usually returns `frame` itself, after writing its header unless it is already sealed for `key`. A compressed or
        encrypted page is in a separate buffer, which lives as long as the view, and `frame` is unchanged.
        `parent` is the key of the page before this one, None for the first page of a chain.
        REQUIRES: the payload is complete, and does not change until the encoded page has been written.
        Raises InvalidInput if the page is its own parent.
        """
        return self.seal_buffers(key, frame, parent=parent)[0]

    def seal_buffers(self, key: bytes, page: PageBuffer, *, parent: bytes | None = None) -> list[memoryview]:
        """Return the buffers of the encoded page, in order. Like `seal`, but also for pages in parts. Only a codec that
        compresses or encrypts copies these; otherwise only their header is written to."""
        parent = self.parent_of(key, page, parent)
        if parent == key:
            raise InvalidInput(f"frame: the page {key.hex()} is its own parent; pass the key of the page before it")
        plain = self._fixed(Encoding(0), key, parent, self.payload_bytes)
        if isinstance(page, PageView):
            if not self.transforms:
                if page.header[:8] != MAGIC or page.header[FIXED] != plain:
                    fields = plain + self._time_of(key, page)
                    self._write_header(page.header, fields, [page.header[COVERED_FROM:], *page.parts])
                return [page.header, *page.parts, self._zeros]
            page, parts = self._buffers.take(), page
            self.gather(parts, page)
        if not self._encrypts and page[:8] == MAGIC and page[FIXED] == plain:
            return [page]
        stored_at, encoding = self._time_of(key, page), Encoding(0)
        body = page[HEADER_BYTES : HEADER_BYTES + self.payload_bytes]
        if self._compression is not None:
            encoding, body = self._shortened(body, self._compression)
        if not encoding and not self._encrypts:
            self._write_header(page, plain + stored_at, [page[COVERED_FROM : HEADER_BYTES + self.payload_bytes]])
            return [page]
        return [self._transformed(body, self._fixed(encoding, key, parent, len(body)) + stored_at)]

    def parent_of(self, key: bytes, page: PageBuffer, parent: bytes | None) -> bytes | None:
        """Return the parent for the header of a page: `parent`, unless a set of stores knows a better one."""
        return parent

    def fields(self) -> tuple[bytes, bytes, bytes, int, int] | None:
        """Return what the headers of all plain pages have, and the present time, for the native helper: it seals and
        proves pages as `seal` and `accept` do. None for other tags than XXH3, and for pages of a few bytes."""
        if self.tag_kind is not TagKind.XXH3_128 or self.payload_bytes < _HELPED_BYTES_MIN:
            return None
        return self._start, self.namespace, self._metadata, self.payload_bytes, int(self.clock.wall_s())

    def unsealed_buffers(self, page: PageBuffer) -> list[memoryview]:
        """Return the buffers of a page to write after the helper has sealed it. REQUIRES: the codec does not
        transform."""
        return [page.header, *page.parts, self._zeros] if isinstance(page, PageView) else [page]

    def buffers(self, page: PageBuffer) -> list[memoryview]:
        """Return the buffers to read an encoded page into, in order; `frame_bytes` together. See `first_bytes`."""
        return [page.header, *page.parts, self._ignored] if isinstance(page, PageView) else [page]

    def gather(self, page: PageBuffer, frame: memoryview) -> None:
        """Copy a page with its header into `frame`. REQUIRES: `frame` has `frame_bytes` bytes."""
        if isinstance(page, PageView):
            page.gather(frame)
            frame[HEADER_BYTES + self.payload_bytes :] = self._zeros
        else:
            frame[:] = page

    def copy_in(self, frame: memoryview) -> PageView:
        """Return the stored page in `frame` to be stored elsewhere as a copy, see PageView."""
        payload = frame[HEADER_BYTES : HEADER_BYTES + self.payload_bytes]
        return PageView(frame[:HEADER_BYTES], [payload], is_copy=True)

    def scratch_frame(self) -> memoryview:
        """Return a frame with arbitrary content, as a temporary buffer for `PageView.gather` or `scatter`. It belongs
        to the borrower until all views of it are deleted."""
        return self._buffers.take()

    def _fixed(self, encoding: Encoding, key: bytes, parent: bytes | None, stored_bytes: int) -> bytes:
        start = pack_start(self.tag_kind, encoding, self._key_id, self.payload_bytes) if encoding else self._start
        return pack_fixed(start, key, parent or NO_PARENT, self.namespace, stored_bytes, self._metadata)

    def _shortened(self, payload: memoryview, compression: Compression) -> tuple[Encoding, memoryview]:
        """Return the compressed payload, or the payload itself if compression does not save a block."""
        encoding, source = Encoding.ZSTD, payload
        if compression.byte_planes and not self.payload_bytes % 2:
            encoding |= Encoding.BYTE_PLANES
            source = self._buffers.take()[: self.payload_bytes]
            split_planes(payload, source)
        packed = compress(source)
        if frame_bytes(len(packed)) >= self.frame_bytes:
            return Encoding(0), payload
        return encoding, memoryview(packed)

    def _time_of(self, key: bytes, page: PageBuffer) -> bytes:
        """Return the time field for sealing `page`: its own if it is already sealed as the page `key`, else now."""
        if self.is_sealed(key, page):
            return bytes(header_of(page)[STORED_TIME])
        return int(self.clock.wall_s()).to_bytes(8, "little")

    def _transformed(self, body: memoryview, fields: bytes) -> memoryview:
        """Return the encoded page with `body`, encrypted if the codec encrypts, in a separate buffer."""
        end = HEADER_BYTES + len(body)
        stored = self._buffers.take()[: frame_bytes(len(body))]
        stored[end:] = bytes(len(stored) - end)
        if not self._encrypts:
            stored[HEADER_BYTES:end] = body
            self._write_header(stored, fields, [stored[COVERED_FROM:end]])
            return stored
        nonce = os.urandom(NONCE_BYTES)
        stored[:HEADER_BYTES] = (MAGIC + _NO_TAG + nonce + fields).ljust(HEADER_BYTES, b"\0")
        encryptor = Cipher(self._algorithms[self._key_id], modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(stored[COVERED_FROM:HEADER_BYTES])
        encryptor.update_into(body, stored[HEADER_BYTES:end])
        encryptor.finalize()
        stored[TAG] = encryptor.tag
        return stored

    def _write_header(self, header: memoryview, fields: bytes, covered: Sequence[memoryview]) -> None:
        """Write the header of a page. Its tag covers the buffers `covered`. `header` may be longer than a header."""
        nonce = NO_NONCE if self.tag_kind is not TagKind.AES_256_GMAC else os.urandom(NONCE_BYTES)
        header[:HEADER_BYTES] = (bytes(TAG.stop) + nonce + fields).ljust(HEADER_BYTES, b"\0")
        header[TAG] = self._tag(self._key_id, nonce, covered)
        header[: len(MAGIC)] = MAGIC  # last, so that an interrupted seal leaves an unsealed page

    def is_sealed(self, key: bytes, page: PageBuffer) -> bool:
        """True if the header of `page` claims to be the page `key` of this namespace. Does not verify the tag. Takes a
        microsecond."""
        header = header_of(page)
        return header[:8] == MAGIC and header[KEY] == key and header[NAMESPACE] == self.namespace

    def is_tagged(self, frame: memoryview) -> bool:
        """True if a plain frame claims to have a tag of this codec's kind, which `check` can verify."""
        is_ours = frame[:8] == MAGIC and frame[VERSION_AND_KIND] == self._version_and_kind
        return is_ours and self.tag_kind is not TagKind.NONE

    def ensure_tag(self, key: bytes, frame: memoryview, parent: bytes | None = None) -> None:
        """Seal a plain frame in place unless it claims to be the page `key` with a tag. A frame that claims that
        without a tag keeps its parent. REQUIRES: no other thread uses `frame`, and the codec does not encrypt or
        compress."""
        if self.is_sealed(key, frame):
            if self.is_tagged(frame):
                return
            named = bytes(frame[PARENT])
            parent = None if named == NO_PARENT else named
        self.seal(key, frame, parent=parent)

    def claim_of(self, frame: memoryview) -> tuple[bytes, bytes | None] | None:
        """Return the page key and the parent key that a plain frame claims. Return None if it is not sealed, or if this
        codec would reject it with any tag. Does not verify the tag."""
        header = bytes(frame[:HEADER_BYTES])
        key, parent = header[KEY], header[PARENT]
        if not self.is_tagged(frame) or header[ENCODING] or self._refusal(header, key, len(frame)) is not None:
            return None
        return key, None if parent == NO_PARENT else parent

    def stream(self) -> TagStream | None:
        """Return a stream to pass to `accept` for a page that arrives in pieces. Return None for tags that
        can only be computed over the whole page."""
        return TagStream() if self.tag_kind is TagKind.XXH3_128 else None

    def fits(self, stored_bytes: int) -> bool:
        """True if an object of this size can be a page. Objects of other sizes are damaged and are never read."""
        return HEADER_BYTES < stored_bytes <= self.frame_bytes and not stored_bytes % FRAME_ALIGN

    def accept(
        self, key: bytes, page: PageBuffer, stored_bytes: int, arrived: TagStream | None = None
    ) -> Damage | None:
        """Verify and decode the page `key` in the first bytes of `page`. Return None if it is valid, else its damage.

        After None, the frame holds the page as it was passed to `seal`. After damage, its header is the one read, and
        its payload is undefined. Damage that `is_unsupported` is a miss and a counted error; any other damage is
        corruption, and the caller removes the object. A decoded page that was compressed or encrypted does not have a
        tag: the next `seal` makes one. `arrived`, if any, is a result of `stream` to which exactly these bytes were
        added. REQUIRES: no other thread uses `page` during the call.
        """
        header = bytes(header_of(page))
        damage = self._refusal(header, key, stored_bytes)
        if damage is not None:
            return damage
        if isinstance(page, PageView):
            if not self._encrypts and not header[ENCODING]:
                is_proved = self._is_proved(header, [page.header[COVERED_FROM:], *page.parts], arrived)
                return None if is_proved else Damage.TAG
            frame = self._buffers.take()
            page.gather(frame)
            damage = self.accept(key, frame, stored_bytes, arrived)
            if damage is None:
                page.scatter(frame)
            return damage
        frame = page
        body = frame[HEADER_BYTES : HEADER_BYTES + int.from_bytes(header[STORED], "little")]
        encoding = header[ENCODING]
        if not self._encrypts:
            if not self._is_proved(header, [frame[COVERED_FROM : HEADER_BYTES + len(body)]], arrived):
                return Damage.TAG
            if not encoding:
                return None
            packed, body = body, self._buffers.take()[: len(body)]
            body[:] = packed
        else:
            target = self._buffers.take()[: len(body)] if encoding else body
            if not self._decrypt(header, body, target):
                return Damage.TAG
            body = target
        payload = frame[HEADER_BYTES : HEADER_BYTES + self.payload_bytes]
        if encoding and not self._expand(Encoding(encoding), body, payload):
            return Damage.COMPRESSION
        frame[:HEADER_BYTES] = self._proved_header(header, key)
        return None

    def _expand(self, encoding: Encoding, body: memoryview, payload: memoryview) -> bool:
        if not encoding & Encoding.BYTE_PLANES:
            return expand(body, payload)
        planes = self._buffers.take()[: self.payload_bytes]
        if self.payload_bytes % 2 or not expand(body, planes):
            return False
        join_planes(planes, payload)
        return True

    def _proved_header(self, header: bytes, key: bytes) -> bytes:
        """Return the header of a plain page without a tag."""
        start = pack_start(TagKind.NONE, Encoding(0), NO_KEY_ID, self.payload_bytes)
        fixed = pack_fixed(start, key, header[PARENT], self.namespace, self.payload_bytes, header[METADATA])
        return (MAGIC + _NO_TAG + NO_NONCE + fixed + header[STORED_TIME]).ljust(HEADER_BYTES, b"\0")

    def check(self, key: bytes, stored: memoryview) -> Damage | None:
        """Return None if all of `stored` is verified as the page `key` of this namespace, else its damage.

        Like `accept`, but mutates nothing. Of a compressed page it only verifies that the stored bytes are unchanged.
        """
        header = bytes(stored[:HEADER_BYTES])
        damage = self._refusal(header, key, len(stored))
        if damage is not None:
            return damage
        body = stored[HEADER_BYTES : HEADER_BYTES + int.from_bytes(header[STORED], "little")]
        if self._encrypts:
            return None if self._decrypt(header, body, self._buffers.take()[: len(body)]) else Damage.TAG
        covered = stored[COVERED_FROM : HEADER_BYTES + len(body)]
        return None if self._is_proved(header, [covered], None) else Damage.TAG

    def _refusal(self, header: bytes, key: bytes, stored_bytes: int) -> Damage | None:
        """Return the damage that the header and the size alone show, or None."""
        if not self.fits(stored_bytes):
            return Damage.SIZE
        if (
            header[VERSION_AND_KIND] != self._version_and_kind
            or header[KEY_ID] not in self._known_ids
            or header[LENGTH_AND_KEY] != self._length + key
            or header[PARENT] == key != NO_PARENT
            or header[NAMESPACE] != self.namespace
            or header[ENCODING] not in ENCODINGS
            or not header.startswith(MAGIC)
        ):
            return self._first_difference(header, key)
        stored = int.from_bytes(header[STORED], "little")
        if stored > self.payload_bytes or not stored or (not header[ENCODING] and stored != self.payload_bytes):
            return Damage.LENGTH
        if frame_bytes(stored) != stored_bytes:
            return Damage.SIZE
        return Damage.NO_ZSTD if header[ENCODING] and not is_available() else None

    def _is_proved(self, header: bytes, covered: Sequence[memoryview], arrived: TagStream | None) -> bool:
        if self.tag_kind is TagKind.NONE:
            return True
        if arrived is not None:
            return hmac.compare_digest(header[TAG], arrived.digest())
        return hmac.compare_digest(header[TAG], self._tag(header[KEY_ID], header[NONCE], covered))

    def _tag(self, key_id: bytes, nonce: bytes, covered: Sequence[memoryview]) -> bytes:
        if self.tag_kind is TagKind.NONE:
            return _NO_TAG
        if self.tag_kind is TagKind.AES_256_GMAC:
            if len(covered) == 1:
                return self._ciphers[key_id].encrypt(nonce, b"", covered[0])
            mac = Cipher(self._algorithms[key_id], modes.GCM(nonce)).encryptor()
            for part in covered:
                mac.authenticate_additional_data(part)
            mac.finalize()
            return mac.tag
        state = xxhash.xxh3_128()
        for part in covered:
            state.update(part)
        return state.digest()

    def _decrypt(self, header: bytes, body: memoryview, target: memoryview) -> bool:
        """Decrypt `body` into `target`, which may be `body` itself. Return False if `body` fails authentication."""
        algorithm = self._algorithms[header[KEY_ID]]
        decryptor = Cipher(algorithm, modes.GCM(header[NONCE], header[TAG])).decryptor()
        decryptor.authenticate_additional_data(header[COVERED_FROM:])
        decryptor.update_into(body, target)
        try:
            decryptor.finalize()
        except InvalidTag:
            return False
        return True

    def _first_difference(self, header: bytes, key: bytes) -> Damage:
        found = FrameHeader.parse(header)
        if found is None:
            return Damage.NOT_A_FRAME
        for damage, differs in (
            (Damage.VERSION, found.version != FORMAT_VERSION),
            (Damage.TAG_KIND, found.tag_kind != self.tag_kind),
            (Damage.ENCRYPTION_KEY if self._encrypts else Damage.MAC_KEY, found.key_id not in self._known_ids),
            (Damage.LENGTH, found.payload_bytes != self.payload_bytes),
            (Damage.PAGE_KEY, found.page_key != key),
            (Damage.PARENT_KEY, found.parent_key == key != NO_PARENT),
            (Damage.NAMESPACE, found.namespace != self.namespace),
        ):
            if differs:
                return damage
        return Damage.HEADER


def _tag_and_keys(
    tag: TagKind, mac_keys: Sequence[bytes], encryption_keys: Sequence[bytes]
) -> tuple[TagKind, dict[bytes, bytes]]:
    """Return the kind of tag, and its keys by their ids."""
    if mac_keys and encryption_keys:
        raise InvalidInput("frame: pass MAC keys or encryption keys, not both; encryption also authenticates the page")
    keys = encryption_keys or mac_keys
    if keys:
        tag = TagKind.AES_256_GCM if encryption_keys else TagKind.AES_256_GMAC
    elif tag in (TagKind.AES_256_GMAC, TagKind.AES_256_GCM):
        raise InvalidInput(f"frame: {tag.name} needs a key")
    return tag, dict(key_table(tag, keys))


def unseal(frame: memoryview) -> None:
    """Mark the payload of `frame` as changed: the next `seal` computes a new tag."""
    frame[:8] = bytes(8)

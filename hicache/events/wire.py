"""KV events as bytes: one MessagePack document per batch, as docs/formats/kv_events.md has it.

The form is the one that subscribers of vLLM and SGLang decode. Needs msgspec (extra `events`).
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..config.publishing import Dialect
from ..errors import InvalidInput
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES
from .types import Cleared, Event, Medium, Removed, Stored

# What consumers call the media.
_NAMES = {Medium.DEVICE: "GPU", Medium.HOST: "CPU", Medium.STORAGE: "STORAGE"}
_MEDIA = {name: medium for medium, name in _NAMES.items()}
_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
           "extra_keys")  # fmt: skip
# SGLang's events end with the medium, and its hashes are the first 8 bytes of the page key as a signed number.
_SGLANG_FIELDS = _FIELDS.index("medium") + 1
_SGLANG_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class WireBatch:
    """A decoded batch. `timestamp_s` is the publisher's clock, since 1970; `rank` is its data-parallel rank."""

    timestamp_s: float
    events: tuple[Event, ...]
    rank: int | None


class BatchEncoder:
    """Writes batches in one dialect. Without `token_ids`, tokens and seeds are left out. Used by one thread."""

    def __init__(self, dialect: Dialect, *, token_ids: bool = True, rank: int | None = None) -> None:
        self._dialect = dialect
        self._token_ids = token_ids
        self._rank = rank
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Iterable[Event], timestamp_s: float) -> bytes:
        """The bytes of one batch."""
        return self._encoder.encode((timestamp_s, [self._plain(event) for event in events], self._rank))

    def _plain(self, event: Event) -> object:
        if isinstance(event, Stored):
            values = self._stored(event)
            if self._dialect == "sglang":
                values = values[:_SGLANG_FIELDS]
            return self._tagged("BlockStored", dict(zip(_FIELDS, values, strict=False)))
        if isinstance(event, Removed):
            hashes = [self._hash(key) for key in event.keys]
            return self._tagged("BlockRemoved", {"block_hashes": hashes, "medium": _NAMES[event.medium]})
        return self._tagged("AllBlocksCleared", {})

    def _stored(self, event: Stored) -> tuple[object, ...]:
        """The values of `_FIELDS`."""
        ids: list[Any] = []
        if self._token_ids:
            numbers = np.frombuffer(event.tokens, dtype="<u4")
            pairs = event.position_bytes == 2 * TOKEN_BYTES
            ids = (numbers.reshape(-1, 2) if pairs else numbers).tolist()
        hashes = [self._hash(key) for key in event.keys]
        parent = None if event.parent is None else self._hash(event.parent)
        # One entry a page, as vLLM has them: what went into the hash of that page beside its tokens.
        extra = [[event.seed], *[None] * (len(event.keys) - 1)] if event.seed and self._token_ids else None
        return hashes, parent, ids, event.page_size, None, _NAMES[event.medium], None, extra

    def _tagged(self, tag: str, fields: dict[str, object]) -> object:
        return {"type": tag, **fields} if self._dialect == "map" else (tag, *fields.values())

    def _hash(self, key: bytes) -> bytes | int:
        if self._dialect == "sglang":
            return int.from_bytes(key[:_SGLANG_HASH_BYTES], "big", signed=True)
        return key


# What consumers declare. Limits are checked below and not by `msgspec.Meta`: some releases of msgspec crash the garbage
# collector over its objects (msgspec issue 717).
class _BlockStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes]
    medium: str | None = None


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _BlockStoredArray(_BlockStored, tag="BlockStored", array_like=True):
    pass


class _BlockRemovedArray(_BlockRemoved, tag="BlockRemoved", array_like=True):
    pass


class _AllBlocksClearedArray(_AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


_envelope = msgspec.msgpack.Decoder(tuple[float, list[msgspec.Raw], int | None])
_from_map = msgspec.msgpack.Decoder(_BlockStored | _BlockRemoved | _AllBlocksCleared)
_from_array = msgspec.msgpack.Decoder(_BlockStoredArray | _BlockRemovedArray | _AllBlocksClearedArray)


def decode_batch(payload: bytes) -> WireBatch:
    """Read a batch in the dialects `ARRAY` and `MAP`, whose hashes are whole keys.

    Unknown further fields are skipped. Raises InvalidInput for what is no such batch.
    """
    try:
        timestamp_s, raws, rank = _envelope.decode(payload)
        return WireBatch(timestamp_s, tuple(_event(raw) for raw in raws), rank)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # msgspec raises all three
        raise InvalidInput("KV events: not a batch of events in the form of docs/formats/kv_events.md") from error


def _event(raw: msgspec.Raw) -> Event:
    data = memoryview(raw)
    is_map = data[0] >> 4 == 0x8 or data[0] in (0xDE, 0xDF)  # fixmap, map 16, map 32 of MessagePack
    event = (_from_map if is_map else _from_array).decode(data)
    if isinstance(event, _BlockStored):
        return _stored_event(event)
    if isinstance(event, _BlockRemoved):
        return Removed(_medium(event.medium), _keys(event.block_hashes))
    return Cleared()


def _stored_event(event: _BlockStored) -> Stored:
    keys = _keys(event.block_hashes)
    positions = len(keys) * event.block_size
    if not keys or event.block_size < 1:
        raise InvalidInput("KV events: a stored run has no positions")
    if event.token_ids and len(event.token_ids) != positions:
        raise InvalidInput(f"KV events: {len(event.token_ids)} token ids for {positions} positions")
    tokens = _token_bytes(event.token_ids)
    parent = None if event.parent_block_hash is None else _keys([event.parent_block_hash])[0]
    seed = event.extra_keys[0][0] if event.extra_keys and event.extra_keys[0] else b""
    if not isinstance(seed, bytes):
        raise InvalidInput("KV events: the extra key of a first page is no seed")
    return Stored(_medium(event.medium), keys, parent, seed and _keys([seed])[0], tokens, event.block_size)


def _token_bytes(ids: list[Any]) -> bytes:
    """Ids, or pairs of them, as uint32 little endian."""
    pairs = bool(ids) and isinstance(ids[0], tuple)
    try:
        # An array takes a list of integers three times as fast as numpy does.
        numbers = array.array("I", itertools.chain.from_iterable(ids) if pairs else ids)
    except (TypeError, OverflowError) as error:
        raise InvalidInput("KV events: token ids are beyond 32 bits, or mixed with pairs of them") from error
    return np.asarray(numbers).astype("<u4", copy=False).tobytes()


def _keys(hashes: list[bytes]) -> tuple[bytes, ...]:
    if any(len(key) != PAGE_KEY_BYTES for key in hashes):
        raise InvalidInput(f"KV events: a hash is no page key of {PAGE_KEY_BYTES} bytes")
    return tuple(hashes)


def _medium(name: str | None) -> Medium:
    """The medium of a name; none means the device, as with publishers that know no other."""
    if name is None:
        return Medium.DEVICE
    if name not in _MEDIA:
        raise InvalidInput(f"KV events: unknown medium {name[:40]!r}; known are {', '.join(_MEDIA)}")
    return _MEDIA[name]

"""KV events as bytes: one MessagePack document per batch, as docs/formats/kv_events.md has it.

The form is vLLM's, as arrays with hashes of bytes. Needs msgspec (extra `events`).
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from ..errors import InvalidInput
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES
from .types import Cleared, Event, Medium, Removed, Stored

# What consumers call the media.
_NAMES = {Medium.DEVICE: "GPU", Medium.HOST: "CPU", Medium.STORAGE: "STORAGE"}
_MEDIA = {name: medium for medium, name in _NAMES.items()}


# What consumers declare. Limits are checked below and not by `msgspec.Meta`: some releases of msgspec crash the garbage
# collector over its objects (msgspec issue 717).
class _BlockStored(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[bytes]
    medium: str | None = None


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


_decoder = msgspec.msgpack.Decoder(tuple[float, list[_BlockStored | _BlockRemoved | _AllBlocksCleared], int | None])


def encode_batch(events: Iterable[Event], timestamp_s: float, *, token_ids: bool = True) -> bytes:
    """Return the bytes of one batch. `timestamp_s` is the publisher's clock, since 1970. Without `token_ids`, tokens
    and seeds are left out."""
    return msgspec.msgpack.encode((timestamp_s, [_to_wire(event, token_ids) for event in events], None))


def _to_wire(event: Event, token_ids: bool) -> msgspec.Struct:
    if isinstance(event, Cleared):
        return _AllBlocksCleared()
    hashes, medium = list(event.keys), _NAMES[event.medium]
    if isinstance(event, Removed):
        return _BlockRemoved(hashes, medium)
    ids: list[Any] = []
    if token_ids:
        numbers = np.frombuffer(event.tokens, dtype="<u4")
        pairs = event.position_bytes == 2 * TOKEN_BYTES
        ids = (numbers.reshape(-1, 2) if pairs else numbers).tolist()
    # One entry a page, as vLLM has them: what went into the hash of that page beside its tokens.
    extra = [[event.seed], *[None] * (len(hashes) - 1)] if event.seed and token_ids else None
    return _BlockStored(hashes, event.parent, ids, event.page_size, None, medium, None, extra)


def decode_batch(payload: bytes) -> tuple[Event, ...]:
    """Return the events of a batch. Further fields at the end of an event are skipped.

    Raises InvalidInput if `payload` is not such a batch.
    """
    try:
        _, events, _ = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # msgspec raises all three
        raise InvalidInput("KV events: not a batch of events in the form of docs/formats/kv_events.md") from error
    return tuple(map(_from_wire, events))


def _from_wire(event: _BlockStored | _BlockRemoved | _AllBlocksCleared) -> Event:
    if isinstance(event, _AllBlocksCleared):
        return Cleared()
    keys = _keys(event.block_hashes)
    if isinstance(event, _BlockRemoved):
        return Removed(_medium(event.medium), keys)
    positions = len(keys) * event.block_size
    if not keys or event.block_size < 1:
        raise InvalidInput("KV events: a stored run has no positions")
    if event.token_ids and len(event.token_ids) != positions:
        raise InvalidInput(f"KV events: {len(event.token_ids)} token ids for {positions} positions")
    parent = None if event.parent_block_hash is None else _keys([event.parent_block_hash])[0]
    seed = event.extra_keys[0][0] if event.extra_keys and event.extra_keys[0] else b""
    if not isinstance(seed, bytes):
        raise InvalidInput("KV events: the extra key of a first page is not a seed")
    tokens = _token_bytes(event.token_ids)
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
        raise InvalidInput(f"KV events: a hash is not a page key of {PAGE_KEY_BYTES} bytes")
    return tuple(hashes)


def _medium(name: str | None) -> Medium:
    """The medium of a name; no name means the device, as with publishers that know no other medium."""
    if name is None:
        return Medium.DEVICE
    if name not in _MEDIA:
        raise InvalidInput(f"KV events: unknown medium {name[:40]!r}; known are {', '.join(_MEDIA)}")
    return _MEDIA[name]

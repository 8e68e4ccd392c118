"""KV events as bytes: one MessagePack document per batch, as specified in docs/formats/kv_events.md.

Events are maps that the decoders of vLLM and SGLang can read: hashes are integers, and a field `hicache`, which both
skip, has the whole page keys. Needs msgspec (extra `events`).
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..errors import InvalidInput
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES, split_keys
from .blocks import GROUP, BlockEvent, BlocksRemoved, BlocksStored
from .types import MEDIUM_NAMES, Cleared, Event, Medium, Origin, Removed, Stored

_MEDIA = {name: medium for names in MEDIUM_NAMES.values() for medium, name in names.items()}
_HASHES_PER_KEY = PAGE_KEY_BYTES // 8


@dataclass(frozen=True, slots=True)
class WireForm:
    """The optional content of events: `token_ids` adds tokens and seeds, `tenants` adds salts and sessions.

    `data_parallel_rank` is the engine's rank, or None. `media` is a key of `MEDIUM_NAMES`.
    """

    token_ids: bool = True
    tenants: bool = False
    data_parallel_rank: int | None = None
    media: str = "vllm"


class _Own(msgspec.Struct, array_like=True):
    """The fields that HiCache adds to a stored run: its page keys, 32 bytes each, the parent's key, the seed, and for
    bigrams the second token of the last pair."""

    keys: bytes
    parent: bytes | None = None
    seed: bytes = b""
    last_token: int | None = None


class _OwnOfBlocks(_Own, array_like=True):
    """The same in an event of blocks, with the positions per page."""

    page_size: int = 0


# The fields that consumers declare; one without a default is always present, because vLLM requires it. Limits are
# checked below and not by `msgspec.Meta`, which crashes the garbage collector in some releases (msgspec issue 717).
class _BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    hicache: _Own | None = None


class _ReadStored(_BlockStored, tag="BlockStored", omit_defaults=True):
    hicache: _OwnOfBlocks | None = None


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    hicache: bytes | None = None  # the page keys, 32 bytes each


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


_decoder = msgspec.msgpack.Decoder(tuple[float, list[_ReadStored | _BlockRemoved | _AllBlocksCleared], int | None])


def encode_batch(events: Iterable[Event | BlockEvent], timestamp_s: float, form: WireForm = WireForm()) -> bytes:
    """Return the bytes of one batch. `timestamp_s` is the publisher's clock, since 1970."""
    return msgspec.msgpack.encode((timestamp_s, [_to_wire(event, form) for event in events], form.data_parallel_rank))


def _to_wire(event: Event | BlockEvent, form: WireForm) -> msgspec.Struct:
    if isinstance(event, Cleared):
        return _AllBlocksCleared()
    joined, medium = b"".join(event.keys), MEDIUM_NAMES[form.media][event.medium]
    if isinstance(event, BlocksStored):
        return _blocks_to_wire(event, joined, medium, form)
    if isinstance(event, BlocksRemoved):
        return _BlockRemoved(_block_hashes(event.hashes), medium, GROUP, joined)
    if isinstance(event, Removed):
        return _BlockRemoved(key_hashes(joined), medium, hicache=joined)
    ids: list[int] = []
    own = _Own(joined, event.parent)
    if form.token_ids:
        numbers = np.frombuffer(event.tokens, dtype="<u4")
        if event.position_bytes == 2 * TOKEN_BYTES:  # each pair begins with the second token of the previous pair
            own.last_token = int(numbers[-1])
            numbers = numbers[::2]
        ids = numbers.tolist()
        own.seed = event.seed
    parent, origin = event.parent, event.origin
    return _BlockStored(
        key_hashes(joined), None if parent is None else key_hashes(parent)[0], ids, event.page_size,
        origin.lora_id, medium, origin.lora_name, _extra_keys(event, own.seed, form),
        cache_salt=origin.cache_salt if form.tenants else None,
        session_id=origin.session_id if form.tenants else None, hicache=own,
    )


def _blocks_to_wire(event: BlocksStored, joined: bytes, medium: str, form: WireForm) -> msgspec.Struct:
    ids = np.frombuffer(event.tokens, dtype="<u4").tolist() if form.token_ids else []
    labels = event.labels
    return _BlockStored(
        _block_hashes(event.hashes), None if event.parent is None else _block_hashes([event.parent])[0], ids,
        event.block_tokens, labels.lora_id, medium, labels.lora_name,
        [None if keys is None else list(keys) for keys in event.extra_keys], GROUP, labels.spec_kind,
        labels.sliding_window, hicache=_OwnOfBlocks(joined, event.page_parent, page_size=event.page_tokens),
    )


def key_hashes(keys: bytes) -> list[int]:
    """Return the integers by which consumers identify pages: the first 64 bits of each page key, as SGLang publishes
    them for the same keys."""
    hashes: list[int] = np.frombuffer(keys, dtype=">i8")[::_HASHES_PER_KEY].tolist()
    return hashes


def _block_hashes(hashes: Sequence[bytes]) -> list[int]:
    """Return the integers by which consumers identify blocks of vLLM: the last 64 bits, as vLLM publishes them."""
    numbers: list[int] = np.frombuffer(b"".join(hashes), dtype=">u8")[_HASHES_PER_KEY - 1 :: _HASHES_PER_KEY].tolist()
    return numbers


def _extra_keys(event: Stored, seed: bytes, form: WireForm) -> list[list[Any] | None] | None:
    """Return one entry per page, as in vLLM: the adapter, and for the first page of a prompt the salt. The seed
    replaces a withheld adapter or salt, so that a consumer does not share the page between tenants."""
    name, salt = event.origin.lora_name, event.origin.cache_salt if event.parent is None else None
    each: list[Any] = [] if name is None else [name]
    first = list(each)
    if salt is not None and form.tenants:
        first.append(salt)
    elif seed and (salt is not None or name is None):
        first.append(seed)
    if not first:
        return None
    return [first, *[each or None] * (len(event.keys) - 1)]


def decode_batch(payload: bytes) -> tuple[Event, ...]:
    """Return the events of a batch. Unknown fields of an event are skipped.

    Raises InvalidInput if `payload` is not such a batch, or was not made by a publisher of HiCache.
    """
    try:
        _, events, _ = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # msgspec raises all three
        raise InvalidInput("KV events: not a batch of events in the form of docs/formats/kv_events.md") from error
    return tuple(map(_from_wire, events))


def _from_wire(event: _ReadStored | _BlockRemoved | _AllBlocksCleared) -> Event:
    if isinstance(event, _AllBlocksCleared):
        return Cleared()
    own = event.hicache
    if own is None:
        raise InvalidInput("KV events: the batch has no page keys; connect to a publisher of HiCache")
    if isinstance(own, bytes):
        return Removed(_medium(event.medium), _keys(own, None if event.group_idx == GROUP else len(event.block_hashes)))
    assert isinstance(event, _ReadStored)
    page_size = own.page_size or event.block_size
    keys = _keys(own.keys, None if own.page_size else len(event.block_hashes))
    if not keys or page_size < 1:
        raise InvalidInput("KV events: a stored run has no positions")
    medium, parent = _medium(event.medium), None if own.parent is None else _keys(own.parent, 1)[0]
    origin = Origin(event.lora_id, event.lora_name, event.cache_salt, event.session_id)
    if own.page_size:  # the tokens of these pages are unknown: the blocks may be only a part
        return Stored(medium, keys, parent, b"", b"", page_size, origin)
    if event.token_ids and len(event.token_ids) != len(keys) * page_size:
        raise InvalidInput(f"KV events: {len(event.token_ids)} token ids for {len(keys) * page_size} positions")
    seed = own.seed and _keys(own.seed, 1)[0]
    return Stored(medium, keys, parent, seed, _token_bytes(event.token_ids, own.last_token), page_size, origin)


def _token_bytes(ids: Sequence[int], last_token: int | None) -> bytes:
    """Return the ids, or the pairs that begin with them, as uint32 little endian."""
    try:
        # An array converts a list of integers three times as fast as numpy.
        numbers = np.asarray(array.array("I", ids)).astype("<u4", copy=False)
        if not ids or last_token is None:
            return numbers.tobytes()
        seconds = np.append(numbers[1:], np.asarray(array.array("I", [last_token])).astype("<u4"))
    except OverflowError as error:
        raise InvalidInput("KV events: token ids do not fit into 32 bits") from error
    return np.stack((numbers, seconds), axis=1).astype("<u4").tobytes()


def _keys(joined: bytes, count: int | None) -> tuple[bytes, ...]:
    """Return `count` page keys, or any number of them."""
    pages, rest = divmod(len(joined), PAGE_KEY_BYTES)
    if rest or count not in (None, pages):
        raise InvalidInput(f"KV events: {len(joined)} bytes of page keys for {count} pages of {PAGE_KEY_BYTES}")
    return tuple(split_keys(joined))


def _medium(name: str | None) -> Medium:
    """Return the medium of a name. None means the device, for publishers that have no other medium."""
    if name is None:
        return Medium.DEVICE
    if name not in _MEDIA:
        raise InvalidInput(f"KV events: unknown medium {name[:40]!r}; known are {', '.join(_MEDIA)}")
    return _MEDIA[name]

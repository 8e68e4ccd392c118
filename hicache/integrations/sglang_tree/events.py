"""KV events of HiCache's tree in the form of SGLang's own tree, for the publisher of SGLang's `--kv-events-config`.

A router for SGLang's tree reads these events: they have SGLang's hashes, tokens, parents, salts and adapters, and the
media `GPU`, `CPU_PINNED` and `EXTERNAL`. SGLang's own tree does not announce its storage; this one does.

The hash of a page is the first 64 bits of its page key, if the prompt has neither an adapter nor a salt. SGLang hashes
the pages of other prompts a second time for its events: the chain begins with a digest of the salt, and in some cases
the result is mixed with a digest of the namespace (`sglang.srt.mem_cache.events`). HiCache does the same, and also with
the pages of models whose ids are wider than 32 bits, whose page keys are HiCache's own.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    BlockStored,
    StorageMedium,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder, KvEventLoraNames
from sglang.srt.mem_cache.utils import get_hash_str

from ...events import Cleared, EventStream, Origin, Removed, Stored
from ...events.types import MEDIUM_NAMES
from ...events.wire import key_hashes
from ...keys import TOKEN_BYTES, page_keys

# The most events of HiCache that one step translates; the others follow in the next steps. Nodes that leave a full tier
# for one large prompt are fewer, and these take some milliseconds.
EVENTS_MAX = 1024
# The start of the chain under a salt, as in `compute_node_event_hash_values` of SGLang.
_SALT_TAG = b"sglang-cache-salt-v1\0"

_MEDIA = {medium: StorageMedium(name) for medium, name in MEDIUM_NAMES["sglang"].items()}


@dataclass(slots=True)
class _Page:
    """A page that is hashed a second time: its key in SGLang's chain for events, its published hash, and the number of
    media that have it."""

    chained: bytes
    published: int
    media: int = 0


class TreeEvents:
    """Reads `stream` and translates its events for `take_events` of SGLang's tree.

    The scheduler's thread owns it. `take` hashes page keys that nothing has hashed before, as SGLang's own tree does at
    the same place. `lora_names` are those of SGLang's `CacheInitParams`, and `dynamo_format` its
    `dynamo_kv_event_format`. `wide_ids`: a position is one token of 64 bits. REQUIRES: the events have tokens, and
    `name_origin` is called for each prompt that has an `extra_key` or a salt, before it enters the tree.

    Invariant: `_pages` has the pages that are hashed a second time, by page key, and are on at least one medium.
    """

    def __init__(
        self, stream: EventStream, *, page_size: int, lora_names: KvEventLoraNames, dynamo_format: bool = False,
        wide_ids: bool = False,
    ) -> None:
        self._reader = stream.subscribe()
        self._lora_names = lora_names
        self._dynamo_format = dynamo_format
        self._wide_ids = wide_ids
        self._pages: dict[bytes, _Page] = {}
        # SGLang's queue, which joins consecutive events. As in SGLang, the first event makes routers forget the pages
        # of an earlier process at this address.
        self._queue = KVCacheEventRecorder(enabled=True, page_size=page_size)
        self._queue.record_all_cleared()

    def take(self) -> list[Any]:
        """Return the next events in SGLang's form; an empty list if there are none. Never waits.

        After a gap in the stream, the events are `AllBlocksCleared`, and some steps later a snapshot of the tree.
        """
        for event in self._reader.drain(EVENTS_MAX):
            if isinstance(event, Cleared):
                self._pages.clear()
                self._queue.record_all_cleared()
            elif isinstance(event, Stored):
                self._store(event)
            else:
                self._remove(event)
        events: list[Any] = self._queue.take()
        return events

    def close(self) -> None:
        """Stop reading the stream. Idempotent."""
        self._reader.close()

    def _store(self, event: Stored) -> None:
        origin, parent = event.origin, None
        if origin.extra_key is None and origin.cache_salt is None and not self._wide_ids:
            hashes = key_hashes(b"".join(event.keys))
            if event.parent is not None:
                (parent,) = key_hashes(event.parent)
        else:
            above = None if event.parent is None else self._pages.get(event.parent)
            if above is None and event.parent is not None:
                return  # its namespace was named later than its first pages, so routers do not know the parent
            hashes = self._hash_again(event, above)
            parent = None if above is None else above.published
        names = self._lora_names
        self._queue.enqueue(
            BlockStored(
                block_hashes=hashes, parent_block_hash=parent, token_ids=self._token_ids(event),
                block_size=event.page_size, lora_id=None, medium=_MEDIA[event.medium], cache_salt=origin.cache_salt,
                session_id=origin.session_id,
                lora_name=names.resolve(origin.extra_key) if self._dynamo_format else names.get(origin.extra_key),
            )
        )

    def _hash_again(self, event: Stored, above: _Page | None) -> list[int]:
        """Return the published hashes of a run after the page `above`, and count the run's medium."""
        pages = self._pages
        if not all(key in pages for key in event.keys):
            chain, seed = self._chain(event, above), self._seed(event.origin)
            for key, chained, number in zip(event.keys, chain, key_hashes(b"".join(chain)), strict=True):
                if key not in pages:
                    pages[key] = _Page(chained, namespaced_block_hash(number, namespace_seed=seed))
        found = [pages[key] for key in event.keys]
        for page in found:
            page.media += 1
        return [page.published for page in found]

    def _chain(self, event: Stored, above: _Page | None) -> list[bytes]:
        """Return the keys of a run in SGLang's chain for events."""
        salt = event.origin.cache_salt
        if above is not None:
            prior = above.chained
        else:
            prior = b"" if salt is None else hashlib.sha256(_SALT_TAG + salt.encode()).digest()
        if self._wide_ids:
            tokens = array("q", event.tokens)
            return list(map(bytes.fromhex, get_hash_str(tokens, prior.hex(), page_size=event.page_size)))
        return page_keys(event.tokens, event.page_size * event.position_bytes // TOKEN_BYTES, prior)

    def _seed(self, origin: Origin) -> bytes | None:
        """Return the digest of the namespace that SGLang mixes into each hash, or None."""
        is_named = self._dynamo_format or self._lora_names.get(origin.extra_key) is not None
        seed: bytes | None = kv_event_namespace_seed(
            extra_key=origin.extra_key if is_named else None,
            cache_salt=origin.cache_salt if self._dynamo_format else None,
        )
        return seed

    def _remove(self, event: Removed) -> None:
        hashes = key_hashes(b"".join(event.keys))
        if self._pages:
            hashes = [self._left(key, plain) for key, plain in zip(event.keys, hashes, strict=True)]
        self._queue.enqueue(BlockRemoved(block_hashes=hashes, medium=_MEDIA[event.medium]))

    def _left(self, key: bytes, plain: int) -> int:
        """Count a medium less of a page, whose hash is `plain` unless it has a namespace. Return its published hash."""
        page = self._pages.get(key)
        if page is None:
            return plain
        page.media -= 1
        if not page.media:
            del self._pages[key]
        return page.published

    def _token_ids(self, event: Stored) -> list[Any]:
        """Return the tokens; the pairs of bigrams, as SGLang publishes them."""
        if self._wide_ids:
            return array("q", event.tokens).tolist()
        ids: list[int] = np.frombuffer(event.tokens, dtype="<u4").tolist()
        return ids if event.position_bytes == TOKEN_BYTES else list(zip(ids[::2], ids[1::2], strict=True))

"""KV events in the blocks of vLLM, with the same fields as vLLM's own events of its device."""

from __future__ import annotations

import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from ...config import EventsConfig
from ...events import BlockLabels, Cleared, EventReader, PageBlocks
from ...events.blocks import GROUP, BlockLedger, BlocksStored
from ...events.types import MEDIUM_NAMES
from ...keys import namespace_seed
from .layout import BlockLayout

# The most events of pages that vLLM gets in one step; the rest follows in the next one.
_EVENTS_MAX = 10_000


class BlockDescriber:
    """Returns the blocks of a page of a request. `spec` is that of the engine's only group. Without `salts`, a digest
    replaces the tenant's salt."""

    def __init__(self, layout: BlockLayout, spec: KVCacheSpec, *, salts: bool) -> None:
        self._block_tokens, self._per_page = layout.block_tokens, layout.blocks_per_page
        self._kind = get_kv_cache_spec_kind(spec).value
        self._sliding_window = get_kv_cache_spec_sliding_window(spec)
        self._salts = salts
        self._plain: tuple[None, ...] = (None,) * self._per_page

    def __call__(self, request: Any, page: int) -> PageBlocks:
        """Return the blocks of page `page`. REQUIRES: `request` has the hashes of its blocks."""
        begin, end = page * self._per_page, (page + 1) * self._per_page
        tokens = request.all_token_ids[begin * self._block_tokens : end * self._block_tokens]
        adapter = request.lora_request
        lora_id, lora_name = (None, None) if adapter is None else (adapter.adapter_id, adapter.name)
        return PageBlocks(
            hashes=b"".join(request.block_hashes[begin:end]),
            parent=request.block_hashes[begin - 1] if begin else None,
            # An array converts a list of integers four times as fast as numpy.
            tokens=np.asarray(array.array("I", tokens)).astype("<u4", copy=False).tobytes(),
            extra_keys=self._extra_keys(request, begin, end),
            labels=BlockLabels(lora_id, lora_name, self._kind, self._sliding_window),
        )

    def _extra_keys(self, request: Any, begin: int, end: int) -> tuple[tuple[Any, ...] | None, ...]:
        salt = request.cache_salt
        if not (request.lora_request or request.mm_features or salt or request.prompt_embeds is not None):
            return self._plain
        keys: list[tuple[Any, ...] | None] = []
        for block in range(begin, end):
            start = block * self._block_tokens
            found, _ = generate_block_hash_extra_keys(request, start, start + self._block_tokens, 0)
            if salt and found and not self._salts:
                found = tuple((key[0], namespace_seed(None, salt)) if key[0] == "cache_salt" else key for key in found)
            keys.append(found)
        return tuple(to_event_extra_keys(keys) or self._plain)


def describer(section: EventsConfig, layout: BlockLayout, spec: KVCacheSpec, *, in_vllm: bool) -> BlockDescriber | None:
    """Return the describer for events that have tokens, published by vLLM or by HiCache; None for others."""
    if not section.token_ids or not (in_vllm or section.endpoint is not None):
        return None
    # vLLM publishes salts in the events of its device.
    return BlockDescriber(layout, spec, salts=in_vllm or section.tenants)


class BlockEvents:
    """The events of host memory and storage, for vLLM, which publishes them with those of its device."""

    def __init__(self, reader: EventReader, media: str) -> None:
        self._reader = reader
        self._ledger = BlockLedger()
        self._names = MEDIUM_NAMES[media]

    def take(self) -> Iterator[KVCacheEvent]:
        """Yield the events since the last call; take all of them. Scheduler thread."""
        for event in self._reader.drain(_EVENTS_MAX):
            # AllBlocksCleared would also withdraw the blocks of vLLM's device.
            for found in self._ledger.withdraw() if isinstance(event, Cleared) else self._ledger.translate([event]):
                if not isinstance(found, Cleared) and found.hashes:
                    hashes = [maybe_convert_block_hash(BlockHash(block)) for block in found.hashes]
                    medium = self._names[found.medium]
                    if isinstance(found, BlocksStored):
                        yield _stored(found, hashes, medium)
                    else:
                        yield BlockRemoved(block_hashes=hashes, medium=medium, group_idx=GROUP)


def _stored(event: BlocksStored, hashes: list[Any], medium: str) -> BlockStored:
    labels = event.labels
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if event.parent is None else maybe_convert_block_hash(BlockHash(event.parent)),
        token_ids=np.frombuffer(event.tokens, "<u4").tolist(), block_size=event.block_tokens, lora_id=labels.lora_id,
        medium=medium, lora_name=labels.lora_name, extra_keys=list(event.extra_keys), group_idx=GROUP,
        kv_cache_spec_kind=labels.spec_kind, kv_cache_spec_sliding_window=labels.sliding_window,
    )

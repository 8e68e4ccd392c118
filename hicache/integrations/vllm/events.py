"""HiCache's events of host memory and storage as vLLM's own KV events.

vLLM publishes the events that a connector returns from `take_events` together with those of its device. A page key is
the hash of the page's last block, so subscribers know it from the device's events; pages of adapters have keys of
HiCache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from ...events import Cleared, Event, Medium, Stored

# The names of vLLM's own tiers in its events.
_MEDIUMS = {Medium.HOST: "CPU", Medium.STORAGE: "STORAGE"}


def vllm_events(events: Iterable[Event]) -> Iterator[KVCacheEvent]:
    """Yield the events in vLLM's form. The tokens are unknown: vLLM hashes them, and HiCache only gets hashes."""
    for event in events:
        if isinstance(event, Cleared):
            yield AllBlocksCleared()
        elif isinstance(event, Stored):
            yield BlockStored(
                block_hashes=[maybe_convert_block_hash(key) for key in event.keys],
                parent_block_hash=None if event.parent is None else maybe_convert_block_hash(event.parent),
                token_ids=[],
                block_size=event.page_size,
                lora_id=None,
                medium=_MEDIUMS[event.medium],
                lora_name=None,
            )
        else:
            hashes = [maybe_convert_block_hash(key) for key in event.keys]
            yield BlockRemoved(block_hashes=hashes, medium=_MEDIUMS[event.medium])

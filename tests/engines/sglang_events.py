"""The KV events of SGLang's tree and of HiCache's, for the same prompts. For test_sglang_events.py.

Runs in its own process, as sglang_facts.py. Both trees hold each prompt on the device and in host memory, and then lose
all of it. There is no model.
"""

from __future__ import annotations

import unittest
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from .process import serve
from .sglang_pools import test_kit

PAGE_TOKENS = 4
# The namespace of a LoRA adapter in this process ends with its id.
ADAPTER_ID = "ab" * 16


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    parts = test_kit()
    from sglang.srt.disaggregation.kv_events import (  # noqa: PLC0415
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
    )
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams  # noqa: PLC0415
    from sglang.srt.mem_cache.events import KvEventLoraNames  # noqa: PLC0415
    from sglang.srt.mem_cache.radix_cache import RadixKey as TheirKey  # noqa: PLC0415
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: PLC0415
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: PLC0415
    from sglang.test.kits.unified_radix_cache.kv_events import (  # noqa: PLC0415
        LoraReq,
        UnifiedRadixCacheKVEventsFixtures,
    )

    from hicache.events import EventStream  # noqa: PLC0415
    from hicache.integrations.sglang_tree.events import TreeEvents  # noqa: PLC0415
    from hicache.keys import BIGRAM_BYTES, TOKEN_BYTES, RadixKey, namespace_seed  # noqa: PLC0415
    from tests.cache.world import World, memory_backend  # noqa: PLC0415

    class Fixture(UnifiedRadixCacheKVEventsFixtures, unittest.TestCase):  # type: ignore[misc]
        """A tree of SGLang with host memory."""

        def __init__(self, bigram: bool, **made: Any) -> None:
            super().__init__("runTest")
            self.cfg = parts.config.CacheConfig(
                page_size=PAGE_TOKENS, components=(ComponentType.FULL,), kv_size=4096, is_eagle=bigram
            )
            self.cache, self.allocator, _ = parts.fixtures.build_fixture(
                self.cfg, enable_kv_cache_events=True, tree_core_backend="python", **made
            )

        def insert(self, cache: Any, tokens: list[int], extra_key: str | None, cache_salt: str | None) -> None:
            key = TheirKey(array("q", tokens), extra_key=extra_key, cache_salt=cache_salt)
            length = (len(tokens) - self.cfg.is_eagle) // PAGE_TOKENS * PAGE_TOKENS
            cache.insert(InsertParams(key=key, value=self.allocator.alloc(len(tokens))[:length]))

    def adapters() -> Any:
        """Return names as the scheduler keeps them: of an adapter loaded at start, and of a request's namespace."""
        names = KvEventLoraNames()
        names.register(lora_id=ADAPTER_ID, lora_name="at start")
        names.register(LoraReq("named"), "of a request")
        return names

    def flat(events: list[Any]) -> list[list[Any]]:
        """Return each block that was stored or removed, in order."""
        found: list[list[Any]] = []
        for event in events:
            if isinstance(event, BlockStored):
                parent, size = event.parent_block_hash, event.block_size
                for number, block in enumerate(event.block_hashes):
                    ids = [list(each) if isinstance(each, tuple) else each for each in event.token_ids]
                    found.append([
                        event.medium, block, parent, ids[number * size : (number + 1) * size], event.lora_id,
                        event.cache_salt, event.session_id, event.lora_name,
                    ])
                    parent = block
            elif isinstance(event, BlockRemoved):
                found += [[event.medium, block] for block in event.block_hashes]
            else:
                assert isinstance(event, AllBlocksCleared)
                found.append(["cleared"])
        return found

    def theirs(prompts: list[list[Any]], bigram: bool, dynamo: bool) -> list[list[list[Any]]]:
        """Return the blocks of SGLang's events by medium: "GPU" of its two trees, then "CPU_PINNED"."""
        made = Fixture(bigram, dynamo_kv_event_format=dynamo, kv_event_lora_names=adapters())
        made.cache.cache_init_params.tree_core_backend = "rust"
        rust = UnifiedRadixCache(made.cache.cache_init_params)
        made._init_hicache(made.cache)
        made.cache.take_events()
        rust.take_events()
        events, others = [], []
        for tokens, extra_key, cache_salt in prompts:
            made.insert(made.cache, tokens, extra_key, cache_salt)
            made.insert(rust, tokens, extra_key, cache_salt)
            core = made.cache.tree_core
            for node in sorted(set(core.get_all_node_ids()) - {made.cache.root_node_handle()}):
                if core.get_component_host_value(node, ComponentType.FULL) is None:
                    made._backup_node(made.cache, node)
            events += made.cache.take_events()
            others += rust.take_events()
        made.cache.evict(EvictParams(num_tokens=100_000))
        rust.evict(EvictParams(num_tokens=100_000))
        made.cache.evict_host(100_000)
        events += made.cache.take_events()
        others += rust.take_events()
        made.doCleanups()
        return [
            [each for each in flat(events) if each[0] == "GPU"], flat(others),
            [each for each in flat(events) if each[0] == "CPU_PINNED"],
        ]

    def ours(
        prompts: list[list[Any]], bigram: bool = False, dynamo: bool = False, behind: bool = False, wide: bool = False
    ) -> list[list[list[Any]]]:
        """Return the blocks of HiCache's events while the prompts are served, and while they leave both tiers. With
        `behind`, the stream has dropped most events before the first ones are taken."""
        world = World(
            position_bytes=BIGRAM_BYTES if bigram or wide else TOKEN_BYTES, device_pages=256, host_pages=256,
            backend=memory_backend(),
        )
        stream = EventStream(1 if behind else 1 << 20)
        world.cache.record_events(stream)
        events = TreeEvents(stream, page_size=PAGE_TOKENS, lora_names=adapters(), dynamo_format=dynamo, wide_ids=wide)
        for number, (tokens, extra_key, cache_salt) in enumerate(prompts):
            world.cache.name_origin(extra_key=extra_key, cache_salt=cache_salt)
            if wide:
                seed = namespace_seed(extra_key, cache_salt)
                key = RadixKey(array("q", tokens).tobytes(), seed, BIGRAM_BYTES)
            else:
                key = RadixKey.of(tokens, bigram=bigram, extra_key=extra_key, cache_salt=cache_salt)
            world.serve(f"r{number}", key)
            world.settle()
        found = []
        for step in (world.settle, world.forget):
            step()
            taken = events.take()
            while not events._reader.in_sync:
                world.step()
                taken += events.take()
            found.append(flat(taken))
        world.close()
        return found

    return {"theirs": theirs, "ours": ours}


if __name__ == "__main__":
    serve(start)

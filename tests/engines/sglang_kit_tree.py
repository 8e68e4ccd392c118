"""SGLang's random test of locks (`sglang.test.kits`) on HiCache's tree, in its own process. For
test_sglang_tree_kits.py.

The kit inserts prefixes into a tree, locks and unlocks them, and evicts. Its calls are those of SGLang's own tree; the
adapter makes them with the methods that SGLang's scheduler has. The pools are those of a scheduler that does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.waiting import wait_for

from .process import serve
from .sglang_scheduler import scheduled


class Adapter:
    """The calls of SGLang's own tree for a HiCacheTree."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self.tree_core = tree  # for is_root
        self.match_prefix = tree.match_prefix
        self.evict = tree.evict
        self.locks = 0

    def insert(self, params: Any) -> None:
        """Let a request insert the slots and end, as `release_kv_cache` does."""
        from sglang.srt.managers.schedule_batch import Req  # noqa: PLC0415
        from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415
        from sglang.test.mem_cache_utils import finish_req  # noqa: PLC0415

        tree, tokens = self._tree, params.key.raw_token_ids()
        request = Req("insert", "", tokens, SamplingParams(max_new_tokens=1))
        tree.req_to_token_pool.alloc([request])
        tree.req_to_token_pool.write((request.kv.req_pool_idx, slice(0, len(tokens))), params.value)
        request.kv.kv_committed_len = request.kv.kv_allocated_len = len(tokens)
        request.last_node = tree.root_node_handle()
        request.lock = tree.lock(request.last_node)
        finish_req(tree, request, len(tokens))
        tree.req_to_token_pool.free(request)

    def inc_lock_ref(self, node: Any, skip_lock_components: tuple[object, ...]) -> Any:
        """Lock. The receipt says that no window was locked."""
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: PLC0415

        assert skip_lock_components == ()
        self.locks += 1
        receipt = self._tree.inc_lock_ref(node)
        receipt.set_lock_uuid(ComponentType.SWA, None)
        return receipt

    def dec_lock_ref(self, node: Any, params: Any, skip_swa: bool) -> None:
        """Unlock."""
        assert not skip_swa
        self._tree.dec_lock_ref(node, params)

    def sanity_check(self) -> None:
        """Check the tree, and take in its copies, as the scheduler does in each step."""
        self._tree.cache.check()
        self._tree.check_hicache_events()


class OnePool:
    """SGLang's allocator, for a kit that also frees the slots of windows."""

    def __init__(self, allocator: Any) -> None:
        self.alloc = allocator.alloc
        self.available_size = allocator.available_size

    def free_swa(self, slots: Any) -> None:
        """Do nothing: there are no windows."""


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    scheduler = scheduled(options)

    from sglang.test.kits.unified_radix_cache import insert_walk  # noqa: PLC0415
    from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: PLC0415

    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator

    def run_seed(seed: int) -> dict[str, int]:
        """Return the number of locks, and the tokens that are free, evictable and protected at the end."""
        adapter = Adapter(tree)
        insert_walk.build_fixture = lambda _: (adapter, OnePool(allocator), scheduler.req_to_token_pool)
        kit = insert_walk.SegmentLockFuzzFixtures()
        kit.cfg = CacheConfig(page_size=options["page_size"])
        kit._run_seed(seed)

        def copied() -> bool:
            tree.check_hicache_events()
            return bool(tree.protected_size() == 0)

        wait_for(copied)  # a node is locked while its copy to the host is in flight
        sizes = {"free": allocator.available_size(), "evictable": tree.evictable_size()}
        return {"locks": adapter.locks, "protected": tree.protected_size(), **sizes}

    return {"run_seed": run_seed}


if __name__ == "__main__":
    serve(start)

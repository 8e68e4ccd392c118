"""A request computes a long prompt with few slots in the trailing pools: `prepare` takes back those that it can."""

from __future__ import annotations

import pytest
import torch

from hicache import HiCacheConfig, KVGeometry, Namespace, RadixKey, create_cache
from hicache.cache import RequestKV, TreeCache
from hicache.errors import CapacityError
from hicache.tiers import BlockPool, EngineBlocks, MHATokenToKVPool, TrailingPool

PAGE = 4
PAGES = 20
GEOMETRY = KVGeometry(layers=1, heads=1, head_dim=4, page_size=PAGE, dtype="float32")
TOKENS = list(range(PAGES * PAGE))


def trailing(window_slots: int, state_slots: int) -> list[TrailingPool]:
    """Return pools of which a prefix needs the last two pages, and the last one."""
    states = BlockPool(EngineBlocks([[torch.zeros(state_slots + 1, 8)]], first=1))
    return [
        TrailingPool("window", MHATokenToKVPool(GEOMETRY, window_slots), 2 * PAGE), TrailingPool("state", states, 1)
    ]


def build(pools: list[TrailingPool], *, prefix_cache: bool = True) -> TreeCache:
    config = HiCacheConfig.model_validate(
        {"page_size": PAGE, "device": {"tokens": 2 * PAGES * PAGE}, "host": {"ratio": 2}, "prefix_cache": prefix_cache}
    )
    return create_cache(config, Namespace("model", GEOMETRY), trailing=pools)


def begin(cache: TreeCache) -> RequestKV:
    request = cache.begin_request("a", RadixKey.of(TOKENS))
    assert request is not None
    return request


def compute(cache: TreeCache, request: RequestKV, *, share: bool) -> int:
    """Compute the prompt page by page. Return the number of pages for which there was room."""
    for page in range(PAGES):
        if not cache.prepare(request, page * PAGE, (page + 1) * PAGE):
            return page
        cache.check()
        if share:
            cache.cache_unfinished_req(request, RadixKey.of(TOKENS[: (page + 1) * PAGE]))
            assert cache.drain(10)  # copies to L2 hold slots, too
    return PAGES


def test_slots_for_the_trailing_pages_and_one_more_are_enough() -> None:
    with build(trailing(3, 2)) as cache:
        request = begin(cache)
        assert compute(cache, request, share=True) == PAGES
        cache.cache_finished_req(request, None)
    with pytest.raises(CapacityError, match="window"):
        build(trailing(2, 2))


def test_pages_that_are_not_shared_yet_keep_their_slots() -> None:
    with build(trailing(6, 8)) as cache:
        request = begin(cache)
        assert compute(cache, request, share=False) == 6
        cache.cache_finished_req(request, None)


def test_a_request_that_shares_nothing_keeps_only_the_trailing_slots() -> None:
    with build(trailing(3, 2), prefix_cache=False) as cache:
        request = begin(cache)
        assert compute(cache, request, share=True) == PAGES
        cache.cache_finished_req(request, None)
    with build(trailing(3, 2)) as cache:
        request = begin(cache)
        cache.clear()
        assert compute(cache, request, share=False) == PAGES
        cache.cache_finished_req(request, None)


def test_a_refused_request_keeps_its_trailing_slots_in_all_pools() -> None:
    pools = trailing(3, PAGES)[::-1]
    with build(pools) as cache:
        request = begin(cache)
        for end in (1, 2, 3):
            assert cache.prepare(request, (end - 1) * PAGE, end * PAGE)
        cache.cache_unfinished_req(request, RadixKey.of(TOKENS[: 3 * PAGE]))
        assert cache.drain(10)
        before = [pool.slots(request.pages).tolist() for pool in pools]
        assert not cache.prepare(request, 3 * PAGE, 9 * PAGE), "the states have room for six pages, the window for one"
        cache.check()
        assert [pool.slots(request.pages).tolist() for pool in pools] == before
        assert [pool.holds for pool in pools] == [1, 2]
        assert cache.prepare(request, 3 * PAGE, 4 * PAGE)
        cache.cache_finished_req(request, None)

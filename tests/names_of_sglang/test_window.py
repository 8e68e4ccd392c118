"""Several pools per page: SGLang's hit policy of a window, here a trailing pool beside L1."""

from __future__ import annotations

from hicache import KVGeometry, Namespace, create_cache
from hicache.config import HiCacheConfig
from hicache.tiers import MHATokenToKVPool, TrailingPool
from tests.cache.world import prompt

PAGE = 4
FULL = KVGeometry(layers=1, heads=1, head_dim=4, page_size=PAGE, dtype="float32")
CONFIG = HiCacheConfig.model_validate({
    "page_size": PAGE, "device": {"tokens": 64}, "host": {"tokens": 64}, "write_policy": "write_back",
    "load_back_threshold_tokens": 0, "break_even": {"mode": "always"},
})


def test_a_hit_is_the_longest_prefix_whose_last_pages_are_in_the_pool_of_the_window() -> None:
    """A window of five tokens needs the last page; the pool has three slots."""
    window = TrailingPool("window", MHATokenToKVPool(FULL, 3), trailing_tokens=4)
    with create_cache(CONFIG, Namespace("weights", FULL), trailing=[window]) as cache:
        def serve(rid: str, *pages: int) -> int:
            key = prompt(*pages)
            request = cache.begin_request(rid, key)
            assert request is not None
            cache.start_loading()
            hit = request.cached_tokens
            for start in range(hit, len(key), PAGE):  # one page at a time, as fits into the pool
                end = min(start + PAGE, len(key))
                assert cache.prepare(request, start, end)
                cache.cache_unfinished_req(request, key.head(end // PAGE * PAGE))
            cache.cache_finished_req(request, key)
            cache.check()
            return hit

        assert serve("a", 1, 2) == 0
        assert serve("b", 1, 2) == 2 * PAGE  # page 2 still has its slot
        assert serve("c", 5, 6, 7) == 0  # takes the slots of pages 1 and 2
        assert cache.match_prefix(prompt(1, 2)).pages == 2  # which L1 still has
        assert serve("d", 1, 2) == 0

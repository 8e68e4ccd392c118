"""ChunkCache: without a prefix cache requests work, and no pages are reused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hicache.cache import ChunkCache, Eviction, RequestKV, create_cache
from hicache.config import HiCacheConfig
from hicache.errors import ConfigError, InvalidInput, InvariantError
from hicache.keys import RadixKey
from hicache.metrics.families import CACHE_METRICS
from hicache.tiers import create_device_pool
from tests.cache.world import GEOMETRY, NAMESPACE, prompt


def chunk_cache(pages: int = 8) -> ChunkCache:
    return ChunkCache(create_device_pool(GEOMETRY, pages))


def begin(cache: ChunkCache, key: RadixKey, rid: str = "a") -> RequestKV:
    request = cache.begin_request(rid, key)
    cache.check()
    assert request is not None
    return request


def test_a_repeated_prompt_is_computed_again() -> None:
    cache, key = chunk_cache(), prompt(1, 2, 3)
    for _ in range(2):
        assert not cache.prefetch_from_storage("a", key) and cache.check_prefetch_progress("a")
        request = begin(cache, key)
        assert request.cached_tokens == request.shared_pages == 0 and len(request.pages) == 4
        assert cache.start_loading() is None
        cache.cache_finished_req(request, key)
        cache.check()
    assert cache.match_prefix(key).pages == 0 and cache.peek(key) == (0, 0)


def test_a_request_keeps_its_pages_from_chunk_to_chunk() -> None:
    cache, key = chunk_cache(), prompt(1, 2, 3)
    request = begin(cache, key)
    pages = request.pages
    for tokens in (3, 4, 9, 13):
        cache.cache_unfinished_req(request, RadixKey(key.tokens[: 4 * tokens], key.seed))
        assert request.pages is pages
    cache.check()


def test_a_request_that_ends_frees_all_its_pages() -> None:
    cache, key = chunk_cache(), prompt(1, 2)
    for shared in (key, None):
        request = begin(cache, key)
        cache.cache_finished_req(request, shared)
        assert cache.device.allocator.used_pages == 0 and request.ended
        cache.check()
    with pytest.raises(InvalidInput, match="ended"):
        cache.cache_finished_req(request, None)


def test_two_requests_of_one_prompt_share_no_pages() -> None:
    cache, key = chunk_cache(), prompt(1, 2)
    first, second = begin(cache, key), begin(cache, key, "b")
    assert not np.intersect1d(first.pages, second.pages).size
    cache.cache_unfinished_req(first, key)
    assert begin(cache, prompt(1), "c").cached_tokens == 0


def test_a_full_l1_rejects_requests_and_changes_nothing() -> None:
    cache = chunk_cache(4)
    request = begin(cache, prompt(1))
    other = begin(cache, RadixKey.of([7]), "b")
    assert cache.begin_request("c", prompt(3)) is None
    assert cache.extend(request, 12) and not cache.extend(request, 13) and len(request.pages) == 3
    cache.cache_finished_req(other, None)
    assert cache.extend(request, 13)
    cache.check()
    assert cache.statistics().skipped["no_device_room"] == 2


def test_a_closed_cache_rejects_requests() -> None:
    with chunk_cache() as cache:
        assert cache.drain(0) and not cache.poll()
        cache.abort_prefetch("a")
    with pytest.raises(InvalidInput, match="closed"):
        cache.begin_request("a", prompt(1))


def test_a_bigram_key_gets_pages_for_its_last_token_too() -> None:
    cache, key = chunk_cache(), RadixKey.of(range(9), bigram=True)
    request = begin(cache, key)
    assert len(key) == 8 and len(request.pages) == 3
    cache.cache_finished_req(request, key)
    assert cache.statistics().prompt_tokens == 9


def test_evict_clear_and_record_prefill_do_nothing() -> None:
    cache, key = chunk_cache(), prompt(1, 2)
    request = begin(cache, key)
    assert cache.evict(2) == Eviction(freed_pages=0, writeback_pages=0, short_pages=2) and cache.writeback_pages == 0
    cache.clear()
    cache.record_prefill(1000, 0.1)
    assert len(request.pages) == 3
    cache.cache_finished_req(request, key)
    cache.check()


def test_the_weights_epoch_must_increase() -> None:
    cache = ChunkCache(create_device_pool(GEOMETRY, 8), weights_epoch=3)
    with pytest.raises(InvalidInput, match="not above 3"):
        cache.update_weights(3)
    cache.update_weights(5)
    assert cache.statistics().weights_epoch == 5


def test_the_check_finds_a_page_without_an_owner() -> None:
    cache = chunk_cache()
    begin(cache, prompt(1))
    cache.device.allocator.alloc(1)
    with pytest.raises(InvariantError, match="3 pages in use, 2 held"):
        cache.check()


def test_statistics_of_other_tiers_are_zero_and_can_be_exported() -> None:
    cache = chunk_cache()
    begin(cache, prompt(1, 2))
    state = cache.statistics()
    assert (state.requests, state.prompt_tokens, state.device.free_pages) == (1, 9, 5)
    assert state.host.capacity_pages == state.controller.written_pages == 0 and not any(state.hit_tokens.values())
    for spec in CACHE_METRICS:
        spec.collect([((), state)])


def test_the_configuration_selects_the_kind_of_cache_and_a_chunk_cache_opens_no_storage(tmp_path: Path) -> None:
    storage = {"type": "file", "options": {"path": str(tmp_path / "pages")}}
    entries = {"page_size": 4, "device": {"tokens": 32}, "prefix_cache": False, "storage": storage}
    with create_cache(HiCacheConfig.model_validate(entries), NAMESPACE) as cache:
        assert isinstance(cache, ChunkCache) and cache.device.pages == 8
        assert not (tmp_path / "pages").exists()
    with pytest.raises(ConfigError, match="page_size"):
        create_cache(HiCacheConfig.model_validate({**entries, "page_size": 8}), NAMESPACE)

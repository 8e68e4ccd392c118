"""A `HiRadixCache` whose L1 consists of the tensors of an engine, in the layout of SGLang."""

from __future__ import annotations

import pytest
import torch

from hicache.cache import HiRadixCache, RequestKV, create_cache
from hicache.config import HiCacheConfig
from hicache.errors import ConfigError
from hicache.keys import RadixKey
from hicache.tiers import EngineBlocks
from tests.cache.world import GEOMETRY, NAMESPACE

SLOTS = 9 * GEOMETRY.page_size
CONFIG = {"page_size": GEOMETRY.page_size, "host": {"tokens": 64}, "break_even": {"mode": "always"},
          "load_back_threshold_tokens": 1}


class Engine:
    """K and V `[slots, heads, dim]` of each layer, filled with random numbers, and a cache over them."""

    def __init__(self, **entries: object) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (SLOTS, GEOMETRY.heads, GEOMETRY.head_dim)
        self.k, self.v = (
            [torch.randn(shape, generator=generator) for _ in range(GEOMETRY.layers)] for _ in range(2)
        )
        self.blocks = EngineBlocks(list(zip(self.k, self.v, strict=True)), slots_per_block=GEOMETRY.page_size)
        config = HiCacheConfig.model_validate({**CONFIG, **entries})
        cache = create_cache(config, NAMESPACE, device_blocks=self.blocks)
        assert isinstance(cache, HiRadixCache)
        self.cache = cache

    def kv(self, pages: list[int]) -> torch.Tensor:
        """Return the KV of `pages` as attention reads it, `[layers, 2, tokens, heads, dim]`."""
        size = GEOMETRY.page_size
        slots = torch.tensor([page * size + offset for page in pages for offset in range(size)])
        return torch.stack([torch.stack((k[slots], v[slots])) for k, v in zip(self.k, self.v, strict=True)])

    def serve(self, rid: str, key: RadixKey) -> tuple[RequestKV, torch.Tensor]:
        """Serve a prompt. Return the request, and the KV of its whole pages as the forward has read it."""
        request = self.cache.begin_request(rid, key)
        transfer = self.cache.start_loading()
        assert request is not None
        if transfer is not None:
            for layer in range(GEOMETRY.layers):
                transfer.wait_layer(layer)
        read = self.kv(request.pages[: key.pages(GEOMETRY.page_size)].tolist())
        self.cache.cache_finished_req(request, key)
        return request, read

    def empty_l1(self) -> bool:
        """Move L1 to L2 as docs/embedding.md says. Return True if its memory may be released."""
        while self.cache.drain(10):
            device = self.cache.statistics().device
            if device.free_pages == device.capacity_pages:
                return True
            evicted = self.cache.evict(device.capacity_pages)
            if not (evicted.freed_pages or evicted.writeback_pages):
                break
        return False

    def sleep(self) -> None:
        """Release the memory of L1, and get other content at the same addresses when it is mapped again."""
        for tensor in (*self.k, *self.v):
            tensor.fill_(float("nan"))


def test_a_hit_on_l2_is_loaded_into_the_tensors_of_the_engine_byte_for_byte() -> None:
    engine = Engine()
    cache, key = engine.cache, RadixKey.of(list(range(3 * GEOMETRY.page_size + 1)))
    request = cache.begin_request("a", key)
    assert request is not None and cache.device.pages == 8 and 0 not in request.pages
    computed = engine.kv(request.pages[:3].tolist())
    cache.cache_finished_req(request, key)
    assert cache.drain(10)
    assert cache.evict(8).freed_pages == 3
    for tensor in (*engine.k, *engine.v):
        tensor.zero_()
    again = cache.begin_request("b", key)
    transfer = cache.start_loading()
    assert again is not None and transfer is not None and again.host_hit_tokens == 3 * GEOMETRY.page_size
    for layer in range(GEOMETRY.layers):
        transfer.wait_layer(layer)
    assert torch.equal(engine.kv(again.pages[:3].tolist()), computed)
    assert not engine.kv([0]).any(), "the padding page has not changed"
    cache.cache_finished_req(again, None)
    assert cache.drain(10) and cache.close()
    cache.check()


PROMPTS = [RadixKey.of([*range(2 * GEOMETRY.page_size), *range(first, first + GEOMETRY.page_size), 7])
           for first in (100, 200, 300)]  # with a common prefix


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_memory_of_l1_may_be_released_once_its_pages_are_on_l2(policy: str) -> None:
    engine = Engine(write_policy=policy, selective_hits=1)
    computed = [engine.serve(f"{number}", key)[1] for number, key in enumerate(PROMPTS)]
    assert engine.empty_l1()
    engine.cache.check()
    engine.sleep()
    assert all(engine.cache.poll() in (True, False) for _ in range(3)), "an engine may poll while it sleeps"
    for number, (key, kv) in enumerate(zip(PROMPTS, computed, strict=True)):
        request, read = engine.serve(f"after {number}", key)
        assert request.cached_tokens == 3 * GEOMETRY.page_size and torch.equal(read, kv)
    assert engine.cache.statistics().hit_tokens["host"] >= 5 * GEOMETRY.page_size
    engine.cache.close()
    engine.cache.check()


def test_memory_of_l1_that_is_released_without_emptying_l1_serves_wrong_bytes() -> None:
    """The control of the test above."""
    engine = Engine()
    _, computed = engine.serve("before", PROMPTS[0])
    engine.sleep()
    request, read = engine.serve("after", PROMPTS[0])
    assert request.cached_tokens == 3 * GEOMETRY.page_size and not torch.equal(read, computed)
    engine.cache.close()


def test_l1_is_not_empty_while_a_request_runs() -> None:
    engine = Engine(write_policy="write_back")
    engine.serve("before", PROMPTS[0])
    running = engine.cache.begin_request("running", PROMPTS[1])
    assert running is not None and not engine.empty_l1()
    engine.cache.cache_finished_req(running, None)
    assert engine.empty_l1()
    engine.cache.close()


def test_settings_that_contradict_the_tensors_are_rejected() -> None:
    blocks = EngineBlocks([[torch.zeros(4, GEOMETRY.layer_bytes, dtype=torch.uint8)]] * GEOMETRY.layers)
    sized = HiCacheConfig.model_validate({**CONFIG, "device": {"tokens": 64}})
    plain = HiCacheConfig.model_validate(CONFIG)
    with pytest.raises(ConfigError, match="the tensors set the size of L1"):
        create_cache(sized, NAMESPACE, device_blocks=blocks)
    with pytest.raises(ConfigError, match="the tensors set the size of L1"):
        create_cache(plain, NAMESPACE, device_blocks=blocks, device_pages=4)
    half = EngineBlocks([[region[:, :8] for region in layer] for layer in blocks.layers])
    with pytest.raises(ConfigError, match="a page must be one block"):
        create_cache(plain, NAMESPACE, device_blocks=half)
    meta = EngineBlocks([[region.to("meta") for region in layer] for layer in blocks.layers])
    with pytest.raises(ConfigError, match="the tensors are on meta; pass device='meta'"):
        create_cache(plain, NAMESPACE, device_blocks=meta)
    with pytest.raises(ConfigError, match="the tensors are on cpu; pass device='cpu'"):
        create_cache(plain, NAMESPACE, device_blocks=blocks, device="cpu:1")

"""A `HiRadixCache` whose L1 consists of the tensors of an engine, in the layout of SGLang."""

from __future__ import annotations

import pytest
import torch

from hicache.cache import HiRadixCache, create_cache
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

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (SLOTS, GEOMETRY.heads, GEOMETRY.head_dim)
        self.k, self.v = (
            [torch.randn(shape, generator=generator) for _ in range(GEOMETRY.layers)] for _ in range(2)
        )
        self.blocks = EngineBlocks(list(zip(self.k, self.v, strict=True)), slots_per_block=GEOMETRY.page_size)
        cache = create_cache(HiCacheConfig.model_validate(CONFIG), NAMESPACE, device_blocks=self.blocks)
        assert isinstance(cache, HiRadixCache)
        self.cache = cache

    def kv(self, pages: list[int]) -> torch.Tensor:
        """Return the KV of `pages` as attention reads it, `[layers, 2, tokens, heads, dim]`."""
        size = GEOMETRY.page_size
        slots = torch.tensor([page * size + offset for page in pages for offset in range(size)])
        return torch.stack([torch.stack((k[slots], v[slots])) for k, v in zip(self.k, self.v, strict=True)])


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

"""The pools and allocators of L1, as in SGLang's memory_pool.py and allocator.py."""

from __future__ import annotations

import pytest
import torch

from hicache.attention import AttentionBatch, Queries, RadixAttention
from hicache.errors import InvariantError
from hicache.geometry import KVGeometry, KVLayout
from hicache.tiers import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    PageAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    create_device_pool,
    token_slots,
)
from hicache.tiers.memory import DeviceMemory, profile_max_num_tokens
from tests.cache.world import World, every_hit, prompt

GEOMETRY = KVGeometry(layers=3, heads=2, head_dim=8, page_size=4, dtype="float32")


# KV pools


def test_a_pool_has_a_k_and_a_v_buffer_per_layer_and_a_padding_page_0() -> None:
    pool = MHATokenToKVPool(GEOMETRY, 5)
    assert len(pool.kv_buffer) == 3 and pool.pages == 5
    for layer in range(3):
        for part in pool.get_kv_buffer(layer):
            assert part.shape == (6, 4, 2, 8) and part.dtype == torch.float32 and not part.any()
    pages = pool.allocator.alloc(5)
    assert pages is not None and pages.tolist() == [1, 2, 3, 4, 5] and pool.allocator.alloc(1) is None


def test_kv_that_is_set_at_slots_of_one_layer_is_found_there_and_nowhere_else() -> None:
    pool = MHATokenToKVPool(GEOMETRY, 5)
    slots = torch.tensor([9, 4, 23])  # page 2 entry 1, page 1 entry 0, page 5 entry 3
    k, v = torch.rand(3, 2, 8), torch.rand(3, 2, 8)
    pool.set_kv_buffer(1, slots, k, v)
    for part, written in zip(pool.get_kv_buffer(1), (k, v), strict=True):
        assert torch.equal(part[[2, 1, 5], [1, 0, 3]], written)
        assert part.count_nonzero() == written.count_nonzero()
    assert not pool.get_kv_buffer(0)[0].any() and not pool.get_kv_buffer(2)[1].any()


def test_v_heads_may_have_another_size_than_k_heads() -> None:
    pool = MHATokenToKVPool(KVGeometry(layers=1, heads=2, head_dim=8, page_size=4, v_head_dim=6, dtype="float32"), 2)
    k, v = torch.rand(1, 2, 8), torch.rand(1, 2, 6)
    pool.set_kv_buffer(0, torch.tensor([7]), k, v)
    k_pages, v_pages = pool.get_kv_buffer(0)
    assert torch.equal(k_pages[1, 3], k[0]) and torch.equal(v_pages[1, 3], v[0])


def test_an_mla_pool_has_one_latent_buffer_per_layer() -> None:
    geometry = KVGeometry(layers=2, heads=1, head_dim=12, page_size=4, dtype="float32", layout=KVLayout.MLA)
    pool = create_device_pool(geometry, 3)
    assert isinstance(pool, MLATokenToKVPool)
    latent = torch.rand(2, 1, 12)
    pool.set_kv_buffer(1, torch.tensor([5, 12]), latent)
    assert pool.get_kv_buffer(1).shape == (4, 4, 1, 12)
    assert torch.equal(pool.get_kv_buffer(1)[[1, 3], [1, 0]], latent)
    assert geometry.token_bytes == 2 * 12 * 4  # no factor 2: K and V are one


def test_mem_fraction_static_is_for_weights_and_kv_and_the_rest_stays_free() -> None:
    """80 GiB, of which 60 are free once the weights are loaded: 0.9 leaves 8 GiB free, so 52 GiB are for KV."""
    llama_8b = KVGeometry(layers=32, heads=8, head_dim=128, page_size=64, dtype="bfloat16")
    assert llama_8b.token_bytes == 8 * 128 * 32 * 2 * 2
    memory = DeviceMemory(available_bytes=60 << 30, total_bytes=80 << 30)
    assert profile_max_num_tokens(memory, 0.9, llama_8b.token_bytes) == (52 << 30) // llama_8b.token_bytes


# TokenToKVPoolAllocator


def test_slots_of_a_new_pool_begin_at_1_and_an_allocation_is_all_or_nothing() -> None:
    allocator = TokenToKVPoolAllocator(PageAllocator(8, first=1))
    first = allocator.alloc(3)
    assert first is not None and first.tolist() == [1, 2, 3] and first.dtype == torch.int64
    assert allocator.alloc(6) is None and allocator.available_tokens == 5


def test_freed_slots_are_allocated_next_in_the_order_in_which_they_were_freed() -> None:
    allocator = TokenToKVPoolAllocator(PageAllocator(8, first=1))
    allocator.alloc(4)
    allocator.free(torch.tensor([4, 2]))
    again = allocator.alloc(3)
    assert again is not None and again.tolist() == [4, 2, 5]


def test_frees_inside_a_free_group_take_effect_at_its_end() -> None:
    allocator = TokenToKVPoolAllocator(PageAllocator(4, first=1))
    allocator.alloc(4)
    with allocator.free_group():
        allocator.free(torch.tensor([3]))
        allocator.free(torch.tensor([1]))
        assert allocator.available_tokens == 0 and allocator.alloc(1) is None
    assert allocator.available_tokens == 2


def test_done_otherwise_a_slot_that_is_freed_twice_is_an_error_at_once() -> None:
    """SGLang checks this in its debug mode only."""
    allocator = TokenToKVPoolAllocator(PageAllocator(4, first=1))
    slots = allocator.alloc(2)
    assert slots is not None
    allocator.free(slots)
    with pytest.raises(InvariantError, match="double free"):
        allocator.free(slots)
    assert allocator.available_tokens == 4


def test_an_allocation_evicts_cached_prefixes_as_needed() -> None:
    """SGLang's alloc_token_slots calls evict first; here the allocator's source of pages is the cache."""
    world = World(device_pages=4, config=every_hit(write_policy="write_through_selective"))
    world.serve("a", prompt(1, 2))
    allocator = PagedTokenToKVPoolAllocator(world.cache.page_source, 4)
    assert world.device.allocator.free_pages == 2 and allocator.available_tokens == 16
    slots = allocator.alloc(16)
    assert slots is not None and world.cache.match_prefix(prompt(1, 2)).pages == 0
    allocator.free(slots)


# PagedTokenToKVPoolAllocator


def test_an_extend_fills_the_partial_page_then_whole_pages_then_begins_a_partial_one() -> None:
    allocator = PagedTokenToKVPoolAllocator(PageAllocator(9, first=1), 4)
    first = allocator.alloc_extend(torch.tensor([0]), torch.tensor([6]), torch.tensor([-1]), 6)
    assert first is not None and first.tolist() == [4, 5, 6, 7, 8, 9]
    slots = allocator.alloc_extend(torch.tensor([6, 0]), torch.tensor([13, 5]), torch.tensor([9, -1]), 12)
    assert slots is not None and slots.tolist() == [
        10, 11, 12, 13, 14, 15, 16,  # the rest of page 2, page 3, the first slot of page 4
        20, 21, 22, 23, 24,  # the second request: page 5, and the first slot of page 6
    ]
    assert allocator.available_tokens == 3 * 4


def test_a_decode_gets_the_next_slot_of_its_page_or_the_first_of_a_new_one() -> None:
    allocator = PagedTokenToKVPoolAllocator(PageAllocator(9, first=1), 4)
    assert allocator.alloc_extend(torch.tensor([0, 0]), torch.tensor([5, 8]), torch.tensor([-1, -1]), 13) is not None
    slots = allocator.alloc_decode(torch.tensor([6, 9]), torch.tensor([8, 19]))
    assert slots is not None and slots.tolist() == [9, 20]
    full = PagedTokenToKVPoolAllocator(PageAllocator(1, first=1), 4)
    assert full.alloc(4) is not None and full.alloc_decode(torch.tensor([5]), torch.tensor([7])) is None


def test_slots_free_their_pages_each_once() -> None:
    allocator = PagedTokenToKVPoolAllocator(PageAllocator(3, first=1), 4)
    slots = allocator.alloc(12)
    assert slots is not None
    allocator.free(slots[[0, 1, 2, 3, 9]])
    assert allocator.available_tokens == 8
    again = allocator.alloc(8)
    assert again is not None and again.tolist() == [4, 5, 6, 7, 12, 13, 14, 15]


# RadixAttention


@pytest.mark.parametrize("save_kv_cache", [True, False])
def test_attention_writes_the_kv_of_new_tokens_and_reads_that_of_the_cached_prefix(save_kv_cache: bool) -> None:
    pool, layer = MHATokenToKVPool(GEOMETRY, 4), 2
    pages = pool.allocator.alloc(2)
    assert pages is not None
    slots = torch.from_numpy(token_slots(pages, 4))
    table = slots.to(torch.int32)[None]
    q, k, v = (torch.rand(7, 2, 8) for _ in range(3))
    pool.set_kv_buffer(layer, slots[:5], k[:5], v[:5])  # the cached prefix
    before = pool.kv_buffer[layer].clone()
    batch = AttentionBatch(pool, table, [Queries(row=0, start=5, count=2)])
    with torch.inference_mode():
        got = RadixAttention(2, 8, 2, layer)(q[5:], k[5:], v[5:], batch, save_kv_cache)
    logits = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
    weights = logits.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v)[5:].reshape(2, 16)
    torch.testing.assert_close(got, expected)
    assert torch.equal(pool.kv_buffer[layer], before) is not save_kv_cache
    if save_kv_cache:
        assert torch.equal(pool.get_kv_buffer(layer)[0][2, [1, 2]], k[5:])

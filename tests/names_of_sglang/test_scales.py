"""KV in another dtype than the forward's, with scales: SGLang's set_kv_buffer(k_scale, v_scale)."""

from __future__ import annotations

from dataclasses import replace

import torch

from hicache import scales_fingerprint
from hicache.geometry import KVGeometry
from hicache.tiers import MHATokenToKVPool
from tests.cache.world import NAMESPACE

FP8 = KVGeometry(layers=1, heads=1, head_dim=4, page_size=4, dtype="float8_e4m3fn")


def test_kv_is_divided_by_its_scales_and_stored_in_the_dtype_of_the_pool() -> None:
    pool = MHATokenToKVPool(FP8, 2)
    k, v = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[[8.0, 16.0, 24.0, -32.0]]])
    pool.set_kv_buffer(0, torch.tensor([5]), k, v, 0.5, 8.0)
    assert pool.get_key_buffer(0).dtype == torch.float8_e4m3fn
    assert pool.get_key_buffer(0)[1, 1, 0].float().tolist() == [2.0, 4.0, 6.0, 8.0]
    assert pool.get_value_buffer(0)[1, 1, 0].float().tolist() == [1.0, 2.0, 3.0, -4.0]
    assert k.flatten().tolist() == [1.0, 2.0, 3.0, 4.0]  # SGLang divides the caller's tensors in place


def test_the_key_and_the_value_buffer_are_the_two_of_the_kv_buffer() -> None:
    pool = MHATokenToKVPool(FP8, 2)
    parts = pool.get_key_buffer(0), pool.get_value_buffer(0)
    assert [part.data_ptr() for part in parts] == [part.data_ptr() for part in pool.get_kv_buffer(0)]


def test_engines_with_different_scales_share_no_stored_page() -> None:
    prints = [scales_fingerprint([0.5], [2.0]), scales_fingerprint([2.0], [0.5]), scales_fingerprint([1.0], [1.0])]
    assert prints[2] == ""
    assert len({replace(NAMESPACE, kv_scales=one).digest for one in prints}) == 3

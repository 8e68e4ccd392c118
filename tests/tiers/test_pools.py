"""L1 and L2 memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache.config import DeviceConfig, HostConfig
from hicache.errors import CapacityError, ConfigError, InvalidInput
from hicache.frame import FRAME_ALIGN, FrameCodec
from hicache.geometry import KVGeometry, KVLayout
from hicache.tiers import (
    HostPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    RequestToTokenPool,
    create_device_pool,
    token_slots,
)
from hicache.tiers.memory import device_pages, host_pages

MHA = KVGeometry(layers=3, heads=2, head_dim=8, page_size=4)
MLA = KVGeometry(layers=3, heads=1, head_dim=16, page_size=4, layout=KVLayout.MLA)


def test_slots_written_by_token_are_rows_of_their_page() -> None:
    pool = create_device_pool(MHA, 5)
    assert isinstance(pool, MHATokenToKVPool)
    slots = torch.from_numpy(token_slots(np.array([2, 5], dtype=np.int32), 4)).long()
    assert slots.tolist() == [8, 9, 10, 11, 20, 21, 22, 23]
    k, v = torch.randn(2, 8, 2, 8).to(torch.bfloat16)
    pool.set_kv_buffer(1, slots, k, v)
    block = pool.layer_blocks(1)[1][5]
    assert block.view(torch.bfloat16).tolist() == v[4:].flatten().tolist()
    assert pool.get_kv_buffer(0)[0].abs().sum() == 0


def test_mla_pools_have_one_latent_block_per_layer() -> None:
    pool = create_device_pool(MLA, 5)
    assert isinstance(pool, MLATokenToKVPool)
    latent = torch.randn(4, 1, 16).to(torch.bfloat16)
    pool.set_kv_buffer(2, torch.arange(4, 8), latent)
    assert torch.equal(pool.get_kv_buffer(2)[4:8], latent)
    assert [tuple(block.shape) for block in pool.layer_blocks(2)] == [(6, MLA.block_bytes)]


def test_a_pool_of_the_wrong_layout_is_refused() -> None:
    with pytest.raises(InvalidInput):
        MHATokenToKVPool(MLA, 4)
    with pytest.raises(InvalidInput):
        MLATokenToKVPool(MHA, 4)


def test_a_host_page_is_a_frame_that_seals_in_place() -> None:
    pool = HostPool(MHA, 3)
    pages = pool.alloc(2)
    assert pages is not None
    assert pool.buffer.ctypes.data % FRAME_ALIGN == 0
    assert pool.frame_bytes % FRAME_ALIGN == 0
    codec = FrameCodec(bytes(32), MHA.payload_bytes)
    frame = pool.frame(int(pages[0]))
    pool.payload(int(pages[0]))[0] = 77
    codec.seal(bytes(32), frame)
    assert codec.check(bytes(32), frame) is None
    pool.free(pages)
    again = pool.alloc(3)
    assert again is not None
    assert all(bytes(pool.frame(page)[:8]) == bytes(8) for page in again.tolist()), "pages are handed out unsealed"


def test_a_host_pool_larger_than_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match=r"need \d+ bytes, but only \d+ are available"):
        HostPool(MHA, 1 << 40)


def test_sizes_are_given_in_bytes_tokens_or_as_a_ratio() -> None:
    cpu = torch.device("cpu")
    assert device_pages(DeviceConfig(size=MHA.payload_bytes * 7 + 1), MHA, cpu) == 7
    assert device_pages(DeviceConfig(tokens=31), MHA, cpu) == 7
    assert host_pages(HostConfig(ratio=1.5), MHA, 10) == 15
    assert host_pages(HostConfig(tokens=40), MHA, 10) == 10
    assert host_pages(HostConfig(size=4096 * 5), MHA, 10) == 5
    with pytest.raises(ConfigError):
        device_pages(DeviceConfig(), MHA, cpu)
    with pytest.raises(ConfigError):
        device_pages(DeviceConfig(tokens=3), MHA, cpu)
    with pytest.raises(ConfigError):
        host_pages(HostConfig(tokens=3), MHA, 10)
    with pytest.raises(CapacityError, match="are free"):
        device_pages(DeviceConfig(tokens=1 << 40), MHA, cpu)


def test_a_request_row_maps_tokens_to_slots() -> None:
    pool = RequestToTokenPool(requests=2, context_tokens=10)
    row = pool.alloc()
    assert row is not None
    pool.write(row, np.array([3, 1], dtype=np.int32), 4)
    pool.write(row, np.array([2], dtype=np.int32), 4, first_page=2)
    assert pool.table[row].tolist() == [12, 13, 14, 15, 4, 5, 6, 7, 8, 9]
    with pytest.raises(CapacityError):
        pool.write(row, np.array([2], dtype=np.int32), 4, first_page=3)
    assert pool.alloc() is not None and pool.alloc() is None
    pool.free(row)
    with pytest.raises(InvalidInput):
        pool.free(row)
    assert pool.free_rows == 1

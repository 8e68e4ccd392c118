"""L1 and L2 memory."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from hicache.config import DeviceConfig, HostConfig
from hicache.errors import CapacityError, ConfigError, InvalidInput
from hicache.frame import FRAME_ALIGN, FrameCodec
from hicache.geometry import KVGeometry, KVLayout
from hicache.tiers import (
    EngineBlocks,
    HostPool,
    KVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    RequestToTokenPool,
    create_device_pool,
    device,
    token_slots,
)
from hicache.tiers.device import pool_values
from hicache.tiers.memory import STAGING_BYTES, DeviceMemory, device_pages, host_pages, profile_max_num_tokens
from tests.seeds import rng, seeds

MHA = KVGeometry(layers=3, heads=2, head_dim=8, page_size=4)
MLA = KVGeometry(layers=3, heads=1, head_dim=16, page_size=4, layout=KVLayout.MLA)


def bits(numbers: torch.Tensor) -> torch.Tensor:
    """Return the bytes of numbers: torch does not compare float8."""
    return numbers.contiguous().view(torch.uint8)


@pytest.fixture(params=["numpy", "native"])
def _slots_helper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = request.getfixturevalue("native").fill_slots if request.param == "native" else None
    monkeypatch.setattr(device, "fill_slots", helper)


@pytest.mark.usefixtures("_slots_helper")
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_the_slots_of_a_page_are_consecutive(page_size: int) -> None:
    pages = np.array([7, 1, 2**31 - 1, 3, 4], np.int32)  # the third has slots beyond int32
    for some in (pages, pages[::2], pages[:0]):
        expected = [int(page) * page_size + offset for page in some for offset in range(page_size)]
        slots = token_slots(some, page_size)
        assert slots.dtype == np.int64 and slots.tolist() == expected


@pytest.mark.parametrize(("slots", "page_size"), [(7, 4), (9, 4), (8, 0), (8, -4), (0, 4)])
def test_the_helper_rejects_a_wrong_number_of_slots(native: Any, slots: int, page_size: int) -> None:
    room, pages = np.zeros(slots, np.int64), np.array([1, 2], np.int32)
    with pytest.raises(ValueError, match="fill_slots"):
        native.fill_slots(room, pages, page_size)
    assert not room.any()


@pytest.mark.parametrize("v_dim", [8, 3])
def test_slots_written_by_token_are_entries_of_their_page(v_dim: int) -> None:
    """Also if K and V have heads of different sizes: they are two blocks of one page."""
    pool = create_device_pool(replace(MHA, v_head_dim=v_dim), 5)
    assert isinstance(pool, MHATokenToKVPool)
    slots = torch.from_numpy(token_slots(np.array([2, 5], dtype=np.int32), 4))
    assert slots.tolist() == [8, 9, 10, 11, 20, 21, 22, 23]
    k, v = torch.randn(8, 2, 8).to(torch.bfloat16), torch.randn(8, 2, v_dim).to(torch.bfloat16)
    pool.set_kv_buffer(1, slots, k, v)
    k_pages, v_pages = pool.get_kv_buffer(1)
    assert torch.equal(k_pages[2], k[:4]) and torch.equal(v_pages[5], v[4:])
    (region,) = pool.blocks.layers[1]
    page = torch.cat((k[4:].flatten(), v[4:].flatten()))
    assert torch.equal(region[5].view(torch.bfloat16), page), "a page is one piece"
    assert pool.kv_buffer[1].count_nonzero() == k.numel() + v.numel()
    assert pool.get_kv_buffer(0)[0].abs().sum() == 0


def test_mla_pools_have_one_latent_block_per_layer() -> None:
    pool = create_device_pool(MLA, 5)
    assert isinstance(pool, MLATokenToKVPool)
    latent = torch.randn(4, 1, 16).to(torch.bfloat16)
    pool.set_kv_buffer(2, torch.arange(4, 8), latent)
    assert torch.equal(pool.get_kv_buffer(2)[1], latent)
    assert [tuple(region.shape) for region in pool.blocks.layers[2]] == [(6, MLA.block_bytes)]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "float32"])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_kv_of_another_dtype_is_divided_by_its_scale_and_rounded_once(dtype: str, source: torch.dtype) -> None:
    pool = create_device_pool(replace(MHA, dtype=dtype, v_head_dim=3), 5)
    assert isinstance(pool, MHATokenToKVPool)
    slots = torch.tensor([9, 4, 22])
    numbers = torch.Generator().manual_seed(1)
    k, v = (torch.randn(3, 2, dim, generator=numbers).to(source) for dim in (8, 3))
    before = k.clone(), v.clone()
    for k_scale, v_scale in (
        (0.03, 7.0), (torch.tensor(0.03), torch.tensor([7.0])), (None, torch.tensor([[[[7.0]]]])), (None, None)
    ):
        pool.set_kv_buffer(1, slots, k, v, k_scale, v_scale)
        for part, given, scale in zip(pool.get_kv_buffer(1), (k, v), (k_scale, v_scale), strict=True):
            exact = torch.from_numpy(given.float().numpy() / np.float32(1.0 if scale is None else float(scale)))
            found = part.flatten(0, 1)[slots]
            assert found.dtype is getattr(torch, dtype)
            assert bits(found).equal(bits(exact.to(found.dtype))), f"{k_scale} {v_scale}"
    assert k.equal(before[0]) and v.equal(before[1]), "the caller's tensors are unchanged"
    assert pool.get_key_buffer(1).data_ptr() == pool.get_kv_buffer(1)[0].data_ptr()
    assert pool.get_value_buffer(1).data_ptr() == pool.get_kv_buffer(1)[1].data_ptr()


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_values_beyond_float8_become_its_largest_number(dtype: str, largest: float) -> None:
    pool = create_device_pool(replace(MLA, dtype=dtype), 5)
    assert isinstance(pool, MLATokenToKVPool)
    latent = torch.zeros(2, 1, 16)
    latent[0, 0, :5] = torch.tensor([1e6, -1e6, math.inf, -math.inf, math.nan])
    pool.set_kv_buffer(0, torch.tensor([4, 5]), latent, 0.001)
    found = pool.get_key_buffer(0)[1, :2].float()
    assert found[0, 0, :4].tolist() == [largest, -largest, largest, -largest] and found[0, 0, 4].isnan()
    assert not found[0, 0, 5:].any() and not found[1].any()


def test_a_scale_divides_also_kv_that_has_the_dtype_of_the_pool() -> None:
    """So a reader multiplies by the scale without knowing what was written."""
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        pool = create_device_pool(replace(MLA, dtype=dtype), 5)
        assert isinstance(pool, MLATokenToKVPool)
        latent = torch.full((1, 1, 16), 12.0).to(pool.dtype)
        pool.set_kv_buffer(0, torch.tensor([4]), latent, 4.0)
        assert pool.get_kv_buffer(0)[1, 0].tolist() == [[3.0] * 16]
        assert latent.tolist() == [[[12.0] * 16]], "the caller's tensor is unchanged"


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, torch.ones(2), torch.ones(0), "1", True])
def test_a_scale_that_is_not_one_positive_number_is_rejected_before_any_write(scale: Any) -> None:
    pool = create_device_pool(replace(MHA, dtype="float8_e4m3fn"), 5)
    assert isinstance(pool, MHATokenToKVPool)
    ones = torch.ones(1, 2, 8)
    with pytest.raises(InvalidInput, match="device pool: "):
        pool.set_kv_buffer(0, torch.tensor([4]), ones, ones, 1.0, scale)
    assert not bits(pool.kv_buffer[0]).any()


def test_a_pool_of_integers_takes_its_own_dtype_without_a_scale() -> None:
    pool = create_device_pool(replace(MLA, dtype="int8"), 5)
    assert isinstance(pool, MLATokenToKVPool)
    numbers = torch.arange(16, dtype=torch.int8).view(1, 1, 16)
    pool.set_kv_buffer(0, torch.tensor([4]), numbers)
    assert pool.get_kv_buffer(0)[1, 0].equal(numbers[0])
    for values, scale in ((numbers, 2.0), (numbers.float(), None), (numbers.to(torch.uint8), None)):
        with pytest.raises(InvalidInput, match="store integers in the pool's dtype"):
            pool.set_kv_buffer(0, torch.tensor([4]), values, scale)
    with pytest.raises(InvalidInput, match="store integers in the pool's dtype"):
        pool_values(numbers, None, torch.bfloat16)


def test_writing_with_the_scale_of_a_tensor_does_not_wait_for_its_value() -> None:
    """A fake tensor does not have a value: reading it is an error."""
    with FakeTensorMode():
        scale = torch.rand(1)
        assert pool_values(torch.ones(2, 1, 16), scale, torch.float8_e4m3fn).shape == (2, 1, 16)
        with pytest.raises(DataDependentOutputException):
            scale.item()


def test_a_pool_of_the_wrong_layout_is_rejected() -> None:
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


def test_a_host_pool_larger_than_memory_is_rejected_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match=r"are needed, and 64.0 MiB must stay free, but only .* are available"):
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


GIB = 1 << 30


def test_l1_gets_the_memory_that_weights_and_reserve_do_not_use() -> None:
    # 80 GiB, of which weights use 16; a tenth stays free, so 64 - 8 are for KV.
    memory = DeviceMemory(available_bytes=64 * GIB, total_bytes=80 * GIB)
    assert profile_max_num_tokens(memory, 0.9, 128 << 10) == 56 * GIB // (128 << 10)
    assert profile_max_num_tokens(memory, 0.2, 128 << 10) == 0, "the weights alone are more than that"
    assert profile_max_num_tokens(DeviceMemory(0, 80 * GIB), 0.9, 1) == 0


@pytest.mark.parametrize("seed", seeds(20))
def test_the_tokens_of_a_fraction_fit_and_one_more_would_not(seed: int) -> None:
    numbers = rng(seed)
    total = numbers.randint(1, 1 << 41)
    memory, fraction = DeviceMemory(numbers.randint(0, total), total), numbers.uniform(0.01, 0.99)
    token_bytes = numbers.randint(1, 1 << 20)
    tokens = profile_max_num_tokens(memory, fraction, token_bytes)
    left = memory.available_bytes - tokens * token_bytes
    reserved = total * (1 - Fraction(fraction))
    slack = total * Fraction(1, 1 << 50) + 1  # error of the floating-point product, rounded up to a byte
    assert tokens == 0 or left >= reserved - slack
    assert left - token_bytes < reserved + slack


def test_a_fraction_of_the_device_sizes_l1_with_its_padding_page() -> None:
    cuda = torch.device("cuda")
    memory = DeviceMemory(MHA.payload_bytes * 60 + STAGING_BYTES, MHA.payload_bytes * 100)
    assert device_pages(DeviceConfig(memory_fraction=0.5), MHA, cuda, memory) == 9
    with pytest.raises(CapacityError, match="memory_fraction"):
        device_pages(DeviceConfig(memory_fraction=0.41), MHA, cuda, memory)
    with pytest.raises(CapacityError, match="are free"):
        device_pages(DeviceConfig(tokens=240), MHA, cuda, memory)
    assert device_pages(DeviceConfig(tokens=236), MHA, cuda, memory) == 59


def test_a_fraction_of_a_device_other_than_cuda_is_rejected_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"device\.size or device\.tokens"):
        device_pages(DeviceConfig(memory_fraction=0.5), MHA, torch.device("cpu"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pool_of_a_fraction_of_a_gpu_fits_into_its_free_memory() -> None:
    pages = device_pages(DeviceConfig(memory_fraction=0.5), MHA, torch.device("cuda"))
    available, total = torch.cuda.mem_get_info()
    assert 0 < (pages + 1) * MHA.payload_bytes <= available - total // 2 + (64 << 20)


def test_a_request_row_maps_tokens_to_slots() -> None:
    pool = RequestToTokenPool(requests=2, context_tokens=10)
    taken = pool.alloc(1)
    assert taken is not None
    (row,) = taken
    pool.write(row, np.array([3, 1], dtype=np.int32), 4)
    pool.write(row, np.array([2], dtype=np.int32), 4, first_page=2)
    assert pool.table[row].tolist() == [12, 13, 14, 15, 4, 5, 6, 7, 8, 9]
    with pytest.raises(CapacityError):
        pool.write(row, np.array([2], dtype=np.int32), 4, first_page=3)
    assert pool.alloc(1) is not None and pool.alloc(1) is None
    pool.free(row)
    with pytest.raises(InvalidInput):
        pool.free(row)
    assert pool.free_rows == 1


def test_request_rows_are_allocated_all_or_none() -> None:
    pool = RequestToTokenPool(requests=3, context_tokens=8)
    rows = pool.alloc(2)
    assert rows is not None and len(set(rows)) == 2 and pool.alloc(0) == []
    assert pool.alloc(2) is None and pool.free_rows == 1
    pool.free(rows[0])
    last = pool.alloc(2)
    assert last is not None and sorted([rows[1], *last]) == [0, 1, 2]


def test_a_pool_over_the_blocks_of_an_engine_allocates_all_but_the_padding_page() -> None:
    kv = torch.zeros(6, MHA.layer_bytes, dtype=torch.uint8)
    blocks = EngineBlocks([[kv]] * MHA.layers)
    pool = KVPool(MHA, blocks)
    pages = pool.allocator.alloc(5)
    assert pages is not None and sorted(pages.tolist()) == [1, 2, 3, 4, 5] and pool.pages == 5
    assert KVPool(MHA, EngineBlocks([[kv]] * MHA.layers, first=3)).allocator.first == 3
    with pytest.raises(InvalidInput, match="6 pages; use 1 to 5"):
        KVPool(MHA, blocks, 6)
    with pytest.raises(InvalidInput, match=r"3 layers of 256 bytes, a block has 2 layers of \[256\]"):
        KVPool(MHA, EngineBlocks([[kv]] * 2))
    with pytest.raises(InvalidInput, match=r"a block has 3 layers of \[128\] bytes; a page must be one block"):
        KVPool(MHA, EngineBlocks([[kv[:, :128]]] * MHA.layers))


def test_no_other_thread_runs_while_pages_are_allocated_and_freed() -> None:
    """The switch interval is an hour, so another thread runs only if numpy releases the interpreter's lock. A scheduler
    would then wait for workers, some milliseconds each time."""
    host, interval = HostPool(MHA, 256), sys.getswitchinterval()
    may_run, ran = threading.Lock(), threading.Event()

    def other() -> None:
        with may_run:
            ran.set()

    may_run.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    sys.setswitchinterval(3600)
    try:
        may_run.release()
        for _ in range(3000):
            pages = host.alloc(128)
            assert pages is not None
            host.free(pages)
        assert not ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()

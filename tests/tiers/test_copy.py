"""Both copy engines through their common interface: right bytes, layer order, stream order, failures."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hicache.config import TransferConfig
from hicache.errors import InvalidInput, TransferError
from hicache.geometry import KVGeometry, KVLayout
from hicache.tiers import (
    CopyEngine,
    EngineBlocks,
    HostPool,
    HostWindow,
    KVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    copy_cpu,
    copy_cuda,
    create_device_pool,
)
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.tiers.copy_cuda import CudaCopyEngine
from hicache.tiers.device import pool_values
from hicache.tiers.runtime import Rows
from hicache.types import Indices, PageIds
from tests.steps import StepCounter
from tests.tiers.simulated_device import SimulatedEvent, SimulatedRuntime, SimulatedThread, Turns, simulated_copies

MHA = KVGeometry(layers=3, heads=2, head_dim=8, page_size=4)
MLA = KVGeometry(layers=3, heads=1, head_dim=16, page_size=4, layout=KVLayout.MLA)


def pools(device: KVPool, host: HostPool) -> tuple[EngineBlocks, HostWindow]:
    return device.blocks, HostWindow(host)


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int32)


Make = Callable[[EngineBlocks, HostWindow], CopyEngine]


@pytest.fixture(params=["cpu", "cpu-native", "direct", "staged"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Each engine; the CPU engine without and with the native helper."""
    if request.param in ("direct", "staged"):
        return partial(simulated_copies, path=request.param)
    is_native = request.param == "cpu-native"
    helper = request.getfixturevalue("native").copy_rows if is_native else copy_cpu.copy_in_parts
    monkeypatch.setattr(copy_cpu, "copy_rows", helper)
    return CpuCopyEngine


def fill(pool: KVPool, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    for layer in range(pool.geometry.layers):
        for block in pool.blocks.layers[layer]:
            block.numpy()[:] = numbers.integers(0, 256, block.shape, dtype=np.uint8)


def two_regions(blocks: int, seed: int) -> EngineBlocks:
    """Return MHA layers with K and V in separate tensors, filled with random bytes."""
    numbers, size = torch.Generator().manual_seed(seed), (2, blocks, MHA.block_bytes)
    tensors = [torch.randint(0, 256, size, dtype=torch.uint8, generator=numbers) for _ in range(MHA.layers)]
    return EngineBlocks([[tensor[0], tensor[1]] for tensor in tensors], first=1)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 1000, 4095, 4096, 4097, 4160, 4223, 8192, 65536, 66666])
@pytest.mark.parametrize("shift", [0, 1, 16, 63])
def test_the_helper_copies_rows_of_any_length_and_alignment(native: Any, size: int, shift: int) -> None:
    """Sizes just below and above a cache line, and the number of bytes that the helper prefetches."""
    numbers = np.random.default_rng(size)
    source = numbers.integers(0, 256, (7, 3, size + 32), dtype=np.uint8)[:, :, 5 : 5 + size]
    pitch = (size + 191) // 64 * 64  # so each row begins `shift` bytes after the start of a cache line
    memory = np.zeros(12 * pitch + 64, dtype=np.uint8)
    begin = -memory.ctypes.data % 64
    frames = memory[begin : begin + 12 * pitch].reshape(4, 3, pitch)
    target = frames[:, :, 64 + shift : 64 + shift + size]
    assert not size or target.ctypes.data % 64 == shift
    rows, places = np.array([20, 3, 11, 3]), np.array([0, 11, 5, 7])
    native.copy_rows(target, places, source, rows)
    expected = np.zeros_like(frames)
    expected[places // 3, places % 3, 64 + shift : 64 + shift + size] = source[rows // 3, rows % 3]
    assert np.array_equal(frames, expected), "and nothing beside the rows is touched"
    native.copy_rows(target, places[:1], source, rows[1:2])
    assert np.array_equal(target[0, 0], source[1, 0]), "a single row"


@pytest.mark.parametrize(
    "wrong",
    [
        {"places": np.array([0, 12])}, {"places": np.array([0, -1])}, {"places": np.array([0])},
        {"rows": np.array([0, 2**62])}, {"source": np.zeros((7, 1, 9), np.uint8)},
        {"source": np.zeros((7, 8), np.uint8)}, {"source": np.zeros((7, 1, 8), np.int16)},
        {"source": np.zeros((7, 1, 16), np.uint8)[:, :, ::2]}, {"target": np.zeros((0, 3, 8), np.uint8)},
    ],
    ids=lambda wrong: f"{next(iter(wrong))} {next(iter(wrong.values())).shape}",
)
def test_the_helper_rejects_rows_that_do_not_exist(native: Any, wrong: dict[str, Any]) -> None:
    right = {
        "target": np.zeros((4, 3, 8), np.uint8), "places": np.array([0, 11]),
        "source": np.ones((7, 1, 8), np.uint8), "rows": np.array([0, 6]),
    }
    given = right | wrong
    with pytest.raises(ValueError, match="int64 rows of both sides"):
        native.copy_rows(*given.values())
    assert not given["target"].any()
    with pytest.raises(ValueError, match="read-only"):
        native.copy_rows(np.frombuffer(bytes(96), np.uint8).reshape(4, 3, 8), *list(right.values())[1:])
    native.copy_rows(*right.values())
    assert right["target"].sum() == 16


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
@pytest.mark.parametrize("shape", [MHA, MLA], ids=["mha", "mla"])
def test_kv_that_was_stored_with_scales_is_the_same_after_a_backup_and_a_load(
    engine: Make, shape: KVGeometry, dtype: str
) -> None:
    device, host = create_device_pool(replace(shape, dtype=dtype), 9), HostPool(replace(shape, dtype=dtype), 8)
    assert isinstance(device, MHATokenToKVPool | MLATokenToKVPool)
    copies, slots = engine(*pools(device, host)), torch.arange(8, 24)  # pages 2 to 5
    generator = torch.Generator().manual_seed(5)
    parts = torch.randn(shape.blocks_per_layer, shape.layers, 16, shape.heads, shape.head_dim, generator=generator)
    scales = (0.02, 3.0)[: len(parts)]
    for layer in range(shape.layers):
        device.set_kv_buffer(layer, slots, *parts[:, layer], *scales)
    assert copies.backup(ids(2, 3, 4, 5), ids(7, 0, 3, 1)).wait(10)
    for layer in range(shape.layers):
        device.set_kv_buffer(layer, slots, *torch.ones_like(parts[:, layer]))
    device.loading = copies.load(ids(7, 0, 3, 1), ids(9, 2, 1, 6))
    for layer in range(shape.layers):
        found = device.get_kv_buffer(layer)
        for read, given, scale in zip([found] if len(parts) == 1 else found, parts[:, layer], scales, strict=True):
            expected = pool_values(given, scale, device.dtype)
            assert torch.equal(read[[9, 2, 1, 6]].flatten(0, 1).view(torch.uint8), expected.view(torch.uint8))
            torch.testing.assert_close(expected.float() * scale, given, rtol=0.13, atol=0.01)
    assert copies.close(10)


@pytest.mark.parametrize("slot_bytes", [2 * MHA.layer_bytes, MHA.payload_bytes, 7 * MHA.layer_bytes])
def test_rows_that_do_not_fit_into_a_staging_slot_are_copied_in_parts(slot_bytes: int) -> None:
    blocks, host = two_regions(9, seed=4), HostPool(MHA, 8)
    before = [region.clone() for layer in blocks.layers for region in layer]
    copies = simulated_copies(blocks, HostWindow(host), path="staged", slot_bytes=slot_bytes)
    pages = np.arange(1, 9, dtype=np.int32)
    assert copies.backup(pages, 8 - pages).wait(10)
    assert bytes(host.payload(0)) == b"".join(bytes(region[8].numpy()) for region in before)
    load = copies.load(8 - pages, pages[::-1].copy())
    load.wait_layer(MHA.layers - 1)
    for region, old in zip([region for layer in blocks.layers for region in layer], before, strict=True):
        assert torch.equal(region[1:], old[1:].flip(0))
    assert copies.close(10)


def test_a_staging_slot_smaller_than_a_layer_is_rejected() -> None:
    with pytest.raises(InvalidInput, match=r"a layer of a page has 256 B, a slot of staging 255 B; use direct or auto"):
        simulated_copies(
            two_regions(2, seed=4), HostWindow(HostPool(MHA, 2)), path="staged", slot_bytes=MHA.layer_bytes - 1
        )


class NoKernels(SimulatedRuntime):
    """A device of a machine without a compiler for kernels."""

    closed = 0

    def move(self, stream: Any, rows: Rows, programs: int, *, to_blocks: bool) -> None:
        raise TransferError("copy: Triton cannot run a kernel: no C compiler")

    def close(self) -> None:
        self.closed += 1


def test_without_kernels_short_pieces_go_direct_unless_staging_is_configured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocks, host, runtime = two_regions(9, seed=4), HostPool(MHA, 8), NoKernels(Turns(0))
    thread = partial(SimulatedThread, runtime.turns)
    copies = CudaCopyEngine(blocks, HostWindow(host), TransferConfig(), runtime=runtime, thread=thread)
    assert copies.path == "direct" and "staging cannot be used: copy: Triton cannot run a kernel" in caplog.text
    assert copies.backup(ids(1, 2), ids(0, 1)).wait(10) and copies.close(10)
    refused = NoKernels(Turns(0))
    with pytest.raises(TransferError, match="no C compiler"):
        simulated_copies(blocks, HostWindow(host), path="staged", runtime=refused)
    assert (runtime.closed, refused.closed) == (1, 1), "an engine that could not be made leaves no streams"


class LostDevice(SimulatedRuntime):
    """A device that fails while a copy runs."""

    def passed(self, event: SimulatedEvent) -> bool:
        raise TransferError("cuda: cuEventQuery: an illegal memory access was encountered (error 700)")


class ForgetfulDevice(SimulatedRuntime):
    """A device that fails between the end of a copy and the query of its duration."""

    def elapsed_s(self, begin: SimulatedEvent, end: SimulatedEvent) -> float:
        raise TransferError("cuda: cuEventElapsedTime: unspecified launch failure (error 719)")


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_a_device_failure_is_a_typed_error_and_poll_does_not_raise(path: Any) -> None:
    copies = simulated_copies(
        *pools(create_device_pool(MHA, 2), HostPool(MHA, 2)), path=path, runtime=LostDevice(Turns(0))
    )
    transfer = copies.load(ids(0), ids(1))
    assert transfer.wait(10) and transfer.seconds is None
    assert isinstance(transfer.error, TransferError) and "error 700" in str(transfer.error)
    with pytest.raises(TransferError, match="error 700"):
        transfer.wait_layer(0)


def test_the_duration_is_unknown_before_the_end_or_if_the_device_fails() -> None:
    device, host = create_device_pool(MHA, 2), HostPool(MHA, 2)
    copies = simulated_copies(*pools(device, host), path="direct", runtime=ForgetfulDevice(Turns(0)))
    transfer = copies.load(ids(0), ids(1))
    assert not transfer.done() and transfer.seconds is None
    assert transfer.wait(10) and transfer.error is None and transfer.seconds is None
    assert copies.close(10)


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_events_are_reused_and_a_copy_has_two_timed_events(path: Any) -> None:
    runtime = SimulatedRuntime(Turns(0))
    blocks, host = two_regions(9, seed=4), HostPool(MHA, 8)
    copies = simulated_copies(blocks, HostWindow(host), path=path, runtime=runtime, slot_bytes=2 * MHA.layer_bytes)
    made = []
    for _ in range(4):
        timed = runtime.timed
        for start in (copies.backup, copies.load):
            assert start(ids(1, 2, 3), ids(1, 2, 3)).wait(10)
        assert runtime.timed - timed == 4
        made.append(runtime.made)
    assert made[0] > 0 and made[-1] == made[1], "no event is made for the later copies"
    assert copies.close(10)


class StoppedDevice(SimulatedRuntime):
    """A device that has stopped: no event passes."""

    def passed(self, event: SimulatedEvent) -> bool:
        return False


def test_memory_of_copies_in_flight_at_close_is_kept() -> None:
    device, host = create_device_pool(MHA, 2), HostPool(MHA, 2)
    copies = simulated_copies(*pools(device, host), path="direct", runtime=StoppedDevice(Turns(0)))
    copies.load(ids(0), ids(1))
    memory = weakref.ref(host)
    assert not copies.close(0.01)
    del copies, host, device
    gc.collect()
    assert memory() is not None, "a copy may still read it"
    copy_cuda._UNFINISHED.clear()
    gc.collect()
    assert memory() is None


def test_a_copy_reports_its_own_duration(engine: Make) -> None:
    copies = engine(*pools(create_device_pool(MHA, 4), HostPool(MHA, 4)))
    begin = time.perf_counter()
    for transfer in (copies.backup(ids(1, 2), ids(0, 1)), copies.load(ids(0, 1), ids(3, 4))):
        assert transfer.wait(10)
        assert transfer.seconds is not None and 0 < transfer.seconds <= time.perf_counter() - begin
    copies.close(10)


@pytest.mark.parametrize(
    ("blocks", "host_blocks", "words"),
    [
        (ids(1), ids(0, 1), "1 blocks for 2 host blocks"),
        (ids(), ids(), "empty list of blocks"),
        (ids(0, 1), ids(0, 1), r"block 0 is not one of 1 \.\. 2"),
        (ids(1, 3), ids(0, 1), r"block 3 is not one of 1 \.\. 2"),
        (ids(1, 2), ids(0, 2), r"host block 2 is not one of 0 \.\. 1"),
        (ids(1, 2), ids(-1, 0), r"host block -1 is not one of 0 \.\. 1"),
        (ids(1, 2).astype(np.float32), ids(0, 1), r"blocks are float32 \[2\]; pass a numpy array of integers"),
        (ids(1, 2) > 1, ids(0, 1), "blocks are bool"),
        (ids(1, 2), ids(0, 1).reshape(1, 2), r"host blocks are int32 \[1, 2\]"),
        ([1, 2], ids(0, 1), "blocks are list"),
        (np.array([2**63, 1], np.uint64), ids(0, 1), "block 9223372036854775808 is not"),
    ],
)
def test_invalid_blocks_are_rejected_before_any_copy(
    engine: Make, blocks: PageIds, host_blocks: PageIds, words: str
) -> None:
    device, host = create_device_pool(MHA, 2), HostPool(MHA, 2)
    copies = engine(*pools(device, host))
    fill(device, 1)
    before = [region.clone() for layer in device.blocks.layers for region in layer]
    with pytest.raises(InvalidInput, match=words):
        copies.backup(blocks, host_blocks)
    with pytest.raises(InvalidInput, match=words):
        copies.load(host_blocks, blocks)
    assert copies.close(10)
    assert not host.buffer.any()
    assert all(map(torch.equal, before, (region for layer in device.blocks.layers for region in layer)))


class SteppedEngine(CpuCopyEngine):
    """Copies a layer only when the test lets it."""

    def __init__(self, blocks: EngineBlocks, window: HostWindow) -> None:
        self.permits = threading.Semaphore(0)
        super().__init__(blocks, window)

    def _load_layer(self, layer: int, host_blocks: Indices, blocks: Indices) -> None:
        self.permits.acquire()
        super()._load_layer(layer, host_blocks, blocks)


def test_a_layer_can_be_used_while_the_next_is_in_flight() -> None:
    copies = SteppedEngine(*pools(create_device_pool(MHA, 2), HostPool(MHA, 2)))
    transfer = copies.load(ids(0), ids(1))
    copies.permits.release()
    transfer.wait_layer(0)
    assert not transfer.done() and transfer.seconds is None
    assert not transfer.wait(0.01)
    copies.permits.release(2)
    transfer.wait_layer(2)
    assert transfer.done()
    assert copies.close(10)


def test_the_duration_of_a_copy_excludes_the_wait_for_earlier_copies() -> None:
    copies = SteppedEngine(*pools(create_device_pool(MHA, 2), HostPool(MHA, 2)))
    begin = time.perf_counter()
    first, second = copies.load(ids(0), ids(1)), copies.load(ids(1), ids(2))
    copies.permits.release()
    first.wait_layer(0)  # the second copy is queued and does not run
    copies.permits.release(5)
    assert second.wait(10)
    assert first.seconds is not None and second.seconds is not None
    assert first.seconds + second.seconds <= time.perf_counter() - begin
    assert copies.close(10)


class LostFence:
    """A fence of an engine that has failed."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise RuntimeError("the step failed")


def test_a_failed_copy_reports_its_error_and_later_copies_still_run() -> None:
    device, host = create_device_pool(MHA, 2), HostPool(MHA, 2)
    fill(device, 1)
    copies = CpuCopyEngine(*pools(device, host))
    bad, later = copies.load(ids(0), ids(1), after=LostFence()), copies.load(ids(1), ids(2))
    for layer in range(MHA.layers):
        later.wait_layer(layer)
    with pytest.raises(TransferError, match="the step failed"):
        bad.wait_layer(0)
    assert bad.done() and bad.error is not None and bad.seconds is None
    assert later.wait(10) and later.error is None
    assert device.blocks.layers[0][0][1].any() and not device.blocks.layers[0][0][2].any()
    assert copies.backup(ids(1), ids(1)).wait(10)
    assert copies.close(10)
    with pytest.raises(TransferError, match="closed"):
        copies.load(ids(1), ids(1))


def test_a_copy_reads_what_was_written_before_its_fence_passed() -> None:
    device, host = create_device_pool(MHA, 2), HostPool(MHA, 2)
    copies, step = CpuCopyEngine(*pools(device, host)), StepCounter()
    fill(device, 1)
    first = bytes(device.blocks.layers[0][0][1].numpy())
    assert copies.backup(ids(1), ids(0)).wait(10), "without a fence it is made at once"
    step.advance()
    behind = copies.backup(ids(1), ids(1), after=step.fence(2))
    assert not behind.wait(0.02) and behind.error is None
    fill(device, 2)
    second = bytes(device.blocks.layers[0][0][1].numpy())
    step.advance()
    assert behind.wait(10) and behind.error is None
    assert bytes(host.payload(0))[: len(first)] == first, "negative control: it has the bytes of before"
    assert bytes(host.payload(1))[: len(second)] == second != first
    assert copies.close(10)


def test_a_load_overwrites_a_block_only_after_its_fence() -> None:
    device, host = create_device_pool(MHA, 2), HostPool(MHA, 2)
    copies, step = CpuCopyEngine(*pools(device, host)), StepCounter()
    fill(device, 1)
    before = device.blocks.layers[0][0][1].clone()
    behind = copies.load(ids(0), ids(1), after=step.fence(1))
    assert not behind.wait(0.02) and torch.equal(device.blocks.layers[0][0][1], before)
    step.advance()
    behind.wait_layer(0)
    assert not device.blocks.layers[0][0][1].any()
    assert copies.load(ids(0), ids(1), after=step.fence(1)).wait(10), "a fence that has passed stays passed"
    assert copies.close(10)

"""Both copy engines through their common interface: right bytes, layer order, stream order, failures."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from hicache.errors import InvalidInput, TransferError
from hicache.geometry import KVGeometry, KVLayout
from hicache.tiers import CopyEngine, HostPool, KVPool, create_copy_engine, create_device_pool
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.tiers.copy_cuda import CudaCopyEngine, DeviceEvent, EventTransfer
from hicache.types import PageIds

MHA = KVGeometry(layers=3, heads=2, head_dim=8, page_size=4)
MLA = KVGeometry(layers=3, heads=1, head_dim=16, page_size=4, layout=KVLayout.MLA)


class InlineEvent:
    """An event of a device that has done everything already."""

    def __init__(self) -> None:
        self.passed_s = time.perf_counter()

    def query(self) -> bool:
        return True


class InlineRuntime:
    """Streams of a device that works on each call at once: the CUDA engine's own code, on the CPU."""

    def stream(self) -> object:
        return object()

    @contextlib.contextmanager
    def use(self, stream: object) -> Iterator[None]:
        yield

    def record(self) -> DeviceEvent:
        return InlineEvent()

    def wait(self, event: DeviceEvent) -> None:
        assert event.query()

    def elapsed_s(self, begin: DeviceEvent, end: DeviceEvent) -> float:
        assert isinstance(begin, InlineEvent) and isinstance(end, InlineEvent)
        return end.passed_s - begin.passed_s

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


def staged(device: KVPool, host: HostPool) -> CopyEngine:
    return CudaCopyEngine(device, host, InlineRuntime())


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int32)


@pytest.fixture(params=[CpuCopyEngine, staged], ids=["cpu", "cuda-code-inline"])
def engine(request: pytest.FixtureRequest) -> Callable[[KVPool, HostPool], CopyEngine]:
    make: Callable[[KVPool, HostPool], CopyEngine] = request.param
    return make


def fill(pool: KVPool, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    for layer in range(pool.geometry.layers):
        for block in pool.layer_blocks(layer):
            block.numpy()[:] = numbers.integers(0, 256, block.shape, dtype=np.uint8)


@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
def test_pages_come_back_as_they_left(geometry: KVGeometry, engine: Callable[[KVPool, HostPool], CopyEngine]) -> None:
    device, host = create_device_pool(geometry, 8), HostPool(geometry, 8)
    fill(device, 1)
    before = [[block.clone() for block in device.layer_blocks(layer)] for layer in range(geometry.layers)]
    copies = engine(device, host)
    assert copies.backup(ids(3, 1, 8), ids(0, 7, 5)).wait(10)
    fill(device, 2)
    transfer = copies.load(ids(7, 5), ids(2, 3))
    for layer in range(geometry.layers):
        transfer.wait_layer(layer)
        for block, old in zip(device.layer_blocks(layer), before[layer], strict=True):
            assert torch.equal(block[2], old[1]) and torch.equal(block[3], old[8])
    assert transfer.wait(10) and transfer.done() and transfer.error is None
    assert copies.close(10)


def test_a_page_on_the_host_is_layer_major(engine: Callable[[KVPool, HostPool], CopyEngine]) -> None:
    device, host = create_device_pool(MHA, 2), HostPool(MHA, 1)
    fill(device, 3)
    copies = engine(device, host)
    copies.backup(ids(2), ids(0)).wait(10)
    expected = b"".join(bytes(block[2].numpy()) for layer in range(MHA.layers) for block in device.layer_blocks(layer))
    assert bytes(host.payload(0)) == expected
    copies.close(10)


def test_staging_larger_than_its_bound_goes_in_pieces() -> None:
    device, host = create_device_pool(MHA, 5), HostPool(MHA, 5)
    fill(device, 4)
    copies = CudaCopyEngine(device, host, InlineRuntime(), staging_bytes_max=2 * MHA.payload_bytes)
    copies.backup(ids(1, 2, 3, 4, 5), ids(4, 3, 2, 1, 0)).wait(10)
    assert bytes(host.payload(0)[: MHA.block_bytes]) == bytes(device.layer_blocks(0)[0][5].numpy())
    small = CudaCopyEngine(device, host, InlineRuntime(), staging_bytes_max=2 * MHA.layer_bytes)
    before = device.layer_blocks(2)[1].clone()
    small.load(ids(4, 3, 2, 1, 0), ids(5, 4, 3, 2, 1)).wait(10)
    assert torch.equal(device.layer_blocks(2)[1][5], before[1])
    assert torch.equal(device.layer_blocks(2)[1][1], before[5])
    copies.close(10)


class ShortOfMemory(CudaCopyEngine):
    """Has memory for staging of `rows_max` pages."""

    rows_max = 2

    def _gather(self, index: torch.Tensor, staging: torch.Tensor) -> None:
        self._require_memory(len(index))
        super()._gather(index, staging)

    def _scatter(self, layer: int, index: torch.Tensor, staging: torch.Tensor) -> None:
        self._require_memory(len(index))
        super()._scatter(layer, index, staging)

    def _require_memory(self, rows: int) -> None:
        if rows > self.rows_max:
            raise torch.OutOfMemoryError("no memory left for staging")


def test_a_device_short_of_memory_for_staging_copies_in_smaller_pieces() -> None:
    device, host = create_device_pool(MHA, 7), HostPool(MHA, 7)
    fill(device, 4)
    copies = ShortOfMemory(device, host, InlineRuntime())
    copies.backup(ids(1, 2, 3, 4, 5, 6, 7), ids(6, 5, 4, 3, 2, 1, 0)).wait(10)
    before = [[block.clone() for block in device.layer_blocks(layer)] for layer in range(MHA.layers)]
    for layer in range(MHA.layers):
        for block in device.layer_blocks(layer):
            block.zero_()
    copies.load(ids(0, 1, 2, 3, 4, 5, 6), ids(7, 6, 5, 4, 3, 2, 1)).wait(10)
    for layer in range(MHA.layers):
        for block, expected in zip(device.layer_blocks(layer), before[layer], strict=True):
            assert torch.equal(block[1:], expected[1:])
    copies.rows_max = 0
    with pytest.raises(torch.OutOfMemoryError):
        copies.backup(ids(1, 2), ids(0, 1))
    copies.close(10)


class FaultyEvent(InlineEvent):
    """What an event of a device that has failed does."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_fails_is_a_typed_error_and_not_an_exception_of_poll() -> None:
    transfer = EventTransfer(InlineRuntime(), InlineEvent(), [FaultyEvent()])
    assert transfer.done()
    assert isinstance(transfer.error, TransferError) and transfer.seconds is None
    with pytest.raises(TransferError):
        transfer.wait_layer(0)


class PendingEvent(InlineEvent):
    """What an event is before the device has passed it."""

    def query(self) -> bool:
        return False


class ForgetfulRuntime(InlineRuntime):
    """A device that fails between the end of a copy and the question how long it took."""

    def elapsed_s(self, begin: DeviceEvent, end: DeviceEvent) -> float:
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_a_copy_on_a_stream_has_taken_no_known_time_before_it_has_ended_or_if_the_device_cannot_say() -> None:
    assert EventTransfer(InlineRuntime(), InlineEvent(), [InlineEvent(), PendingEvent()]).seconds is None
    transfer = EventTransfer(ForgetfulRuntime(), InlineEvent(), [InlineEvent()])
    assert transfer.done() and transfer.seconds is None and transfer.error is None


def test_a_copy_says_how_long_it_took_itself(engine: Callable[[KVPool, HostPool], CopyEngine]) -> None:
    copies = engine(create_device_pool(MHA, 4), HostPool(MHA, 4))
    begin = time.perf_counter()
    for transfer in (copies.backup(ids(1, 2), ids(0, 1)), copies.load(ids(0, 1), ids(3, 4))):
        assert transfer.wait(10)
        assert transfer.seconds is not None and 0 < transfer.seconds <= time.perf_counter() - begin
    copies.close(10)


def test_pairs_that_do_not_fit_are_refused(engine: Callable[[KVPool, HostPool], CopyEngine]) -> None:
    copies = engine(create_device_pool(MHA, 2), HostPool(MHA, 2))
    for device_pages, host_pages in ((ids(1), ids(0, 1)), (ids(), ids()), (ids(0), ids(0))):
        with pytest.raises(InvalidInput):
            copies.backup(device_pages, host_pages)
        with pytest.raises(InvalidInput):
            copies.load(host_pages, device_pages)
    copies.close(10)


def test_pools_of_two_geometries_are_refused() -> None:
    with pytest.raises(InvalidInput):
        CpuCopyEngine(create_device_pool(MHA, 2), HostPool(MLA, 2))


class SteppedEngine(CpuCopyEngine):
    """Copies a layer only when the test lets it."""

    def __init__(self, device: KVPool, host: HostPool) -> None:
        self.permits = threading.Semaphore(0)
        super().__init__(device, host)

    def _load_layer(self, layer: int, host_pages: PageIds, device_pages: PageIds) -> None:
        self.permits.acquire()
        super()._load_layer(layer, host_pages, device_pages)


def test_a_layer_can_be_used_while_the_next_is_on_its_way() -> None:
    copies = SteppedEngine(create_device_pool(MHA, 2), HostPool(MHA, 2))
    transfer = copies.load(ids(0), ids(1))
    copies.permits.release()
    transfer.wait_layer(0)
    assert not transfer.done() and transfer.seconds is None
    assert not transfer.wait(0.01)
    copies.permits.release(2)
    transfer.wait_layer(2)
    assert transfer.done()
    assert copies.close(10)


def test_the_time_of_a_copy_does_not_contain_the_wait_for_the_one_before_it() -> None:
    copies = SteppedEngine(create_device_pool(MHA, 2), HostPool(MHA, 2))
    begin = time.perf_counter()
    first, second = copies.load(ids(0), ids(1)), copies.load(ids(1), ids(2))
    copies.permits.release()
    first.wait_layer(0)  # the second one is queued and does not run
    copies.permits.release(5)
    assert second.wait(10)
    assert first.seconds is not None and second.seconds is not None
    assert first.seconds + second.seconds <= time.perf_counter() - begin
    assert copies.close(10)


def test_a_copy_that_fails_says_so_and_so_do_all_later_ones_of_its_direction() -> None:
    copies = CpuCopyEngine(create_device_pool(MHA, 2), HostPool(MHA, 2))
    bad = copies.load(ids(1000), ids(1))
    with pytest.raises(TransferError):
        bad.wait_layer(0)
    assert bad.done() and bad.error is not None and bad.seconds is None
    later = copies.load(ids(1), ids(1))
    with pytest.raises(TransferError):
        later.wait_layer(2)
    assert copies.backup(ids(1), ids(1)).wait(10)
    assert copies.close(10)
    with pytest.raises(TransferError):
        copies.load(ids(1), ids(1))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
def test_cuda_copies_are_ordered_against_compute(geometry: KVGeometry) -> None:
    device, host = create_device_pool(geometry, 64, "cuda"), HostPool(geometry, 64, pin=True)
    copies = create_copy_engine(device, host)
    assert isinstance(copies, CudaCopyEngine)
    pages = np.arange(1, 65, dtype=np.int32)
    for layer in range(geometry.layers):
        for block in device.layer_blocks(layer):
            block.random_(0, 256)  # queued on the current stream; the backup must wait for it
    expected = [[block.clone() for block in device.layer_blocks(layer)] for layer in range(geometry.layers)]
    backup = copies.backup(pages, pages - 1)
    for layer in range(geometry.layers):
        for block in device.layer_blocks(layer):
            torch.cuda.current_stream().wait_stream(copies._backup_stream)  # type: ignore[arg-type]
            block.zero_()
    transfer = copies.load(pages - 1, pages)
    for layer in range(geometry.layers):
        transfer.wait_layer(layer)
        for block, old in zip(device.layer_blocks(layer), expected[layer], strict=True):
            assert torch.equal(block[1:], old[1:])
    assert backup.wait(10) and transfer.wait(10)
    for copy in (backup, transfer):
        assert copy.seconds is not None and 0 < copy.seconds < 10
    assert copies.close(10)

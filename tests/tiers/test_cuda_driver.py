"""Calls of the CUDA driver and pinned memory, over a fake driver library."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import subprocess
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.errors import CapacityError, TransferError
from hicache.tiers.cuda_driver import CudaDriver
from hicache.tiers.pinning import frames_per_chunk, pin
from tests.tiers.fake_cuda import SOURCE, FakeCuda, built_fake_cuda, compiler, fake_cuda

__all__ = ["built_fake_cuda", "fake_cuda"]

# Folders with the headers of a CUDA version with batched copies.
HEADERS = [
    header.parent
    for header in sorted(Path("/usr/local").glob("cuda*/include/cudaTypedefs.h"))
    if "PFN_cuMemcpyBatchAsync_v12080" in header.read_text()
]


def rows(count: int, size: int) -> tuple[Any, Any, Any, Any, Any]:
    """Return rows to copy in another order: source, target, and the arrays of addresses and sizes."""
    source = np.random.default_rng(count).integers(0, 256, (count, size), dtype=np.uint8)
    target = np.zeros_like(source)
    order = np.random.default_rng(0).permutation(count)
    at = np.arange(count) * size
    return source, target, target.ctypes.data + at[order], source.ctypes.data + at, np.full(count, size)


def copied(fake: FakeCuda, count: int) -> CudaDriver:
    """Return a driver that has copied rows in another order."""
    driver = CudaDriver(0, fake.path)
    driver.attach()
    source, target, targets, sources, sizes = rows(count, 48)
    driver.copy(driver.stream(), targets, sources, sizes)
    assert np.array_equal(target[np.random.default_rng(0).permutation(count)], source)
    return driver


@pytest.mark.skipif(not HEADERS, reason="needs the headers of CUDA 12.8 or later")
def test_the_library_of_these_tests_has_the_signatures_of_cuda_h(tmp_path: Path) -> None:
    folder = HEADERS[0]
    command = [compiler(), "-fsyntax-only", "-Wall", "-Wno-enum-conversion", "-Werror", f"-I{folder}", "-DREAL_HEADER"]
    same = subprocess.run([*command, str(SOURCE)], capture_output=True, text=True, check=False)
    assert same.returncode == 0, same.stderr
    other = tmp_path / "other.c"
    other.write_text(SOURCE.read_text().replace("CUevent event, unsigned int flags)", "CUevent event, long flags)"))
    differs = subprocess.run([*command, str(other)], capture_output=True, text=True, check=False)
    assert "conflicting types" in differs.stderr, "negative control"


def test_a_batch_copies_all_rows_in_one_call_and_in_stream_order(fake_cuda: FakeCuda) -> None:
    assert copied(fake_cuda, 1000)._batch is not None
    assert (fake_cuda.number("batches"), fake_cuda.number("batched")) == (1, 1000)
    assert (fake_cuda.number("order"), fake_cuda.number("flags")) == (1, 1)
    assert fake_cuda.number("stream flags") == 1, "a stream that does not wait for the default stream"


@pytest.mark.parametrize("definition", ["WITHOUT_BATCH", "WITHOUT_PROC_ADDRESS"])
def test_with_an_older_driver_copies_are_queued_one_by_one(tmp_path: Path, definition: str) -> None:
    fake = FakeCuda(tmp_path, definition)
    assert copied(fake, 20)._batch is None
    assert (fake.number("batches"), fake.number("loops")) == (0, 20)


def test_a_device_with_other_addresses_for_registered_memory_gets_single_copies(fake_cuda: FakeCuda) -> None:
    fake_cuda.without_host_pointers()
    copied(fake_cuda, 20)
    assert (fake_cuda.number("batches"), fake_cuda.number("loops")) == (0, 20)


def test_the_error_of_a_batch_names_the_copy_and_the_reason(fake_cuda: FakeCuda) -> None:
    driver = CudaDriver(0, fake_cuda.path)
    driver.attach()
    source, _, targets, sources, sizes = rows(10, 4096)
    driver.register(source.ctypes.data, 4 * 4096)
    driver.register(source.ctypes.data + 4 * 4096, 6 * 4096)
    stream = driver.stream()
    with pytest.raises(TransferError, match=r"cuMemcpyBatchAsync: copy 4 of 10: invalid argument \(error 1\)"):
        driver.copy(stream, targets, sources, sizes)
    driver.copy(stream, targets[:4], sources[:4], sizes[:4])
    fake_cuda.fail("cuMemcpyBatchAsync", 2)
    with pytest.raises(TransferError, match=r"cuMemcpyBatchAsync: 3 copies: out of memory \(error 2\)"):
        driver.copy(stream, targets[:3], sources[:3], sizes[:3])
    fake_cuda.fail("cuMemcpyBatchAsync", 719)
    with pytest.raises(TransferError, match=r"unknown error \(error 719\)"):
        driver.copy(stream, targets[:3], sources[:3], sizes[:3])


def test_other_threads_run_during_a_slow_call(fake_cuda: FakeCuda) -> None:
    driver = CudaDriver(0, fake_cuda.path)
    driver.attach()
    _, _, targets, sources, sizes = rows(10, 48)
    stream, counted = driver.stream(), 0

    def copy() -> None:
        driver.attach()
        driver.copy(stream, targets, sources, sizes)

    fake_cuda.slow(50_000)
    thread = threading.Thread(target=copy)
    thread.start()
    while thread.is_alive():
        counted += 1
    assert counted > 100, "the driver's queue may be full for long"


def test_an_event_query_reports_passed_pending_or_a_device_failure(fake_cuda: FakeCuda) -> None:
    driver = CudaDriver(0, fake_cuda.path)
    event = driver.event(timed=False)
    assert fake_cuda.number("event flags") == 2
    assert event > 1 << 32, "a handle has the width of a pointer"
    assert driver.passed(event)
    fake_cuda.not_ready(True)
    assert not driver.passed(event)
    fake_cuda.fail("cuEventQuery", 700)
    with pytest.raises(TransferError, match=r"cuEventQuery: unknown error \(error 700\)"):
        driver.passed(event)
    timed = driver.event(timed=True)
    assert fake_cuda.number("event flags") == 0
    assert driver.elapsed_s(timed, timed) == 0.0025


def test_every_failed_driver_call_is_a_typed_error(fake_cuda: FakeCuda) -> None:
    for name in ("cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"):
        fake_cuda.fail(name, 1)
        with pytest.raises(TransferError, match=f"cuda: {name}: invalid argument"):
            CudaDriver(0, fake_cuda.path)
    driver = CudaDriver(0, fake_cuda.path)
    for name, make in (("cuStreamCreateWithPriority", driver.stream), ("cuDeviceGetPCIBusId", driver.pci_bus_id)):
        fake_cuda.fail(name, 2)
        with pytest.raises(TransferError, match=f"cuda: {name}: out of memory"):
            make()
    assert driver.pci_bus_id() == "0000:3b:00.0"
    with pytest.raises(TransferError, match="error 101"):
        CudaDriver(7, fake_cuda.path)


def test_a_missing_or_wrong_library_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="install a driver"):
        CudaDriver(0, str(tmp_path / "libcuda.so.1"))
    with pytest.raises(TransferError, match=r"cannot be used: .*cuInit"):
        CudaDriver(0, "libm.so.6")


def test_calls_do_not_change_the_context_of_the_caller(fake_cuda: FakeCuda) -> None:
    driver = CudaDriver(0, fake_cuda.path)
    memory = mmap.mmap(-1, 8192)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    driver.call("cuCtxSetCurrent", 0x1234)
    driver.register(address, 8192)
    driver.event(timed=True)
    fake_cuda.fail("cuMemHostUnregister", 2)
    with pytest.raises(TransferError):
        driver.unregister(address)
    assert fake_cuda.number("depth") == 0
    driver.unregister(address)
    assert fake_cuda.number("registered") == 0


def test_a_thread_without_a_context_may_query_events_and_gets_no_context(fake_cuda: FakeCuda) -> None:
    driver = CudaDriver(0, fake_cuda.path)
    stream, event = driver.stream(), driver.event(timed=True)
    assert ctypes.CDLL(fake_cuda.path).cuEventQuery(ctypes.c_void_p(event)) == 201, "negative control"
    assert driver.passed(event) and driver.elapsed_s(event, event) == 0.0025
    fake_cuda.not_ready(True)
    assert not driver.passed(event)
    driver.call("cuStreamWaitEvent", stream, event, 0)
    driver.call("cuStreamDestroy_v2", stream)
    driver.call("cuEventDestroy_v2", event)
    assert fake_cuda.number("depth") == 0 and not fake_cuda.number("context")
    fake_cuda.fail("cuCtxPushCurrent_v2", 201)
    with pytest.raises(TransferError, match=r"cuCtxPushCurrent_v2: .*201"):
        driver.passed(event)


def test_a_wait_on_the_default_stream_uses_the_stream_of_this_device(fake_cuda: FakeCuda) -> None:
    driver = CudaDriver(0, fake_cuda.path)
    event = driver.event(timed=False)
    driver.call("cuCtxSetCurrent", 0x1234)  # the context of another device, which the thread used last
    driver.wait(0, event)
    driver.wait(driver.stream(), event)
    assert fake_cuda.number("foreign waits") == 0 and fake_cuda.number("depth") == 0
    driver.call("cuStreamWaitEvent", 0, event, 0)
    assert fake_cuda.number("foreign waits") == 1, "negative control"


# Pinning


@pytest.mark.parametrize("frame_bytes", [4096, 8192, 4096 * 3, 2 << 20, (2 << 20) + 4096])
def test_a_chunk_has_whole_frames_and_system_pages_within_its_bound(frame_bytes: int) -> None:
    frames = frames_per_chunk(frame_bytes, 64 << 20)
    assert 0 < frames * frame_bytes <= 64 << 20 < (frames + 1) * frame_bytes
    assert frames * frame_bytes % mmap.PAGESIZE == 0
    assert frames_per_chunk(frame_bytes, 1) >= 1, "a frame larger than the bound is one chunk"


class Owner:
    """The owner of the memory."""


def ten_pages(fake_cuda: FakeCuda) -> tuple[Callable[[int], None], Owner]:
    """Return a function that pins memory of ten pages, in chunks of so many pages, and the owner of the memory."""
    driver, owner, mapping = CudaDriver(0, fake_cuda.path), Owner(), mmap.mmap(-1, 10 * 4096)
    address, owned_by = np.frombuffer(mapping, np.uint8).ctypes.data, weakref.ref(owner)

    def pin_in(chunk_pages: int) -> None:
        pin(driver, address, 10 * 4096, chunk_pages * 4096, owned_by(), mapping)

    return pin_in, owner


def test_a_pool_is_registered_in_chunks_and_unregistered_with_it(fake_cuda: FakeCuda) -> None:
    pin_in, owner = ten_pages(fake_cuda)
    fake_cuda.limit(4 * 4096)
    pin_in(4)
    assert fake_cuda.number("registered") == 3
    del owner
    gc.collect()
    assert fake_cuda.number("registered") == 0


def test_one_registration_of_the_whole_pool_would_fail(fake_cuda: FakeCuda) -> None:
    pin_in, _owner = ten_pages(fake_cuda)
    fake_cuda.limit(4 * 4096)
    with pytest.raises(CapacityError, match=r"CUDA refused to pin 40\.0 KiB at 0 B of 40\.0 KiB: .*invalid argument"):
        pin_in(10)


def test_a_failed_chunk_unregisters_the_earlier_chunks(fake_cuda: FakeCuda) -> None:
    pin_in, _owner = ten_pages(fake_cuda)
    fake_cuda.fail("cuMemHostRegister_v2", 2, call=3)
    with pytest.raises(CapacityError, match=r"8\.0 KiB at 32\.0 KiB of 40\.0 KiB: .*out of memory.*lower host\.size"):
        pin_in(4)
    assert fake_cuda.number("registered") == 0
    pin_in(4)
    assert fake_cuda.number("registered") == 3, "the chunks of the first attempt were unregistered"


def test_a_chunk_that_cannot_be_unpinned_is_logged_and_the_others_are_unpinned(
    fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    pin_in, owner = ten_pages(fake_cuda)
    pin_in(4)
    fake_cuda.fail("cuMemHostUnregister", 2, call=2)
    with caplog.at_level(logging.WARNING):
        del owner
        gc.collect()
    assert fake_cuda.number("registered") == 1
    assert "could not be unpinned: cuda: cuMemHostUnregister: out of memory" in caplog.text

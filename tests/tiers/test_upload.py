"""Uploads: the bytes arrive, and pinned memory is not written again before the copy from it has ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hicache.tiers.copy import Fence
from hicache.tiers.device import known_device
from hicache.tiers.upload import ALIGN_BYTES, RING_BYTES, UploadRing, upload
from tests.seeds import rng, seeds


class LateStream:
    """A stream that runs its copies on request, or when the caller waits for a fence."""

    def __init__(self, *, fences_wait: bool = True) -> None:
        self.fences_wait = fences_wait
        self.queued: deque[Callable[[], object]] = deque()
        self.done = 0
        self.submitted = 0
        self.fences = 0
        self.waited = 0

    def copy(self, pinned: torch.Tensor) -> torch.Tensor:
        target = torch.full_like(pinned, -1)
        self.queued.append(lambda: target.copy_(pinned))
        self.submitted += 1
        return target

    def record(self, fence: Fence | None) -> Fence:
        if fence is None:
            fence = LateFence(self)
            self.fences += 1
        assert isinstance(fence, LateFence)
        fence.behind = self.submitted
        return fence

    def run(self, copies: int) -> None:
        for _ in range(copies):
            self.queued.popleft()()
            self.done += 1


class LateFence:
    def __init__(self, stream: LateStream) -> None:
        self.stream = stream
        self.behind = 0

    def query(self) -> bool:
        return self.stream.done >= self.behind

    def synchronize(self) -> None:
        if not self.query():
            self.stream.waited += 1
            if self.stream.fences_wait:
                self.stream.run(self.behind - self.stream.done)


def ring_of(parts: int, stream: LateStream) -> UploadRing:
    return UploadRing(torch.zeros(parts * ALIGN_BYTES, dtype=torch.uint8), stream)


def numbers(first: int, bytes_: int) -> npt.NDArray[np.int64]:
    return np.arange(first, first + bytes_ // 8)


def wrong_uploads(seed: int, *, fences_wait: bool) -> tuple[int, LateStream]:
    """Return how many of many uploads do not arrive, on a stream that runs late, and the stream."""
    random, stream = rng(seed), LateStream(fences_wait=fences_wait)
    ring, pairs = ring_of(8, stream), list[tuple[npt.NDArray[Any], torch.Tensor]]()
    for _ in range(300):
        dtype = random.choice([np.int64, np.int32, np.uint8])
        rows, columns = random.randrange(4), random.randrange(ALIGN_BYTES // 4)
        values = np.array([random.randrange(100) for _ in range(rows * columns)], dtype).reshape(columns, rows).T
        given = values.copy().T.copy().T  # not contiguous, and overwritten below
        if (uploaded := ring.upload(given)) is None:
            assert values.nbytes > 8 * ALIGN_BYTES
            continue
        given[:] = 0
        pairs.append((values, uploaded))
        stream.run(random.randrange(min(3, len(stream.queued)) + 1))
    stream.run(len(stream.queued))
    return sum(not np.array_equal(values, uploaded.numpy()) for values, uploaded in pairs), stream


@pytest.mark.parametrize("seed", seeds(20))
def test_all_uploads_arrive_on_a_late_stream(seed: int) -> None:
    wrong, stream = wrong_uploads(seed, fences_wait=True)
    assert wrong == 0 and stream.waited
    assert stream.fences <= 8  # fences are reused


@pytest.mark.parametrize("seed", seeds(3))
def test_without_the_wait_values_are_overwritten(seed: int) -> None:
    wrong, stream = wrong_uploads(seed, fences_wait=False)
    assert wrong and stream.waited


def test_an_upload_waits_only_for_the_parts_that_it_overwrites() -> None:
    stream = LateStream()
    ring = ring_of(4, stream)
    for part in range(4):
        ring.upload(numbers(part, ALIGN_BYTES))
    assert stream.waited == 0 and len(ring._in_flight) == 4
    ring.upload(numbers(9, ALIGN_BYTES))
    assert (stream.waited, stream.done, len(ring._in_flight)) == (1, 1, 4)


def test_an_upload_does_not_wait_for_parts_that_have_ended() -> None:
    stream = LateStream()
    ring = ring_of(4, stream)
    for part in range(40):
        ring.upload(numbers(part, ALIGN_BYTES))
        stream.run(1)
    assert stream.waited == 0 and len(ring._in_flight) == 1 and stream.fences <= 2


def test_an_upload_does_not_cross_the_end_of_the_ring() -> None:
    stream = LateStream()
    ring = ring_of(4, stream)
    uploads = [ring.upload(numbers(1000 * part, 3 * ALIGN_BYTES)) for part in range(5)]
    assert stream.waited == 4
    stream.run(1)
    for part, uploaded in enumerate(uploads):
        assert uploaded is not None
        np.testing.assert_array_equal(uploaded.numpy(), numbers(1000 * part, 3 * ALIGN_BYTES))


def test_an_array_larger_than_the_ring_is_left_to_the_caller() -> None:
    ring = ring_of(4, stream := LateStream())
    assert ring.upload(numbers(0, 4 * ALIGN_BYTES)) is not None
    assert ring.upload(numbers(0, 4 * ALIGN_BYTES + 8)) is None
    assert stream.submitted == len(ring._in_flight) == 1


def test_on_the_cpu_the_array_is_the_tensor() -> None:
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    uploaded = upload(values, torch.device("cpu"))
    assert uploaded.dtype == torch.int32 and uploaded.data_ptr() == values.ctypes.data


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stream", [None, 1])
def test_uploads_to_cuda_do_not_wait_for_a_stalled_stream(stream: int | None) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    upload(np.zeros(1, np.int64), device)  # allocates the ring
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 1 << 40, (3, size)) for size in (0, 1, 17, 1000, 5000) for _ in range(4)]
    assert sum(array.nbytes for array in arrays) < RING_BYTES
    with torch.cuda.stream(None if stream is None else torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
            stalled = torch.cuda.current_stream(device).record_event()
            uploads = []
            for array in arrays:
                given = array.T.copy().T
                uploads.append(upload(given, device))
                given[:] = 0
            assert not stalled.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for _ in range(3):  # the ring wraps around, and one array is larger than the ring
            arrays.append(random.integers(0, 1 << 40, RING_BYTES // 16))
            arrays.append(random.integers(0, 1 << 40, RING_BYTES // 8 + 1))
            uploads += [upload(array, device) for array in arrays[-2:]]
        for array, uploaded in zip(arrays, uploads, strict=True):
            np.testing.assert_array_equal(array, uploaded.cpu().numpy())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_ring_allocated_in_inference_mode_can_be_used_outside_of_it() -> None:
    device, found = torch.device("cuda", torch.cuda.current_device()), list[list[int]]()

    def both() -> None:  # a new thread has no ring yet
        with torch.inference_mode():
            first = upload(np.arange(3), device)
        found.extend([first.tolist(), upload(np.arange(4), device).tolist()])

    thread = threading.Thread(target=both)
    thread.start()
    thread.join()
    assert found == [[0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_without_a_number_becomes_the_number_of_the_current_device() -> None:
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            assert known_device("cuda") == known_device(torch.device("cuda")) == torch.device("cuda", index)
    assert known_device("cuda:0").index == 0

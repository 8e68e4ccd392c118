"""Upload small host arrays to the device without a wait: page tables, token ids, descriptions of a batch.

A copy from pageable memory makes the host wait for all work queued on the stream, loads included. Pinned memory per
upload would have to be allocated each time. So uploads use a ring of pinned memory that is allocated once.

Locking design: each thread has its own rings, one per device, so no lock is needed.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .copy import Fence

# Pinned once per thread that uploads. The page table of 128 Ki tokens takes half of it.
RING_BYTES = 1 << 20
# Uploads begin at multiples of this, so at most RING_BYTES / ALIGN_BYTES fences are in flight.
ALIGN_BYTES = 256


class UploadStream(Protocol):
    """The stream that the caller queues its work on."""

    def copy(self, pinned: torch.Tensor) -> torch.Tensor:
        """Queue a copy of `pinned` to the device and return the tensor there. Does not block."""

    def record(self, fence: Fence | None) -> Fence:
        """Record and return a fence after the work queued so far: a new one, or `fence`, which is free for reuse."""


class _Part(NamedTuple):
    begin: int
    fence: Fence


class UploadRing:
    """A ring of pinned memory; a part is reused when the copy from it has ended. For one thread.

    Invariant: positions in the ring count up and are taken modulo its size; the parts in flight are in ascending order,
    and the last of them begins less than one size after the first.

    `memory` is uint8, on the host, contiguous, and its size is a multiple of `ALIGN_BYTES`.
    """

    def __init__(self, memory: torch.Tensor, stream: UploadStream) -> None:
        self._memory = memory
        self._stream = stream
        self._next = 0
        self._in_flight: deque[_Part] = deque()
        self._fences: list[Fence] = []  # free for reuse

    def upload(self, values: npt.NDArray[Any]) -> torch.Tensor | None:
        """Queue a copy of `values` to the device and return the tensor there; None if `values` exceed the ring.

        Blocks only if the ring is full of uploads in flight, until the oldest have ended.
        """
        size = len(self._memory)
        if values.nbytes > size:
            return None
        begin = self._next
        if begin % size + values.nbytes > size:  # not across the end
            begin += size - begin % size
        end = begin + values.nbytes
        while self._in_flight and (self._in_flight[0].begin < end - size or self._in_flight[0].fence.query()):
            fence = self._in_flight.popleft().fence
            fence.synchronize()
            self._fences.append(fence)
        place = self._memory[begin % size : begin % size + values.nbytes]
        pinned = place.view(torch.from_numpy(values).dtype).view(values.shape)
        np.copyto(pinned.numpy(), values)
        result = self._stream.copy(pinned)
        fence = self._stream.record(self._fences.pop() if self._fences else None)
        self._in_flight.append(_Part(begin, fence))
        self._next = math.ceil(end / ALIGN_BYTES) * ALIGN_BYTES
        return result


class _CudaStream:
    """The current stream of a CUDA device at the time of each call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, pinned: torch.Tensor) -> torch.Tensor:
        return pinned.to(self._device, non_blocking=True)

    def record(self, fence: Fence | None) -> Fence:
        event = fence if isinstance(fence, torch.cuda.Event) else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class _Rings(threading.local):
    def __init__(self) -> None:
        self.of: dict[torch.device, UploadRing] = {}


_rings = _Rings()


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return `values` on `device`, of the same shape and dtype. On CUDA the copy is queued on the current stream, and
    the array can be reused when the call returns; on the CPU the tensor shares the array's memory.

    Blocks as `UploadRing.upload` does; for an array larger than the ring, pinned memory is allocated, which may wait
    for the device. REQUIRES: no CUDA graph is being captured; a CUDA device has an index.
    """
    if device.type != "cuda":
        return torch.from_numpy(values).to(device, non_blocking=True)
    ring = _rings.of.get(device)
    if ring is None:
        # A tensor created in inference mode could not be used outside of it.
        with torch.cuda.device(device), torch.inference_mode(False):
            memory = torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True)
        ring = _rings.of[device] = UploadRing(memory, _CudaStream(device))
    uploaded = ring.upload(values)
    return torch.from_numpy(values).pin_memory().to(device, non_blocking=True) if uploaded is None else uploaded

"""The runtime of CUDA devices: streams, events and copies by the driver, memory and kernels by torch and Triton.

The copy engine creates its own streams: torch reuses the 32 streams of its pool, which would order copies against
unrelated work on the same stream. Events are pooled, because creating one can stall for milliseconds.

Locking design: as in `DeviceRuntime`. The event pools are deques, whose operations are atomic.
"""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import CapacityError, InvalidInput, TransferError
from ..types import Addresses
from .copy import Fence
from .cuda_driver import CudaDriver
from .runtime import DeviceRuntime, Memory, Rows


class CudaRuntime(DeviceRuntime):
    """See the module's docstring. Streams and events are the driver's handles. REQUIRES: `device` has an index."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index
        self._driver = CudaDriver(self._index)
        self._streams: list[int] = []
        self._torch_streams: dict[int, torch.cuda.Stream] = {}
        self._events: list[int] = []
        self._pools: dict[bool, deque[int]] = {False: deque(), True: deque()}  # the keys: timed or not

    def attach(self) -> None:
        torch.cuda.set_device(self._index)
        self._driver.attach()

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.cuda.device(self._device), self._driver.current():
            yield

    def stream(self) -> int:
        handle = self._driver.stream()
        self._streams.append(handle)
        self._torch_streams[handle] = torch.cuda.ExternalStream(handle, self._device)  # type: ignore[no-untyped-call]
        return handle

    def stream_of(self, stream: object) -> int:
        if not isinstance(stream, torch.cuda.Stream):
            raise InvalidInput(f"copy: a {type(stream).__name__} is not a torch.cuda.Stream; pass the engine's stream")
        return int(stream.cuda_stream)

    def require_fence(self, fence: Fence) -> None:
        if not isinstance(fence, torch.cuda.Event):
            raise InvalidInput(f"fence: a {type(fence).__name__} cannot order copies of a CUDA device; record an Event")
        if not fence.cuda_event:
            raise InvalidInput("fence: the event was never recorded, so nothing would wait for it; record it first")

    def wait_fence(self, stream: int, fence: Fence) -> None:
        assert isinstance(fence, torch.cuda.Event)  # required before
        self.wait(stream, int(fence.cuda_event))

    def record(self, stream: int, *, timed: bool = False) -> int:
        try:
            event = self._pools[timed].pop()
        except IndexError:
            event = self._driver.event(timed=timed)
            self._events.append(event)
        self._driver.call("cuEventRecord", event, stream)
        return event

    def release(self, event: int, *, timed: bool = False) -> None:
        self._pools[timed].append(event)

    def wait(self, stream: int, event: int) -> None:
        self._driver.wait(stream, event)

    def passed(self, event: int) -> bool:
        return self._driver.passed(event)

    def elapsed_s(self, begin: int, end: int) -> float:
        return self._driver.elapsed_s(begin, end)

    def synchronize(self, stream: int) -> None:
        self._driver.call("cuStreamSynchronize", stream)

    def copy(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self._driver.copy(stream, targets, sources, sizes)

    def move(self, stream: int, rows: Rows, programs: int, *, to_blocks: bool) -> None:
        # At its first use, Triton needs a C compiler and Python's headers.
        try:
            with torch.cuda.stream(self._torch_streams[stream]):
                from .rows_triton import move_rows  # noqa: PLC0415  needs triton, which torch for CUDA installs

                move_rows(rows, programs=programs, to_blocks=to_blocks)
        except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
            raise TransferError(f"copy: Triton cannot run a kernel: {error}") from error

    def device_memory(self, size_bytes: int) -> Memory:
        try:
            memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise CapacityError(f"copy: {size_bytes} bytes for staging on {self._device}: {error}") from error
        # Work queued on the current stream may still write memory that torch reuses.
        torch.cuda.synchronize(self._device)
        return Memory(memory.data_ptr(), memory)

    def pinned_memory(self, size_bytes: int) -> Memory:
        try:
            memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise CapacityError(f"copy: {size_bytes} bytes of pinned memory: {error}") from error
        return Memory(memory.data_ptr(), memory)

    def close(self) -> None:
        for stream in self._streams:
            self._driver.call("cuStreamDestroy_v2", stream)
        for event in self._events:
            self._driver.call("cuEventDestroy_v2", event)
        self._streams, self._events = [], []

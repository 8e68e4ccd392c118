"""The runtime of a CUDA device whose streams stall, and which can omit a wait."""

from __future__ import annotations

from typing import cast

import torch

from hicache.tiers import Fence
from hicache.tiers.cuda_runtime import CudaRuntime
from hicache.tiers.runtime import Memory, Rows
from hicache.types import Addresses

# Some milliseconds of a GPU, many times the duration of a copy in these tests.
STALL_CYCLES = 20_000_000


class SlowRuntime(CudaRuntime):
    """`slow` are the numbers of our streams, in order of creation, that stall before each piece of work. `dropped` is
    the omitted wait: the stream that waits and the stream it waits for. The waiting stream is a number, or "engine",
    which waits for layers; the other is a number or "fence"."""

    def __init__(
        self, device: torch.device, *, slow: tuple[int, ...] = (), dropped: tuple[int | str, int | str] | None = None
    ) -> None:
        self._slow = slow
        self._dropped = dropped
        self._recorded_on: dict[int, int | str] = {}
        super().__init__(device)

    def _number(self, stream: int) -> int | str:
        return self._streams.index(stream) if stream in self._streams else "engine"

    def _stall(self, stream: int) -> None:
        if self._number(stream) in self._slow:
            with torch.cuda.stream(self._torch_streams[stream]):
                torch.cuda._sleep(STALL_CYCLES)  # type: ignore[no-untyped-call]

    def record(self, stream: int, *, timed: bool = False) -> int:
        event = super().record(stream, timed=timed)
        self._recorded_on[event] = self._number(stream)
        return event

    def wait(self, stream: int, event: int) -> None:
        if (self._number(stream), self._recorded_on[event]) != self._dropped:
            super().wait(stream, event)

    def wait_fence(self, stream: int, fence: Fence) -> None:
        assert isinstance(fence, torch.cuda.Event)
        if (self._number(stream), "fence") != self._dropped:
            CudaRuntime.wait(self, stream, int(fence.cuda_event))

    def device_memory(self, size_bytes: int) -> Memory:
        """Zeroed: block ids that an omitted wait leaves out are valid ones."""
        memory = super().device_memory(size_bytes)
        cast("torch.Tensor", memory.owner).zero_()
        torch.cuda.synchronize(self._device)
        return memory

    def copy(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self._stall(stream)
        super().copy(stream, targets, sources, sizes)

    def move(self, stream: int, rows: Rows, programs: int, *, to_blocks: bool) -> None:
        self._stall(stream)
        super().move(stream, rows, programs, to_blocks=to_blocks)

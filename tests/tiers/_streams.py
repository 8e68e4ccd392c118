"""Streams of a device that works on each call at once: the CUDA copy engine's own code, on the CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from hicache.tiers import CopyEngine, EngineBlocks, Fence, HostWindow
from hicache.tiers.copy_cuda import CudaCopyEngine, CudaRuntime


class InlineEvent:
    """An event of a device that has done everything already."""

    def __init__(self) -> None:
        self.passed_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert self.query()


class InlineRuntime(CudaRuntime):
    """A `CudaRuntime` that does the work inside each call. `log` says what was queued where."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log: list[tuple[str, object]] = []

    def stream(self) -> object:
        return object()

    @contextlib.contextmanager
    def use(self, stream: object) -> Iterator[None]:
        self.log.append(("work", stream))
        yield

    def record(self) -> Fence:
        return InlineEvent()

    def wait(self, event: Fence, stream: object) -> None:
        self.log.append(("wait", stream))

    def elapsed_s(self, begin: Fence, end: Fence) -> float:
        assert isinstance(begin, InlineEvent) and isinstance(end, InlineEvent)
        return end.passed_s - begin.passed_s

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


def staged(blocks: EngineBlocks, window: HostWindow) -> CopyEngine:
    """The copy engine of CUDA devices, over blocks in host memory."""
    return CudaCopyEngine(blocks, window, InlineRuntime())

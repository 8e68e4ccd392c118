"""The parts of a machine in virtual time: worker threads, links with a bandwidth, copies between L1 and L2."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from hicache.errors import CapacityError, InvariantError, TransferError
from hicache.geometry import KVGeometry
from hicache.supervised import SupervisedPool
from hicache.tiers import CopyEngine, EngineBlocks, Fence, HostPool, HostWindow, KVPool, Transfer
from hicache.types import PageIds

from .clock import VirtualClock

Job = TypeVar("Job")
# Linux maps pages of such a mapping without a promise of memory. Older versions of Python do not name the flag.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class VirtualWorkers(SupervisedPool[Job]):
    """A pool whose workers are tasks of a VirtualClock; for jobs only. An exception of a handler ends the replay."""

    def __init__(self, name: str, threads: int, **rest: Any) -> None:
        super().__init__(name, 0, **rest)
        self._workers_max = threads
        self._working = 0

    @property
    def alive(self) -> int:
        return self._workers_max

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        if self._working < self._workers_max:
            self._working += 1
            if not isinstance(self.clock, VirtualClock):
                raise InvariantError(f"pool {self.name}: virtual workers need a VirtualClock")
            self.clock.start(self._work)

    def withdraw(self, job: Job) -> bool:
        if job not in self._jobs:
            return False
        self._jobs.remove(job)
        return True

    def supervise(self) -> None:
        """Do nothing: tasks neither die nor hang."""

    def _work(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            self.handle(job, _no_beat)
            self.acknowledge(job)
        self._working -= 1


def _no_beat(wait_s: float = 0.0) -> None:
    pass


class Link:
    """A link or device that serves bytes one after the other: a transfer begins when those before it have ended.

    Invariant: `free_s` is the time at which all transfers so far have ended.
    """

    def __init__(self, clock: VirtualClock, bytes_per_s: float) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self.free_s = -math.inf

    def reserve(self, size_bytes: int, earliest_s: float = -math.inf) -> tuple[float, float]:
        """Queue a transfer that may begin at `earliest_s`; return the times of its begin and end."""
        begin_s = max(self._clock(), self.free_s, earliest_s)
        self.free_s = begin_s + size_bytes / self._bytes_per_s
        return begin_s, self.free_s


class VirtualTransfer(Transfer):
    """A copy from `begin_s` to `end_s`, whose layers arrive evenly."""

    def __init__(self, clock: VirtualClock, layers: int, begin_s: float, end_s: float) -> None:
        self._clock = clock
        self._layers = layers
        self._begin_s = begin_s
        self._end_s = end_s

    def done(self) -> bool:
        return self._clock() >= self._end_s

    def wait(self, timeout_s: float) -> bool:
        self._clock.sleep(min(timeout_s, self._end_s - self._clock()))
        return self.done()

    def wait_layer(self, layer: int, stream: object = None) -> None:
        del stream
        arrives_s = self._begin_s + (self._end_s - self._begin_s) * (layer + 1) / self._layers
        self._clock.sleep(arrives_s - self._clock())

    @property
    def error(self) -> TransferError | None:
        return None

    @property
    def seconds(self) -> float | None:
        return self._end_s - self._begin_s if self.done() else None


class VirtualCopyEngine(CopyEngine):
    """Copies that take `fixed_s` and their bytes at `bytes_per_s`, one link per direction. Moves no bytes."""

    def __init__(
        self, blocks: EngineBlocks, window: HostWindow, clock: VirtualClock, bytes_per_s: float, fixed_s: float
    ) -> None:
        super().__init__(blocks, window)
        self._clock = clock
        self._fixed_s = fixed_s
        self._backups, self._loads = Link(clock, bytes_per_s), Link(clock, bytes_per_s)

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        del after  # a virtual forward returns after its work
        return self._copy(self._backups, blocks)

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        del after
        return self._copy(self._loads, blocks)

    def _copy(self, link: Link, blocks: PageIds) -> Transfer:
        begin_s, end_s = link.reserve(len(blocks) * self.window.block_bytes)
        link.free_s = end_s + self._fixed_s
        self._clock.mark(link.free_s)
        return VirtualTransfer(self._clock, len(self.blocks.layers), begin_s, link.free_s)

    def close(self, timeout_s: float) -> bool:
        return True


class UntouchedHostPool(HostPool):
    """A host pool of any size whose memory is reserved, but never used."""

    def _map(self, pages: int) -> mmap.mmap:
        size_bytes = pages * self.frame_bytes
        try:
            return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, OverflowError, ValueError) as error:
            raise CapacityError(
                f"host pool: the system has no {size_bytes} bytes of address space for {pages} pages; lower "
                "host.size, host.tokens or host.ratio"
            ) from error

    def frames(self, pages: PageIds) -> list[memoryview]:
        """Return the frames without their headers being written."""
        size = self.frame_bytes
        return [self.memory[page * size : (page + 1) * size] for page in pages.tolist()]


def untouched_device_pool(geometry: KVGeometry, pages: int) -> KVPool:
    """Return an L1 pool without memory: its tensors are on torch's `meta` device."""
    shape = (pages + 1, geometry.layer_bytes)
    layers: Sequence[Sequence[torch.Tensor]] = [
        [torch.empty(shape, dtype=torch.uint8, device="meta")] for _ in range(geometry.layers)
    ]
    return KVPool(geometry, EngineBlocks(layers, first=1), pages)

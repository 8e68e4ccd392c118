"""Memory that detects writes to free pages. A freed page is filled with poison as soon as the forwards that were queued
before are done: they may still read it.
"""

from __future__ import annotations

import numpy as np
import torch

from hicache.frame import HEADER_BYTES
from hicache.geometry import KVGeometry
from hicache.tiers import BlockPool, EngineBlocks, HostPool, KVPool
from hicache.tiers.allocator import PageAllocator
from hicache.types import Bytes2D, Indices, PageIds
from tests.simulation.stream import Stream

POISON = 0xDB  # fills a free page
JUNK = 0xEE  # undefined contents: unfinished pages, buffers of a read that was not a hit


class Finding(BaseException):
    """An error that a simulation has found. Not an Exception: workers must not treat it as a failed job.

    `kind` is the class of the finding. It distinguishes the symptom of a planted bug from other errors.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class GuardedAllocator(PageAllocator):
    """Fills freed pages with poison, and detects writes to it.

    `blocks` is uint8 `[..., page, bytes]`, a view of all pages. The work of `stream` may read them.
    """

    def __init__(self, capacity: int, *, first: int, tier: str, blocks: Bytes2D, stream: Stream) -> None:
        super().__init__(capacity, first=first)
        self._tier = tier
        self._blocks = blocks
        self._stream = stream
        self._clean_from: dict[int, int] = {}  # free pages without poison: the number of work pieces they wait for
        blocks[...] = POISON

    def alloc_indices(self, count: int) -> Indices | None:
        pages = super().alloc_indices(count)
        if pages is not None and count:
            self._require_poison(pages)
            for page in pages.tolist():
                self._clean_from.pop(page, None)
        return pages

    def free(self, pages: PageIds) -> None:
        super().free(pages)
        self._clean_from.update(dict.fromkeys(pages.tolist(), self._stream.queued))
        self._poison()

    def require_poison(self) -> None:
        """Raises Finding if a free page was written to."""
        self._require_poison(self._stack[self._top :])

    def _poison(self) -> None:
        due = [page for page, end in self._clean_from.items() if end <= self._stream.done]
        if due:
            self._blocks[..., due, :] = POISON
        for page in due:
            del self._clean_from[page]

    def _require_poison(self, pages: Indices) -> None:
        self._poison()
        if self._clean_from:
            pages = np.array([page for page in pages.tolist() if page not in self._clean_from], dtype=np.intp)
        clean = self._blocks[..., pages, :] == POISON
        if not clean.all():
            changed = ~clean.reshape(-1, *clean.shape[-2:]).all(axis=(0, 2))
            raise Finding("late write", f"{self._tier} pages {pages[changed].tolist()} were written while free")


class SimulatedDevicePool(KVPool):
    """L1 in one array, `memory`, uint8 `[layers, blocks of a layer, pages + 1, bytes]`, with a guarded allocator."""

    def __init__(self, geometry: KVGeometry, pages: int, stream: Stream) -> None:
        self.stream = stream
        self.memory = _device_memory(geometry, pages)
        super().__init__(geometry, _blocks(self.memory))
        self.allocator = self.guard = GuardedAllocator(pages, first=1, tier="L1", blocks=self.memory, stream=stream)


class SimulatedSlots(BlockPool):
    """The memory of a trailing pool, as that of L1."""

    def __init__(self, geometry: KVGeometry, slots: int, stream: Stream) -> None:
        self.stream = stream
        self.memory = _device_memory(geometry, slots)
        super().__init__(_blocks(self.memory))
        self.allocator = self.guard = GuardedAllocator(slots, first=1, tier="slots", blocks=self.memory, stream=stream)


def _device_memory(geometry: KVGeometry, pages: int) -> np.ndarray:
    return np.zeros((geometry.layers, geometry.blocks_per_layer, pages + 1, geometry.block_bytes), dtype=np.uint8)


def _blocks(memory: np.ndarray) -> EngineBlocks:
    return EngineBlocks([[torch.from_numpy(part) for part in layer] for layer in memory], first=1)


class SimulatedHostPool(HostPool):
    """L2 with a guarded allocator. `blocks` views the payloads in the shape of L1, `[layers, blocks, page, bytes]`."""

    def __init__(self, geometry: KVGeometry, pages: int) -> None:
        super().__init__(geometry, pages)
        end = HEADER_BYTES + geometry.payload_bytes
        shape = (pages, geometry.layers, geometry.blocks_per_layer, geometry.block_bytes)
        self.blocks = self.buffer[:, HEADER_BYTES:end].reshape(shape).transpose(1, 2, 0, 3)
        assert np.shares_memory(self.blocks, self.buffer)
        blocks = self.buffer[:, :end]
        self.allocator = self.guard = GuardedAllocator(pages, first=0, tier="L2", blocks=blocks, stream=Stream())

"""The copy engine of machines without a GPU: one thread per direction replaces a stream.

Locking design: the copy thread writes a `CpuTransfer`, the scheduler reads it. `_layers_done` and `error` change only
under the condition of the thread. The thread writes `seconds` before it counts the last layer. The threads share
nothing else. Each waits for the fence of a copy before it begins the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from ..arguments import whole
from ..errors import TransferError
from ..lazy import native
from ..types import Bytes2D, Indices, PageIds
from .blocks import EngineBlocks
from .copy import LAYER_WAIT_S_MAX, CopyEngine, Fence, Transfer
from .copy_thread import CopyThread
from .host import HostWindow

# A larger temporary array does not fit the processor's cache: 128 KiB rows were copied at 8.5 GB/s in one part, and at
# 10.3 GB/s in parts of this size.
_PART_BYTES = 2 << 20


def copy_in_parts(target: Bytes2D, places: Indices, source: Bytes2D, rows: Indices) -> None:
    """Copy as the native helper does, through a temporary array, which takes 1.6 to 2 times as long: row n of `[a, b,
    bytes]` is `[n // b, n % b]`."""
    step = max(1, _PART_BYTES // target.shape[2])
    for start in range(0, len(rows), step):
        to, of = places[start : start + step], rows[start : start + step]
        target[np.divmod(to, target.shape[1])] = source[np.divmod(of, source.shape[1])]


copy_rows: Callable[..., None] = native("copy_rows") or copy_in_parts


class CpuTransfer(Transfer):
    """Counts finished layers; `wait_layer` blocks on the count."""

    error: TransferError | None = None
    seconds: float | None = None

    def __init__(self, thread: CopyThread, layers: int, copy_layer: Callable[[int], None], after: Fence | None) -> None:
        self._thread = thread
        self._layers = layers
        self._copy_layer = copy_layer
        self._after = after
        self._layers_done = 0
        thread.submit(self)

    def done(self) -> bool:
        return self._layers_done == self._layers or self.error is not None

    def wait(self, timeout_s: float) -> bool:
        return self._thread.wait_for(self.done, timeout_s)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        whole("layer", layer, 0, self._layers - 1)
        if self._layers_done <= layer:
            self._thread.wait_for(lambda: self._layers_done > layer or self.error is not None, LAYER_WAIT_S_MAX)
        if self.error is not None:
            raise self.error
        if self._layers_done <= layer:
            raise TransferError(f"copy: layer {layer} did not arrive within {LAYER_WAIT_S_MAX:.0f} s")

    def run(self) -> None:
        """Copy layer by layer once the fence has passed."""
        if self._after is not None:
            self._after.synchronize()
        begun = time.perf_counter()
        for layer in range(self._layers):
            self._copy_layer(layer)
            if layer == self._layers - 1:
                self.seconds = time.perf_counter() - begun
            with self._thread.condition:
                self._layers_done += 1
                self._thread.condition.notify_all()

    def fail(self, error: TransferError) -> None:
        with self._thread.condition:
            self.error = error
            self._thread.condition.notify_all()


class CpuCopyEngine(CopyEngine):
    """Copies on one thread per direction, so that overlap and ordering are the same as with streams."""

    def __init__(self, blocks: EngineBlocks, window: HostWindow) -> None:
        super().__init__(blocks, window)
        # Rows of bytes: [blocks, bytes] for each region, [pages, blocks_per_page, bytes] for each layer on the host.
        self._regions: list[list[Bytes2D]] = [[region.numpy() for region in layer] for layer in blocks.layers]
        self._frames = [rows.numpy() for rows in self._host_rows]
        self._backups = CopyThread("hicache-backup-copy")
        self._loads = CopyThread("hicache-load-copy")

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        source, target = self._require_pairs(blocks, host_blocks, after)
        copy_layer = partial(self._backup_layer, blocks=source, host_blocks=target)
        return CpuTransfer(self._backups, len(self._regions), copy_layer, after)

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        target, source = self._require_pairs(blocks, host_blocks, after)
        copy_layer = partial(self._load_layer, host_blocks=source, blocks=target)
        return CpuTransfer(self._loads, len(self._regions), copy_layer, after)

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        threads = (self._backups, self._loads)
        return all([thread.close(max(0.0, deadline - time.monotonic())) for thread in threads])

    def _backup_layer(self, layer: int, blocks: Indices, host_blocks: Indices) -> None:
        for region, frames in self._pieces(layer):
            copy_rows(frames, host_blocks, region, blocks)

    def _load_layer(self, layer: int, host_blocks: Indices, blocks: Indices) -> None:
        for region, frames in self._pieces(layer):
            copy_rows(region, blocks, frames, host_blocks)

    def _pieces(self, layer: int) -> Iterator[tuple[Bytes2D, Bytes2D]]:
        """Yield each region of a layer as `[blocks, 1, bytes]`, with its columns of the rows in `_frames`."""
        end = 0
        for region in self._regions[layer]:
            begin, end = end, end + region.shape[1]
            yield region[:, np.newaxis], self._frames[layer][:, :, begin:end]

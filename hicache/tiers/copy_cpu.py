"""The copy engine of machines without a GPU: one thread per direction replaces a stream.

Locking design: the copy thread writes a `CpuTransfer`, the scheduler reads it. `_layers_done` and `_error` change only
under the condition of the thread. The thread writes `_seconds` before it counts the last layer. The threads share
nothing else. Each waits for the fence of a copy before it begins the copy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from ..arguments import whole
from ..errors import TransferError
from ..types import Bytes2D, Indices, PageIds
from .blocks import EngineBlocks
from .copy import LAYER_WAIT_S_MAX, CopyEngine, Fence, Transfer
from .copy_thread import CopyThread
from .host import HostWindow

# The optional native helper copies rows directly. Without it they pass through a temporary numpy array, which takes 1.6
# to 2 times as long.
copy_rows: Callable[..., None] | None = None
with contextlib.suppress(ImportError, AttributeError):  # an old build may lack the function
    from .. import _native

    copy_rows = _native.copy_rows

# A larger temporary array does not fit the processor's cache: 128 KiB rows were copied at 8.5 GB/s in one part, and at
# 10.3 GB/s in parts of this size.
_PART_BYTES = 2 << 20


class CpuTransfer(Transfer):
    """Counts finished layers; `wait_layer` blocks on the count."""

    def __init__(
        self, thread: CopyThread, layers: int, copy_layer: Callable[[int], None], after: Fence | None
    ) -> None:
        self._thread = thread
        self._layers = layers
        self._copy_layer = copy_layer
        self._after = after
        self._layers_done = 0
        self._seconds: float | None = None
        self._error: TransferError | None = None
        thread.submit(self)

    @property
    def error(self) -> TransferError | None:
        return self._error

    @property
    def seconds(self) -> float | None:
        return self._seconds

    def done(self) -> bool:
        return self._layers_done == self._layers or self._error is not None

    def wait(self, timeout_s: float) -> bool:
        return self._thread.wait_for(self.done, timeout_s)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        whole("layer", layer, 0, self._layers - 1)
        if self._layers_done <= layer:
            self._thread.wait_for(lambda: self._layers_done > layer or self._error is not None, LAYER_WAIT_S_MAX)
        if self._error is not None:
            raise self._error
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
                self._seconds = time.perf_counter() - begun
            with self._thread.condition:
                self._layers_done += 1
                self._thread.condition.notify_all()

    def fail(self, error: TransferError) -> None:
        """Fail as `CopyTask.fail`."""
        with self._thread.condition:
            self._error = error
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
        if copy_rows is not None:
            for region, frames in self._pieces(layer):
                copy_rows(frames, host_blocks, region, blocks)
            return
        for region, rows, place in self._parts(layer, blocks, host_blocks):
            self._frames[layer][place] = region[rows]

    def _load_layer(self, layer: int, host_blocks: Indices, blocks: Indices) -> None:
        if copy_rows is not None:
            for region, frames in self._pieces(layer):
                copy_rows(region, blocks, frames, host_blocks)
            return
        for region, rows, place in self._parts(layer, blocks, host_blocks):
            region[rows] = self._frames[layer][place]

    def _pieces(self, layer: int) -> Iterator[tuple[Bytes2D, Bytes2D]]:
        """Yield each region of a layer as `[blocks, 1, bytes]`, with its columns of the rows in `_frames`."""
        end = 0
        for region in self._regions[layer]:
            begin, end = end, end + region.shape[1]
            yield region[:, np.newaxis], self._frames[layer][:, :, begin:end]

    def _parts(
        self, layer: int, blocks: Indices, host_blocks: Indices
    ) -> Iterator[tuple[Bytes2D, Indices, tuple[Indices, Indices, slice]]]:
        """Yield each region of a layer in parts of at most `_PART_BYTES`: its rows, and their index in
        `_frames[layer]`."""
        end = 0
        for region in self._regions[layer]:
            begin, end = end, end + region.shape[1]
            step = max(1, _PART_BYTES // region.shape[1])
            for start in range(0, len(blocks), step):
                pages, parts = np.divmod(host_blocks[start : start + step], self.window.blocks_per_page)
                yield region, blocks[start : start + step], (pages, parts, slice(begin, end))

"""The copy engine of machines without a GPU: one thread per direction stands for a stream.

Locking design: a `CpuTransfer` is written by its thread and read by the scheduler; `_layers_done` and `_error` change
under `_condition` alone, `_seconds` by the thread before it counts the last layer. The threads share nothing else; each
takes its work from a queue of its own, in order, and waits for the fence of a copy before it begins the copy.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
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
from .host import HostWindow

logger = logging.getLogger(__name__)

# The optional native helper: rows of one array to rows of another. Without it they pass through a temporary array of
# numpy's, which takes 1.3 to 1.6 times as long.
copy_rows: Callable[..., None] | None = None
with contextlib.suppress(ImportError, AttributeError):  # a build may be older than this
    from .. import _native

    copy_rows = _native.copy_rows

# A larger temporary array leaves the processor's cache: 128 KiB rows were copied at 8.5 GB/s all at once and at
# 10.3 GB/s in parts of this size.
_PART_BYTES = 2 << 20


class CpuTransfer(Transfer):
    """Counts finished layers; `wait_layer` blocks on the count.

    `condition` is that of the copying thread, which all its transfers share: making one costs more than a step should.
    """

    def __init__(self, layers: int, condition: threading.Condition) -> None:
        self._layers = layers
        self._layers_done = 0
        self._seconds: float | None = None
        self._error: TransferError | None = None
        self._condition = condition

    @property
    def error(self) -> TransferError | None:
        return self._error

    @property
    def seconds(self) -> float | None:
        return self._seconds

    def done(self) -> bool:
        return self._layers_done == self._layers or self._error is not None

    def wait(self, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(self.done, timeout_s)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        whole("layer", layer, 0, self._layers - 1)
        if self._layers_done <= layer:
            with self._condition:
                self._condition.wait_for(lambda: self._layers_done > layer or self._error is not None, LAYER_WAIT_S_MAX)
        if self._error is not None:
            raise self._error
        if self._layers_done <= layer:
            raise TransferError(f"copy: layer {layer} did not arrive within {LAYER_WAIT_S_MAX:.0f} s")

    def run(self, copy_layer: Callable[[int], None], after: Fence | None) -> None:
        """Copy layer by layer once `after` has passed. Called by the copying thread."""
        if after is not None:
            after.synchronize()
        begun = time.perf_counter()
        for layer in range(self._layers):
            copy_layer(layer)
            if layer == self._layers - 1:
                self._seconds = time.perf_counter() - begun
            with self._condition:
                self._layers_done += 1
                self._condition.notify_all()

    def fail(self, error: TransferError) -> None:
        """End without further layers. Called by the copying thread."""
        with self._condition:
            self._error = error
            self._condition.notify_all()


class CpuCopyEngine(CopyEngine):
    """Copies with numpy on two threads, so that overlap and ordering are the same as with streams."""

    def __init__(self, blocks: EngineBlocks, window: HostWindow) -> None:
        super().__init__(blocks, window)
        # Rows of bytes: [blocks, bytes] for each region, [pages, blocks_per_page, bytes] for each layer on the host.
        self._regions: list[list[Bytes2D]] = [[region.numpy() for region in layer] for layer in blocks.layers]
        self._frames = [rows.numpy() for rows in self._host_rows]
        self._backup_stream = _CopyThread("hicache-backup-copy")
        self._load_stream = _CopyThread("hicache-load-copy")

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        source, target = self._require_pairs(blocks, host_blocks, after)
        copy_layer = partial(self._backup_layer, blocks=source, host_blocks=target)
        return self._backup_stream.submit(len(self._regions), copy_layer, after)

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        target, source = self._require_pairs(blocks, host_blocks, after)
        copy_layer = partial(self._load_layer, host_blocks=source, blocks=target)
        return self._load_stream.submit(len(self._regions), copy_layer, after)

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        streams = (self._backup_stream, self._load_stream)
        return all([stream.close(max(0.0, deadline - time.monotonic())) for stream in streams])

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
        """The regions of a layer as `[blocks, 1, bytes]`, and the same bytes on the host as in `_frames`."""
        end = 0
        for region in self._regions[layer]:
            begin, end = end, end + region.shape[1]
            yield region[:, np.newaxis], self._frames[layer][:, :, begin:end]

    def _parts(
        self, layer: int, blocks: Indices, host_blocks: Indices
    ) -> Iterator[tuple[Bytes2D, Indices, tuple[Indices, Indices, slice]]]:
        """The regions of a layer, some blocks at a time: their rows, and the same bytes in `_frames[layer]`."""
        end = 0
        for region in self._regions[layer]:
            begin, end = end, end + region.shape[1]
            step = max(1, _PART_BYTES // region.shape[1])
            for start in range(0, len(blocks), step):
                pages, parts = np.divmod(host_blocks[start : start + step], self.window.blocks_per_page)
                yield region, blocks[start : start + step], (pages, parts, slice(begin, end))


class _CopyThread:
    """Runs layer-wise copies in order of submission."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[CpuTransfer, Callable[[int], None], Fence | None] | None]
        self._tasks = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._closed = False  # by the scheduler
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, layers: int, copy_layer: Callable[[int], None], after: Fence | None) -> CpuTransfer:
        if self._closed:
            raise TransferError("copy: the copy engine is closed")
        transfer = CpuTransfer(layers, self._condition)
        self._tasks.put((transfer, copy_layer, after))
        return transfer

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        self._tasks.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            transfer, copy_layer, after = task
            try:
                transfer.run(copy_layer, after)
            except Exception as error:
                # The thread must outlive one bad copy; its transfer carries the error to the caller.
                logger.exception("copy between device and host failed")
                transfer.fail(TransferError(f"copy between device and host failed: {error}"))

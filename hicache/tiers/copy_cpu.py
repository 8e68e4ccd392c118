"""The copy engine of machines without a GPU: one thread per direction stands for a stream.

Locking design: a `CpuTransfer` is written by its thread and read by the scheduler; `_layers_done` and `_error` change
under `_condition` alone, `_seconds` by the thread before it counts the last layer. The threads share nothing else; each
takes its work from a queue of its own, in order.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from ..errors import TransferError
from ..types import Bytes2D, PageIds
from .copy import LAYER_WAIT_S_MAX, CopyEngine, Transfer
from .device import KVPool
from .host import HostPool

logger = logging.getLogger(__name__)


class CpuTransfer(Transfer):
    """Counts finished layers; `wait_layer` blocks on the count.

    `condition` is that of the copying thread, which all its transfers share: making one costs more than a step should.
    """

    def __init__(self, layers: int, condition: threading.Condition) -> None:
        self._layers = layers
        self._layers_done = 0
        self._begun = 0.0
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

    def wait_layer(self, layer: int) -> None:
        if self._layers_done <= layer:
            with self._condition:
                self._condition.wait_for(lambda: self._layers_done > layer or self._error is not None, LAYER_WAIT_S_MAX)
        if self._error is not None:
            raise self._error
        if self._layers_done <= layer:
            raise TransferError(f"copy: layer {layer} did not arrive within {LAYER_WAIT_S_MAX:.0f} s")

    def begin(self) -> None:
        """Called by the copying thread before the first layer."""
        self._begun = time.perf_counter()

    def layer_finished(self) -> None:
        """Called by the copying thread after each layer."""
        if self._layers_done == self._layers - 1:
            self._seconds = time.perf_counter() - self._begun
        with self._condition:
            self._layers_done += 1
            self._condition.notify_all()

    def fail(self, error: TransferError) -> None:
        """Called by the copying thread instead of further layers."""
        with self._condition:
            self._error = error
            self._condition.notify_all()


class CpuCopyEngine(CopyEngine):
    """Copies with numpy on two threads, so that overlap and ordering are the same as with streams."""

    def __init__(self, device: KVPool, host: HostPool) -> None:
        super().__init__(device, host)
        self._blocks: list[list[Bytes2D]] = [
            [block.numpy() for block in device.layer_blocks(layer)] for layer in range(device.geometry.layers)
        ]
        self._backup_stream = _CopyThread("hicache-backup-copy")
        self._load_stream = _CopyThread("hicache-load-copy")

    def backup(self, device_pages: PageIds, host_pages: PageIds) -> Transfer:
        self._require_pairs(device_pages, host_pages)
        return self._backup_stream.submit(len(self._blocks), lambda i: self._backup_layer(i, device_pages, host_pages))

    def load(self, host_pages: PageIds, device_pages: PageIds) -> Transfer:
        self._require_pairs(device_pages, host_pages)
        return self._load_stream.submit(len(self._blocks), lambda i: self._load_layer(i, host_pages, device_pages))

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        streams = (self._backup_stream, self._load_stream)
        return all([stream.close(max(0.0, deadline - time.monotonic())) for stream in streams])

    def _backup_layer(self, layer: int, device_pages: PageIds, host_pages: PageIds) -> None:
        for index, block in enumerate(self._blocks[layer]):
            self.host.buffer[host_pages, self._block_slice(layer, index)] = block[device_pages]

    def _load_layer(self, layer: int, host_pages: PageIds, device_pages: PageIds) -> None:
        for index, block in enumerate(self._blocks[layer]):
            block[device_pages] = self.host.buffer[host_pages, self._block_slice(layer, index)]

    def _block_slice(self, layer: int, index: int) -> slice:
        start, size = self.host.piece_slice(layer).start, self.device.geometry.block_bytes
        return slice(start + index * size, start + (index + 1) * size)


class _CopyThread:
    """Runs layer-wise copies in order of submission, until one fails: then all later ones fail with it."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[CpuTransfer, Callable[[int], None]] | None] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._closed = False  # by the scheduler
        self._failure: TransferError | None = None  # by the thread; the first one, which all later copies inherit
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, layers: int, copy_layer: Callable[[int], None]) -> CpuTransfer:
        if self._closed:
            raise TransferError("copy: the copy engine is closed")
        transfer = CpuTransfer(layers, self._condition)
        self._tasks.put((transfer, copy_layer))
        return transfer

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        self._tasks.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            transfer, copy_layer = task
            if self._failure is not None:
                # Whoever waits for a later copy may need the pages of the one that failed.
                transfer.fail(self._failure)
                continue
            try:
                transfer.begin()
                for layer in range(transfer._layers):
                    copy_layer(layer)
                    transfer.layer_finished()
            except Exception as error:
                # The thread must outlive one bad copy; whoever waits for the transfer gets the error.
                logger.exception("copy between device and host failed")
                self._failure = TransferError(f"copy between device and host failed: {error}")
                transfer.fail(self._failure)

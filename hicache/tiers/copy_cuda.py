"""The copy engine of CUDA devices: two streams, one event per layer.

A backup gathers the blocks of all layers into a staging buffer on the device and sends one piece per block to pinned
host memory. A load sends one piece per (block, layer), which is contiguous in the frame: straight to the block where
the layer is one region, else to staging, from which it is scattered into the regions. Layer i computes while layer
i + 1 is in flight.

Locking design: the scheduler thread submits; the device signals through events; there is no other thread.
The streams come from a `CudaRuntime`, which the tests replace, so that the same code runs without a GPU, in order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..arguments import whole
from ..errors import InvalidInput, TransferError
from ..types import Indices, PageIds
from .blocks import EngineBlocks
from .copy import LAYER_WAIT_S_MAX, CopyEngine, Fence, Transfer
from .device import upload
from .host import HostWindow

# Staging is taken from the device pool's neighbour memory; this much keeps PCIe busy without crowding activations.
STAGING_BYTES_MAX = 256 << 20
_POLL_S = 50e-6


class CudaRuntime:
    """The few stream operations of one CUDA device that this engine needs. Tests give one of another device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Any:
        """A new stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def use(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        """Work inside the context is queued on `stream`, which becomes the current one."""
        return torch.cuda.stream(stream)

    def record(self) -> Fence:
        """An event behind the work queued on the current stream, which notes when the device passes it."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Fence, stream: Any) -> None:
        """Queue a wait for `event` on `stream`. Raises InvalidInput unless both are of CUDA."""
        if not isinstance(event, torch.cuda.Event) or not isinstance(stream, torch.cuda.Stream):
            raise InvalidInput("copy engine: a fence and a stream of a CUDA device are torch.cuda.Event and .Stream")
        stream.wait_event(event)

    def elapsed_s(self, begin: Any, end: Any) -> float:
        """Device time between two events that it has passed. Does not block; raises RuntimeError if it failed."""
        return float(begin.elapsed_time(end)) / 1000

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of a small host tensor on the device, queued on the current stream."""
        return upload(values, self._device)


class EventTransfer(Transfer):
    """A copy whose layers end at events; a copy with one event ends in one piece. It starts at `begin`."""

    def __init__(self, runtime: CudaRuntime, begin: Fence, events: list[Fence]) -> None:
        self._runtime = runtime
        self._begin = begin
        self._events = events
        self._error: TransferError | None = None

    @property
    def error(self) -> TransferError | None:
        return self._error

    @property
    def seconds(self) -> float | None:
        if not self.done() or self._error is not None:
            return None
        try:
            return self._runtime.elapsed_s(self._begin, self._events[-1])
        except RuntimeError:
            return None  # the device has failed since; the next call to it says so

    def done(self) -> bool:
        return self._passed(self._events[-1])

    def wait(self, timeout_s: float) -> bool:
        return self._wait(self._events[-1], timeout_s)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        event = self._events[min(whole("layer", layer), len(self._events) - 1)]
        if stream is not None and self._error is None:
            self._runtime.wait(event, stream)
        elif not self._wait(event, LAYER_WAIT_S_MAX):
            raise TransferError(f"copy: layer {layer} did not arrive within {LAYER_WAIT_S_MAX:.0f} s")
        if self._error is not None:
            raise self._error

    def _passed(self, event: Fence) -> bool:
        """True if the copy has failed or come to `event`."""
        try:
            return self._error is not None or event.query()
        except RuntimeError as error:
            self._error = TransferError(f"copy between device and host failed: {error}")
            return True

    def _wait(self, event: Fence, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._passed(event):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


class CudaCopyEngine(CopyEngine):
    """Copies on two streams of a CUDA device. The host pool should be pinned, else copies block the caller."""

    def __init__(
        self,
        blocks: EngineBlocks,
        window: HostWindow,
        runtime: CudaRuntime | None = None,
        *,
        staging_bytes_max: int = STAGING_BYTES_MAX,
    ) -> None:
        super().__init__(blocks, window)
        self._staging_bytes_max = staging_bytes_max
        self._runtime = runtime if runtime is not None else CudaRuntime(blocks.device)
        self._backup_stream = self._runtime.stream()
        self._load_stream = self._runtime.stream()
        # Copies of one direction end in order, so the last one stands for all.
        self._last: dict[str, Transfer] = {}

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        source, target = self._require_pairs(blocks, host_blocks, after)
        with self._on(self._backup_stream, after):
            begin = self._runtime.record()
            self._in_pieces(len(source), self.window.block_bytes, partial(self._backup_piece, source, target))
            events = [self._runtime.record()]
        transfer = self._last["backup"] = EventTransfer(self._runtime, begin, events)
        return transfer

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        target, source = self._require_pairs(blocks, host_blocks, after)
        events: list[Fence] = []
        with self._on(self._load_stream, after):
            begin = self._runtime.record()
            for layer, layer_bytes in enumerate(self.blocks.layer_bytes):
                self._in_pieces(len(source), layer_bytes, partial(self._load_piece, layer, source, target))
                events.append(self._runtime.record())
        transfer = self._last["load"] = EventTransfer(self._runtime, begin, events)
        return transfer

    def require_fence(self, fence: Fence) -> None:
        """As every engine's; on a CUDA device a fence is a `torch.cuda.Event`."""
        super().require_fence(fence)
        if self.blocks.device.type == "cuda" and not isinstance(fence, torch.cuda.Event):
            raise InvalidInput(f"fence: a {type(fence).__name__} cannot order copies of a CUDA device; record an Event")

    @contextlib.contextmanager
    def _on(self, stream: object, after: Fence | None) -> Iterator[None]:
        """Queue work on `stream` behind `after`. If that fails halfway, wait for the queued part, then raise.

        Staging and indices are made on this stream too: its allocator reuses them in stream order once they are
        dropped. Tensors that an engine has made in inference mode can be written in inference mode alone.
        """
        if after is not None:
            self._runtime.wait(after, stream)
        with torch.inference_mode(), self._runtime.use(stream):
            queued = False
            try:
                yield
                queued = True
            finally:
                if not queued:
                    # The caller takes the blocks back: no queued part of the copy may still write to them.
                    self._runtime.record().synchronize()

    def _in_pieces(self, blocks: int, block_bytes: int, copy: Callable[[slice], None]) -> None:
        """Copy blocks in pieces that staging has room for; if the device has less, in smaller ones from there on.

        A piece that was begun in vain is copied again as a whole.
        """
        start, rows = 0, max(1, min(blocks, self._staging_bytes_max // block_bytes))
        while start < blocks:
            try:
                copy(slice(start, start + rows))
            except torch.OutOfMemoryError:
                if rows == 1:
                    raise
                rows //= 2
            else:
                start += rows

    def _backup_piece(self, blocks: Indices, host_blocks: Indices, piece: slice) -> None:
        """Whole blocks, gathered in staging, each then copied to its part of a frame."""
        index, staging = self._index(blocks[piece]), self._staging(len(blocks[piece]), self.window.block_bytes)
        for column, region in _columns(staging, [region for layer in self.blocks.layers for region in layer]):
            column.copy_(region.index_select(0, index))
        for row, host_block in enumerate(host_blocks[piece].tolist()):
            frame = self.window.rows[divmod(host_block, self.window.blocks_per_page)]
            frame.copy_(staging[row], non_blocking=True)

    def _load_piece(self, layer: int, host_blocks: Indices, blocks: Indices, piece: slice) -> None:
        """One layer of some blocks: each is one piece of its frame, and of the device if the layer is one region."""
        regions = self.blocks.layers[layer]
        staged = len(regions) > 1
        rows = self._staging(len(blocks[piece]), self.blocks.layer_bytes[layer]) if staged else regions[0]
        targets = range(len(rows)) if staged else blocks[piece].tolist()
        for row, host_block in zip(targets, host_blocks[piece].tolist(), strict=True):
            frame = self._host_rows[layer][divmod(host_block, self.window.blocks_per_page)]
            rows[row].copy_(frame, non_blocking=True)
        if staged:
            index = self._index(blocks[piece])
            for column, region in _columns(rows, regions):
                region.index_copy_(0, index, column)

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all([last.wait(max(0.0, deadline - time.monotonic())) for last in self._last.values()])

    def _index(self, blocks: Indices) -> torch.Tensor:
        return self._runtime.upload(torch.from_numpy(blocks))

    def _staging(self, rows: int, row_bytes: int) -> torch.Tensor:
        return torch.empty((rows, row_bytes), dtype=torch.uint8, device=self.blocks.device)


def _columns(staging: torch.Tensor, regions: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The columns of `staging` that belong to each region, with the region."""
    end = 0
    for region in regions:
        begin, end = end, end + region.shape[1]
        yield staging[:, begin:end], region

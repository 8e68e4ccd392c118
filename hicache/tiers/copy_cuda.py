"""The copy engine of CUDA devices: two streams, one event per layer.

A backup gathers the pages of all layers into a staging buffer on the device and sends one piece per page to pinned host
memory. A load sends one piece per (page, layer), which is contiguous in the frame, and scatters each layer into the
pool as soon as it has arrived, so that layer i computes while layer i + 1 is on its way.

Locking design: the scheduler thread submits; the device signals through events; there is no other thread.
The streams come from a `StreamRuntime`, so that the same code runs without a GPU, in order, under the tests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch

from ..errors import InvalidInput, TransferError
from ..frame import HEADER_BYTES
from ..types import PageIds
from .copy import CopyEngine, Transfer
from .device import KVPool, upload
from .host import HostPool

# Staging is taken from the device pool's neighbour memory; this much keeps PCIe busy without crowding activations.
STAGING_BYTES_MAX = 256 << 20
_POLL_S = 50e-6


class DeviceEvent(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the device has passed it."""


class StreamRuntime(Protocol):
    """The few stream operations this engine needs."""

    def stream(self) -> object:
        """A new stream."""

    def use(self, stream: object) -> contextlib.AbstractContextManager[object]:
        """Work inside the context is queued on `stream`, after all work queued on the caller's current stream."""

    def record(self) -> DeviceEvent:
        """An event behind the work queued on the current stream, which notes when the device passes it."""

    def wait(self, event: DeviceEvent) -> None:
        """Queue a wait for `event` on the current stream."""

    def elapsed_s(self, begin: DeviceEvent, end: DeviceEvent) -> float:
        """Device time between two events that it has passed. Does not block; raises RuntimeError if it failed."""

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of a small host tensor on the device, queued on the current stream."""


class CudaRuntime:
    """`StreamRuntime` of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def use(self, stream: object) -> Iterator[None]:
        if not isinstance(stream, torch.cuda.Stream):
            raise InvalidInput("copy engine: a stream of another runtime")
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: DeviceEvent) -> None:
        if not isinstance(event, torch.cuda.Event):
            raise InvalidInput("copy engine: an event of another runtime")
        torch.cuda.current_stream(self._device).wait_event(event)

    def elapsed_s(self, begin: DeviceEvent, end: DeviceEvent) -> float:
        if not isinstance(begin, torch.cuda.Event) or not isinstance(end, torch.cuda.Event):
            raise InvalidInput("copy engine: an event of another runtime")
        return float(begin.elapsed_time(end)) / 1000

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        return upload(values, self._device)


class EventTransfer(Transfer):
    """A copy whose layers end at events; a copy with one event ends in one piece. It starts at `begin`."""

    def __init__(self, runtime: StreamRuntime, begin: DeviceEvent, events: list[DeviceEvent]) -> None:
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
            return None  # the device has failed since; whatever is asked of it next says so

    def done(self) -> bool:
        try:
            return self._error is not None or self._events[-1].query()
        except RuntimeError as error:
            self._error = TransferError(f"copy between device and host failed: {error}")
            return True

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def wait_layer(self, layer: int) -> None:
        if self._error is not None:
            raise self._error
        self._runtime.wait(self._events[min(layer, len(self._events) - 1)])


class CudaCopyEngine(CopyEngine):
    """Copies on two streams of a CUDA device. The host pool should be pinned, else copies block the caller."""

    def __init__(
        self,
        device: KVPool,
        host: HostPool,
        runtime: StreamRuntime | None = None,
        *,
        staging_bytes_max: int = STAGING_BYTES_MAX,
    ) -> None:
        super().__init__(device, host)
        self._staging_bytes_max = staging_bytes_max
        self._runtime = runtime if runtime is not None else CudaRuntime(device.device)
        self._backup_stream = self._runtime.stream()
        self._load_stream = self._runtime.stream()
        self._blocks = [device.layer_blocks(layer) for layer in range(device.geometry.layers)]
        self._last: dict[str, Transfer] = {}

    def backup(self, device_pages: PageIds, host_pages: PageIds) -> Transfer:
        self._require_pairs(device_pages, host_pages)
        # Staging is allocated on the copy's own stream, whose allocator reuses it in stream order once it is dropped.
        with self._runtime.use(self._backup_stream):
            begin = self._runtime.record()
            backup_piece = partial(self._backup_piece, device_pages, host_pages)
            self._in_pieces(len(device_pages), self.device.geometry.payload_bytes, backup_piece)
            events = [self._runtime.record()]
        return self._remember("backup", EventTransfer(self._runtime, begin, events))

    def load(self, host_pages: PageIds, device_pages: PageIds) -> Transfer:
        self._require_pairs(device_pages, host_pages)
        pages = host_pages.tolist()
        events: list[DeviceEvent] = []
        with self._runtime.use(self._load_stream):
            begin = self._runtime.record()
            index = self._index(device_pages)
            for layer in range(self.device.geometry.layers):
                load_piece = partial(self._load_piece, layer, pages, index)
                self._in_pieces(len(pages), self.device.geometry.layer_bytes, load_piece)
                events.append(self._runtime.record())
        return self._remember("load", EventTransfer(self._runtime, begin, events))

    def _in_pieces(self, pages: int, page_bytes: int, copy: Callable[[slice], None]) -> None:
        """Copy pages in pieces that staging has room for; in smaller ones, and from there on, where the device has not.

        A piece that was begun in vain is copied again as a whole.
        """
        start, rows = 0, max(1, min(pages, self._staging_bytes_max // page_bytes))
        while start < pages:
            try:
                copy(slice(start, start + rows))
            except torch.OutOfMemoryError:
                if rows == 1:
                    raise
                rows //= 2
            else:
                start += rows

    def _backup_piece(self, device_pages: PageIds, host_pages: PageIds, piece: slice) -> None:
        """Whole pages, gathered in staging, each then copied to its frame."""
        payload = self.device.geometry.payload_bytes
        index = self._index(device_pages[piece])
        staging = torch.empty((len(index), payload), dtype=torch.uint8, device=self.device.device)
        self._gather(index, staging)
        for row, page in enumerate(host_pages[piece].tolist()):
            self.host.tensor[page, HEADER_BYTES : HEADER_BYTES + payload].copy_(staging[row], non_blocking=True)

    def _load_piece(self, layer: int, host_pages: list[int], index: torch.Tensor, piece: slice) -> None:
        """One layer of some pages: each is one contiguous piece of its frame, gathered in staging, then scattered."""
        layer_bytes = self.device.geometry.layer_bytes
        start = self.host.piece_slice(layer).start
        pages = host_pages[piece]
        staging = torch.empty((len(pages), layer_bytes), dtype=torch.uint8, device=self.device.device)
        for row, page in enumerate(pages):
            staging[row].copy_(self.host.tensor[page, start : start + layer_bytes], non_blocking=True)
        self._scatter(layer, index[piece], staging)

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all([last.wait(max(0.0, deadline - time.monotonic())) for last in self._last.values()])

    def _remember(self, direction: str, transfer: Transfer) -> Transfer:
        # Copies of one direction end in order, so the last one stands for all.
        self._last[direction] = transfer
        return transfer

    def _index(self, pages: PageIds) -> torch.Tensor:
        return self._runtime.upload(torch.from_numpy(pages).long())

    def _gather(self, index: torch.Tensor, staging: torch.Tensor) -> None:
        block_bytes = self.device.geometry.block_bytes
        column = 0
        for blocks in self._blocks:
            for block in blocks:
                staging[:, column : column + block_bytes].copy_(block.index_select(0, index))
                column += block_bytes

    def _scatter(self, layer: int, index: torch.Tensor, staging: torch.Tensor) -> None:
        block_bytes = self.device.geometry.block_bytes
        for number, block in enumerate(self._blocks[layer]):
            block.index_copy_(0, index, staging[:, number * block_bytes : (number + 1) * block_bytes])

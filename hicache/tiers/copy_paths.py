"""The two copy paths between frames and blocks: direct, or through a staging buffer on the device.

`DirectPath` queues one copy per (block, region), layer by layer. It needs no memory and no multiprocessor, and runs at
link speed if the pieces are long. `StagedPath` is for short pieces. One copy carries several layers of a block, which
are contiguous in a frame, to a row of the staging buffer; a kernel scatters the rows within the device. A backup first
gathers the rows. Staging is a ring of slots: while a kernel works on one slot, the link fills the next.

    load     link:   copy to slot      | kernels:  scatter to blocks
    backup   kernels: gather to slot   | link:     copy to frames

Locking design: the copy thread of its direction owns a path. Its memory is allocated at start.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from ..errors import TransferError
from ..types import Addresses, Indices
from .blocks import EngineBlocks
from .copy import Fence
from .host import HostWindow
from .memory import STAGING_SLOT_BYTES, STAGING_SLOTS
from .runtime import WORDS, DeviceRuntime, Event, Memory, Rows, Stream, word_bytes

# Bytes of layers that a load carries in one piece: more is faster, less lets the forward begin sooner.
LOAD_PIECE_BYTES = 128 << 10
# Larger than for loads, because nothing waits for a single layer of a backup.
BACKUP_PIECE_BYTES = 1 << 20

# Copies in one call of the direct path. The driver holds a lock during a call, and while its queue is full it waits in
# the call. Kernel launches of other threads wait for this lock: on an H100 up to 36 ms with 1,000 copies, 0.6 ms with
# 64, which costs 3 % of the speed of copies of 32 KiB. The copies of a staging slot are few.
DIRECT_CALL_MAX = 64

# Multiprocessors for a kernel of the staged path: 16 are not faster for short pieces, and leave less for compute.
_PROGRAMS = 8
# Rows of staging begin at multiples of this, so that the kernels can move the longest words.
_ROW_ALIGN = WORDS[0]
_WAIT_S_MAX = 120.0
_POLL_S = 20e-6

# Called with an event, the number of layers that it completes, and whether it is timed.
Arrived = Callable[[Event, int, bool], None]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers `first` to `end - 1` as one piece of a frame, and their rows in the table."""

    first: int
    end: int
    regions: slice
    column: int
    size: int

    @property
    def row_bytes(self) -> int:
        """Distance in bytes between such pieces in staging."""
        return -(-self.size // _ROW_ALIGN) * _ROW_ALIGN


class Pieces:
    """The location of each region of each layer: on the device, and in the payload of a frame."""

    def __init__(self, blocks: EngineBlocks, window: HostWindow) -> None:
        regions = [region for layer in blocks.layers for region in layer]
        sizes = [region.shape[1] for region in regions]
        columns = np.cumsum([0, *sizes])[:-1]
        # int64 [regions, 4]: address of block 0, stride between blocks, column in the payload, size; all in bytes.
        self.table = np.array(
            [[region.data_ptr(), region.stride(0), column, size]
             for region, column, size in zip(regions, columns, sizes, strict=True)], np.int64,
        )
        self._ends = np.cumsum([0] + [len(layer) for layer in blocks.layers])
        self.layers = len(blocks.layers)
        self.shortest = min(sizes)
        self._window = window
        self._payload = window.host.buffer.ctypes.data + window.offset

    def regions(self, first: int, end: int) -> slice:
        """Return the table rows of layers `first` to `end - 1`."""
        return slice(int(self._ends[first]), int(self._ends[end]))

    def groups(self, piece_bytes: int, slot_bytes: int) -> list[Group]:
        """Return runs of layers, each of at least `piece_bytes` if the slot and the number of layers allow."""
        found, first = [], 0
        while first < self.layers:
            end = first + 1
            while end < self.layers and self._size(first, end) < piece_bytes:
                if self._size(first, end + 1) > slot_bytes - slot_bytes % _ROW_ALIGN:
                    break
                end += 1
            regions = self.regions(first, end)
            found.append(Group(first, end, regions, int(self.table[regions.start, 2]), self._size(first, end)))
            first = end
        return found

    def frames_at(self, host_blocks: Indices) -> Addresses:
        """Return the address of the payload of each host block, int64 `[blocks]`."""
        pages, parts = np.divmod(host_blocks, self._window.blocks_per_page)
        at: Addresses = self._payload + pages * self._window.host.frame_bytes + parts * self._window.block_bytes
        return at

    def batches(self, host_blocks: Indices) -> list[Indices]:
        """Return positions of host blocks, grouped by their registration with the driver: one call copies one group."""
        chunks = host_blocks // (self._window.blocks_per_page * self._window.host.frames_per_chunk)
        if (chunks == chunks[0]).all():
            return [np.arange(len(chunks))]
        return [np.flatnonzero(chunks == chunk) for chunk in np.unique(chunks)]

    def _size(self, first: int, end: int) -> int:
        return int(self.table[self.regions(first, end), 3].sum())


class CopyPath(ABC):
    """The copy path of one direction; `load` selects it. Every method raises TransferError if a device call fails."""

    def __init__(self, runtime: DeviceRuntime, pieces: Pieces, *, load: bool) -> None:
        self._runtime = runtime
        self._pieces = pieces
        self._load = load

    @abstractmethod
    def submit(self, host_blocks: Indices, blocks: Indices, after: Fence | None, arrived: Arrived) -> None:
        """Queue the copy of all layers after `after`. The first event passed to `arrived` marks the start; it and the
        last event are timed. May block until earlier copies have left a buffer."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all queued work has ended."""

    def _sides(self, device: Addresses, host: Addresses) -> tuple[Addresses, Addresses]:
        """Return the targets and the sources of copies in this direction."""
        return (device, host) if self._load else (host, device)


class DirectPath(CopyPath):
    """See the module's docstring."""

    def __init__(self, runtime: DeviceRuntime, pieces: Pieces, *, load: bool) -> None:
        super().__init__(runtime, pieces, load=load)
        self._stream = runtime.stream()

    def submit(self, host_blocks: Indices, blocks: Indices, after: Fence | None, arrived: Arrived) -> None:
        runtime, pieces, stream = self._runtime, self._pieces, self._stream
        frames, batches = pieces.frames_at(host_blocks), pieces.batches(host_blocks)
        if after is not None:
            runtime.wait_fence(stream, after)
        arrived(runtime.record(stream, timed=True), 0, True)
        for layer in range(pieces.layers):
            base, stride, column, size = pieces.table[pieces.regions(layer, layer + 1)].T[:, :, np.newaxis]
            for batch in batches:
                device, host = base + blocks[batch] * stride, frames[batch] + column
                sizes = np.broadcast_to(size, device.shape)
                _copy_directly(runtime, stream, *self._sides(device.ravel(), host.ravel()), sizes.ravel())
            is_last = layer == pieces.layers - 1
            if self._load or is_last:
                arrived(runtime.record(stream, timed=is_last), 1 if self._load else pieces.layers, is_last)

    def synchronize(self) -> None:
        self._runtime.synchronize(self._stream)


class _Slot:
    """One slot of the ring: staging memory for rows, and their block ids in device and pinned memory. `filled` and
    `emptied` are the events of its last use; None before the first use and after an error, when the device is idle."""

    def __init__(self, runtime: DeviceRuntime, slot_bytes: int, rows_max: int) -> None:
        self.staging = runtime.device_memory(slot_bytes)
        self.device_ids = runtime.device_memory(8 * rows_max)
        self.pinned_ids = runtime.pinned_memory(8 * rows_max)
        self.ids = _int64_at(self.pinned_ids, rows_max)
        self.filled: Event | None = None
        self.emptied: Event | None = None


class StagedPath(CopyPath):
    """See the module's docstring. REQUIRES: each layer of a block fits into a slot."""

    def __init__(
        self, runtime: DeviceRuntime, pieces: Pieces, *, load: bool, slot_bytes: int = STAGING_SLOT_BYTES
    ) -> None:
        super().__init__(runtime, pieces, load=load)
        self._slot_bytes = slot_bytes
        self._groups = pieces.groups(LOAD_PIECE_BYTES if load else BACKUP_PIECE_BYTES, slot_bytes)
        self._first, self._second = runtime.stream(), runtime.stream()
        rows_max = slot_bytes // min(group.row_bytes for group in self._groups)
        self._slots = [_Slot(runtime, slot_bytes, rows_max) for _ in range(STAGING_SLOTS)]
        self._used = 0
        table = pieces.table
        self._word = word_bytes(
            [*table.ravel().tolist(), *(group.column for group in self._groups),
             *(slot.staging.address for slot in self._slots)]
        )
        self._longest = int(table[:, 3].max())  # the same for all groups, so that one kernel serves all
        self._table = self._upload(table)
        self._queue_kernel(self._first, self._rows(self._groups[0], self._slots[0], 0))  # compiles it
        runtime.synchronize(self._first)

    def submit(self, host_blocks: Indices, blocks: Indices, after: Fence | None, arrived: Arrived) -> None:
        runtime = self._runtime
        if after is not None:
            runtime.wait_fence(self._first, after)
        arrived(runtime.record(self._first, timed=True), 0, True)
        frames = self._pieces.frames_at(host_blocks)
        for group in self._groups:
            rows_max = self._slot_bytes // group.row_bytes
            for start in range(0, len(blocks), rows_max):
                part = slice(start, start + rows_max)
                self._move(group, host_blocks[part], frames[part] + group.column, blocks[part])
            is_last = group.end == self._pieces.layers
            if self._load or is_last:
                layers = group.end - group.first if self._load else self._pieces.layers
                arrived(runtime.record(self._second, timed=is_last), layers, is_last)

    def synchronize(self) -> None:
        for stream in (self._first, self._second):
            self._runtime.synchronize(stream)

    def _move(self, group: Group, host_blocks: Indices, host: Addresses, blocks: Indices) -> None:
        """Queue rows that fill at most one slot: into the slot on the first stream, out of it on the second."""
        runtime, slot = self._runtime, self._slots[self._used % STAGING_SLOTS]
        self._used += 1
        filled, emptied, slot.filled, slot.emptied = slot.filled, slot.emptied, None, None
        if filled is not None:
            # This thread now writes the pinned ids, which the first stream may still be reading.
            _wait(runtime, filled)
            runtime.release(filled)
        if emptied is not None:
            runtime.wait(self._first, emptied)
            runtime.release(emptied)
        count = len(blocks)
        slot.ids[:count] = blocks
        one = np.array([slot.device_ids.address]), np.array([slot.pinned_ids.address]), np.array([8 * count])
        runtime.copy(self._first, *one)
        by_link = partial(self._link, slot=slot, group=group, host_blocks=host_blocks, host=host)
        by_kernel = partial(self._queue_kernel, rows=self._rows(group, slot, count))
        into_slot, out_of_it = (by_link, by_kernel) if self._load else (by_kernel, by_link)
        into_slot(self._first)
        slot.filled = runtime.record(self._first)
        runtime.wait(self._second, slot.filled)
        out_of_it(self._second)
        slot.emptied = runtime.record(self._second)

    def _rows(self, group: Group, slot: _Slot, count: int) -> Rows:
        return Rows(
            slot.staging.address, group.row_bytes, self._table.address, group.regions.start,
            group.regions.stop - group.regions.start, group.column, slot.device_ids.address, count, self._word,
            self._longest,
        )

    def _queue_kernel(self, stream: Stream, rows: Rows) -> None:
        self._runtime.move(stream, rows, _PROGRAMS, to_blocks=self._load)

    def _link(self, stream: Stream, slot: _Slot, group: Group, host_blocks: Indices, host: Addresses) -> None:
        """Queue the copies between the rows of a slot and the frames."""
        staging = slot.staging.address + np.arange(len(host)) * group.row_bytes
        sizes = np.full(len(host), group.size)
        for batch in self._pieces.batches(host_blocks):
            self._runtime.copy(stream, *self._sides(staging[batch], host[batch]), sizes[batch])

    def _upload(self, table: npt.NDArray[np.int64]) -> Memory:
        """Copy the table to the device; return its memory there."""
        runtime, size = self._runtime, table.nbytes
        pinned, memory = runtime.pinned_memory(size), runtime.device_memory(size)
        _int64_at(pinned, table.size)[:] = table.ravel()
        runtime.copy(self._first, np.array([memory.address]), np.array([pinned.address]), np.array([size]))
        runtime.synchronize(self._first)
        return memory


# The piece sizes to measure, and the bytes to copy for each.
_TRIED = tuple(1 << shift for shift in range(12, 21))
_TRIAL_BYTES = 8 << 20
_TRIALS = 3
# A piece size is good if it reaches this share of the speed of the longest pieces.
_GOOD_SHARE = 0.85


def direct_from_bytes(runtime: DeviceRuntime) -> int:
    """Measure the smallest piece size in bytes at which the direct path runs at about link speed. Copies scratch memory
    in both directions; call it at start, because it blocks for some milliseconds."""
    stream = runtime.stream()
    device, host = runtime.device_memory(_TRIAL_BYTES), runtime.pinned_memory(_TRIAL_BYTES)
    good: list[int] = []
    for here, there in ((device, host), (host, device)):
        times = [
            min(_seconds(runtime, stream, here.address, there.address, size) for _ in range(_TRIALS))
            for size in _TRIED
        ]
        good.append(next(size for size, time_s in zip(_TRIED, times, strict=True) if times[-1] >= _GOOD_SHARE * time_s))
    return max(good)


def _seconds(runtime: DeviceRuntime, stream: Stream, target: int, source: int, size: int) -> float:
    """Return the seconds to copy `_TRIAL_BYTES` in pieces of `size` bytes, while earlier copies are in flight."""
    offsets = np.arange(0, _TRIAL_BYTES, size)
    copies = target + offsets, source + offsets, np.full(len(offsets), size)
    _copy_directly(runtime, stream, *copies)  # these run while the measured ones are submitted, as in a longer copy
    begin = runtime.record(stream, timed=True)
    _copy_directly(runtime, stream, *copies)
    end = runtime.record(stream, timed=True)
    _wait(runtime, end)
    seconds = runtime.elapsed_s(begin, end)
    for event in (begin, end):
        runtime.release(event, timed=True)
    return seconds


def _copy_directly(
    runtime: DeviceRuntime, stream: Stream, targets: Addresses, sources: Addresses, sizes: Addresses
) -> None:
    """Queue copies, at most `DIRECT_CALL_MAX` in one call."""
    for start in range(0, len(sizes), DIRECT_CALL_MAX):
        part = slice(start, start + DIRECT_CALL_MAX)
        runtime.copy(stream, targets[part], sources[part], sizes[part])


def _wait(runtime: DeviceRuntime, event: Event) -> None:
    if not poll(lambda: runtime.passed(event), time.monotonic() + _WAIT_S_MAX):
        raise TransferError(f"copy: the device has not ended a copy within {_WAIT_S_MAX:.0f} s")


def poll(condition: Callable[[], bool], deadline: float) -> bool:
    """Wait for the device. Return False if the monotonic `deadline` passes first."""
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _int64_at(memory: Memory, count: int) -> npt.NDArray[np.int64]:
    """View pinned memory as int64 `[count]`."""
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(memory.address))

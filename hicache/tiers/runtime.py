"""DeviceRuntime: the interface between the copy engine and a device with streams. CUDA and a test simulator have one.

A stream runs its work in order. An event marks a point in a stream: it is recorded there once, and passes when the work
before it has ended. On CUDA, a wait for an event that is not recorded yet is a no-op, so callers of this interface must
not do it. Streams and events are opaque handles; events are reused after `release`.

Locking design: every method may be called from any thread. Methods that allocate memory or queue copies and kernels are
called after `attach` or inside `current`. One thread at a time queues the work of a stream.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ..types import Addresses
from .copy import Fence

# Bytes that a kernel moves at once, largest first. 16 is the widest load of a GPU.
WORDS = (16, 8, 4, 2, 1)

Stream: TypeAlias = Any
Event: TypeAlias = Any


class Memory(NamedTuple):
    """Memory of the device or pinned memory of the host. It stays allocated while `owner` is referenced."""

    address: int
    owner: object


@dataclass(frozen=True, slots=True)
class Rows:
    """A copy within the device between row i of `staging` and block `blocks[i]` of each region.

    `staging`, `regions` and `blocks` are device addresses. `staging` is uint8 `[rows, row_bytes]`, `blocks` int64
    `[rows]`. `regions` is int64 `[n, 4]`, all in bytes: address of block 0, stride between blocks, column of the region
    in a payload, and size of a block. Regions `first` to `first + count - 1` are copied; `column` is the column of the
    payload at which a row of staging begins. `longest` is at least the size of their largest block. `word` divides
    every address, stride, column and size.
    """

    staging: int
    row_bytes: int
    regions: int
    first: int
    count: int
    column: int
    blocks: int
    rows: int
    word: int
    longest: int


def word_bytes(values: Iterable[int]) -> int:
    """Return the largest word size, in bytes, that divides all addresses, strides, columns and sizes of a copy."""
    common = math.gcd(*values)
    return next(word for word in WORDS if common % word == 0)


class DeviceRuntime(ABC):
    """See the module's docstring. Methods that call the device raise TransferError if the call fails."""

    @abstractmethod
    def attach(self) -> None:
        """Make the device the calling thread's current device permanently."""

    @abstractmethod
    def current(self) -> AbstractContextManager[None]:
        """Make the device the calling thread's current device inside the block; restore the previous one after it."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream that no other part of the process uses."""

    @abstractmethod
    def stream_of(self, stream: object) -> Stream:
        """Return the handle of an engine's stream. Raises InvalidInput if the object is not a stream."""

    @abstractmethod
    def require_fence(self, fence: Fence) -> None:
        """Raise InvalidInput unless streams of this device can wait for `fence`."""

    @abstractmethod
    def wait_fence(self, stream: Stream, fence: Fence) -> None:
        """Queue a wait for the point at which the engine recorded `fence` last."""

    @abstractmethod
    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """Record and return an event after the work queued on `stream`. `elapsed_s` takes timed events."""

    @abstractmethod
    def release(self, event: Event, *, timed: bool = False) -> None:
        """Return an event for reuse. Waits that are queued already are not affected. REQUIRES: `timed` as recorded."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Queue a wait for `event` on `stream`. REQUIRES: the event is recorded."""

    @abstractmethod
    def passed(self, event: Event) -> bool:
        """Return True once the work before `event` has ended. Never blocks."""

    @abstractmethod
    def elapsed_s(self, begin: Event, end: Event) -> float:
        """Return the device time between two timed events, in seconds. REQUIRES: both have passed."""

    @abstractmethod
    def synchronize(self, stream: Stream) -> None:
        """Block until all work queued on `stream` has ended."""

    @abstractmethod
    def copy(self, stream: Stream, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Queue copies between pinned host memory and the device; they may run in any order. The arrays can be reused
        when the call returns. REQUIRES: on each side, all copies of a call are within one registration."""

    @abstractmethod
    def move(self, stream: Stream, rows: Rows, programs: int, *, to_blocks: bool) -> None:
        """Queue a copy of staging to blocks, or of blocks to staging; at most `programs` multiprocessors work on it."""

    @abstractmethod
    def device_memory(self, size_bytes: int) -> Memory:
        """Allocate device memory. Call it at start, because it may block. Raises CapacityError."""

    @abstractmethod
    def pinned_memory(self, size_bytes: int) -> Memory:
        """Allocate pinned host memory. Call it at start, because it may block. Raises CapacityError."""

    @abstractmethod
    def close(self) -> None:
        """Release streams and events. REQUIRES: nothing is queued."""

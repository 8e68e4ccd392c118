"""Memory of pages: a frame or a page in parts, and separate buffers for encoded pages.

Every function that moves a page accepts a `PageBuffer`: a frame, or a `PageView` of a payload in foreign memory. Both
provide a list of buffers in the order of the stored page, so stores with scatter and gather move them without a copy.

Locking design: the idle buffers of a pool are a deque, whose `append` and `pop` are atomic in CPython. A buffer is in
the deque or with one borrower, never both.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .header import FRAME_ALIGN, HEADER_BYTES

# Idle buffers to keep: about as many as threads write at the same time. The callers' batches bound the buffers in use.
IDLE_MAX = 4


@dataclass(frozen=True, slots=True)
class PageView:
    """One page in foreign memory: `header`, 256 bytes that the caller keeps, and `parts`, its payload in the order of
    the frame. All are contiguous writable bytes; the parts together have `codec.payload_bytes`. `is_copy`: a store
    has the page, and this copy keeps its time of storing, even if that has expired.

    As with a frame, a writer of the payload must unseal the page first: `unseal(header)`.
    REQUIRES: buffers do not overlap, neither within a page nor between the pages of a call.
    """

    header: memoryview
    parts: Sequence[memoryview]
    is_copy: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of header and payload."""
        return self.header.nbytes + sum(part.nbytes for part in self.parts)

    def gather(self, frame: memoryview) -> None:
        """Copy header and payload to the start of `frame`. REQUIRES: `frame` has at least `nbytes` bytes."""
        join((self.header, *self.parts), frame)

    def scatter(self, frame: memoryview) -> None:
        """Fill header and payload from the start of `frame`. REQUIRES: `frame` has at least `nbytes` bytes."""
        fill((self.header, *self.parts), frame[: self.nbytes])


PageBuffer: TypeAlias = memoryview | PageView


def header_of(page: PageBuffer) -> memoryview:
    """Return the 256 bytes of a page's header."""
    return page.header if isinstance(page, PageView) else page[:HEADER_BYTES]


def first_bytes(buffers: Sequence[memoryview], size: int) -> list[memoryview]:
    """Return the buffers of the first `size` bytes of `buffers`, or all of them if they have fewer bytes."""
    found: list[memoryview] = []
    for buffer in buffers:
        if size <= 0:
            break
        found.append(buffer if buffer.nbytes <= size else buffer[:size])
        size -= buffer.nbytes
    return found


def fill(buffers: Sequence[memoryview], data: bytes | bytearray | memoryview) -> list[memoryview]:
    """Copy `data` to the start of `buffers` and return the buffers of the remaining bytes. REQUIRES: `data` fits."""
    start = 0
    for buffer in first_bytes(buffers, len(data)):
        buffer[:] = data[start : start + buffer.nbytes]
        start += buffer.nbytes
    return without_first(buffers, start)


def join(buffers: Sequence[memoryview], target: memoryview) -> None:
    """Copy `buffers`, one after another, to the start of `target`. REQUIRES: they fit."""
    end = 0
    for buffer in buffers:
        target[end : end + buffer.nbytes] = buffer
        end += buffer.nbytes


def without_first(buffers: Sequence[memoryview], size: int) -> list[memoryview]:
    """Return the buffers of all bytes after the first `size`: the remaining bytes after a short transfer."""
    for number, buffer in enumerate(buffers):
        if size < buffer.nbytes:
            return [buffer[size:], *buffers[number + 1 :]] if size else list(buffers[number:])
        size -= buffer.nbytes
    return []


class BufferPool:
    """Buffers of one size, aligned for direct I/O, for compressed and encrypted pages. Thread-safe; never blocks.

    A borrowed buffer is a memoryview. It returns to the pool when its last view is deleted, so a backend can keep it
    until its write has ended. New memory for each page would cost a page fault per 4 KiB, as slow as encryption.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._idle: deque[npt.NDArray[np.uint8]] = deque(maxlen=IDLE_MAX)

    def take(self) -> memoryview:
        """Return a buffer with arbitrary content. It belongs to the borrower until all views of it are deleted."""
        try:
            buffer = self._idle.pop()
        except IndexError:
            memory = np.empty(self._buffer_bytes + FRAME_ALIGN, dtype=np.uint8)
            start = -memory.ctypes.data % FRAME_ALIGN
            buffer = memory[start : start + self._buffer_bytes]
        # A separate array over the same memory. The view keeps it alive, and its finalizer returns the memory.
        lent = buffer[:]
        weakref.finalize(lent, self._idle.append, buffer).atexit = False
        return memoryview(lent.data)

"""Memory of pages: a frame or a page in parts, and buffers for encoded pages that are not the frame itself.

Everything that moves a page takes a `PageBuffer`: a frame, or a `PageView` of a payload in the memory of others. Both
are a list of buffers in the order of the stored page, which stores that scatter and gather move without a copy.

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

# Idle buffers that are kept: as many as threads usually write at once. What is lent is bounded by the callers' batches.
IDLE_MAX = 4


@dataclass(frozen=True, slots=True)
class PageView:
    """One page in foreign memory: `header`, 256 bytes that the caller keeps beside it, and `parts`, its payload in the
    order of the frame. All are contiguous writable bytes; the parts together have `codec.payload_bytes`.

    As with a frame, whoever writes the payload unseals the page first: `unseal(header)`.
    REQUIRES: nothing overlaps, within a page and between the pages of a call.
    """

    header: memoryview
    parts: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes of header and payload."""
        return self.header.nbytes + sum(part.nbytes for part in self.parts)

    def gather(self, frame: memoryview) -> None:
        """Copy header and payload to the head of `frame`. REQUIRES: it has `nbytes` bytes or more."""
        start = 0
        for part in (self.header, *self.parts):
            frame[start : start + part.nbytes] = part
            start += part.nbytes

    def scatter(self, frame: memoryview) -> None:
        """Fill header and payload from the head of `frame`. REQUIRES: as `gather`."""
        start = 0
        for part in (self.header, *self.parts):
            part[:] = frame[start : start + part.nbytes]
            start += part.nbytes


PageBuffer: TypeAlias = memoryview | PageView


def header_of(page: PageBuffer) -> memoryview:
    """Return the 256 bytes of a page's header."""
    return page.header if isinstance(page, PageView) else page[:HEADER_BYTES]


def first_bytes(buffers: Sequence[memoryview], size: int) -> list[memoryview]:
    """Return the buffers of the first `size` bytes of `buffers`: all of them if they have no more."""
    found: list[memoryview] = []
    for buffer in buffers:
        if size <= 0:
            break
        found.append(buffer if buffer.nbytes <= size else buffer[:size])
        size -= buffer.nbytes
    return found


def fill(buffers: Sequence[memoryview], data: bytes | bytearray | memoryview) -> list[memoryview]:
    """Copy `data` to the start of `buffers` and return the buffers of the bytes behind it. REQUIRES: it fits."""
    start = 0
    for buffer in first_bytes(buffers, len(data)):
        buffer[:] = data[start : start + buffer.nbytes]
        start += buffer.nbytes
    return without_first(buffers, start)


def without_first(buffers: Sequence[memoryview], size: int) -> list[memoryview]:
    """Return the buffers of all but the first `size` bytes: what remains after a short transfer."""
    for number, buffer in enumerate(buffers):
        if size < buffer.nbytes:
            return [buffer[size:], *buffers[number + 1 :]] if size else list(buffers[number:])
        size -= buffer.nbytes
    return []


class BufferPool:
    """Buffers of one size, aligned for direct I/O, for compressed and encrypted pages. Thread-safe; never blocks.

    A buffer is lent as a memoryview and comes back by itself when the last view of it is gone, so a backend holds what
    it writes as long as it needs to, and nothing is written over meanwhile. Fresh memory for each page would cost a
    page fault per 4 KiB, about as much as encrypting them.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._idle: deque[npt.NDArray[np.uint8]] = deque(maxlen=IDLE_MAX)

    def take(self) -> memoryview:
        """A buffer of any content, the borrower's until nobody refers to the view or a part of it."""
        try:
            buffer = self._idle.pop()
        except IndexError:
            buffer = _aligned(self._buffer_bytes)
        # An array of its own over the same memory: what the view keeps alive, and whose end gives the memory back.
        lent = buffer[:]
        weakref.finalize(lent, self._idle.append, buffer).atexit = False
        return memoryview(lent.data)


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    memory = np.empty(size + FRAME_ALIGN, dtype=np.uint8)
    start = -memory.ctypes.data % FRAME_ALIGN
    return memory[start : start + size]

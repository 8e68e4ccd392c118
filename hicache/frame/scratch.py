"""Memory for stored forms that are not the frame itself: compressed or encrypted pages.

A buffer is lent as a memoryview and comes back by itself when the last view of it is gone, so a backend holds what it
writes for as long as it likes, and nothing is written over under its hands. Fresh memory for each page would cost a
page fault per 4 KiB, about as much as encrypting them.

Locking design: the idle buffers are a deque, whose `append` and `pop` are atomic in CPython. A buffer is in the deque
or with one borrower, never both.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .header import FRAME_ALIGN

_Buffer: TypeAlias = npt.NDArray[np.uint8]

# Idle buffers that are kept: as many as threads usually write at once. What is lent is bounded by the callers' batches.
IDLE_MAX = 4


class Scratch:
    """Buffers of one size, aligned for direct I/O. Thread-safe; never blocks."""

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._idle: deque[_Buffer] = deque(maxlen=IDLE_MAX)

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


def _aligned(size: int) -> _Buffer:
    memory = np.empty(size + FRAME_ALIGN, dtype=np.uint8)
    start = -memory.ctypes.data % FRAME_ALIGN
    return memory[start : start + size]

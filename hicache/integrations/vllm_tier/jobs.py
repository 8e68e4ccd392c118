"""One promotion or cascade: chunks that a thread moves between storage and the engine's host memory.

By default a chunk is copied through a frame of HiCache, so that a call which hangs holds none of the engine's memory:
the scheduler abandons the job, and the engine may use its rows for other chunks. With `in_place` storage reads into the
rows and writes from them, without a copy if it can scatter and gather. Then a job cannot be abandoned: the row of a
page that a call still fills, or may still seal, must not get another chunk.

Locking design: a job belongs to its thread, except for `lock`, `is_left` and `is_cancelled`. The thread accesses rows
of the engine only under `lock` and while `is_left` is False (in place, throughout its calls); the scheduler sets
`is_left` under `lock`, which it takes without waiting. `hung_at_s` and `is_cancelled` are one reference each. The
scheduler reads the other fields after the end of the job, and `done` also when it abandons it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...backends.base import Direction
from ...controller.gate import OpenStore
from ...frame import HEADER_BYTES, PageBuffer, PageView, frame_bytes, unseal
from ...frame.buffers import BufferPool

# The bytes of the frames of one call, unless one frame is larger: enough to keep the threads of a store busy. The
# memory is this for each thread.
STAGING_BYTES = 16 << 20


@dataclass(slots=True, eq=False)
class TierJob:
    """Chunks `names` of the engine, with their page `keys` and their `rows` in the engine's memory.

    `done` has the positions that were read, or stored, in order. `failed`: storage failed or gave an invalid result. A
    job counts as hung from `hung_at_s` on, on the clock of deadlines.
    """

    number: int
    direction: Direction
    names: Sequence[bytes]
    keys: Sequence[bytes]
    rows: Sequence[int]
    store: OpenStore
    deadline_s: float
    hung_at_s: float = math.inf
    done: list[int] = field(default_factory=list)
    failed: bool = False
    seconds: float = 0.0
    is_cancelled: bool = False
    is_left: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def belongs(self) -> bool:
        """True if the thread may access the rows while it holds `lock`."""
        return not self.is_left


class ChunkRows:
    """The engine's contiguous host memory, as rows of `chunk_bytes`. `staged_frames` is the limit of staging frames of
    one call, at most `batch_pages`."""

    def __init__(self, memory: memoryview, chunk_bytes: int, batch_pages: int) -> None:
        self.count = memory.nbytes // chunk_bytes
        self._memory: memoryview | None = memory
        self._chunk_bytes = chunk_bytes
        self._frame_bytes = frame_bytes(chunk_bytes)
        self.staged_frames = max(1, min(batch_pages, STAGING_BYTES // self._frame_bytes))
        self._staging = BufferPool(self.staged_frames * self._frame_bytes)

    def frames(self, count: int) -> list[memoryview]:
        """Return unsealed frames of staging; they are freed with their last reference."""
        buffer, size = self._staging.take(), self._frame_bytes
        frames = [buffer[start : start + size] for start in range(0, count * size, size)]
        for frame in frames:
            unseal(frame)
        return frames

    def views(self, rows: Sequence[int]) -> list[PageBuffer]:
        """Return the rows as pages in parts, unsealed."""
        headers = memoryview(bytearray(HEADER_BYTES * len(rows)))
        return [
            PageView(headers[start : start + HEADER_BYTES], [self._row(row)])
            for start, row in zip(range(0, headers.nbytes, HEADER_BYTES), rows, strict=True)
        ]

    def fill_frame(self, row: int, frame: memoryview) -> None:
        """Copy a row to the payload of a frame, and fill the rest with zeros."""
        end = HEADER_BYTES + self._chunk_bytes
        np.copyto(np.frombuffer(frame[HEADER_BYTES:end], np.uint8), np.frombuffer(self._row(row), np.uint8))
        frame[end:] = bytes(frame.nbytes - end)

    def fill_row(self, row: int, frame: memoryview) -> None:
        """Copy the payload of a frame to a row."""
        payload = frame[HEADER_BYTES : HEADER_BYTES + self._chunk_bytes]
        np.copyto(np.frombuffer(self._row(row), np.uint8), np.frombuffer(payload, np.uint8))

    def release(self) -> None:
        """Release the engine's memory. REQUIRES: no job is in flight."""
        self._memory = None

    def _row(self, row: int) -> memoryview:
        assert self._memory is not None
        return self._memory[row * self._chunk_bytes : (row + 1) * self._chunk_bytes]


def batches(count: int, at_once: int) -> Iterator[range]:
    """Return the positions of `count` pages in calls of up to `at_once`."""
    for start in range(0, count, at_once):
        yield range(start, min(start + at_once, count))

"""Copies of pages on their way to one level, in the background and within a bound of bytes.

A verb must not use its frames after it has returned, so the pages to be copied are staged: copied into frames of the
copier's own, as many as its bound allows. Pages that find none free are dropped and counted: copies are made to be read
sooner, and nothing is lost with them.

Locking design: one condition guards all fields and is held for a few instructions, never while bytes are copied or a
backend is called. Any thread submits; one thread of a SupervisedPool writes. The condition is taken before the lock of
the pool, never after: the pool calls back without its lock.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...errors import InvariantError
from ...frame import PageBuffer
from ...supervised import LINGER_S, Beat, SupervisedPool
from ..base import SetOutcome, StorageBackend
from ..calls import parent_outside

# As much as one call writes: enough for a request that costs a round trip, little enough for a close that waits for it.
_CALL_BYTES_MAX = 16 << 20
# What one call may take. A store that is slower than this for 16 MiB would not pay when it is read, either.
_CALL_S = 3.0
# How late a call may return that holds its deadline.
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """Pages that were copied to one part, were there already, were refused by it or failed, and were dropped here
    because the bound was reached, the page deleted or the copier closed; and those that wait, in pages."""

    copied: int
    present: int
    failed: int
    dropped: int
    waiting: int


@dataclass(slots=True, eq=False)
class _Run:
    """Staged pages that follow each other in their chain, behind `parent`; one call writes them."""

    parent: bytes | None
    keys: list[bytes] = field(default_factory=list)
    frames: list[memoryview] = field(default_factory=list)
    outcomes: list[SetOutcome] = field(default_factory=list)


class Copier:
    """Writes copies to `part`, of which `bytes_max` bytes may wait, at least one page. Thread-safe; `name` is the
    part's.

    Invariant, tested by `check`: `_keys` are the pages of `_runs`, each staged once, in as many frames.

    REQUIRES: the part is closed after the copier.
    """

    def __init__(self, part: StorageBackend, name: str, bytes_max: int) -> None:
        self._part = part
        self._codec = part.codec
        self._frames_max = bytes_max // part.codec.frame_bytes
        self._call_pages = max(1, _CALL_BYTES_MAX // part.codec.frame_bytes)
        self._state = threading.Condition()
        self._frames = 0  # made so far; they are kept, since touching new memory costs more than copying into old
        self._free: list[memoryview] = []
        self._keys: set[bytes] = set()
        self._runs: set[_Run] = set()  # being staged, queued or written
        self._deletions = 0  # in progress: nothing is taken meanwhile
        self._stop_at = math.inf
        self._counts: Counter[str] = Counter()
        self._pool = SupervisedPool[_Run](
            f"copy-{name}", 1, handle=self._write, acknowledge=self._settle, linger_s=LINGER_S
        )

    def submit(
        self, positions: Sequence[int], keys: Sequence[bytes], pages: Sequence[PageBuffer],
        parents: Sequence[bytes | None],
    ) -> None:  # fmt: skip
        """Stage the pages at `positions` of a batch, head first, and have them written; the tail that does not fit is
        dropped. Blocks for copying memory only. REQUIRES: the pages are whole until this returns."""
        run = _Run(None)
        for number, position in enumerate(positions):
            key, parent = keys[position], parents[position]
            if key in self._keys:
                continue  # on its way already
            if not run.keys or parent != run.keys[-1] or len(run.keys) == self._call_pages:
                self._queue(run)
                run = _Run(parent)
            frame = self._stage(run, key)
            if frame is None:
                # Behind a page that was dropped the others would be out of reach.
                self._count(dropped=len(positions) - number)
                break
            self._codec.gather(pages[position], frame)
        self._queue(run)

    def _stage(self, run: _Run, key: bytes) -> memoryview | None:
        """Add a page to a run. Return its frame, None if it may not be copied now."""
        with self._state:
            if key in self._keys or self._deletions or self._stop_at < math.inf:
                return None
            if self._free:
                frame = self._free.pop()
            elif self._frames < self._frames_max:
                self._frames += 1
                # Aligned to pages of memory, as direct I/O asks for; the mapping lives as long as its view.
                frame = memoryview(mmap.mmap(-1, self._codec.frame_bytes))
            else:
                return None
            self._keys.add(key)
            self._runs.add(run)
            run.keys.append(key)
            run.frames.append(frame)
            return frame

    def _queue(self, run: _Run) -> None:
        with self._state:
            if self._deletions or self._stop_at < math.inf:
                self._drop([run])
            elif run.keys:
                self._pool.submit(run)

    def _drop(self, dropped: Sequence[_Run]) -> None:
        for run in dropped:
            self._count(dropped=len(run.keys))
            self._release(run)

    def _release(self, run: _Run) -> None:
        with self._state:
            self._runs.discard(run)
            self._keys.difference_update(run.keys)
            self._free += run.frames
            self._state.notify_all()

    def _count(self, **pages: int) -> None:
        with self._state:
            self._counts.update(pages)

    @contextlib.contextmanager
    def excluding(self, keys: Sequence[bytes] | None, deadline: float) -> Iterator[None]:
        """While this block deletes `keys` from the parts, None for all: no copy of them waits, is written, or comes in.
        Waits for the copy in flight, up to `deadline`. A verb that has read a page before the block and submits it
        after the block copies it all the same."""
        with self._state:
            self._deletions += 1
            gone = set(self._keys if keys is None else keys)
            self._drop([run for run in self._runs if not gone.isdisjoint(run.keys) and self._pool.withdraw(run)])
            wait_s = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
            self._state.wait_for(lambda: self._keys.isdisjoint(gone), wait_s)
        try:
            yield
        finally:
            with self._state:
                self._deletions -= 1

    def statistics(self) -> CopyStatistics:
        """A snapshot. Does not block."""
        with self._state:
            counts = {name: self._counts[name] for name in ("copied", "present", "failed", "dropped")}
            return CopyStatistics(**counts, waiting=len(self._keys))

    # On the thread

    def _write(self, run: _Run, beat: Beat) -> None:
        deadline = min(time.monotonic() + _CALL_S, self._stop_at)
        parent = parent_outside(run.keys, run.parent)
        run.outcomes = self._part.batch_set(run.keys, run.frames, parent=parent, deadline=deadline)

    def _settle(self, run: _Run) -> None:
        copied, present = run.outcomes.count(SetOutcome.STORED), run.outcomes.count(SetOutcome.PRESENT)
        self._count(copied=copied, present=present, failed=len(run.keys) - copied - present)
        self._release(run)

    # The end

    def stop(self, stop_at: float) -> None:
        """Take nothing more, and write the pages that wait until `stop_at` (monotonic). Does not block; for `close`."""
        with self._state:
            self._stop_at = stop_at

    def close(self) -> None:
        """Wait until the thread has ended, which may take a call of the part after `stop`; drop the pages that remain.

        A part that holds no deadline is waited for no longer than that, and several of them together no longer than
        one. It keeps the frames it was given. REQUIRES: `stop` was called.
        """
        with self._state:
            self._state.wait_for(lambda: not self._runs, max(0.0, self._stop_at - time.monotonic()))
            self._drop([run for run in self._runs if self._pool.withdraw(run)])
        self._pool.close(max(0.0, self._stop_at + _CALL_S + _GRACE_S - time.monotonic()))
        with self._state:
            self._free.clear()

    def check(self) -> None:
        """Raise InvariantError if frames and keys disagree. REQUIRES: no submission is in progress."""
        with self._state:
            lent = self._frames - len(self._free)
            known = [key for run in self._runs for key in run.keys]
            if not lent == len(self._keys) == len(known) or set(known) != self._keys or lent > self._frames_max:
                raise InvariantError(
                    f"copies: {lent} frames lent, {len(self._keys)} keys, {len(known)} in runs, "
                    f"{self._frames} of {self._frames_max} frames made"
                )

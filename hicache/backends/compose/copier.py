"""Copies of pages on their way to one level, in the background and within a bound of bytes.

A verb must not use its frames after it has returned. So a page that a level has just stored is read back from that
level when its copy is written: the verb pays for nothing but its key, and memory is taken for one call at a time. A
page that was read from a level below is staged at once, in a frame of the copier's own: reading it again would cost
what the copy is to save. Pages beyond the bound are dropped and counted: copies are made to be read sooner, and nothing
is lost with them.

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
from ..base import GetOutcome, SetOutcome, StorageBackend
from ..calls import parent_outside

# As much as one call writes: enough for a request that costs a round trip, little enough for a close that waits for it.
_CALL_BYTES_MAX = 16 << 20
# What one call may take. A store that is slower than this for 16 MiB would not pay when it is read, either.
_CALL_S = 3.0
# How late a call may return that holds its deadline.
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """Pages that were copied to one part, were there already, failed (it refused them, or they could not be read back),
    and were dropped here because the bound was reached, the page deleted or the copier closed; and those that wait."""

    copied: int
    present: int
    failed: int
    dropped: int
    waiting: int


@dataclass(slots=True, eq=False)
class _Run:
    """Pages that follow each other in their chain, behind `parent`; one call writes them. They are staged in `frames`,
    or read back from `source` into them."""

    parent: bytes | None
    source: StorageBackend | None
    keys: list[bytes] = field(default_factory=list)
    frames: list[memoryview] = field(default_factory=list)
    outcomes: list[SetOutcome] = field(default_factory=list)


class Copier:
    """Writes copies to `part`, of which `bytes_max` bytes may wait, at least one page. Thread-safe; `name` is the
    part's.

    Invariant, tested by `check`: `_keys` are the pages of `_runs`, each of them once, and as many as the bound allows
    at most; a run has as many frames as pages, or none before it is read back.

    REQUIRES: the part, and those that pages are read back from, are closed after the copier.
    """

    def __init__(self, part: StorageBackend, name: str, bytes_max: int) -> None:
        self._part = part
        self._codec = part.codec
        self._pages_max = bytes_max // part.codec.frame_bytes
        self._call_pages = max(1, _CALL_BYTES_MAX // part.codec.frame_bytes)
        self._state = threading.Condition()
        self._frames = 0  # made so far; they are kept, since touching new memory costs more than copying into old
        self._free: list[memoryview] = []
        self._keys: set[bytes] = set()
        self._runs: set[_Run] = set()  # being submitted, queued or written
        self._deletions = 0  # in progress: nothing is taken meanwhile
        self._stop_at = math.inf
        self._counts: Counter[str] = Counter()
        self._pool = SupervisedPool[_Run](
            f"copy-{name}", 1, handle=self._write, acknowledge=self._settle, linger_s=LINGER_S
        )

    def submit(
        self, positions: Sequence[int], keys: Sequence[bytes], pages: Sequence[PageBuffer],
        parents: Sequence[bytes | None], source: StorageBackend | None = None,
    ) -> None:  # fmt: skip
        """Have the pages at `positions` of a batch written, head first; the tail that does not fit is dropped. They are
        read back from `source`, which has stored them, or without one staged now. Blocks for copying memory only.
        REQUIRES: pages to be staged are whole until this returns."""
        run = _Run(None, source)
        for number, position in enumerate(positions):
            key, parent = keys[position], parents[position]
            if key in self._keys:
                continue  # on its way already
            if not run.keys or parent != run.keys[-1] or len(run.keys) == self._call_pages:
                self._queue(run)
                run = _Run(parent, source)
            if not self._add(run, key):
                # Behind a page that was dropped the others would be out of reach.
                self._count(dropped=len(positions) - number)
                break
            if source is None:
                self._codec.gather(pages[position], run.frames[-1])
        self._queue(run)

    def _add(self, run: _Run, key: bytes) -> bool:
        """Add a page to a run, with a frame if it is staged; False if it may not be copied now."""
        with self._state:
            is_full = len(self._keys) == self._pages_max
            if is_full or key in self._keys or self._deletions or self._stop_at < math.inf:
                return False
            self._keys.add(key)
            self._runs.add(run)
            run.keys.append(key)
            if run.source is None:
                run.frames.append(self._frame())
            return True

    def _frame(self) -> memoryview:
        """Return a free frame. REQUIRES: the condition is held, and no page in `_keys` has two frames."""
        if self._free:
            return self._free.pop()
        self._frames += 1
        # Aligned to pages of memory, as direct I/O asks for; the mapping lives as long as its view.
        return memoryview(mmap.mmap(-1, self._codec.frame_bytes))

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
        parent, whole = parent_outside(run.keys, run.parent), len(run.keys)
        if run.source is not None:
            with self._state:
                run.frames = [self._frame() for _ in run.keys]
            found = run.source.batch_get(run.keys, run.frames, deadline=deadline)
            # Behind a page that is gone or damaged the others would be out of reach.
            whole = next((number for number, outcome in enumerate(found) if outcome is not GetOutcome.HIT), whole)
        if whole:
            pages = run.frames[:whole]
            run.outcomes = self._part.batch_set(run.keys[:whole], pages, parent=parent, deadline=deadline)

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
            framed = sum(len(run.frames) for run in self._runs)
            if lent != framed or len(known) != len(self._keys) or set(known) != self._keys:
                raise InvariantError(
                    f"copies: {lent} frames lent, {framed} in runs; {len(self._keys)} keys, {len(known)} in runs"
                )
            if not self._frames <= self._pages_max >= len(known):
                raise InvariantError(f"copies: {len(known)} pages, {self._frames} frames, bound {self._pages_max}")

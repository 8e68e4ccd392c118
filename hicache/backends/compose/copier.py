"""Background copies of pages to one level, within a limit of bytes.

A verb must not use its frames after it has returned. Therefore a page that a level has just stored is read back from
that level when its copy is written: the verb only queues the key, and memory is used for one call at a time. A page
that was read from a lower level is staged: copied at once into a frame of the copier. Reading it again would cost as
much as the copy saves. Pages beyond the limit are dropped and counted. A dropped copy loses no data: copies
only make later reads faster. A copy keeps the time when its page was first stored, so a page that is too old for the
part is not promoted.

Locking design: one condition guards all fields. It is held for a few instructions, never during a copy of bytes or a
backend call. `lacks`, which stores call under their own locks, reads a set and a dict without it. Any thread submits;
one thread of a SupervisedPool writes. Lock order: the condition, then that of the pool, which calls back without it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...clock import SYSTEM_CLOCK, Clock
from ...errors import InvariantError
from ...frame import PageBuffer, header_of, stored_time
from ...supervised import LINGER_S, Beat, SupervisedPool
from ..base import GetOutcome, SetOutcome
from ..calls import parent_outside
from ..storage import Storage

# The most that one call writes: large enough to outweigh a round trip, small enough that `close` can wait for it.
_CALL_BYTES_MAX = 16 << 20
# The time limit of one call. If a store needs longer for 16 MiB, reading from it does not pay either.
_CALL_S = 3.0
# Uncopied pages to remember, at about 100 bytes each. The oldest are forgotten: a later touch reports their eviction.
_UNCOPIED_MAX = 1 << 16
# A part meets its deadline if its call returns at most this late.
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """Counts of pages: copied to a part, present there already, failed (rejected, or not readable from the source),
    dropped (limit reached, page deleted or copier closed), and waiting now."""

    copied: int
    present: int
    failed: int
    dropped: int
    waiting: int


@dataclass(slots=True, eq=False)
class _Run:
    """Consecutive pages of a chain, after the page `parent`; one call writes them. They are staged in `frames`, or read
    back from `source` into `frames`."""

    parent: bytes | None
    source: Storage | None
    keys: list[bytes] = field(default_factory=list)
    frames: list[memoryview] = field(default_factory=list)
    outcomes: list[SetOutcome] = field(default_factory=list)


class Copier:
    """Writes copies to `part`, whose name is `name`. At most `bytes_max` bytes may wait. Thread-safe.

    Invariant, tested by `check`: `_keys` holds each page of `_runs` once, and no more pages than the limit. A run has
    as many frames as pages, or none before it is read back.

    REQUIRES: `bytes_max` holds at least one page; the part and the sources are closed after the copier.
    """

    def __init__(
        self, part: Storage, name: str, bytes_max: int, clock: Clock = SYSTEM_CLOCK,
        *, on_lost: Callable[[Storage, Sequence[bytes]], object] = lambda source, keys: None,
    ) -> None:
        self._part = part
        self._on_lost = on_lost
        self._clock = clock
        self._codec = part.codec
        self._pages_max = bytes_max // part.codec.frame_bytes
        self._call_pages = max(1, _CALL_BYTES_MAX // part.codec.frame_bytes)
        self._state = threading.Condition()
        self._frames = 0  # allocated so far; frames are reused, as touching new memory costs more than copying into old
        self._free: list[memoryview] = []
        self._keys: set[bytes] = set()
        self._uncopied: dict[bytes, None] = {}  # stored pages whose copies were dropped or failed
        self._runs: set[_Run] = set()  # being submitted, queued or written
        self._deletions = 0  # in progress; until they end, no page is accepted
        self._stop_at = math.inf
        self._counts: Counter[str] = Counter()
        self._pool = SupervisedPool[_Run](
            f"copy-{name}", 1, handle=self._write, acknowledge=self._settle, linger_s=LINGER_S, clock=clock
        )

    def submit(
        self, positions: Sequence[int], keys: Sequence[bytes], pages: Sequence[PageBuffer],
        parents: Sequence[bytes | None], source: Storage | None = None,
    ) -> None:
        """Queue copies of the pages at `positions` of a batch, head first; drop the tail beyond the limit. The copies
        are read back from `source`, which has stored the pages; if it is None, they are staged now. Blocks only to copy
        memory. REQUIRES: pages to stage do not change until this returns."""
        run = _Run(None, source)
        for number, position in enumerate(positions):
            key, parent = keys[position], parents[position]
            if key in self._keys:
                continue  # already queued
            if not run.keys or parent != run.keys[-1] or len(run.keys) == self._call_pages:
                self._queue(run)
                run = _Run(parent, source)
            if source is None:
                stored_s = stored_time(header_of(pages[position]))
                if not any(start <= stored_s <= end for start, end in [store.valid_s for store in self._part.stores]):
                    break  # the part would not serve it, and a prefix lookup stops there
            if not self._add(run, key):
                # A prefix lookup stops at the dropped page, so later pages would be useless.
                self._count(dropped=len(positions) - number)
                self._note_uncopied(source, [keys[p] for p in positions[number:]])
                break
            if source is None:
                self._codec.gather(pages[position], run.frames[-1])
        self._queue(run)

    def _add(self, run: _Run, key: bytes) -> bool:
        """Add a page to a run, with a frame if it is staged. Return False if it may not be copied now."""
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
        # Aligned to memory pages for direct I/O. The mapping lives as long as its view.
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
            copied = {key for key, outcome in zip(run.keys, run.outcomes, strict=False) if outcome.is_stored}
            for key in copied:
                self._uncopied.pop(key, None)
            self._note_uncopied(run.source, [key for key in run.keys if key not in copied])
            self._free += run.frames
            self._state.notify_all()

    def _note_uncopied(self, source: Storage | None, keys: Sequence[bytes]) -> None:
        """Record that pages were not copied from the level that stored them."""
        if source is None:
            return  # a promotion
        with self._state:
            self._uncopied.update(dict.fromkeys(keys))
            while len(self._uncopied) > _UNCOPIED_MAX:
                del self._uncopied[next(iter(self._uncopied))]

    def lacks(self, key: bytes) -> bool:
        """Return True if the copy of a stored page waits, was dropped or has failed, as far as known. Never blocks."""
        return key in self._keys or key in self._uncopied

    def _count(self, **pages: int) -> None:
        with self._state:
            self._counts.update(pages)

    @contextlib.contextmanager
    def excluding(self, keys: Sequence[bytes] | None, deadline: float) -> Iterator[None]:
        """A context in which `keys` (None for all) can be deleted from the parts: waiting copies of them are dropped,
        and no new copies are accepted. Waits for a copy in flight, at most until `deadline`. A page that a verb read
        before this context and submits after it is still copied."""
        with self._state:
            self._deletions += 1
            gone = set(self._keys if keys is None else keys)
            self._drop([run for run in self._runs if not gone.isdisjoint(run.keys) and self._pool.withdraw(run)])
            self._clock.wait_for(self._state, lambda: self._keys.isdisjoint(gone), deadline)
        try:
            yield
        finally:
            with self._state:
                self._deletions -= 1

    def statistics(self) -> CopyStatistics:
        """Return a snapshot. Does not block."""
        with self._state:
            counts = {name: self._counts[name] for name in ("copied", "present", "failed", "dropped")}
            return CopyStatistics(**counts, waiting=len(self._keys))

    # On the thread

    def _write(self, run: _Run, beat: Beat) -> None:
        deadline = min(self._clock() + _CALL_S, self._stop_at)
        parent, whole = parent_outside(run.keys, run.parent), len(run.keys)
        if run.source is not None:
            with self._state:
                run.frames = [self._frame() for _ in run.keys]
            found = run.source.batch_get(run.keys, run.frames, deadline=deadline)
            gone = (GetOutcome.MISS, GetOutcome.CORRUPT)
            self._on_lost(run.source, [key for key, one in zip(run.keys, found, strict=True) if one in gone])
            # A prefix lookup stops at a missing or damaged page, so later pages would be useless.
            whole = next((number for number, outcome in enumerate(found) if outcome is not GetOutcome.HIT), whole)
        if whole:
            pages = [self._codec.copy_in(frame) for frame in run.frames[:whole]]
            run.outcomes = self._part.batch_set(run.keys[:whole], pages, parent=parent, deadline=deadline)

    def _settle(self, run: _Run) -> None:
        copied, present = run.outcomes.count(SetOutcome.STORED), run.outcomes.count(SetOutcome.PRESENT)
        self._count(copied=copied, present=present, failed=len(run.keys) - copied - present)
        self._release(run)

    # The end

    def stop(self, stop_at: float) -> None:
        """Accept no more pages, and write waiting ones only until `stop_at`. Does not block. Call it before `close`."""
        with self._state:
            self._stop_at = stop_at

    def close(self) -> None:
        """Wait until the thread has ended, at most one call of the part after `stop_at`; drop the remaining pages.

        The wait does not last longer for a part that ignores its deadline; such a part keeps its frames. Several
        copiers with the same `stop_at` together wait no longer than one. REQUIRES: `stop` was called.
        """
        with self._state:
            self._clock.wait_for(self._state, lambda: not self._runs, self._stop_at)
            self._drop([run for run in self._runs if self._pool.withdraw(run)])
        self._pool.close(max(0.0, self._stop_at + _CALL_S + _GRACE_S - self._clock()))
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
                    f"copies: {lent} frames in use, {framed} in runs; {len(self._keys)} keys, {len(known)} in runs"
                )
            if not self._frames <= self._pages_max >= len(known):
                raise InvariantError(f"copies: {len(known)} pages, {self._frames} frames, limit {self._pages_max}")

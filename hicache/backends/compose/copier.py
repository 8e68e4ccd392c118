"""Copies of pages on their way to one part of a composition, in the background and within a bound of bytes.

A verb must not use its frames after it has returned, so what is to be copied is staged: taken over into frames of the
copier's own, as many as its bound allows. What finds none free is dropped and counted: copies are made to be read
sooner, and nothing is lost with them. A page that is evicted above is staged as an open page, and read in the thread
here.

Invariants, tested by `check`: a key is in `_keys` as long as it is staged, queued or written, so no page is staged
twice; as many frames are lent as there are keys.

Locking design: one condition guards all fields and is held for a few instructions, never while bytes are copied or a
backend is called. Any thread submits, one thread of the copier's own writes. `forgetting` closes the door for
submissions that were seen before or during a deletion, waits for what is being written, and takes no other lock.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import InvalidInput, InvariantError
from ...frame import FrameHeader, PageBuffer, header_of
from ..base import EvictedPage, SetOutcome, StorageBackend
from ..calls import parent_outside
from ..chains import parent_in

_log = logging.getLogger(__name__)

# As much as one call writes: enough for a request that costs a round trip, little enough for a close that waits for it.
_CALL_BYTES_MAX = 16 << 20
# What one call may take. A store that is slower than this for 16 MiB would not pay when it is read, either.
_CALL_S = 3.0
# How late a call may return that holds its deadline.
_GRACE_S = 1.0
# Evicted pages that are open at once take at most this share of the descriptors that the process may have, and at least
# so many: there are other copiers, and a store that finds none left can neither read nor write.
_OPEN_SHARE = 1 / 8
_OPEN_PAGES_MIN = 16


@dataclass(frozen=True, slots=True)
class CopyStatistics:
    """Pages that were copied to one part, were there already, were refused by it or failed, and were dropped here
    because the bound was reached, the page deleted or the copier closed; and those that wait, in pages."""

    copied: int
    present: int
    failed: int
    dropped: int
    waiting: int


@dataclass(slots=True)
class _Copy:
    key: bytes
    frame: memoryview
    parent: bytes | None
    evicted: EvictedPage | None = None  # where the bytes still are; its parent is known once they are read


def parent_of(page: PageBuffer) -> bytes | None:
    """The key of the page before a sealed one, as its header says; None at the start of a chain."""
    header = FrameHeader.parse(header_of(page))
    return None if header is None else parent_in(header)


def parents_read(
    keys: Sequence[bytes], pages: Sequence[PageBuffer], positions: Sequence[int]
) -> list[bytes | None]:
    """The parents of the pages at `positions` of a batch that was just read, as their headers say.

    None for a header that names the page itself or one behind it in the batch: the batch is in the order of its chain,
    and a header is the word of any process that can write the store.
    """
    places: dict[bytes, int] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, place)
    named = [(position, parent_of(pages[position])) for position in positions]
    return [None if parent is None or places.get(parent, -1) >= position else parent for position, parent in named]


def _open_pages_max() -> int:
    """How many evicted pages one copier may hold open; a file takes a descriptor."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(_OPEN_PAGES_MIN, int(_OPEN_SHARE * descriptors))


class Copier:
    """Writes copies to `part`, of which `bytes_max` bytes may wait. Thread-safe; `name` is the part's.

    REQUIRES: the part is closed after the copier. Raises InvalidInput for less than one page.
    """

    def __init__(self, part: StorageBackend, name: str, bytes_max: int) -> None:
        self._part = part
        self._codec = part.codec
        self._frames_max = bytes_max // part.codec.frame_bytes
        if not self._frames_max:
            raise InvalidInput(
                f"copies to {name}: {bytes_max} bytes hold no page of {part.codec.frame_bytes} bytes; raise "
                "cascade_bytes_max of levels, repair_bytes_max of a mirror"
            )
        self._call_pages = max(1, _CALL_BYTES_MAX // part.codec.frame_bytes)
        # Tells how many more evicted pages may be opened.
        self._openings = threading.BoundedSemaphore(_open_pages_max())
        self._state = threading.Condition()
        self._frames = 0  # made so far; they are kept, since touching new memory costs more than copying into old
        self._free: list[memoryview] = []
        self._queue: deque[_Copy] = deque()
        self._keys: set[bytes] = set()
        self._writing: frozenset[bytes] = frozenset()
        self._epoch = 0  # of deletions; a submission that saw an older one is refused
        self._deleting = 0
        self._closing = False
        self._stop_at = math.inf
        self._copied = self._present = self._failed = self._dropped = 0
        self._thread = threading.Thread(target=self._serve, name=f"hicache-copy-{name}", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """Changes with each deletion. Read it before the pages, and give it to `submit`."""
        return self._epoch

    def submit(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parents: Sequence[bytes | None], epoch: int
    ) -> None:
        """Stage pages, head first, and have them written; the tail that does not fit is dropped. Blocks for copying
        memory only.

        REQUIRES: each page is whole until this returns, and `epoch` is from before the pages were read.
        """
        for position, key in enumerate(keys):
            staged = self._take(key, epoch)
            if staged is None:
                if key in self._keys:
                    continue  # on its way already
                # Behind a page that was dropped the others would be out of reach.
                self._finish((), dropped=len(keys) - position)
                return
            self._codec.gather(pages[position], staged)
            self._put(_Copy(key, staged, parents[position]), epoch)

    def take_evicted(self, key: bytes, open_page: Callable[[], EvictedPage]) -> None:
        """An EvictionListener: keep the page of `key` open, and have it read and written. Drops it if too many are."""
        epoch = self._epoch
        staged = self._take(key, epoch)
        if staged is None:
            self._finish((), dropped=key not in self._keys)
            return
        if not self._openings.acquire(blocking=False):
            self._finish([_Copy(key, staged, None)], dropped=1)
            return
        try:
            page = open_page()
        except OSError:
            self._openings.release()
            self._finish([_Copy(key, staged, None)], failed=1)
            return
        self._put(_Copy(key, staged, None, page), epoch)

    def _let_go(self, copy: _Copy) -> None:
        """Close the page of an eviction, if it is one and still open."""
        if copy.evicted is not None:
            copy.evicted.close()
            copy.evicted = None
            self._openings.release()

    def _take(self, key: bytes, epoch: int) -> memoryview | None:
        """A frame for the page, None if it is on its way already or may not be copied now."""
        with self._state:
            if key in self._keys:
                return None
            made = None
            if self._may_enter(epoch):
                if self._free:
                    made = self._free.pop()
                elif self._frames < self._frames_max:
                    self._frames += 1
                    # Aligned to pages of memory, as direct I/O asks for; the mapping lives as long as its view.
                    made = memoryview(mmap.mmap(-1, self._codec.frame_bytes))
            if made is not None:
                self._keys.add(key)
            return made

    def _may_enter(self, epoch: int) -> bool:
        return not self._closing and not self._deleting and epoch == self._epoch

    def _put(self, copy: _Copy, epoch: int) -> None:
        with self._state:
            if self._may_enter(epoch):
                self._queue.append(copy)
                self._state.notify_all()
                return
        self._drop([copy])

    def _drop(self, copies: Sequence[_Copy]) -> None:
        for copy in copies:
            self._let_go(copy)
        self._finish(copies, dropped=len(copies))

    def _finish(
        self, copies: Sequence[_Copy], *, copied: int = 0, present: int = 0, failed: int = 0, dropped: int = 0
    ) -> None:
        """Take frames back, and count what became of their pages."""
        with self._state:
            for copy in copies:
                self._keys.discard(copy.key)
                self._free.append(copy.frame)
            self._writing -= {copy.key for copy in copies}
            self._state.notify_all()
            self._copied += copied
            self._present += present
            self._failed += failed
            self._dropped += dropped

    @contextlib.contextmanager
    def forgetting(self, keys: Sequence[bytes] | None, deadline: float) -> Iterator[None]:
        """While this block deletes `keys` from the parts, None for all: no copy of them waits, is written, or comes in
        later from a verb that has read them before. Waits for the copy in flight, up to `deadline`."""
        with self._state:
            self._deleting += 1
            gone = frozenset(self._keys if keys is None else keys)
            dropped = [copy for copy in self._queue if copy.key in gone]
            self._queue = deque(copy for copy in self._queue if copy.key not in gone)
        self._drop(dropped)
        try:
            with self._state:
                wait_s = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
                self._state.wait_for(lambda: not self._writing & gone, wait_s)
            yield
        finally:
            with self._state:
                self._deleting -= 1
                self._epoch += 1

    def statistics(self) -> CopyStatistics:
        """A snapshot. Does not block."""
        with self._state:
            return CopyStatistics(self._copied, self._present, self._failed, self._dropped, len(self._keys))

    def _serve(self) -> None:
        while (batch := self._next()) is not None:
            counts = {"failed": len(batch)}
            try:
                counts = self._copy(batch)
            except Exception:  # a bug costs these copies and not the thread
                _log.exception("copying pages in the background failed unexpectedly")
            finally:
                self._finish(batch, **counts)

    def _next(self) -> list[_Copy] | None:
        """The pages to write next, one run of a chain; None when there are no more and none will come."""
        with self._state:
            self._state.wait_for(lambda: bool(self._queue) or self._closing)
            if self._closing and (not self._queue or time.monotonic() >= self._stop_at):
                return None
            batch = [self._queue.popleft()]
            while self._queue and len(batch) < self._call_pages and self._continues(batch[-1], self._queue[0]):
                batch.append(self._queue.popleft())
            self._writing = frozenset(copy.key for copy in batch)
            return batch

    @staticmethod
    def _continues(last: _Copy, following: _Copy) -> bool:
        return last.evicted is None and following.evicted is None and following.parent == last.key

    def _copy(self, batch: Sequence[_Copy]) -> dict[str, int]:
        for copy in batch:
            if copy.evicted is not None and not self._read_evicted(copy, copy.evicted):
                return {"failed": len(batch)}  # an evicted page is a batch of its own
        keys, frames = [copy.key for copy in batch], [copy.frame for copy in batch]
        deadline = min(time.monotonic() + _CALL_S, self._stop_at)
        parent = parent_outside(keys, batch[0].parent)
        outcomes = self._part.batch_set(keys, frames, parent=parent, deadline=deadline)
        copied, present = outcomes.count(SetOutcome.STORED), outcomes.count(SetOutcome.PRESENT)
        return {"copied": copied, "present": present, "failed": len(batch) - copied - present}

    def _read_evicted(self, copy: _Copy, page: EvictedPage) -> bool:
        """Fill the frame, and learn the page's parent; False if it is not provably the page."""
        stored_bytes = page.stored_bytes
        try:
            if self._codec.fits(stored_bytes):
                page.read(copy.frame)
        except OSError:
            return False
        finally:
            self._let_go(copy)
        if self._codec.accept(copy.key, copy.frame, stored_bytes) is not None:
            return False
        copy.parent = parent_of(copy.frame)
        return True

    def stop(self, stop_at: float) -> None:
        """Take nothing more, and write what waits until `stop_at` (monotonic). Does not wait; for `close`."""
        with self._state:
            self._closing = True
            self._stop_at = stop_at
            self._state.notify_all()

    def close(self) -> None:
        """Wait until the thread has ended, which may take a call of the part after `stop`; drop what is left.

        A part that holds no deadline is waited for no longer than that, and several of them together no longer than
        one. It keeps the frames it was given. REQUIRES: `stop` was called.
        """
        self._thread.join(max(0.0, self._stop_at + _CALL_S + _GRACE_S - time.monotonic()))
        with self._state:
            left = list(self._queue)
            self._queue.clear()
        self._drop(left)
        with self._state:
            self._free.clear()

    def check(self) -> None:
        """Raise InvariantError if frames and keys disagree. REQUIRES: no submission is under way."""
        with self._state:
            lent = self._frames - len(self._free)
            known = {copy.key for copy in self._queue} | self._writing
            if lent != len(self._keys) or known != self._keys or self._frames > self._frames_max:
                raise InvariantError(
                    f"copies: {lent} frames lent, {len(self._keys)} keys, {len(known)} queued or written, "
                    f"{self._frames} of {self._frames_max} frames made"
                )

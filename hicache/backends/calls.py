"""Common parts of every backend's verbs: checks of arguments, calls in flight, counts of outcomes."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ..clock import SYSTEM_CLOCK, Clock
from ..errors import InvalidInput
from ..frame import HEADER_BYTES, FrameCodec, PageBuffer, PageView
from ..keys import PAGE_KEY_BYTES
from .base import BackendStatistics, GetOutcome, SetOutcome
from .errors import ErrorKind, StoreError

Outcome = TypeVar("Outcome")
T = TypeVar("T")
_collecting = threading.local()


def check_keys(keys: Iterable[bytes]) -> None:
    """Raise InvalidInput unless all are page keys."""
    for key in keys:
        if len(key) != PAGE_KEY_BYTES:
            raise InvalidInput(f"backend: a key must be {PAGE_KEY_BYTES} bytes, got {len(key)}")


def check_batch(
    codec: FrameCodec, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None = None
) -> None:
    """Raise InvalidInput unless `pages` are pages of `codec`, one for each key, and `parent` is not one of the keys,
    which would make a cycle."""
    if len(keys) != len(pages):
        raise InvalidInput(f"backend: {len(keys)} keys but {len(pages)} pages")
    check_keys(keys)
    if parent is not None:
        check_keys([parent])
        if parent in keys:
            raise InvalidInput(
                f"backend: the parent of the batch is also its key number {keys.index(parent)}; "
                "pass the key of the page before the batch"
            )
    size = codec.frame_bytes
    for page in pages:
        if isinstance(page, PageView):
            _check_view(codec, page)
        elif page.nbytes != size or not _is_writable_bytes(page):
            raise InvalidInput(f"backend: a frame must be {size} contiguous writable bytes; cast it to 'B'")


def _check_view(codec: FrameCodec, page: PageView) -> None:
    if page.header.nbytes != HEADER_BYTES or page.nbytes != HEADER_BYTES + codec.payload_bytes:
        raise InvalidInput(
            f"backend: a page in parts must have a header of {HEADER_BYTES} bytes and parts of {codec.payload_bytes} "
            f"bytes together, got {page.header.nbytes} and {page.nbytes - page.header.nbytes}"
        )
    if not all(map(_is_writable_bytes, (page.header, *page.parts))):
        raise InvalidInput("backend: header and parts of a page must be contiguous writable bytes; cast them to 'B'")


def _is_writable_bytes(buffer: memoryview) -> bool:
    # Python only copies between views of the same format.
    return buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous and not buffer.readonly


def hits_in(answer: object, keys: int) -> int:
    """Return how many of `keys` pages were found, read, stored or removed, by the answer of a verb."""
    if not isinstance(answer, list):
        return int(answer) if isinstance(answer, int) else 0
    if not answer or isinstance(answer[0], bytes):  # a touch answers with the missing pages
        return keys - len(answer)
    return sum(one in (True, GetOutcome.HIT, SetOutcome.STORED, SetOutcome.PRESENT) for one in answer)


def parents_of(keys: Sequence[bytes], parent: bytes | None) -> list[bytes | None]:
    """Return the key of the page before each page of a batch. A repeated key has the parent of its first occurrence, so
    the pages of one batch never form a cycle. REQUIRES: `check_batch` accepts them."""
    parents: dict[bytes, bytes | None] = {}
    for key, before in zip(keys, [parent, *keys], strict=False):
        parents.setdefault(key, before)
    return [parents[key] for key in keys]


def parent_outside(keys: Sequence[bytes], parent: bytes | None) -> bytes | None:
    """Return `parent` for a batch of `keys`, or None if it is one of them. For a part of a batch: if a key occurs twice
    in the batch, the page before the part can also be in it."""
    return None if parent in keys else parent


def runs(positions: Sequence[int]) -> Iterator[slice]:
    """Cut ascending positions of a batch into runs without gaps: the pages of one call must be consecutive."""
    for _, run in itertools.groupby(enumerate(positions), key=lambda pair: pair[1] - pair[0]):
        found = [position for _, position in run]
        yield slice(found[0], found[-1] + 1)


def _tally(counts: Counter[Outcome], outcomes: Sequence[Outcome]) -> None:
    # Most batches have one outcome; hashing it once instead of per page saves microseconds.
    first = outcomes[0]
    if outcomes.count(first) == len(outcomes):
        counts[first] += len(outcomes)
    else:
        counts.update(outcomes)


@contextlib.contextmanager
def collected_errors() -> Iterator[list[str]]:
    """Yield a list that gets the kinds of all errors that this thread counts within the context. Errors that a
    composition counts on other threads are not in it."""
    errors: list[str] = []
    _collecting.errors = errors
    try:
        yield errors
    finally:
        _collecting.errors = None


@contextlib.contextmanager
def uncollected_errors() -> Iterator[None]:
    """Keep the errors that this thread counts within the context out of the list of `collected_errors`."""
    collected: list[str] | None = getattr(_collecting, "errors", None)
    _collecting.errors = None
    try:
        yield
    finally:
        _collecting.errors = collected


class Calls:
    """Counts the verbs in flight in a backend, for which `close` waits, and their outcomes, for `statistics`.

    `refusal` is the kind of error of a rejected verb. Deadlines and waits are in the time of `clock`.

    Locking design: `_lock` guards all fields; it is held for a few instructions, and never while a verb runs. `_left`
    is its condition, for `close`; verbs take the lock itself, which is cheaper.
    """

    def __init__(self, codec: FrameCodec, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._frame_bytes = codec.frame_bytes
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._calls = 0
        self._closed = False
        self.refusal = ErrorKind.CLOSED
        self._gets: Counter[GetOutcome] = Counter()
        self._sets: Counter[SetOutcome] = Counter()
        self._corrupt: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def make(self, deadline: float, pages: int, refused: T, work: Callable[[], T]) -> T:
        """Return the result of `work`. A call after `close` or after its deadline is not made: then, and if it raises
        StoreError, return `refused` and count `pages` errors."""
        is_open = self.enter()
        try:
            if not is_open:
                raise StoreError(self.refusal)
            if self._clock() >= deadline:
                raise StoreError(ErrorKind.DEADLINE)
            return work()
        except StoreError as error:
            self.count(errors=[error.kind] * pages)
            return refused
        finally:
            if is_open:
                self.leave()

    def enter(self) -> bool:
        """Count the start of a verb; its end must call `leave`. Return False if the backend is closed."""
        with self._lock:
            if self._closed:
                return False
            self._calls += 1
            return True

    def leave(self) -> None:
        """Count the end of a verb."""
        with self._lock:
            self._calls -= 1
            if self._closed and not self._calls:
                self._left.notify_all()

    def count(
        self,
        *,
        gets: Sequence[GetOutcome] = (),
        sets: Sequence[SetOutcome] = (),
        corrupt: Sequence[str] = (),
        errors: Sequence[str] = (),
    ) -> None:
        """Count the outcomes of a batch. `corrupt` are reasons, `errors` kinds."""
        if errors:
            collected: list[str] | None = getattr(_collecting, "errors", None)
            if collected is not None:
                collected += errors
        with self._lock:
            if gets:
                _tally(self._gets, gets)
            if sets:
                _tally(self._sets, sets)
            if corrupt:
                self._corrupt.update(corrupt)
            if errors:
                self._errors.update(errors)

    def statistics(self) -> BackendStatistics:
        """Return a snapshot; byte counts are whole frames."""
        with self._lock:
            return BackendStatistics(
                gets=dict(self._gets),
                sets=dict(self._sets),
                corrupt=dict(self._corrupt),
                errors=dict(self._errors),
                evicted_pages=0,
                read_bytes=self._gets[GetOutcome.HIT] * self._frame_bytes,
                written_bytes=self._sets[SetOutcome.STORED] * self._frame_bytes,
            )

    def close(self, wait_s: float = math.inf) -> bool:
        """Reject further verbs and wait for those in flight, at most `wait_s`. Return False if the backend was
        already closed."""
        with self._lock:
            first = not self._closed
            self._closed = True
            self._clock.wait_for(self._left, lambda: not self._calls, self._clock() + wait_s)
        return first

    def after_fork(self) -> None:
        """Reject all verbs in the child of a fork. Another thread of the parent may have held the lock at the fork."""
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._calls = 0
        self._closed = True
        self.refusal = ErrorKind.FORKED

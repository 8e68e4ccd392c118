"""Calls of storage: their arguments are checked, those in flight are known, and their outcomes are counted.

    Call      one call of a verb, with what it proves about the store
    Calls     the calls in flight, for which `close` waits, and totals; `AdmissionControl` adds limits and breakers
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..clock import Clock
from ..errors import InvalidInput
from ..frame import HEADER_BYTES, FrameCodec, PageBuffer, PageView
from ..keys import PAGE_KEY_BYTES
from .base import BackendStatistics, Direction, GetOutcome, SetOutcome
from .errors import ErrorKind, StoreError

Outcome = TypeVar("Outcome")


class Verb(enum.StrEnum):
    """The kind of a call, and the direction whose breaker decides about it."""

    __hash__ = str.__hash__  # faster than Enum's, which is a Python function called for each dictionary lookup
    direction: Direction

    EXISTS = "exists"
    GET = "get"
    SET = "set"
    DELETE = "delete"
    TOUCH = "touch"


for _verb in Verb:
    _verb.direction = Direction.READ if _verb in (Verb.EXISTS, Verb.GET) else Direction.WRITE


class Refusal(enum.StrEnum):
    """Why the guard rejected a call."""

    OPEN = "open"  # the breaker is open, or the operator has switched the direction off
    BUSY = "busy"  # other calls used the whole in-flight limit until the deadline
    CLOSED = "closed"  # the guard was closed while the call waited


class CallResult(enum.StrEnum):
    """What a call proves about the store: it works, nothing, or one of four kinds of failure."""

    GOOD = "good"
    UNKNOWN = "unknown"
    ERROR = "error"  # half of the pages or more are errors; of a write, half of the new pages
    LOOKUP = "lookup"  # a lookup missed pages, and the backend counted an error during it
    RAISED = "raised"  # the backend raised an exception or broke the contract
    OVERDUE = "overdue"  # the call hung past deadline and grace


@dataclass(slots=True, eq=False)
class Call:
    """A call of a verb with `keys` keys, which moves `bytes` bytes. The calling thread owns it and sets its result; any
    thread may set `overdue` under the lock of its Calls.

    Its `errors` are counted when it ends, and added to the caller's list `report`.

    The result: `result`; of a write, `new_pages`, those that were not present, and `kept`, the best outcome of them;
    after a failure, `cause`, the kind of its last error, and `detail`, the store's own words for it.
    """

    verb: Verb
    keys: int
    bytes: int
    deadline: float
    report: list[str] | None = None
    errors: list[str] = field(default_factory=list)
    began_s: float = 0.0  # when it was admitted
    is_admitted: bool = False
    round: int = 0  # the breaker's round at that time
    overdue: bool = False  # it hung past deadline and grace, and is counted as failed
    result: CallResult = CallResult.UNKNOWN
    new_pages: int = 0
    kept: SetOutcome | None = None  # None if the write proves nothing
    cause: str = ""
    detail: str = ""

    @property
    def pages(self) -> int:
        """The pages that it counts as: a lookup or removal of any number of keys moves no bytes, and is one page."""
        return self.keys if self.bytes else 1


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
            if page.header.nbytes != HEADER_BYTES or page.nbytes != HEADER_BYTES + codec.payload_bytes:
                raise InvalidInput(
                    f"backend: a page in parts must have a header of {HEADER_BYTES} bytes and parts of "
                    f"{codec.payload_bytes} bytes together, got {page.header.nbytes} and "
                    f"{page.nbytes - page.header.nbytes}"
                )
            if not all(map(_is_writable_bytes, (page.header, *page.parts))):
                raise InvalidInput(
                    "backend: header and parts of a page must be contiguous writable bytes; cast them to 'B'"
                )
        # As in `_is_writable_bytes`, without a call per page.
        elif page.nbytes != size or page.format != "B" or page.ndim != 1 or not page.c_contiguous or page.readonly:
            raise InvalidInput(f"backend: a frame must be {size} contiguous writable bytes; cast it to 'B'")


def _is_writable_bytes(buffer: memoryview) -> bool:
    # Python only copies between views of the same format.
    return buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous and not buffer.readonly


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


def hits_in(answer: object, keys: int) -> int:
    """Return how many of `keys` pages were found, read, stored or removed, by the answer of a verb."""
    if not isinstance(answer, list):
        return int(answer) if isinstance(answer, int) else 0
    if not answer or isinstance(answer[0], bytes):  # a touch answers with the missing pages
        return keys - len(answer)
    return sum(one in (True, GetOutcome.HIT, SetOutcome.STORED, SetOutcome.PRESENT) for one in answer)


def _tally(counts: Counter[Outcome], outcomes: Sequence[Outcome]) -> None:
    # Most batches have one outcome; hashing it once instead of per page saves microseconds.
    first = outcomes[0]
    if outcomes.count(first) == len(outcomes):
        counts[first] += len(outcomes)
    else:
        counts.update(outcomes)


class Calls:
    """The calls in flight of one storage, and totals of their outcomes and errors.

    `refusal` is the kind of error of a rejected call after `close`. Deadlines and waits are in the time of `clock`.

    Locking design: `_lock` guards all fields, also those of derived classes; it is held for a few instructions, and
    never during a call. `_changed` is its condition; calls take the lock itself, which is cheaper.
    """

    def __init__(self, frame_bytes: int, clock: Clock) -> None:
        self._clock = clock
        self._frame_bytes = frame_bytes
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._in_flight: set[Call] = set()
        self._uses = 0
        self._closed = False
        self.refusal = ErrorKind.CLOSED
        self._gets: Counter[GetOutcome] = Counter()
        self._sets: Counter[SetOutcome] = Counter()
        self._corrupt: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def enter(self, call: Call) -> None:
        """Admit a call. May wait until its deadline. Raises StoreError if the call is rejected: after `close`, after
        its deadline, or by `_admit`. `leave` must follow in any case."""
        with self._lock:
            if self._closed:
                raise StoreError(self.refusal)
            call.began_s = self._clock()
            if call.began_s >= call.deadline:
                raise StoreError(ErrorKind.DEADLINE)
            self._admit(call)
            call.is_admitted = True
            self._in_flight.add(call)

    def leave(self, call: Call, answer: Any) -> None:
        """Record the end of a call, its errors, and the outcomes in its answer."""
        with self._lock:
            if call.is_admitted:
                self._in_flight.remove(call)
                self._end(call)
                if self._closed:
                    self._changed.notify_all()
            if call.errors:
                self._errors.update(call.errors)
            if call.verb is Verb.GET:
                _tally(self._gets, answer)
            elif call.verb is Verb.SET:
                _tally(self._sets, answer)
        if call.report is not None:
            call.report += call.errors

    def _admit(self, call: Call) -> None:
        """Under the lock: raise StoreError to reject a call."""

    def _end(self, call: Call) -> None:
        """Under the lock: note the end of an admitted call."""

    @contextlib.contextmanager
    def use(self) -> Iterator[bool]:
        """Let `close` wait for the block too, which is not a call. Yields False after `close`."""
        with self._lock:
            is_open = not self._closed
            self._uses += is_open
        try:
            yield is_open
        finally:
            with self._lock:
                self._uses -= is_open
                if self._closed:
                    self._changed.notify_all()

    def count(self, *errors: str, corrupt: Sequence[str] = ()) -> None:
        """Count errors outside calls by kind, and damaged pages by reason."""
        with self._lock:
            self._errors.update(errors)
            self._corrupt.update(corrupt)

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
        """Reject further calls, and wait for those in flight at most `wait_s`. Return False if already closed."""
        with self._lock:
            first = not self._closed
            self._closed = True
            self._changed.notify_all()
            self._clock.wait_for(self._changed, lambda: not (self._in_flight or self._uses), self._clock() + wait_s)
        return first

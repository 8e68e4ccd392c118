"""What every backend needs around its verbs: arguments checked, calls counted in and out, outcomes counted."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..errors import InvalidInput
from ..frame import FrameCodec
from ..keys import PAGE_KEY_BYTES
from .base import BackendStatistics, GetOutcome, SetOutcome


def check_keys(keys: Iterable[bytes]) -> None:
    """Raise InvalidInput unless all are page keys."""
    for key in keys:
        if len(key) != PAGE_KEY_BYTES:
            raise InvalidInput(f"backend: a key must be {PAGE_KEY_BYTES} bytes, got {len(key)}")


def check_batch(
    codec: FrameCodec, keys: Sequence[bytes], frames: Sequence[memoryview], parent: bytes | None = None
) -> None:
    """Raise InvalidInput unless `frames` are frames of `codec`, one for each key, and `parent` can be the page before
    all of them: a page must not hang on itself, at any distance."""
    if len(keys) != len(frames):
        raise InvalidInput(f"backend: {len(keys)} keys but {len(frames)} frames")
    check_keys(keys)
    if parent is not None:
        check_keys([parent])
        if parent in keys:
            raise InvalidInput(
                f"backend: the parent of the batch is also its key number {keys.index(parent)}; "
                "give the key of the page before the batch"
            )
    size = codec.frame_bytes
    for frame in frames:
        if frame.nbytes != size or frame.itemsize != 1 or not frame.c_contiguous or frame.readonly:
            raise InvalidInput(f"backend: a frame must be {size} contiguous writable bytes")


def parents_of(keys: Sequence[bytes], parent: bytes | None) -> list[bytes | None]:
    """Return the key of the page before each page of a batch. A key that comes again has the parent of its first place,
    so the pages of one batch never hang on each other in a cycle. REQUIRES: `check_batch` accepts them."""
    parents: dict[bytes, bytes | None] = {}
    for key, before in zip(keys, [parent, *keys], strict=False):
        parents.setdefault(key, before)
    return [parents[key] for key in keys]


def parent_outside(keys: Sequence[bytes], parent: bytes | None) -> bytes | None:
    """Return `parent` for a batch of `keys`, or None if it is one of them. For a part of a batch: where a key of the
    batch comes twice, the page before the part can be in it."""
    return None if parent in keys else parent


class Tally:
    """The counts behind `BackendStatistics`. Not locked: each backend adds under its own lock, once per batch."""

    def __init__(self) -> None:
        self.gets: Counter[GetOutcome] = Counter()
        self.sets: Counter[SetOutcome] = Counter()
        self.corrupt: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.evicted_pages = 0

    def statistics(self, frame_bytes: int) -> BackendStatistics:
        """A snapshot; bytes moved are whole frames."""
        return BackendStatistics(
            gets=dict(self.gets),
            sets=dict(self.sets),
            corrupt=dict(self.corrupt),
            errors=dict(self.errors),
            evicted_pages=self.evicted_pages,
            read_bytes=self.gets[GetOutcome.HIT] * frame_bytes,
            written_bytes=self.sets[SetOutcome.STORED] * frame_bytes,
        )


class Calls:
    """The verbs under way in a backend, and what became of them: `close` waits for the ones, `statistics` tells the
    other.

    `refusal` is the class of error of a verb that is not let in.

    Locking design: one condition guards all fields; it is held for a few instructions, and never while a verb runs.
    """

    def __init__(self, codec: FrameCodec) -> None:
        self._frame_bytes = codec.frame_bytes
        self._state = threading.Condition()
        self._calls = 0
        self._closed = False
        self.refusal = "closed"
        self._tally = Tally()

    @contextlib.contextmanager
    def enter(self) -> Iterator[bool]:
        """Counts a verb in and out; False if the backend is closed."""
        with self._state:
            is_open = not self._closed
            self._calls += is_open
        try:
            yield is_open
        finally:
            if is_open:
                with self._state:
                    self._calls -= 1
                    if not self._calls:
                        self._state.notify_all()

    def count(
        self,
        *,
        gets: Iterable[GetOutcome] = (),
        sets: Iterable[SetOutcome] = (),
        corrupt: Iterable[str] = (),
        errors: Iterable[str] = (),
        evicted_pages: int = 0,
    ) -> None:
        """Add what became of a batch. `corrupt` are reasons, `errors` classes."""
        with self._state:
            self._tally.gets.update(gets)
            self._tally.sets.update(sets)
            self._tally.corrupt.update(corrupt)
            self._tally.errors.update(errors)
            self._tally.evicted_pages += evicted_pages

    def refuse(self, reason: str | None = None) -> int:
        """The result of a lookup or removal that is not even tried: 0, and one error."""
        self.count(errors=[reason or self.refusal])
        return 0

    def refuse_gets(self, pages: int, reason: str | None = None) -> list[GetOutcome]:
        """The outcomes of a read that is not even tried."""
        outcomes = [GetOutcome.ERROR] * pages
        self.count(gets=outcomes, errors=[reason or self.refusal] * pages)
        return outcomes

    def refuse_sets(self, pages: int, reason: str | None = None) -> list[SetOutcome]:
        """The outcomes of a store that is not even tried."""
        outcomes = [SetOutcome.ERROR] * pages
        self.count(sets=outcomes, errors=[reason or self.refusal] * pages)
        return outcomes

    def statistics(self) -> BackendStatistics:
        """A snapshot."""
        with self._state:
            return self._tally.statistics(self._frame_bytes)

    def close(self) -> bool:
        """Let no more verbs in and wait for those under way. False if that was done before."""
        with self._state:
            first = not self._closed
            self._closed = True
            self._state.wait_for(lambda: not self._calls)
        return first

    def after_fork(self) -> None:
        """In the child of a fork: let no verb in. Another thread of the parent may have held the lock at the fork."""
        self._state = threading.Condition()
        self._calls = 0
        self._closed = True
        self.refusal = "forked"

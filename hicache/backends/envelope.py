"""The envelope of every backend except the guard: it checks arguments, counts calls and outcomes, and rejects calls
after the deadline or after `close`.

    Envelope    implements the verbs of StorageBackend with functions that are called only while the backend is open
    Compound    an Envelope around other backends; its statistics include their errors and evictions
    Wrapper     an Envelope around one other backend; it passes on the calls that it does not override
    Touchable   implements `batch_touch`

A rejected call and a StoreError have the same effect: a lookup or removal finds nothing and counts one error; each page
of a read or store is ERROR and counts one error.

Locking design: `_close_lock` lets a second `close` wait for the first. `_usage` is one reference. `Calls` has its own
lock. The verbs run on their callers' threads, any number of them at once.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from ..frame import FrameCodec, PageBuffer
from .base import BackendStatistics, GetOutcome, SetOutcome, StorageBackend, Usage, touch
from .calls import Calls, check_batch, check_keys
from .errors import ErrorKind, StoreError

T = TypeVar("T")


class Envelope(StorageBackend):
    """See the module's docstring. The functions below the constructor are called while the backend is open, with
    checked arguments, at least one key, and before the deadline. Each may raise StoreError."""

    def __init__(self, codec: FrameCodec) -> None:
        super().__init__(codec)
        self._calls = Calls(codec)
        self.name = type(self).__name__  # in log lines; a guard in front of a store replaces it
        self._close_lock = threading.Lock()
        self._usage = Usage(0, 0, None)

    # To be implemented by a backend

    @abstractmethod
    def prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """Return how many of `keys` are stored up to the first hole. Does not refresh recency."""

    @abstractmethod
    def has(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return for each key whether its page is stored. Does not refresh recency."""

    @abstractmethod
    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """Read pages. The caller counts outcomes, but not errors."""

    @abstractmethod
    def put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """Store pages. The caller counts outcomes, but not errors."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """Remove pages, each key once; return how many were stored."""

    @abstractmethod
    def remove_all(self, deadline: float) -> int:
        """Remove the pages of this namespace; return how many were stored."""

    @abstractmethod
    def measure(self) -> Usage:
        """Return the current usage. May block."""

    @abstractmethod
    def shut(self) -> None:
        """Release files, sockets, threads and parts. Called once, after all verbs have ended. Raises BackendError."""

    def count(self, *reasons: str) -> None:
        """Count errors by their classes."""
        self._calls.count(errors=reasons)

    # The verbs

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend."""
        check_keys(keys)
        return self._call(0, deadline, lambda: self.prefix(keys, deadline)) if keys else 0

    def batch_has(self, keys: Sequence[bytes], *, deadline: float) -> list[bool]:
        """See StorageBackend."""
        check_keys(keys)
        return self._call([False] * len(keys), deadline, lambda: self.has(keys, deadline)) if keys else []

    def batch_get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float
    ) -> list[GetOutcome]:
        """See StorageBackend."""
        check_batch(self.codec, keys, pages)
        if not keys:
            return []
        errors = [GetOutcome.ERROR] * len(keys)
        return self._call(
            errors, deadline, lambda: self.get(keys, pages, deadline),
            pages=len(keys), settle=lambda outcomes: self._calls.count(gets=outcomes),
        )  # fmt: skip

    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See StorageBackend."""
        check_batch(self.codec, keys, pages, parent)
        if not keys:
            return []
        errors = [SetOutcome.ERROR] * len(keys)
        return self._call(
            errors, deadline, lambda: self.put(keys, pages, parent, deadline),
            pages=len(keys), settle=lambda outcomes: self._calls.count(sets=outcomes),
        )  # fmt: skip

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend."""
        check_keys(keys)
        return self._call(0, deadline, lambda: self.remove(list(dict.fromkeys(keys)), deadline)) if keys else 0

    def clear(self, *, deadline: float) -> int:
        """See StorageBackend."""
        return self._call(0, deadline, lambda: self.remove_all(deadline))

    def usage(self) -> Usage:
        """See StorageBackend. After `close` it returns the last usage, which is not an error."""
        if self._calls.enter():
            try:
                self._usage = self.measure()
            except StoreError as error:
                self.count(error.kind)
            finally:
                self._calls.leave()
        return self._usage

    def statistics(self) -> BackendStatistics:
        """See StorageBackend."""
        return self._calls.statistics()

    def close(self) -> None:
        """See StorageBackend."""
        self._close()

    def _close(self, wait_s: float | None = None) -> None:
        """Wait for the verbs in flight, at most `wait_s`, then `shut`."""
        with self._close_lock:
            if self._calls.close(wait_s):
                self.shut()

    def _call(
        self,
        refused: T,
        deadline: float,
        verb: Callable[[], T],
        *,
        pages: int = 1,
        settle: Callable[[T], None] = lambda answer: None,
    ) -> T:
        """Return the result of `verb`, which `settle` counts. After a rejection or failure: `refused`, and `pages`
        errors."""
        answer = refused
        is_open = self._calls.enter()
        try:
            try:
                if not is_open:
                    raise StoreError(self._calls.refusal)
                if time.monotonic() >= deadline:
                    raise StoreError(ErrorKind.DEADLINE)
                answer = verb()
            except StoreError as error:
                self.count(*[error.kind] * pages)
            finally:
                settle(answer)
        finally:
            if is_open:
                self._calls.leave()
        return answer


class Touchable(Envelope):
    """An Envelope that has Recency."""

    @abstractmethod
    def use(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        """See Recency. Called like the functions of Envelope, each key once. Raises StoreError."""

    def batch_touch(self, keys: Sequence[bytes], *, deadline: float) -> list[bytes]:
        """See Recency."""
        check_keys(keys)
        return self._call([], deadline, lambda: self.use(list(dict.fromkeys(keys)), deadline)) if keys else []


class Compound(Envelope):
    """A backend made of others, which it owns; a Composite.

    Its statistics count the pages of its own callers: a page that three parts looked up counts once. `errors`,
    `corrupt` and `evicted_pages` include those of its parts.
    """

    @property
    @abstractmethod
    def parts(self) -> Sequence[StorageBackend]:
        """See Composite."""

    def statistics(self) -> BackendStatistics:
        """See StorageBackend, and this class."""
        own = self._calls.statistics()
        errors, corrupt, evicted_pages = Counter(own.errors), Counter(own.corrupt), own.evicted_pages
        for part in self.parts:
            found = part.statistics()
            errors.update(found.errors)
            corrupt.update(found.corrupt)
            evicted_pages += found.evicted_pages
        return replace(own, errors=dict(errors), corrupt=dict(corrupt), evicted_pages=evicted_pages)


class Wrapper(Compound, Touchable):
    """A backend in front of another, `inner`, to which it passes each call that `reach` admits. A Composite of that
    part, which it owns."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner.codec)
        self._inner = inner

    @property
    def parts(self) -> Sequence[StorageBackend]:
        """See Composite."""
        return (self._inner,)

    def reach(self, pages: int, deadline: float) -> StorageBackend:
        """Return the backend behind it, for a call of that many pages. Raises StoreError, and may block."""
        return self._inner

    def measure(self) -> Usage:
        """See Envelope."""
        return self._inner.usage()

    def shut(self) -> None:
        """See Envelope."""
        self._inner.close()

    def prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope."""
        return self.reach(0, deadline).batch_exists(keys, deadline=deadline)

    def has(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Envelope."""
        return self.reach(0, deadline).batch_has(keys, deadline=deadline)

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """See Envelope."""
        return self.reach(len(keys), deadline).batch_get(keys, pages, deadline=deadline)

    def put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See Envelope."""
        return self.reach(len(keys), deadline).batch_set(keys, pages, parent=parent, deadline=deadline)

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope."""
        return self.reach(0, deadline).delete(keys, deadline=deadline)

    def remove_all(self, deadline: float) -> int:
        """See Envelope."""
        return self.reach(0, deadline).clear(deadline=deadline)

    def use(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        """See Touchable."""
        return touch(self.reach(0, deadline), keys, deadline=deadline)

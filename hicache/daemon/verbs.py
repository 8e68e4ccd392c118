"""The verbs of a store that clients share: each call is checked and counted, and rejected after the deadline or after
`close`. `sharing` has the work behind them.

A rejected call and a StoreError have the same effect: a lookup or removal finds nothing and counts one error; each page
of a read or store is ERROR and counts one error.

Locking design: `_close_lock` lets a second `close` wait for the first. `_usage` is one reference. `Calls` has its own
lock. The verbs run on their callers' threads, any number of them at once.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from ..backends.base import GetOutcome, SetOutcome, Usage
from ..backends.calls import Calls, check_batch, check_keys
from ..backends.errors import StoreError
from ..backends.storage import Storage
from ..clock import Clock
from ..frame import FrameCodec, PageBuffer

T = TypeVar("T")


class Verbs(Storage):
    """See the module's docstring. The abstract functions are called while the storage is open, with checked arguments,
    at least one key, and before the deadline. Each may raise StoreError."""

    def __init__(self, codec: FrameCodec, clock: Clock) -> None:
        self.codec = codec
        self._clock = clock
        self._calls = Calls(codec, clock)
        self._close_lock = threading.Lock()
        self._usage = Usage(0, 0, None)

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
    def use(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        """Count pages as used, each key once; return those that are known to be missing."""

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
        """Release what is behind the verbs. Called once, after all verbs have ended."""

    def count(self, *reasons: str) -> None:
        """Count errors by their classes."""
        self._calls.count(errors=reasons)

    # The verbs

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See Storage."""
        check_keys(keys)
        return self._calls.make(deadline, 1, 0, lambda: self.prefix(keys, deadline)) if keys else 0

    def batch_has(self, keys: Sequence[bytes], *, deadline: float) -> list[bool]:
        """See Storage."""
        check_keys(keys)
        refused = [False] * len(keys)
        return self._calls.make(deadline, 1, refused, lambda: self.has(keys, deadline)) if keys else []

    def batch_get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float
    ) -> list[GetOutcome]:
        """See Storage."""
        check_batch(self.codec, keys, pages)
        if not keys:
            return []
        refused = [GetOutcome.ERROR] * len(keys)
        outcomes = self._calls.make(deadline, len(keys), refused, lambda: self.get(keys, pages, deadline))
        self._calls.count(gets=outcomes)
        return outcomes

    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See Storage."""
        check_batch(self.codec, keys, pages, parent)
        if not keys:
            return []
        refused = [SetOutcome.ERROR] * len(keys)
        outcomes = self._calls.make(deadline, len(keys), refused, lambda: self.put(keys, pages, parent, deadline))
        self._calls.count(sets=outcomes)
        return outcomes

    def batch_touch(self, keys: Sequence[bytes], *, deadline: float) -> list[bytes]:
        """See Storage."""
        check_keys(keys)
        distinct = list(dict.fromkeys(keys))
        return self._calls.make(deadline, 1, [], lambda: self.use(distinct, deadline)) if keys else []

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See Storage."""
        check_keys(keys)
        distinct = list(dict.fromkeys(keys))
        return self._calls.make(deadline, 1, 0, lambda: self.remove(distinct, deadline)) if keys else 0

    def clear(self, *, deadline: float) -> int:
        """See Storage."""
        return self._calls.make(deadline, 1, 0, lambda: self.remove_all(deadline))

    def usage(self) -> Usage:
        """See Storage. After `close` it returns the last usage, which is not an error."""
        if self._calls.enter():
            try:
                self._usage = self.measure()
            except StoreError as error:
                self.count(error.kind)
            finally:
                self._calls.leave()
        return self._usage

    def close(self) -> None:
        """See Storage."""
        with self._close_lock:
            if self._calls.close():
                self.shut()

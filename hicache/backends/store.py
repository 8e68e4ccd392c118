"""Stores: backends that keep pages themselves. A `PageStore` only moves bytes between keys and lists of buffers; its
envelope checks and counts each call (see `envelope`), and `PageReads` verifies its pages.

Locking design: as `envelope`; each call has its own `PageReads` or `PageWrites`.
"""

from __future__ import annotations

import itertools
import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic

from ..frame import FrameCodec, PageBuffer
from ..logs import LimitedLog
from .base import GetOutcome, SetOutcome
from .envelope import Envelope
from .errors import ErrorKind, StoreError
from .pages import Damaged, Found, PageReads, PageWrites

logger = logging.getLogger(__name__)

# The time for removing damaged pages, even after the deadline.
SETTLE_S = 0.25
# Pages that `clear` removes in one call.
_CLEARED_AT_ONCE = 1000


class PageStore(Envelope, Generic[Found]):
    """A backend that keeps pages itself. `Found` is the type that distinguishes a stored object from its successor.

    A store implements `find`, `read`, `write`, `remove`, `remove_damaged`, `keys`, `measure` and `shut`. It reports
    failures page by page or raises StoreError; `count` is for errors without a page of the call.
    """

    def __init__(self, codec: FrameCodec) -> None:
        super().__init__(codec)
        self._damage_log = LimitedLog(logger)

    # To be implemented by a store

    @abstractmethod
    def find(self, keys: Sequence[bytes], deadline: float) -> Iterable[bool]:
        """Return for each key whether its page is stored. May be a generator: for a prefix, it is read up to the first
        hole.

        A key whose lookup fails is not stored, and is an error. Does not refresh recency. Raises StoreError.
        """

    @abstractmethod
    def read(self, pages: PageReads[Found]) -> None:
        """Read pages into their buffers and settle each of them. Refreshes the recency of hits. Raises StoreError."""

    @abstractmethod
    def write(self, pages: PageWrites) -> None:
        """Store the missing pages, each whole or not at all, and settle each of them. Raises StoreError."""

    @abstractmethod
    def remove_damaged(self, damaged: Sequence[Damaged[Found]], deadline: float) -> None:
        """Remove these objects unless others have replaced them since. Raises StoreError."""

    @abstractmethod
    def keys(self, deadline: float) -> Iterator[bytes]:
        """Return the keys of this namespace's pages, in any order. Pages are removed between two of them. Raises
        StoreError."""

    def remove_listed(self, keys: Sequence[bytes], deadline: float) -> int:
        """Remove pages that `keys` has just returned; as `remove`. A store whose `remove` looks up each page first
        overrides this, because lookups are not needed here."""
        return self.remove(keys, deadline)

    # Called by the envelope, see Envelope

    def prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope. A store that can search for the end of the prefix overrides it."""
        stored = 0
        for there in self._found(keys, deadline):
            if not there:
                break
            stored += 1
        return stored

    def has(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Envelope."""
        found = list(self._found(keys, deadline))
        return found + [False] * (len(keys) - len(found))

    def _found(self, keys: Sequence[bytes], deadline: float) -> Iterator[bool]:
        """As `find`, but count a failure and stop there."""
        told = 0
        kind: str = ErrorKind.INTERNAL
        try:
            for there in self.find(keys, deadline):
                told += 1
                yield there
        except StoreError as error:
            kind = error.kind
        if told < len(keys):
            self.count(kind)

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """See Envelope."""
        reads: PageReads[Found] = PageReads(self.codec, keys, pages, deadline)
        kind = ""
        try:
            self.read(reads)
        except StoreError as error:
            kind = error.kind
        finally:
            outcomes = reads.finish(kind)
            if reads.errors or reads.damaged:
                self._calls.count(errors=reads.errors, corrupt=reads.corrupt)
        if reads.damaged:
            failure = ""
            try:
                self.remove_damaged(reads.damaged, max(deadline, time.monotonic() + SETTLE_S))
            except StoreError as error:
                self.count(error.kind)
                failure = f"not removed ({error.kind})"
            for one in reads.damaged:
                self._damage_log.warn(
                    one.reason, "storage %s: page %s of %s failed verification (%s); it counts as a miss and "
                    "was %s", self.name, one.key.hex()[:8], self.codec.label or "no label",
                    one.reason, failure or "removed",
                )  # fmt: skip
        return outcomes

    def put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See Envelope."""
        writes, kind = PageWrites(self.codec, keys, pages, parent, deadline), ""
        try:
            self.write(writes)
        except StoreError as error:
            kind = error.kind
        finally:
            outcomes = writes.finish(kind)
            if writes.errors:
                self.count(*writes.errors)
        return outcomes

    def remove_all(self, deadline: float) -> int:
        """See Envelope."""
        removed = 0
        try:
            left = self.keys(deadline)
            while some := list(itertools.islice(left, _CLEARED_AT_ONCE)):
                if time.monotonic() >= deadline:
                    raise StoreError(ErrorKind.DEADLINE)
                removed += self.remove_listed(some, deadline)
        except StoreError as error:
            self.count(error.kind)
        return removed

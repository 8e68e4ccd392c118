"""One attempt at a call of a driver, with the failures as values.

Each function calls the driver once and returns its answer and the kinds of its errors; the caller counts them, judges
them and may try again. Pages are verified, and damaged and expired ones removed here (see `pages`), exceptions of the
driver end here.

Locking design: immutable except for `_raised` and `_last_incidents`, a set and a reference, which any thread changes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..clock import Clock
from ..errors import BackendError
from ..frame import FrameCodec, PageBuffer
from ..logs import LimitedLog
from .base import GetOutcome, SetOutcome, Usage
from .calls import Calls
from .driver import (
    Clears,
    Driver,
    ExplainsErrors,
    ExplainsRejections,
    FindsPrefixes,
    HasIncidents,
    Incidents,
    RemovesListed,
    Touches,
)
from .errors import RAISED, ErrorKind, StoreError
from .limit import CapacityLimit
from .pages import FOREVER, SETTLE_S, Damaged, PageReads, PageWrites
from .retention import Retention

logger = logging.getLogger(__name__)

# Pages that `clear` removes in one call.
_CLEARED_AT_ONCE = 1000
_WRONG_ANSWER = f"{RAISED}WrongAnswer"


class Attempts:
    """The calls of `driver`. See the module's docstring. `name` is the store's name in log lines; `calls` counts
    damaged pages by reason."""

    def __init__(
        self, driver: Driver[Any], codec: FrameCodec, name: str, calls: Calls, *, limit: CapacityLimit | None,
        retention: Retention | None, clock: Clock,
    ) -> None:
        self.driver = driver
        self.limit = limit
        self._retention = retention
        self._codec = codec
        self._namespace = codec.namespace
        self._name = name
        self._calls = calls
        self._clock = clock
        self._damage_log = LimitedLog(logger, clock=clock)
        self._raised: set[str] = set()  # classes of exceptions already logged
        self._last_incidents = Incidents()
        # `isinstance` of a protocol takes microseconds, so not in each call.
        self._finds = driver if isinstance(driver, FindsPrefixes) else None
        self._touches = driver if isinstance(driver, Touches) else None

    def failure(self, work: Callable[..., object], *arguments: object) -> str:
        """Call `work`; return the kind of its failure, or an empty text."""
        try:
            work(*arguments)
        except Exception as error:
            return self.contained(error)
        return ""

    def contained(self, error: Exception) -> str:
        """Return the kind of an exception of the driver. An unexpected one is logged once per class: exceptions of
        third-party drivers end here."""
        if isinstance(error, StoreError):
            return error.kind
        name = type(error).__name__
        if name not in self._raised:
            self._raised.add(name)
            logger.error("storage %s: unexpected %s; further ones are only counted", self._name, name, exc_info=error)
        return f"{RAISED}{name}"

    @contextlib.contextmanager
    def _containing(self, errors: list[str]) -> Iterator[None]:
        """A context in which an exception of the driver ends: its kind is added to `errors`."""
        try:
            yield
        except Exception as error:
            errors.append(self.contained(error))

    # Lookups and removals

    def _find(
        self, keys: Sequence[bytes], deadline: float, *, to_first_hole: bool = False
    ) -> tuple[list[bool], list[str]]:
        """Return the driver's answers, an error as False, and the errors. Answers that are missing after a failure are
        left out, and are one error."""
        found, errors = list[bool](), list[str]()
        try:  # in place of `_containing`, for the speed of lookups
            for answer in itertools.islice(self.driver.find(self._namespace, keys, deadline), len(keys)):
                if answer is True:
                    found.append(True)
                    continue
                if answer is not False:
                    kind: object = answer
                    errors.append(kind if isinstance(kind, str) else _WRONG_ANSWER)
                found.append(False)
                if to_first_hole:
                    return found, errors
            if len(found) < len(keys):
                raise StoreError(ErrorKind.INTERNAL)
        except Exception as error:
            errors.append(self.contained(error))
        return found, errors

    def prefix(self, keys: Sequence[bytes], deadline: float) -> tuple[int, Sequence[str]]:
        """Return how many of `keys` are stored up to the first hole."""
        if self._finds is None:
            found, errors = self._find(keys, deadline, to_first_hole=True)
            return sum(found), errors
        pages = 0
        errors = []
        with self._containing(errors):
            pages, kinds = self._finds.find_prefix(self._namespace, keys, deadline)
            errors += kinds
        return pages, errors

    def has(self, keys: Sequence[bytes], deadline: float) -> tuple[list[bool], list[str]]:
        """Return for each key whether its page is stored."""
        found, errors = self._find(keys, deadline)
        return found + [False] * (len(keys) - len(found)), errors

    def touch(self, keys: Sequence[bytes], deadline: float) -> tuple[list[bytes], list[str]]:
        """Count `keys` as used; return those that are known to be missing. REQUIRES: no key occurs twice."""
        if self.limit is not None:
            self.limit.note_uses(keys)  # including missing pages: a sweep only reads the uses of listed pages
        if self._touches is None:
            return [], []
        missing, errors = list[bytes](), list[str]()
        with self._containing(errors):
            for key, answer in zip(keys, self._touches.touch(self._namespace, keys, deadline), strict=True):
                if answer is False:
                    missing.append(key)
                elif answer is not True:
                    errors.append(answer)
        return missing, errors

    def remove(self, keys: Sequence[bytes], deadline: float) -> tuple[int, list[str]]:
        """Remove pages; return how many were stored. REQUIRES: no key occurs twice."""
        return self._removed(self.driver.remove, self._namespace, keys, deadline)

    def clear(self, deadline: float) -> tuple[int, list[str]]:
        """Remove all pages of the namespace; return how many were stored."""
        if self.limit is not None:
            self.limit.forget()
        try:
            return self._removed(self._clear, deadline)
        finally:
            if self.limit is not None:
                self.limit.sweep_soon()

    def _clear(self, deadline: float) -> tuple[int, Sequence[str]]:
        driver, removed, errors = self.driver, 0, list[str]()
        if isinstance(driver, Clears):
            return driver.clear(self._namespace, deadline)
        remove = driver.remove_listed if isinstance(driver, RemovesListed) else driver.remove
        try:
            left = driver.pages(self._namespace.hex(), deadline)
            while some := [page.key for page in itertools.islice(left, _CLEARED_AT_ONCE)]:
                if self._clock() >= deadline:
                    raise StoreError(ErrorKind.DEADLINE)
                count, kinds = remove(self._namespace, some, deadline)
                removed += count
                errors += kinds
        except StoreError as error:
            errors.append(error.kind)
        return removed, errors

    def _removed(self, remove: Callable[..., tuple[int, Sequence[str]]], *arguments: object) -> tuple[int, list[str]]:
        removed, errors = 0, list[str]()
        with self._containing(errors):
            answer, kinds = remove(*arguments)
            errors += kinds
            if type(answer) is not int or answer < 0:
                raise StoreError(_WRONG_ANSWER)
            removed = answer
        return removed, errors

    # Pages

    @property
    def valid_s(self) -> tuple[float, float]:
        """The Unix times between which a page was stored that has not expired now."""
        return FOREVER if self._retention is None else self._retention.valid_s

    def read(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float
    ) -> tuple[list[GetOutcome], list[str]]:
        """Read and verify pages; remove damaged and expired ones."""
        reads: PageReads[Any] = PageReads(self._codec, keys, pages, deadline, self._clock)
        reads.valid_s = self.valid_s
        outcomes = reads.finish(self.failure(self.driver.read, reads))
        if reads.damaged:
            self._calls.count(corrupt=[one.reason for one in reads.damaged])
            removed, errors = self._remove_found(reads.damaged, deadline)
            reads.errors += errors
            failure = f"not removed ({errors[-1]})" if errors else "removed"
            if not removed and not errors:
                failure = "not removed (the store has another object by now, or none)"
            for one in reads.damaged:
                self._damage_log.warn(
                    one.reason, "storage %s: page %s of %s failed verification (%s); it counts as a miss and was %s",
                    self._name, one.key.hex()[:8], self._codec.label or "no label", one.reason, failure,
                )
        if reads.expired and self._retention is not None:
            removed, errors = self._remove_found(reads.expired, deadline)
            self._retention.note_removed(removed)
            reads.errors += errors
        return outcomes, reads.errors

    def _remove_found(self, unwanted: Sequence[Damaged[Any]], deadline: float) -> tuple[int, list[str]]:
        """Remove objects, but not objects that have replaced them since."""
        until = max(deadline, self._clock() + SETTLE_S)
        founds = {one.key: one.found for one in unwanted}  # a key may occur twice in a read
        return self._removed(self.driver.remove, self._namespace, [*founds], until, [*founds.values()])

    def write(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> tuple[list[SetOutcome], list[str]]:
        """Seal and store pages, within the limit."""
        if self.limit is None:
            return self._put(keys, pages, parent, deadline)
        return self.limit.write(keys, pages, parent, deadline, put=self._put, prefix=self.prefix)

    def _put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> tuple[list[SetOutcome], list[str]]:
        writes = PageWrites(self._codec, keys, pages, parent, deadline, self._clock)
        writes.valid_s = self.valid_s
        outcomes = writes.finish(self.failure(self.driver.write, writes))
        return outcomes, writes.errors

    # The whole

    def usage(self) -> Usage:
        """Return the usage. Blocks as the driver does. Raises StoreError."""
        try:
            usage: object = self.driver.measure()
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(self.contained(error)) from error
        if not isinstance(usage, Usage):
            raise StoreError(_WRONG_ANSWER)
        return usage if self.limit is None else replace(usage, capacity_bytes=self.limit.capacity_bytes)

    def rejection(self) -> str:
        """Return why the last write was rejected, empty if unknown."""
        found: str | None = None if self.limit is None else self.limit.rejection
        errors: list[str] = []
        with self._containing(errors):
            if found is None and isinstance(self.driver, ExplainsRejections):
                found = self.driver.rejection
        self._calls.count(*errors)
        return str(found or "")

    def explanation(self, cause: str) -> str:
        """Return the driver's own words about a kind of error, empty without."""
        words = self.driver.explanation(cause) if isinstance(self.driver, ExplainsErrors) else ""
        return words if "; " in words or not words else f"; {words}"

    def incidents(self) -> Incidents:
        """Return the totals of driver, limit and retention; the last ones if the driver raises. Does not block."""
        failed: list[str] = []
        with self._containing(failed):
            if isinstance(self.driver, HasIncidents):
                self._last_incidents = self.driver.incidents()
        self._calls.count(*failed)
        found = [self._last_incidents, *(one.incidents() for one in (self.limit, self._retention) if one is not None)]
        errors = Counter[str]()
        for one in found:
            errors.update(one.errors)
        evicted, expired = sum(one.evicted_pages for one in found), sum(one.expired_pages for one in found)
        return Incidents(errors, evicted, expired, found[0].outage)

    def close(self) -> None:
        """Close retention, limit and driver. Raises the driver's BackendError; any other exception is counted."""
        for sweeper in (self._retention, self.limit):
            if sweeper is not None:
                sweeper.close()
        try:
            self.driver.close()
        except BackendError:
            raise
        except Exception as error:
            self._calls.count(self.contained(error))

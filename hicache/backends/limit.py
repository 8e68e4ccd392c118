"""A limit in bytes for a store that has none of its own: S3, or Redis without `maxmemory`.

What the store holds, in all namespaces, is known from a listing and from what was written since. A page for which there
is no room is REJECTED; a sweep in the background makes room by removing the least recently used pages on which none
hangs, so that chains lose their tails. Uses are those that the store tells of, and those through this backend.

One engine never exceeds the limit. Of several that share a store, each learns what the others wrote from its next
listing: the limit may be overshot by the writes of one interval plus one listing, and no longer than that. Their sweeps
choose nearly the same pages, and at worst each removes as many as one would.

A listing costs a request per thousand pages on S3. The first sweep that has to remove something reads the header of
each page that this backend has not stored itself: one small request a page, once.

Locking design: `_state` guards the `_Ledger`, `_closed` and what verbs leave for the sweep (`_fresh`, `_uses`,
`_is_full`); it is held for a few instructions, and taken before the lock of the task. `_not_before`, `_chains`, `_raw`
and `_backoff` are written by the sweep, a BackgroundTask that the constructor wakes and `close` ends. Verbs wait for it
only until the first listing is through, FIRST_LISTING_WAIT_S at most. Otherwise as `envelope`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..background import BackgroundTask
from ..backoff import Backoff
from ..errors import BackendError, ConfigError, InvalidInput
from ..frame import PageBuffer
from .base import EvictionListener, GetOutcome, SetOutcome, StorageBackend, Usage, watch_evictions
from .calls import parent_outside, parents_of
from .chains import Chains, parent_in, read_header
from .envelope import Wrapper
from .errors import StoreError
from .raw import PageId, RawStore

_log = logging.getLogger(__name__)

# How often a store is listed. Shorter tells sooner of what others wrote and costs more requests.
LIST_INTERVAL_S = 60.0
# From the start of a listing it takes this long at least to the next one, however full the store is, and after one that
# failed twice as long each time.
PAUSE_S = 1.0
# A sweep begins above the one share of the limit and ends below the other: large steps amortize the listing.
HIGH_WATER = 0.95
LOW_WATER = 0.90
# An engine that has just started can wait this long for its first page to be stored.
FIRST_LISTING_WAIT_S = 2.0
# Pages that a sweep knows the chains of, at some 600 bytes each. Of a larger store it removes from these alone, and may
# take a page for a tail that is not one: the price is a shorter hit, not a wrong one.
PAGES_MAX = 1 << 19
# Stores and uses that wait for the next sweep; what is beyond is read from headers, or counts as not used.
_NOTES_MAX = 1 << 16
_REMOVE_CHUNK = 1000
_CLOSE_S = 5.0


@dataclass(slots=True)
class _Ledger:
    """What the store may hold at most, as far as this process can know. Not locked.

    Invariant: `used_bytes` is at least what was listed plus what this process may have written since that listing
    began; what is `reserved` is not used yet.
    """

    capacity_bytes: int
    used_bytes: int = 0
    reserved_bytes: int = 0
    since_bytes: int = 0  # written since the listing in progress began, or the last one if none is
    is_listed: bool = False

    def reserve(self, pages: int, page_bytes: int) -> int:
        """Take room for as many of `pages` as there is; how many that is."""
        free = self.capacity_bytes - self.used_bytes - self.reserved_bytes
        fitting = max(0, min(pages, free // page_bytes))
        self.reserved_bytes += fitting * page_bytes
        return fitting

    def commit(self, written_bytes: int) -> None:
        """So much of the reserved room may be in use now."""
        self.reserved_bytes -= written_bytes
        self.used_bytes += written_bytes
        self.since_bytes += written_bytes

    def release(self, unused_bytes: int) -> None:
        """Give back so much of the reserved room."""
        self.reserved_bytes -= unused_bytes

    def end_listing(self, listed_bytes: int) -> None:
        """The listing is through. What was written since it began may count twice, until the next one."""
        self.used_bytes = listed_bytes + self.since_bytes
        self.is_listed = True


class LimitedBackend(Wrapper):
    """`inner` with a limit of `capacity_bytes` for all that its store holds.

    `open_raw` opens the same store for the sweep, which opens it in its own thread and again after trouble; it raises
    BackendError and ConfigError. The limit counts what is stored as whole frames until a listing knows better, and
    pages that may have been stored in spite of an ERROR. Raises InvalidInput for a capacity below one page, and then
    leaves `inner` open. Of its errors `listing` counts listings and sweeps that failed, `unlisted` pages that came
    before the first listing was through.
    """

    def __init__(
        self,
        inner: StorageBackend,
        open_raw: Callable[[], RawStore],
        *,
        capacity_bytes: int,
        list_interval_s: float = LIST_INTERVAL_S,
    ) -> None:
        super().__init__(inner)
        size = inner.codec.frame_bytes
        if type(capacity_bytes) is not int or capacity_bytes < size:
            raise InvalidInput(f"limit: capacity_bytes must be at least a page of {size} bytes, got {capacity_bytes!r}")
        self._open_raw = open_raw
        self._interval_s = list_interval_s
        self._usage = Usage(0, 0, capacity_bytes)
        self._state = threading.Condition()
        self._ledger = _Ledger(capacity_bytes)
        self._fresh: dict[bytes, bytes | None] = {}
        self._uses: dict[bytes, float] = {}
        self._is_full = False  # a page was rejected since the last sweep began
        self._not_before = 0.0  # when the next sweep may begin
        self._closed = False
        self._on_evicted: EvictionListener = lambda keys: None
        self._chains = Chains()
        self._raw: RawStore | None = None
        self._backoff = Backoff(min(PAUSE_S, list_interval_s), list_interval_s)
        self._sweeps = BackgroundTask(
            "limit", self._sweep_once, backoff=self._backoff, on_error=lambda: self.count("internal")
        )
        self._sweeps.wake()

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """See Envelope."""
        outcomes = super().get(keys, pages, deadline)
        self._note_uses([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is GetOutcome.HIT])
        return outcomes

    def use(self, keys: Sequence[bytes], deadline: float) -> list[bytes]:
        """See Touchable."""
        missing = super().use(keys, deadline)
        self._note_uses(keys)  # also those that are missing: a sweep asks only about pages that are listed
        return missing

    def watch_evictions(self, listener: EvictionListener) -> None:
        """See EvictionNotices. Those of the store behind it too."""
        self._on_evicted = listener
        watch_evictions(self._inner, listener)

    def _note_uses(self, keys: Sequence[bytes]) -> None:
        now_s = time.time()
        with self._state:
            if len(self._uses) < _NOTES_MAX:
                self._uses.update(dict.fromkeys(keys, now_s))

    def put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See Envelope. Rejects the tail of a batch for which there is no room; its head stays."""
        if not self._wait_for_listing(deadline):
            raise StoreError("unlisted")
        outcomes: list[SetOutcome] = []
        size = self.codec.frame_bytes
        while (done := len(outcomes)) < len(keys) and all(outcome.is_stored for outcome in outcomes):
            with self._state:
                fitting = self._ledger.reserve(len(keys) - done, size)
            rest = keys[done:]
            if fitting < len(rest) and (present := self._inner.batch_exists(rest, deadline=deadline)):
                # What is there already needs no room, so that more of what is behind it may find some.
                with self._state:
                    self._ledger.release(fitting * size)
                self._note_uses(rest[:present])
                outcomes += [SetOutcome.PRESENT] * present
            elif fitting:
                end = done + fitting
                above = parent_outside(keys[done:end], keys[done - 1] if done else parent)
                outcomes += self._store_reserved(keys[done:end], pages[done:end], above, deadline)
            else:
                break
        rejected = len(keys) - len(outcomes)
        if rejected:
            with self._state:
                self._is_full = True
                self._sweeps.wake(self._not_before)
        return outcomes + [SetOutcome.REJECTED] * rejected

    def _wait_for_listing(self, deadline: float) -> bool:
        wait_s = min(FIRST_LISTING_WAIT_S, deadline - time.monotonic())
        with self._state:
            if not self._ledger.is_listed:
                self._sweeps.tend()
            self._state.wait_for(lambda: self._ledger.is_listed or self._closed, max(0.0, wait_s))
            return self._ledger.is_listed

    def _store_reserved(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """Store pages for which there is room, and note what that took."""
        size, idle = self.codec.frame_bytes, 0
        outcomes: list[SetOutcome] = []
        try:
            outcomes = self._inner.batch_set(keys, pages, parent=parent, deadline=deadline)
            idle = sum(outcome in (SetOutcome.PRESENT, SetOutcome.REJECTED) for outcome in outcomes)
        finally:
            with self._state:
                # A page whose answer was lost may be there, and after an exception all of them.
                self._ledger.commit((len(keys) - idle) * size)
                self._ledger.release(idle * size)
                for key, above, outcome in zip(keys, parents_of(keys, parent), outcomes, strict=False):
                    if outcome is SetOutcome.STORED and len(self._fresh) < _NOTES_MAX:
                        self._fresh[key] = above
                if self._ledger.used_bytes > HIGH_WATER * self._ledger.capacity_bytes:
                    self._sweeps.wake(self._not_before)
        # Of a new page too: the store's own clock may differ from ours, or count in whole seconds.
        self._note_uses([key for key, outcome in zip(keys, outcomes, strict=True) if outcome.is_stored])
        return outcomes

    def remove_all(self, deadline: float) -> int:
        """See Envelope. As what was deleted, it makes room after the next listing, for which this asks."""
        with self._state:
            self._fresh.clear()
            self._uses.clear()
        try:
            return super().remove_all(deadline)
        finally:
            self._sweeps.wake(self._not_before)

    def measure(self) -> Usage:
        """See Envelope: pages and bytes as the backend below counts them, and the limit, which is for all."""
        return replace(super().measure(), capacity_bytes=self._ledger.capacity_bytes)

    def close(self) -> None:
        """See StorageBackend. A request of the sweep that hangs is not waited for longer than a few seconds."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        super().close()

    def shut(self) -> None:
        """See Envelope."""
        try:
            super().shut()
        finally:
            if self._sweeps.close(_CLOSE_S):
                self._close_raw()
            else:
                self.count("sweep_left")
                _log.warning("limit: a request of the sweep hangs; its thread is left to end by itself")

    # On the thread of the task

    def _sweep_once(self) -> float:
        """List the store and make room; when to do so again."""
        self._not_before = time.monotonic() + min(PAUSE_S, self._interval_s)
        swept = False
        try:
            self._raw = self._raw or self._open_raw()
            self._list(self._raw)
            self._sweep(self._raw)
            self._backoff.reset()
            swept = True
        except (BackendError, ConfigError) as error:
            self.count("listing")
            _log.warning("limit: the store cannot be listed or swept: %s", error)
            self._not_before = time.monotonic() + self._backoff.next_s()
            return self._not_before
        finally:
            if not swept or self._closed:
                self._close_raw()  # a store that was away may want new connections
        # Engines that started together need not list together.
        return time.monotonic() + self._interval_s * random.uniform(0.75, 1.25)

    def _close_raw(self) -> None:
        """Close a store that may be in trouble, if it is open at all."""
        raw, self._raw = self._raw, None
        if raw is not None:
            with contextlib.suppress(BackendError):
                raw.close()

    def _list(self, raw: RawStore) -> None:
        with self._state:
            self._ledger.since_bytes = 0  # from now on, what is written may be missing in the listing
            fresh, self._fresh = self._fresh, {}
            uses, self._uses = self._uses, {}
        chains, namespace = self._chains, self.codec.namespace
        total, seen = 0, set[PageId]()
        for listed in raw.pages():
            if self._closed:
                return
            total += listed.bytes
            is_ours = listed.namespace == namespace
            used_s = max(listed.used_s or 0.0, uses.get(listed.key, 0.0)) if is_ours else listed.used_s
            page = replace(listed, used_s=used_s)
            if not chains.renew(page):
                if len(chains) >= PAGES_MAX:
                    continue
                if is_ours and page.key in fresh:
                    chains.add(page, fresh[page.key])
                else:
                    chains.add_unread(page)
            seen.add((page.namespace, page.key))
        chains.keep(seen)
        with self._state:
            self._ledger.end_listing(total)
            self._state.notify_all()

    def _sweep(self, raw: RawStore) -> None:
        with self._state:
            capacity, used = self._ledger.capacity_bytes, self._ledger.used_bytes
            is_full, self._is_full = self._is_full, False
        if used <= HIGH_WATER * capacity and not is_full:
            return
        for page in self._chains.unread():
            if self._closed:
                return
            header = read_header(raw, page)
            self._chains.add(page, None if header is None else parent_in(header))
        # In a store of few pages one of them is more than the share that is to be free.
        excess = used - min(math.floor(LOW_WATER * capacity), capacity - self.codec.frame_bytes)
        chosen = []
        for page in self._chains.tails_first():
            if excess <= 0:
                break
            excess -= page.bytes
            chosen.append(page)
        while chosen and not self._closed:
            some, chosen = chosen[:_REMOVE_CHUNK], chosen[_REMOVE_CHUNK:]
            removed = raw.remove(some)
            for page in some:
                self._chains.discard((page.namespace, page.key))
            with self._state:
                # Also what another engine's sweep has removed: it was in this listing, and is there no more.
                freed = sum(page.bytes for page in some)
                self._ledger.used_bytes = max(self._ledger.since_bytes, self._ledger.used_bytes - freed)
            self._calls.count(evicted_pages=removed)
            self._on_evicted([page.key for page in some if page.namespace == self.codec.namespace])

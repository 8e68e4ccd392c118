"""A limit in bytes for stores without their own limit: S3, a shared directory, or Redis without `maxmemory`.

The size of the store, over all namespaces, is known from a listing and from the writes since. A page without room is
REJECTED; a sweep in the background makes room by removing the least recently used pages without children, so that
chains lose their tails. Uses are those that the store reports, and those through this store.

One engine never exceeds the limit. If several share a store, each learns about the others' writes from its next
listing: the limit may be overshot by the writes of one interval plus one listing. Their sweeps choose almost the same
pages; at worst each removes as many as one would. Where a driver `SharesSweeps`, one engine lists and sweeps for all.
The others list once, at their start: the last listing of a sweep lacks what engines have written since and then died.

The limit is lower while the store has less room: a driver that `SharesSweeps` says how much is left, at each listing.
If the store itself rejects pages, for a quota of its own, a sweep makes some room, at most once per interval.

The time of a page's last use comes from the clock of the server or of the writer, which may differ from this one. A
page whose time has changed since the last listing counts as used after that listing, also if its time is older.

A listing costs one request per thousand pages on S3. The first sweep that removes pages reads the header of each page
that this engine has not stored itself: one small request per page, once.

Longer than 500 lines because writes, listings and sweeps keep one ledger, whose invariant needs all of them.

Locking design: `_state` guards the `_Ledger`, `_closed` and the data of verbs for the sweep (`_fresh`, `_uses`,
`_is_full`); it is held for a few instructions, and taken before the lock of the task. `_rejection` is a hint, written
by any thread. The sweep writes `_not_before`, `_chains`, `_adaptive` and `_backoff`; it is a BackgroundTask that the
`start` wakes and `close` ends. Verbs wait for it only until the end of the first listing, at most FIRST_LISTING_WAIT_S.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TypeAlias

from ..background import BackgroundTask
from ..backoff import Backoff
from ..clock import SYSTEM_CLOCK, Clock
from ..errors import BackendError, InvalidInput
from ..frame import FrameCodec, PageBuffer
from ..keys import PAGE_KEY_BYTES
from ..units import format_size
from .base import EvictionListener, PageId, SetOutcome, StoredPage
from .calls import parent_outside, parents_of
from .chains import Chains, parent_in, read_header
from .driver import Incidents, SharesSweeps, Swept
from .order import AdaptivePages
from .stored import StoredPages

_log = logging.getLogger(__name__)

# The interval of listings. A shorter interval detects others' writes sooner, but costs more requests.
LIST_INTERVAL_S = 60.0
# The shortest time between the starts of two listings, even if the store is full. It doubles after each failure.
PAUSE_S = 1.0
# In a shared directory, which has no requests to pay for, a sweep that takes little time may begin again after this
# multiple of it, but not sooner than PAUSE_S_MIN.
_PAUSE_DUTY = 10
PAUSE_S_MIN = 0.05
# A sweep begins above the first share of the limit and ends below the second: large steps amortize the listing.
HIGH_WATER = 0.95
LOW_WATER = 0.90
# How long the first store of a new engine may wait.
FIRST_LISTING_WAIT_S = 2.0
# Pages whose chains a sweep knows, at about 600 bytes each. In a larger store it removes only these, and may mistake a
# page for a tail: that makes hits shorter, not wrong.
PAGES_MAX = 1 << 19
# Stores and uses that wait for the next sweep. Beyond the limit, headers are read, and uses are ignored.
_NOTES_MAX = 1 << 16
# The share of the store that a sweep removes after the store itself has rejected pages. What fills the store may be
# something else, which a sweep cannot remove.
_FULL_SHARE = 0.02
_REMOVE_CHUNK = 1000
_CLOSE_S = 5.0


@dataclass(slots=True)
class _Ledger:
    """The largest possible size of the store, as known to this process. Not locked.

    `limit_bytes` is the capacity, or less while the store has less room. Invariant: `used_bytes` is at least the bytes
    of the last listing plus the bytes that this process may have written since it began; `reserved` bytes are not
    included. `written_bytes` is a total. `_ended` is the number of the last listing that counts here: the first call of
    `follow` sets it, because a listing that began before may lack the writes of engines that have died. `_before` has
    that total at the last call of `follow` that did not know of a listing, by the number of the last listing that the
    next call knew of.
    """

    capacity_bytes: int
    limit_bytes: int = field(init=False)
    used_bytes: int = 0
    reserved_bytes: int = 0
    written_bytes: int = 0
    is_listed: bool = False
    _begun_bytes: int = 0  # `written_bytes` when the last listing began
    _series: str = ""
    _ended: int = -1  # before the first call of `follow`
    _before: dict[int, int] = field(default_factory=dict)
    _visited_bytes: int = 0  # `written_bytes` at the last call of `follow`

    def __post_init__(self) -> None:
        self.limit_bytes = self.capacity_bytes

    @property
    def since_bytes(self) -> int:
        """The bytes that this process may have written since the last listing began."""
        return self.written_bytes - self._begun_bytes

    def reserve(self, pages: int, page_bytes: int) -> int:
        """Reserve room for as many of `pages` as possible; return their number."""
        free = self.limit_bytes - self.used_bytes - self.reserved_bytes
        fitting = max(0, min(pages, free // page_bytes))
        self.reserved_bytes += fitting * page_bytes
        return fitting

    def commit(self, written_bytes: int) -> None:
        """Turn reserved room into used room."""
        self.reserved_bytes -= written_bytes
        self.used_bytes += written_bytes
        self.written_bytes += written_bytes

    def release(self, unused_bytes: int) -> None:
        """Release reserved room."""
        self.reserved_bytes -= unused_bytes

    def begin_listing(self) -> None:
        """A listing of this process begins: it may lack the writes from now on."""
        self._begun_bytes = self.written_bytes

    def end_listing(self, listed_bytes: int) -> None:
        """Record the result of a listing. Writes since its start may count twice until the next one."""
        self.used_bytes = listed_bytes + self.since_bytes
        self.is_listed = True

    def know(self, found: Swept) -> None:
        """The listing of this process that has just ended is the last one in `found`, unless others list too."""
        if found.begun == found.ended and found.series == self._series:
            self._ended = found.ended

    def follow(self, found: Swept) -> None:
        """Record the result of another engine's listing, if it is newer. That listing may lack what this process has
        written since the last call that did not know of it.

        An engine that was slow to begin or to end a listing may put older numbers back for a time: they are ignored.
        """
        before, self._visited_bytes = self._visited_bytes if self.is_listed else 0, self.written_bytes
        if found.series != self._series or self._ended < 0:
            is_first, self._series, self._before = self._ended < 0, found.series, {}
            self._ended = found.begun if is_first else 0
        if found.begun > max(self._before, default=self._ended):
            self._before[found.begun] = before
        if found.ended > self._ended:
            self._begun_bytes = self._before[min(number for number in self._before if number >= found.ended)]
            self._ended = found.ended
            self.end_listing(found.bytes)
        self._before = {number: at for number, at in self._before.items() if number > self._ended}


# Store pages, or look them up, without the limit; also returns the kinds of the errors. See `attempts`.
_Put: TypeAlias = Callable[
    [Sequence[bytes], Sequence[PageBuffer], bytes | None, float], tuple[list[SetOutcome], list[str]]
]
_Prefix: TypeAlias = Callable[[Sequence[bytes], float], tuple[int, Sequence[str]]]


class CapacityLimit:
    """A limit of `capacity_bytes` for the whole store in which pages of `codec` are.

    The sweeps work on `stored`, which belongs to the store. Until the next listing, the limit counts stored pages as
    whole frames, and includes pages that may have been stored despite an ERROR. With `adaptive`, the pages that the
    best of several policies would keep are removed last. Raises InvalidInput for a capacity below one page. Of its
    errors, `listing` counts failed listings and sweeps, `unlisted` pages that failed before the first listing ended.
    """

    def __init__(
        self, codec: FrameCodec, stored: StoredPages, *, capacity_bytes: int, list_interval_s: float = LIST_INTERVAL_S,
        adaptive: bool = False, clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        size = codec.frame_bytes
        if type(capacity_bytes) is not int or capacity_bytes < size:
            raise InvalidInput(f"limit: capacity must be at least a page of {size} bytes, got {capacity_bytes!r}")
        self.codec = codec
        self.capacity_bytes = capacity_bytes
        self.rejection: str | None = None  # why the last write was rejected, see ExplainsRejections
        self.on_evicted: EvictionListener = lambda keys: None
        self._stored = stored
        self._shared = stored.driver if isinstance(stored.driver, SharesSweeps) else None
        self._clock = clock
        self._interval_s = list_interval_s
        self._state = threading.Condition()
        self._ledger = _Ledger(capacity_bytes)
        self._fresh: dict[bytes, bytes | None] = {}
        self._uses: dict[bytes, float] = {}
        self._is_full = False  # a page was rejected since the last sweep began
        self._has_no_space = False  # by the store itself
        self._made_space_s = -math.inf
        self._listed_pages = 0
        self._listed_s: float | None = None  # when the last listing of this engine began (wall clock)
        self._not_before = -math.inf  # the earliest start of the next sweep
        self._closed = False
        self._errors: Counter[str] = Counter()
        self._evicted_pages = 0
        self._chains = Chains()
        self._adaptive = AdaptivePages(capacity_bytes // size) if adaptive else None
        self._backoff = Backoff(min(PAUSE_S, list_interval_s), list_interval_s)
        self._sweeps = BackgroundTask(
            "limit", self._sweep_once, backoff=self._backoff, on_error=lambda: self._count("internal"), clock=clock
        )

    def incidents(self) -> Incidents:
        """Return the errors and evictions so far."""
        with self._state:
            return Incidents(dict(self._errors), self._evicted_pages)

    def _count(self, kind: str) -> None:
        with self._state:
            self._errors[kind] += 1

    def note_uses(self, keys: Sequence[bytes]) -> None:
        """Count pages as used now."""
        now_s = self._clock.wall_s()
        with self._state:
            if len(self._uses) < _NOTES_MAX:
                self._uses.update(dict.fromkeys(keys, now_s))

    def write(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float,
        *, put: _Put, prefix: _Prefix,
    ) -> tuple[list[SetOutcome], list[str]]:
        """Store pages with `put`, as far as there is room; return their outcomes and the kinds of the errors. Rejects
        the tail of a batch that does not fit; its head stays."""
        if not self._wait_for_listing(deadline):
            return [SetOutcome.ERROR] * len(keys), ["unlisted"] * len(keys)
        outcomes: list[SetOutcome] = []
        errors: list[str] = []
        size = self.codec.frame_bytes
        while (done := len(outcomes)) < len(keys) and all(outcome.is_stored for outcome in outcomes):
            with self._state:
                fitting = self._ledger.reserve(len(keys) - done, size)
            rest, present = keys[done:], 0
            if fitting < len(rest):
                present, kinds = prefix(rest, deadline)
                errors += kinds
            if present:
                # Pages that are already stored need no room, which leaves more for those after them.
                with self._state:
                    self._ledger.release(fitting * size)
                self.note_uses(rest[:present])
                outcomes += [SetOutcome.PRESENT] * present
            elif fitting:
                end = done + fitting
                above = parent_outside(keys[done:end], keys[done - 1] if done else parent)
                found, kinds = self._store_reserved(keys[done:end], pages[done:end], above, deadline, put)
                outcomes += found
                errors += kinds
            else:
                break
        rejected = len(keys) - len(outcomes)
        self.rejection = None
        if rejected or SetOutcome.REJECTED in outcomes:
            with self._state:
                if SetOutcome.REJECTED in outcomes:
                    self._has_no_space = True
                else:
                    self._is_full = True
                    self.rejection = self._why_full()
                self._sweeps.wake(self._not_before)
        return outcomes + [SetOutcome.REJECTED] * rejected, errors

    def _why_full(self) -> str:
        ledger = self._ledger
        used = f"{format_size(ledger.used_bytes + ledger.reserved_bytes)} are stored or being written"
        if ledger.limit_bytes < self.capacity_bytes:
            room = format_size(ledger.limit_bytes)
            return f"the volume has room for {room}, and {used}; make room there, or lower free_space_floor"
        capacity = format_size(self.capacity_bytes)
        return f"capacity is {capacity}, and {used}; a sweep makes room; raise capacity"

    def _wait_for_listing(self, deadline: float) -> bool:
        until = min(deadline, self._clock() + FIRST_LISTING_WAIT_S)
        with self._state:
            if not self._ledger.is_listed:
                self._sweeps.tend()
            self._clock.wait_for(self._state, lambda: self._ledger.is_listed or self._closed, until)
            return self._ledger.is_listed

    def _store_reserved(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float, put: _Put
    ) -> tuple[list[SetOutcome], list[str]]:
        """Store pages with reserved room, and record the used bytes."""
        size, idle = self.codec.frame_bytes, 0
        outcomes: list[SetOutcome] = []
        try:
            outcomes, errors = put(keys, pages, parent, deadline)
            idle = sum(outcome in (SetOutcome.PRESENT, SetOutcome.REJECTED) for outcome in outcomes)
        finally:
            with self._state:
                # A page whose reply was lost may be stored; after an exception, all of them.
                self._ledger.commit((len(keys) - idle) * size)
                self._ledger.release(idle * size)
                for key, above, outcome in zip(keys, parents_of(keys, parent), outcomes, strict=False):
                    if outcome is SetOutcome.STORED and len(self._fresh) < _NOTES_MAX:
                        self._fresh[key] = above
                if self._ledger.used_bytes > HIGH_WATER * self._ledger.capacity_bytes:
                    self._sweeps.wake(self._not_before)
        # For a new page too: the store's clock may differ from ours, or count whole seconds.
        self.note_uses([key for key, outcome in zip(keys, outcomes, strict=True) if outcome.is_stored])
        return outcomes, errors

    def forget(self) -> None:
        """Forget the stores and uses of pages that are about to be removed."""
        with self._state:
            self._fresh.clear()
            self._uses.clear()

    def sweep_soon(self) -> None:
        """Begin a listing: removed pages make room after it."""
        self._sweeps.wake(self._not_before)

    start = sweep_soon  # the first listing

    def stop(self) -> None:
        """Reject the calls that wait for the first listing. Does not block."""
        with self._state:
            self._closed = True
            self._state.notify_all()

    def close(self) -> None:
        """End the sweeps. Waits at most a few seconds for a sweep that hangs. REQUIRES: `stop` was called."""
        if not self._sweeps.close(_CLOSE_S):
            self._count("sweep_left")
            _log.warning("limit: a request of the sweep still hangs; its thread ends when the request returns")

    # On the thread of the task

    def _sweep_once(self) -> float:
        """List the store and make room; return the time until the next sweep."""
        began_s = self._clock()
        self._not_before = began_s + min(PAUSE_S, self._interval_s)
        try:
            if self._begin():
                self._list()
                self._sweep()
                self._backoff.reset()
            elif not self._ledger.is_listed:  # learn the size from a listing, without a sweep
                with self._state:
                    self._ledger.begin_listing()
                total = sum(page.bytes for page in takewhile(lambda page: not self._closed, self._stored.pages()))
                if not self._closed:
                    self._end_listing(total)
            if self._shared is not None:
                ended_s = self._clock()
                pause_s = max(PAUSE_S_MIN, _PAUSE_DUTY * (ended_s - began_s))
                self._not_before = min(self._not_before, ended_s + pause_s)
        except BackendError as error:
            self._count("listing")
            _log.warning("limit: the store cannot be listed or swept: %s", error)
            self._not_before = self._clock() + self._backoff.next_s()
            return self._not_before
        # Random, so that engines that started together do not list together.
        return self._clock() + self._interval_s * random.uniform(0.75, 1.25)

    def _begin(self) -> bool:
        """Return True if this engine lists and sweeps now. Otherwise the size comes from the engine that does."""
        shared = self._shared
        if shared is None:
            return True
        is_ours = shared.begin_sweep(self._is_full or self._has_no_space)
        with self._state:
            self._ledger.follow(shared.swept)
            if not is_ours:
                self._is_full = self._has_no_space = False
                self._uses.clear()  # the store has them
            self._state.notify_all()
        if not is_ours:
            self._limit_to_space()
        return is_ours

    def _limit_to_space(self) -> None:
        """Lower the limit to what the volume has room for."""
        if self._shared is not None:
            free = self._shared.free_bytes()
            with self._state:
                ledger = self._ledger
                ledger.limit_bytes = max(0, min(ledger.capacity_bytes, ledger.used_bytes + free))

    def _end_listing(self, total: int) -> None:
        with self._state:
            self._ledger.end_listing(total + (0 if self._shared is None else self._shared.unpublished_bytes))
            self._state.notify_all()
        self._limit_to_space()

    def _list(self) -> None:
        """List the store. After a failure, the next listing gets the stores and uses that wait for this one."""
        with self._state:
            self._ledger.begin_listing()
            fresh, self._fresh = self._fresh, {}
            uses, self._uses = self._uses, {}
        try:
            self._list_with(fresh, uses)
        except BackendError:
            with self._state:
                self._fresh, self._uses = fresh | self._fresh, uses | self._uses
            raise

    def _list_with(self, fresh: dict[bytes, bytes | None], uses: dict[bytes, float]) -> None:
        began_s = self._clock.wall_s()
        chains, namespace = self._chains, self.codec.namespace
        total, seen = 0, set[PageId]()
        count = 0
        for listed in self._stored.pages():
            if self._closed:
                return
            self._go_on()
            count += 1
            total += listed.bytes
            is_ours = listed.namespace == namespace
            used_s = self._use_of(listed, began_s)
            if is_ours:
                used_s = max(used_s or 0.0, uses.get(listed.key, 0.0))
            page = replace(listed, used_s=used_s, identity=None)  # removed whatever has happened to it since
            if not chains.renew(page, listed.used_s):
                if len(chains) >= PAGES_MAX:
                    continue
                is_known = is_ours and page.key in fresh
                chains.add(page, fresh[page.key] if is_known else None, listed.used_s, is_unread=not is_known)
            seen.add((page.namespace, page.key))
        chains.keep(seen)
        self._listed_s, self._listed_pages = began_s, count
        self._end_listing(total)

    def _use_of(self, listed: StoredPage, began_s: float) -> float | None:
        """Return the use of a page that the listing shows, by this engine's clock: never later than the listing, and
        not before the last listing. None if the page's time has not changed since then."""
        used_s = listed.used_s
        if used_s is None or used_s == self._chains.listed_s(listed.id):
            return None  # `chains` has its use
        if self._listed_s is not None:
            used_s = max(used_s, self._listed_s)
        return min(used_s, began_s)

    def _go_on(self) -> None:
        """Show other engines that the sweep makes progress."""
        if self._shared is not None:
            self._shared.continue_sweep()

    def _sweep(self) -> None:
        removed_pages = self._make_room(self._excess())
        if self._shared is not None and not self._closed:
            with self._state:
                left_bytes = self._ledger.used_bytes - self._ledger.since_bytes
            self._shared.end_sweep(max(0, self._listed_pages - removed_pages), max(0, left_bytes))
            with self._state:
                self._ledger.know(self._shared.swept)

    def _excess(self) -> int:
        """Return how many bytes to remove; 0 or less for none."""
        with self._state:
            capacity, used = self._ledger.limit_bytes, self._ledger.used_bytes
            is_full, self._is_full = self._is_full, False
            has_no_space, self._has_no_space = self._has_no_space, False
        size, excess = self.codec.frame_bytes, 0
        if used > HIGH_WATER * capacity or is_full:
            # In a store of few pages, one page is more than the share to free.
            excess = used - max(0, min(math.floor(LOW_WATER * capacity), capacity - size))
        if has_no_space and self._clock() - self._made_space_s >= self._interval_s:
            self._made_space_s = self._clock()
            excess = max(excess, size, math.ceil(_FULL_SHARE * used))
        return excess

    def _make_room(self, excess: int) -> int:
        """Remove the least recently used pages, tails first; return how many of the listed pages are gone."""
        if excess <= 0:
            return 0
        for page in self._chains.unread():
            if self._closed:
                return 0
            self._go_on()
            header = read_header(self._stored, page)
            self._chains.read(page.id, None if header is None else parent_in(header))
        chosen = []
        for page in self._victims():
            if excess <= 0:
                break
            excess -= page.bytes
            chosen.append(page)
        gone = 0
        while chosen and not self._closed:
            some, chosen = chosen[:_REMOVE_CHUNK], chosen[_REMOVE_CHUNK:]
            removed = self._stored.remove(some)
            gone += len(some)
            self._go_on()
            for page in some:
                self._chains.discard((page.namespace, page.key))
            with self._state:
                # Includes pages that another engine's sweep has removed since this listing.
                freed = sum(page.bytes for page in some)
                self._ledger.used_bytes = max(self._ledger.since_bytes, self._ledger.used_bytes - freed)
                self._evicted_pages += removed
            self.on_evicted([page.key for page in some if page.namespace == self.codec.namespace])
        return gone

    def _victims(self) -> Iterator[StoredPage]:
        """Yield all pages in the order of eviction. The adaptive policy learns only from listings, not from the uses of
        this engine, whose pages it would prefer. REQUIRES: the headers were read."""
        chains, adaptive = self._chains, self._adaptive
        if adaptive is None:
            return chains.tails_first()
        for prompt in chains.uses():
            adaptive.use_prompt([b"".join(where) for where in prompt])

        def parent_of(name: bytes) -> bytes | None:
            above = chains.parent((name[:-PAGE_KEY_BYTES], name[-PAGE_KEY_BYTES:]))
            return None if above is None else b"".join(above)

        return chains.tails_first(lambda where: adaptive.keeps(b"".join(where), parent_of))

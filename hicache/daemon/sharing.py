"""A store that many clients share: the daemon's host pool and single flight in front of one namespace of a store.

Invariant: with a pool, the answers are those of the pool; the store behind it only adds pages and persistence. So a
store that is full, fails, hangs or is not open is never worse than no store.

Meaning of outcomes, with a pool: A HIT is a copy of verified bytes, from the pool or from the store. A page that the
pool does not have and that cannot be read from the store is a MISS. A page enters the pool because it was handed over,
before the store gets it, in place of the least recently used pages if necessary. STORED and PRESENT mean that the pool
or the store has taken the page; it survives the daemon only if the store took it. A page that neither has room for is
REJECTED. Failures of the store are in the statistics of the store, and callers do not see them, except for those of
removals: the page may come back. Each page that a lookup or a read did not get is counted by the reason.

Without a pool (capacity 0) all outcomes and errors are those of the store; while a wanted store is not open, each call
fails with `unavailable`. Without both, nothing is stored. A deleted page leaves the pool first, and calls in flight do
not put it back.

Locking design: `_lock` guards the flights and the counts. It is taken before the lock of the pool, and is held for
lookups, not while bytes are moved or a store is called.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .. import tracing
from ..backends.base import BackendStatistics, Direction, GetOutcome, SetOutcome, Usage
from ..backends.calls import Call, Calls, Verb, parent_outside, parents_of, runs
from ..backends.compose.levels import interleaved_prefix
from ..backends.errors import ErrorKind, StoreError
from ..backends.missed import DAMAGED, answer_of, loss_of
from ..backends.storage import Storage, StoreGroup
from ..backends.store import Store
from ..clock import SYSTEM_CLOCK, Clock
from ..frame import FrameCodec, PageBuffer
from .flights import Arrival, Flight, Waiter
from .pool import DaemonPool, PooledPage
from .shared_slot import Attached, SharedSlot
from .statistics import SharingStatistics
from .verified import VerifiedPages, parent_of


class SharedStore(StoreGroup):
    """See the module's docstring. Thread-safe. `slot` has the store behind the pool, which keeps its pages when the
    store is replaced; `inner` is the first store, None for only the pool. `label` is for messages. `pages` are its
    pages in the pool, to be pinned and counted. Raises InvalidInput if `inner` is of another namespace or page size."""

    def __init__(
        self, codec: FrameCodec, pool: DaemonPool, inner: Storage | None, *, label: str = "",
        slot: SharedSlot | None = None, clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._counted = Calls(codec.frame_bytes, clock)
        super().__init__(codec, self._counted)
        self._clock = clock
        self.slot = slot or SharedSlot(codec, clock=clock)
        self._alone, self._had_store = Attached(None), False  # while no store is open
        self.pages = VerifiedPages(codec, pool, label)
        self._pool = pool
        self._space = self.pages.space
        self._accounts = self._space.accounts
        self.slot.on_evicted = self._accounts.evicted
        if inner is not None:
            self.slot.start(inner)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @property
    def stores(self) -> tuple[Store, ...]:
        """See StoreGroup. Empty while no store is open."""
        return tuple(store for backend in self.slot.open_backends() for store in backend.stores)

    def statistics(self) -> BackendStatistics:
        """Return the counts of this store's callers, with the errors, the damage and the evictions of all stores that
        were behind it."""
        return self.slot.with_totals(self._counted.statistics())

    def sharing(self) -> SharingStatistics:
        """Return the sources of readers' pages. Does not block."""
        missed, names = self._accounts.counts(), ("pool_hits", "store_hits", "shared_reads", "shared_writes")
        with self._lock:
            counts = {name: self._counts[name] for name in names}
        return SharingStatistics(**counts, misses=sum(missed.values()), missed=missed)

    @property
    def stands_in(self) -> bool:
        """True if a pool answers for the store when that fails."""
        return self._pool.capacity_bytes > 0

    @contextlib.contextmanager
    def _using(self, report: list[str] | None = None) -> Iterator[Attached]:
        """Yield the store for one call, which keeps it even if it is replaced. `report` gets the errors of the store,
        unless the pool stands in for it. Raises StoreError if there is neither a pool nor the wanted store."""
        entry = self.slot.enter()
        if entry is None:
            if self.slot.is_awaited and not self.stands_in:
                raise StoreError(ErrorKind.UNAVAILABLE, "the store is not open yet")
            yield replace(self._alone, errors=["guard_open"] * (self._had_store or self.slot.is_awaited))
            return
        self._had_store, attached = True, replace(entry.attached, errors=[])
        try:
            yield attached
        finally:
            self.slot.leave(entry)
            if report is not None and not self.stands_in:
                report += attached.errors

    def _tally(self, **pages: int) -> None:
        with self._lock:
            self._counts.update(pages)

    # Lookups

    def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
        """See Verbs. A page counts if the pool or the store has it. The pages behind the prefix are misses."""
        there = [*self._pool.has(self._space, keys), False]
        with self._using(call.report) as attached, tracing.span("pool.exists", pages=len(keys)) as span:
            looks = [lambda found: there.index(False, found) - found]
            inner, report = attached.backend, attached.errors
            if inner is not None:
                looks.append(lambda found: inner.batch_exists(keys[found:], deadline=call.deadline, errors=report))
            found = interleaved_prefix(len(keys), looks)
            tracing.note(span, hit_pages=found)
        pooled = {key for key, is_there in zip(keys, there, strict=False) if is_there}
        self._accounts.missing(keys[found:], answer_of(attached.errors, "lookup"), pooled)
        return found

    def _has(self, call: Call, keys: Sequence[bytes]) -> list[bool]:
        """See Verbs. A page counts if the pool or the store has it. The other pages are misses."""
        found = self._pool.has(self._space, keys)
        missing = [position for position, there in enumerate(found) if not there]
        with self._using(call.report) as attached:
            if missing and attached.backend is not None:
                asked = [keys[p] for p in missing]
                answers = attached.backend.batch_has(asked, deadline=call.deadline, errors=attached.errors)
                for position, there in zip(missing, answers, strict=True):
                    found[position] = there
        lost = [key for key, there in zip(keys, found, strict=True) if not there]
        self._accounts.missing(lost, answer_of(attached.errors, "lookup"))
        return found

    def _touch(self, call: Call, keys: list[bytes]) -> list[bytes]:
        """See Verbs. Applies to pool and store: a page that is hot in one of them does not age in the other.

        A page that only the pool has is not missing. While no call reaches the store, pages that the pool does not have
        count as missing, so that engines hand them over again.
        """
        present = self._pool.touch(self._space, keys)
        absent = [key for key, there in zip(keys, present, strict=True) if not there]
        with self._using(call.report) as attached:
            inner = attached.backend
            if inner is not None and (inner.may_pass(Direction.WRITE) or not self.stands_in):
                missing = set(inner.batch_touch(keys, deadline=call.deadline, errors=attached.errors))
                absent = [key for key in absent if key in missing]
        return absent

    # Reads

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        """See Verbs. Pages come from the pool, from the read of another call, or from the store."""
        with self._using(call.report) as attached, tracing.span("pool.get", pages=len(keys)) as span:
            outcomes = (read := _Read(self, attached, call, keys, pages)).run()
            tracing.note(span, **read.counts)
        lost = dict.fromkeys(key for key, one in zip(keys, outcomes, strict=True) if one is not GetOutcome.HIT)
        self._accounts.missing([*lost], answer_of(attached.errors + call.errors, "read"))
        return outcomes

    def warm(self, keys: Sequence[bytes], deadline: float) -> None:
        """Read pages from the store into free room of the pool, without counting a reader. Evicts nothing. Blocks."""
        if keys:
            self._call(Call(Verb.EXISTS, len(keys), 0, deadline), None, self._warm, keys)

    def _warm(self, call: Call, keys: Sequence[bytes]) -> None:
        with self._using() as attached:
            _Read(self, attached, call, keys, [self.codec.scratch_frame() for _ in keys], is_warmup=True).run()

    # Stores

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        with self._using(call.report) as attached, tracing.span("pool.set", pages=len(keys)):
            outcomes = _Write(self, attached, call, keys, pages, parent).run()
        self._pool.use(self._space, keys)
        return outcomes

    # Removals

    @contextlib.contextmanager
    def _deleting(self, attached: Attached, keys: Sequence[bytes] | None) -> Iterator[set[bytes]]:
        """Surround a block that removes pages from the store: keep them out of the pool, and stop later calls from
        joining flights that may bring them back. Yields the keys that were in the pool."""
        with self._pool.deleting(self._space, keys) as there:
            self._detach(attached, keys)
            try:
                yield there
            finally:
                self._detach(attached, keys)

    def _detach(self, attached: Attached, keys: Sequence[bytes] | None) -> None:
        with self._lock:
            attached.reads.detach(keys)
            attached.writes.detach(keys)

    def _delete(self, call: Call, keys: list[bytes]) -> int:
        """See Verbs. A page in the pool and in the store counts once."""
        with self._using() as attached, self._deleting(attached, keys) as there:
            inner, removed = attached.backend, len(there)
            if inner is not None:
                inner.delete([key for key in keys if key in there], deadline=call.deadline, errors=call.report)
                rest = [key for key in keys if key not in there]
                removed += inner.delete(rest, deadline=call.deadline, errors=call.report)
        return removed

    def _clear(self, call: Call) -> int:
        """See Verbs. Returns the larger count of the pool and the store."""
        with self._using() as attached, self._deleting(attached, None) as there:
            inner = attached.backend
            removed = 0 if inner is None else inner.clear(deadline=call.deadline, errors=call.report)
            self._accounts.cleared()
            return max(len(there), removed)

    # The whole

    def _measure(self) -> Usage:
        """See Verbs. The store's usage; without a store, that of the pool."""
        with self._using() as attached:
            if attached.backend is not None:
                return attached.backend.usage()
        return self._pool.usage(self._space, self.codec.frame_bytes)

    def close(self) -> None:
        """See Verbs. The pages of this namespace leave the pool unless it is open elsewhere."""
        with self._close_lock:
            if self._counted.close():
                self.slot.end(0.0)
                self.slot.close()
                self._pool.close(self._space)


class _Read:
    """One `get` of a shared store. Each key is read once; repeated keys are copied at the end. A warm-up's pages enter
    the pool although no reader waits for them, and are not counted."""

    def __init__(
        self, store: SharedStore, attached: Attached, call: Call, keys: Sequence[bytes],
        pages: Sequence[PageBuffer], *, is_warmup: bool = False,
    ) -> None:
        self._store = store
        self._pool, self._space = store._pool, store._space
        self._inner, self._flights, self._errors = attached.backend, attached.reads, attached.errors
        self._keys, self._pages = keys, pages
        self._call, self._deadline, self._is_warmup = call, call.deadline, is_warmup
        self._outcomes: dict[bytes, GetOutcome] = {}
        self._waiter: Waiter[Arrival] = Waiter(pages, store._clock)
        self._failed: list[int] = []  # positions whose flights failed in other calls
        self.counts: Counter[str] = Counter()

    def run(self) -> list[GetOutcome]:
        first: dict[bytes, int] = {}
        for position, key in enumerate(self._keys):
            first.setdefault(key, position)
        self._since = 0 if self._is_warmup else self._pool.now()  # no page was used before 0, so none is evicted
        leads: deque[tuple[int, Flight[Arrival]]] = deque()
        with self._store._lock:
            self._deletions = self._space.deletions
            pooled = dict(zip(first, self._pool.hold(self._space, list(first)), strict=True))
            for key, position in first.items():
                is_wanted = pooled[key] is None and self._inner is not None
                if is_wanted and (flight := self._flights.join(key, position, self._waiter)) is not None:
                    leads.append((position, flight))
        self._unpooled = [key for key, page in pooled.items() if page is None]
        try:
            self._copy_pooled({first[key]: page for key, page in pooled.items() if page is not None})
            if self._inner is None:
                for key in self._unpooled:
                    self._settle(first[key], GetOutcome.MISS, "")
            else:
                self._lead(self._inner, leads)
                self._follow(self._inner)
        finally:
            for position, flight in leads:  # if this call ends with an exception
                self._land(position, flight, GetOutcome.ERROR, None)
            for _, arrival in self._waiter.end():
                self._release(arrival.page)
        return self._finish(first)

    def _copy_pooled(self, pooled: dict[int, PooledPage]) -> None:
        try:
            self._pool.use(self._space, [self._keys[position] for position in pooled])
            for position, page in pooled.items():
                if self._store._clock() >= self._deadline:
                    break
                self._store.pages.copy_out(page, self._pages[position])
                self._settle(position, GetOutcome.HIT, "pool_hits")
        finally:
            self._pool.release(self._space, list(pooled.values()))

    def _settle(self, position: int, outcome: GetOutcome, source: str) -> None:
        self._outcomes[self._keys[position]] = outcome
        self.counts[source if outcome is GetOutcome.HIT else "misses"] += outcome is not GetOutcome.ERROR

    def _read(self, inner: Storage, positions: Sequence[int]) -> list[GetOutcome]:
        keys, pages = [self._keys[p] for p in positions], [self._pages[p] for p in positions]
        answers = inner.batch_get(keys, pages, deadline=self._deadline, errors=self._errors)
        for position, answer in zip(positions, answers, strict=True):
            self._settle(position, answer, "store_hits")
            if answer is GetOutcome.CORRUPT:
                self._store._accounts.left([self._keys[position]], DAMAGED)
        return answers

    def _lead(self, inner: Storage, leads: deque[tuple[int, Flight[Arrival]]]) -> None:
        """Read the pages that other calls are not reading, and pass them on."""
        for answer in self._read(inner, [position for position, _ in leads]):
            (position, flight), entry = leads[0], None
            if answer is GetOutcome.HIT:
                entry = self._store.pages.admit(
                    flight.key, self._pages[position], parent_of(self._pages[position]),
                    since=self._since, deletions=self._deletions, is_wanted=self._is_warmup or bool(flight.waiters),
                )
            leads.popleft()
            self._land(position, flight, answer, entry)

    def _land(self, position: int, flight: Flight[Arrival], answer: GetOutcome, entry: PooledPage | None) -> None:
        with self._store._lock:
            waiters = self._flights.land(flight)
        for waiter, place in waiters:
            if entry is not None:
                self._pool.hold_again(entry)
                if not waiter.give(place, Arrival(answer, entry)):
                    self._release(entry)
            elif answer is GetOutcome.HIT:
                with waiter.copying() as target:
                    if target is None:
                        continue
                    is_whole = self._store.pages.copy(flight.key, self._pages[position], target[place])
                    waiter.give(place, Arrival(answer if is_whole else GetOutcome.ERROR, None))
            else:
                waiter.give(place, Arrival(answer, None))
        self._release(entry)

    def _release(self, entry: PooledPage | None) -> None:
        self._pool.release(self._space, [] if entry is None else [entry])

    def _follow(self, inner: Storage) -> None:
        """Use the pages that other calls have read; read those that failed there."""
        while arrived := self._waiter.wait(self._deadline):
            self._take(arrived)
        self._take(self._waiter.end())
        if self._failed and self._store._clock() < self._deadline:
            self._read(inner, self._failed)

    def _take(self, arrived: Sequence[tuple[int, Arrival]]) -> None:
        for position, arrival in arrived:
            if arrival.outcome is GetOutcome.ERROR:
                self._failed.append(position)
            elif arrival.outcome is GetOutcome.HIT:
                if arrival.page is not None:
                    self._store.pages.copy_out(arrival.page, self._pages[position])
                    self._release(arrival.page)
                self._settle(position, GetOutcome.HIT, "shared_reads")
            else:  # a damaged page was removed: it counts as corrupt only for the call that found it
                self._settle(position, GetOutcome.MISS, "")

    def _finish(self, first: dict[bytes, int]) -> list[GetOutcome]:
        if self._store.stands_in:
            for key in self._unpooled:
                if self._outcomes.get(key, GetOutcome.ERROR) is GetOutcome.ERROR:
                    self._errors += [] if key in self._outcomes else [ErrorKind.DEADLINE]
                    self._settle(first[key], GetOutcome.MISS, "")
        self._call.errors += [ErrorKind.DEADLINE] * sum(key not in self._outcomes for key in self._keys)
        outcomes = [self._outcomes.get(key, GetOutcome.ERROR) for key in self._keys]
        for position, key in enumerate(self._keys):
            if first[key] != position and outcomes[position] is GetOutcome.HIT:
                self._store.pages.copy(key, self._pages[first[key]], self._pages[position])
        hits = [key for key in first if self._outcomes.get(key) is GetOutcome.HIT]
        (self._pool.use if self._is_warmup else self._pool.hit)(self._space, hits)
        if not self._is_warmup:
            self._store._tally(**self.counts)
        return outcomes


class _Write:
    """One `put` of a shared store: first into the pool, then into the store."""

    def __init__(
        self, store: SharedStore, attached: Attached, call: Call, keys: Sequence[bytes],
        pages: Sequence[PageBuffer], parent: bytes | None,
    ) -> None:
        self._store = store
        self._pool, self._space = store._pool, store._space
        self._inner, self._flights, self._errors = attached.backend, attached.writes, attached.errors
        self._keys, self._pages = keys, pages
        self._parents = parents_of(keys, parent)
        self._call, self._deadline = call, call.deadline
        self._since = self._pool.now()  # pages used from now on are not evicted by this call
        self._pool.offer(self._space, keys, parent)
        self._outcomes: dict[int, SetOutcome] = {}
        self._in_pool: dict[int, SetOutcome | ErrorKind] = {}
        self._waiter: Waiter[bool] = Waiter((), store._clock)

    def run(self) -> list[SetOutcome]:
        first: dict[bytes, int] = {}
        leads: dict[int, Flight[bool]] = {}
        with self._store._lock:
            self._deletions = self._space.deletions
            for position, key in enumerate(self._keys):
                is_first = first.setdefault(key, position) == position
                if is_first and (flight := self._flights.join(key, position, self._waiter)) is not None:
                    leads[position] = flight
        try:
            self._put_in_pool(list(first.values()))
            for run in runs(list(leads)):
                self._put(run)
                for position in range(run.start, run.stop):
                    self._land(leads.pop(position), self._outcomes[position].is_stored)
            self._follow()
        finally:
            for flight in leads.values():  # if this call ends with an exception
                self._land(flight, False)
            self._waiter.end()
        for position in first.values():
            if position not in self._outcomes:  # its flight in another call has not ended in time
                self._settle(position, ErrorKind.DEADLINE)
        found = [(self._outcomes[first[key]], first[key] != position) for position, key in enumerate(self._keys)]
        return [SetOutcome.PRESENT if is_again and one.is_stored else one for one, is_again in found]

    def _put_in_pool(self, positions: Sequence[int]) -> None:
        """Put pages into the pool. A page without room ends this, because a lookup would not find the rest."""
        is_full = not self._store.stands_in
        for position in positions:
            if self._store._clock() >= self._deadline:
                self._in_pool[position] = ErrorKind.DEADLINE
            elif self._pool.has(self._space, [self._keys[position]])[0]:
                self._in_pool[position] = SetOutcome.PRESENT
            elif is_full:
                self._in_pool[position] = SetOutcome.REJECTED
            else:
                self._in_pool[position] = answer = self._enter(position)
                is_full = answer is SetOutcome.REJECTED
        self._pool.use(self._space, self._keys)

    def _enter(self, position: int) -> SetOutcome | ErrorKind:
        key = self._keys[position]
        entry = self._pool.reserve(self._space, key, since=self._since, deletions=self._deletions, is_wanted=True)
        if entry is None:
            return SetOutcome.REJECTED
        if not self._store.pages.fill(entry, self._pages[position], self._parents[position]):
            return ErrorKind.CHECKSUM
        if self._pool.publish(self._space, entry):
            return SetOutcome.STORED
        # If it is not there, it was deleted at the same time.
        return SetOutcome.PRESENT if self._pool.has(self._space, [key])[0] else ErrorKind.CONFLICT

    def _put(self, run: slice) -> None:
        """Put a run of pages into the store."""
        answers = [SetOutcome.ERROR] * (run.stop - run.start)
        if self._inner is not None:
            before = parent_outside(self._keys[run], self._parents[run.start])
            answers = self._inner.batch_set(
                self._keys[run], self._pages[run], parent=before, deadline=self._deadline, errors=self._errors
            )
        for position, answer in enumerate(answers, run.start):
            self._settle(position, answer)
            if self._inner is not None or self._errors:
                self._pool.losing(self._space, self._keys[position], loss_of(answer, self._errors))

    def _settle(self, position: int, answer: SetOutcome | ErrorKind) -> None:
        """Set the outcome of a page with this answer of the store: if it did not take the page, that of the pool."""
        is_stored = isinstance(answer, SetOutcome) and answer.is_stored
        if not is_stored and (self._store.stands_in or self._inner is None):
            answer = self._in_pool[position]
        if isinstance(answer, ErrorKind):
            self._call.errors.append(answer)
            answer = SetOutcome.ERROR
        self._outcomes[position] = answer

    def _land(self, flight: Flight[bool], is_stored: bool) -> None:
        with self._store._lock:
            waiters = self._flights.land(flight)
        for waiter, place in waiters:
            waiter.give(place, is_stored)

    def _follow(self) -> None:
        """Wait for pages that other calls are writing; write those that failed there."""
        failed: list[int] = []
        while answers := self._waiter.wait(self._deadline):
            for position, is_stored in answers:
                if is_stored:
                    self._outcomes[position] = SetOutcome.PRESENT
                    self._store._tally(shared_writes=1)
                else:
                    failed.append(position)
        for run in runs(sorted(failed)):
            self._put(run)

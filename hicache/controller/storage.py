"""StorageExecutor: the threads that look up prefixes in storage, read pages into reserved frames, and store pages.

The answers of a backend are checked before they count, because a wrong count would expose pages that were never filled.

Locking design: `look_up`, `read` and `_store_or_touch` run on worker threads, several at once. They write the fields of
their operation (see `operations`) and `broken_chains` of its store (see `gate`), append to `_lost`, a deque with atomic
operations, and return finished operations through one `SimpleQueue`. `read_apart` runs on any thread; it changes
`_apart`, a set with atomic operations. The scheduler thread calls every other method.
"""

from __future__ import annotations

import math
import queue
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from .. import tracing
from ..backends.base import Direction, GetOutcome, SetOutcome
from ..backends.slot import OpenBackend
from ..backends.storage import Storage
from ..clock import Clock
from ..config import TransferConfig
from ..keys import split_keys
from ..supervised import SupervisedPool, WorkerFactory
from ..tiers import HostPool
from .gate import StorageGate
from .operations import LookupOperation, ReadOperation, StoreOperation, TouchOperation

# Interval of the check for dead and stuck workers; a poll in between costs one clock reading.
SUPERVISE_EVERY_S = 0.1
# A call counts as stuck this long after its deadline: backends check their deadline between pages.
STUCK_GRACE_S = 2.0
# Enough failed chains: more operations do not fit into a queue of small pages.
_BROKEN_CHAINS_MAX = 4096
# Pages of one touch call: a key takes a hundred bytes on its way to a server.
_TOUCHED_AT_ONCE = 1024
# Bound of the lost pages that the scheduler has not taken yet. Beyond it the oldest are dropped: a later touch reports
# them again.
_LOST_MAX = 65_536
# The polling interval for reads of other threads at the end.
_APART_WAIT_S = 0.001
# The scheduler takes at most this many lost pages per step, at a microsecond or less each.
_LOST_PER_STEP = 64

Operation: TypeAlias = LookupOperation | ReadOperation | StoreOperation | TouchOperation
_Beat: TypeAlias = Callable[[], None]


# Reads show that a store is one disk if so many alone and beside writes differ by this factor in their medians.
_PAGE_TIMES = 7
_SLOWER = 1.25


class SharedTime:
    """Divides time among the reads in flight: while n of them run, each is charged 1/n of it. A call that has run for
    `patience_s` seconds is hung, and does not count any more.

    Writes give way to reads if reads are slower beside writes than alone, as on one disk.

    Locking design: one condition guards all fields; workers hold it for a microsecond. It is notified when no read is
    in flight any more.
    """

    def __init__(self, clock: Clock, patience_s: float) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._idle = threading.Condition()
        self._calls: dict[ReadOperation, float] = {}  # `_shared_s` when each began, in this order
        self._shared_s = 0.0  # what a call that has always run would have been charged
        self._counted_s = -math.inf
        self._writes = 0  # in flight
        self._write_s = 0.0  # the time of the last write
        self._beside = set[ReadOperation]()  # reads in flight that began beside a write
        # Charged seconds per page of the last reads: alone, and beside writes.
        self._page_s: dict[bool, deque[float]] = {False: deque(maxlen=_PAGE_TIMES), True: deque(maxlen=_PAGE_TIMES)}

    def begin(self, read: ReadOperation) -> None:
        """Note that a call of `read` has begun at `called_s`."""
        with self._idle:
            self._count(read.called_s)
            self._calls[read] = self._shared_s
            if self._writes:
                self._beside.add(read)

    def end(self, read: ReadOperation, now_s: float, pages: int) -> None:
        """Add the time of the call, for `pages` pages, to `read.seconds`, and its share, or all of it if it has hung,
        to `charged_s`."""
        seconds = now_s - read.called_s
        with self._idle:
            self._count(now_s)
            shared_s = self._calls.pop(read, None)
            charged_s = seconds if shared_s is None else self._shared_s - shared_s
            read.seconds += seconds
            read.charged_s += charged_s
            is_beside = read in self._beside
            self._beside.discard(read)
            if is_beside == (self._writes > 0):  # all of it, as far as is known
                self._page_s[is_beside].append(charged_s / pages)
            if not self._calls:
                self._idle.notify_all()

    @contextmanager
    def write(self, until_s: float) -> Iterator[None]:
        """Count a write in flight. On one disk it gives way to reads first, for as long as the last write took: so
        writing gets half of the time. Waits at most until `until_s`."""
        with self._idle:
            if self._is_one_disk():
                until_s = min(until_s, self._clock() + self._write_s)
                self._clock.wait_for(self._idle, lambda: not self._calls, until_s)
            self._writes += 1
            began_s = self._clock()
        try:
            yield
        finally:
            with self._idle:
                self._writes -= 1
                self._write_s = self._clock() - began_s

    def _is_one_disk(self) -> bool:
        alone, beside = self._page_s[False], self._page_s[True]
        enough = min(len(alone), len(beside)) == _PAGE_TIMES
        return enough and statistics.median(beside) > _SLOWER * statistics.median(alone)

    def _count(self, now_s: float) -> None:
        if self._calls:
            self._shared_s += (now_s - self._counted_s) / len(self._calls)
        self._counted_s = now_s
        while self._calls and (oldest := next(iter(self._calls))).called_s < now_s - self._patience_s:
            del self._calls[oldest]


class StorageExecutor:
    """Runs operations on storage. Without an open `backend` there are no threads until `replace`, and no operation may
    be submitted.

    `workers` makes a pool of threads for each kind of operation. With `hears_losses`,
    `lost` returns pages that storage lacks. Registers the memory of `host` with each backend, also in the constructor,
    which may block. Raises BackendError from a backend without a guard; a guard counts the error instead.
    """

    def __init__(
        self, backend: Storage | None, host: HostPool, config: TransferConfig, workers: WorkerFactory, clock: Clock, *,
        hears_losses: bool = True,
    ) -> None:
        self.pools: dict[type[Operation], SupervisedPool[Any]] = {}
        self.touched_pages = 0
        self._lost: deque[bytes] = deque(maxlen=_LOST_MAX)
        self._hears_losses = hears_losses
        self._apart: set[ReadOperation] = set()  # in flight on threads of callers
        self._reading = SharedTime(clock, config.storage_deadline + STUCK_GRACE_S)
        self._touch: TouchOperation | None = None  # the last TouchOperation, until it has ended
        self.gate = StorageGate(host.memory, workers, clock, self._lost.extend if hears_losses else None)
        self._host = host
        self._config = config
        self._workers = workers
        self._clock = clock
        self._next_supervision = -math.inf
        self._finished: queue.SimpleQueue[Operation] = queue.SimpleQueue()
        if backend is not None:
            self.gate.start(backend)
            self._start()

    def _start(self) -> None:
        config = self._config
        for kind, name, threads, handle in (
            (LookupOperation, "prefetch", config.lookup_workers, self.look_up),
            (ReadOperation, "io", config.io_workers, self.read),
            (StoreOperation, "backup", config.backup_workers, self._store_or_touch),
        ):
            self.pools[kind] = self._workers(
                name, threads, handle=handle, fail=_fail, acknowledge=self._finished.put,
                patience_s=config.storage_deadline + STUCK_GRACE_S, clock=self._clock,
            )

    def replace(self, open_backend: OpenBackend | None) -> None:
        """Retire the backend in use, if any, and open another one (None: none). Does not block."""
        if not self.pools and open_backend is not None:
            self._start()
        self.gate.replace(open_backend)

    def submit(self, operation: Operation) -> None:
        """Queue an operation for its workers. `drain` returns it when it has ended, unless it is a touch."""
        self.pools[StoreOperation if isinstance(operation, TouchOperation) else type(operation)].submit(operation)

    def touch(self, runs: Sequence[bytes]) -> bool:
        """See `HiCacheController.touch`."""
        if self._touch is not None and self._touch.storage is self.gate.storage:
            return False
        self._touch = TouchOperation(runs, storage=self.gate.enter())
        self.submit(self._touch)
        return True

    def supervise(self) -> None:
        """Replace dead or hung workers, and continue to open and close backends. Call it once per step."""
        if not self.pools:
            return
        time_s = self._clock()
        if time_s >= self._next_supervision:
            self._next_supervision = time_s + SUPERVISE_EVERY_S
            for pool in self.pools.values():
                pool.supervise()
            self.gate.slot.advance()

    @property
    def any_finished(self) -> bool:
        """True if `drain` or `lost` would return something."""
        return bool(self._lost) or not self._finished.empty()

    def lost(self) -> list[bytes]:
        """Remove and return keys of pages that storage lacks, a limited number per call."""
        lost = self._lost
        return [lost.popleft() for _ in range(min(_LOST_PER_STEP, len(lost)))] if lost else []

    def drain(self) -> list[LookupOperation | ReadOperation | StoreOperation]:
        """Return the operations that have ended since the last call, and mark them as ended."""
        # Take only the current entries: workers may add faster than this loop drains.
        operations: list[LookupOperation | ReadOperation | StoreOperation] = []
        for _ in range(self._finished.qsize()):
            operation = self._finished.get_nowait()
            operation.ended = True
            if isinstance(operation, TouchOperation):
                self.gate.slot.leave(operation.storage)
                self.touched_pages += operation.pages
                self._touch = None if operation is self._touch else self._touch
            else:
                operations.append(operation)
        return operations

    def finish(self, store: StoreOperation) -> None:
        """Let `drain` return a store that no worker handles here."""
        self._finished.put(store)

    def close(self, deadline: float) -> bool:
        """End all threads after their queued operations; blocks at most until `deadline`. Return False if a thread
        still runs."""
        ended = True
        for pool in self.pools.values():
            ended = pool.close(max(0.0, deadline - self._clock())) and ended
        while self._apart and self._clock() < deadline:
            self._clock.sleep(_APART_WAIT_S)
        opening_ended = self.gate.slot.end(max(0.0, deadline - self._clock()))
        return ended and not self._apart and self.gate.slot.close() and opening_ended

    # On the workers

    def look_up(self, lookup: LookupOperation, beat: _Beat) -> None:
        """Hash the page keys batch by batch and look up the longest stored prefix."""
        storage, page_size, batch = lookup.storage, self._host.shape.tokens, self._config.storage_batch_pages
        pages = lookup.key.pages(page_size)
        with tracing.span("lookup", lookup.context, pages=pages - lookup.start_page) as span:
            prior = lookup.prior if isinstance(lookup.prior, bytes) else lookup.prior.keys()[-1]
            for start in range(lookup.start_page, pages, batch):
                if self._is_over(lookup):
                    break
                beat()
                keys = lookup.key.page_keys(page_size, prior, start, min(start + batch, pages))
                prior = keys[-1]
                lookup.keys += keys
                lookup.called_s = self._clock()
                deadline = self._deadline(lookup.called_s + lookup.call_s)
                found = storage.backend.batch_exists(keys, deadline=deadline)
                lookup.called_s = math.inf
                lookup.hit_pages += found
                if found < len(keys):
                    if self._clock() >= deadline:  # then the store may not have answered
                        del lookup.keys[lookup.hit_pages :]
                    break
            tracing.note(span, hit_pages=lookup.hit_pages)

    def read(self, read: ReadOperation, beat: _Beat) -> None:
        """Read batch by batch. Stop at the first page that is not a hit."""
        backend, batch = read.storage.backend, self._config.storage_batch_pages
        with tracing.span("read", read.context, pages=len(read.host_pages)) as span:
            for start in range(0, len(read.host_pages), batch):
                if self._is_over(read):
                    break
                beat()
                keys = read.keys[start : start + batch]
                frames = self._host.frames(read.host_pages[start : start + batch])
                read.called_s = began_s = self._clock()
                self._reading.begin(read)
                try:
                    outcomes = backend.batch_get(keys, frames, deadline=self._deadline(began_s + read.call_s))
                finally:
                    self._reading.end(read, self._clock(), len(keys))
                read.called_s = math.inf
                hits = 0
                while hits < len(keys) and outcomes[hits] is GetOutcome.HIT:
                    if read.codec is not None:  # one that was compressed in storage has no tag
                        read.codec.ensure_tag(keys[hits], frames[hits])
                    hits += 1
                read.pages_here = start + hits
                if hits < len(keys):
                    if outcomes[hits] in (GetOutcome.MISS, GetOutcome.CORRUPT):
                        read.lacks = outcomes[hits]
                        self._note_lost(read.keys[start + hits :])
                    break
            tracing.note(span, hit_pages=read.pages_here, bytes=read.pages_here * self._host.frame_bytes)

    def read_apart(self, read: ReadOperation) -> None:
        """Make a read that was not submitted, on the caller's thread, and leave its store. Blocks. Raises as the store,
        and then the pages before it have arrived."""
        self._apart.add(read)
        try:
            self.read(read, lambda: None)
        finally:
            self._apart.discard(read)
            self.gate.slot.leave(read.storage)

    def _store_or_touch(self, operation: StoreOperation | TouchOperation, beat: _Beat) -> None:
        if isinstance(operation, TouchOperation):
            self.report_uses(operation, beat)
        else:
            self.store(operation, beat)

    def report_uses(self, touch: TouchOperation, beat: _Beat) -> None:
        """Touch batch by batch. If storage lacks a page, this page and the rest of its run are lost."""
        storage, runs = touch.storage, [split_keys(run) for run in touch.runs]
        keys = [key for run in runs for key in run]
        missing: set[bytes] = set()
        for start in range(0, len(keys), _TOUCHED_AT_ONCE):
            deadline = self._deadline(storage.until[Direction.WRITE])
            if self._clock() >= deadline:
                break
            beat()
            some = keys[start : start + _TOUCHED_AT_ONCE]
            missing.update(storage.backend.batch_touch(some, deadline=deadline))
            touch.pages += len(some)
        for run in runs if missing else ():
            first = next((number for number, key in enumerate(run) if key in missing), len(run))
            self._note_lost(run[first:])

    def _note_lost(self, keys: Sequence[bytes]) -> None:
        if self._hears_losses:
            self._lost.extend(keys)

    def store(self, store: StoreOperation, beat: _Beat) -> None:
        """Store batch by batch, head first. A page that cannot be stored ends the operation, and also later operations
        that continue its chain: no lookup could reach their pages."""
        if self._clock() >= store.storage.until[Direction.WRITE]:
            return
        broken, complete = store.storage.broken_chains, False
        try:
            complete = self._head_is_stored(store, beat) and self._store_batches(store, beat)
        finally:
            last_key = store.chain.keys()[-1]
            if complete:
                broken.pop(last_key, None)
            else:
                broken[last_key] = None
                while len(broken) > _BROKEN_CHAINS_MAX:
                    broken.pop(next(iter(broken)), None)
        store.complete = complete

    def _head_is_stored(self, store: StoreOperation, beat: _Beat) -> bool:
        """Return True if the head of the chain is stored. Looks it up only if its store has failed here: another engine
        may have stored it since."""
        storage = store.storage
        if store.begins_prompt or not storage.broken_chains:
            return True
        parent = store.chain.prior_key()
        if parent not in storage.broken_chains:
            return True
        beat()
        if storage.backend.batch_exists([parent], deadline=self._deadline()) != 1:
            return False
        storage.broken_chains.pop(parent, None)
        return True

    def _store_batches(self, store: StoreOperation, beat: _Beat) -> bool:
        storage, batch, chain_keys = store.storage, self._config.storage_batch_pages, store.chain.keys()
        parent = None if store.begins_prompt else store.chain.prior_key()
        for start in range(0, len(store.host_pages), batch):
            keys = chain_keys[start : start + batch]
            frames = self._host.frames(store.host_pages[start : start + batch])
            beat()
            if store.is_sealed and _any_damage(store, start, keys, frames):
                return False
            with self._reading.write(storage.until[Direction.WRITE]):
                beat()
                deadline = self._deadline(storage.until[Direction.WRITE])
                if self._clock() >= deadline:
                    return False
                outcomes = storage.backend.batch_set(keys, frames, parent=parent, deadline=deadline)
            store.stored_pages += outcomes.count(SetOutcome.STORED)
            if not all(outcome.is_stored for outcome in outcomes):
                store.rejected = SetOutcome.REJECTED in outcomes
                return False
            if store.codec is not None:  # the store has not sealed pages that were present, or that it compresses
                for key, frame, before in zip(keys, frames, [parent, *keys], strict=False):
                    store.codec.ensure_tag(key, frame, before)
            parent = keys[-1]
        return True

    def _is_over(self, prefetch: LookupOperation | ReadOperation) -> bool:
        until_s = min(prefetch.deadline, prefetch.storage.until[Direction.READ])
        return prefetch.cancelled or self._clock() >= until_s

    def _deadline(self, until_s: float = math.inf) -> float:
        """Return the deadline of a call that begins now, `until_s` at most."""
        return min(until_s, self._clock() + self._config.storage_deadline)


def _fail(operation: Operation) -> None:
    operation.failed = True


def _any_damage(store: StoreOperation, start: int, keys: Sequence[bytes], frames: Sequence[memoryview]) -> bool:
    """Return True if a frame that was sealed before has changed since, and record the first one: another seal would
    vouch for its bytes."""
    for number, (key, frame) in enumerate(zip(keys, frames, strict=True), start):
        damage = None if store.codec is None else store.codec.check(key, frame)
        if damage is not None:
            store.damage = number, damage
            return True
    return False

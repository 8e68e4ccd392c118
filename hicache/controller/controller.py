"""HiCacheController: moves pages between the tiers, off the scheduler thread.

    queue     operation, its ack      carries            bound; when full
    write     Backup, acks.written    L1 -> L2 copies    pages reserved; no backup now, counted
    load      Load, acks.loaded       L2 -> L1 copies    pages reserved; the request recomputes
    prefetch  LookupOperation, acks.found      storage lookups    operations; the caller's queue
    reads     ReadOperation, acks.read         L3 -> L2 reads     pages (the caller's share of L2)
    backup    StoreOperation, acks.stored      L2 -> L3 writes    a share of L2; the newest store is dropped, counted
              Touch, acks.lost        uses on L1 and L2  one in flight, after the stores

Copies are merged: once per step, and for backups also when an eviction waits for them, all copies submitted to one
direction since the last launch become one. A backup waits for the latest fence at its launch. A load waits for the
fence after the last reader of its L1 pages, so that it overlaps later forwards. Each submitted operation is
acknowledged exactly once, by `poll`, or cancelled by a `cancel_` call that returns True. Until then its pages are
reserved and must not be freed. After a copy has failed, all later copies are acknowledged as failed.

With ranks (see `agreement`), `poll` acknowledges operations that have ended on every rank, one step later, so that all
ranks decide identically. Time, measurements and readiness of storage are also agreed on, and latched once per step.
`gate` decides whether storage may be used; callers check it before they submit a lookup or a store.

All queues are in one class: they have the same rules for bounds, acks and agreement.

Locking design: the scheduler thread makes every call of this class, except for `read_apart` (see `StorageExecutor`),
and owns its counters, so no lock is needed. Workers return finished operations through one queue (`storage`). The
scheduler blocks only in `close` and, with ranks, in `poll` until the slowest rank has reached the same step, at most
until the deadline of the group.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice

from .. import tracing
from ..backends.base import Direction
from ..backends.compose import copies_of
from ..backends.slot import OpenBackend
from ..backends.storage import Storage
from ..clock import SYSTEM_CLOCK, Clock
from ..config import HiCacheConfig
from ..errors import InvariantError, TransferError
from ..frame import FrameCodec
from ..keys import PageChain, RadixKey
from ..supervised import SupervisedPool, WorkerFactory
from ..tiers import CopyEngine, FailedTransfer, Fence, HostPool, JoinedTransfer, Transfer
from ..types import PageIds, concat
from .agreement import COUNTERS, STORE_PLACES, Agreement, PrefetchProgress, Progress, StoreProgress, store_progress
from .operations import (
    Acks,
    Backup,
    Copy,
    Fences,
    Launch,
    Load,
    LookupOperation,
    ReadOperation,
    StoreOperation,
    leading_done,
)
from .ranks import RankGroup
from .statistics import ControllerStatistics, CopyCounter, QueueStatistics
from .storage import StorageExecutor

# The time of an operation of a prefetch, and the longest that a request waits for one.
PREFETCH_S_MAX = 60.0


class HiCacheController:
    """See the module's docstring. `copies` is None for an engine without our L1, `backend` for one without L3.

    `config.transfer` and `config.prefetch.operations_max` are its bounds. The cache above uses the same `config`.

    `workers` makes the worker pools; tests replace them and the `clock`. With `ranks`, `rates` is the
    number of measurements agreed on per step, and one of the ranks that share their pages has `stores_pages`.
    """

    def __init__(  # noqa: PLR0913 - its parts, and the ones that tests replace
        self, host: HostPool, copies: CopyEngine | None, backend: Storage | None, config: HiCacheConfig | None = None,
        *, ranks: RankGroup | None = None, stores_pages: bool = True, rates: int = 0,
        workers: WorkerFactory = SupervisedPool, clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.config = config = config or HiCacheConfig()
        self.host = host
        self.stores_pages = stores_pages
        self.host_codec: FrameCodec | None = None  # of frames on L2, if these are verified; the cache sets it
        self.closed = False
        self.rates: tuple[int, ...] = (0,) * rates
        self.refused: Counter[str] = Counter()
        self.clock = clock
        self._started_s = clock()
        self.polls = 0
        self.polled_s = self._started_s if ranks is None else 0.0
        self._copies = copies
        self.fences = Fences()
        self._backups: list[Backup] = []
        self._loads: list[Load] = []
        self._launched_backups: deque[Launch[Backup]] = deque()
        self._launched_loads: deque[Launch[Load]] = deque()
        self._backup_pages = self._load_pages = self.read_pages = self.store_pages = 0  # reserved
        # Both in order of submission, so that ranks agree on them.
        self._prefetches: dict[LookupOperation | ReadOperation, None] = {}
        self._stores: dict[StoreOperation, None] = {}
        self._moved: Counter[str] = Counter()
        self._backup_times, self._load_times = CopyCounter(host.payload_bytes), CopyCounter(host.payload_bytes)
        self._submitted: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._fault: TransferError | None = None
        self._storage = StorageExecutor(backend, host, config.transfer, workers, clock, hears_losses=ranks is None)
        self.gate, self.read_apart = self._storage.gate, self._storage.read_apart
        self._agreement: Agreement | None = None
        self._store_pages_max = int(config.transfer.store_host_share * host.pages)
        if ranks is not None:
            self._agreement = Agreement(ranks, prefetch_places=config.prefetch.operations_max, rates=rates)

    def time_s(self) -> float:
        """Return monotonic seconds. With ranks: the seconds since start that have passed on all ranks in this step.

        `polled_s` is this time at the last poll, and `polls` is the number of polls.
        """
        return self.clock() if self._agreement is None else self.polled_s

    def had_time(self, polls: int) -> bool:
        """Return True if the acks would have an operation that was submitted after so many polls and ended at once."""
        return self.polls - polls > self.has_ranks

    @property
    def has_ranks(self) -> bool:
        """True if there are other ranks, which must all make the same calls in each step."""
        return self._agreement is not None

    @property
    def backend(self) -> Storage | None:
        """The backend in use; None without L3, and while another backend is being opened."""
        storage = self.gate.storage
        return None if storage is None else storage.backend

    def replace_backend(self, open_backend: OpenBackend) -> None:
        """Stop using the backend, if any, and open another one on a separate thread. Does not block.

        Operations in flight with the old backend end as a miss, or as not stored. Does nothing after `close`. REQUIRES:
        with ranks, all call this in the same step.
        """
        if not self.closed:
            self._storage.replace(open_backend)

    def detach_backend(self) -> None:
        """Stop using the backend; it is closed when its operations have ended. Otherwise as `replace_backend`."""
        self._storage.replace(None)

    # L1 <-> L2

    def record_fence(self, fence: Fence) -> None:
        """Record a point in the engine's work. Raises as `CopyEngine.require_fence`."""
        if self._copies is not None:
            self._copies.require_fence(fence)
        self.fences.add(fence)

    def takes_backup(self, pages: int) -> bool:
        """Return True if the write queue has room for `pages` more; a rejection is counted."""
        return self._within("write", self._backup_pages + pages <= self.config.write_pages_max)

    def submit_backup(self, device_pages: PageIds, host_pages: PageIds) -> Backup:
        """Queue a copy to L2; the next `launch_backups` starts it. REQUIRES: `takes_backup` returned True."""
        backup = Backup(device_pages, host_pages)
        self._backups.append(backup)
        self._submitted["writes"] += 1
        self._backup_pages += len(device_pages)
        return backup

    def submit_load(self, host_pages: PageIds, device_pages: PageIds, after: int) -> Load:
        """Queue a copy to L1 after fence number `after`; `launch_loads` starts it. REQUIRES: `load_room` suffices."""
        load = Load(host_pages, device_pages, after)
        self._loads.append(load)
        self._submitted["loads"] += 1
        self._load_pages += len(device_pages)
        return load

    def cancel_load(self, load: Load) -> bool:
        """Cancel a queued load, without an ack. Return False, and change nothing, if it was started."""
        if load not in self._loads:
            return False
        self._loads.remove(load)
        self._load_pages -= len(load.device_pages)
        return True

    @property
    def load_room(self) -> int:
        """The number of pages for which the load queue has room."""
        return self.config.load_pages_max - self._load_pages

    @property
    def is_loading(self) -> bool:
        """True if a load is queued or in flight."""
        return self._load_pages > 0

    def launch_loads(self) -> Transfer | None:
        """Start all queued loads as one copy. Return the transfer that the forward waits for, layer by layer: all loads
        in flight, because pages of a previous load, even of a failed one, may be allocated again. None without loads.
        """
        if self._loads:
            self._launched_loads.append(self._launch(self._loads))
            self._loads = []
        if len(self._launched_loads) > 1:
            return JoinedTransfer([launch.transfer for launch in self._launched_loads])
        return self._launched_loads[0].transfer if self._launched_loads else None

    def launch_backups(self) -> None:
        """Start all queued backups as one copy."""
        if self._backups:
            self._launched_backups.append(self._launch(self._backups))
            self._backups = []

    def _launch(self, operations: list[Copy]) -> Launch[Copy]:
        if self._copies is None:
            raise InvariantError("controller: a copy was submitted, but the controller has no L1")
        device_pages = concat([operation.device_pages for operation in operations])
        host_pages = concat([operation.host_pages for operation in operations])
        transfer: Transfer
        try:
            if isinstance(operations[0], Load):
                number = max(operation.after for operation in operations)
                transfer = self._copies.load(host_pages, device_pages, after=self.fences.at(number))
            else:
                transfer = self._copies.backup(device_pages, host_pages, after=self.fences.at(self.fences.latest))
        except (RuntimeError, MemoryError, ValueError, IndexError) as error:
            transfer = FailedTransfer(TransferError(f"a copy between device and host could not be started: {error}"))
        return Launch(transfer, operations, len(device_pages))

    # L3

    def submit_lookup(
        self, key: RadixKey, *, start_page: int, prior: bytes | PageChain, call_s: float,
        context: tracing.Context | None = None,
    ) -> LookupOperation:
        """Look up how many pages of `key` from `start_page` on storage has. `call_s` limits each call of the store,
        also of a later read; `context` is the parent of the spans of both.

        REQUIRES: the gate is open for reads, and fewer prefetches than `operations_max` are in flight.
        """
        lookup = LookupOperation(
            key, start_page, prior, storage=self.gate.enter(), deadline=self.clock() + PREFETCH_S_MAX, call_s=call_s,
            context=context,
        )
        self._prefetches[lookup] = None
        self._submitted["prefetches"] += 1
        self._storage.submit(lookup)
        return lookup

    def submit_read(self, found: LookupOperation, pages: PageIds, skip_pages: int = 0) -> ReadOperation:
        """Read found pages, after the first `skip_pages`, into the L2 pages `pages`. REQUIRES: the storage of the
        lookup is in use.
        """
        keys = found.keys[skip_pages : skip_pages + len(pages)]
        read = ReadOperation(
            keys, pages, storage=self.gate.enter(), codec=self.host_codec, deadline=self.clock() + PREFETCH_S_MAX,
            call_s=found.call_s, context=found.context,
        )
        self._prefetches[read] = None
        self.read_pages += len(pages)
        self._storage.submit(read)
        return read

    def takes_store(self, pages: int) -> bool:
        """Return True if the backup queue has room for `pages` more; a rejection is counted. REQUIRES: the gate is open
        for writes."""
        return self._within("backup", self.has_store_room(pages))

    def has_store_room(self, pages: int) -> bool:
        """Return what `takes_store` returns, but count nothing."""
        # A single operation may have any size: otherwise a large one could never be stored.
        return self.store_pages == 0 or self.store_pages + pages <= self._store_pages_max

    def submit_store(
        self, chain: PageChain, pages: PageIds, *, begins_prompt: bool, is_sealed: bool = False
    ) -> StoreOperation:
        """Store the pages of `chain`; with `begins_prompt` it begins a prompt. Frames that were sealed before are
        verified first if L2 is. REQUIRES: `takes_store` returned True."""
        store = StoreOperation(chain, pages, begins_prompt, is_sealed, storage=self.gate.enter(), codec=self.host_codec)
        self._stores[store] = None
        self.store_pages += len(pages)
        self._submitted["stores"] += 1
        if self.stores_pages:
            self._storage.submit(store)
        else:
            self._storage.finish(store)
        return store

    def cancel_store(self, store: StoreOperation) -> bool:
        """Cancel a queued store, without an ack. Return False, and change nothing, if a worker has begun it or it has
        ended, and always with ranks, because it may have begun on another rank.
        """
        if self._agreement is not None or not self._storage.pools[StoreOperation].withdraw(store):
            return False
        self._end_store(store)
        return True

    def touch(self, runs: Sequence[bytes]) -> bool:
        """Submit a Touch. Return False if the previous one is in flight. REQUIRES: the gate is open for writes."""
        return self._storage.touch(runs)

    # Acks

    def poll(self) -> Acks | None:
        """Return the operations that ended since the last call, or None. Also supervises the workers.

        Never blocks without ranks. With ranks, waits for the slowest if it is a step behind, and raises RankError.
        """
        self._storage.supervise()
        self.polls += 1
        if self._agreement is None:
            self.polled_s = self.clock()
            return self._poll_alone()
        agreed = self._agreement.result()
        acks = Acks()
        self.polled_s = max(self.polled_s, agreed.time_ms / 1000)
        self.gate.settle(agreed.storage)
        self.rates = agreed.rates
        if not agreed.healthy and self._fault is None:
            acks.fault = self._fault = TransferError("a copy between device and host failed on one of the ranks")
        self._take_copies(agreed.writes_done, agreed.loads_done, acks)
        for prefetch in agreed.prefetches:
            self._take_prefetch(acks, *prefetch)
        for store, state in agreed.stores:
            if state is not StoreProgress.RUNNING:
                self._take_store(store, state, acks)
        return acks if acks.any else None

    def _poll_alone(self) -> Acks | None:
        backups = leading_done(self._launched_backups) if self._launched_backups else 0
        loads = leading_done(self._launched_loads) if self._launched_loads else 0
        if not (backups or loads or self._prefetches or self._storage.any_finished):
            return None
        acks = Acks(lost=self._storage.lost())
        if backups or loads:
            self._take_copies(backups, loads, acks)
        for operation in self._storage.drain():
            if isinstance(operation, StoreOperation):
                self._take_store(operation, store_progress(operation, elsewhere=not self.stores_pages), acks)
        for prefetch in list(self._prefetches):
            self._take_prefetch(acks, prefetch, prefetch.ended, prefetch.pages_here)
        return acks if acks.any else None

    def report(self, rates: tuple[int, ...] = ()) -> None:
        """End a step: send this rank's progress and readiness of storage to the other ranks.

        Does not wait. REQUIRES, with ranks: one `report` after each `poll`, equally many on all. Raises RankError.
        """
        if self._agreement is None:
            self.gate.settle()
            self.rates = rates
            return
        self._storage.drain()
        backups, loads = leading_done(self._launched_backups), leading_done(self._launched_loads)
        ended = [launch.transfer for launch in islice(self._launched_backups, backups)]
        ended += [launch.transfer for launch in islice(self._launched_loads, loads)]
        progress = Progress(
            healthy=not any(transfer.error for transfer in ended),
            storage=self.gate.offer(),
            time_ms=int(1000 * (self.clock() - self._started_s)),
            writes_done=backups,
            loads_done=loads,
            rates=rates,
            # `ended` before the pages, because the pages of an ended prefetch do not change.
            prefetches=[PrefetchProgress(one, one.ended, one.pages_here) for one in self._prefetches],
            stores=[(store, store_progress(store, elsewhere=not self.stores_pages))
                    for store in islice(self._stores, STORE_PLACES)],
        )
        self._submitted["free host pages"] = self.host.allocator.free_pages
        self._agreement.start(progress, self._submitted)

    def leave_ranks(self) -> None:
        """Make this rank acknowledge its operations alone, for shutdown. Ended operations are not lost."""
        if self._agreement is None:
            return
        self._agreement.close()
        self._agreement = None
        for store in [store for store in self._stores if store.ended]:
            self._storage.finish(store)

    def _take_copies(self, backups_done: int, loads_done: int, acks: Acks) -> None:
        for _ in range(backups_done):
            backups = self._launched_backups.popleft()
            self._backup_pages -= backups.pages
            self._backup_times.add(backups.pages, backups.transfer.seconds)
            healthy = self._is_healthy(backups.transfer, acks)
            (acks.written if healthy else acks.failed_backups).extend(backups.operations)
            self._moved["written"] += backups.pages * healthy
        for _ in range(loads_done):
            loads = self._launched_loads.popleft()
            self._load_pages -= loads.pages
            self._load_times.add(loads.pages, seconds := loads.transfer.seconds)
            if seconds is not None:
                acks.load_times.append((loads.pages, seconds))
            healthy = self._is_healthy(loads.transfer, acks)
            (acks.loaded if healthy else acks.failed_loads).extend(loads.operations)
            self._moved["loaded"] += loads.pages * healthy

    def _is_healthy(self, transfer: Transfer, acks: Acks) -> bool:
        """Return True if neither this copy nor an earlier one has failed."""
        if transfer.error is not None and self._fault is None:
            acks.fault = self._fault = transfer.error
        return self._fault is None

    def _take_prefetch(self, acks: Acks, operation: LookupOperation | ReadOperation, ended: bool, pages: int) -> None:
        operation.pages = pages
        if not ended:
            return
        del self._prefetches[operation]
        self.gate.slot.leave(operation.storage)
        if isinstance(operation, LookupOperation):
            acks.found.append(operation)
            return
        self.read_pages -= len(operation.host_pages)
        self._moved["prefetched"] += operation.pages
        acks.read.append(operation)

    def _take_store(self, store: StoreOperation, progress: StoreProgress, acks: Acks) -> None:
        self._end_store(store)
        self._moved["stored"] += store.stored_pages
        # Pages written to a retired store are not in the store in use.
        store.stored = progress is StoreProgress.STORED and store.storage is self.gate.storage
        acks.stored.append(store)

    def _end_store(self, store: StoreOperation) -> None:
        del self._stores[store]
        self.gate.slot.leave(store.storage)
        self.store_pages -= len(store.host_pages)

    # State

    def _within(self, name: str, within: bool) -> bool:
        if not within:
            self.refused[name] += 1
        return within

    @property
    def idle(self) -> bool:
        """True if no operation is queued or in flight."""
        return not (self._backup_pages or self._load_pages or self._prefetches or self.store_pages)

    def statistics(self) -> ControllerStatistics:
        """Return current depths and totals since start. May be called from any thread.

        May read the usage of storage; do not call it in each step of the scheduler.
        """
        backend, pools = self.backend, self._storage.pools
        return ControllerStatistics(
            queues=QueueStatistics(
                write=len(self._backups) + len(self._launched_backups),
                load=len(self._loads) + len(self._launched_loads),
                prefetch=pools[LookupOperation].queued if pools else 0,
                reads=pools[ReadOperation].queued if pools else 0,
                backup=pools[StoreOperation].queued if pools else 0,
                device_pages_reserved=self._backup_pages + self._load_pages,
                host_pages_reserved=self._backup_pages + self._load_pages + self.read_pages + self.store_pages,
            ),
            written_pages=self._moved["written"],
            loaded_pages=self._moved["loaded"],
            prefetched_pages=self._moved["prefetched"],
            stored_pages=self._moved["stored"],
            refused=dict(self.refused),
            worker_errors={f"{p.name}:{kind}": n for p in pools.values() for kind, n in dict(p.errors).items()},
            worker_restarts=sum(pool.restarts for pool in pools.values()),
            workers_alive=sum(pool.alive for pool in pools.values()),
            workers_stuck=sum(pool.stuck_threads for pool in pools.values()),
            open_failures=self.gate.slot.open_failures,
            backend=None if backend is None else backend.statistics(),
            backends=self.gate.slot.leaves(),
            copies={} if backend is None else copies_of(backend),
            l1_copies={} if self._copies is None else {
                "device_to_host": self._backup_times.statistics(), "host_to_device": self._load_times.statistics(),
            },
            ranks=None if self._agreement is None else self._agreement.statistics(),
            touched_pages=self._storage.touched_pages,
        )

    def close(self, timeout_s: float) -> bool:
        """Finish the queued copies and stores within `timeout_s`, then end all threads. Blocks.

        Return False if something did not end in time: its thread keeps running with its reserved pages. Each stored
        object is still either whole or absent.
        """
        self.closed = True
        deadline = self.clock() + timeout_s
        self.leave_ranks()
        self.gate.stop(Direction.READ)
        self.gate.stop(Direction.WRITE, at=deadline)
        self.launch_backups()
        self.launch_loads()
        copies_ended = self._copies is None or self._copies.close(timeout_s)
        return self._storage.close(deadline) and copies_ended

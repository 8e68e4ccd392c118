"""HiCacheController: moves pages between the tiers, off the scheduler thread.

    queue                            carries                         bound; when full
    write -> acks.written            L1 -> L2 copies                 pages lent; no backup now, counted
    load -> acks.loaded              L2 -> L1 copies                 pages lent; the request recomputes
    prefetch -> acks.found           storage lookups                 operations; no prefetch, counted
    reads -> acks.prefetched         L3 -> L2 reads                  pages (the caller's share of L2)
    backup -> acks.stored            L2 -> L3 writes                 bytes; the newest store is dropped, counted

Copies are merged: all that was submitted to one direction since the last launch becomes one, once per step, and for
writes also when an eviction waits for them. Every submitted
operation is acknowledged exactly once, by `poll`; until then its pages are lent to it and must not be freed.

With ranks (see `agreement`), `poll` acknowledges what has ended on every rank, one step later, so that all of them
decide alike: what is agreed on besides (time, measurements, whether storage may be used) is latched here once per step.

Locking design: the scheduler thread makes every call of this class and owns its counters, so there is no lock. Workers
reach back through one queue of finished jobs (`storage_workers`). The scheduler never blocks here, but in `close`, and
with ranks in `poll` until the slowest has come as far, bounded by the deadline of the group.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

from ..backends.base import StorageBackend
from ..backends.compose import copies_of
from ..backends.guard import Direction, Override, leaf_statistics
from ..errors import InvariantError, TransferError
from ..keys import PageChain, RadixKey
from ..tiers import CopyEngine, FailedTransfer, HostPool, Transfer
from ..types import PageIds
from .agreement import STORE_PLACES, Agreement
from .lifecycle import OpenBackend
from .operations import Acks, BackupOperation, CopyOperation, Launch, PrefetchOperation, PrefetchState, now
from .options import ControllerOptions
from .progress import (
    PREFETCH_GRACE_S,
    PrefetchProgress,
    Progress,
    StoreProgress,
    leading_done,
    prefetch_progress,
    store_progress,
)
from .ranks import RankGroup
from .statistics import ControllerStatistics, QueueStatistics
from .storage_workers import StorageWorkers
from .worker import WorkerFactory, WorkerGroup

# No prefetch is worth waiting longer for, whatever its length.
PREFETCH_S_MAX = 60.0
# What must be equal on all ranks, or they have decided differently.
COUNTERS = ("writes", "loads", "stores", "prefetches", "free host pages")


class HiCacheController:
    """See the module's docstring. `copies` is None for an engine without our L1, `backend` for one without L3.

    `workers` makes the worker groups and `clock` tells the time (monotonic, seconds); tests give their own. With
    `ranks`, `figures` is how many measurements are agreed on per step, and one rank of those that share their pages has
    `stores_pages`.
    """

    def __init__(  # noqa: PLR0913 - the parts, and what tests exchange
        self,
        host: HostPool,
        copies: CopyEngine | None,
        backend: StorageBackend | None,
        options: ControllerOptions | None = None,
        *,
        ranks: RankGroup | None = None,
        stores_pages: bool = True,
        figures: int = 0,
        workers: WorkerFactory = WorkerGroup,
        clock: Callable[[], float] = now,
    ) -> None:
        self.options = options or ControllerOptions()
        self.host = host
        self.stores_pages = stores_pages
        self.closed = False
        self.has_storage = backend is not None
        self.may_prefetch = self.may_store = self.has_storage
        self.figures: tuple[int, ...] = (0,) * figures
        self.refused: Counter[str] = Counter()
        self.clock = clock
        self._started_s = clock()
        self._agreed_s = 0.0
        self._copies = copies
        self._writes: list[CopyOperation] = []
        self._loads: list[CopyOperation] = []
        self._launched_writes: deque[Launch] = deque()
        self._launched_loads: deque[Launch] = deque()
        self._write_pages = self._load_pages = self._read_pages = self._backup_pages = 0
        self._prefetching: list[PrefetchOperation] = []
        self._storing: deque[BackupOperation] = deque()  # with ranks: those that are not agreed on yet
        self._moved: Counter[str] = Counter()
        self._submitted: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._fault: TransferError | None = None
        self._lost: TransferError | None = None  # a copy that could not be started: no later load may hide it
        self._storage = StorageWorkers(backend, host, self.options, workers, clock)
        self._agreement: Agreement | None = None
        if ranks is not None:
            self._agreement = Agreement(
                ranks, COUNTERS, prefetch_places=self.options.prefetch_operations_max, figures=figures
            )

    def time_s(self) -> float:
        """Seconds that never go back. With ranks: those since the start that are over everywhere, as of this step."""
        return self.clock() if self._agreement is None else self._agreed_s

    @property
    def backend(self) -> StorageBackend | None:
        """The backend in use; None without L3, and while another one is being opened."""
        jobs = self._storage.lifecycle.jobs
        return None if jobs is None else jobs.backend

    def replace_backend(self, open_backend: OpenBackend) -> None:
        """Stop using the backend, if there is one, and have another opened on a thread of its own. Does not block.

        What is under way with the old one ends as a miss, or as not stored. Does nothing once closed. REQUIRES: with
        ranks, all call this in the same step.
        """
        if self.closed:
            return
        self._storage.replace(open_backend)
        self.has_storage = True
        self.may_prefetch = self.may_store = False

    def detach_backend(self) -> None:
        """Stop using the backend; it is closed once nothing of it is under way. As `replace_backend` otherwise."""
        self._storage.lifecycle.detach()
        self.has_storage = self.may_prefetch = self.may_store = False

    def override_backend(self, direction: Direction, mode: Override) -> None:
        """Switch a direction of storage on or off, or leave it to the breakers; holds for later backends too. Does not
        block. One rank that has it off is enough to keep it off on all.
        """
        self._storage.lifecycle.override(direction, mode)

    # L1 <-> L2

    def submit_write(self, tag: Any, device_pages: PageIds, host_pages: PageIds) -> None:
        """Queue a backup copy; the next `launch_writes` starts it. REQUIRES: `may_write` said yes."""
        self._writes.append(CopyOperation(tag, device_pages, host_pages))
        self._submitted["writes"] += 1
        self._write_pages += len(device_pages)

    def may_write(self, pages: int) -> bool:
        """Whether the write queue takes `pages` more; a refusal is counted."""
        return self._within("write", self._write_pages + pages <= self.options.write_pages_max)

    def submit_load(self, tag: Any, host_pages: PageIds, device_pages: PageIds) -> CopyOperation:
        """Queue a load copy; the next `launch_loads` starts it. REQUIRES: `load_room` is enough."""
        operation = CopyOperation(tag, device_pages, host_pages)
        self._loads.append(operation)
        self._submitted["loads"] += 1
        self._load_pages += len(device_pages)
        return operation

    def is_queued(self, load: CopyOperation) -> bool:
        """Whether a load was submitted but not started."""
        return load in self._loads

    def cancel_load(self, load: CopyOperation) -> None:
        """Take back a load; there will be no ack. REQUIRES: `is_queued`."""
        self._loads.remove(load)
        self._load_pages -= len(load.device_pages)

    @property
    def load_room(self) -> int:
        """Pages that the load queue takes now."""
        return self.options.load_pages_max - self._load_pages

    @property
    def is_loading(self) -> bool:
        """Whether a load is queued or under way."""
        return self._load_pages > 0

    def refuse_load(self) -> None:
        """Count a load that was not submitted for lack of room."""
        self.refused["load"] += 1

    def launch_loads(self) -> Transfer | None:
        """Start all queued loads as one copy, whose layers the forward waits for; None if there is nothing to wait for.

        Without a new load it is the last one under way: pages that it still fills may have been handed out since.
        Loads run in order, so its layer i comes after all earlier loads.
        """
        self._launch(self._loads, self._launched_loads, load=True)
        return self._launched_loads[-1].transfer if self._launched_loads else None

    def launch_writes(self) -> None:
        """Start all queued writes as one copy."""
        self._launch(self._writes, self._launched_writes, load=False)

    def _launch(self, queued: list[CopyOperation], launched: deque[Launch], *, load: bool) -> None:
        if not queued:
            return
        if self._copies is None:
            raise InvariantError("controller: a copy was submitted, but there is no L1")
        operations = queued.copy()
        queued.clear()
        device_pages = _joined([operation.device_pages for operation in operations])
        host_pages = _joined([operation.host_pages for operation in operations])
        transfer: Transfer
        try:
            if load and self._lost is not None:
                transfer = FailedTransfer(self._lost)
            elif load:
                transfer = self._copies.load(host_pages, device_pages)
            else:
                transfer = self._copies.backup(device_pages, host_pages)
        except (RuntimeError, MemoryError, ValueError, IndexError) as error:
            # The device has no memory left for staging, say. Part of the copy may be under way.
            failure = TransferError(f"a copy between device and host could not be started: {error}")
            self._lost = self._lost or failure
            transfer = FailedTransfer(failure)
        launched.append(Launch(transfer, operations, len(device_pages)))

    # L3

    def submit_prefetch(
        self, tag: Any, key: RadixKey, *, start_page: int, prior: bytes | PageChain, timeout_s: float
    ) -> PrefetchOperation | None:
        """Look up in storage how much of `key` from `start_page` on is there; None, counted, over the bound.

        Its first ack is `found`; then the caller answers with `start_reads` or `drop`. Reads end in `prefetched`.
        """
        jobs = self._storage.lifecycle.jobs
        if jobs is None or not self.may_prefetch:
            return None
        if not self._within("prefetch", len(self._prefetching) < self.options.prefetch_operations_max):
            return None
        deadline = self.clock() + min(timeout_s, PREFETCH_S_MAX)
        operation = PrefetchOperation(tag, jobs, key, start_page, prior, deadline)
        jobs.in_flight += 1
        self._submitted["prefetches"] += 1
        self._prefetching.append(operation)
        self._storage.lookups.submit(operation)
        return operation

    def start_reads(self, operation: PrefetchOperation, host_pages: PageIds) -> None:
        """Lend host pages to a found prefetch and read the leading `len(host_pages)` pages into them."""
        operation.host_pages = host_pages
        operation.state = PrefetchState.READING
        operation.phase_ended = False
        self._read_pages += len(host_pages)
        self._storage.reads.submit(operation)

    def drop(self, operation: PrefetchOperation) -> None:
        """End a found prefetch without reading: too short to pay, cancelled, or no room."""
        operation.state = PrefetchState.ENDED
        operation.jobs.in_flight -= 1
        self._prefetching.remove(operation)

    def may_back_up(self, pages: int) -> bool:
        """Whether `pages` more may be stored; a refusal because of the bytes in flight is counted."""
        if self._storage.lifecycle.jobs is None or not self.may_store:
            return False
        bytes_after = (self._backup_pages + pages) * self.host.frame_bytes
        # One operation may pass alone, however large: it could never be stored otherwise.
        return self._within("backup", self._backup_pages == 0 or bytes_after <= self.options.backup_bytes_max)

    def submit_backup(self, tag: Any, chain: PageChain, host_pages: PageIds, *, begins_prompt: bool) -> None:
        """Store the pages of `chain`, root first of all with `begins_prompt`. REQUIRES: `may_back_up` said yes."""
        jobs = self._storage.lifecycle.jobs
        if jobs is None:
            raise InvariantError("controller: a store was submitted, but no storage is open")
        self._backup_pages += len(host_pages)
        operation = BackupOperation(tag, jobs, chain, host_pages, begins_prompt)
        jobs.in_flight += 1
        self._submitted["stores"] += 1
        if self._agreement is not None:
            self._storing.append(operation)
        if self.stores_pages:
            self._storage.backups.submit(operation)
        else:
            self._storage.finish(operation)

    # Acks

    def poll(self) -> Acks | None:
        """Everything that ended since the last call, None if nothing did. Looks after the workers too.

        Never blocks without ranks. With them it waits for the slowest if that is a step behind, and raises RankError.
        """
        self._storage.supervise()
        if self._agreement is None:
            return self._poll_alone()
        agreed = self._agreement.result()
        acks = Acks()
        self._agreed_s = max(self._agreed_s, agreed.time_ms / 1000)
        # A store that was opened for an earlier epoch on some rank does not count.
        is_open = self.has_storage and agreed.opened == self._storage.lifecycle.wanted
        self.may_prefetch, self.may_store = is_open and agreed.may_prefetch, is_open and agreed.may_store
        self.figures = agreed.figures
        if not agreed.healthy and self._fault is None:
            acks.fault = self._fault = TransferError("a copy between device and host failed on one of the ranks")
        self._take_copies(agreed.writes_done, agreed.loads_done, acks)
        for prefetch in agreed.prefetches:
            self._take_prefetch(prefetch, acks)
        for store, state in agreed.stores:
            if state is not StoreProgress.RUNNING:
                self._storing.remove(store)
                self._take_store(store, state, acks)
        return acks if acks.any else None

    def _poll_alone(self) -> Acks | None:
        writes, loads = leading_done(self._launched_writes), leading_done(self._launched_loads)
        news = self._lost is not None and self._fault is None
        if not (news or writes or loads or self._prefetching or self._storage.any_finished):
            return None
        acks = Acks()
        if news:
            acks.fault = self._fault = self._lost
        if writes or loads:
            self._take_copies(writes, loads, acks)
        for job in self._storage.drain():
            if isinstance(job, BackupOperation):
                self._take_store(job, store_progress(job, elsewhere=not self.stores_pages), acks)
        for prefetch in prefetch_progress(self._prefetching, self.clock() - PREFETCH_GRACE_S):
            self._take_prefetch(prefetch, acks)
        return acks if acks.any else None

    def report(self, *, may_prefetch: bool, may_store: bool, figures: tuple[int, ...] = ()) -> None:
        """Last of a step: tell the other ranks what has ended here, and whether this one would use storage now.

        Does not wait. REQUIRES, with ranks: one `report` after each `poll`, equally many on all. Raises RankError.
        """
        may_prefetch = may_prefetch and self._storage.lifecycle.may_pass(Direction.READ)
        may_store = may_store and self._storage.lifecycle.may_pass(Direction.WRITE)
        if self._agreement is None:
            self.may_prefetch, self.may_store, self.figures = may_prefetch, may_store, figures
            return
        self._storage.drain()
        writes, loads = leading_done(self._launched_writes), leading_done(self._launched_loads)
        progress = Progress(
            healthy=self._lost is None and not any(
                launch.transfer.error
                for launch in (*islice(self._launched_writes, writes), *islice(self._launched_loads, loads))
            ),
            may_prefetch=may_prefetch,
            may_store=may_store,
            opened=self._storage.lifecycle.opened,
            time_ms=int(1000 * (self.clock() - self._started_s)),
            writes_done=writes,
            loads_done=loads,
            figures=figures,
            prefetches=prefetch_progress(self._prefetching, self.clock() - PREFETCH_GRACE_S),
            stores=[
                (store, store_progress(store, elsewhere=not self.stores_pages))
                for store in islice(self._storing, STORE_PLACES)
            ],
        )
        self._submitted["free host pages"] = self.host.allocator.free_pages
        self._agreement.start(progress, self._submitted)

    def _leave_ranks(self) -> None:
        """From now on this rank acknowledges by itself; for shutdown. What has ended is not lost."""
        if self._agreement is None:
            return
        self._agreement.close()
        self._agreement = None
        for store in self._storing:
            if store.ended:
                self._storage.finish(store)
        self._storing.clear()

    def _take_copies(self, writes_done: int, loads_done: int, acks: Acks) -> None:
        for _ in range(writes_done):
            launch = self._launched_writes.popleft()
            self._write_pages -= launch.pages
            self._collect(launch, acks.written, "written", acks)
        for _ in range(loads_done):
            launch = self._launched_loads.popleft()
            self._load_pages -= launch.pages
            if (seconds := launch.transfer.seconds) is not None:
                acks.load_times.append((launch.pages, seconds))
            self._collect(launch, acks.loaded, "loaded", acks)

    def _collect(self, launch: Launch, done: list[CopyOperation], way: str, acks: Acks) -> None:
        """Acknowledge a launch that has ended: as `done`, unless it or one before it has failed."""
        if launch.transfer.error is not None and self._fault is None:
            acks.fault = self._fault = launch.transfer.error
        if self._fault is None:
            done.extend(launch.operations)
            self._moved[way] += launch.pages
        else:
            acks.failed_copies.extend(launch.operations)

    def _take_prefetch(self, progress: PrefetchProgress, acks: Acks) -> None:
        job = progress.operation
        job.expired |= not progress.in_time
        if job.state is PrefetchState.LOOKING_UP:
            if progress.ended:
                job.hit_pages = progress.pages
                acks.found.append(job)
            return
        job.arrived_pages = progress.pages
        if progress.ended:
            self._prefetching.remove(job)
            job.state = PrefetchState.ENDED
            job.jobs.in_flight -= 1
            self._read_pages -= len(job.host_pages)
            self._moved["prefetched"] += job.arrived_pages
            acks.prefetched.append(job)

    def _take_store(self, store: BackupOperation, state: StoreProgress, acks: Acks) -> None:
        store.jobs.in_flight -= 1
        self._backup_pages -= len(store.host_pages)
        self._moved["stored"] += store.stored_pages
        # What went to a store that is not in use any more is not in the one that is.
        store.stored = state is StoreProgress.STORED and not store.jobs.retired
        acks.stored.append(store)

    # State

    def _within(self, name: str, within: bool) -> bool:
        if not within:
            self.refused[name] += 1
        return within

    @property
    def read_pages(self) -> int:
        """Host pages lent to prefetches now."""
        return self._read_pages

    @property
    def idle(self) -> bool:
        """Whether no operation of any kind is queued or under way."""
        return not (self._write_pages or self._load_pages or self._prefetching or self._backup_pages)

    def statistics(self) -> ControllerStatistics:
        """Depths now and totals since start. May be called from any thread.

        Looks at the usage of storage, which may be asked for first: not for the scheduler's every step.
        """
        storage, backend = self._storage, self.backend
        return ControllerStatistics(
            queues=QueueStatistics(
                write=len(self._writes) + len(self._launched_writes),
                load=len(self._loads) + len(self._launched_loads),
                prefetch=storage.lookups.queued if storage.groups else 0,
                reads=storage.reads.queued if storage.groups else 0,
                backup=storage.backups.queued if storage.groups else 0,
                device_pages_lent=self._write_pages + self._load_pages,
                host_pages_lent=self._write_pages + self._load_pages + self._read_pages + self._backup_pages,
            ),
            written_pages=self._moved["written"],
            loaded_pages=self._moved["loaded"],
            prefetched_pages=self._moved["prefetched"],
            stored_pages=self._moved["stored"],
            refused=dict(self.refused),
            worker_errors={f"{g.name}:{kind}": n for g in storage.groups for kind, n in dict(g.errors).items()},
            worker_restarts=sum(group.restarts for group in storage.groups),
            workers_alive=sum(group.alive for group in storage.groups),
            workers_stuck=sum(group.stuck_threads for group in storage.groups),
            open_failures=storage.lifecycle.open_failures,
            backend=None if backend is None else backend.statistics(),
            backends=() if backend is None else leaf_statistics(backend),
            copies={} if backend is None else copies_of(backend),
        )

    def stop_prefetching(self) -> None:
        """End all prefetches at their next batch; for shutdown."""
        self._storage.stop_prefetching()

    def close(self, timeout_s: float) -> bool:
        """Finish the queued copies and stores within `timeout_s`, then end all threads; blocks.

        False if something did not end in time: its thread is left behind with the pages it was lent, and each stored
        object is whole or absent all the same.
        """
        self.closed = True
        deadline = self.clock() + timeout_s
        self._leave_ranks()
        self._storage.stop_prefetching()
        self._storage.stop_storing_at(deadline)
        self.launch_writes()
        self.launch_loads()
        copies_ended = self._copies is None or self._copies.close(timeout_s)
        return self._storage.close(deadline) and copies_ended


def _joined(runs: list[PageIds]) -> PageIds:
    """All pages in order. Nobody writes to a run, so a single one needs no copy."""
    return runs[0] if len(runs) == 1 else np.concatenate(runs)

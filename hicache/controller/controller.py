"""HiCacheController: moves pages between the tiers, off the scheduler thread.

    queue                            carries                         bound; when full
    write -> acks.written            L1 -> L2 copies                 pages lent; no backup now, counted
    load -> acks.loaded              L2 -> L1 copies                 pages lent; the request recomputes
    prefetch -> acks.found           storage lookups                 operations; no prefetch, counted
    reads -> acks.prefetched         L3 -> L2 reads                  pages (the caller's share of L2)
    backup -> acks.stored            L2 -> L3 writes                 bytes; the newest store is dropped, counted

Copies are merged: all that was submitted since the last step becomes one launch per direction. Every submitted
operation is acknowledged exactly once, by `poll`; until then its pages are lent to it and must not be freed.

Locking design: the scheduler thread makes every call of this class and owns its counters, so there is no lock. Workers
reach back through one `SimpleQueue` of finished jobs. The scheduler never blocks here, but in `close`.
"""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.base import BackendStatistics, SetOutcome, StorageBackend, Usage
from ..errors import InvariantError, TransferError
from ..keys import RadixKey
from ..tiers import CopyEngine, FailedTransfer, HostPool, Transfer
from ..types import PageIds
from .lifecycle import BackendLifecycle, OpenBackend
from .operations import Acks, BackupOperation, CopyOperation, PrefetchOperation, PrefetchState, now
from .storage import StorageJobs
from .worker import WorkerGroup

# Dead and stuck workers are looked for this often; a poll in between costs one clock reading.
SUPERVISE_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions:
    """Bounds and sizes. Defaults suit pages of 1 to 8 MiB on one node.

    `storage_batch_pages` is what one backend call carries: larger batches cost fewer round trips, smaller ones let a
    prefetch stop sooner. `storage_deadline_s` bounds one such call.
    """

    write_pages_max: int = 4096
    load_pages_max: int = 4096
    prefetch_operations_max: int = 64
    backup_bytes_max: int = 1 << 30
    storage_batch_pages: int = 128
    io_workers: int = 2
    backup_workers: int = 1
    storage_deadline_s: float = 10.0


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Depth of each queue now and pages lent to unfinished operations. A merged copy counts as one."""

    write: int
    load: int
    prefetch: int
    reads: int
    backup: int
    device_pages_lent: int
    host_pages_lent: int


@dataclass(frozen=True, slots=True)
class ControllerStatistics:
    """Totals since start. `refused` counts operations turned away by a bound, by queue."""

    queues: QueueStatistics
    written_pages: int
    loaded_pages: int
    prefetched_pages: int
    stored_pages: int
    refused: dict[str, int]
    worker_errors: dict[str, int]
    worker_restarts: int
    workers_alive: int
    workers_stuck: int
    open_failures: int
    backend: BackendStatistics | None
    usage: Usage | None


class HiCacheController:
    """See the module's docstring. `copies` is None for an engine without our L1, `backend` for one without L3.

    `workers` makes the worker groups and `clock` tells the time (monotonic, seconds); tests give their own.
    """

    def __init__(
        self,
        host: HostPool,
        copies: CopyEngine | None,
        backend: StorageBackend | None,
        options: ControllerOptions | None = None,
        *,
        workers: type[WorkerGroup[Any]] = WorkerGroup,
        clock: Callable[[], float] = now,
    ) -> None:
        self.options = options or ControllerOptions()
        self.host = host
        self.clock = clock
        self.refused: Counter[str] = Counter()
        self._copies = copies
        self._writes: list[CopyOperation] = []
        self._loads: list[CopyOperation] = []
        self._launched_writes: deque[tuple[Transfer, list[CopyOperation]]] = deque()
        self._launched_loads: deque[tuple[Transfer, list[CopyOperation]]] = deque()
        self._write_pages = self._load_pages = self._read_pages = self._backup_pages = 0
        self._prefetches = 0
        self._moved: Counter[str] = Counter()
        self._finished: queue.SimpleQueue[PrefetchOperation | BackupOperation] = queue.SimpleQueue()
        self._next_supervision = 0.0
        self._groups: list[WorkerGroup[Any]] = []
        self._lifecycle = BackendLifecycle(self._jobs_for, clock)
        if backend is not None:
            self._lifecycle.start(backend)
            self._start_workers(workers)

    def _jobs_for(self, backend: StorageBackend) -> StorageJobs:
        options = self.options
        return StorageJobs(
            backend,
            self.host,
            batch_pages=options.storage_batch_pages,
            deadline_s=options.storage_deadline_s,
            clock=self.clock,
        )

    def _start_workers(self, workers: type[WorkerGroup[Any]]) -> None:
        options = self.options
        self._lookups = workers(
            "prefetch", 1, handle=_look_up, fail=_fail_prefetch, acknowledge=self._finished.put,
            deadline_s=options.storage_deadline_s,
        )  # fmt: skip
        self._reads = workers(
            "io", options.io_workers, handle=_read, fail=_fail_prefetch, acknowledge=self._finished.put,
            deadline_s=options.storage_deadline_s,
        )  # fmt: skip
        self._backups = workers(
            "backup", options.backup_workers, handle=_store, fail=_fail_backup, acknowledge=self._finished.put,
            deadline_s=options.storage_deadline_s,
        )  # fmt: skip
        self._groups = [self._lookups, self._reads, self._backups]

    @property
    def backend(self) -> StorageBackend | None:
        """The backend in use; None without L3, and while another one is being opened."""
        jobs = self._lifecycle.jobs
        return None if jobs is None else jobs.backend

    def replace_backend(self, open_backend: OpenBackend) -> None:
        """Stop using the backend and have another one opened on a thread of its own. Does not block.

        What is under way with the old one ends as a miss, or as not stored. REQUIRES: there was a backend at the start.
        """
        if not self._groups:
            raise InvariantError("controller: started without storage, so there are no workers for a backend")
        self._lifecycle.replace(open_backend)

    # L1 <-> L2

    def submit_write(self, tag: Any, device_pages: PageIds, host_pages: PageIds) -> None:
        """Queue a backup copy; the next `launch_writes` starts it. REQUIRES: `may_write` said yes."""
        self._writes.append(CopyOperation(tag, device_pages, host_pages))
        self._write_pages += len(device_pages)

    def may_write(self, pages: int) -> bool:
        """Whether the write queue takes `pages` more; a refusal is counted."""
        return self._within("write", self._write_pages + pages <= self.options.write_pages_max)

    def submit_load(self, tag: Any, host_pages: PageIds, device_pages: PageIds) -> CopyOperation:
        """Queue a load copy; the next `launch_loads` starts it. REQUIRES: `load_room` is enough."""
        operation = CopyOperation(tag, device_pages, host_pages)
        self._loads.append(operation)
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

    def refuse_load(self) -> None:
        """Count a load that was not submitted for lack of room."""
        self.refused["load"] += 1

    def launch_loads(self) -> Transfer | None:
        """Start all queued loads as one copy, whose layers the forward waits for; None if there is nothing to wait for.

        Without a new load it is the last one under way: pages that it still fills may have been handed out since.
        Loads run in order, so its layer i comes after all earlier loads.
        """
        self._launch(self._loads, self._launched_loads, load=True)
        return self._launched_loads[-1][0] if self._launched_loads else None

    def launch_writes(self) -> None:
        """Start all queued writes as one copy."""
        self._launch(self._writes, self._launched_writes, load=False)

    def _launch(
        self, queued: list[CopyOperation], launched: deque[tuple[Transfer, list[CopyOperation]]], *, load: bool
    ) -> None:
        if not queued:
            return
        if self._copies is None:
            raise InvariantError("controller: a copy was submitted, but there is no L1")
        operations = queued.copy()
        queued.clear()
        device_pages = np.concatenate([operation.device_pages for operation in operations])
        host_pages = np.concatenate([operation.host_pages for operation in operations])
        transfer: Transfer
        try:
            if load:
                transfer = self._copies.load(host_pages, device_pages)
            else:
                transfer = self._copies.backup(device_pages, host_pages)
        except (RuntimeError, MemoryError, ValueError, IndexError) as error:
            # The device has no memory left for staging, say. Part of the copy may be under way.
            transfer = FailedTransfer(TransferError(f"a copy between device and host could not be started: {error}"))
        launched.append((transfer, operations))

    # L3

    def submit_prefetch(
        self, tag: Any, key: RadixKey, *, start_page: int, prior: bytes, timeout_s: float
    ) -> PrefetchOperation | None:
        """Look up in storage how much of `key` from `start_page` on is there; None, counted, over the bound.

        Its first ack is `found`; then the caller answers with `start_reads` or `drop`. Reads end in `prefetched`.
        """
        jobs = self._lifecycle.jobs
        if jobs is None or not self._within("prefetch", self._prefetches < self.options.prefetch_operations_max):
            return None
        deadline = self.clock() + min(timeout_s, PREFETCH_S_MAX)
        operation = PrefetchOperation(tag, jobs, key, start_page, prior, deadline)
        jobs.in_flight += 1
        self._prefetches += 1
        self._lookups.submit(operation)
        return operation

    def start_reads(self, operation: PrefetchOperation, host_pages: PageIds) -> None:
        """Lend host pages to a found prefetch and read the leading `len(host_pages)` pages into them."""
        operation.host_pages = host_pages
        operation.state = PrefetchState.READING
        self._read_pages += len(host_pages)
        self._reads.submit(operation)

    def drop(self, operation: PrefetchOperation) -> None:
        """End a found prefetch without reading: too short to pay, cancelled, or no room."""
        operation.state = PrefetchState.ENDED
        operation.jobs.in_flight -= 1
        self._prefetches -= 1

    def submit_backup(self, tag: Any, keys: Sequence[bytes], host_pages: PageIds, parent: bytes | None) -> bool:
        """Store pages of one chain; False, counted, if the bytes in flight would pass the bound."""
        jobs = self._lifecycle.jobs
        if jobs is None:
            return False
        bytes_after = (self._backup_pages + len(host_pages)) * self.host.frame_bytes
        # One operation may pass alone, however large: it could never be stored otherwise.
        if not self._within("backup", self._backup_pages == 0 or bytes_after <= self.options.backup_bytes_max):
            return False
        self._backup_pages += len(host_pages)
        jobs.in_flight += 1
        self._backups.submit(BackupOperation(tag, jobs, keys, host_pages, parent))
        return True

    # Acks

    def poll(self) -> Acks | None:
        """Everything that ended since the last call, None if nothing did. Never blocks. Looks after the workers too."""
        if self._groups:
            time_s = self.clock()
            if time_s >= self._next_supervision:
                self._next_supervision = time_s + SUPERVISE_EVERY_S
                for group in self._groups:
                    group.supervise()
                self._lifecycle.advance()
        writes, loads = self._launched_writes, self._launched_loads
        if not (writes and writes[0][0].done()) and not (loads and loads[0][0].done()) and self._finished.empty():
            return None
        acks = Acks()
        self._write_pages -= self._collect(writes, acks.written, acks)
        acks.load_times = _times(loads)
        self._load_pages -= self._collect(loads, acks.loaded, acks)
        self._moved["written"] += sum(len(operation.host_pages) for operation in acks.written)
        self._moved["loaded"] += sum(len(operation.host_pages) for operation in acks.loaded)
        # Only what is there now: workers may add faster than this loop drains.
        for _ in range(self._finished.qsize()):
            self._sort_finished(self._finished.get_nowait(), acks)
        return acks

    def _collect(
        self, launched: deque[tuple[Transfer, list[CopyOperation]]], done: list[CopyOperation], acks: Acks
    ) -> int:
        pages = 0
        while launched and launched[0][0].done():
            transfer, operations = launched.popleft()
            pages += sum(len(operation.device_pages) for operation in operations)
            if transfer.error is None:
                done.extend(operations)
            else:
                acks.failed_copies.extend((operation, transfer.error) for operation in operations)
        return pages

    def _sort_finished(self, job: PrefetchOperation | BackupOperation, acks: Acks) -> None:
        if isinstance(job, BackupOperation):
            job.jobs.in_flight -= 1
            self._backup_pages -= len(job.host_pages)
            self._moved["stored"] += job.outcomes.count(SetOutcome.STORED)
            acks.stored.append(job)
        elif job.state is PrefetchState.LOOKING_UP:
            acks.found.append(job)
        else:
            job.state = PrefetchState.ENDED
            job.jobs.in_flight -= 1
            self._prefetches -= 1
            self._read_pages -= len(job.host_pages)
            self._moved["prefetched"] += job.completed_pages
            acks.prefetched.append(job)

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
        return not (self._write_pages or self._load_pages or self._prefetches or self._backup_pages)

    def statistics(self) -> ControllerStatistics:
        """Depths now and totals since start. May be called from any thread.

        Asks the backend for its usage, which may touch its index: not for the scheduler's every step.
        """
        groups, backend = self._groups, self.backend
        return ControllerStatistics(
            queues=QueueStatistics(
                write=len(self._writes) + len(self._launched_writes),
                load=len(self._loads) + len(self._launched_loads),
                prefetch=self._lookups.queued if groups else 0,
                reads=self._reads.queued if groups else 0,
                backup=self._backups.queued if groups else 0,
                device_pages_lent=self._write_pages + self._load_pages,
                host_pages_lent=self._write_pages + self._load_pages + self._read_pages + self._backup_pages,
            ),
            written_pages=self._moved["written"],
            loaded_pages=self._moved["loaded"],
            prefetched_pages=self._moved["prefetched"],
            stored_pages=self._moved["stored"],
            refused=dict(self.refused),
            worker_errors={f"{g.name}:{kind}": n for g in groups for kind, n in dict(g.errors).items()},
            worker_restarts=sum(group.restarts for group in groups),
            workers_alive=sum(group.alive for group in groups),
            workers_stuck=sum(group.stuck_threads for group in groups),
            open_failures=self._lifecycle.open_failures,
            backend=None if backend is None else backend.statistics(),
            usage=None if backend is None else backend.usage(),
        )

    def stop_prefetching(self) -> None:
        """End all prefetches at their next batch; for shutdown."""
        if self._lifecycle.jobs is not None:
            self._lifecycle.jobs.prefetching_stopped = True

    def close(self, timeout_s: float) -> bool:
        """Finish the queued copies and stores within `timeout_s`, then end all threads; blocks.

        False if something did not end in time: its thread is left behind with the pages it was lent, and each stored
        object is whole or absent all the same.
        """
        deadline = self.clock() + timeout_s
        self.stop_prefetching()
        if self._lifecycle.jobs is not None:
            self._lifecycle.jobs.stop_at = deadline
        self.launch_writes()
        self.launch_loads()
        ended = self._copies is None or self._copies.close(timeout_s)
        for group in self._groups:
            ended = group.close(max(0.0, deadline - self.clock())) and ended
        return self._lifecycle.close(max(0.0, deadline - self.clock()), workers_ended=ended)


# No prefetch is worth waiting longer for, whatever its length.
PREFETCH_S_MAX = 60.0


def _look_up(operation: PrefetchOperation, beat: Callable[[], None]) -> None:
    operation.jobs.look_up(operation, beat)


def _read(operation: PrefetchOperation, beat: Callable[[], None]) -> None:
    operation.jobs.read(operation, beat)


def _store(operation: BackupOperation, beat: Callable[[], None]) -> None:
    operation.jobs.store(operation, beat)


def _times(launched: deque[tuple[Transfer, list[CopyOperation]]]) -> list[tuple[int, float]]:
    """(pages, seconds) of each leading copy that has ended well."""
    times = []
    for transfer, operations in launched:
        if not transfer.done():
            break
        if transfer.seconds is not None:
            times.append((sum(len(operation.host_pages) for operation in operations), transfer.seconds))
    return times


def _fail_prefetch(operation: PrefetchOperation) -> None:
    operation.failed = True


def _fail_backup(operation: BackupOperation) -> None:
    operation.outcomes.clear()  # pages without an outcome count as not stored

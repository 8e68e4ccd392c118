"""The threads that talk to storage: three groups of workers, and the backend they use at the moment.

Locking design: every method is called by the scheduler thread. Workers reach back through one `SimpleQueue` of finished
jobs.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from typing import Any

from ..backends.base import StorageBackend, register_memory
from ..config import TransferConfig
from ..supervised import SupervisedPool, WorkerFactory
from ..tiers import HostPool
from .gate import StorageGate
from .jobs import LookupJob, ReadJob, StoreJob
from .lifecycle import BackendLifecycle, OpenBackend
from .storage import StorageJobs

# Dead and stuck workers are looked for this often; a poll in between costs one clock reading.
SUPERVISE_EVERY_S = 0.1
# How long after its deadline a call counts as stuck: backends check their deadline between pages.
STUCK_GRACE_S = 2.0


class StorageWorkers:
    """Started with an open `backend`, or without one: then there are no threads until `replace`, and nothing may be
    submitted.

    `workers` makes the groups, `clock` is monotonic, in seconds. Registers the memory of `host` with each backend,
    which may block, here as well. Raises BackendError where no guard counts it instead.
    """

    def __init__(
        self,
        backend: StorageBackend | None,
        host: HostPool,
        config: TransferConfig,
        workers: WorkerFactory,
        clock: Callable[[], float],
    ) -> None:
        self.groups: list[SupervisedPool[Any]] = []
        self._host = host
        self._config = config
        self._clock = clock
        self._next_supervision = 0.0
        self._workers = workers
        self._finished: queue.SimpleQueue[LookupJob | ReadJob | StoreJob] = queue.SimpleQueue()
        self.gate = StorageGate(clock)
        self.lifecycle = BackendLifecycle(self.gate, self._jobs_for, workers, clock)
        if backend is not None:
            register_memory(backend, host.memory)
            self.lifecycle.start(backend)
            self._start()

    def _jobs_for(self, backend: StorageBackend) -> StorageJobs:
        return StorageJobs(
            backend,
            self._host,
            batch_pages=self._config.storage_batch_pages,
            deadline_s=self._config.storage_deadline,
            clock=self._clock,
        )

    def replace(self, open_backend: OpenBackend) -> None:
        """Have a backend opened in place of the one in use, if there is one. Does not block."""
        if not self.groups:
            self._start()
        self.lifecycle.replace(functools.partial(_open_registered, open_backend, self._host.memory))

    def _start(self) -> None:
        workers = self._workers
        patience_s = self._config.storage_deadline + STUCK_GRACE_S
        self.lookups = workers(
            "prefetch", self._config.lookup_workers, handle=_look_up, fail=_fail, acknowledge=self._finished.put,
            patience_s=patience_s,
        )  # fmt: skip
        self.reads = workers(
            "io", self._config.io_workers, handle=_read, fail=_fail, acknowledge=self._finished.put,
            patience_s=patience_s,
        )  # fmt: skip
        self.backups = workers(
            "backup", self._config.backup_workers, handle=_store, fail=_fail, acknowledge=self._finished.put,
            patience_s=patience_s,
        )  # fmt: skip
        self.groups = [self.lookups, self.reads, self.backups]

    def supervise(self) -> None:
        """Replace workers that died or hang, and come on with opening and closing backends. Once per step."""
        if not self.groups:
            return
        time_s = self._clock()
        if time_s >= self._next_supervision:
            self._next_supervision = time_s + SUPERVISE_EVERY_S
            for group in self.groups:
                group.supervise()
            self.lifecycle.advance()

    @property
    def any_finished(self) -> bool:
        """Whether `drain` would return something."""
        return not self._finished.empty()

    def drain(self) -> list[LookupJob | ReadJob | StoreJob]:
        """The jobs that have ended since the last call, marked as such."""
        # Only what is there now: workers may add faster than this loop drains.
        jobs = [self._finished.get_nowait() for _ in range(self._finished.qsize())]
        for job in jobs:
            job.ended = True
        return jobs

    def finish(self, job: StoreJob) -> None:
        """Have a job that no worker handles here come out of `drain`."""
        self._finished.put(job)

    def close(self, deadline: float) -> bool:
        """End all threads, each after what it has queued; blocks until `deadline`. False if one is left behind."""
        ended = True
        for group in self.groups:
            ended = group.close(max(0.0, deadline - self._clock())) and ended
        return self.lifecycle.close(max(0.0, deadline - self._clock()), workers_ended=ended)


def _open_registered(open_backend: OpenBackend, memory: memoryview) -> StorageBackend:
    """Opening worker: a backend that knows the memory its frames will come from."""
    backend = open_backend()
    try:
        register_memory(backend, memory)
    except BaseException:
        backend.close()
        raise
    return backend


def _look_up(job: LookupJob, beat: Callable[[], None]) -> None:
    job.storage.look_up(job, beat)


def _read(job: ReadJob, beat: Callable[[], None]) -> None:
    job.storage.read(job, beat)


def _store(job: StoreJob, beat: Callable[[], None]) -> None:
    job.storage.store(job, beat)


def _fail(job: LookupJob | ReadJob | StoreJob) -> None:
    job.failed = True

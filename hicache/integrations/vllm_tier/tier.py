"""ChunkTier: HiCache's storage below the host memory of an engine that transfers single chunks.

    lookup      a thread looks up the chunks of a step, a later step has the results (see `lookups`)
    promotion   storage to host memory; each chunk that arrived counts, also after a missing one
    cascade     host memory to storage; a chunk that could not be stored is lost

Each failure of storage is a miss or a chunk that is not stored. A job ends for the engine when its thread has ended it,
or when it hangs: then it is abandoned (see `jobs`).

Locking design: the engine's scheduler thread makes every call except those under "On the threads", and owns all fields.
Threads get a job or a batch of lookups, and return it through one `SimpleQueue`.
"""

from __future__ import annotations

import functools
import logging
import math
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...backends.base import Direction, GetOutcome
from ...backends.missed import UNAVAILABLE, answer_of, note_reads, note_writes
from ...backends.storage import Storage
from ...clock import SYSTEM_CLOCK, Clock
from ...config import HiCacheConfig
from ...controller.gate import OpenStore
from ...frame import PageBuffer
from ...keys import Namespace
from ...logs import LimitedLog
from ...supervised import SupervisedPool
from ..store import EngineGate
from .jobs import ChunkRows, TierJob, batches
from .lookups import Batch, LookupTable

logger = logging.getLogger(__name__)
OpenNamespace: TypeAlias = Callable[[Namespace], Storage]
_Beat: TypeAlias = Callable[[], None]

# The time after its deadline when a call counts as hung: backends check their deadline between pages.
GRACE_S = 0.25
# A thread in such a call is replaced somewhat later.
_STUCK_GRACE_S = 2.0
# The interval of checks for dead and stuck threads.
_SUPERVISE_EVERY_S = 0.1
# The time limit of a promotion if `prefetch.policy` sets none: the engine waits for it.
_PROMOTION_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended for the engine: of the chunks `names`, `moved` are those that were read or stored."""

    number: int
    names: Sequence[bytes]
    moved: Sequence[bytes]
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """True if all chunks were read, or stored."""
        return len(self.moved) == len(self.names)


@dataclass(frozen=True, slots=True, eq=False)
class _LookupCall:
    """The lookups of a step, and their store."""

    batch: Batch
    store: OpenStore


class ChunkTier:
    """See the module's docstring. `memory` is the engine's host memory, in rows of `namespace.shape.payload_bytes`.

    `open_namespace` opens the store for a namespace, as by EngineGate. `key_of` derives the page key of a chunk from
    its name. `in_place` transfers chunks without a copy; see `jobs` for its cost. Raises as EngineGate.
    """

    def __init__(
        self, config: HiCacheConfig, namespace: Namespace, memory: memoryview, open_namespace: OpenNamespace,
        key_of: Callable[[bytes], bytes], *, in_place: bool = False, processes: int = 1, clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        transfer = config.transfer
        self._config, self._namespace, self._open_namespace = config, namespace, open_namespace
        self._key_of, self._in_place, self._clock = key_of, in_place, clock
        self._batch_pages = transfer.storage_batch_pages
        self._rows = ChunkRows(memory, namespace.shape.payload_bytes, self._batch_pages)
        self._stores_max = int(self._rows.count * transfer.store_host_share)
        patience_s = min(config.prefetch.timeout_base, transfer.storage_deadline)
        self._lookups = LookupTable(patience_s, clock)
        self._log = LimitedLog(logger, clock=clock)
        self._jobs: dict[int, TierJob] = {}  # in flight for the engine
        self._stores_queued = 0  # chunks of the stores among them
        self._ended: list[Ended] = []  # not reported yet
        self._finished: queue.SimpleQueue[TierJob | _LookupCall] = queue.SimpleQueue()
        self._supervise_at = -math.inf
        self._gate = EngineGate(
            config, functools.partial(open_namespace, namespace), "tier", processes=processes, clock=clock
        )
        deadline_s = transfer.storage_deadline
        self._lookup_workers: SupervisedPool[_LookupCall] = SupervisedPool(
            "tier-lookup", transfer.lookup_workers, handle=self._answer, acknowledge=self._finished.put,
            patience_s=patience_s + _STUCK_GRACE_S, clock=clock,
        )
        self._pools: dict[Direction, SupervisedPool[TierJob]] = {
            direction: SupervisedPool(
                f"tier-{direction}", threads, handle=handle, fail=_fail, acknowledge=self._finished.put,
                patience_s=deadline_s + _STUCK_GRACE_S, clock=clock,
            )
            for direction, threads, handle in (
                (Direction.READ, transfer.io_workers, self._read),
                (Direction.WRITE, transfer.backup_workers, self._write),
            )
        }

    # Each step of the engine

    def lookup(self, name: bytes, request: str) -> bool | None:
        """Return whether chunk `name` is stored, None while unknown; False while storage is closed. Does not block."""
        if not self._gate.admits(Direction.READ):
            self._gate.accounts.missing([self._key_of(name)], UNAVAILABLE)
            return False
        self._take_finished()
        return self._lookups.ask(name, request)

    def load(self, number: int, names: Sequence[bytes], rows: Sequence[int]) -> None:
        """Read chunks into rows of the engine's memory. Does not block; `ended` returns job `number`."""
        limit_s, prefetch = _PROMOTION_S_MAX, self._config.prefetch
        if prefetch.policy == "timeout":
            tokens = len(names) * self._namespace.shape.tokens
            limit_s = prefetch.timeout_base + prefetch.timeout_per_1024_tokens / 1024 * tokens
        self._submit(Direction.READ, number, names, rows, self._clock() + limit_s)

    def store(self, number: int, names: Sequence[bytes], rows: Sequence[int]) -> None:
        """Store chunks from rows of the engine's memory; as `load`. Stores nothing while storage is closed, and beyond
        the limit of waiting chunks."""
        if self._stores_queued and self._stores_queued + len(names) > self._stores_max:
            self._log.warn("queue", "vllm tier: %d chunks wait to be stored, the limit is %d; chunks are not stored",
                           self._stores_queued, self._stores_max)
            self._end(Direction.WRITE, Ended(number, names, []))
            return
        self._submit(Direction.WRITE, number, names, rows, math.inf)

    def _submit(
        self, direction: Direction, number: int, names: Sequence[bytes], rows: Sequence[int], deadline_s: float
    ) -> None:
        if not self._gate.admits(direction):
            self._end(direction, Ended(number, names, []))
            return
        keys = [self._key_of(name) for name in names]
        job = TierJob(number, direction, names, keys, rows, self._gate.enter(), deadline_s, deadline_s + GRACE_S)
        self._jobs[number] = job
        self._stores_queued += len(names) if direction is Direction.WRITE else 0
        self._pools[direction].submit(job)

    def ended(self) -> list[Ended]:
        """Return the jobs that have ended since the last call. Does not block."""
        self._take_finished()
        self._leave(before_s=self._clock())
        ended, self._ended = self._ended, []
        return ended

    def step(self) -> None:
        """Start new lookups in storage, and check stores and threads. Once per step of the engine; does not block."""
        self._gate.settle()
        batch = self._lookups.take_new()
        if batch is not None:
            if self._gate.may(Direction.READ):
                self._lookup_workers.submit(_LookupCall(batch, self._gate.enter()))
            else:
                self._lookups.settle(batch)
        if self._clock() >= self._supervise_at:
            self._supervise_at = self._clock() + _SUPERVISE_EVERY_S
            self._gate.slot.advance()
            self._lookup_workers.supervise()
            for pool in self._pools.values():
                pool.supervise()

    def forget(self, request: str) -> None:
        self._lookups.forget(request)

    def _take_finished(self) -> None:
        for _ in range(self._finished.qsize()):
            self._take(self._finished.get_nowait())

    def _take(self, finished: TierJob | _LookupCall) -> None:
        self._gate.slot.leave(finished.store)
        if isinstance(finished, _LookupCall):
            self._lookups.settle(finished.batch)
            return
        if finished.is_left:
            return
        if finished.failed:
            self._gate.failed(finished.direction)
        elif finished.done:
            self._gate.succeeded(finished.direction)
        self._report(finished)

    def _report(self, job: TierJob) -> None:
        del self._jobs[job.number]
        self._stores_queued -= len(job.names) if job.direction is Direction.WRITE else 0
        moved = [job.names[position] for position in job.done]
        self._end(job.direction, Ended(job.number, job.names, moved, job.seconds))

    def _end(self, direction: Direction, ended: Ended) -> None:
        if direction is Direction.WRITE:
            self._lookups.mark(ended.moved, found=True)
        elif not ended.is_complete:
            self._lookups.mark(set(ended.names).difference(ended.moved), found=False)
        self._ended.append(ended)

    def _leave(self, before_s: float) -> None:
        """Abandon the jobs that hang at this time, except in-place jobs, whose calls use the engine's rows."""
        if self._in_place:
            return
        for job in [job for job in self._jobs.values() if job.hung_at_s <= before_s]:
            if job.lock.acquire(blocking=False):  # otherwise its thread is copying a page: it does not hang
                job.is_left = job.is_cancelled = True
                job.lock.release()
                self._gate.failed(job.direction)
                self._log.warn("hung", "vllm tier: storage hangs in a %s of %d chunks; they count as a miss",
                               job.direction, len(job.names))
                self._report(job)

    # Rarely

    def reset(self, epoch: int) -> None:
        """End all jobs, and continue with storage under the new namespace of the weights `epoch`.

        Blocks, at most for `transfer.shutdown_deadline` if chunks are copied. In place it waits for each call in flight
        without a limit, because a store may still write to rows that get other chunks next.
        """
        self._cancel(self._jobs.values())
        deadline_s = self._clock() + self._config.transfer.shutdown_deadline
        while self._jobs:
            try:
                self._take(self._finished.get(timeout=0.05))
            except queue.Empty:
                if self._clock() < deadline_s:
                    continue
                self._leave(before_s=math.inf)
                if self._in_place:
                    self._log.warn("reset", "vllm tier: the reset waits for %d jobs in storage", len(self._jobs))
        self._lookups.refuse_all()
        self._gate.accounts.cleared()
        namespace = replace(self._namespace, weights_epoch=epoch)
        self._gate.replace(functools.partial(self._open_namespace, namespace))

    def close(self) -> bool:
        """End all threads and close storage. Blocks for at most `transfer.shutdown_deadline`; queued chunks are stored
        within that time. Return False if a call hangs: its thread remains, with its memory."""
        deadline_s = self._clock() + self._config.transfer.shutdown_deadline
        self._cancel(job for job in self._jobs.values() if job.direction is Direction.READ)
        for direction in Direction:
            self._gate.stop(direction, deadline_s)

        def left_s() -> float:
            return max(0.0, deadline_s - self._clock())

        ended = self._pools[Direction.WRITE].close(left_s())
        self._cancel(self._jobs.values())
        ended = all([self._pools[Direction.READ].close(left_s()), self._lookup_workers.close(left_s()), ended])
        ended = self._gate.close(left_s(), calls_ended=ended)
        if ended:
            self._rows.release()
        else:
            logger.warning("vllm tier: a call of storage still hangs; its thread ends when the call returns")
        return ended

    def _cancel(self, jobs: Iterable[TierJob]) -> None:
        for job in jobs:
            job.is_cancelled = True

    # On the threads

    def _answer(self, call: _LookupCall, beat: _Beat) -> None:
        batch = call.batch
        for part in batches(len(batch.questions), self._batch_pages):
            if self._clock() >= batch.deadline_s:
                return
            beat()
            keys, errors = [self._key_of(batch.questions[position][0]) for position in part], list[str]()
            found = call.store.backend.batch_has(keys, deadline=batch.deadline_s, errors=errors)
            lost = [key for key, is_there in zip(keys, found, strict=True) if not is_there]
            self._gate.accounts.missing(lost, answer_of(errors, "lookup"))
            batch.answers += found

    def _read(self, job: TierJob, beat: _Beat) -> None:
        backend = job.store.backend
        for part in self._parts(job, beat):
            keys, pages = [job.keys[position] for position in part], self._pages(job, part)
            began_s, errors = self._clock(), list[str]()
            outcomes = backend.batch_get(keys, pages, deadline=self._deadline_s(job), errors=errors)
            job.seconds += self._clock() - began_s
            note_reads(self._gate.accounts, keys, outcomes, errors)
            with job.lock:
                if not job.belongs():
                    return
                for position, page, outcome in zip(part, pages, outcomes, strict=True):
                    if outcome is not GetOutcome.HIT:
                        continue
                    if isinstance(page, memoryview):
                        self._rows.fill_row(job.rows[position], page)
                    job.done.append(position)
            if GetOutcome.ERROR in outcomes:
                job.failed = True
                return

    def _write(self, job: TierJob, beat: _Beat) -> None:
        """Store in batches; a page that could not be stored ends the job."""
        backend = job.store.backend
        for part in self._parts(job, beat):
            job.hung_at_s = self._clock() + self._config.transfer.storage_deadline + GRACE_S
            keys, pages = [job.keys[position] for position in part], self._pages(job, part)
            with job.lock:
                if not job.belongs():
                    return
                for position, page in zip(part, pages, strict=True):
                    if isinstance(page, memoryview):
                        self._rows.fill_frame(job.rows[position], page)
            began_s, errors = self._clock(), list[str]()
            outcomes = backend.batch_set(keys, pages, parent=None, deadline=self._deadline_s(job), errors=errors)
            job.seconds += self._clock() - began_s
            note_writes(self._gate.accounts, keys, outcomes, errors)
            with job.lock:
                if not job.belongs():
                    return
                job.done += [position for position, outcome in zip(part, outcomes, strict=True) if outcome.is_stored]
            if not all(outcome.is_stored for outcome in outcomes):
                job.failed = True
                return

    def _parts(self, job: TierJob, beat: _Beat) -> Iterator[range]:
        """Yield the positions of each call of a job, until it is cancelled or its time is over."""
        for part in batches(len(job.keys), self._batch_pages if self._in_place else self._rows.staged_frames):
            if job.is_cancelled or self._clock() >= self._last_s(job):
                return
            beat()
            yield part

    def _pages(self, job: TierJob, part: range) -> Sequence[PageBuffer]:
        return self._rows.views(job.rows[part.start : part.stop]) if self._in_place else self._rows.frames(len(part))

    def _last_s(self, job: TierJob) -> float:
        """Return the latest start of a job's last call."""
        return min(job.deadline_s, job.store.until[job.direction])

    def _deadline_s(self, job: TierJob) -> float:
        """Return the deadline of a call that begins now."""
        return min(self._last_s(job), self._clock() + self._config.transfer.storage_deadline)


def _fail(job: TierJob) -> None:
    job.failed = True

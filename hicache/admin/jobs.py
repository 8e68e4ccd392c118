"""Jobs: long work of an operator, with progress and cancellation.

Invariant: at most `JOBS_MAX` jobs are stored; unfinished jobs are never dropped.

Locking design: one lock guards the table and the fields of its entries, and is held for a few instructions. Threads of
a SupervisedPool run the steps; a job is cancelled between two steps.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..clock import Clock
from ..errors import AdminError, HiCacheError
from ..supervised import Beat, SupervisedPool
from .models import Job, JobKind, JobState, Progress
from .stores import Steps

# Two, so that a long scrub does not delay the clearing of a store.
THREADS = 2
UNFINISHED_MAX = 8
JOBS_MAX = 64


@dataclass(slots=True, eq=False)
class _Entry:
    id: str
    kind: JobKind
    what: str
    steps: Steps
    ended: Callable[[Job], None]
    clock: Clock
    began_s: float
    state: JobState = JobState.QUEUED
    is_cancelling: bool = False
    ended_s: float | None = None
    progress: Progress = field(default_factory=Progress)
    error: str = ""

    def snapshot(self) -> Job:
        elapsed_s = (self.clock() if self.ended_s is None else self.ended_s) - self.began_s
        return Job(
            id=self.id, kind=self.kind, what=self.what, state=self.state, is_cancelling=self.is_cancelling,
            elapsed_s=elapsed_s, progress=self.progress, error=self.error,
        )


class Jobs:
    """See the module's docstring. Threads start when first needed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._pool: SupervisedPool[_Entry] = SupervisedPool(
            "admin", THREADS, handle=self._run, fail=functools.partial(self._end, state=JobState.FAILED), linger_s=10.0,
            clock=clock,
        )

    def submit(self, kind: JobKind, what: str, steps: Steps, ended: Callable[[Job], None]) -> Job:
        """Start a job, or queue it. `ended` is called on its thread. Raises AdminError if too many have not ended."""
        entry = _Entry(secrets.token_hex(4), kind, what, steps, ended, self._clock, self._clock())
        with self._lock:
            unfinished = [one for one in self._entries.values() if not one.state.is_final]
            if len(unfinished) >= UNFINISHED_MAX:
                raise AdminError("busy", f"{UNFINISHED_MAX} jobs have not ended; cancel one, or wait for one")
            for old in [one for one in self._entries.values() if one.state.is_final]:
                if len(self._entries) >= JOBS_MAX:
                    del self._entries[old.id]
            self._entries[entry.id] = entry
        self._pool.submit(entry)
        self._pool.supervise()
        return entry.snapshot()

    def get(self, job: str) -> Job:
        """Return a job. Raises AdminError if it is unknown."""
        with self._lock:
            return self._require(job).snapshot()

    def all(self) -> list[Job]:
        """Return all stored jobs, the oldest first."""
        with self._lock:
            return [entry.snapshot() for entry in self._entries.values()]

    def cancel(self, job: str) -> Job:
        """End a job after its current step. Idempotent. Raises AdminError if it is unknown."""
        with self._lock:
            entry = self._require(job)
            entry.is_cancelling = not entry.state.is_final
        self._pool.supervise()
        return entry.snapshot()

    def close(self, timeout_s: float) -> None:
        """Cancel all jobs and end the threads; blocks."""
        with self._lock:
            for entry in self._entries.values():
                entry.is_cancelling = not entry.state.is_final
        self._pool.close(timeout_s)

    def _require(self, job: str) -> _Entry:
        entry = self._entries.get(job)
        if entry is None:
            raise AdminError("unknown_job", f"job {job[:16]!r} does not exist, or was dropped; list the jobs")
        return entry

    def _run(self, entry: _Entry, beat: Beat) -> None:
        state = JobState.DONE
        with self._lock:
            entry.state = JobState.RUNNING
        try:
            while not entry.is_cancelling:
                progress = next(entry.steps, None)
                beat()
                if progress is None:
                    break
                with self._lock:
                    entry.progress = progress
            else:
                state = JobState.CANCELLED
        except HiCacheError as error:
            entry.error, state = str(error), JobState.FAILED
        entry.steps.close()  # also closes its open store
        self._end(entry, state)

    def _end(self, entry: _Entry, state: JobState) -> None:
        with self._lock:
            entry.state, entry.ended_s, entry.is_cancelling = state, self._clock(), False
            if state is JobState.FAILED and not entry.error:
                entry.error = "an unexpected error, which is in the log"
            snapshot = entry.snapshot()
        entry.ended(snapshot)

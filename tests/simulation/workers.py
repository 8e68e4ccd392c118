"""Workers without threads: the schedule decides when a job runs, and runs other actions in the middle of it.

A job runs on the caller's stack. Before it starts, at each `beat` and before its acknowledgement it calls `elsewhere`,
which runs steps of the scheduler, the device and other workers. So a job can stay in flight for as long as the schedule
decides. Overlapping jobs end in the reverse order of their start.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, Protocol, TypeVar

from hicache.supervised import RESTART_S_MIN, SUBSTITUTES_MAX, SupervisedPool

Job = TypeVar("Job")


class Died(BaseException):
    """Ends a worker in the middle of its job, like SystemExit."""


class Schedule(Protocol):
    """The part of a simulation that a worker needs."""

    def clock(self) -> float:
        """Return simulated seconds."""

    def elsewhere(self) -> None:
        """Run some steps of the scheduler, the device and other workers."""

    def mishap(self) -> BaseException | None:
        """Return an exception that a worker raises now; usually None."""


class SimulatedWorkers(SupervisedPool[Job]):
    """A SupervisedPool of jobs with the same rules, but without threads. `work` runs one job."""

    def __init__(self, name: str, count: int, *, schedule: Schedule, **rest: Any) -> None:
        super().__init__(name, 0, **rest)
        self._schedule = schedule
        self._waiting: deque[Job] = deque()
        self._seats = count  # number of workers that wait for a job
        self._in_flight: list[_Run[Job]] = []
        self._dead: list[Job] = []
        self._due: list[float] = []  # times at which dead workers are replaced

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> int:
        return self._seats + sum(not run.stuck for run in self._in_flight)

    @property
    def ready(self) -> bool:
        """True if a job and a worker for it are waiting."""
        return bool(self._waiting) and self._seats > 0

    def submit(self, job: Job) -> None:
        self._waiting.append(job)

    def withdraw(self, job: Job) -> bool:
        if job not in self._waiting:
            return False
        self._waiting.remove(job)
        return True

    def work(self) -> None:
        """Run the next job. REQUIRES: `ready`."""
        run = _Run(self._waiting.popleft(), self._schedule)
        self._seats -= 1
        self._in_flight.append(run)
        try:
            self._schedule.elsewhere()
            self.handle(run.job, run.beat)
        except Died:
            self._in_flight.remove(run)
            self._dead.append(run.job)
            return
        except Exception as error:
            self.handler_failed(run.job, error)
        self._schedule.elsewhere()
        self._in_flight.remove(run)
        self._end(run)

    def _end(self, run: _Run[Job]) -> None:
        self.acknowledge(run.job)
        self._seats += not run.stuck  # a substitute has taken the place of a stuck worker

    def handler_failed(self, job: Job, error: Exception) -> None:
        """As the original, without the log: thousands of jobs fail on purpose."""
        self.errors[type(error).__name__] += 1
        self.fail(job)

    def supervise(self) -> None:
        time_s = self._schedule.clock()
        for job in self._dead:
            self.errors["ThreadDied"] += 1
            self.fail(job)
            self.acknowledge(job)
            self._due.append(time_s + RESTART_S_MIN)
        self._dead.clear()
        for run in self._in_flight:
            late = time_s > run.since + self.patience_s
            if late and not run.stuck and sum(other.stuck for other in self._in_flight) < SUBSTITUTES_MAX:
                self._substitute_run(run)
        due = sum(at <= time_s for at in self._due)
        self._due = [at for at in self._due if at > time_s]
        self.restarts += due
        self._seats += due

    def _substitute_run(self, run: _Run[Job]) -> None:
        run.stuck = True
        self.stuck_threads += 1
        self._seats += 1

    def close(self, timeout_s: float = 0.0) -> bool:
        """Run all queued jobs, if necessary with an additional worker. Return True if no job is in flight."""
        self._seats += 1
        while self._waiting:
            self.work()
            self.supervise()
            self._seats = max(self._seats, 1)
        self.supervise()
        return not self._in_flight


class _Run(Generic[Job]):
    """One job in flight."""

    def __init__(self, job: Job, schedule: Schedule) -> None:
        self.job = job
        self.stuck = False
        self.since = schedule.clock()
        self._schedule = schedule

    def beat(self, wait_s: float = 0.0) -> None:
        self.since = self._schedule.clock()
        mishap = self._schedule.mishap()
        if mishap is not None:
            raise mishap
        self._schedule.elsewhere()

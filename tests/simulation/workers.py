"""Workers on nobody's thread: a job runs when the schedule says so, and other things happen in the middle of it.

A job that is taken runs on the caller's stack. At each `beat`, before it starts and before it is acknowledged, it lets
others go on (`elsewhere`): the scheduler's steps, the device, other workers. So a job that is under way stays so for as
long as the schedule likes, whatever happens meanwhile; jobs that overlap end in the reverse of their order.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, Protocol, TypeVar

from hicache.supervised import RESTART_S_MIN, SUBSTITUTES_MAX, SupervisedPool

Job = TypeVar("Job")


class Died(BaseException):
    """Ends a worker in the middle of its job, as SystemExit would."""


class Schedule(Protocol):
    """What a worker needs from the simulation."""

    def clock(self) -> float:
        """Simulated seconds."""

    def elsewhere(self) -> None:
        """Let others go on for a while."""

    def mishap(self) -> BaseException | None:
        """What goes wrong in a worker now, mostly nothing."""


class SimulatedWorkers(SupervisedPool[Job]):
    """The rules of a SupervisedPool that takes jobs, without its threads. `work` runs one job."""

    def __init__(self, name: str, count: int, *, schedule: Schedule, **rest: Any) -> None:
        super().__init__(name, 0, **rest)
        self._schedule = schedule
        self._waiting: deque[Job] = deque()
        self._seats = count  # workers that wait for a job
        self._under_way: list[_Run[Job]] = []
        self._dead: list[Job] = []
        self._due: list[float] = []  # when dead workers are replaced

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> int:
        return self._seats + sum(not run.stuck for run in self._under_way)

    @property
    def ready(self) -> bool:
        """Whether `work` has a job and a worker for it."""
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
        self._under_way.append(run)
        try:
            self._schedule.elsewhere()
            self.handle(run.job, run.beat)
        except Died:
            self._under_way.remove(run)
            self._dead.append(run.job)
            return
        except Exception as error:
            self.handler_failed(run.job, error)
        self._schedule.elsewhere()
        self._under_way.remove(run)
        self._end(run)

    def _end(self, run: _Run[Job]) -> None:
        self.acknowledge(run.job)
        self._seats += not run.stuck  # else a substitute has its place

    def handler_failed(self, job: Job, error: Exception) -> None:
        """As the original, without the log: thousands of seeds fail jobs on purpose."""
        self.errors[type(error).__name__] += 1
        self._fail(job)

    def supervise(self) -> None:
        time_s = self._schedule.clock()
        for job in self._dead:
            self.errors["ThreadDied"] += 1
            self._fail(job)
            self.acknowledge(job)
            self._due.append(time_s + RESTART_S_MIN)
        self._dead.clear()
        for run in self._under_way:
            late = time_s > run.since + self._patience_s
            if late and not run.stuck and sum(other.stuck for other in self._under_way) < SUBSTITUTES_MAX:
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
        """Runs what is queued; nobody is left out, so there is always one worker more."""
        self._seats += 1
        while self._waiting:
            self.work()
            self.supervise()
            self._seats = max(self._seats, 1)
        self.supervise()
        return not self._under_way


class _Run(Generic[Job]):
    """One job under way."""

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

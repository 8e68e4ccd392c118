"""Supervised worker threads.

Each job of a group is handled by one of its threads and acknowledged exactly once, whatever happens to the handler:
an exception is counted, logged once per kind and turned into a failed job; a thread that dies is noticed by
`supervise`, its job is acknowledged as failed and the thread is replaced after a back-off; a thread that is stuck in a
call far past the call's deadline gets a substitute, while its job stays open (and its pages lent) until the call
really returns.

Locking design: `_jobs` is a deque, of which each operation is atomic; the scheduler appends and removes jobs, and a
thread takes the first one after it got True from `_wakeups`. `_wakeups` and the caller's ack queue are `SimpleQueue`s.
`busy`, `busy_since` and `stuck` of a thread are
written by that thread or by the supervisor and read by the other; each is a single reference. `supervise`, `submit`,
`withdraw` and `close` are called by the scheduler thread alone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

from .operations import now

logger = logging.getLogger(__name__)

Job = TypeVar("Job")

# How long after a job's deadline its thread counts as stuck: backends check their deadline between pages.
STUCK_GRACE_S = 2.0
# A thread that dies again and again is restarted after 0.1, 0.2, 0.4 ... 10 s.
RESTART_BACKOFF_S_MIN = 0.1
RESTART_BACKOFF_S_MAX = 10.0
# One that has lived this long starts over with the shortest back-off.
STABLE_S = 60.0
# Stuck threads that have a substitute at one time; beyond that, jobs wait (and are bounded by who submits them).
SUBSTITUTES_MAX = 4


class _WorkerThread(threading.Thread, Generic[Job]):
    def __init__(self, group: WorkerGroup[Job], number: int) -> None:
        super().__init__(name=f"hicache-{group.name}-{number}", daemon=True)
        self.group = group
        self.busy: Job | None = None
        self.busy_since = 0.0
        self.started_at = now()
        self.stuck = False

    def run(self) -> None:
        group = self.group
        while (job := group.take()) is not None:
            self.beat()
            self.busy = job
            try:
                group.handle(job, self.beat)
            except Exception as error:
                group.handler_failed(job, error)
            self.busy = None
            group.acknowledge(job)
            if self.stuck:
                return  # a substitute has taken this thread's place

    def beat(self) -> None:
        """Tell the supervisor that the job has come on."""
        self.busy_since = now()


class WorkerGroup(Generic[Job]):
    """`count` threads that handle jobs of one kind.

    `handle(job, beat)` runs on a worker and calls `beat` before each step that may block up to `deadline_s`; `fail`
    marks a job whose handler raised or whose thread died; `acknowledge` is called once per job, on the worker (or on
    the scheduler if the worker died).
    """

    def __init__(
        self,
        name: str,
        count: int,
        *,
        handle: Callable[[Job, Callable[[], None]], None],
        fail: Callable[[Job], None],
        acknowledge: Callable[[Job], None],
        deadline_s: float,
    ) -> None:
        self.name = name
        self.handle = handle
        self.acknowledge = acknowledge
        self.errors: Counter[str] = Counter()
        self.restarts = 0
        self.stuck_threads = 0
        self._fail = fail
        self._deadline_s = deadline_s
        self._jobs: deque[Job] = deque()
        self._wakeups: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: there may be a job; False ends a thread
        self._restart_at: list[float] = []
        self._backoff_s = RESTART_BACKOFF_S_MIN
        self._number = 0
        self._closed = False
        self._threads: list[_WorkerThread[Job]] = []
        for _ in range(count):
            if not self._start_thread():
                self._restart_at.append(now())  # the system has no thread to give now; `supervise` tries again

    @property
    def queued(self) -> int:
        """Jobs that wait for a thread."""
        return len(self._jobs)

    @property
    def alive(self) -> int:
        """Threads that run and are not stuck."""
        return sum(thread.is_alive() and not thread.stuck for thread in self._threads)

    def submit(self, job: Job) -> None:
        """Queue a job. Does not block. The caller bounds how many it submits."""
        self._jobs.append(job)
        self._wakeups.put(True)

    def withdraw(self, job: Job) -> bool:
        """Take back a job that no thread has taken; it is not acknowledged. False for others, and once closed."""
        if self._closed:
            return False
        try:
            self._jobs.remove(job)
        except ValueError:
            return False
        with suppress(queue.Empty):  # a thread has it, and finds no job for it
            self._wakeups.get_nowait()
        return True

    def take(self) -> Job | None:
        """The next job, on a worker thread; None ends the thread."""
        while self._wakeups.get():
            with suppress(IndexError):  # the job was withdrawn
                return self._jobs.popleft()
        return None

    def handler_failed(self, job: Job, error: Exception) -> None:
        """Turn an exception of the handler into a failed job, on a worker thread."""
        kind = type(error).__name__
        self.errors[kind] += 1
        if self.errors[kind] == 1:
            logger.exception("%s worker: unexpected %s; counted from now on", self.name, kind)
        self._fail(job)

    def supervise(self) -> None:
        """Replace dead and stuck threads. Cheap; called every few steps by the scheduler."""
        time_s = now()
        longest_call_s = self._deadline_s + STUCK_GRACE_S
        for thread in list(self._threads):
            if not thread.is_alive():
                self._bury(thread, time_s)
            elif thread.busy is not None and not thread.stuck and time_s > thread.busy_since + longest_call_s:
                self._substitute(thread)
        due = sum(at <= time_s for at in self._restart_at)
        self._restart_at = [at for at in self._restart_at if at > time_s]
        for _ in range(due):
            if self._start_thread():
                self.restarts += 1
            else:
                self._restart_at.append(time_s + RESTART_BACKOFF_S_MAX)

    def close(self, timeout_s: float) -> bool:
        """Let the threads finish what is queued, then end. False if one did not in time (it is left behind)."""
        self._closed = True
        for _ in self._threads:
            self._wakeups.put(False)
        deadline = now() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - now()))
        for thread in list(self._threads):
            if not thread.is_alive():
                self._bury(thread, now())
        return not self._threads

    def _substitute(self, thread: _WorkerThread[Job]) -> None:
        """Give a stuck thread's place to another, as far as substitutes go: a store that hangs must not eat threads."""
        if sum(other.stuck for other in self._threads) >= SUBSTITUTES_MAX:
            return
        if self._start_thread():
            thread.stuck = True
            self.stuck_threads += 1
            logger.error("%s worker is stuck in a call past its deadline; started another", self.name)

    def _bury(self, thread: _WorkerThread[Job], time_s: float) -> None:
        """Forget a thread that has ended. One that died in a job fails the job and is restarted after a back-off."""
        self._threads.remove(thread)
        if thread.busy is not None:
            self.errors["ThreadDied"] += 1
            self._fail(thread.busy)
            self.acknowledge(thread.busy)
        if thread.stuck or self._closed:
            return
        if time_s - thread.started_at > STABLE_S:
            self._backoff_s = RESTART_BACKOFF_S_MIN
        logger.error("%s worker died; restarting it in %.1f s", self.name, self._backoff_s)
        self._restart_at.append(time_s + self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, RESTART_BACKOFF_S_MAX)

    def _start_thread(self) -> bool:
        self._number += 1
        thread = _WorkerThread(self, self._number)
        try:
            thread.start()
        except RuntimeError:
            logger.exception("%s worker: the system gives no more threads", self.name)
            return False
        self._threads.append(thread)
        return True


# Called as the class is; a simulation gives one that starts no threads.
WorkerFactory: TypeAlias = Callable[..., WorkerGroup[Any]]

"""Supervised threads that take jobs, pages of batches, and calls with a deadline from one queue.

Each piece of work ends exactly once for its caller. An exception is counted, logged once per kind, and fails one job or
one page. If a thread dies, its job fails and the thread is replaced after a back-off. If a thread hangs in a job, a
substitute starts, and the job stays open until the call returns. Threads are daemon threads: a hanging store must not
keep a process from ending.

Locking design: `_queue` is a `SimpleQueue` and `_jobs` a deque, whose operations are atomic. `_state` of a pool guards
its threads, `stuck`, `_load` and `_restart_at`. It is held for a few instructions, never while a job or a callback
runs. A pool whose threads start at once takes it in `supervise`, `call` and `close` and at the start and end of a
thread, but not for a job or a batch. `job` and `busy_since` of a thread are written by that thread; each is one
reference. The docstrings of `_Batch` and `_Call` describe their locks.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from .backoff import Backoff
from .clock import SYSTEM_CLOCK, Clock
from .errors import InvariantError

logger = logging.getLogger(__name__)

Job = TypeVar("Job")
Result = TypeVar("Result")

# A thread that dies repeatedly is restarted after 0.1, 0.2, 0.4 ... 10 s.
RESTART_S_MIN = 0.1
RESTART_S_MAX = 10.0
# After a thread has lived this long, the next back-off is the shortest one again.
STABLE_S = 60.0
# Stuck threads that have a substitute at the same time. Above this number jobs wait; their submitter bounds them.
SUBSTITUTES_MAX = 4
# A usual `linger_s`: starting a thread again takes some 0.1 ms.
LINGER_S = 10.0


class NoThread(RuntimeError):
    """The pool does not have a thread for a call, and the system cannot start one."""


class Beat(Protocol):
    """Report to the supervisor that a job makes progress, and that its next step intentionally waits for `wait_s`."""

    def __call__(self, wait_s: float = 0.0) -> None: ...


class _Thread(threading.Thread, Generic[Job]):
    def __init__(self, pool: SupervisedPool[Job], number: int, why: str) -> None:
        super().__init__(name=f"hicache-{pool.name}-{number}", daemon=True)
        self.job: Job | None = None
        self.busy_since = math.inf  # of the current step of a job
        self.started_at = pool.clock()
        self.stuck = False  # a substitute has replaced this thread
        self._pool = pool
        self._why = why  # the reason for a late start; the thread logs it, because a scheduler may start the thread

    def run(self) -> None:
        if self._why:
            logger.warning("worker %s: started another thread, because %s", self._pool.name, self._why)
        try:
            self._pool._serve(self)
        except BaseException:
            self._pool._bury(self)
            raise
        with self._pool._state, suppress(ValueError):
            self._pool._threads.remove(self)

    def beat(self, wait_s: float = 0.0) -> None:
        """See Beat."""
        self.busy_since = self._pool.clock() + wait_s


_Task: TypeAlias = Callable[[_Thread[Any]], None]


def _no_work(index: int) -> None:
    pass


class _Batch:
    """Calls `work(i)` for each i below `count`, on every thread that calls `run`.

    Locking design: the counter's `next` is atomic in CPython; `_lock` guards `left`, the pages that have not ended.
    `_unfinished` is held until the last page has ended. It is a plain lock, because an Event costs as much as the rest
    of a small batch.
    """

    def __init__(self, count: int, work: Callable[[int], None]) -> None:
        self._take = itertools.count().__next__
        self._count = count
        self._work = work
        self._lock = threading.Lock()
        self.left = count
        self._unfinished = threading.Lock()
        self._unfinished.acquire()

    def run(self, thread: object = None) -> None:
        take, count = self._take, self._count
        while (index := take()) < count:
            try:
                self._work(index)
            finally:
                with self._lock:
                    self.left -= 1
                    if not self.left:
                        self._unfinished.release()

    def give_up(self) -> None:
        """Skip the pages that no thread has taken."""
        self._work = _no_work
        self.run()

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait for the pages that other threads have taken, then drop the reference to the work: a busy thread may find
        this batch in the queue much later. Return False if a page has not ended after `timeout_s`; -1 is no limit."""
        ended = self._unfinished.acquire(timeout=timeout_s)
        self._work = _no_work
        return ended


class _Call(Generic[Result]):
    """A call that its caller may abandon.

    Locking design: the thread ends the call and sets `_ended`, or the caller abandons it and sets `_abandoned`, both
    under `_lock`; the second of the two sees the flag of the first. The other fields belong to the thread until
    `_ended`. `_unfinished` is held until then, as in a batch.
    """

    def __init__(self, function: Callable[[], Result], late: Callable[[Result | None], None] | None) -> None:
        self._function = function
        self._late = late
        self._lock = threading.Lock()
        self._unfinished = threading.Lock()
        self._unfinished.acquire()
        self._ended = False
        self._abandoned = False
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self, thread: object) -> None:
        if not self._abandoned:
            try:
                self._result = self._function()
            except BaseException as error:  # the caller raises it, or it is logged below
                self._error = error
        with self._lock:
            self._ended = True
        self._unfinished.release()
        if self._abandoned:
            if self._error is not None:
                logger.error("an abandoned call failed: %s", type(self._error).__name__)
            if self._late is not None:
                self._late(self._result)

    def wait(self, timeout_s: float) -> Result | None:
        """Return the result, or None if the call has not ended after `timeout_s`. Raises the function's exception."""
        self._unfinished.acquire(timeout=timeout_s)
        with self._lock:
            if not self._ended:
                self._abandoned = True
                return None
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._result
        finally:
            del error  # otherwise the exception and this frame would keep each other alive


def _no_jobs(job: Any, beat: Beat) -> None:
    raise InvariantError("a pool without `handle` does not take jobs; pass one, or use `run` and `call`")


@dataclass(eq=False, repr=False)
class SupervisedPool(Generic[Job]):
    """`threads` threads, called hicache-`name`-1, -2 and so on, that take work from one queue.

    All of them start at once; `supervise` and the next `run` restart dead ones. With `linger_s`, a thread starts when
    there is work for it, and ends after that many idle seconds.

    Work is a job (`submit`), the pages of a batch (`run`) or a call with a deadline (`call`). `handle(job, beat)` runs
    on a thread and calls `beat` before each step that may block. A thread that has not called it for `patience_s` is
    stuck. `fail` marks a job whose handler raised or whose thread died. `acknowledge` is called once per job, on its
    thread, or in `close` for a job that no thread has taken. `on_error` is called after each exception on a thread.

    `clock` measures patience and back-offs, and the deadline of a `call` or `run_until` is a time of it. How long they
    wait, idle times and `close` are real time: they limit calls of the operating system.
    """

    name: str
    threads: int
    _: KW_ONLY
    handle: Callable[[Job, Beat], None] = _no_jobs
    fail: Callable[[Job], None] = lambda job: None
    acknowledge: Callable[[Job], None] = lambda job: None
    on_error: Callable[[], None] = lambda: None
    patience_s: float = math.inf
    linger_s: float | None = None
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self.restarts = self.stuck_threads = 0
        self._jobs: deque[Job] = deque()
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()  # None ends a thread
        self._state = threading.Lock()
        self._threads: list[_Thread[Job]] = []
        self._numbers = itertools.count(1)
        self._load = 0  # with `linger_s`: queued and running tasks, except those of stuck threads
        self._backoff = Backoff(RESTART_S_MIN, RESTART_S_MAX)
        self._restart_at = -math.inf  # without `linger_s`: when to start missing threads; infinity if none is missing
        self._closed = False
        self._abandoned: list[_Batch] = []
        self._is_complete = False  # all threads have been started once
        with self._state:
            self._fill()
        self._is_complete = True
        self.restarts = 0

    @property
    def queued(self) -> int:
        """Jobs that wait for a thread."""
        return len(self._jobs)

    @property
    def alive(self) -> int:
        """Threads that run and are not stuck."""
        return sum(not thread.stuck for thread in list(self._threads))

    def submit(self, job: Job) -> None:
        """Queue a job. Does not block. The caller bounds how many it submits."""
        self._jobs.append(job)
        if self.linger_s is None:
            self._queue.put(self._handle_next)
            return
        with self._state:
            self._load += 1
            self._fill()
            self._queue.put(self._handle_next)

    def withdraw(self, job: Job) -> bool:
        """Withdraw a job that no thread has taken; it is not acknowledged. Return False for other jobs, and after
        `close`.

        REQUIRES: the pool is only used for jobs.
        """
        if self._closed:
            return False
        try:
            self._jobs.remove(job)
        except ValueError:
            return False
        with suppress(queue.Empty), self._state:  # empty: a thread has taken the entry, and will not find a job for it
            self._queue.get_nowait()
            self._load -= self.linger_s is not None
        return True

    def run(self, count: int, work: Callable[[int], None]) -> None:
        """Call `work(0) .. work(count - 1)`, roughly in that order, and return when all calls have ended.

        The caller takes part, so a batch costs one wake-up per thread and none per page, and its first pages are done
        first if time runs out. An exception on another thread fails only that page. An exception on the caller's thread
        skips the remaining pages and is raised. REQUIRES: no `linger_s`.
        """
        if self._restart_at < math.inf:
            self.supervise()
        put, helpers = self._queue.put, min(count - 1, len(self._threads))
        if helpers <= 0:
            for index in range(count):
                work(index)
            return
        batch = _Batch(count, work)
        help_with = batch.run
        for _ in range(helpers):
            put(help_with)
        try:
            batch.run()
        except BaseException:
            batch.give_up()
            raise
        finally:
            batch.wait()

    def run_until(self, count: int, work: Callable[[int], None], deadline: float) -> bool:
        """Call `work(0) .. work(count - 1)` as `run`, but on the pool's threads only. Return True when all calls have
        ended, or False at `deadline`: then the calls in progress continue (see `abandoned`), and the others are not
        made. Raises NoThread. REQUIRES: no `linger_s`."""
        if self._restart_at < math.inf:
            self.supervise()
        if count and not self._threads:
            raise NoThread(f"pool {self.name}: the system cannot start more threads")
        batch = _Batch(count, work)
        for _ in range(count):  # an exception ends one of these, and one call
            self._queue.put(batch.run)
        if not count or batch.wait(self._seconds_until(deadline)):
            return True
        batch.give_up()
        with self._state:
            self._abandoned = [*(one for one in self._abandoned if one.left), batch]
        return False

    @property
    def abandoned(self) -> int:
        """Calls of `run_until` that their caller has abandoned and that have not returned. Each holds a thread."""
        return sum(batch.left for batch in self._abandoned)

    def call(
        self, function: Callable[[], Result], deadline: float, late: Callable[[Result | None], None] | None = None
    ) -> Result | None:
        """Return the result of `function`, which is never None, or None if the call has not ended by `deadline`.

        After None, `late` is called once on a thread of the pool: with the result when the function has returned, with
        None when it has raised or has not been started. Raises the exceptions of the function, and NoThread.
        """
        call = _Call(function, late)
        with self._state:
            self._load += 1
            self._fill()
            if not self._threads:
                self._load -= 1
                raise NoThread(f"pool {self.name}: the system cannot start more threads")
            self._queue.put(call.run)
        return call.wait(self._seconds_until(deadline))

    def _seconds_until(self, deadline: float) -> float:
        return max(0.0, min(deadline - self.clock(), threading.TIMEOUT_MAX))

    def supervise(self) -> None:
        """Replace dead and stuck threads. Cheap: a scheduler can call it every few steps. Does not block."""
        with self._state:
            stuck_before = self.clock() - self.patience_s
            for thread in [one for one in self._threads if one.busy_since < stuck_before and not one.stuck]:
                self._substitute(thread)
            self._fill()

    def close(self, timeout_s: float = math.inf) -> bool:
        """Let the threads finish the queued work, then end them. Blocks. Return False if a thread did not end in time;
        it is abandoned. Idempotent. REQUIRES: no `run`, `run_until` or `call` is in flight."""
        with self._state:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(None if timeout_s == math.inf else max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            return False
        while self._jobs:  # every thread died, or none could be started
            self._end_failed(self._jobs.popleft())
        return True

    def _end_failed(self, job: Job) -> None:
        self.fail(job)
        self.acknowledge(job)

    # On the threads

    def _serve(self, thread: _Thread[Job]) -> None:
        take = self._queue.get if self.linger_s is None else functools.partial(self._take_or_leave, thread)
        while (task := take()) is not None:
            try:
                task(thread)
            except Exception as error:
                self._note(type(error).__name__)
                if thread.job is not None:
                    self.fail(thread.job)
            del task
            if thread.job is not None:
                thread.busy_since = math.inf
            if self.linger_s is not None:
                with self._state:
                    self._load -= not thread.stuck
            if thread.job is not None:
                job, thread.job = thread.job, None
                self.acknowledge(job)
                del job
            if thread.stuck:
                return

    def _take_or_leave(self, thread: _Thread[Job]) -> _Task | None:
        """Wait for the next task. Return None if the thread has been idle for too long and must end."""
        while True:
            try:
                return self._queue.get(timeout=self.linger_s)
            except queue.Empty:
                with self._state:
                    if self._queue.empty():
                        self._threads.remove(thread)
                        return None

    def _handle_next(self, thread: _Thread[Job]) -> None:
        try:
            job = self._jobs.popleft()
        except IndexError:  # the job was withdrawn
            return
        thread.beat()
        thread.job = job
        self.handle(job, thread.beat)

    def _bury(self, thread: _Thread[Job]) -> None:
        """Fail the job of a dying thread, and schedule a replacement."""
        with self._state:
            self._threads.remove(thread)
            self._load -= not thread.stuck
            if not thread.stuck and self.linger_s is None:
                if self.clock() - thread.started_at > STABLE_S:
                    self._backoff.reset()
                delay_s = self._backoff.next_s()
                self._restart_at = self.clock() + delay_s
            self._fill()
        logger.error("worker %s: a thread died; its job counts as failed", self.name)
        self._note("ThreadDied")
        job, thread.job = thread.job, None
        if job is not None:
            self._end_failed(job)

    def _note(self, kind: str) -> None:
        self.errors[kind] += 1
        if self.errors[kind] == 1:
            logger.exception("worker %s: unexpected %s; further ones are only counted", self.name, kind)
        self.on_error()

    # With `_state` held

    def _fill(self) -> None:
        """Start the missing threads."""
        if self.linger_s is not None:
            wanted = min(self._load, self.threads)
        elif self.clock() >= self._restart_at:
            wanted = self.threads
            self._restart_at = math.inf
        else:
            return
        while wanted > len(self._threads) - sum(thread.stuck for thread in self._threads) and not self._closed:
            late = self.linger_s is None and self._is_complete
            if not self._start_thread("one died or could not be started" if late else ""):
                self._restart_at = self.clock() + self._backoff.next_s()
                return
            self.restarts += self.linger_s is None

    def _substitute(self, thread: _Thread[Job]) -> None:
        """Start a substitute for a stuck thread, up to a limit: a hanging store must not use up threads."""
        if sum(other.stuck for other in self._threads) < SUBSTITUTES_MAX and self._start_thread("one hangs in a call"):
            thread.stuck = True
            self._load -= 1
            self.stuck_threads += 1

    def _start_thread(self, why: str) -> bool:
        thread = _Thread(self, next(self._numbers), why)
        try:
            thread.start()
        except RuntimeError:
            self.errors["NoThread"] += 1
            if self.errors["NoThread"] == 1:
                logger.exception("worker %s: the system cannot start more threads; further failures are only counted",
                                 self.name)
            return False
        self._threads.append(thread)
        return True


# Called like the class. A simulation passes one that does not start threads.
WorkerFactory: TypeAlias = Callable[..., SupervisedPool[Any]]

"""Threads for library calls that nobody may have to wait for.

The library cannot be interrupted, and against a daemon that hangs it waits for 30 s. So a call runs on a thread from
here: whoever needs its result waits until the deadline and goes away, and what the call uses is given back when it has
really ended.

Locking design: `_state` guards the fields of the runner and of its jobs, and is held for a few instructions. Jobs go
through a `SimpleQueue`. A job is ended by one of two: its thread, which sets `ended`, or its caller, which sets
`abandoned`; whoever is second sees what the first has done.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

# As many library calls at once as storage workers can have under way at a usual setting, and some that hang.
THREADS_MAX = 16
# A call that returns this much after the deadline is still waited for: the library's own limits end there too.
GRACE_S = 0.25


class _Job:
    __slots__ = ("abandoned", "call", "done", "ended", "error", "late", "result")

    def __init__(self, call: Callable[[], list[int]], late: Callable[[], None]) -> None:
        self.call = call
        self.late = late
        self.done = threading.Event()
        self.ended = False
        self.abandoned = False
        self.result: list[int] | None = None
        self.error: Exception | None = None


class Runner:
    """Up to `THREADS_MAX` threads, started as they are needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pending = 0  # jobs that were queued and have not ended

    def run(self, call: Callable[[], list[int]], deadline: float, late: Callable[[], None]) -> list[int] | None:
        """The result of `call`, or None if it has none shortly after `deadline`.

        After None `late` is called once, on another thread, when the call has ended or was found not to have begun.
        """
        job = _Job(call, late)
        with self._state:
            self._pending += 1
            if self._pending > len(self._threads) < THREADS_MAX:
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
                thread.start()
                self._threads.append(thread)
        self._jobs.put(job)
        wait_s = max(0.0, min(deadline + GRACE_S - time.monotonic(), threading.TIMEOUT_MAX))
        if not job.done.wait(wait_s):
            with self._state:
                if not job.ended:
                    job.abandoned = True
                    return None
        if job.error is not None:
            raise job.error
        return job.result

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.abandoned:
                try:
                    job.result = job.call()
                except Exception as error:  # the caller raises it; without a caller it is logged below
                    job.error = error
            with self._state:
                job.ended = True
                abandoned = job.abandoned
                self._pending -= 1
            if abandoned:
                if job.error is not None:
                    _log.error("a call that was given up has failed: %s", type(job.error).__name__)
                job.late()
            job.done.set()

    def close(self, timeout_s: float = math.inf) -> None:
        """Wait until every call has ended, and end the threads; those that still run then end when their calls do.

        REQUIRES: no more `run`.
        """
        end = time.monotonic() + timeout_s
        with self._state:
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(None if timeout_s == math.inf else max(0.0, end - time.monotonic()))

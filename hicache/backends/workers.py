"""Threads that share the pages of a batch.

A batch is handed out page by page from one counter, head first, so a batch that runs out of time has done its head; the
calling thread takes part, so a batch costs one wake-up per extra thread and none per page.

Locking design: `_jobs` is a queue of the standard library. A batch's counter is an `itertools.count`, whose `next` is
atomic in CPython; `_left` is guarded by the batch's own lock.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class _Batch:
    """`work(i)` for each i below `count`, by as many threads as call `run`; `done` is set after the last one."""

    def __init__(self, count: int, work: Callable[[int], None]) -> None:
        self._take = itertools.count().__next__
        self._count = count
        self._work = work
        self._lock = threading.Lock()
        self._left = count
        self.done = threading.Event()

    def run(self) -> None:
        while (index := self._take()) < self._count:
            try:
                self._work(index)
            finally:
                with self._lock:
                    self._left -= 1
                    if not self._left:
                        self.done.set()

    def give_up(self) -> None:
        """Take the pages nobody has taken, and do nothing with them."""
        self._work = lambda index: None
        self.run()


class WorkerPool:
    """`threads - 1` threads that help the callers of `run`. Never holds a page after `run` returned."""

    def __init__(self, threads: int, name: str, failed: Callable[[], None]) -> None:
        self._jobs: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._failed = failed
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(1, threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, count: int, work: Callable[[int], None]) -> None:
        """Do `work(0) .. work(count - 1)`, roughly in that order, and return when all of them have ended."""
        if not count:
            return
        batch = _Batch(count, work)
        for _ in range(min(count - 1, len(self._threads))):
            self._jobs.put(batch)
        try:
            batch.run()
        except BaseException:
            batch.give_up()
            raise
        finally:
            batch.done.wait()

    def _serve(self) -> None:
        while (batch := self._jobs.get()) is not None:
            try:
                batch.run()
            except Exception:  # a bug must cost one page and not the thread; the page's outcome stays ERROR
                self._failed()
                _log.exception("a page operation failed unexpectedly")
            del batch

    def close(self) -> None:
        """End the threads. REQUIRES: no `run` is under way."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

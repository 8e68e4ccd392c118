"""The copy thread of one direction: it submits copies, or makes them itself, in the order of submission.

Locking design: the scheduler puts tasks into a queue, the thread takes them out. Fields that a task writes for its
readers change under `condition`. All tasks of a thread share it, because one per task costs too much per step.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from ..errors import TransferError

logger = logging.getLogger(__name__)


class CopyTask(Protocol):
    """One copy. The thread calls both methods."""

    def run(self) -> None:
        """Make or submit the copy. An error ends this task only."""

    def fail(self, error: TransferError) -> None:
        """End without further layers. Called if `run` raises, before the next task."""


class CopyThread:
    """Runs tasks in order. `begin` runs on the thread before the first task."""

    def __init__(self, name: str, begin: Callable[[], None] | None = None) -> None:
        self.condition = threading.Condition()
        self._begin = begin
        self._tasks: queue.SimpleQueue[CopyTask | None] = queue.SimpleQueue()
        self._closed = False  # written by the scheduler
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: CopyTask) -> None:
        """Queue a task. Raises TransferError after `close`."""
        if self._closed:
            raise TransferError("copy: the copy engine is closed")
        self._tasks.put(task)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Block until tasks have made `condition` true. Return False on timeout."""
        with self.condition:
            return self.condition.wait_for(condition, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the thread after the queued tasks. Return False on timeout."""
        self._closed = True
        self._tasks.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        begun = self._begin is None
        while (task := self._tasks.get()) is not None:
            try:
                if not begun and self._begin is not None:
                    self._begin()
                    begun = True
                task.run()
            except Exception as error:
                # The thread must survive a failed copy; the task passes the error to its caller.
                logger.exception("copy between device and host failed")
                task.fail(TransferError(f"copy between device and host failed: {error}"))

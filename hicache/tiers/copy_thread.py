"""The thread of one direction: it submits copies, or makes them itself, in the order in which they were asked for.

Locking design: the scheduler puts tasks into a queue, the thread takes them out. What a task writes for its readers
changes under `condition`, which all tasks of a thread share: one for each would cost more than a step should.
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
    """One copy. Both methods are called by the thread."""

    def run(self) -> None:
        """Make or submit the copy."""

    def fail(self, error: TransferError) -> None:
        """End without further layers. Called after an error of `run`, before the next task."""


class CopyThread:
    """Runs tasks in order. One that raises fails alone; the others run all the same."""

    def __init__(self, name: str, begin: Callable[[], None] | None = None) -> None:
        self.condition = threading.Condition()
        self._begin = begin
        self._tasks: queue.SimpleQueue[CopyTask | None] = queue.SimpleQueue()
        self._closed = False  # by the scheduler
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: CopyTask) -> None:
        """Queue a task. Raises TransferError after `close`."""
        if self._closed:
            raise TransferError("copy: the copy engine is closed")
        self._tasks.put(task)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Block until `condition`, which tasks make true; False on timeout."""
        with self.condition:
            return self.condition.wait_for(condition, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End after the queued tasks. False if that takes longer than `timeout_s`."""
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
                # The thread must outlive one bad copy; its task carries the error to the caller.
                logger.exception("copy between device and host failed")
                task.fail(TransferError(f"copy between device and host failed: {error}"))

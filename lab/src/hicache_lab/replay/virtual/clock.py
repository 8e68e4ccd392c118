"""VirtualClock: a clock that jumps to the next event, and the tasks that wait for it.

A task is a greenlet: a function with its own stack, which runs on the one thread until it waits for the clock. Then the
task whose time comes next continues. So the workers of a controller and the schedulers of several engines are the
unchanged functions that threads run elsewhere, and equal inputs give equal orders of events. Events of equal time run
in the order in which they were scheduled.

A condition is not notified across tasks: a task that waits for one looks again after each event, as after a spurious
wake-up. So does a scheduler without work. Few tasks wait so, and only the time of their deadline is kept for them.

Locking design: one thread. A lock must not be held while its task waits, except that of a condition in `wait`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable

from greenlet import getcurrent, greenlet

from hicache.clock import Clock
from hicache.errors import InvariantError

# The first time. Below zero, so that code which takes zero for a time before all others fails in each simulation.
_START_S = -1000.0
# Unix time of the first time: of the first public traces.
_START_WALL_S = 1_700_000_000.0


class VirtualClock(Clock):
    """See the module's docstring. For one thread.

    Invariant: no event is earlier than the current time, so the time never goes back.
    """

    def __init__(self) -> None:
        self._now_s = _START_S
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, greenlet | None]] = []
        self._lookers: list[tuple[float, greenlet]] = []  # deadline, and task
        self._hub = greenlet(self._run)

    def __call__(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return _START_WALL_S + self._now_s - _START_S

    def start(self, task: Callable[[], None]) -> None:
        """Run `task` as a task of its own, from now on. An exception in it is raised in the task that created the
        clock, where that waits next."""
        self._at(self._now_s, greenlet(task, parent=self._hub))

    def mark(self, time_s: float) -> None:
        """Let the tasks in `sleep_until_event` look again at a time of this clock."""
        self._at(max(time_s, self._now_s), None)

    def sleep(self, seconds: float) -> None:
        self._at(self._now_s + max(0.0, seconds), getcurrent())
        self._hub.switch()

    def sleep_until_event(self, until_s: float) -> None:
        """Wait until the next event has happened, but at most until `until_s`."""
        self._lookers.append((until_s, getcurrent()))
        self._hub.switch()

    def wait(self, condition: threading.Condition, timeout_s: float) -> bool:
        deadline = self._now_s + timeout_s
        if timeout_s <= 0:
            return False
        condition.release()
        try:
            self.sleep_until_event(deadline)
        finally:
            condition.acquire()
        return self._now_s < deadline

    def wait_set(self, event: threading.Event, timeout_s: float) -> bool:
        deadline = self._now_s + timeout_s
        while not event.is_set() and self._now_s < deadline:
            self.sleep_until_event(deadline)
        return event.is_set()

    def _at(self, time_s: float, task: greenlet | None) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), task))

    def _run(self) -> None:
        while self._events or self._lookers:
            next_s = self._events[0][0] if self._events else math.inf
            deadline = min((deadline for deadline, _ in self._lookers), default=math.inf)
            if next_s <= deadline and next_s < math.inf:
                self._now_s, _, task = heapq.heappop(self._events)
                if task is not None:
                    task.switch()
            elif deadline < math.inf:
                self._now_s = max(self._now_s, deadline)
            else:
                break
            self._look()
        raise InvariantError("virtual clock: all tasks wait, and nothing will happen")

    def _look(self) -> None:
        """Let waiting tasks look, and again if one of them has gone on: others may wait for what it did."""
        has_changed = bool(self._lookers)
        while has_changed:
            lookers, self._lookers = self._lookers, []
            for _, task in lookers:
                task.switch()
            has_changed = 0 < len(self._lookers) < len(lookers)

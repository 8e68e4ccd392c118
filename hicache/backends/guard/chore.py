"""A supervised thread for work that comes up now and then.

Locking design: one condition guards all fields and is not held while the work runs. Threads are daemons: a store that
hangs must not keep a process from ending. Each has a number; the one with the newest number works, and one that comes
back from a call after it was replaced ends.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)

# After work that raised, or a thread that could not be started.
_RETRY_S = 5.0
# Threads that hang in the store at one time; beyond that nothing more is tried until one of them returns.
_HANGING_MAX = 4
# A thread without work ends after this; the next wake starts another.
_LINGER_S = 10.0


class Chore:
    """Runs `work` on a thread of its own when woken, and again at the time that it returned (infinity: when woken).

    The thread is started when first needed. One that died is replaced, and so is one that has worked for longer than
    `patience_s`. An exception is counted, logged once per kind, and the work is done again a little later.
    """

    def __init__(self, name: str, work: Callable[[], float], patience_s: float) -> None:
        self.errors: Counter[str] = Counter()
        self._name = name
        self._work = work
        self._patience_s = patience_s
        self._state = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._number = 0  # of the newest thread
        self._closed = False
        self._next_at = math.inf
        self._busy_since = math.inf

    def wake(self, at_s: float = 0.0) -> None:
        """Have the work done at `at_s` or before; now, without it. Does not block. As `tend`."""
        with self._state:
            if at_s < self._next_at:
                self._next_at = at_s
                self._state.notify_all()
            self._require_thread()

    def tend(self) -> None:
        """Replace a thread that has died or hangs. Whoever calls it until the work is done makes sure that it is. Does
        not block."""
        with self._state:
            if self._next_at < math.inf or self._busy_since < math.inf:
                self._require_thread()

    def close(self, timeout_s: float) -> bool:
        """End the thread after what it is doing; blocks. False if it hangs: it is left behind. May be called twice."""
        with self._state:
            self._closed = True
            self._state.notify_all()
            threads = list(self._threads)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _require_thread(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        time_s = time.monotonic()
        hangs = time_s > self._busy_since + self._patience_s
        has_thread = any(thread.name == self._thread_name() for thread in self._threads)
        if self._closed or (has_thread and not hangs) or len(self._threads) > _HANGING_MAX:
            return
        self._number += 1
        self._next_at = 0.0 if hangs else self._next_at  # what the other one was doing is not done
        self._busy_since = math.inf
        thread = threading.Thread(target=self._run, args=(self._number,), name=self._thread_name(), daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self.errors["no thread"] += 1
            return
        self._threads.append(thread)

    def _thread_name(self) -> str:
        return f"hicache-{self._name}-{self._number}"

    def _run(self, number: int) -> None:
        while self._await_work(number):
            try:
                next_at = self._work()
            except Exception as error:
                kind = type(error).__name__
                self.errors[kind] += 1
                if self.errors[kind] == 1:
                    logger.exception("%s: unexpected %s; counted from now on", self._name, kind)
                next_at = time.monotonic() + _RETRY_S
            with self._state:
                if number != self._number:
                    return
                self._busy_since = math.inf
                self._next_at = min(self._next_at, next_at)

    def _await_work(self, number: int) -> bool:
        """Wait for something to do; False if there is nothing more for this thread."""
        with self._state:
            linger_until = time.monotonic() + _LINGER_S
            while not self._closed and number == self._number:
                time_s = time.monotonic()
                if time_s >= self._next_at:
                    self._next_at = math.inf
                    self._busy_since = time_s
                    return True
                if self._next_at == math.inf and time_s >= linger_until:
                    self._number += 1  # so that a wake from now on starts another
                    return False
                self._state.wait((linger_until if self._next_at == math.inf else self._next_at) - time_s)
            return False

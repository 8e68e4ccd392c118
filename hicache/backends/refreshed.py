"""A value from a blocking function that becomes stale: the addresses of a name, credentials that expire.

Name resolution and requests for credentials have no deadline, so they do not run on a thread that has one: a
BackgroundTask makes them, and other threads use the last value until then.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..background import BackgroundTask
from ..backoff import Backoff
from ..clock import SYSTEM_CLOCK, Clock
from .errors import ErrorKind, StoreError

T = TypeVar("T")


class Refreshed(Generic[T]):
    """The last value of `load`, loaded again when it is older than `age_max_s`.

    `load` raises StoreError without a value. A failed refresh keeps the old value, but not one older than `usable_s`.

    Locking design: `_state` guards all fields and is not held while `load` runs or while the task is woken. It is taken
    after the lock of the task, never before.
    """

    def __init__(
        self, name: str, load: Callable[[], T], age_max_s: float, usable_s: float = math.inf,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        never = Backoff(math.inf, math.inf)  # the next `get` repeats it
        self._task = BackgroundTask(name, self._run, backoff=never, linger_s=0.0, on_error=self._fail, clock=clock)
        self._clock = clock
        self._name = name
        self._load = load
        self._age_max_s, self._usable_s = age_max_s, usable_s
        self._state = threading.Condition()
        self._value: T | None = None
        self._failure: StoreError | None = None
        self._value_s = -math.inf  # when the value was loaded
        self._loaded_s = -math.inf  # when a load ended last
        self._loading = False

    def get(self, *, deadline: float) -> T:
        """Return the value. Blocks up to `deadline` if there is none that can be used. Raises StoreError."""
        with self._state:
            value = self._usable()
            if value is not None and self._clock() - self._loaded_s <= self._age_max_s:
                return value
            advance = self._task.tend if self._loading else self._task.wake
            self._loading = True
        advance()
        with self._state:
            if value is None:
                self._clock.wait_for(self._state, lambda: not self._loading, deadline)
                if not self._loading and self._failure is None:
                    value = self._value
            if value is not None:
                return value
            if self._loading or self._failure is None:
                raise StoreError(ErrorKind.TIMEOUT, f"{self._name} takes too long")
            failure = self._failure
            raise StoreError(failure.kind, failure.detail)

    def _usable(self) -> T | None:
        return self._value if self._clock() - self._value_s <= self._usable_s else None

    def expire(self) -> None:
        """Reload the value at the next `get`; it stays in use until then."""
        with self._state:
            self._loaded_s = -math.inf

    def _run(self) -> float:
        try:
            self._settle(self._load(), None)
        except StoreError as error:
            self._settle(None, error)
        return math.inf

    def _fail(self) -> None:
        """Fail the waiting callers: `load` raised another error, which the task has counted and logged."""
        self._settle(None, StoreError(ErrorKind.INTERNAL, f"{self._name} cannot be loaded"))

    def _settle(self, value: T | None, failure: StoreError | None) -> None:
        with self._state:
            if value is not None:
                self._value = value
                self._value_s = self._clock()
            self._failure = failure
            self._loaded_s = self._clock()
            self._loading = False
            self._state.notify_all()

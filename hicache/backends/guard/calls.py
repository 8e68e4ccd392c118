"""One call of a backend, as its guard sees it: the kind of call, why it is rejected, what it proves about the store.

Locking design: see `Call`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from ..base import Direction, SetOutcome


class Verb(enum.StrEnum):
    """The kind of a backend call."""

    __hash__ = str.__hash__  # faster than Enum's, which is a Python function called for each dictionary lookup
    EXISTS = "exists"
    GET = "get"
    SET = "set"
    DELETE = "delete"
    TOUCH = "touch"

    @property
    def direction(self) -> Direction:
        """The direction whose breaker decides about this verb."""
        return Direction.READ if self is Verb.GET or self is Verb.EXISTS else Direction.WRITE


class Refusal(enum.StrEnum):
    """Why the guard rejected a call."""

    OPEN = "open"  # the breaker is open, or the operator has switched the direction off
    BUSY = "busy"  # other calls used the whole in-flight limit until the deadline
    CLOSED = "closed"  # the guard was closed while the call waited


class CallResult(enum.StrEnum):
    """What a call proves about the store: it works, nothing, or one of four kinds of failure."""

    GOOD = "good"
    UNKNOWN = "unknown"
    ERROR = "error"  # half of the pages or more are errors; of a write, half of the new pages
    LOOKUP = "lookup"  # a lookup missed pages, and the backend counted an error during it
    RAISED = "raised"  # the backend raised an exception or broke the contract
    OVERDUE = "overdue"  # the call hung past deadline and grace


@dataclass(slots=True, eq=False)
class Call:
    """A call in flight, until the end of its `with` block. The calling thread owns it and sets its result; any thread
    may set `overdue` under the lock.

    The result: `result`; of a write, `new_pages`, those that were not present, and `kept`, the best outcome of them;
    after a failure, `cause`, the kind of its last error, and `detail`, the store's own words for it.
    """

    leave: Callable[[Call], None]  # called at its end
    verb: Verb
    pages: int
    bytes: int
    deadline: float
    began_s: float
    admitted: int  # the breaker's round at the start of the call
    overdue: bool = False  # it hung past deadline and grace, and is counted as failed
    result: CallResult = CallResult.UNKNOWN
    new_pages: int = 0
    kept: SetOutcome | None = None  # None if the write proves nothing
    cause: str = ""
    detail: str = ""

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave(self)

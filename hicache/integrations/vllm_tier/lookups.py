"""LookupTable: the results of lookups of chunks in storage, for requests that are not finished.

vLLM looks up single chunks, in each step until it has an answer, and must not be blocked. So a new lookup is recorded,
a thread makes the lookups of one step together, and a later step reads the results.

    unknown -> (result of the thread) -> known    a hit or a miss, until the last request for it is finished
    unknown -> (timeout)              -> known    a miss: storage does not answer
    known   -> (`mark`)               -> known    a read has failed, or a chunk was stored

A failed read turns a hit into a miss; otherwise vLLM would promote the chunk again in each step.

Locking design: everything belongs to the scheduler, except that the thread of a `Batch` writes its `answers` before it
is settled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...clock import Clock
from ...errors import InvariantError


@dataclass(slots=True, eq=False)
class Question:
    """One chunk: `found` is None while unknown."""

    found: bool | None
    asked_s: float
    requests: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Batch:
    """The new lookups of one step, and their results so far."""

    questions: list[tuple[bytes, Question]]
    deadline_s: float
    answers: list[bool] = field(default_factory=list)


class LookupTable:
    """See the module's docstring. `patience_s` is how long a request waits for a result.

    Invariant: a chunk is in the table exactly while a request that has looked it up is not finished.
    """

    def __init__(self, patience_s: float, clock: Clock) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._questions: dict[bytes, Question] = {}
        self._of_request: dict[str, set[bytes]] = {}
        self._new: list[tuple[bytes, Question]] = []

    def ask(self, name: bytes, request: str) -> bool | None:
        """Return whether chunk `name` is stored, None while unknown."""
        question = self._questions.get(name)
        if question is None:
            question = self._questions[name] = Question(None, self._clock())
            self._new.append((name, question))
        elif question.found is None and self._clock() - question.asked_s > self._patience_s:
            question.found = False
        if request not in question.requests:
            question.requests.add(request)
            self._of_request.setdefault(request, set()).add(name)
        return question.found

    def take_new(self) -> Batch | None:
        """Return the lookups since the last call, or None."""
        new, self._new = self._new, []
        return Batch(new, self._clock() + self._patience_s) if new else None

    def settle(self, batch: Batch) -> None:
        """Record the results of a batch. Lookups without a result are misses; known ones do not change."""
        answers = batch.answers + [False] * (len(batch.questions) - len(batch.answers))
        for (_, question), answer in zip(batch.questions, answers, strict=True):
            if question.found is None:
                question.found = answer

    def mark(self, names: Iterable[bytes], found: bool) -> None:
        """Set the result of chunks in the table."""
        for name in names:
            question = self._questions.get(name)
            if question is not None:
                question.found = found

    def forget(self, request: str) -> None:
        for name in self._of_request.pop(request, ()):
            question = self._questions[name]
            question.requests.discard(request)
            if not question.requests:
                del self._questions[name]

    def refuse_all(self) -> None:
        """Turn every chunk in the table into a miss."""
        self.mark(list(self._questions), found=False)
        self._new.clear()

    def check(self) -> None:
        """Raise InvariantError if the invariant does not hold."""
        named = {name for names in self._of_request.values() for name in names}
        if named != set(self._questions) or not all(question.requests for question in self._questions.values()):
            raise InvariantError(f"lookups: {len(self._questions)} chunks, but requests have looked up {len(named)}")

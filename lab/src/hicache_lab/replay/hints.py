"""Hints of the sessions of a trace, as the harness of an agent would send them, with a given error.

Each request says to which session it belongs. When it has ended, the session says after how many seconds its next
request comes, which the trace knows, or that the session has ended. The kinds of errors:

    exact       the times of the trace
    error=X     times that are wrong by a factor of X in the mean: a log-normal error, its mean absolute logarithm ln X
    noise       each time is the one of another request
    missing=P   exact, but the share P of the requests has no hint

Ends of sessions are exact, except with `noise`, which sends none.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hicache.errors import InvalidInput

from ..traces.request import TraceRequest

if TYPE_CHECKING:  # it imports torch, which the command line does without until it replays
    from hicache.cache import TreeCache

_FORM = re.compile(r"(exact|noise)|(error|missing)=([0-9]+(?:\.[0-9]+)?)")


@dataclass(frozen=True, slots=True)
class HintErrors:
    """See the module's docstring. `factor` is the mean error of a time, `missing` a share of the requests."""

    factor: float = 1.0
    missing: float = 0.0
    is_noise: bool = False

    @classmethod
    def parse(cls, text: str) -> HintErrors:
        """Return the errors that a text names. Raises ValueError."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:40]!r}: write exact, noise, error=3 or missing=0.5")
        word, name, number = found.groups()
        if word is not None:
            return cls(is_noise=word == "noise")
        value = float(number)
        if not (value >= 1 if name == "error" else 0 <= value <= 1):
            raise ValueError(f"{text[:40]!r}: an error is a factor of at least 1, missing a share up to 1")
        return cls(factor=value) if name == "error" else cls(missing=value)

    def __str__(self) -> str:
        if self.is_noise:
            return "noise"
        return f"missing={self.missing:g}" if self.missing else f"error={self.factor:g}" if self.factor > 1 else "exact"


class HintMaker:
    """Sends the hints of a trace to `cache`. `due_s` returns the time at which a request is due, `now_s` the time.

    Raises InvalidInput for a trace whose sessions are unknown, or do not return.
    """

    def __init__(
        self, cache: TreeCache, errors: HintErrors, trace: Iterable[TraceRequest], seed: int,
        due_s: Callable[[TraceRequest], float], now_s: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._errors = errors
        self._due_s = due_s
        self._now_s = now_s
        self._numbers = random.Random(seed)
        # By the index of a request, the next one of its session.
        self._next: dict[int, TraceRequest] = {}
        self._pauses: list[tuple[TraceRequest, TraceRequest]] = []
        last: dict[int, TraceRequest] = {}
        for full in trace:
            if full.session is not None:
                request = replace(full, hash_ids=())  # of a long trace, these are too large to keep
                if (before := last.get(full.session)) is not None:
                    self._next[before.index] = request
                    self._pauses.append((before, request))
                last[full.session] = request
        if all(before.timestamp_ms == request.timestamp_ms for before, request in self._pauses):
            raise InvalidInput(
                "hints: the trace does not say when a session returns; use one with several requests of a session, "
                "each with its time and `session` or `session_id` (docs/traces.md)"
            )

    def submitted(self, rid: str, request: TraceRequest) -> None:
        """Name the session of a request."""
        if request.session is not None:
            self._send("session.turn", request, rid)

    def ended(self, request: TraceRequest) -> None:
        """Say when the session of a request that has ended returns."""
        errors = self._errors
        if request.session is None or (errors.missing and self._numbers.random() < errors.missing):
            return
        following = self._next.get(request.index)
        if following is None:
            if not errors.is_noise:
                self._send("kv.release", request)
            return
        if errors.is_noise:
            before, after = self._numbers.choice(self._pauses)
            wait_s = max(0.0, self._due_s(after) - self._due_s(before))
        else:
            wait_s = max(0.0, self._due_s(following) - self._now_s())
            wait_s *= math.exp(self._numbers.gauss(0.0, math.log(errors.factor) * math.sqrt(math.pi / 2)))
        self._send("session.wait", request, expected_s=wait_s)

    def _send(self, action: str, request: TraceRequest, rid: str | None = None, **payload: Any) -> None:
        one = {"action_id": "1", "action_type": action, "payload": {"session_id": str(request.session), **payload}}
        self._cache.hint({"actions": [one]}, rid)

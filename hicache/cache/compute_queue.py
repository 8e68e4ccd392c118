"""ComputeQueue: the requests that wait for the device, and the prompt tokens that are left to compute, by arrival.

The wait that a request has anyway is the longer of two estimates: the time for computing what is left of the requests
before it, and its place among the waiting ones times the mean interval between the last begins. The first knows long
prompts, the second everything else that delays requests: decoding, a full L1, limits of the engine.

Called by the scheduler thread alone; no lock. With ranks, times are those that the ranks agree on.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

from ..errors import InvariantError

# The begins and arrivals from which rates are estimated, and the fewest that show one.
WINDOW = 16
RECORDS_MIN = 4
# Arrivals are counted over at least this time: requests that arrive at once do not show a rate.
ARRIVALS_S_MIN = 1.0


class ComputeQueue:
    """A request waits from its arrival until it begins, and has tokens left until its prompt is computed.

    Invariant: each waiting request has tokens left.
    """

    def __init__(self) -> None:
        self._left: dict[str, int] = {}
        self._waiting: dict[str, None] = {}
        self._arrived_s: deque[float] = deque(maxlen=WINDOW)
        self._begun_s: deque[float] = deque(maxlen=WINDOW)  # only begins that left others waiting

    def arrive(self, rid: str, left_tokens: int, now_s: float, *, again: bool = False) -> None:
        """Add a request at the end, unless it waits already; as far as is known, it will compute `left_tokens` tokens.
        `again`: it was preempted, so it waits before all others, and is not an arrival."""
        left_tokens = max(1, left_tokens)
        if rid not in self._waiting:
            if not self._waiting:
                self._begun_s.clear()
            if again:
                self._waiting = {rid: None, **self._waiting}
                self._left = {rid: left_tokens, **self._left}
            else:
                self._waiting[rid] = None
                self._arrived_s.append(now_s)
        self._left[rid] = left_tokens

    def expect(self, rid: str, left_tokens: int) -> None:
        """Correct the tokens that are left of a waiting request: more of its pages were found."""
        if rid in self._waiting:
            self._left[rid] = max(1, left_tokens)

    def progress(self, rid: str, left_tokens: int, now_s: float) -> None:
        """Note that a request has begun, and how many tokens of its prompt are left."""
        if rid in self._waiting:
            del self._waiting[rid]
            if self._waiting:
                self._begun_s.append(now_s)
        if left_tokens > 0:
            self._left[rid] = left_tokens
        else:
            self._left.pop(rid, None)

    def leave(self, rid: str) -> None:
        """Forget a request that has ended or will not begin."""
        self._left.pop(rid, None)
        self._waiting.pop(rid, None)

    def __len__(self) -> int:
        """Return the number of requests that wait or have tokens left."""
        return len(self._left)

    def __contains__(self, rid: str) -> bool:
        """True if a request waits or has tokens left."""
        return rid in self._left

    def first(self, count: int) -> list[str]:
        """Return the first `count` waiting requests."""
        return list(islice(self._waiting, count))

    def is_first(self, rid: str, count: int) -> bool:
        """Return True for one of the first `count` waiting requests."""
        return rid in islice(self._waiting, count)

    def wait_s(self, rid: str, tokens_per_s: int, now_s: float, most_s: float = math.inf) -> float:
        """Return how long the request will still wait for the device, at a speed of computing; 0 if that is unknown.
        Counts no further than `most_s`: a long queue costs no more than a short one."""
        if tokens_per_s <= 0:
            return 0.0
        tokens, most = 0, most_s * tokens_per_s
        for other, left in self._left.items():
            if other == rid or tokens > most:
                break
            tokens += left
        wait_s = tokens / tokens_per_s
        return wait_s if wait_s > most_s else max(wait_s, self._turn_s(rid, now_s))

    def _turn_s(self, rid: str, now_s: float) -> float:
        """Return the time until as many requests have begun as wait before `rid`, and itself, as often as lately."""
        begun_s = self._begun_s
        if len(begun_s) < RECORDS_MIN:
            return 0.0
        place = next((place for place, other in enumerate(self._waiting, 1) if other == rid), 0)
        interval_s = (begun_s[-1] - begun_s[0]) / (len(begun_s) - 1)
        return max(0.0, place * interval_s - (now_s - begun_s[-1]))

    def arrivals_per_s(self, now_s: float) -> float:
        """Return the rate of the last arrivals, 0 before a few."""
        if len(self._arrived_s) < RECORDS_MIN:
            return 0.0
        return len(self._arrived_s) / max(ARRIVALS_S_MIN, now_s - self._arrived_s[0])

    def check(self) -> None:
        """Raises InvariantError if the invariant does not hold."""
        if not self._waiting.keys() <= self._left.keys() or not all(left > 0 for left in self._left.values()):
            raise InvariantError(f"compute queue: {len(self._waiting)} requests wait, {len(self)} have tokens left")

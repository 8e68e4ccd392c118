"""The order of eviction with hints.

A session may say what its prefix is worth (`NodeHint`). It speaks for a node until another request has used it:

    returns    the page counts as last used as long ago as its next use is ahead. `trust`, from 0 to 1, is the weight of
               the hint beside the real last use. Someone who returns is worth more than the guess of LRU, by
               `_RETURN_FACTOR`.
    retained   L2 evicts it after pages of smaller value
    released   it is evicted first

The rank of a node that waits only rises with time, as a rank rises with use, so the queues need no other structure. A
rank falls when a hint begins or ends; then `HintedOrder` queues the nodes again.

Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, TypeAlias

from ..policies import EvictionPolicy
from .eviction import EvictionQueues
from .node import Node, NodeHint

# LRU guesses that a page is used again after as long as it was not used. A hint knows that it is. Between 2 and 4, hits
# of recorded agents change by less than 2 %, also if half of them send no hints.
_RETURN_FACTOR = 3.0
# Times of the tree's clock that are remembered, and the interval between two.
_TIMES_MAX, _TIMES_EVERY_S = 4096, 0.25

Rank: TypeAlias = tuple[float, Any]


class TickTimes:
    """The ticks of a tree's clock over time, for times of the last requests."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._ticks: list[int] = []

    def note(self, now_s: float, tick: int) -> None:
        """Note the current tick."""
        if self._times and now_s < self._times[-1] + _TIMES_EVERY_S:
            return
        if len(self._times) >= _TIMES_MAX:  # older times become coarser; the tick of a time never falls
            del self._times[1::2], self._ticks[::2]
        self._times.append(now_s)
        self._ticks.append(tick)

    def at(self, time_s: float) -> int:
        """Return the tick at a time: 0 before the first one that is known."""
        place = bisect_right(self._times, time_s)
        return self._ticks[place - 1] if place else 0

    def time_of(self, tick: int) -> float:
        """Return the time of a tick, infinite while none is known."""
        place = bisect_right(self._ticks, tick)
        return self._times[max(0, place - 1)] if self._times else math.inf


class HintedOrder:
    """The ranks of `queues` with hints. `now_s` returns the time."""

    def __init__(
        self, queues: EvictionQueues, policy: EvictionPolicy, times: TickTimes, now_s: Callable[[], float]
    ) -> None:
        self._queues = queues
        self._rank = policy.rank
        self._times = times
        self._now_s = now_s
        queues.device.use_ranks(self._device_rank)
        queues.host.use_ranks(self._host_rank)

    def give(self, hint: NodeHint, nodes: list[Node]) -> None:
        """Let `hint` speak for `nodes`, which other hints may have spoken for."""
        for node in nodes:
            node.hint = hint
            self._queues.requeue(node)
        hint.nodes += nodes

    def end(self, hint: NodeHint) -> None:
        """End a hint: its nodes have their usual ranks again."""
        for node in hint.nodes:  # others may speak for some of them by now
            if node.hint is hint:
                node.hint = None
                self._queues.requeue(node)
        hint.nodes.clear()

    def _device_rank(self, node: Node) -> Rank:
        hint = node.hint
        if hint is None or not hint.speaks_for(node):
            return 0.0, self._rank(node)
        if hint.value < 0:
            return hint.value, self._rank(node)
        return 0.0, self._returning(hint) if hint.trust else self._rank(node)

    def _host_rank(self, node: Node) -> Rank:
        hint = node.hint
        value, rank = self._device_rank(node)
        return (hint.value, rank) if hint is not None and hint.value > 0 else (value, rank)

    def _returning(self, hint: NodeHint) -> int:
        """Return the tick at which the pages of a session that returns count as last used."""
        now_s, trust = self._now_s(), hint.trust
        age_s = trust * abs(hint.return_s - now_s) + (1 - trust) * (now_s - hint.made_s)
        return self._times.at(now_s - age_s / (1 + (_RETURN_FACTOR - 1) * trust))

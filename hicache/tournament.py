"""The adaptive eviction policy: shadow caches compete, and the real cache keeps what the best one would keep.

A shadow has the capacity of the real cache and sees the same uses, but stores keys without pages. There are three:

    LRU       least recently used first
    S3-FIFO   pages that are used once leave soon (Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for
              cache eviction, SOSP 2023)
    ARC       adapts between recency and frequency (Megiddo, Modha: ARC: a self-tuning, low overhead replacement cache,
              FAST 2003)

The real cache evicts in the order of LRU; if another shadow is the best, it passes over the pages that this one holds.
No fixed policy is best: on public traces S3-FIFO has between 0.87 and 1.45 times the hits of LRU, depending on the size
of the cache.

**When the best one changes.** Hits come in bursts, so the one with the most hits is often only lucky, and each change
costs hits, because the real cache does not hold what the new best one holds. So the lead of a shadow is compared with
its standard error: another shadow becomes the best if it leads by `_LEAVE` standard errors, and LRU, the order of the
real cache, if it leads by `_RETURN`. Older requests count less, by `_DECAY` per request. With a fixed margin of 3 to
10 % instead, hits were 0.92 to 0.98 of those of LRU on one of five traces; with standard errors, at least 0.996.

Not thread-safe.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Container, Hashable, Sequence
from typing import Protocol

from .errors import InvariantError

# A request counts half after about 350 further requests.
_DECAY = 0.998
_LEAVE, _RETURN = 3.0, 2.0
# An eviction passes over so many pages; the next one is evicted although the best shadow holds it.
PASSED_MAX = 64

# S3-FIFO: the share of its small queue, and the uses that it counts, as in the paper.
_SMALL_SHARE = 0.1
_USES_MAX = 3

# Keys in the order of their last use or entry, the oldest first.
_Queue = OrderedDict[Hashable, None]


class Shadow(Protocol):
    """A cache of keys. `use` records the uses of one request, head first, and returns how many of its leading keys were
    held: the hits of a prefix cache. The head becomes younger than the tail, so that tails are evicted first."""

    def use(self, keys: Sequence[Hashable]) -> int: ...

    def __contains__(self, key: Hashable) -> bool: ...

    def __len__(self) -> int:
        """Return the number of keys in memory, held or remembered."""


class LruShadow:
    """Least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: _Queue = OrderedDict()

    def use(self, keys: Sequence[Hashable]) -> int:
        """See Shadow."""
        held, hits = self._held, len(keys)
        for number in range(len(keys) - 1, -1, -1):
            key = keys[number]
            if key in held:
                held.move_to_end(key)
            else:
                held[key], hits = None, number
        while len(held) > self._capacity:
            held.popitem(last=False)
        return hits

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)


class S3FifoShadow:
    """S3-FIFO. `_small` and `_main` have the held keys with their uses since they entered; `_ghost` remembers the keys
    that left the small queue."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_max = max(1, int(capacity * _SMALL_SHARE))
        self._small: OrderedDict[Hashable, int] = OrderedDict()
        self._main: OrderedDict[Hashable, int] = OrderedDict()
        self._ghost: _Queue = OrderedDict()

    def use(self, keys: Sequence[Hashable]) -> int:
        """See Shadow."""
        small, main, ghost = self._small, self._main, self._ghost
        hits = _leading(keys, main, small)
        for key in reversed(keys):
            queue = main if key in main else small
            if (count := queue.get(key)) is not None:
                if count < _USES_MAX:
                    queue[key] = count + 1
                continue
            if key in ghost:
                del ghost[key]
                queue = main
            queue[key] = 0
            if len(small) + len(main) > self._capacity:
                self._evict()
        return hits

    def _evict(self) -> None:
        small, main, ghost = self._small, self._main, self._ghost
        while len(small) + len(main) > self._capacity:
            if len(small) > self._small_max or not main:
                key, count = small.popitem(last=False)
                if count:
                    main[key] = 0
                    continue
                ghost[key] = None
                if len(ghost) > self._capacity:
                    ghost.popitem(last=False)
            else:
                key, count = main.popitem(last=False)
                if count:
                    main[key] = count - 1

    def __contains__(self, key: Hashable) -> bool:
        return key in self._main or key in self._small

    def __len__(self) -> int:
        return len(self._small) + len(self._main) + len(self._ghost)


class ArcShadow:
    """ARC. `_once` and `_often` are the held keys (T1 and T2 in the paper), `_once_gone` and `_often_gone` the
    remembered ones (B1 and B2); `_target` is the aim for the length of `_once`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._once: _Queue = OrderedDict()
        self._often: _Queue = OrderedDict()
        self._once_gone: _Queue = OrderedDict()
        self._often_gone: _Queue = OrderedDict()

    def use(self, keys: Sequence[Hashable]) -> int:
        """See Shadow."""
        once, often = self._once, self._often
        hits = _leading(keys, often, once)
        for key in reversed(keys):
            if key in often:
                often.move_to_end(key)
            elif key in once:
                del once[key]
                often[key] = None
            else:
                self._miss(key)
        return hits

    def _miss(self, key: Hashable) -> None:
        once, once_gone, often_gone = self._once, self._once_gone, self._often_gone
        capacity = self._capacity
        if key in once_gone:
            self._target = min(capacity, self._target + max(1.0, len(often_gone) / len(once_gone)))
            del once_gone[key]
            self._replace(is_often=False)
            self._often[key] = None
            return
        if key in often_gone:
            self._target = max(0.0, self._target - max(1.0, len(once_gone) / len(often_gone)))
            del often_gone[key]
            self._replace(is_often=True)
            self._often[key] = None
            return
        if len(once) + len(once_gone) >= capacity:
            if len(once) < capacity:
                once_gone.popitem(last=False)
                self._replace(is_often=False)
            else:
                once.popitem(last=False)
        else:
            if len(self) >= 2 * capacity:
                often_gone.popitem(last=False)
            self._replace(is_often=False)
        once[key] = None

    def _replace(self, *, is_often: bool) -> None:
        """Make room for one key if the cache is full."""
        once, often = self._once, self._often
        if len(once) + len(often) < self._capacity:
            return
        excess = len(once) - self._target
        if once and (excess > 0 or (is_often and excess == 0) or not often):
            key, _ = once.popitem(last=False)
            self._once_gone[key] = None
        else:
            key, _ = often.popitem(last=False)
            self._often_gone[key] = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._often or key in self._once

    def __len__(self) -> int:
        return len(self._once) + len(self._often) + len(self._once_gone) + len(self._often_gone)


def _leading(keys: Sequence[Hashable], one: Container[Hashable], other: Container[Hashable]) -> int:
    """Return how many of the first keys are in one of two queues."""
    number = 0
    for key in keys:
        if key not in one and key not in other:
            break
        number += 1
    return number


class Tournament:
    """The shadows of one cache of `capacity` keys, and which of them is the best.

    A key takes about 650 bytes: three shadows hold it, and two remember as many more. Invariant, verified by `check`:
    no shadow has more than `2 * capacity` keys in memory.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity = max(1, capacity)
        self._shadows: tuple[Shadow, ...] = (LruShadow(capacity), S3FifoShadow(capacity), ArcShadow(capacity))
        self._hits = [0.0] * len(self._shadows)
        # The variance of the difference of two sums of hits.
        self._variance = {pair: 0.0 for pair in itertools.combinations(range(len(self._shadows)), 2)}
        self._best = 0
        self._requests = 0  # since the last one whose hits differed

    @property
    def best(self) -> Shadow:
        """The shadow whose pages the real cache keeps."""
        return self._shadows[self._best]

    @property
    def is_lru(self) -> bool:
        """True if the best one is LRU, the order of the real cache, which then has to pass over nothing."""
        return self._best == 0

    def use(self, keys: Sequence[Hashable]) -> None:
        """Record that a request uses these pages, head first; once per request. Takes 2 to 6 microseconds per key."""
        hits = [shadow.use(keys) for shadow in self._shadows]
        self._requests += 1
        if hits.count(hits[0]) == len(hits):
            return  # only differences of the sums count, and their decay does not change which one is large enough
        decay, self._requests = _DECAY**self._requests, 0
        self._hits = [decay * total + found for total, found in zip(self._hits, hits, strict=True)]
        for (one, other), variance in self._variance.items():
            self._variance[one, other] = decay**2 * variance + (hits[one] - hits[other]) ** 2
        best = self._best
        for number, total in enumerate(self._hits):
            lead = total - self._hits[self._best]
            if lead > 0 and total > self._hits[best]:
                errors = _LEAVE if number else _RETURN
                pair = (number, self._best) if number < self._best else (self._best, number)
                if lead * lead > errors * errors * self._variance[pair]:
                    best = number
        self._best = best

    def keeps(self, key: Hashable) -> bool:
        """Return True if the best shadow is not LRU and holds a page."""
        return self._best != 0 and key in self._shadows[self._best]

    def check(self) -> None:
        """Raise InvariantError if a shadow has too many keys."""
        for shadow in self._shadows:
            if len(shadow) > 2 * self._capacity:
                raise InvariantError(f"tournament: {type(shadow).__name__} has {len(shadow)} keys in memory")

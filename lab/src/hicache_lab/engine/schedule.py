"""Chooses the next waiting request, so that cached prefixes are used before they are evicted.

"Longest prefix first" serves requests with a common prefix one after the other, so that each finds it on L1. "First
come, first served" may alternate between prefixes and load or compute each of them again. Two limits apply: a very long
queue, in which looking up every request costs too much, is served in order of arrival, and so is a request that has
waited long enough.

Requests that arrive together with the same new prefix would each compute it. So only the first of them begins; the
others are deferred until the prefix is in the tree. Both ideas come from SGLang's scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from hicache.arguments import instance_or_new, number, whole
from hicache.errors import InvalidInput
from hicache.keys import RadixKey

T = TypeVar("T")

# Identifies a prefix that must be computed, see `_head`.
_Head = tuple[bytes, int, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order in which waiting requests begin: in order of arrival (`fcfs`), or `longest_prefix` first.

    `longest_prefix` sorts queues of at most `queue_max` requests; it looks up each of them in each step. Other requests
    overtake one for at most `age_max` seconds. A request waits for another one that computes at least `defer_tokens`
    uncached tokens that both need. Raises InvalidInput.
    """

    policy: Literal["fcfs", "longest_prefix"] = "fcfs"
    queue_max: int = 128
    age_max: float = 5.0
    defer_tokens: int = 64

    def __post_init__(self) -> None:
        if self.policy not in ("fcfs", "longest_prefix"):
            raise InvalidInput(f"schedule: policy {self.policy!r}; use 'fcfs' or 'longest_prefix'")
        whole("schedule: queue_max", self.queue_max)
        number("schedule: age_max", self.age_max)
        whole("schedule: defer_tokens", self.defer_tokens, 1)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """A waiting request: `item` is the scheduler's own object, `key` the key of its prompt."""

    item: T
    key: RadixKey
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Order(Generic[T]):
    """The split queue: `now` is in the order to begin, `deferred` in order of arrival, for the next step."""

    now: list[T]
    deferred: list[T]


def longest_prefix_first(
    waiting: Sequence[Candidate[T]],
    measure: Callable[[RadixKey], tuple[int, int]],
    *,
    page_size: int,
    now_s: float,
    computing: Iterable[RadixKey] = (),
    options: Schedule | None = None,
) -> Order[T]:
    """Sort a queue by the result of `measure` for each key: pages on L1, then pages on other tiers, then arrival.

    Requests older than `age_max` come first, by arrival, and are never deferred. `computing` are the keys of requests
    whose prefill runs now: waiting requests that share their new prefix are also deferred. `measure` is called once per
    waiting request and once per key of `computing`. It must not change the order of eviction; use `TreeCache.peek`.
    """
    options = instance_or_new("options", options, Schedule)
    by_arrival = sorted(waiting, key=lambda candidate: candidate.arrival_s)
    if len(waiting) > options.queue_max:
        return Order([candidate.item for candidate in by_arrival], [])
    heads = {_head(key, sum(measure(key)) * page_size, options.defer_tokens) for key in computing}
    old_s = now_s - options.age_max
    ranked: list[tuple[float, float, Candidate[T], _Head | None]] = []
    for candidate in by_arrival:
        device_pages, host_pages = measure(candidate.key)
        head = _head(candidate.key, (device_pages + host_pages) * page_size, options.defer_tokens)
        aged = candidate.arrival_s <= old_s
        ranked.append((-math.inf, 0, candidate, head) if aged else (-device_pages, -host_pages, candidate, head))
    ranked.sort(key=lambda entry: entry[:2])  # keeps the order of arrival among equals
    now: list[T] = []
    deferred: list[Candidate[T]] = []
    for rank, _, candidate, head in ranked:
        if head is not None and head in heads and rank != -math.inf:
            deferred.append(candidate)
        else:
            heads.add(head)
            now.append(candidate.item)
    deferred.sort(key=lambda candidate: candidate.arrival_s)
    return Order(now, [candidate.item for candidate in deferred])


def _head(key: RadixKey, cached_tokens: int, tokens: int) -> _Head | None:
    """Return the first `tokens` tokens (of a bigram key: pairs) of `key` that are not cached; None if it has fewer.

    The number of cached tokens stands for the tokens before them. If two different prefixes have equal heads, one
    request waits for the other without need, at most until that one is computed.
    """
    start, size = cached_tokens * key.position_bytes, tokens * key.position_bytes
    head = key.tokens[start : start + size]
    return (key.seed, cached_tokens, head) if len(head) == size else None

"""Chooses the next waiting request, so that cached prefixes are used before they are evicted.

"Longest prefix first" serves requests with a common prefix one after the other, so that each finds it on L1. "First
come, first served" may alternate between prefixes and load or compute each of them again. "Depth-first weight" walks
the tree of the cached prefixes depth first, each time into the part with the most waiting requests, so that the prefix
that most requests share is used while it is on L1. "Longest output first" and "random" do not look at the cache; they
are here to compare with. Two limits apply to all of them: a very long queue, in which looking up every request costs
too much, is served in order of arrival, and so is a request that has waited long enough.

Requests that arrive together with the same new prefix would each compute it. So the policies that look at the cache
begin only the first of them and defer the others until the prefix is in the tree. The policies and the deferral come
from SGLang's scheduler.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, Literal, TypeVar, get_args

from hicache.arguments import instance_or_new, number, whole
from hicache.errors import InvalidInput
from hicache.keys import RadixKey

T = TypeVar("T")

# Identifies a prefix that must be computed, see `_head`.
_Head = tuple[bytes, int, bytes]


Policy = Literal["fcfs", "longest_prefix", "depth_first_weight", "longest_output_first", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order in which waiting requests begin.

    - `fcfs`: in order of arrival.
    - `longest_prefix`: most pages on L1 first, then most pages on other tiers.
    - `depth_first_weight`: depth first through the tree of the cached prefixes. Of the branches of a prefix, the one
      with the most waiting requests comes first; the requests that continue none of them come last.
    - `longest_output_first`: largest limit of new tokens first.
    - `random`: in an order that only `seed` and the numbers of the requests decide.

    Equal requests begin in order of arrival, and so do queues of more than `queue_max` requests: the second and third
    policy look up each request in each step. Other requests overtake one for at most `age_max` seconds. With these two
    policies a request waits for another one that computes at least `defer_tokens` uncached tokens that both need.
    Raises InvalidInput.
    """

    policy: Policy = "fcfs"
    queue_max: int = 128
    age_max: float = 5.0
    defer_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise InvalidInput(f"schedule: policy {self.policy!r}; use one of {', '.join(get_args(Policy))}")
        whole("schedule: queue_max", self.queue_max)
        number("schedule: age_max", self.age_max)
        whole("schedule: defer_tokens", self.defer_tokens, 1)
        whole("schedule: seed", self.seed)

    @property
    def looks_up(self) -> bool:
        """True if the order depends on the content of the cache."""
        return self.policy in ("longest_prefix", "depth_first_weight")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """A waiting request: `item` is the scheduler's own object, `key` the key of its prompt.

    `output_tokens` is its limit of new tokens, `number` its place in the order of submission.
    """

    item: T
    key: RadixKey
    arrival_s: float
    output_tokens: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Order(Generic[T]):
    """The split queue: `now` is in the order to begin, `deferred` in order of arrival, for the next step."""

    now: list[T]
    deferred: list[T]


def order_queue(
    waiting: Sequence[Candidate[T]],
    measure: Callable[[RadixKey], tuple[int, int]],
    *,
    page_size: int,
    now_s: float,
    computing: Iterable[RadixKey] = (),
    options: Schedule | None = None,
) -> Order[T]:
    """Sort a queue as `options` say. `measure` returns the pages of a key that are on L1, and those on other tiers.

    Requests older than `age_max` come first, by arrival, and are never deferred. `computing` are the keys of requests
    whose prefill runs now: waiting requests that share their new prefix are also deferred. A policy that looks at the
    cache calls `measure` once per waiting request and once per key of `computing`, another policy never. It must not
    change the order of eviction; use `TreeCache.peek`.
    """
    options = instance_or_new("options", options, Schedule)
    by_arrival = sorted(waiting, key=lambda candidate: candidate.arrival_s)
    if options.policy == "fcfs" or len(waiting) > options.queue_max:
        return Order([candidate.item for candidate in by_arrival], [])
    cached = [measure(candidate.key) for candidate in by_arrival] if options.looks_up else []
    ranks = _ranks(options, by_arrival, cached, page_size)
    old_s = now_s - options.age_max
    aged = sum(candidate.arrival_s <= old_s for candidate in by_arrival)  # they are the first by arrival
    order = [*range(aged), *sorted(range(aged, len(by_arrival)), key=ranks.__getitem__)]
    if not options.looks_up:
        return Order([by_arrival[place].item for place in order], [])
    heads = {_head(key, sum(measure(key)) * page_size, options.defer_tokens) for key in computing}
    now: list[T] = []
    deferred: list[int] = []
    for place in order:
        candidate = by_arrival[place]
        head = _head(candidate.key, sum(cached[place]) * page_size, options.defer_tokens)
        if head is not None and head in heads and place >= aged:
            deferred.append(place)
        else:
            heads.add(head)
            now.append(candidate.item)
    return Order(now, [by_arrival[place].item for place in sorted(deferred)])


def _ranks(
    options: Schedule, by_arrival: Sequence[Candidate[T]], cached: Sequence[tuple[int, int]], page_size: int
) -> list[Any]:
    """Return a value per request; the request with the smallest one begins first."""
    if options.policy == "longest_prefix":
        return [(-device_pages, -host_pages) for device_pages, host_pages in cached]
    if options.policy == "longest_output_first":
        return [-candidate.output_tokens for candidate in by_arrival]
    if options.policy == "random":
        return [random.Random(f"{options.seed} {candidate.number}").random() for candidate in by_arrival]
    # A page key names the whole prefix up to its page, so equal keys are the same branch of the tree.
    paths = [
        candidate.key.page_keys(page_size, candidate.key.seed, 0, sum(pages))
        for candidate, pages in zip(by_arrival, cached, strict=True)
    ]
    weights = Counter(chain.from_iterable(paths))
    first = {page: place for place, path in reversed(list(enumerate(paths))) for page in path}
    # The branches along a path, root first, and after all branches the requests that end there. Comparing such lists
    # is the walk.
    return [[*((-weights[page], first[page]) for page in path), (0, place)] for place, path in enumerate(paths)]


def _head(key: RadixKey, cached_tokens: int, tokens: int) -> _Head | None:
    """Return the first `tokens` tokens (of a bigram key: pairs) of `key` that are not cached; None if it has fewer.

    The number of cached tokens stands for the tokens before them. If two different prefixes have equal heads, one
    request waits for the other without need, at most until that one is computed.
    """
    start, size = cached_tokens * key.position_bytes, tokens * key.position_bytes
    head = key.tokens[start : start + size]
    return (key.seed, cached_tokens, head) if len(head) == size else None

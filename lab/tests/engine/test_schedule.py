"""The order of waiting requests by each policy, one request per new prefix, and a bounded wait."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import pytest

from hicache.errors import InvalidInput
from hicache.keys import RadixKey
from hicache_lab.engine.schedule import Candidate, Order, Policy, Schedule, order_queue
from tests.cache.world import GEOMETRY, World, prompt
from tests.seeds import rng, seeds

PAGE = GEOMETRY.page_size
LONGEST = partial(Schedule, policy="longest_prefix")
DEFER = LONGEST(defer_tokens=2 * PAGE)


class Queue:
    """Requests a, b, c, ... that arrive one second apart. `cached` has their pages on L1 and on other tiers."""

    def __init__(self, *keys: RadixKey, cached: dict[RadixKey, tuple[int, int]] | None = None) -> None:
        self.waiting = [Candidate(chr(ord("a") + i), key, float(i)) for i, key in enumerate(keys)]
        self.cached = cached or {}
        self.measured: list[RadixKey] = []

    def measure(self, key: RadixKey) -> tuple[int, int]:
        self.measured.append(key)
        return self.cached.get(key, (0, 0))

    def order(
        self, options: Schedule = DEFER, *, now_s: float = 4.0, computing: tuple[RadixKey, ...] = ()
    ) -> Order[str]:
        return order_queue(
            self.waiting, self.measure, page_size=PAGE, now_s=now_s, computing=computing, options=options
        )


def test_an_empty_queue_stays_empty() -> None:
    assert order_queue([], lambda key: (0, 0), page_size=PAGE, now_s=0.0, options=DEFER) == Order([], [])


def test_requests_are_sorted_by_pages_on_l1_then_pages_on_other_tiers_then_arrival() -> None:
    keys = [prompt(number) for number in range(6)]
    cached = dict(zip(keys, [(0, 0), (0, 3), (1, 0), (2, 0), (1, 5), (0, 0)], strict=True))
    assert Queue(*keys, cached=cached).order() == Order(list("decbaf"), [])


def test_the_order_does_not_depend_on_the_order_of_the_queue() -> None:
    queue = Queue(prompt(1), prompt(2), prompt(3))
    queue.waiting.reverse()
    assert queue.order().now == ["a", "b", "c"]


def test_of_requests_with_the_same_new_prefix_only_the_first_begins() -> None:
    queue = Queue(prompt(1, 2, 3), prompt(9, 9, 9), prompt(1, 2, 4), prompt(1, 2))
    assert queue.order() == Order(["a", "b"], ["c", "d"])


def test_a_short_common_prefix_defers_no_request() -> None:
    queue = Queue(prompt(1, 2, 3), prompt(1, 4, 5), prompt(1, 4))
    assert queue.order().deferred == ["c"]  # shares two pages with b; b shares one with a
    assert Queue(prompt(1, 2), prompt(1, tail=PAGE - 1)).order().deferred == []


def test_bigrams_are_compared_as_pairs_behind_the_cached_pages() -> None:
    prompts = [[1] * 8 + [2] * 9, [1] * 8 + [2] * 8 + [3], [1] * 8 + [2] * 9 + [3]]
    keys = [RadixKey.of(tokens, bigram=True) for tokens in prompts]
    cached = {key: (1, 0) for key in keys}
    # The twelfth pair behind the cached page is (2, 2), (2, 3) and (2, 2).
    assert Queue(*keys, cached=cached).order(LONGEST(defer_tokens=12)) == Order(["a", "b"], ["c"])
    assert Queue(*keys, cached=cached).order(LONGEST(defer_tokens=11)) == Order(["a"], ["b", "c"])
    assert Queue(*keys, cached=cached).order(LONGEST(defer_tokens=13)) == Order(["a", "b", "c"], [])


def test_when_the_common_prefix_is_cached_all_requests_begin() -> None:
    keys = [prompt(1, 2, 3), prompt(1, 2, 4), prompt(1, 2, 5, 6)]
    queue = Queue(*keys, cached={key: (2, 0) for key in keys})
    assert queue.order() == Order(["a", "b", "c"], [])


def test_requests_that_share_a_prefix_being_computed_are_deferred() -> None:
    queue = Queue(prompt(1, 2, 3), prompt(4, 5, 6))
    assert queue.order(computing=(prompt(1, 2, 9),)) == Order(["b"], ["a"])


def test_equal_tokens_of_two_tenants_defer_no_request() -> None:
    assert Queue(prompt(1, 2, 3), prompt(1, 2, 3, salt="b")).order().deferred == []


def test_new_tokens_behind_different_cached_lengths_are_not_the_same_prefix() -> None:
    keys = [prompt(7, 1, 2, 3), prompt(1, 2, 3)]
    assert Queue(*keys, cached={keys[0]: (1, 0)}).order() == Order(["a", "b"], [])


def test_a_request_that_has_waited_for_age_max_is_not_overtaken() -> None:
    cached = {prompt(3): (1, 0)}
    queue = Queue(prompt(1, 2, 8), prompt(1, 2, 9), prompt(3), cached=cached)
    options = LONGEST(defer_tokens=2 * PAGE, age_max=5.0)
    assert queue.order(options, now_s=4.9) == Order(["c", "a"], ["b"])
    assert queue.order(options, now_s=5.0) == Order(["a", "c"], ["b"])
    assert queue.order(options, now_s=6.0) == Order(["a", "b", "c"], [])


def test_a_long_queue_is_served_in_order_of_arrival_without_lookups() -> None:
    queue = Queue(prompt(1, 2, 3), prompt(1, 2, 3), prompt(4), cached={prompt(4): (1, 0)})
    assert queue.order(LONGEST(queue_max=2)) == Order(["a", "b", "c"], [])
    assert queue.measured == []
    assert queue.order(LONGEST(queue_max=3)).now[0] == "c"


def test_each_request_is_measured_once() -> None:
    queue = Queue(prompt(1), prompt(2))
    queue.order(computing=(prompt(3),))
    assert len(queue.measured) == 3


@pytest.mark.parametrize(
    "options", [{"queue_max": -1}, {"age_max": -1.0}, {"defer_tokens": 0}, {"policy": "lifo"}, {"seed": -1}]
)
def test_invalid_limits_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(options))):
        Schedule(**options)


def test_peek_changes_neither_nodes_nor_the_order_of_eviction() -> None:
    """The prompt that was served last stays, although the other one was looked up later."""
    world = World(device_pages=16, backend=None)
    world.serve("old", prompt(1, 2, 3))
    world.serve("new", prompt(4, 5, 6))
    world.settle()
    nodes = world.cache.statistics().nodes
    for key, pages in ((prompt(1, 2, 9), 2), (prompt(1, 2, 3), 3), (prompt(1), 1), (prompt(1, salt="b"), 0)):
        assert world.cache.peek(key) == (pages, 0)
    assert world.cache.statistics().nodes == nodes
    world.cache.evict(3)
    assert world.cache.peek(prompt(1, 2, 3)) == (0, 3) and world.cache.peek(prompt(4, 5, 6)) == (3, 0)


# Depth-first weight


def test_depth_first_weight_walks_into_the_part_of_the_tree_with_the_most_waiting_requests() -> None:
    """The tree of the cached prefixes, with the waiting requests at their last pages:

    1 (a) - 2 (b) - 3 (c)        weights: 1 has 4, 2 has 3, 3 has 1, 4 has 1
                  - 4 (d)
    5 (e, g)                     weight 2
    root (f)                     nothing is cached
    """
    prompts = {"f": (9,), "e": (5,), "a": (1,), "d": (1, 2, 4), "b": (1, 2), "c": (1, 2, 3), "g": (5,)}
    keys = [prompt(*pages) for pages in prompts.values()]
    cached = dict(zip(keys, [(0, 0), (1, 0), (1, 0), (1, 2), (2, 0), (3, 0), (0, 1)], strict=True))
    names = dict(zip("abcdefg", prompts, strict=True))
    order = Queue(*keys, cached=cached).order(Schedule(policy="depth_first_weight", age_max=100.0))
    # Into 1, then 2: of its branches, d arrived first. Requests that end at a prefix follow those that continue it.
    assert [names[item] for item in order.now] == ["d", "c", "b", "a", "e", "g", "f"]


def test_depth_first_weight_does_not_mix_tenants_and_defers_as_longest_prefix_does() -> None:
    keys = [prompt(1), prompt(1, salt="b"), prompt(1, 7, 8, salt="b"), prompt(1, 7, 8, 9, salt="b")]
    queue = Queue(*keys, cached=dict.fromkeys(keys, (1, 0)))
    options = Schedule(policy="depth_first_weight", defer_tokens=2 * PAGE, age_max=100.0)
    assert queue.order(options) == Order(["b", "c", "a"], ["d"])
    assert len(queue.measured) == len(keys)


# Policies that do not look at the cache


def test_longest_output_first_sorts_by_the_limit_of_new_tokens_then_by_arrival() -> None:
    queue = Queue()
    queue.waiting = [
        Candidate(name, prompt(1, 2, 3), float(at), tokens)
        for at, (name, tokens) in enumerate([("a", 5), ("b", 9), ("c", 5), ("d", 70)])
    ]
    options = Schedule(policy="longest_output_first", age_max=100.0)
    assert queue.order(options) == Order(["d", "b", "a", "c"], []) and queue.measured == []


def test_a_random_order_is_that_of_its_seed_and_lets_each_request_be_the_first() -> None:
    queue = Queue()
    queue.waiting = [Candidate(name, prompt(1, 2, 3), 0.0, number=at) for at, name in enumerate("abcd")]
    orders = [queue.order(Schedule(policy="random", seed=seed, age_max=100.0)) for seed in range(40)]
    assert orders == [queue.order(Schedule(policy="random", seed=seed, age_max=100.0)) for seed in range(40)]
    assert {order.now[0] for order in orders} == set("abcd") and queue.measured == []
    # A request that leaves the queue does not change the order of the others.
    queue.waiting = queue.waiting[1:]
    rest = queue.order(Schedule(policy="random", seed=3, age_max=100.0)).now
    assert rest == [name for name in orders[3].now if name != "a"]


# Every policy


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_policy_begins_all_requests_and_none_is_overtaken_once_it_has_waited_for_age_max(policy: Policy) -> None:
    keys = [prompt(number % 3, number) for number in range(9)]
    queue = Queue(*keys, cached={key: (number % 2, 1) for number, key in enumerate(keys)})
    order = queue.order(Schedule(policy=policy, age_max=4.0), now_s=8.0)
    assert order.now[:5] == list("abcde") and sorted(order.now) == list("abcdefghi") and not order.deferred
    assert queue.order(Schedule(policy=policy, queue_max=8), now_s=8.0) == Order(list("abcdefghi"), [])


@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("seed", seeds(20))
def test_no_request_is_overtaken_for_longer_than_age_max(policy: Policy, seed: int) -> None:
    """The server begins one request per second, while requests with longer prefixes arrive."""
    random, options = rng(seed), Schedule(policy=policy, age_max=10.0, defer_tokens=PAGE)
    waiting: list[Candidate[float]] = []
    cached: dict[RadixKey, tuple[int, int]] = {}
    overtaken_s = 0.0
    for now_s in map(float, range(200)):
        if random.random() < 0.9:
            key = prompt(*(random.randrange(3) for _ in range(random.randint(1, 4))))
            cached[key] = (random.randint(0, 4), random.randint(0, 2))
            waiting.append(Candidate(now_s, key, now_s, random.randint(1, 9), int(now_s)))
        order = order_queue(waiting, cached.__getitem__, page_size=PAGE, now_s=now_s, options=options)
        assert sorted(order.now + order.deferred) == [candidate.item for candidate in waiting]
        assert order.now or not waiting
        for item in order.now[:1]:
            waiting = [candidate for candidate in waiting if candidate.item != item]
            overtaken_s = max([overtaken_s, *(now_s - other.item for other in waiting if other.item < item)])
    assert overtaken_s < options.age_max

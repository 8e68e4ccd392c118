"""The order of eviction with hints."""

from __future__ import annotations

from typing import Any
from weakref import ref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.keys import RadixKey, token_bytes
from hicache.policies import POLICIES
from hicache.radix import RELEASED, HintedOrder, Node, NodeHint, RadixTree, check_tree, make_policy
from hicache.radix.hinted import _TIMES_MAX, TickTimes
from hicache_lab.clocks import ManualClock
from tests.seeds import rng, seeds

PAGE = 2


def key(*pages: int) -> RadixKey:
    return RadixKey(token_bytes([page for page in pages for _ in range(PAGE)]))


class Hinted:
    """A tree whose time passes a second for each request. Pages of L1 and L2 have other numbers."""

    def __init__(self, policy: str = "lru") -> None:
        self.tree = RadixTree(PAGE, make_policy(policy), run_pages_max=8)
        self.clock = ManualClock()
        self._next_page = 1

    @property
    def order(self) -> HintedOrder:
        return self.tree.hinted(self.clock)

    def _pages(self, count: int) -> np.ndarray:
        self._next_page += count
        return np.arange(self._next_page - count, self._next_page, dtype=np.int32)

    def serve(self, *pages: int) -> Node:
        """Serve a request, whose pages get on L1."""
        self.clock.advance(1)
        self.tree.times.note(self.clock(), self.tree.tick)
        chosen = key(*pages)
        return self.tree.insert(chosen, self._pages(chosen.pages(PAGE))).node

    def host(self, *pages: int) -> Node:
        """Put pages on L2 only."""
        self.clock.advance(1)
        self.tree.times.note(self.clock(), self.tree.tick)
        chosen = key(*pages)
        return self.tree.insert_host(chosen, 0, self._pages(chosen.pages(PAGE)))[0]

    def hint(self, *pages: int, **entries: Any) -> NodeHint:
        """Let a hint speak for the nodes of a prompt."""
        match = self.tree.match(key(*pages), marks=False)
        told = NodeHint(self.tree.tick, self.clock(), ref(self.tree), **entries)
        path, node = [], match.node
        while node.parent is not None:
            path.append(node)
            node = node.parent
        self.order.give(told, path)
        return told

    def victims(self, *, host: bool = False) -> list[int]:
        """Evict page by page. Return the first token of the last page of each victim."""
        found: list[int] = []
        while True:
            before = {node: int.from_bytes(node.key[-4:], "little") for node in self.tree.nodes()}
            freed = self.tree.evict_host(1) if host else self.tree.evict_device(1).pages
            check_tree(self.tree)
            if not len(freed):
                return found
            found += [token for node, token in before.items() if node not in set(self.tree.nodes())]


def test_without_hints_nothing_is_made_and_ranks_are_those_of_the_policy() -> None:
    hinted = Hinted()
    for number in range(5):
        hinted.serve(number)
    assert hinted.tree._hinted is None
    assert [type(rank) for rank, _, _ in hinted.tree.queues.device._heap] == [int] * 5
    assert hinted.victims() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "adaptive"])
@pytest.mark.parametrize("seed", seeds(4))
def test_an_order_without_a_hint_that_speaks_is_that_of_the_policy(seed: int, policy: str) -> None:
    """Hints come, end, and speak for nodes that others have used; then both trees evict the same."""
    numbers, hinted, plain = rng(seed), Hinted(policy), Hinted(policy)
    for _ in range(60):
        pages = [numbers.randrange(2) for _ in range(numbers.randint(1, 5))]
        hinted.serve(*pages)
        plain.serve(*pages)
        if numbers.random() < 0.5:
            some = [numbers.randrange(2) for _ in range(numbers.randint(1, 5))]
            waits = {"return_s": hinted.clock() + 9, "trust": 1}
            told = hinted.hint(*some, **numbers.choice([{"value": 0.5}, {"value": RELEASED}, waits]))
            plain.tree.match(key(*some), marks=False)
            hinted.order.end(told)
        if numbers.random() < 0.2:
            count = numbers.randint(1, 4)
            assert len(hinted.tree.evict_device(count).pages) == len(plain.tree.evict_device(count).pages)
        check_tree(hinted.tree)
        assert sorted(node.key for node in hinted.tree.nodes()) == sorted(node.key for node in plain.tree.nodes())
    assert not any(node.hint for node in hinted.tree.nodes())
    assert hinted.victims() == plain.victims()


def test_a_released_prefix_leaves_first_and_a_use_ends_that() -> None:
    hinted = Hinted()
    for number in range(4):
        hinted.serve(number)
    hinted.hint(3, value=RELEASED)
    hinted.hint(2, value=RELEASED)
    hinted.serve(2)
    assert hinted.victims() == [3, 0, 1, 2]


def test_on_l2_retained_pages_leave_after_others_in_the_order_of_their_values_and_are_still_evicted() -> None:
    hinted = Hinted()
    for number in range(5):
        hinted.host(number)
    hinted.hint(0, value=0.9)
    hinted.hint(1, value=0.2)
    hinted.hint(3, value=0.2)
    assert hinted.victims(host=True) == [2, 4, 1, 3, 0]


def test_retained_pages_have_their_usual_order_on_l1() -> None:
    hinted = Hinted()
    for number in range(3):
        hinted.serve(number)
    hinted.hint(0, value=1)
    assert hinted.victims() == [0, 1, 2]


def test_a_use_does_not_end_retained_pages() -> None:
    hinted = Hinted()
    for number in range(3):
        hinted.host(number)
    hinted.hint(0, value=1)
    hinted.tree.match(key(0))
    hinted.tree.match(key(1))
    assert hinted.victims(host=True) == [2, 1, 0]


def test_the_session_that_returns_last_leaves_first() -> None:
    hinted = Hinted()
    for number in range(100, 120):
        hinted.serve(number)
    for number, wait_s in enumerate([30, 3, 300, 12]):
        hinted.serve(number)
        hinted.hint(number, return_s=hinted.clock() + wait_s, trust=1)
    assert [one for one in hinted.victims() if one < 100] == [2, 0, 3, 1]


def test_a_session_that_returns_soon_stays_while_others_pass_and_one_that_is_late_goes() -> None:
    def evicted_after(requests: int) -> list[int]:
        hinted = Hinted()
        hinted.serve(0)
        hinted.hint(0, return_s=hinted.clock() + 20, trust=1)
        for number in range(1, requests):
            hinted.serve(number)
        return hinted.victims()

    assert evicted_after(15).index(0) > 7  # LRU would evict it first
    assert evicted_after(100).index(0) < 80


def test_without_trust_the_order_is_that_of_the_last_use() -> None:
    hinted = Hinted()
    for number in range(4):
        hinted.serve(number)
        hinted.hint(number, return_s=hinted.clock() + 100 - 20 * number, trust=0.0)
    assert hinted.victims() == [0, 1, 2, 3]


SECONDS = st.floats(0, 1e4) | st.sampled_from([0.0, 1e-9, 1e9])


@given(
    trust=st.floats(1e-6, 1), return_s=SECONDS, steps=st.lists(st.floats(0, 400), max_size=30),
    requests=st.lists(st.floats(0, 50), min_size=1, max_size=30),
)
def test_the_rank_of_a_waiting_session_only_rises_while_its_hint_speaks(
    trust: float, return_s: float, steps: list[float], requests: list[float]
) -> None:
    hinted = Hinted()
    node = hinted.serve(0)
    for number, pause_s in enumerate(requests, 1):
        hinted.clock.advance(pause_s)
        hinted.serve(number)
    told = NodeHint(hinted.tree.tick, hinted.clock(), ref(hinted.tree), return_s=hinted.clock() + return_s, trust=trust)
    hinted.order.give(told, [node])
    ranks = [hinted.order._device_rank(node)]
    for step_s in steps:
        hinted.clock.advance(step_s)
        hinted.serve(1)
        ranks.append(hinted.order._device_rank(node))
    assert ranks == sorted(ranks)
    assert all(rank[0] == 0 and 0 <= rank[1] <= hinted.tree.tick for rank in ranks)
    hinted.serve(0)
    assert hinted.order._device_rank(node) > ranks[-1]  # a use ends the hint, and raises the rank too


@pytest.mark.parametrize("seed", seeds(5))
def test_the_tick_of_a_time_does_not_fall_when_older_times_become_coarser(seed: int) -> None:
    numbers, times, now_s, tick = rng(seed), TickTimes(), 0.0, 0
    asked = sorted(numbers.uniform(0, 3000) for _ in range(50))
    found = [0] * len(asked)
    for _ in range(3 * _TIMES_MAX):
        now_s += numbers.uniform(0, 1)
        tick += numbers.randint(1, 5)
        times.note(now_s, tick)
        assert len(times._times) == len(times._ticks) <= _TIMES_MAX
        if numbers.random() < 0.01 or len(times._times) == _TIMES_MAX // 2 + 1:
            now = [times.at(one) for one in asked]
            assert now == sorted(now) and now[-1] <= tick
            assert all(new >= old for new, old, at_s in zip(now, found, asked, strict=True) if at_s <= now_s)
            found = now
    assert times.at(-1) == 0


def test_a_split_keeps_the_hint_of_both_parts_and_its_end_reaches_both() -> None:
    hinted = Hinted()
    hinted.host(1, 2, 3, 4)
    hinted.host(9)
    told = hinted.hint(1, 2, 3, 4, value=1)
    hinted.tree.match(key(1, 2, 5), marks=False)
    hinted.tree.match(key(1, 7), marks=False)
    assert [node.hint for node in hinted.tree.nodes()].count(told) == 3
    hinted.order.end(told)
    assert not any(node.hint for node in hinted.tree.nodes())
    assert hinted.victims(host=True)[-1] == 9


def test_the_end_of_a_hint_leaves_those_that_came_later() -> None:
    hinted = Hinted()
    hinted.host(1, 2, 3, 4)
    first = hinted.hint(1, 2, 3, 4, value=0.5)
    second = hinted.hint(1, 2, value=1)
    hinted.order.end(first)
    assert [node.hint for node in hinted.tree.nodes()] == [second, None]
    hinted.order.end(second)
    assert [node.hint for node in hinted.tree.nodes()] == [None, None]


def test_the_end_of_a_hint_does_not_bring_evicted_nodes_back() -> None:
    hinted = Hinted()
    hinted.host(1, 2)
    told = hinted.hint(1, 2, value=1)
    hinted.tree.evict_host(2)
    hinted.order.end(told)
    check_tree(hinted.tree)
    assert hinted.tree.queues.host.pop() is None
    assert not told.nodes


def test_a_retained_node_does_not_grow() -> None:
    """Otherwise the later pages of a running request would be retained too, and nobody would count them."""
    hinted = Hinted()
    for value, grows in ((0.0, True), (1.0, False)):
        first = int(value) * 10
        node = hinted.serve(first, first + 1)
        hinted.tree.lock(node)
        hinted.hint(first, first + 1, value=value)
        longer = key(first, first + 1, first + 2)
        end = hinted.tree.insert(longer, hinted._pages(1), below=node, start_page=2).node
        assert (end is node) == grows
        assert hinted.tree.pages(node) == 2 + grows
    check_tree(hinted.tree)


def test_a_match_for_a_hint_is_not_a_use() -> None:
    hinted = Hinted()
    for number in range(3):
        hinted.serve(number, number + 10)
    tick = hinted.tree.tick
    assert hinted.tree.match(key(0, 10), marks=False).pages == 2
    assert hinted.tree.match(key(0, 5), marks=False).pages == 1  # splits
    assert hinted.tree.tick == tick
    check_tree(hinted.tree)
    assert hinted.victims()[:2] == [10, 0]

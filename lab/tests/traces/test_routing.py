"""Routing: hand-computed routes, and brute-force references on random traces."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from hicache.errors import InvalidInput
from hicache_lab.traces.request import TraceRequest
from hicache_lab.traces.routing import BOUND, Router, Routing
from hicache_lab.traces.synthetic import synthetic_trace
from hicache_lab.traces.tokens import TokenSource
from lab.tests.replay.world import request
from tests.seeds import rng, seeds


def routes(routing: Routing, nodes: int, trace: Iterable[TraceRequest]) -> list[int]:
    router = Router(routing, nodes)
    return [router.route(one) for one in trace]


def named(index: int, session: int, blocks: int = 1) -> TraceRequest:
    """Return a request of a named conversation whose blocks are its own."""
    return TraceRequest(index, 0, 512 * blocks, 1, tuple(range(1000 * index, 1000 * index + blocks)), session=session)


def test_rotate_takes_one_node_after_the_other() -> None:
    assert routes(Routing.ROTATE, 3, [request(i, [i]) for i in range(7)]) == [0, 1, 2, 0, 1, 2, 0]


def test_random_is_splitmix64_of_the_index() -> None:
    """The first numbers of SplitMix64 with seed 0, as published with its reference implementation."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    assert routes(Routing.RANDOM, 7, [request(i, [i]) for i in range(5)]) == [number % 7 for number in published]


def test_a_named_conversation_stays_on_its_node_and_a_new_one_goes_to_the_emptiest() -> None:
    trace = [named(0, 5, blocks=3), named(1, 6), named(2, 5), named(3, 7), named(4, 8), named(5, 6), named(6, 9)]
    # Blocks so far before each request: (0, 0), (3, 0), (3, 1), (4, 1), (4, 2), (4, 3), (4, 4)
    assert routes(Routing.SESSION, 2, trace) == [0, 1, 0, 1, 1, 1, 0]


def test_an_unnamed_conversation_is_recognized_by_its_first_new_block() -> None:
    trace = [
        request(0, [1, 2], tail=100, output=20),  # new: the emptiest of (0, 0)
        request(1, [5, 6, 7, 8]),  # new: the emptiest of (612, 0)
        request(2, [1, 3, 4]),  # its block 3 follows block 1, the last whole one of request 0
        request(3, [1, 9]),  # block 9 follows block 1 too
        request(4, [20]),  # new: the emptiest of (3172, 2048)
        request(5, [5, 6, 30]),  # block 30 follows block 6, which is not the last one of request 1
    ]
    assert routes(Routing.SESSION, 2, trace) == [0, 1, 0, 0, 1, 1]
    too_short = [request(0, [1, 2], tail=100, output=600), request(1, [1, 3])]
    assert routes(Routing.SESSION, 2, too_short) == [0, 1]
    assert routes(Routing.SESSION, 2, [request(0, [1, 2], tail=100, output=412), request(1, [1, 3])]) == [0, 0]


@pytest.mark.parametrize("seed", seeds(3))
def test_unnamed_conversations_are_those_of_the_tokens(seed: int) -> None:
    """Reference: a continuing request has tokens of an earlier output, after its known whole blocks."""
    source, router = TokenSource(), Router(Routing.SESSION, 4)
    known: set[int] = set()
    owner: dict[int, int] = {}
    continued = 0
    for one in synthetic_trace(300, seed):
        new = next((i for i, block in enumerate(one.hash_ids) if block not in known), len(one.hash_ids))
        seen = source.take(one).seen_tokens
        node = router.route(one)
        if seen > new * 512:
            assert node == owner[one.hash_ids[new - 1]]
            continued += 1
        if one.whole_blocks > new:
            owner[one.hash_ids[one.whole_blocks - 1]] = node
        known.update(one.hash_ids)
    assert continued > 50


def test_prefix_prefers_the_longest_prefix_unless_its_node_is_above_the_bound() -> None:
    trace = [
        request(0, [1, 2, 3]),  # 0: all nodes are empty
        request(1, [10, 11, 12]),  # 1: no prefix, node 0 is above the bound
        request(2, [1, 2, 4]),  # 0: prefix of 2 blocks; loads 3 and 3, bound 3.75
        request(3, [1, 2, 4, 5]),  # 1: node 0 has 6 of 9 blocks, and the bound is 5.625
        request(4, [1, 2, 4, 5]),  # 1: has 4 blocks, node 0 has 3; loads 6 and 7, bound 8.125
    ]
    assert routes(Routing.PREFIX, 2, trace) == [0, 1, 0, 1, 1]


def longest_prefix(request: TraceRequest, sent: Sequence[TraceRequest]) -> int:
    """Return the number of leading blocks that are all among the blocks of `sent`."""
    known = {block for one in sent for block in one.hash_ids}
    return next((i for i, block in enumerate(request.hash_ids) if block not in known), len(request.hash_ids))


def random_trace(numbers: random.Random, requests: int) -> list[TraceRequest]:
    """Return requests whose blocks are paths of a small tree."""
    trace = []
    for index in range(requests):
        path = [numbers.randrange(3)]
        for _ in range(numbers.randrange(6)):
            path.append(4 * path[-1] + 3 + numbers.randrange(4))
        trace.append(request(index, path, tail=numbers.choice([0, 100])))
    return trace


@pytest.mark.parametrize("seed", seeds(5))
@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_prefix_routes_equal_those_of_a_search_over_all_nodes(seed: int, nodes: int) -> None:
    router = Router(Routing.PREFIX, nodes)
    sent: list[list[TraceRequest]] = [[] for _ in range(nodes)]
    for one in random_trace(rng(seed), 150):
        loads = [sum(other.input_length for other in each) for each in sent]
        under = [node for node in range(nodes) if loads[node] <= BOUND * sum(loads) / nodes]
        expected = min(under, key=lambda node: (-longest_prefix(one, sent[node]), loads[node], node))
        assert router.route(one) == expected
        sent[expected].append(one)


@pytest.mark.parametrize("routing", Routing)
def test_equal_traces_have_equal_routes_and_every_node_is_used(routing: Routing) -> None:
    first = routes(routing, 4, synthetic_trace(200, 1))
    assert first == routes(routing, 4, synthetic_trace(200, 1))
    assert set(first) == {0, 1, 2, 3}
    assert set(routes(routing, 1, synthetic_trace(50, 1))) == {0}


def test_a_router_without_nodes_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="at least 1, got 0"):
        Router(Routing.PREFIX, 0)

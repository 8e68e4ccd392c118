"""Paths of pages agree with the page keys of the tokens that a trace stands for."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hicache.errors import InvalidInput
from hicache.keys import page_keys
from hicache_lab.plan.pages import Path, PathSource
from hicache_lab.traces.request import TraceRequest
from hicache_lab.traces.synthetic import synthetic_trace
from hicache_lab.traces.tokens import TokenSource
from lab.tests.plan.world import conversations, items
from lab.tests.replay.world import request
from tests.seeds import seeds


class Names:
    """Names for pages from paths: equal if and only if the paths up to and including the pages are equal."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], int] = {}

    def of(self, path: Path) -> list[int]:
        """The names of the pages of one path."""
        names, start, name = [], 0, -1
        for id_, end in items(path):
            for _ in range(start, end):
                name = self._names.setdefault((name, id_), len(self._names))
                names.append(name)
            start = end
        return names


def require_same_pages(trace: Iterable[TraceRequest], page_size: int) -> int:
    """Assert that pages have equal names if and only if they have equal keys. Return the number of distinct pages."""
    source, tokens, names = PathSource(page_size), TokenSource(), Names()
    key_of: dict[int, bytes] = {}
    name_of: dict[bytes, int] = {}
    for one in trace:
        keys = page_keys(tokens.take(one).kv_tokens, page_size)
        ours = names.of(source.take(one))
        assert len(ours) == len(keys), f"request {one.index}"
        for name, key in zip(ours, keys, strict=True):
            assert key_of.setdefault(name, key) == key, f"request {one.index}: different pages have one name"
            assert name_of.setdefault(key, name) == name, f"request {one.index}: one page has different names"
    return len(key_of)


@pytest.mark.parametrize("page_size", [16, 64, 128, 512, 1024])
@pytest.mark.parametrize("seed", seeds(2))
def test_pages_of_a_synthetic_trace_are_those_of_its_tokens(page_size: int, seed: int) -> None:
    assert require_same_pages(synthetic_trace(120, seed), page_size) > 50


@pytest.mark.parametrize(
    ("block_tokens", "page_size"), [(512, 16), (512, 64), (512, 512), (512, 1024), (16, 16), (16, 64), (16, 512)]
)
@pytest.mark.parametrize("seed", seeds(4))
def test_pages_of_branching_conversations_are_those_of_their_tokens(
    block_tokens: int, page_size: int, seed: int
) -> None:
    trace = conversations(seed, block_tokens)
    source = TokenSource()
    continued = sum(source.take(one).seen_tokens % block_tokens != 0 for one in trace)
    assert continued > 20, "hardly any turn continued an output"
    require_same_pages(trace, page_size)


def test_a_prompt_and_its_output_are_items() -> None:
    path = PathSource(64).take(request(0, [7, 8, 9], tail=200, output=101))
    # 1024 + 200 tokens of the prompt, and 100 of the output with KV: 3 whole pages of the partial block, 1 more.
    assert items(path) == [(7, 8), (8, 16), (9, 19), (-1, 20)]


def test_the_next_turn_begins_with_the_items_of_the_last_output() -> None:
    source = PathSource(64)
    source.take(request(0, [7, 8, 9], tail=200, output=100))
    path = source.take(request(1, [7, 8, 10], tail=511, output=1))
    # 300 tokens behind block 8 are known: 4 whole pages, of which the first 3 are within block 9.
    assert items(path) == [(7, 8), (8, 16), (9, 19), (-1, 20), (10, 23)]


def test_a_page_of_several_blocks_has_the_id_of_the_last_one() -> None:
    path = PathSource(64).take(TraceRequest(0, 0, 150, 43, tuple(range(10)), 16))
    assert items(path) == [(3, 1), (7, 2), (-1, 3)]


def test_a_shorter_prompt_may_end_within_a_block_of_a_longer_one() -> None:
    trace = [request(0, [1, 2], tail=300), request(1, [1, 2], tail=100, output=0), request(2, [1, 2], tail=0)]
    require_same_pages(trace, 64)
    source = PathSource(64)
    assert [items(source.take(one))[:2] for one in trace] == [[(1, 8), (2, 12)], [(1, 8), (2, 9)], [(1, 8), (2, 16)]]


def test_a_page_size_that_does_not_fit_to_the_blocks_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="page_size 48 does not fit to blocks of 512 tokens"):
        PathSource(48).take(request(0, [1]))


def test_blocks_of_different_sizes_are_rejected() -> None:
    source = PathSource(64)
    source.take(request(0, [1]))
    with pytest.raises(InvalidInput, match="blocks of 512 and of 16 tokens"):
        source.take(TraceRequest(1, 0, 16, 1, (2,), 16))

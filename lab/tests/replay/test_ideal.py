"""The ideal caches, compared with an exhaustive search on tiny traces and with real replays."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hicache_lab.replay.ideal import Uses, ideal_of, lru_hits, optimal_hits, uses_of
from hicache_lab.replay.result import Ideal
from hicache_lab.traces.synthetic import synthetic_trace
from lab.tests.replay.world import job, request, rounds, small_config, started
from tests.seeds import seeds

CAPACITIES = range(1, 6)


def uses(*pages: int, reusable: int | None = None) -> Uses:
    return Uses(np.array(pages, np.int64), len(pages) if reusable is None else reusable)


def tiny_trace(dice: random.Random, *, whole: bool) -> list[Uses]:
    """Return paths of a random tree: 1, 11, 111, 12, 2, ... With `whole`, all pages are reusable; no other request has
    the outputs."""
    requests = []
    for number in range(dice.randint(2, 7)):
        path = [int("".join(digits)) for digits in itertools.accumulate(dice.choice("12") for _ in range(3))]
        path = path[: dice.randint(1, 3)]
        outputs = [1000 + number] * dice.randint(0, 1)
        reusable = len(path) if whole or dice.random() < 0.5 else len(path) - 1
        requests.append(uses(*path, *outputs, reusable=reusable))
    return requests


def parent(page: int) -> int:
    return page // 10 if page < 1000 else 0


def best(requests: Sequence[Uses], pages: int, *, tree: bool) -> int:
    """Return the largest number of hits of any cache, by exhaustive search. In a `tree`, a page is kept only below its
    parent, except outputs. Otherwise any pages are kept, and each of them can be a hit."""

    @cache
    def most(number: int, cached: frozenset[int]) -> int:
        if number == len(requests):
            return 0
        used, reusable = requests[number].pages.tolist(), requests[number].reusable
        found = [page in cached for page in used[:reusable]]
        hits = len(list(itertools.takewhile(bool, found))) if tree else sum(found)
        candidates = cached | set(used)
        choices = map(frozenset, itertools.combinations(candidates, min(pages, len(candidates))))
        return hits + max(
            most(number + 1, kept) for kept in choices
            if not tree or all(parent(page) == 0 or parent(page) in kept for page in kept)
        )

    return most(0, frozenset())


@pytest.mark.parametrize("seed", seeds(8))
def test_the_optimum_equals_a_search_of_all_decisions(seed: int) -> None:
    dice = random.Random(seed)
    for pages in CAPACITIES:
        requests = tiny_trace(dice, whole=True)
        assert sum(optimal_hits(requests, pages)) == best(requests, pages, tree=True), requests


@pytest.mark.parametrize("seed", seeds(8))
def test_the_optimum_bounds_every_tree_if_the_last_page_of_a_prompt_is_always_computed(seed: int) -> None:
    dice = random.Random(seed)
    for pages in CAPACITIES:
        requests = tiny_trace(dice, whole=False)
        bound = sum(optimal_hits(requests, pages))
        assert bound == best(requests, pages, tree=False), requests
        assert sum(lru_hits(requests, pages)) <= best(requests, pages, tree=True) <= bound


def test_an_always_computed_page_need_not_be_kept() -> None:
    """The only difference between the bound and a tree: page 1 is computed again, so the bound keeps only 11 and 2."""
    requests = [uses(1, 11), uses(2), uses(2), uses(1, reusable=0), uses(1, 11)]
    assert sum(optimal_hits(requests, 2)) == 3
    assert best(requests, 2, tree=True) == 2


@pytest.mark.parametrize("seed", seeds(8))
def test_the_lru_evicts_the_oldest_page_and_of_a_prompt_its_tail(seed: int) -> None:
    dice = random.Random(seed)
    for pages in CAPACITIES:
        requests = tiny_trace(dice, whole=False)
        ages: dict[int, tuple[int, int]] = {}
        expected = []
        for number, one in enumerate(requests):
            used = one.pages.tolist()
            expected.append(len(list(itertools.takewhile(ages.__contains__, used[: one.reusable]))))
            ages |= {page: (number, -depth) for depth, page in enumerate(used)}
            ages = dict(sorted(ages.items(), key=lambda item: item[1])[-pages:])
        assert lru_hits(requests, pages) == expected, requests


def test_an_lru_has_no_hits_in_a_cycle_of_which_the_optimum_keeps_a_part() -> None:
    cycle = [uses(page) for page in (1, 2, 3)] * 3
    assert sum(lru_hits(cycle, 2)) == 0
    assert sum(optimal_hits(cycle, 2)) == 4
    assert sum(lru_hits(cycle, 3)) == sum(optimal_hits(cycle, 3)) == 6


def test_without_requests_or_room_there_are_no_hits() -> None:
    assert lru_hits([], 1) == optimal_hits([], None) == []
    assert lru_hits([uses(1)] * 2, 0) == optimal_hits([uses(1)] * 2, 0) == [0, 0]


def test_whole_pages_are_reused_and_the_last_token_of_a_prompt_never(tmp_path: Path) -> None:
    """Requests: a prompt of 16 pages, its repetition, and a next turn that begins with 612 tokens and their output."""
    trace = [request(0, [1, 2]), request(1, [1, 2]), request(2, [3, 4], tail=100, output=200), request(3, [3, 5, 6])]
    found = list(uses_of(job(tmp_path, trace, small_config()), 64, 100_000))
    assert optimal_hits(found, None) == lru_hits(found, None) == [0, 15, 0, (612 + 199) // 64]


@pytest.mark.long
def test_without_a_limit_both_find_all_repeated_pages(tmp_path: Path) -> None:
    one = job(tmp_path, synthetic_trace(100, 5), small_config())
    found = list(uses_of(one, 1, 1 << 30))
    assert lru_hits(found, None) == optimal_hits(found, None)
    # Prompts that are seen as a whole lack their last token, and an output that was continued its last one.
    with started(replace(one, config=small_config(page_size="1", device=1 << 18))) as replay:
        prompts = [replay._source.take(request) for request in one.requests_of_trace()]
    seen = [prompt.seen_tokens for prompt in prompts]
    assert all(0 <= tokens - hits <= 1 for tokens, hits in zip(seen, lru_hits(found, None), strict=True))


def test_requests_that_a_replay_cannot_begin_are_skipped(tmp_path: Path) -> None:
    one = job(tmp_path, [request(0, [1, 2], output=20), request(1, [1], output=20)], small_config())
    assert len(list(uses_of(one, 64, 1043))) == 2
    assert len(list(uses_of(one, 64, 1042))) == 1


def test_processes_are_reported_as_one_cache_with_all_requests(tmp_path: Path) -> None:
    one = job(tmp_path, rounds(3, 2), small_config())
    assert len(list(uses_of(replace(one, processes=2), 64, 4096))) == 6
    assert len(list(uses_of(replace(one, processes=2, whole_trace_each=True), 64, 4096))) == 12


@pytest.mark.parametrize("capacity_pages", [None, 64])
def test_the_result_of_a_replay_has_ideal_caches_of_its_total_size(tmp_path: Path, capacity_pages: int | None) -> None:
    """Eight prompts of 16 pages whose output does not fill a page. L1 has 32 pages, L2 256, storage 64 or no limit."""
    frame_bytes = 3 * 4096
    options = {"storage__options__capacity": str(capacity_pages * frame_bytes)} if capacity_pages else {}
    config = small_config(device=2048, host=16_384, **options)
    with started(job(tmp_path, rounds(8, 2), config, running_max=1, waiting_max=1)) as replay:
        assert ideal_of(replay.job, replay.result()) is None, "it has not ended"
        list(replay.run())
        result = replay.result()
        found = ideal_of(replay.job, result)
    assert result.setup.storage_pages == capacity_pages
    ours = sum(result.tokens.hits.values())
    assert ours > 0
    assert found == Ideal(
        pages=capacity_pages and 352, lru_tokens=8 * 960, optimum_tokens=8 * 960,
        share_of_lru=ours / 7680, share_of_optimum=ours / 7680,
    )


def test_without_storage_the_ideal_has_the_pages_of_l1_and_l2(tmp_path: Path) -> None:
    config = small_config(storage=None, device=2048, host=4096)
    with started(job(tmp_path, rounds(8, 2), config, running_max=1, waiting_max=1)) as replay:
        list(replay.run())
        found = ideal_of(replay.job, replay.result())
    assert found is not None
    assert (found.pages, found.lru_tokens, found.share_of_lru) == (96, 0, None)
    assert found.optimum_tokens > 0

"""Traces that no single policy serves well: they change when they should, and reuse at the intended distances."""

from __future__ import annotations

import statistics

import pytest

from hicache.errors import InvalidInput
from hicache_lab.traces.request import BLOCK_TOKENS
from hicache_lab.traces.stress import PHASE_REQUESTS, alternating_trace, changing_trace
from hicache_lab.traces.synthetic import synthetic_trace
from tests.seeds import seeds


@pytest.mark.parametrize("seed", seeds(2))
def test_the_users_change_once_and_time_goes_on(seed: int) -> None:
    trace = list(changing_trace(800, seed))
    assert [request.index for request in trace] == list(range(800))
    assert [request.timestamp_ms for request in trace] == sorted(request.timestamp_ms for request in trace)
    assert trace[:700] == list(synthetic_trace(700, seed, "conversation"))
    agents = list(synthetic_trace(100, seed, "agents"))
    assert [request.input_length for request in trace[700:]] == [request.input_length for request in agents]
    before, after = ({block for one in part for block in one.hash_ids} for part in (trace[:700], trace[700:]))
    assert not before & after
    assert len(after) == len({block for one in agents for block in one.hash_ids})


def test_a_trace_that_is_too_short_to_change_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="number of requests"):
        list(changing_trace(7, 0))


def distances(cache_tokens: int, seed: int) -> dict[int, list[float]]:
    """Return the reuse distances in an alternating trace, in sizes of the cache, by the parity of the phase."""
    last: dict[int, int] = {}
    prompts = list(alternating_trace(6 * PHASE_REQUESTS, seed, cache_tokens))
    found: dict[int, list[float]] = {0: [], 1: []}
    for index, request in enumerate(prompts):
        first = request.hash_ids[0]
        if (used := last.get(first)) is not None and used // PHASE_REQUESTS == index // PHASE_REQUESTS:
            between = {one.hash_ids[0] for one in prompts[used:index]}
            found[index // PHASE_REQUESTS % 2].append(len(between) * request.input_length / cache_tokens)
        last[first] = index
    return found


@pytest.mark.parametrize("cache_tokens", [24 * BLOCK_TOKENS, 1_000_000])
@pytest.mark.parametrize("seed", seeds(2))
def test_prompts_return_within_the_cache_and_beyond_it_in_turn(cache_tokens: int, seed: int) -> None:
    found = distances(cache_tokens, seed)
    assert len(found[0]) > 1.4 * PHASE_REQUESTS
    assert min(found[0]) > 0.2 and max(found[0]) < 0.8, "LRU misses, or the small queue of S3-FIFO hits"
    assert len(found[1]) > 0.7 * PHASE_REQUESTS
    assert 1.1 < statistics.median(found[1]) < 1.6
    assert sum(distance <= 1 for distance in found[1]) < 0.4 * len(found[1]), "LRU hits too much"


def test_the_popular_prompts_are_the_same_in_all_phases() -> None:
    prompts = [one.hash_ids for one in alternating_trace(4 * PHASE_REQUESTS, 0, 1_000_000)]
    phases = [set(prompts[first : first + PHASE_REQUESTS]) for first in range(0, len(prompts), PHASE_REQUESTS)]
    assert len(phases[1] & phases[3]) == 12
    assert not phases[0] & phases[2]


def test_a_cache_of_less_than_a_block_per_prompt_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="12288 tokens or more"):
        alternating_trace(1, 0, 12_287)

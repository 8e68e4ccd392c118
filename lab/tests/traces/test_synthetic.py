"""Synthetic traces: equal for equal seeds, valid, and with the kinds of reuse of real traces."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hicache.errors import InvalidInput
from hicache_lab.traces.synthetic import SERVICES, synthetic_trace
from hicache_lab.traces.tokens import TokenSource
from hicache_lab.traces.trace import read_trace, write_trace
from tests.seeds import seeds


@pytest.mark.parametrize("seed", seeds(3))
def test_equal_seeds_make_equal_traces_and_different_ones_different_traces(seed: int) -> None:
    assert list(synthetic_trace(200, seed)) == list(synthetic_trace(200, seed))
    assert list(synthetic_trace(200, seed)) != list(synthetic_trace(200, seed + 1))


def test_the_default_trace_of_a_seed_stays_the_same() -> None:
    trace = list(synthetic_trace(1000, 7))
    assert sum(request.input_length for request in trace) == 7_733_522
    assert len({block for request in trace for block in request.hash_ids}) == 4188


def test_a_longer_trace_begins_with_the_shorter_one() -> None:
    assert list(synthetic_trace(300, 0))[:100] == list(synthetic_trace(100, 0))


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("seed", seeds(3))
def test_a_trace_has_the_format_of_the_public_traces(tmp_path: Path, seed: int, service: str) -> None:
    trace = list(synthetic_trace(500, seed, service))
    assert write_trace(tmp_path / "trace.jsonl", trace) == 500
    assert list(read_trace(tmp_path / "trace.jsonl")) == trace
    assert [request.timestamp_ms for request in trace] == sorted(request.timestamp_ms for request in trace)
    longest = max(kind.context_tokens for kind in SERVICES[service].kinds.values())
    assert max(request.input_length for request in trace) < longest
    assert min(request.output_length for request in trace) >= 1


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("seed", seeds(3))
def test_each_block_follows_only_one_other(seed: int, service: str) -> None:
    """An id names a block with everything before it, as in the public traces."""
    before: dict[int, int] = {}
    partial: set[int] = set()
    for request in synthetic_trace(500, seed, service):
        assert len(set(request.hash_ids)) == len(request.hash_ids)
        assert not partial & set(request.hash_ids), "a partial block was continued under its own id"
        for one, following in zip((-1, *request.hash_ids), request.hash_ids, strict=False):
            assert before.setdefault(following, one) == one
        partial.update(request.hash_ids[request.whole_blocks :])


@pytest.mark.parametrize(("service", "requests", "prompt_tokens", "reused"), [
    ("conversation", 3000, (9_000, 15_000), (0.2, 0.4)),  # recorded: 12,035 tokens and 0.38, of 12,031 requests
    ("agents", 1305, (55_000, 140_000), (0.9, 0.97)),  # recorded: 86,655 tokens and 0.94
])
@pytest.mark.parametrize("seed", seeds(2))
def test_a_service_has_the_lengths_and_the_reuse_of_the_recorded_trace(
    service: str, requests: int, prompt_tokens: tuple[int, int], reused: tuple[float, float], seed: int
) -> None:
    trace = list(synthetic_trace(requests, seed, service))
    low, high = prompt_tokens
    assert low < sum(request.input_length for request in trace) / requests < high
    blocks = [block for request in trace for block in request.hash_ids[: request.whole_blocks]]
    low_share, high_share = reused
    assert low_share < 1 - len(set(blocks)) / len(blocks) < high_share


def test_a_prompt_of_a_conversation_can_leave_an_earlier_one_in_the_middle() -> None:
    following: dict[int, set[int]] = {}
    for request in synthetic_trace(2000, 0, "conversation"):
        whole = request.hash_ids[: request.whole_blocks]
        for one, other in itertools.pairwise(whole):
            following.setdefault(one, set()).add(other)
    branches = [block for block, others in following.items() if len(others) > 1]
    assert len(branches) > 20, "no branches but those after the shared first block"


def test_a_synthetic_trace_has_reuse_and_turns_contain_earlier_outputs() -> None:
    source = TokenSource()
    tokens = seen = within_blocks = 0
    for request in synthetic_trace(1000, 0):
        taken = source.take(request)
        tokens += request.input_length
        seen += taken.seen_tokens
        within_blocks += taken.seen_tokens % 512 != 0
    assert 0.5 < seen / tokens < 0.95
    assert within_blocks > 300, "hardly any turn continued an output"


def test_a_limit_below_one_request_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="must be 1 to 1000000000"):
        synthetic_trace(0, 0)


def test_an_unknown_service_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="unknown service 'web'; known: mixed, conversation, agents"):
        synthetic_trace(1, 0, "web")

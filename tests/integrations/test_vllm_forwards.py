"""The prefill speed from the steps of vLLM that also decode: series of steps whose true cost is known."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from hicache.cache.break_even import BreakEven
from hicache.integrations.vllm.forwards import DECODE_SHARE_MAX, OBSERVATIONS_MIN, Forward, ForwardTimes
from tests.seeds import seeds

SPEED = 20_000  # prompt tokens per second
STEPS = 400


def busy_steps(
    chance: random.Random, *, budget: int, weights_s: float, kv_s: float, decoding: int = 128
) -> Iterator[tuple[Forward, float]]:
    """The steps of a node that always decodes, and mostly computes prompts in chunks: each step computes its tokens or
    reads the weights, whichever is longer, and reads the KV of the decoding requests (on average in `kv_s`)."""
    for _ in range(STEPS):
        decoded = chance.randint(decoding * 3 // 4, decoding)
        rest, draw = budget - decoded, chance.random()
        prompt = 0 if draw < 0.3 else rest if draw < 0.8 else chance.randint(64, rest)
        seconds = max(weights_s, (prompt + decoded) / SPEED) + kv_s * chance.uniform(0.85, 1.15)
        yield Forward(prompt, decoded), seconds * chance.uniform(0.98, 1.02)


# Reading the weights and the KV of a decoding step takes up to a sixth of a full step.
NODES = {
    "8B on an H100, long contexts": {"budget": 2048, "weights_s": 5e-3, "kv_s": 10e-3},
    "8B on an H100, large chunks": {"budget": 8192, "weights_s": 5e-3, "kv_s": 30e-3},
    "few long contexts": {"budget": 2048, "weights_s": 1e-6, "kv_s": 16e-3, "decoding": 16},
    "many weights": {"budget": 2048, "weights_s": 16e-3, "kv_s": 0.0},
}


@pytest.mark.parametrize("node", NODES.values(), ids=NODES)
@pytest.mark.parametrize("seed", seeds(5))
def test_a_node_that_always_decodes_measures_its_speed_to_a_tenth(node: dict[str, float], seed: int) -> None:
    samples: list[tuple[int, float]] = []
    break_even, times = BreakEven(), ForwardTimes(lambda *sample: samples.append(sample))
    prompts = 0
    for forward, seconds in busy_steps(random.Random(seed), **node):  # type: ignore[arg-type]
        prompts += forward.prompt_tokens > 0
        if times.is_wanted(forward):
            times.observe(forward, seconds)
    for sample in samples:
        break_even.observe_prefill(*sample)
    assert abs(break_even.rates().prefill_tokens_per_s / SPEED - 1) < 0.1
    assert len(samples) > prompts / 4


@pytest.mark.parametrize("kept_share", [0.0, 1.0])
def test_without_the_correction_the_speed_is_wrong_by_more_than_a_tenth(kept_share: float) -> None:
    """The control: the time of a step that only decodes counts for the prompts, as a whole or not at all."""
    node = NODES["many weights" if kept_share == 0 else "few long contexts"]
    break_even = BreakEven()
    for forward, seconds in busy_steps(random.Random(0), **node):  # type: ignore[arg-type]
        if sum(forward) == node["budget"]:  # long prompts have only full chunks
            break_even.observe_prefill(sum(forward), seconds - (1 - kept_share) * (node["weights_s"] + node["kv_s"]))
    assert abs(break_even.rates().prefill_tokens_per_s / SPEED - 1) > 0.1


@pytest.fixture
def samples() -> list[tuple[int, float]]:
    return []


@pytest.fixture
def times(samples: list[tuple[int, float]]) -> ForwardTimes:
    return ForwardTimes(lambda *sample: samples.append(sample))


MIXED, PURE, DECODE = Forward(1000, 10), Forward(1000, 0), Forward(0, 10)


def test_a_step_without_decoding_is_a_sample_as_it_is(times: ForwardTimes, samples: list[tuple[int, float]]) -> None:
    assert times.is_wanted(PURE)
    times.observe(PURE, 0.5)
    assert samples == [(1000, 0.5)]


def test_a_mixed_step_is_a_sample_once_decoding_was_measured(
    times: ForwardTimes, samples: list[tuple[int, float]]
) -> None:
    for _ in range(OBSERVATIONS_MIN):
        assert times.is_wanted(MIXED)
        times.observe(MIXED, 0.5)
        assert samples == [] and times.is_wanted(DECODE)
        times.observe(DECODE, 0.06)
    times.observe(MIXED, 0.5)
    assert samples == [(1010, 0.47)]


def test_a_step_that_mostly_decodes_is_not_a_sample(times: ForwardTimes, samples: list[tuple[int, float]]) -> None:
    assert not times.is_wanted(Forward(1000, 200))
    for _ in range(OBSERVATIONS_MIN):
        times.observe(DECODE, 0.1)
    times.observe(MIXED, 0.99 * 0.1 / DECODE_SHARE_MAX)
    assert samples == []


def test_only_the_first_decoding_step_after_a_mixed_one_is_measured(times: ForwardTimes) -> None:
    assert not times.is_wanted(DECODE)
    assert times.is_wanted(MIXED)
    assert [times.is_wanted(DECODE) for _ in range(5)] == [True, False, False, False, False]
    assert not times.is_wanted(Forward(0, 0))

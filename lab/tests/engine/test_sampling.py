"""Sampling of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hicache.errors import HiCacheError, InvalidInput
from hicache_lab.engine import EngineOptions, Sampling, greedy
from hicache_lab.engine.sampling import GREEDY, pick


def picked(logits: torch.Tensor, choices: Sequence[tuple[Sampling, int]]) -> list[int]:
    """Return the next token of each row. `choices` has each row's sampling and token position."""
    return [pick(row, best, *choice) for row, best, choice in zip(logits, greedy(logits), choices, strict=True)]


def test_greedy_takes_the_first_of_the_largest_logits() -> None:
    assert greedy(torch.tensor([[0.0, 2.0, 2.0], [-1.0, -3.0, -2.0]])) == [1, 0]


def test_a_draw_depends_only_on_seed_and_position() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    one = [picked(logits, [(Sampling(1.0, seed=7), position)])[0] for position in range(40)]
    batch = picked(logits.expand(40, -1), [(Sampling(1.0, seed=7), position) for position in range(40)])
    other = [picked(logits, [(Sampling(1.0, seed=8), position)])[0] for position in range(40)]
    assert one == batch
    assert one != other
    assert len(set(one)) > 5


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.7, 0.2, 0.1]).log().expand(2000, -1)
    drawn = picked(logits, [(Sampling(1.0), position) for position in range(2000)])
    shares = [drawn.count(token) / 2000 for token in range(3)]
    assert all(math.isclose(share, p, abs_tol=0.05) for share, p in zip(shares, (0.7, 0.2, 0.1), strict=True))


def test_rows_of_one_batch_may_sample_differently() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.9, -9.0]]).expand(30, -1)
    rows = [(Sampling(0.5, top_k=2), position) for position in range(29)]
    tokens = picked(logits, [*rows, (GREEDY, 29)])
    assert set(tokens[:29]) == {1, 2}
    assert tokens[29] == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-46, 1e-40, 1e-8])
def test_a_temperature_near_zero_takes_the_most_likely_token(temperature: float) -> None:
    logits = torch.tensor([[-30.0, 12.5, 90.0, 89.0]])
    assert picked(logits, [(Sampling(temperature), 3)]) == [2]
    assert picked(logits, [(Sampling(temperature, top_k=2), 3)]) == [2]


@pytest.mark.parametrize("temperature", [1e200, 1.7e308])
def test_a_temperature_near_infinity_gives_every_token_the_same_chance(temperature: float) -> None:
    logits = torch.tensor([[-1e30, 0.0, 3e38]]).expand(600, -1)
    drawn = picked(logits, [(Sampling(temperature), position) for position in range(600)])
    assert all(150 < drawn.count(token) < 250 for token in range(3))


@pytest.mark.parametrize(
    ("bad", "sampling", "said"),
    [(math.nan, Sampling(1.0), "not a finite number"), (math.inf, Sampling(1.0), "not a finite number"),
     (math.nan, GREEDY, "position 7")],
)
def test_logits_that_are_not_finite_give_an_error_and_no_token(bad: float, sampling: Sampling, said: str) -> None:
    with pytest.raises(HiCacheError, match=said):
        picked(torch.tensor([[0.0, bad, 1.0]]), [(sampling, 7)])


def test_a_token_with_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]]).expand(200, -1)
    assert set(picked(logits, [(Sampling(1.0), position) for position in range(200)])) == {0, 2}


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0}, {"temperature": math.inf}, {"temperature": math.nan}, {"temperature": 10**400},
        {"temperature": True}, {"temperature": "1"}, {"temperature": None},
        {"top_k": -1}, {"top_k": 1.0}, {"top_k": True}, {"top_k": None},
        {"seed": -1}, {"seed": 1 << 63}, {"seed": 0.5}, {"seed": 10**5000},
    ],
    ids=lambda values: "-".join(f"{name}-{str(value)[:8] if value != 10**5000 else 'huge'}"
                                for name, value in values.items()),
)
def test_invalid_sampling_values_are_rejected(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"sampling: {next(iter(values))}"):
        Sampling(**values)


def test_numbers_of_sampling_and_options_are_kept_as_plain_ints() -> None:
    class Two:
        def __index__(self) -> int:
            return 2

    sampling = Sampling(1.0, top_k=Two(), seed=np.int64(2))  # type: ignore[arg-type]
    assert sampling == Sampling(1.0, top_k=2, seed=2) and {type(sampling.top_k), type(sampling.seed)} == {int}
    assert picked(torch.tensor([[0.0, 5.0, 4.9, -9.0]]), [(sampling, 0)])[0] in (1, 2)
    options = EngineOptions(running_max=Two(), waiting_max=np.int64(2))  # type: ignore[arg-type]
    assert options == EngineOptions(running_max=2, waiting_max=2) and type(options.running_max) is int

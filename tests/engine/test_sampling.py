"""How tokens are picked."""

from __future__ import annotations

import math

import pytest
import torch

from hicache.engine import Sampling, greedy
from hicache.engine.sampling import GREEDY, pick
from hicache.errors import InvalidInput


def test_greedy_takes_the_largest_and_of_equals_the_first() -> None:
    assert greedy(torch.tensor([[0.0, 2.0, 2.0], [-1.0, -3.0, -2.0]])) == [1, 0]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    one = [pick(logits, [(Sampling(1.0, seed=7), position)])[0] for position in range(40)]
    batch = pick(logits.expand(40, -1), [(Sampling(1.0, seed=7), position) for position in range(40)])
    other = [pick(logits, [(Sampling(1.0, seed=8), position)])[0] for position in range(40)]
    assert one == batch
    assert one != other
    assert len(set(one)) > 5


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.7, 0.2, 0.1]).log().expand(2000, -1)
    drawn = pick(logits, [(Sampling(1.0), position) for position in range(2000)])
    shares = [drawn.count(token) / 2000 for token in range(3)]
    assert all(math.isclose(share, p, abs_tol=0.05) for share, p in zip(shares, (0.7, 0.2, 0.1), strict=True))


def test_rows_of_one_batch_may_pick_differently() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.9, -9.0]]).expand(30, -1)
    rows = [(Sampling(0.5, top_k=2), position) for position in range(29)]
    tokens = pick(logits, [*rows, (GREEDY, 29)])
    assert set(tokens[:29]) == {1, 2}
    assert tokens[29] == 1


@pytest.mark.parametrize("values", [(-1.0, 0, 0), (math.inf, 0, 0), (math.nan, 0, 0), (1.0, -1, 0), (1.0, 0, -1)])
def test_impossible_samplings_are_refused(values: tuple[float, int, int]) -> None:
    with pytest.raises(InvalidInput):
        Sampling(*values)

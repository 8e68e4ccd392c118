"""The toy model of the test engine: its tokens depend on every KV element and not on the number of ranks."""

from __future__ import annotations

import random

import pytest

from tests.workers.model import ModelShape, RankModel, next_token, reference_tokens

SHAPE = ModelShape(layers=2, heads=2, dim=2, block=2)
PROMPT = random.Random(1).sample(range(1000), 7)
TABLE = [3, 0, 2, 1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_number_of_ranks_computes_the_same_tokens(ranks: int) -> None:
    models = [RankModel(SHAPE, rank, ranks, 4) for rank in range(ranks)]
    whole = next_token([model.forward(PROMPT, 0, TABLE) for model in models])
    assert [whole] == reference_tokens(SHAPE, PROMPT, 1)


def test_a_cached_prefix_contributes_the_same_part_of_the_logit() -> None:
    at_once, in_steps = (RankModel(SHAPE, 0, 1, 4) for _ in range(2))
    in_steps.forward(PROMPT[:3], 0, TABLE)
    assert in_steps.forward(PROMPT[3:], 3, TABLE) == at_once.forward(PROMPT, 0, TABLE)


def test_each_kv_element_of_the_prefix_changes_the_logit_part_of_its_rank() -> None:
    model = RankModel(SHAPE, 1, 2, 4)
    model.forward(PROMPT[:6], 0, TABLE)
    expected = model.forward(PROMPT[6:], 6, TABLE)
    elements = [(kv.view(-1), index) for kv in model.kv for index in range(kv.numel())]
    changed = 0
    for flat, index in elements:
        before = int(flat[index])
        flat[index] = 0
        changed += before != 0 and model.forward(PROMPT[6:], 6, TABLE) != expected
        flat[index] = before
    written = 7 * 2 * SHAPE.dim * SHAPE.layers  # K and V of one head
    assert changed == written - 2 * SHAPE.dim * SHAPE.layers, "the last token is computed again each time"

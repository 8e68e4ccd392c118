"""Random traffic over three tiers that are too small. Each token and each step is checked."""

from __future__ import annotations

import random

import pytest

from hicache.config import HiCacheConfig
from hicache.errors import ConfigError
from hicache_lab.conformance import memory_store
from hicache_lab.engine import Engine, EngineOptions, FinishReason, RequestRecord, create_engine
from lab.tests.engine.world import (
    assert_nothing_leaked,
    drive,
    make_engine,
    plain_greedy,
    random_checkpoint,
    random_tokens,
    tiers,
)
from tests.seeds import rng, seeds

pytestmark = pytest.mark.long

CHECKPOINT = random_checkpoint()
NEW_TOKENS_MAX = 24


def prompt_family() -> list[list[int]]:
    """Return prompts with common prefixes of several lengths."""
    family = []
    for trunk in range(3):
        tokens = random_tokens(120, seed=trunk)
        for fork in range(4):
            cut = (30, 48, 64, 90)[fork]
            family.append([*tokens[:cut], *random_tokens(8 * fork + 3, seed=100 + 10 * trunk + fork)])
    return family


PROMPTS = prompt_family()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the greedy tokens of every prompt."""
    return [list(plain_greedy(prompt, NEW_TOKENS_MAX)) for prompt in PROMPTS]


def random_engine(random: random.Random) -> Engine:
    page_size = random.choice([1, 4, 8, 16])
    pages = 200 // page_size  # the longest request takes 141 tokens
    return make_engine(
        CHECKPOINT,
        page_size=page_size,
        device_pages=random.randint(pages, 2 * pages),
        host_pages=random.randint(pages // 2, 2 * pages),
        backend=memory_store if random.random() < 0.8 else None,
        options=EngineOptions(running_max=random.randint(1, 6), prefill_tokens_max=random.choice([5, 32, 500])),
    )


@pytest.mark.parametrize("seed", seeds(6))
def test_every_request_gets_its_tokens_under_random_traffic(seed: int, expected: list[list[int]]) -> None:
    random = rng(seed)
    asked: dict[str, tuple[int, int]] = {}
    records: dict[str, RequestRecord] = {}
    with random_engine(random) as engine:
        for _ in range(150):
            if random.random() < 0.35:
                number, new_tokens = random.randrange(len(PROMPTS)), random.randint(1, NEW_TOKENS_MAX)
                salt = random.choice([None, None, None, "a"])
                rid = engine.submit(PROMPTS[number], new_tokens, cache_salt=salt, ignore_eos=True)
                asked[rid] = (number, new_tokens)
            if asked and random.random() < 0.05:
                engine.abort(random.choice(list(asked)))
            for update in engine.step():
                if update.record is not None:
                    records[update.rid] = update.record
            engine.check()
        records |= drive(engine)
        assert records.keys() == asked.keys()
        for rid, record in records.items():
            number, new_tokens = asked[rid]
            assert record.reason in (FinishReason.LENGTH, FinishReason.ABORTED)
            count = new_tokens if record.reason is FinishReason.LENGTH else len(record.output_tokens)
            assert list(record.output_tokens) == expected[number][:count], rid
        assert sum(engine.statistics().hit_tokens.values()) > 0
        assert_nothing_leaked(engine)


def test_an_engine_is_built_from_a_configuration() -> None:
    config = HiCacheConfig.model_validate(
        {"page_size": 16, "device": {"tokens": 512}, "host": {"ratio": 2}, "storage": {"type": "memory"}}
    )
    with create_engine(config, CHECKPOINT) as engine:
        assert (engine.cache.device.pages, tiers(engine).host.pages) == (32, 64)
        rid = engine.submit(PROMPTS[0], 4, ignore_eos=True)
        record = engine.run_until_done()[rid]
        assert record.reason is FinishReason.LENGTH
        engine.check()


def test_a_configuration_without_a_size_for_l1_is_rejected() -> None:
    with pytest.raises(ConfigError, match="device"):
        create_engine(HiCacheConfig(), CHECKPOINT)

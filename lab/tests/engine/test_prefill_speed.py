"""The engine reports its prefill rate to the cache, and excludes times that would distort it."""

from __future__ import annotations

from hicache.cache.break_even import OBSERVATIONS_MIN, PREFILL_TOKENS_MIN
from hicache_lab.engine import Engine
from lab.tests.engine.world import generate, make_engine, random_checkpoint, random_tokens, settle, tiers

CHECKPOINT = random_checkpoint()
PREFIX, TAIL = 80, PREFILL_TOKENS_MIN + 16


def prefill_speed(engine: Engine) -> int:
    return tiers(engine).break_even.rates().prefill_tokens_per_s


def test_only_prefills_that_did_not_wait_for_a_load_are_measured() -> None:
    with make_engine(CHECKPOINT) as engine:
        for seed in range(OBSERVATIONS_MIN - 1):
            generate(engine, random_tokens(PREFIX, seed=seed))
        prefix = random_tokens(PREFIX, seed=0)
        for seed in range(10, 10 + OBSERVATIONS_MIN):
            settle(engine)
            engine.cache.evict(engine.cache.device.pages)
            record = generate(engine, [*prefix, *random_tokens(TAIL, seed=seed)])
            assert record.host_hit_tokens > 0
        assert prefill_speed(engine) == 0
        generate(engine, random_tokens(PREFIX, seed=99))
        assert prefill_speed(engine) > 0


def test_decoding_is_not_counted_as_prefill() -> None:
    with make_engine(CHECKPOINT) as engine:
        generate(engine, random_tokens(PREFIX, seed=1), new_tokens=2 * OBSERVATIONS_MIN)
        assert prefill_speed(engine) == 0

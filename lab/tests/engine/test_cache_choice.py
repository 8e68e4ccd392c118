"""One engine with three caches and all schedules: equal tokens, but different amounts of computation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import get_args

import pytest

from hicache.cache import ChunkCache, SessionCache
from hicache.config import HiCacheConfig
from hicache.errors import ConfigError, InvalidInput, SessionBusy, UnknownSession
from hicache_lab.conformance import memory_store
from hicache_lab.engine import Engine, EngineOptions, RequestRecord, create_engine
from hicache_lab.engine.schedule import Policy, Schedule
from lab.tests.engine.world import (
    assert_nothing_leaked,
    drive,
    generate,
    make_engine,
    random_checkpoint,
    random_tokens,
)
from tests.seeds import rng, seeds

pytestmark = pytest.mark.long

CHECKPOINT = random_checkpoint()
PROMPTS = [[*random_tokens(length, seed=1), *random_tokens(5, seed=length)] for length in (3, 20, 41, 60, 60)]


def off_engine(page_size: int = 8, pages: int = 64, options: EngineOptions | None = None) -> Engine:
    """Return an engine with `prefix_cache: false`."""
    config = HiCacheConfig.model_validate(
        {"page_size": page_size, "device": {"tokens": page_size * pages}, "prefix_cache": False}
    )
    return create_engine(config, CHECKPOINT, options=options)


def test_an_engine_without_drafts_rejects_bigram_keys() -> None:
    with pytest.raises(ConfigError, match="bigram_keys"):
        create_engine(HiCacheConfig(bigram_keys=True), CHECKPOINT)


def serve(engine: Engine, prompts: Sequence[list[int]], new_tokens: int = 10) -> list[RequestRecord]:
    rids = [engine.submit(prompt, new_tokens, ignore_eos=True) for prompt in prompts]
    records = drive(engine)
    return [records[rid] for rid in rids]


# The cache off


@pytest.mark.parametrize("budget", [7, 500])
def test_an_engine_without_a_cache_gives_the_tokens_of_one_with_a_cache(budget: int) -> None:
    options = EngineOptions(prefill_tokens_max=budget, running_max=3)
    with make_engine(CHECKPOINT, options=options) as tiered, off_engine(options=options) as off:
        assert isinstance(off.cache, ChunkCache)
        for _ in range(2):
            expected, got = serve(tiered, PROMPTS), serve(off, PROMPTS)
            assert [record.output_tokens for record in got] == [record.output_tokens for record in expected]
        assert sum(record.hit_tokens for record in expected) > 0 == sum(record.hit_tokens for record in got)
        assert off.cache.device.allocator.used_pages == 0


def test_an_engine_without_a_cache_preempts_and_aborts() -> None:
    with make_engine(CHECKPOINT) as plain, off_engine(pages=14) as engine:
        expected = [generate(plain, prompt, 40).output_tokens for prompt in PROMPTS[:3]]
        rids = [engine.submit(prompt, 40, ignore_eos=True) for prompt in (*PROMPTS[:3], PROMPTS[3])]
        assert engine.abort(rids.pop())
        records = drive(engine)
        assert [records[rid].output_tokens for rid in rids] == expected
        assert engine.statistics().preemptions > 0 and engine.cache.device.allocator.used_pages == 0


# Sessions


def session_engine(page_size: int = 8, device_pages: int = 64, options: EngineOptions | None = None) -> Engine:
    return make_engine(CHECKPOINT, page_size=page_size, device_pages=device_pages, options=options, kind=SessionCache)


def sessions(engine: Engine) -> SessionCache:
    assert isinstance(engine.cache, SessionCache)
    return engine.cache


@pytest.mark.parametrize("page_size", [1, 16])
def test_each_turn_computes_its_new_tokens_only(page_size: int) -> None:
    """The last token of an answer has no KV, so it is computed with the next turn."""
    with session_engine(page_size, device_pages=512 // page_size) as engine, make_engine(CHECKPOINT) as plain:
        sessions(engine).open_session("s")
        said: list[int] = []
        for turn in range(5):
            question = random_tokens(11, seed=turn)
            rid = engine.submit([*said, *question], 6, ignore_eos=True, session_id="s")
            record = drive(engine)[rid]
            assert record.output_tokens == generate(plain, [*said, *question], 6).output_tokens
            assert record.computed_tokens == len(question) + (1 if said else 0)
            said = [*said, *question, *record.output_tokens]
        sessions(engine).close_session("s")
        assert_nothing_leaked(engine)


def test_a_turn_of_an_unknown_session_is_rejected() -> None:
    with session_engine() as engine, make_engine(CHECKPOINT) as plain:
        sessions(engine).open_session("s")
        with pytest.raises(UnknownSession):
            engine.submit(PROMPTS[0], 4, session_id="t")
        engine.submit(PROMPTS[0], 4, session_id="s")
        with pytest.raises(SessionBusy):
            engine.submit(PROMPTS[0], 4, session_id="s")
        with pytest.raises(InvalidInput, match="SessionCache"):
            plain.submit(PROMPTS[0], 4, session_id="s")
        assert (engine.waiting, plain.waiting) == (1, 0)
        drive(engine)


@pytest.mark.parametrize("seed", seeds(2))
def test_random_conversations_get_equal_tokens_with_every_cache_and_schedule(seed: int) -> None:
    numbers = rng(seed)
    options = EngineOptions(
        running_max=3, prefill_tokens_max=numbers.choice([5, 32, 500]),
        schedule=Schedule(policy=numbers.choice(get_args(Policy)), defer_tokens=8),
    )
    page_size = numbers.choice([1, 4, 8, 16])
    device_pages = numbers.randint(200, 300) // page_size
    with (
        make_engine(
            CHECKPOINT, page_size=page_size, device_pages=device_pages, host_pages=device_pages,
            backend=memory_store, options=options, kind=SessionCache,
        ) as engine,
        off_engine() as off,
    ):
        for number in range(3):
            sessions(engine).open_session(f"s{number}")
        said: dict[str, list[int]] = {}
        for _ in range(6):
            wave = _wave(numbers, said)
            rids = {
                name: engine.submit(prompt, new, ignore_eos=True, session_id=None if name == "none" else name)
                for name, (prompt, new) in wave.items()
            }
            records = drive(engine)
            for name, (prompt, new) in wave.items():
                output = records[rids[name]].output_tokens
                assert output == generate(off, prompt, new).output_tokens, name
                said[name] = [*prompt, *output]
        assert sessions(engine).session_statistics().continued_turns > 0
        sessions(engine).drop_all()
        assert_nothing_leaked(engine)


def _wave(numbers: random.Random, said: dict[str, list[int]]) -> dict[str, tuple[list[int], int]]:
    """Return the next prompts of some conversations. Sometimes a conversation starts again or drops its last tokens."""
    wave = {}
    for name in numbers.sample(["s0", "s1", "s2", "none"], 3):
        past = said.get(name, [])
        past = past[: -numbers.randint(1, 9)] if numbers.random() < 0.2 else past
        past = past if len(past) < 120 else []
        question = random_tokens(numbers.randint(1, 20), seed=numbers.randrange(3))
        wave[name] = ([*past, *question], numbers.randint(1, 12))
    return wave


# The order of the queue


@pytest.mark.parametrize(("policy", "order"), [
    ("fcfs", [0, 1, 2, 3]),
    ("longest_prefix", [1, 2, 3, 0]),
    ("depth_first_weight", [2, 1, 3, 0]),  # two wait for the second prefix; once 2 has begun, one for each
    ("longest_output_first", [0, 3, 2, 1]),
])
def test_the_order_is_as_asked_for(policy: Policy, order: list[int]) -> None:
    short = random_tokens(30, seed=9)
    prompts = [random_tokens(20, seed=7), PROMPTS[4], *([*short, *random_tokens(9, seed=end)] for end in (8, 9))]
    config = HiCacheConfig.model_validate({"page_size": 8, "device": {"tokens": 512}})
    options = EngineOptions(running_max=1, schedule=Schedule(policy=policy, defer_tokens=8))
    with create_engine(config, CHECKPOINT, options=options) as engine:
        generate(engine, PROMPTS[3])
        generate(engine, short)
        rids = [engine.submit(prompt, new, ignore_eos=True) for prompt, new in zip(prompts, (9, 2, 3, 4), strict=True)]
        # With one running at a time, they end in the order in which they begin.
        assert [rids.index(rid) for rid in drive(engine)] == order


@pytest.mark.parametrize(("schedule", "computed"), [("longest_prefix", 72 + 3 * 8), ("fcfs", 4 * 72)])
def test_a_new_prefix_that_arrives_four_times_is_computed_once(
    schedule: Policy, computed: int
) -> None:
    """The negative control: first come, first served computes the prefix four times in one step."""
    prompts = [[*random_tokens(64, seed=1), *random_tokens(8, seed=number)] for number in (2, 3, 4, 5)]
    options = EngineOptions(schedule=Schedule(policy=schedule, defer_tokens=8, age_max=1000.0))
    with make_engine(CHECKPOINT, options=options) as engine, off_engine() as off:
        records = serve(engine, prompts)
        assert sum(record.computed_tokens for record in records) == computed
        expected = [record.output_tokens for record in serve(off, prompts)]
        assert [record.output_tokens for record in records] == expected
        assert_nothing_leaked(engine)


def test_requests_wait_for_a_shared_prefix_that_takes_several_steps() -> None:
    prompts = [[*random_tokens(64, seed=1), *random_tokens(8, seed=number)] for number in (2, 3)]
    options = EngineOptions(
        prefill_tokens_max=24, schedule=Schedule(policy="longest_prefix", defer_tokens=8, age_max=1000.0),
    )
    with make_engine(CHECKPOINT, options=options) as engine:
        first, second = serve(engine, prompts)
        assert (first.computed_tokens, second.computed_tokens) == (72, 8)

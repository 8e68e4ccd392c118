"""The load that a plan assumes: its hits are those of a replay in virtual time whose requests do not wait."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.cache import HiRadixCache
from hicache.cache.break_even import UNKNOWN, BreakEven, Rates
from hicache.cli.model_shapes import ModelShape
from hicache_lab.plan import Plan
from hicache_lab.replay.result import ReplayResult
from hicache_lab.replay.virtual.engines import VirtualEngines
from hicache_lab.speeds import ComputeSpeed, Speeds, StorageSpeed
from hicache_lab.traces.request import TraceRequest
from lab.tests.plan.world import plan_of
from lab.tests.replay.world import job, rounds, small_config

pytestmark = pytest.mark.long

TOKENS_PER_S = 16_000
TOKEN_BYTES = 128  # of the model `tiny`; a frame of 64 tokens has 4,096 more
FRAME_SHARE = (64 * TOKEN_BYTES + 4096) / (64 * TOKEN_BYTES)
COMPUTED_BYTES_PER_S = TOKENS_PER_S * TOKEN_BYTES
HOST_BYTES_PER_S = 1_000_000_000
# In pages: L1 and L2 hold nothing of one round until the next.
DEVICE, HOST = 64, 128


def arriving(interval_ms: int) -> list[TraceRequest]:
    """Return three rounds of thirty prompts of 2,048 tokens. Computing one takes 128 ms."""
    trace = rounds(30, 3, blocks=4, output=2)
    return [replace(one, timestamp_ms=interval_ms * number) for number, one in enumerate(trace)]


def planned(trace: list[TraceRequest], read_bytes_per_s: float) -> Plan:
    """Return the plan of a trace. The store reads so many bytes of KV per second."""
    return plan_of(
        trace, 0, 0, None, model=ModelShape("tiny", TOKEN_BYTES), speeds=speeds(read_bytes_per_s),
        device_bytes=DEVICE * 64 * TOKEN_BYTES, host_bytes=HOST * 64 * TOKEN_BYTES,
    )


def speeds(read_bytes_per_s: float) -> Speeds:
    store = StorageSpeed(read_bytes_per_s=read_bytes_per_s, write_bytes_per_s=1e9)
    return Speeds(compute=ComputeSpeed(tokens_per_s=TOKENS_PER_S), host_bytes_per_s=HOST_BYTES_PER_S, storage=store)


def replayed(
    folder: Path, trace: list[TraceRequest], read_bytes_per_s: float, given: Rates = UNKNOWN
) -> tuple[ReplayResult, Rates]:
    """Replay a trace in virtual time. Return the result and the speeds by which the cache decides at the end. A speed
    in `given` is not measured."""
    frames = speeds(read_bytes_per_s * FRAME_SHARE)
    entries = {"break_even__mode": "measure", "break_even__writes": "always"}
    config = small_config(device=64 * DEVICE, host=64 * HOST, storage__options__capacity="1GiB", **entries)
    one = job(folder, trace, config, speeds=frames, virtual=True, speed_up=1.0)
    with closing(VirtualEngines(one)) as engines:
        if given is not UNKNOWN:
            (replay,) = engines._replays
            assert isinstance(replay.cache, HiRadixCache)
            # In place, because each part of the cache has a reference.
            BreakEven.__init__(replay.cache.break_even, config.break_even, 64 * TOKEN_BYTES, given=given)
        for _ in engines.run():
            pass
        (rates,) = [replay.cache.statistics().break_even.rates for replay in engines._replays]
        return engines.result(), rates


def planned_rates(read_bytes_per_s: float) -> Rates:
    """Return the speeds of the plan. A cache that has all of them never probes."""
    return Rates(
        prefill_tokens_per_s=TOKENS_PER_S, host_bytes_per_s=HOST_BYTES_PER_S, storage_bytes_per_s=int(read_bytes_per_s)
    )


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_plan_has_the_hits_of_requests_that_do_not_wait(tmp_path: Path, factor: float) -> None:
    trace, reads = arriving(interval_ms=1000), factor * COMPUTED_BYTES_PER_S
    result, _ = replayed(tmp_path, trace, reads, planned_rates(reads))
    plan = planned(trace, reads)
    assert plan.tiers["storage"].found_tokens == 60 * 1984
    assert {tier: use.hit_tokens for tier, use in plan.tiers.items()} == result.tokens.hits
    assert result.tokens.hits["storage"] == (60 * 1984 if factor > 1 else 0)


def test_requests_that_wait_fetch_more_than_a_plan_has_and_at_most_what_it_finds(tmp_path: Path) -> None:
    trace, reads = arriving(interval_ms=100), 0.5 * COMPUTED_BYTES_PER_S
    result, _ = replayed(tmp_path, trace, reads, planned_rates(reads))
    use = planned(trace, reads).tiers["storage"]
    assert use.hit_tokens == 0 and 0.1 * use.found_tokens < result.tokens.hits["storage"] <= use.found_tokens


@pytest.mark.parametrize("interval_ms", [1000, 100, 10])
def test_the_cache_measures_the_store_of_the_plan_by_one_read_and_by_several_at_once(
    tmp_path: Path, interval_ms: int
) -> None:
    reads = 0.5 * COMPUTED_BYTES_PER_S
    _, rates = replayed(tmp_path, arriving(interval_ms), reads)
    read_bytes = 1984 * TOKEN_BYTES
    read_s = 1 / rates.storage_operations_per_s + read_bytes / rates.storage_bytes_per_s
    assert read_s == pytest.approx(read_bytes / reads, rel=0.05)

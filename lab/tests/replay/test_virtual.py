"""Replays in virtual time: the order of events, the time that each operation takes, and agreement with real replays."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hicache.config import HiCacheConfig, HostConfig, load_config
from hicache.config.ready import ready_files
from hicache.errors import CapacityError, ConfigError, InvariantError
from hicache_lab.replay.job import ReplayJob
from hicache_lab.replay.processes import start_engines
from hicache_lab.replay.result import ReplayResult
from hicache_lab.replay.virtual.clock import VirtualClock
from hicache_lab.replay.virtual.engines import VirtualEngines
from hicache_lab.replay.virtual.machine import VirtualWorkers
from hicache_lab.speeds import ComputeSpeed, Speeds, StorageSpeed
from hicache_lab.traces.synthetic import synthetic_trace
from lab.tests.replay.world import job, request, rounds, small_config

pytestmark = pytest.mark.long

ONE_AT_A_TIME = {"running_max": 1, "waiting_max": 1}
# Of a page of 64 tokens of the model `tiny`, and of its frame.
PAGE_BYTES, FRAME_BYTES = 64 * 128, 64 * 128 + 4096


def run(one: ReplayJob) -> ReplayResult:
    with closing(start_engines(replace(one, virtual=True))) as engines:
        for _ in engines.run():
            pass
        return engines.result()


# The clock


def test_tasks_go_on_in_the_order_of_their_times() -> None:
    clock, seen = VirtualClock(), list[tuple[str, float]]()
    began_s = clock()

    def task(name: str, *pauses: float) -> Callable[[], None]:
        def body() -> None:
            for pause in pauses:
                clock.sleep(pause)
                seen.append((name, clock() - began_s))

        return body

    clock.start(task("a", 3, 1))
    clock.start(task("b", 1, 2))
    clock.sleep(10)
    # At the same time the task goes on that was scheduled first.
    assert seen == [("b", 1), ("a", 3), ("b", 3), ("a", 4)]
    assert clock() == began_s + 10


def test_a_task_that_waits_for_a_condition_sees_what_others_have_done() -> None:
    clock, done = VirtualClock(), threading.Condition()
    numbers: list[int] = []

    def producer() -> None:
        for number in range(3):
            clock.sleep(1)
            with done:
                numbers.append(number)

    clock.start(producer)
    began_s = clock()
    with done:
        assert clock.wait_for(done, lambda: len(numbers) == 2, began_s + 10)
        assert clock() - began_s == 2
        assert not clock.wait_for(done, lambda: len(numbers) == 9, began_s + 10)
    assert clock() - began_s == 10


def test_a_task_that_waits_for_another_waiting_task_goes_on_at_the_same_time() -> None:
    clock, first, second = VirtualClock(), threading.Event(), threading.Event()

    def relay() -> None:
        assert clock.wait_set(first, 100)
        second.set()

    def begin() -> None:
        clock.sleep(1)
        first.set()

    began_s = clock()
    clock.start(relay)
    clock.start(begin)
    assert clock.wait_set(second, 100)
    assert clock() - began_s == 1


def test_an_error_of_a_task_is_raised_where_its_creator_waits() -> None:
    clock = VirtualClock()

    def broken() -> None:
        raise ValueError("broken")

    clock.start(broken)
    with pytest.raises(ValueError, match="broken"):
        clock.sleep(1)


def test_a_clock_without_any_event_says_so_instead_of_hanging() -> None:
    with pytest.raises(InvariantError, match="nothing will happen"):
        VirtualClock().wait_set(threading.Event(), float("inf"))


def test_a_pool_runs_as_many_jobs_at_once_as_it_has_workers() -> None:
    clock, ended = VirtualClock(), list[tuple[int, float]]()
    began_s = clock()
    pool = VirtualWorkers[int](
        "pool", 2, handle=lambda job, beat: clock.sleep(1),
        acknowledge=lambda job: ended.append((job, clock() - began_s)), clock=clock,
    )
    for number in range(5):
        pool.submit(number)
    assert pool.withdraw(4) and not pool.withdraw(9)
    clock.sleep(5)
    assert ended == [(0, 1), (1, 1), (2, 2), (3, 2)]


# Times


def fast(tokens_per_s: float = 1000.0, **speeds: float) -> Speeds:
    """Return speeds at which only computing takes a time worth mentioning."""
    store = StorageSpeed(read_bytes_per_s=1e15, write_bytes_per_s=1e15)
    return replace(Speeds(compute=ComputeSpeed(tokens_per_s=tokens_per_s), host_bytes_per_s=1e15, host_fixed_s=0.0,
                          storage=store), **speeds)  # type: ignore[arg-type]


def first_tokens_s(result: ReplayResult) -> float:
    return result.first_token.total_us / 1e6


def test_a_prompt_takes_the_time_of_its_tokens_and_of_its_attention(tmp_path: Path) -> None:
    config = small_config(storage=None)
    one = job(tmp_path, [request(0, [1, 2])], config, speeds=fast(), **ONE_AT_A_TIME)
    assert first_tokens_s(run(one)) == pytest.approx(1.024)
    pairs = 1024 * 1025 / 2
    attends = replace(fast(), compute=ComputeSpeed(tokens_per_s=1000, pairs_per_s=pairs))
    assert first_tokens_s(run(replace(one, speeds=attends))) == pytest.approx(2.024)
    # In chunks it is the same, as each one attends to those before it.
    assert first_tokens_s(run(replace(one, speeds=attends, prefill_tokens_max=256))) == pytest.approx(2.024)


def test_each_output_token_takes_a_decode_step(tmp_path: Path) -> None:
    trace = [request(0, [1], output=11)]
    one = job(tmp_path, trace, small_config(storage=None), speeds=fast(), decode_step_s=0.5, **ONE_AT_A_TIME)
    assert run(one).elapsed_s == pytest.approx(0.512 + 10 * 0.5)


def test_a_hit_of_l2_overlaps_with_the_layers_that_compute(tmp_path: Path) -> None:
    """The second prompt loads 15 pages and computes one."""
    config = small_config(storage=None, device=1024)
    trace = [request(0, [1, 2], output=1), request(1, [3, 4], output=1), request(2, [1, 2], output=1)]
    slow = replace(fast(), host_bytes_per_s=PAGE_BYTES / 0.1)
    result = run(job(tmp_path, trace, config, speeds=slow, **ONE_AT_A_TIME))
    assert result.tokens.hits == {"device": 0, "host": 960, "storage": 0}
    # The load takes 1.5 s; the last of 4 layers computes after it. The first two prompts are computed, and the load
    # waits for the copies of neither: the other direction is another link. The write-back of evicted pages can delay
    # the second request: its own pages must leave L1 first.
    load_s, layers = 15 * 0.1, 4
    third_s = load_s + 0.064 / layers
    assert first_tokens_s(result) - 2 * 1.024 >= third_s
    free = run(job(tmp_path, trace, config, speeds=fast(), **ONE_AT_A_TIME))
    assert first_tokens_s(free) == pytest.approx(2 * 1.024 + 0.064, abs=1e-3)


def test_the_default_policy_costs_no_hits_in_a_burst_of_requests_that_wait_for_the_device(tmp_path: Path) -> None:
    """Forty stored prompts arrive at once; their lookups wait for one worker for longer than the timeout."""
    prompts, gap_ms = 40, 1000
    trace = [request(i, [2 * i, 2 * i + 1], output=10, at_ms=gap_ms * i) for i in range(prompts)]
    trace += [replace(one, index=prompts + i, timestamp_ms=gap_ms * prompts) for i, one in enumerate(trace)]
    store = StorageSpeed(read_bytes_per_s=1e15, write_bytes_per_s=1e15, fixed_s=0.05, parallel=16)
    speeds = replace(fast(40_000), storage=store)
    hits = {}
    for policy in ("timeout", "wait_complete"):
        config = small_config(device=4096, host=12288, prefetch__policy=policy, prefetch__timeout_base="1s")
        one = job(tmp_path, trace, config, speeds=speeds, speed_up=1.0, running_max=2, waiting_max=100)
        result = run(replace(one, decode_step_s=0.01))
        hits[policy] = result.tokens.hits
        assert not result.skipped.get("prefetch_timeout") and not result.skipped.get("prefetch_unanswered")
    assert hits["timeout"] == hits["wait_complete"] and hits["timeout"]["storage"] > 0


def test_a_read_takes_the_fixed_time_of_each_round_and_its_bytes(tmp_path: Path) -> None:
    """Each prompt comes ten seconds after the one before; the last one is the first again, which only storage has."""
    config = small_config(device=2048, host=2048)
    trace = [request(i, [2 * (i % 5), 2 * (i % 5) + 1], output=1, at_ms=10_000 * i) for i in range(6)]
    times = {}
    for name, store in {
        "fast": StorageSpeed(read_bytes_per_s=1e15, write_bytes_per_s=1e15),
        "slow": StorageSpeed(read_bytes_per_s=FRAME_BYTES / 0.1, write_bytes_per_s=1e15),
        "far": StorageSpeed(read_bytes_per_s=1e15, write_bytes_per_s=1e15, fixed_s=0.25, parallel=4),
    }.items():
        one = job(tmp_path, trace, config, speeds=replace(fast(1e9), storage=store), speed_up=1.0, **ONE_AT_A_TIME)
        result = run(one)
        assert result.tokens.hits == {"device": 0, "host": 0, "storage": 960}
        times[name] = first_tokens_s(result)
    assert times["slow"] - times["fast"] == pytest.approx(15 * 0.1, abs=0.02)
    # Six lookups. A store that has not read a sound page yet reads four pages before the others: 4 and 11 pages.
    assert times["far"] - times["fast"] == pytest.approx((6 + 1 + 3) * 0.25, abs=0.02)


def test_engines_share_the_store_and_its_bandwidth(tmp_path: Path) -> None:
    one = job(tmp_path, rounds(9, 4), small_config(device=2048, host=4096), speeds=fast(20_000.0), **ONE_AT_A_TIME)
    alone, both = run(one), run(replace(one, processes=2))
    assert both.requests.ended == alone.requests.ended == 36
    assert both.tokens.hits["storage"] > 0, "an engine read what the other one had stored"
    assert both.elapsed_s < alone.elapsed_s


# Agreement, and equal reports


@pytest.mark.parametrize("storage", [None, "memory"])
def test_a_virtual_replay_finds_what_a_real_one_finds(tmp_path: Path, storage: str | None) -> None:
    trace = [replace(one, output_length=one.output_length % 16)
             for one in synthetic_trace(60, seed=7) if one.input_length < 15_000]
    config = small_config(storage=storage, device=16_384, host=32_768)
    one = job(tmp_path, trace, config, speeds=Speeds(compute=ComputeSpeed(tokens_per_s=400_000)), **ONE_AT_A_TIME)
    virtual = run(one)
    with closing(start_engines(one)) as engines:
        for _ in engines.run():
            pass
        real = engines.result()
    assert real.wrong_bytes == 0 and real.requests.ended == virtual.requests.ended == len(trace)
    assert virtual.tokens.prompt == real.tokens.prompt
    assert sum(virtual.tokens.hits.values()) > 0.2 * virtual.tokens.prompt
    for tier, tokens in real.tokens.hits.items():
        assert abs(virtual.tokens.hits[tier] - tokens) <= 0.02 * real.tokens.prompt, (tier, virtual.tokens, real.tokens)


def test_equal_arguments_make_equal_reports_in_any_process(tmp_path: Path) -> None:
    digests = set()
    for seed in ("1", "2"):
        report = tmp_path / f"{seed}.json"
        subprocess.run(
            [sys.executable, "-m", "hicache", "replay", "--virtual", "--requests", "60", "--processes", "3",
             "--device-tokens", "20000", "--host-tokens", "30000", "--set", "storage.options.capacity=8MiB",
             "--json", str(report)],
            check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed},
        )
        digests.add(hashlib.sha256(report.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_virtual_replay_starts_no_thread_and_moves_no_byte(tmp_path: Path) -> None:
    """Tiers of 20 TiB, which this machine does not have."""
    config = small_config(storage="memory", device=64 << 20, host=96 << 20)
    one = job(tmp_path, rounds(3, 3), config, speeds=fast(), preset="llama-3.1-8b", **ONE_AT_A_TIME)
    before = threading.active_count()
    engines = VirtualEngines(replace(one, virtual=True))
    for _ in engines.run():
        assert threading.active_count() == before
    result = engines.result()
    assert result.requests.ended == 9 and result.tokens.hits["device"] == 6 * 960
    assert result.checked_bytes == 0 and result.scheduler is None
    assert result.setup.host_pages * result.setup.host_page_bytes > 12 << 40


@pytest.mark.parametrize("storage", ["memory", "redis"])
def test_a_table_never_exceeds_its_capacity_and_evicts_as_its_type_does(tmp_path: Path, storage: str) -> None:
    capacity = 40 * FRAME_BYTES
    entries = {"storage.options.capacity": str(capacity)}
    if storage == "redis":
        entries = {"storage.options.capacity": "1MiB", "storage.options.url": "redis://localhost"}
    config = small_config(storage=storage, device=2048, host=2048, **entries)
    result = run(job(tmp_path, rounds(12, 3), config, speeds=fast(20_000.0), **ONE_AT_A_TIME))
    limit = capacity if storage == "memory" else 1 << 20
    assert max(sample.storage_bytes for sample in result.samples) <= limit
    assert result.evicted_pages["storage"] > 0


def test_what_cannot_run_without_bytes_is_refused_with_the_change_to_make(tmp_path: Path) -> None:
    def refused(config: HiCacheConfig) -> str:
        with pytest.raises((ConfigError, CapacityError)) as raised:
            VirtualEngines(job(tmp_path, rounds(1, 1), config, virtual=True))
        return str(raised.value)

    checked = small_config(integrity__verify="load")
    assert "remove them" in refused(checked)
    assert "use one store" in refused(load_config(ready_files()["file-over-shared-files"], environ={}))
    assert "host.size: this machine is not the one that serves; write a size" in refused(
        HiCacheConfig(page_size=checked.page_size, device=checked.device, host=HostConfig(size="50%"))
    )
    assert "lower host.size" in refused(small_config(host=1 << 40))  # 192 TiB of frames: more than an address has bits


def test_arrivals_at_any_millisecond_are_reached_exactly(tmp_path: Path) -> None:
    """Sums and differences of such times have rounding errors. A clock that stops one error before an arrival would
    wait for ever, and so would this test."""
    times = [0, *random.Random(7).sample(range(1, 100_000), 60)]
    trace = [request(i, [i], output=1, at_ms=at_ms) for i, at_ms in enumerate(sorted(times))]
    one = job(tmp_path, trace, small_config(storage=None), speeds=fast(), speed_up=1.7)
    result = run(one)
    assert result.complete and result.requests.ended == len(trace)
    assert result.elapsed_s >= max(times) / 1.7 / 1000


@pytest.mark.parametrize("virtual", [True, False])
def test_a_replay_ends_in_the_middle_of_a_long_forward_once_it_is_stopped(tmp_path: Path, virtual: bool) -> None:
    """A forward takes 20 minutes. Nothing but `is_stopped` can end a real one in the time of this test."""
    asked = itertools.count()
    speeds = Speeds(compute=ComputeSpeed(tokens_per_s=1.0))
    one = job(tmp_path, rounds(4, 2), small_config(storage=None), speeds=speeds, virtual=virtual)
    with closing(start_engines(one, lambda: next(asked) >= 10)) as engines:
        for _ in engines.run():
            pass
        result = engines.result()
    assert not result.complete and result.requests.ended < 8


def test_a_replay_that_is_stopped_reports_whole_steps(tmp_path: Path) -> None:
    """Its engines are in the middle of their forwards then."""
    one = job(tmp_path, rounds(40, 2), small_config(), speeds=fast(), decode_step_s=0.3, processes=2, virtual=True)
    engines = VirtualEngines(one)
    samples = engines.run()
    for _ in range(30):
        next(samples)
    result = engines.result()
    assert not result.complete and 0 < result.requests.ended < 80
    assert result.requests.unfinished > 0

"""Results of replays: conversion to JSON, and merging."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields, replace

import pytest

from hicache_lab.replay.result import (
    Ideal,
    ReplayResult,
    Requests,
    Sample,
    Series,
    Setup,
    TokenCounts,
    merged,
    merged_samples,
)
from hicache_lab.replay.timing import CallTotal, Histogram, Latency, SchedulerTimes
from hicache_lab.traces.routing import Routing


def latency(*values_us: int) -> Latency:
    histogram = Histogram()
    for value in values_us:
        histogram.add(value * 1000)
    return histogram.latency()


def sample(elapsed_s: float, prompt: int = 0, *, stored_bytes: int = 0, **hits: int) -> Sample:
    return Sample(
        elapsed_s=elapsed_s, requests=int(elapsed_s), waiting=1, running=2, prompt_tokens=prompt, hit_tokens=hits,
        device_pages=10, host_pages=20, storage_bytes=stored_bytes, moved_bytes={"device_to_host": 5}, wrong_bytes=0,
    )


def example(**changes: object) -> ReplayResult:
    result = ReplayResult(
        setup=Setup(
            trace="some <trace>.jsonl", model="tiny", page_size=64, kv_bytes_per_token=128, device_pages=100,
            device_page_bytes=8192, host_pages=200, host_page_bytes=12288, storage="file",
            storage_capacity_bytes=1 << 30, storage_pages=87381, processes=1, routing=Routing.ROTATE,
            whole_trace_each=False, speed_up=None,
            running_max=32, waiting_max=32, prefill_tokens_max=8192, prefill_tokens_per_s=1000.0,
        ),
        complete=True,
        elapsed_s=4.0,
        requests=Requests(ended=9, too_long=1, unfinished=0, preempted=2, late_s=0.5, last_end_s=2.0),
        tokens=TokenCounts(
            prompt=1000, output=90, seen=800, hits={"device": 300, "host": 200, "storage": 100}, computed=400,
            recomputed=7, reasons={"new": 287, "evicted.host": 100, "evicted.device": 10, "tail": 10},
        ),
        checked_bytes=1_000_000,
        wrong_bytes=0,
        wrong_bytes_by_source={"device": 0, "host": 0, "storage": 0, "own": 0},
        moved_bytes={"device_to_host": 1000, "host_to_device": 2000, "host_to_storage": 3000, "storage_to_host": 4000},
        evicted_pages={"device": 5, "host": 6, "storage": 7},
        skipped={"no_device_room": 11, "a_reason_of_tomorrow": 1},
        refused={"write": 3},
        damaged={"tag": 1},
        storage_errors={"storage:EIO": 2},
        first_token=latency(1000, 9000),
        scheduler=SchedulerTimes(
            steps=3, idle_steps=1, step_cpu=latency(1, 2, 3), step_elapsed=latency(2, 3, 4),
            request_cpu=latency(100, 900), request_elapsed=latency(200, 5000),
            calls={"poll": CallTotal(calls=4, cpu_s=0.1, elapsed_s=0.2)},
        ),
        ideal=Ideal(pages=87681, lru_tokens=640, optimum_tokens=750, share_of_lru=0.9375, share_of_optimum=0.8),
        samples=(sample(0.0), sample(2.0, 500, device=200), sample(4.0, 1000, device=300, host=200, storage=100)),
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def test_the_names_in_json_are_those_of_the_fields_and_carry_units() -> None:
    written = json.loads(example(hints={"kv.release": {"accepted": 3}}).to_json())
    assert list(written) == [field.name for field in fields(ReplayResult)]
    assert list(json.loads(example().to_json())) == [*written][:-1], "without hints"
    assert written["wrong_bytes"] == 0
    assert written["scheduler"]["request_cpu"]["p99_us"] == pytest.approx(900, rel=0.03)


def test_one_result_merged_is_itself() -> None:
    one = merged([example(ideal=None)])
    assert replace(one, scheduler=example().scheduler) == example(ideal=None)


def test_counts_of_engines_add_up_and_the_longest_time_counts() -> None:
    both = merged([example(ideal=None), example(wrong_bytes=3, complete=False, elapsed_s=6.0, ideal=None)])
    assert both.wrong_bytes == 3
    assert not both.complete
    assert both.elapsed_s == 6.0
    assert both.requests == Requests(ended=18, too_long=2, unfinished=0, preempted=4, late_s=0.5, last_end_s=2.0)
    assert both.tokens.hits == {"device": 600, "host": 400, "storage": 200}
    assert both.skipped["no_device_room"] == 22
    assert both.scheduler.request_cpu.count == 4
    assert both.scheduler.calls["poll"] == CallTotal(calls=8, cpu_s=0.2, elapsed_s=0.4)


def test_samples_of_engines_are_added_by_time_once_all_have_begun() -> None:
    series = merged_samples([[sample(0, 10), sample(2, 30)], [sample(1, 5), sample(3, 50)], []])
    assert [(one.elapsed_s, one.prompt_tokens) for one in series] == [(1, 15), (2, 35), (3, 80)]


def test_a_shared_store_is_not_counted_twice() -> None:
    both = merged([sample(1, stored_bytes=100), sample(1, stored_bytes=90)])
    assert both.storage_bytes == 100
    assert both.device_pages == 20


@pytest.mark.parametrize("count", [1, 255, 256, 1000, 10_000])
def test_a_series_is_bounded_and_evenly_spread(count: int) -> None:
    series = Series()
    for i in range(count):
        series.add(sample(float(i)))
    times = [one.elapsed_s for one in series.samples]
    assert len(times) < Series.SAMPLES_MAX
    assert times[0] == 0
    assert len({b - a for a, b in itertools.pairwise(times)}) <= 1
    assert count < 10 or times[-1] > count * 0.9

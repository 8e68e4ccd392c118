"""The benchmark of eviction policies: its traces in pages, its cells, its rows, and its tables."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hicache_lab.replay.ideal import uses_of
from hicache_lab.replay.job import ReplayJob
from hicache_lab.replay.virtual.engines import VirtualEngines
from hicache_lab.traces.synthetic import synthetic_trace
from hicache_lab.traces.trace import write_trace
from lab.benchmarks._table import Row
from lab.benchmarks.eviction import (
    AGENT_COPIES,
    ALTERNATING_TOKENS,
    PAGE_SIZE,
    SETTINGS,
    SIZES,
    Figures,
    Requests,
    Run,
    Workload,
    cells,
    changing,
    copies,
    disjoint,
    divided,
    in_pages,
    job_of,
    optimum,
    replayed,
    store_rows,
    summary,
    tier_rows,
    workload,
)

REQUESTS = 60


def hits_of(job: ReplayJob) -> int:
    engines = VirtualEngines(job)
    for _ in engines.run():
        pass
    return sum(engines.result().tokens.hits.values())


@pytest.fixture(scope="module")
def pages() -> Requests:
    return in_pages(synthetic_trace(REQUESTS, 0))


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_a_trace_in_pages_has_the_hits_of_the_trace(pages: Requests, tmp_path: Path, policy: str) -> None:
    """Although its outputs are part of its prompts."""
    of = workload("pages", pages, tmp_path)
    run = Run(of.trace, of.longest, 2 * of.longest, policy=policy)
    path = tmp_path / "trace.jsonl"
    write_trace(path, (replace(each, timestamp_ms=1000 * each.index) for each in synthetic_trace(REQUESTS, 0)))
    assert replayed(run).hits == hits_of(replace(job_of(run), trace=path)) > 0


def test_a_workload_counts_its_distinct_pages_and_those_of_its_longest_request(
    pages: Requests, tmp_path: Path
) -> None:
    of = workload("pages", pages, tmp_path)
    uses = list(uses_of(job_of(Run(of.trace, 1, 1)), PAGE_SIZE, 1 << 24))
    assert of.pages == len({page for each in uses for page in each.pages.tolist()})
    assert of.longest == max(-(-each.kv_tokens // PAGE_SIZE) for each in pages)


def test_copies_of_a_trace_have_no_common_pages_and_come_in_the_order_of_their_times(pages: Requests) -> None:
    found, ids = copies(pages, 3, 5000), [block for each in pages for block in each.hash_ids]
    assert len(found) == 3 * len(pages)
    assert len({block for each in found for block in each.hash_ids}) == 3 * len(set(ids))
    times = [each.timestamp_ms for each in found]
    assert times == sorted(times) and times[0] == pages[0].timestamp_ms
    assert [each.timestamp_ms for each in disjoint([pages, pages])] == 2 * [each.timestamp_ms for each in pages]


def test_the_middle_size_of_the_alternating_trace_is_the_cache_that_it_is_made_for(
    pages: Requests, tmp_path: Path
) -> None:
    (both, _), (alternating, sizes) = changing(pages, pages, tmp_path).items()
    assert alternating.pages // sizes[1] * PAGE_SIZE == pytest.approx(ALTERNATING_TOKENS, rel=0.02)
    assert both.requests == len(pages) // 2 * (1 + AGENT_COPIES)


def test_the_pages_of_a_cell_are_divided_among_its_tiers() -> None:
    assert divided(800, 50, SETTINGS["L1 + L2"]) == (200, 600, 0)
    assert divided(800, 50, SETTINGS["L1 + L2 + file"]) == (100, 300, 400)


def test_l1_has_room_for_the_longest_request_and_a_cell_without_room_is_left_out() -> None:
    assert divided(800, 450, SETTINGS["L1 + L2"]) == (450, 350, 0)
    assert divided(600, 450, SETTINGS["L1 + L2"]) is None
    of = Workload("prompts", Path("prompts"), 9, 64_000, 1000)
    assert next(iter(cells(of, SETTINGS["L1 + L2"], SIZES))) == "1/32 (128,000 tokens)"


def test_the_optimum_has_at_least_the_hits_of_a_replay_with_as_many_pages(pages: Requests, tmp_path: Path) -> None:
    of = workload("pages", pages, tmp_path)
    (run,) = cells(of, SETTINGS["L1 + L2"], (2,)).values()
    figures = replayed(run)
    assert 0 < figures.hits <= optimum(of.trace, run.device_pages + run.host_pages) and figures.written_bytes == 0
    assert replayed(run) == figures


def test_rows_compare_lru_with_the_optimum_and_the_others_with_lru() -> None:
    run = Run(Path("trace"), 1, 2)
    figures = {run: Figures(80, 0), run._replace(policy="slru"): Figures(60, 0)}
    rows = tier_rows({"1/2": run}, figures, {"1/2": 100}, ("lru", "slru"), {"slru": 0.99})
    assert rows["lru"] == [Row("1/2: lru, of the optimum", "80", "100", 0.8, None)]
    assert rows["slru"] == [Row("1/2: slru, of lru", "60", "80", 0.75, 0.99)]
    better = Row("1/4: slru, of lru", "9", "8", 1.125, 0.99)
    worst = summary("slru", [better, *rows["slru"]], 0.99)
    assert worst.what == "slru, worst of 2; mean 0.938, best 1.125 (1/2: slru, of lru)" and worst.ratio == 0.75


def test_rows_of_a_store_have_the_written_bytes_for_each_hit_that_it_adds() -> None:
    run = Run(Path("trace"), 1, 1, 8)
    figures = {run._replace(store_pages=0): Figures(1000, 0), run: Figures(2000, 10**12)}
    figures[run._replace(store_policy="slru")] = Figures(1500, 5 * 10**11)
    lru, bytes_lru, slru, bytes_slru = store_rows("1/2", run, figures, ("lru", "slru"))
    assert lru == Row("1/2: lru, hits, of no store", "2,000", "1,000", 2.0, None)
    assert bytes_lru == Row("1/2: lru, written", "1,000 GB (976,562 KiB)")
    assert slru == Row("1/2: slru, hits, of lru", "1,500", "2,000", 0.75, None)
    assert bytes_slru == Row("1/2: slru, written, of lru", "500 GB (976,562 KiB)", bytes_lru.ours, 0.5)


@pytest.mark.long
def test_the_benchmark_makes_its_tables(repository: Path) -> None:
    command = [sys.executable, "-m", "lab.benchmarks", "eviction", "--smallest"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nwhat ") == 2 * len(SETTINGS) + 1 + 2 + 2 + 1

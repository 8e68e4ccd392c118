"""The default is never slower than fetching every hit, nor than no store: replays in virtual time."""

from __future__ import annotations

import functools
import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_lab.traces.request import BLOCK_TOKENS, TraceRequest
from hicache_lab.traces.trace import write_trace
from lab.benchmarks._table import Row
from lab.benchmarks.paying import (
    FIGURES,
    GOAL,
    Run,
    Side,
    Times,
    Workload,
    all_runs,
    cells,
    replayed,
    row,
    speed_up_of,
    without_store,
    worst,
)

pytestmark = pytest.mark.long

# Enough KV that most turns find their prompt in the store only.
CONVERSATIONS, TURNS = 60, 200
# Each load and each speed, and both numbers of workers, in a tenth of the two traces' matrices.
TENTH = slice(2, None, 6)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Conversations whose turns come in random order, at random times."""
    numbers, ids = random.Random(0), itertools.count()
    prompts: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    turns, at_s = [], 0.0
    for index in range(TURNS):
        at_s += numbers.expovariate(1.0)
        prompt = numbers.choice(prompts)
        blocks = numbers.randint(1, 6) if prompt else numbers.randint(8, 24)
        prompt += itertools.islice(ids, blocks)
        tokens = len(prompt) * BLOCK_TOKENS - numbers.randrange(BLOCK_TOKENS)
        turns.append(TraceRequest(index, int(1000 * at_s), tokens, numbers.randint(5, 60), tuple(prompt)))
    path = tmp_path_factory.mktemp("traces") / "conversations.jsonl"
    write_trace(path, turns)
    return Workload("conversations", path)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """300 requests of 10,000 tokens, each one of a hundred prompts, at the rate at which they are served."""
    numbers, blocks = random.Random(0), -(-10_000 // BLOCK_TOKENS)
    firsts = [blocks * numbers.randrange(100) for _ in range(300)]
    path = tmp_path_factory.mktemp("traces") / "prompts.jsonl"
    write_trace(path, [TraceRequest(index, 0, 10_000, 20, tuple(range(first, first + blocks)))
                       for index, first in enumerate(firsts)])
    return Workload("prompts", path)


@functools.cache
def ratios(run: Run) -> tuple[float, ...]:
    """Return ours : reference of both figures."""
    matrix = {one: replayed_once(one) for one in all_runs([run])}
    return tuple(row("", run, matrix, figure, GOAL).ratio or 0.0 for figure in FIGURES)


replayed_once = functools.cache(replayed)
calibrated = functools.cache(speed_up_of)


@pytest.mark.parametrize("number", range(len(range(56)[TENTH])))
def test_the_default_is_as_fast_as_the_better_of_each_hit_and_no_store(conversations: Workload, number: int) -> None:
    runs = cells(conversations, calibrated(conversations, TURNS), TURNS)
    label, run = list(runs.items())[TENTH][number]
    assert max(ratios(run)) <= GOAL, label


@pytest.mark.parametrize("speed", [1.3, 4.0])
def test_eight_workers_that_read_at_once_do_not_make_a_store_look_slow(prompts: Workload, speed: float) -> None:
    """Each one alone has an eighth of the bandwidth while all read."""
    run = Run(prompts, 300, 1.0, Side.DEFAULT, 8, speed)
    assert max(ratios(run)) <= GOAL


def test_a_store_is_used_while_requests_wait_even_if_it_is_slower_than_computing(conversations: Workload) -> None:
    """While the device computes for others, reading costs nothing."""
    run = Run(conversations, TURNS, calibrated(conversations, TURNS), Side.DEFAULT, 8, 0.5)
    ours, nothing = replayed_once(run), replayed_once(without_store(run))
    assert ours.computed_s < 0.9 * nothing.computed_s
    assert ours.ended_s < nothing.ended_s and ours.first_token_s < nothing.first_token_s


def test_equal_runs_have_equal_times(prompts: Workload) -> None:
    run = Run(prompts, 60, 1.0, Side.DEFAULT, 8, 1.3)
    assert replayed(run) == replayed(run)


def test_the_benchmark_makes_its_tables(repository: Path) -> None:
    command = [sys.executable, "-m", "lab.benchmarks", "paying", "--smallest"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nwhat ") == 1 + len(FIGURES)


def test_a_row_compares_with_the_better_side_and_the_worst_row_names_its_cell() -> None:
    run = Run(Workload("prompts", None), 9, 1.0, Side.DEFAULT, 1, 2.0)
    matrix = {run: Times(9.0, 3.0, 4.0), run._replace(side=Side.ALWAYS): Times(8.0, 4.0, 3.0)}
    matrix[without_store(run)] = Times(10.0, 2.0, 5.0)
    ended, first = (row("a cell", run, matrix, figure, GOAL) for figure in FIGURES)
    assert ended == Row("a cell", "9.0 s", "8.0 s (always)", 1.125, GOAL)
    assert first == Row("a cell", "3.000 s", "2.000 s (no store)", 1.5, GOAL)
    same = Row("another", "8.0 s", "8.0 s (always)", 1.0, GOAL)
    assert worst([same, ended, same], "time", GOAL) == Row(
        "time (a cell; 1 of 3 miss it)", "9.0 s", "8.0 s (always)", 1.125, GOAL
    )

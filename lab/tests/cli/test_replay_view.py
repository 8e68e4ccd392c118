"""Output of long commands: the summary of a replay within 80 columns, and lines of progress."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hicache.cli import progress
from hicache.cli.progress import StepProgress, follow
from hicache_lab.cli.replay_view import milliseconds, print_summary, progress_of
from hicache_lab.replay.result import ReplayResult
from hicache_lab.replay.timing import Latency
from lab.tests.replay.test_result import example, latency, sample
from lab.tests.replay.world import job, small_config

MILLION = 1_000_000


def shown(result: ReplayResult, width: int) -> str:
    file = io.StringIO()
    print_summary(Console(file=file, width=width), result)
    return file.getvalue()


def long() -> ReplayResult:
    """Return a result with large numbers, as after a day on large tiers."""
    slow: Latency = replace(latency(1234, 12_345, 123_456, 98_765_432), count=2 * MILLION)
    scheduler = example().scheduler
    assert scheduler is not None
    times = replace(scheduler, step_cpu=slow, step_elapsed=slow, request_cpu=slow, request_elapsed=slow)
    tokens = replace(
        example().tokens, prompt=27_441_774_000, seen=8_342_299_000, computed=21_926_000_000,
        hits={"device": 1_042_787_000, "host": 164_650_000, "storage": 4_308_358_000},
    )
    moved = dict.fromkeys(example().moved_bytes, 1023 << 30)
    skipped = {"prefetch_does_not_pay": 123 * MILLION, "a_reason_of_tomorrow": 1}
    evicted = {"device": 420_796_000, "host": 397_393_000, "storage": 238_419_000}
    return example(scheduler=times, tokens=tokens, moved_bytes=moved, evicted_pages=evicted, skipped=skipped)


@pytest.mark.parametrize("width", [80, 60])
def test_no_number_of_the_summary_is_cut(width: int) -> None:
    text = shown(long(), width)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    # A reason in words may be longer: it is wrapped, not cut.
    assert max(len(line) for line in text.splitlines() if re.search("[0-9]", line)) <= width
    for number in ("27,441,774,000", "1,042,787,000", "420,796,000", "123,000,000", "2,000,000", "98,765"):
        assert number in text, number


def test_the_summary_has_the_reasons_of_computed_tokens_the_most_frequent_first() -> None:
    assert re.search(r"\nnew +287 +70.5 %\n *evicted host +100 +24.6 %\n", shown(example(), 80))
    assert "by reason" not in shown(example(tokens=replace(example().tokens, reasons={})), 80), "an earlier report"


def test_progress_shows_the_shares_of_the_tiers_and_wrong_bytes(tmp_path: Path) -> None:
    one = job(tmp_path, [], small_config(storage=None), requests=20, processes=2, whole_trace_each=True)
    now = sample(9.0, 1000, device=100, host=200, storage=50)
    assert progress_of(now, one) == StepProgress(9, 40, "L1 10.0 %, L2 20.0 %, L3 5.0 %, 0 wrong bytes", "requests")
    assert "7 WRONG BYTES" in progress_of(replace(now, wrong_bytes=7), one).found


def test_longer_times_have_fewer_decimals() -> None:
    assert [milliseconds(time_us) for time_us in (12, 12_345, 123_450, 1_234_000)] == [
        "0.012", "12.35", "123.5", "1,234",
    ]


def step_progress(step: int) -> StepProgress:
    return StepProgress(step, 3 if step else None, f"{step} found")


def test_lines_of_progress_go_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    assert follow(iter([0, 1, 3]), "counting", step_progress) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "counting: 0 pages, 0 found", "counting: 1 of 3 pages (33 %), 1 found, about 0s left",
        "counting: 3 of 3 pages (100 %), 3 found",
    ]


def test_a_short_task_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    assert follow(iter([0, 1, 2]), "counting", step_progress) == 2
    assert capsys.readouterr().err == ""

"""What a replay shows fits a terminal of 80 columns, also with the numbers of a long one."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from hicache.cli.replay_view import milliseconds, print_summary, shortened, state_table
from hicache.replay.result import ReplayResult
from hicache.replay.timing import Latency
from tests.replay.test_result import example, latency, sample

MILLION = 1_000_000


def shown(what: RenderableType | ReplayResult, width: int = 80) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width)
    if isinstance(what, ReplayResult):
        print_summary(console, what)
    else:
        console.print(what)
    return file.getvalue()


def long() -> ReplayResult:
    """As of a day on large tiers."""
    slow: Latency = replace(latency(1234, 12_345, 123_456, 98_765_432), count=2 * MILLION)
    times = replace(example().scheduler, step_cpu=slow, step_elapsed=slow, request_cpu=slow, request_elapsed=slow)
    tokens = replace(
        example().tokens, prompt=27_441_774_000, seen=8_342_299_000, computed=21_926_000_000,
        hits={"device": 1_042_787_000, "host": 164_650_000, "storage": 4_308_358_000},
    )  # fmt: skip
    moved = dict.fromkeys(example().moved_bytes, 1023 << 30)
    skipped = {"prefetch_does_not_pay": 123 * MILLION, "a_reason_of_tomorrow_" * 4: 1}
    evicted = {"device": 420_796_000, "host": 397_393_000, "storage": 238_419_000}
    return example(scheduler=times, tokens=tokens, moved_bytes=moved, evicted_pages=evicted, skipped=skipped)


def test_nothing_of_the_summary_is_cut_at_80_columns() -> None:
    text = shown(long())
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= 80
    for number in ("27,441,774,000", "1,042,787,000", "420,796,000", "123,000,000", "2,000,000", "98,765"):
        assert number in text, number


@pytest.mark.parametrize("width", [60, 79, 80, 200])
def test_nothing_of_the_live_table_is_cut_and_narrow_ones_go_without_pages(width: int) -> None:
    now = replace(
        sample(100.0, 987 * MILLION, stored_bytes=1023 << 20, device=214_600_000, host=99_999, storage=999_949),
        device_pages=524_288, host_pages=99_999,
    )  # fmt: skip
    text = shown(state_table(now, width), width)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= width
    for figure in ("214.6 M", "99,999", "999.9 k", "771.3 M", "1023.0 MiB", "computed"):
        assert figure in text, figure
    assert ("L1 pages" in text) == (width >= 80)


def test_counts_and_times_are_as_exact_as_their_length_permits() -> None:
    assert [shortened(number) for number in (0, 99_999, 214_649, 27_441_774)] == ["0", "99,999", "214.6 k", "27.4 M"]
    assert [milliseconds(time_us) for time_us in (12, 12_345, 123_450, 1_234_000)] == [
        "0.012", "12.35", "123.5", "1,234",
    ]  # fmt: skip

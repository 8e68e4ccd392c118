"""Alternating runs of benchmarks, their results as rows, and tables of rows: printed, and as a page of Markdown."""

from __future__ import annotations

import gc
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, TypeAlias

Sides: TypeAlias = "list[Callable[[], object]]"
COLUMNS = ("what", "ours", "reference", "ratio", "goal")
# The page that all processes of a benchmark append their tables to. A variable, because some start others.
PAGE_VARIABLE = "HICACHE_BENCHMARK_PAGE"
# With it, each table is made once with the smallest sizes: its figures mean nothing, but it shows that it can be made.
SMALLEST_VARIABLE = "HICACHE_BENCHMARK_SMALLEST"


@dataclass(frozen=True, slots=True)
class Row:
    """One result. `ours` and `reference` are text with a unit; `ratio` and `goal` are ours : reference.

    `reference`, `ratio` and `goal` may be None if there is nothing to compare with.
    """

    what: str
    ours: str
    reference: str | None = None
    ratio: float | None = None
    goal: float | None = None


def reduced(usual: int, smallest: int = 1) -> int:
    """Return a number of runs, pages or other things: `usual`, or `smallest` with `--smallest`."""
    return smallest if SMALLEST_VARIABLE in os.environ else usual


def alternate(runs: int, sides: Sides, before: Callable[[], object] | None = None) -> list[list[float]]:
    """Run the sides in turns; return the seconds of each run of each side. `before` runs untimed before each turn; the
    garbage collector is off."""
    times: list[list[float]] = [[] for _ in sides]
    gc.disable()
    for _ in range(reduced(runs)):
        if before is not None:
            before()
        for side, taken in zip(sides, times, strict=True):
            begin = time.perf_counter()
            side()
            taken.append(time.perf_counter() - begin)
    gc.enable()
    return times


def row(what: str, times: list[list[float]], goal: float | None = 1.0, *, limit_us: float | None = None) -> Row:
    """Return a row from the seconds of runs (ours, then the reference if any): the best, with the median in brackets.

    A ratio above 1 means that we are slower. With `limit_us`, the reference is this limit, and the ratio uses the
    median.
    """
    text = [f"{min(t) * 1e6:.1f} us ({statistics.median(t) * 1e6:.1f})" for t in times]
    if limit_us is not None:
        return Row(what, text[0], f"{limit_us:.0f} us", statistics.median(times[0]) * 1e6 / limit_us, goal)
    ratio = min(times[0]) / min(times[1]) if len(times) > 1 else None
    return Row(what, text[0], text[1] if len(times) > 1 else None, ratio, goal)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rate_rows(
    label: str, size_bytes: int, times: Mapping[str, Sequence[float]], goal: float | None, *, other: str = "plain"
) -> list[Row]:
    """Return rows of reads and writes of `size_bytes` as rates, best and median; a ratio above 1 means ours is faster.

    `times` are seconds by "read ours", "write ours", and the same for `other`, or nothing if there is no `other`.
    """
    rows = []
    for verb in ("read", "write"):
        for kind, pick in (("best", min), ("median", statistics.median)):
            what = f"{verb} {label}, {kind} of {len(times[f'{verb} ours'])}"
            ours = pick(times[f"{verb} ours"])
            if f"{verb} {other}" not in times:
                rows.append(Row(what, rate(size_bytes, ours), goal=goal))
                continue
            reference = pick(times[f"{verb} {other}"])
            rows.append(Row(what, rate(size_bytes, ours), rate(size_bytes, reference), reference / ours, goal))
    return rows


def rate(size_bytes: int, seconds: float) -> str:
    """Return a rate as text, with one digit more below 1 GB/s, where that of small pages is."""
    gb_s = size_bytes / seconds / 1e9
    return f"{gb_s:.{2 if gb_s >= 1 else 3}f} GB/s"


def print_table(title: str, rows: Iterable[Row], *, file: TextIO | None = None) -> None:
    """Write `rows` as aligned columns to `file` (standard output), and to the page of `--write` if there is one."""
    out = sys.stdout if file is None else file
    cells = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    print(f"\n{title}", file=out)
    for row in cells:
        first = row[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join((first, *rest)), file=out)
    if page := os.environ.get(PAGE_VARIABLE):
        with Path(page).open("a", encoding="utf-8") as written:
            written.write(page_table(title, cells[1:]))


def page_head(name: str, measured: str) -> str:
    """Return the beginning of the page of the benchmark `name`; `measured` is the date and the machine."""
    return f"# {name}\n\nPrinted by `python -m lab.benchmarks {name}`: {measured}.\n"


def page_table(title: str, cells: Iterable[Sequence[str]]) -> str:
    """Return a table of a page in Markdown. `cells` are the rows as text."""
    lines = ["|".join(("", *row, "")) for row in ([f" {cell} " for cell in row] for row in (COLUMNS, *cells))]
    return "\n".join(("", f"**{title}**", "", lines[0], "|---" + "|---:" * (len(COLUMNS) - 1) + "|", *lines[1:], ""))


def this_machine() -> str:
    """Return the date and the machine as text: cores, memory, GPU and load."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    gpus = [re.search(r"Model:\s*(.*)", path.read_text(encoding="utf-8"))
            for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    gpu = ", ".join(found[1] for found in gpus if found) or "no GPU"
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {len(os.sched_getaffinity(0))} cores of {cpu[1] if cpu else 'an unknown CPU'}, "
        f"{memory_gib:.0f} GiB of memory, {gpu}, load {os.getloadavg()[0]:.1f} at the start"
    )


def _cells(row: Row) -> tuple[str, ...]:
    return row.what, row.ours, row.reference or "-", _number(row.ratio), _number(row.goal)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

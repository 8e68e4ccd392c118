"""Alternating runs of benchmarks, their results as rows, and plain tables of rows."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO, TypeAlias

Sides: TypeAlias = "list[Callable[[], object]]"


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


def alternate(runs: int, sides: Sides, before: Callable[[], object] | None = None) -> list[list[float]]:
    """Run the sides in turns; return the seconds of each run of each side. `before` runs untimed before each turn; the
    garbage collector is off."""
    times: list[list[float]] = [[] for _ in sides]
    gc.disable()
    for _ in range(runs):
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

    `times` are seconds by "read ours", "write ours", and the same for `other`.
    """
    rows = []
    for verb in ("read", "write"):
        for kind, pick in (("best", min), ("median", statistics.median)):
            ours, reference = pick(times[f"{verb} ours"]), pick(times[f"{verb} {other}"])
            rows.append(Row(
                f"{verb} {label}, {kind} of {len(times[f'{verb} ours'])}",
                f"{size_bytes / ours / 1e9:.2f} GB/s", f"{size_bytes / reference / 1e9:.2f} GB/s",
                reference / ours, goal,
            ))  # fmt: skip
    return rows


def print_table(title: str, rows: Iterable[Row], *, file: TextIO | None = None) -> None:
    """Write `rows` as aligned columns to `file` (standard output)."""
    out = sys.stdout if file is None else file
    cells = [("what", "ours", "reference", "ratio", "goal")]
    cells += [(r.what, r.ours, r.reference or "-", _number(r.ratio), _number(r.goal)) for r in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    print(f"\n{title}", file=out)
    for row in cells:
        first = row[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join((first, *rest)), file=out)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

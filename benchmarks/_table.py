"""Results of benchmarks as rows, and rows as a plain table."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `ours` and `reference` are text with their unit; `ratio` and `goal` are ours : reference.

    `reference`, `ratio` or `goal` may be None where there is nothing to compare with.
    """

    what: str
    ours: str
    reference: str | None = None
    ratio: float | None = None
    goal: float | None = None


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

"""Tables for any width: columns if they fit, otherwise one block of lines for each row."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence

# The smallest width for blocks.
WIDTH_MIN = 40
_GAP = "  "


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str = "", *, width: int | None = None
) -> Iterator[str]:
    """Yield the lines of a table, or `empty` without rows. A column whose name ends in `>` is aligned to the right.

    `width` is that of the terminal by default, or of the variable COLUMNS. A table that is wider becomes blocks:
    the first column as a heading, and below it each other column on its own line.
    """
    names = [name.removesuffix(">") for name in columns]
    right = [name.endswith(">") for name in columns]
    cells = [list(map(str, row)) for row in rows]
    if empty and not cells:
        yield empty
        return
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    most = max(WIDTH_MIN, shutil.get_terminal_size().columns if width is None else width)
    if sum(widths) + len(_GAP) * (len(widths) - 1) > most:
        yield from _blocks(names, cells)
        return
    for row in [[name.upper() for name in names], *cells]:
        placed = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        yield _GAP.join(placed).rstrip()


def _blocks(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    longest = max(map(len, names[1:]), default=0)
    for row in rows:
        yield f"{names[0]} {row[0]}"
        for name, cell in zip(names[1:], row[1:], strict=True):
            if cell not in ("", "-"):
                yield f"  {name:<{longest}}  {cell}"

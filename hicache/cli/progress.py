"""Commands that take long: a bar on a terminal, a line now and then without one, both on stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import click

# Without a terminal, a line this often shows a log's reader that a command of hours is alive.
PLAIN_INTERVAL_S = 10.0
# A bar need not move more often than somebody sees it move; steps may be microseconds apart.
BAR_INTERVAL_S = 0.05

Step = TypeVar("Step")


@dataclass(frozen=True, slots=True)
class Told:
    """How far a step is: `done` of `total` (None: not known yet), and what was found."""

    done: int
    total: int | None
    found: str


def follow(steps: Iterator[Step], title: str, tell: Callable[[Step], Told]) -> Step:
    """Run through `steps`, of which there is at least one, and show how far they are; the last step."""
    return _with_bar(steps, title, tell) if sys.stderr.isatty() else _with_lines(steps, title, tell)


def _with_lines(steps: Iterator[Step], title: str, tell: Callable[[Step], Told]) -> Step:
    last = next(steps)
    told_s = time.monotonic()
    for last in steps:
        if time.monotonic() - told_s >= PLAIN_INTERVAL_S:
            told_s = time.monotonic()
            told = tell(last)
            share = f"{told.done:,} pages" if told.total is None else f"{told.done:,} of {told.total:,} pages"
            click.echo(f"{title}: {share}, {told.found}", err=True)
    return last


def _with_bar(steps: Iterator[Step], title: str, tell: Callable[[Step], Told]) -> Step:
    from rich.console import Console  # noqa: PLC0415  not worth its import time where there is no terminal
    from rich.progress import Progress  # noqa: PLC0415

    columns = Progress.get_default_columns()
    with Progress(*columns, "{task.fields[found]}", console=Console(stderr=True)) as progress:
        last = next(steps)
        task = progress.add_task(title, total=tell(last).total, found="")

        def show(step: Step) -> None:
            told = tell(step)
            progress.update(task, completed=told.done, total=told.total, found=told.found)

        shown_s = -math.inf
        for last in steps:
            if time.monotonic() - shown_s >= BAR_INTERVAL_S:
                shown_s = time.monotonic()
                show(last)
        show(last)
    return last

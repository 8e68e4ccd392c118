"""What commands print to: one console, and one progress on stderr, a bar on a terminal, else a line now and then."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import click
from rich.console import Console
from rich.progress import Progress

# Without a terminal, a line this often shows a log's reader that a command of hours is alive.
PLAIN_INTERVAL_S = 10.0
# A bar need not move more often than somebody sees it move; steps may be microseconds apart.
BAR_INTERVAL_S = 0.05
# These are shown however soon they come: behind them a slow rate may keep the next step away for hours.
BAR_FIRST_STEPS = 16

Step = TypeVar("Step")


def width() -> int:
    """Columns to print text in: those of the terminal, within what is pleasant to read; COLUMNS overrides it."""
    return max(40, min(100, shutil.get_terminal_size((100, 24)).columns))


class OutputConsole(Console):
    """A console whose reader may leave. Rich would end the process with exit code 1 then, which here means that bytes
    are wrong; the error is raised instead and told like that of any other command."""

    def on_broken_pipe(self) -> None:
        """Raise what rich has just caught. REQUIRES: called by rich, while it handles that error."""
        raise  # noqa: PLE0704


@dataclass(frozen=True, slots=True)
class Told:
    """How far a step is: `done` of `total` (None: not known yet) things of a kind, and what was found."""

    done: int
    total: int | None
    found: str
    kind: str = "pages"


def follow(steps: Iterator[Step], title: str, tell: Callable[[Step], Told]) -> Step:
    """Run through `steps`, of which there is at least one, and show how far they are; the last step."""
    bar = sys.stderr.isatty()
    interval_s = BAR_INTERVAL_S if bar else PLAIN_INTERVAL_S
    columns = Progress.get_default_columns()
    with Progress(*columns, "{task.fields[found]}", console=Console(stderr=True), disable=not bar) as progress:
        task = progress.add_task(title, total=None, found="")
        shown_s = time.monotonic()
        for number, last in enumerate(steps):
            if time.monotonic() - shown_s >= interval_s or (bar and number < BAR_FIRST_STEPS):
                shown_s = time.monotonic()
                told = tell(last)
                progress.update(task, completed=told.done, total=told.total, found=told.found)
                if not bar:
                    of = "" if told.total is None else f" of {told.total:,}"
                    click.echo(f"{title}: {told.done:,}{of} {told.kind}, {told.found}", err=True)
        told = tell(last)
        progress.update(task, completed=told.done, total=told.total, found=told.found)
    return last

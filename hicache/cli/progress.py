"""Progress of commands on stderr (a bar on a terminal, otherwise occasional lines)."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from .main import FOUND_EXIT_CODE, INTERRUPTED_EXIT_CODE

# The interval of lines without a terminal: they show in a log that a long command is alive.
PLAIN_INTERVAL_S = 5.0
# The redraw interval of a bar; steps may be microseconds apart.
BAR_INTERVAL_S = 0.05
# The first steps are always shown: with a slow rate the next step may come hours later.
BAR_FIRST_STEPS = 16

Step = TypeVar("Step")


def width() -> int:
    """Return the columns for text: those of the terminal within readable limits; COLUMNS overrides it."""
    return max(40, min(100, shutil.get_terminal_size((100, 24)).columns))


@dataclass(frozen=True, slots=True)
class StepProgress:
    """The progress of a step: `done` of `total` (None: unknown) items of a kind, and the findings."""

    done: int
    total: int | None
    found: str
    kind: str = "pages"


def follow(steps: Iterator[Step], title: str, progress_of: Callable[[Step], StepProgress]) -> Step:
    """Iterate over `steps`, at least one, and show their progress. Return the last step."""
    for last in followed(steps, title, progress_of):  # noqa: B007
        pass
    return last


def followed(
    steps: Iterator[Step], title: str, progress_of: Callable[[Step], StepProgress]
) -> Generator[Step, None, None]:
    """Yield `steps` and show their progress, at the end that of the last one."""
    bar = sys.stderr.isatty()
    interval_s = BAR_INTERVAL_S if bar else PLAIN_INTERVAL_S
    with Progress(*_columns(), console=Console(stderr=True), disable=not bar) as progress:
        task = progress.add_task(title, total=None, found="")

        def show(step: Step) -> StepProgress:
            shown = progress_of(step)
            progress.update(task, completed=shown.done, total=shown.total, found=shown.found)
            return shown

        started_s = shown_s = time.monotonic()
        step: Step | None = None
        for number, step in enumerate(steps):
            if time.monotonic() - shown_s >= interval_s or (bar and number < BAR_FIRST_STEPS):
                shown_s = time.monotonic()
                shown = show(step)
                if not bar:
                    click.echo(f"{title}: {_plain(shown, shown_s - started_s)}", err=True)
            yield step
        if step is not None:
            show(step)


def _columns() -> list[ProgressColumn]:
    """Return the columns, narrow enough for 60 characters: findings are wrapped and never cut."""
    found = TextColumn("{task.fields[found]}", table_column=Column(overflow="fold"))
    bar = BarColumn(bar_width=max(5, min(40, width() - 60)))
    return [TextColumn("{task.description}"), bar, TaskProgressColumn(), TimeRemainingColumn(), found]


def _plain(shown: StepProgress, elapsed_s: float) -> str:
    if shown.total is None:
        return f"{shown.done:,} {shown.kind}, {shown.found}"
    share = f" ({100 * shown.done / shown.total:.0f} %)" if shown.total else ""
    to_do = shown.total - shown.done
    left = f", about {format_age(elapsed_s * to_do / shown.done)} left" if shown.done and to_do > 0 else ""
    return f"{shown.done:,} of {shown.total:,} {shown.kind}{share}, {shown.found}{left}"


def format_age(seconds: float) -> str:
    """Return a time in its largest whole unit: `45s`, `12m`, `3h`, `9d`."""
    for unit, length_s in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= length_s:
            return f"{int(seconds // length_s)}{unit}"
    return f"{int(seconds)}s"


class Work:
    """The work of one command, in one or several runs of steps. Ctrl-C ends it between two operations of a store, and
    the command still prints the results until then. Used on the main thread."""

    def __init__(self) -> None:
        self.interrupted = False

    def follow(self, steps: Iterator[Step], title: str, progress_of: Callable[[Step], StepProgress]) -> Step:
        """As `follow`; after Ctrl-C return the last step. Raises KeyboardInterrupt before the first step."""
        last: list[Step] = []

        def noted() -> Iterator[Step]:
            for step in steps:
                last[:] = [step]
                yield step

        try:
            return follow(noted(), title, progress_of)
        except KeyboardInterrupt:
            if not last:
                raise
            self.interrupted = True
            return last[0]

    def end(self, *, found: bool = False) -> None:
        """Raise Exit if the command was interrupted (with a message on stderr), or if its check has found something."""
        if self.interrupted:
            click.echo("interrupted; the results above are incomplete", err=True)
            raise click.exceptions.Exit(INTERRUPTED_EXIT_CODE)
        if found:
            raise click.exceptions.Exit(FOUND_EXIT_CODE)

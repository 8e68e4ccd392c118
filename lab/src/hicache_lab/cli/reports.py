"""The report files of `hicache replay` and `hicache plan`: as JSON, CSV and HTML, one of them to standard output."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import click
from rich.console import Console

from hicache.cli.arguments import FILE, is_dash
from hicache.errors import ConfigError

from .speed_options import Command, option_group

Result = TypeVar("Result")
# The parameters of `report_options`, in the order of `write_reports`.
REPORT_NAMES = ("json_file", "csv_file", "html_file")


class OutputConsole(Console):
    """A console whose reader may end. Rich would then exit with code 1, which here means wrong bytes; this class raises
    the error instead, like any other."""

    def on_broken_pipe(self) -> None:
        """Raise the error that rich has just caught. REQUIRES: called by rich, while it handles that error."""
        raise  # noqa: PLE0704


def report_options(what: str, *, csv: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of the report files of a command."""
    return option_group(
        click.option("--json", "json_file", type=FILE, metavar="FILE",
                     help=f"Write the {what} as JSON; - is standard output."),
        click.option("--csv", "csv_file", type=FILE, metavar="FILE", help=f"Write {csv} as CSV."),
        click.option("--report", "html_file", type=FILE, metavar="FILE.html",
                     help=f"Write the {what} as a page with plots."),
    )


def check_reports(*paths: Path | None) -> None:
    """Raise ConfigError for report files whose directory does not exist, and for two names of one file."""
    files = [file for file in paths if file is not None]
    for file in files:
        if not is_dash(file) and not file.parent.is_dir():
            raise ConfigError(f"{file}: the directory {file.parent} does not exist; create it")
    if len(files) > len({os.path.realpath(file) for file in files}):
        raise ConfigError(f"{files[0]}: two of --json, --csv and --report name the same file; choose different ones")


def output_console(*paths: Path | None) -> Console:
    """Return the console for the other output: standard error if a report uses standard output."""
    return OutputConsole(stderr=any(file is not None and is_dash(file) for file in paths))


def write_reports(
    result: Result, reports: Iterable[tuple[Path | None, Callable[[Result], str]]]
) -> tuple[list[Path], list[str]]:
    """Write the reports that have a file, even if some of them fail. Return the written files and the problems."""
    written, problems = [], []
    for file, text in reports:
        if file is None:
            continue
        try:
            if is_dash(file):
                click.echo(text(result))
                continue
            _write(file, text(result))
            written.append(file)
        except OSError as error:
            problems.append(f"{file}: cannot be written: {error.strerror}")
    return written, problems


def print_written(console: Console, files: Iterable[Path]) -> None:
    """Print the names of written files."""
    for file in files:
        console.print(f"report: {file}", highlight=False, soft_wrap=True)


def _write(path: Path, text: str) -> None:
    """Write a file. Raises OSError, also for a pipe without a reader, instead of waiting for one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    os.set_blocking(descriptor, True)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)

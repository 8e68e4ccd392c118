"""The options of commands that write a log: `-v`, `--log-level` and `--log-format`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..config.publishing import LoggingConfig
from ..logs import set_up_logging

Command = TypeVar("Command", bound=Callable[..., Any])

# The parameters that `log_options` adds to a command.
LOG_OPTIONS = ("verbose", "log_level", "log_format")
LEVELS = ("debug", "info", "warning", "error")
_OPTIONS = (
    click.option("-v", "--verbose", is_flag=True, help="As --log-level debug."),
    click.option("--log-level", type=click.Choice(LEVELS), help="Log this level and above to standard error."),
    click.option("--log-format", type=click.Choice(["text", "json"]), help="Readable lines, or JSON for collectors."),
)


def log_options(command: Command) -> Command:
    """Add the options to a command, which passes them to `start_log`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def start_log(
    config: LoggingConfig, *, verbose: bool = False, log_level: str | None = None, log_format: str | None = None
) -> None:
    """Start logging as the flags say, otherwise as `config` says."""
    set_up_logging("debug" if verbose else log_level or config.level, log_format or config.format)

"""The `hicache` command: version, help, and the way from a subcommand's name to its module."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from .. import __version__
from ..errors import HiCacheError

# name: where the command is, and its line in --help. Kept here, so that --help imports none of them.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "config": ("hicache.cli.config:config", "Check a configuration, or list what can be configured."),
    "demo": ("hicache.cli.demo:demo", "Serve a small model with and without the cache, and compare."),
    "inspect": ("hicache.cli.storage:inspect", "Show the header of one stored page."),
    "purge": ("hicache.cli.storage:purge", "Remove stored pages, all or by namespace and age."),
    "verify": ("hicache.cli.storage:verify", "Read every page of a store and report damage."),
}
USAGE_EXIT_CODE = 2


class Failure(click.ClickException):
    """An error the user can do something about: shown on stderr without a traceback."""

    exit_code = USAGE_EXIT_CODE

    def show(self, file: Any = None) -> None:
        """One line `hicache: ...` on stderr (a configuration with several problems: one line for each)."""
        click.echo(f"hicache: {self.format_message()}", file=file, err=file is None)


class LazyGroup(click.Group):
    """A group whose subcommands are named in `COMMANDS` and imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None if there is none of that name. Imports its module."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in --help, from `COMMANDS` alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand. Errors that HiCache raises on purpose become a message and exit code 2."""
        try:
            return super().invoke(ctx)
        except HiCacheError as error:
            raise Failure(str(error)) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hicache")
def main() -> None:
    """A KV cache for LLM engines in three tiers: device memory, host memory and storage."""

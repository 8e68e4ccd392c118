"""The `hicache` command: version, help, and the modules of the subcommands. Other packages add commands by entry points
of the group `hicache.commands`."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import importlib.metadata
import io
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import click

from .. import __version__
from ..errors import HiCacheError, InvariantError, install_hint

# name: the command's location, and its line in --help. They are here, so that --help does not import commands.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "config": ("hicache.cli.config:config", "Write a ready configuration, check one, or list all entries."),
    "copy": ("hicache.cli.storage:copy", "Copy stored pages into another store."),
    "ctl": ("hicache.cli.ctl:ctl", "Show or change a running daemon, or the cache inside an engine."),
    "doctor": ("hicache.cli.doctor:doctor", "Check machine and stores of a configuration, before the first request."),
    "inspect": ("hicache.cli.verify:inspect", "Show the header of one stored page."),
    "ls": ("hicache.cli.storage_view:ls", "List the pages of a store, by namespace."),
    "purge": ("hicache.cli.storage:purge", "Remove stored pages, all or by namespace, weights epoch and age."),
    "serve": ("hicache.cli.serve:serve", "Run the storage daemon of this node."),
    "stat": ("hicache.cli.storage_view:stat", "Sum up a store: pages, bytes, ages, chains."),
    "trim": ("hicache.cli.storage:trim", "Shrink a store to a size, tails of old chains first."),
    "verify": ("hicache.cli.verify:verify", "Read every page of a store and report damage."),
}
# The same lines for the commands of the package hicache-lab.
LAB_COMMANDS: Mapping[str, str] = {
    "demo": "Serve a small model with and without the cache, and compare.",
    "dev-up": "Run a real storage server for development until Ctrl-C.",
    "plan": "Compute how large the tiers should be for a request trace.",
    "replay": "Replay a request trace through the cache and check every byte.",
    "trace": "Generate or record a request trace, or describe one.",
}
ENTRY_POINTS = "hicache.commands"
# The extra with the packages that a command needs in addition.
EXTRAS: Mapping[str, str] = {"serve": "daemon"}
FOUND_EXIT_CODE = 1  # a check has found something, or the answer was no
USAGE_EXIT_CODE = 2
BUG_EXIT_CODE = 3
INTERRUPTED_EXIT_CODE = 130  # 128 and the number of SIGINT, as shells have it
BROKEN_PIPE_EXIT_CODE = 141  # the same of SIGPIPE
# The errors of writing to standard output: closed, a full disk, over a limit or quota, a broken device.
_OUTPUT_ERRNOS = frozenset({errno.EPIPE, errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class Failure(click.ClickException):
    """An error that the user can fix: shown on stderr without a traceback."""

    exit_code = USAGE_EXIT_CODE

    def show(self, file: Any = None) -> None:
        """Print one line `hicache: ...` to stderr; one line per problem for a configuration with several problems."""
        click.echo(f"hicache: {printable(self.format_message())}", file=file, err=file is None)


class Bug(Failure):
    """An unexpected error. The message names the file with its traceback."""

    exit_code = BUG_EXIT_CODE


def printable(text: str) -> str:
    """Return `text` with escapes for control characters and those that the output cannot encode; line ends stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@contextlib.contextmanager
def needs_of(name: str) -> Iterator[None]:
    """Import packages that the command `name` needs. Raises Failure, which says what to install, if one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __package__.partition(".")[0]:
            raise  # a module of HiCache: an installation would not help
        hint = install_hint(EXTRAS[name]) if name in EXTRAS else f"install {error.name}"
        raise Failure(f"{name} needs the package {error.name}; {hint}") from error


class LazyGroup(click.Group):
    """A group whose subcommands are named in `COMMANDS` or by entry points, and imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, sorted."""
        return sorted({*COMMANDS, *_entry_points()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, or None for an unknown name. Imports its module.

        Raises Failure if a required package is not installed.
        """
        if cmd_name in COMMANDS:
            location = COMMANDS[cmd_name][0]
        elif (added := _entry_points().get(cmd_name)) is not None:
            location = added.value
        elif cmd_name in LAB_COMMANDS:
            raise Failure(
                f"{cmd_name} is in the package hicache-lab; install it, in a clone by pip install -e lab, from a wheel "
                "by pip install ./NAME_OF_THE_WHEEL.whl"
            )
        else:
            return None
        module, _, attribute = location.partition(":")
        with needs_of(cmd_name):
            command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise Failure(f"{cmd_name}: the entry point {location} is not a click command; its package has to change")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command that `args` begins with. Raises UsageError with the most similar name."""
        known = {*COMMANDS, *LAB_COMMANDS, *_entry_points()}
        near = difflib.get_close_matches(args[0], known, n=1)
        if near and args[0] not in known:
            ctx.fail(f"No such command {args[0]!r}; did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands in --help, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _help_line(name)) for name in self.list_commands(ctx)])

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Make the context as click does, which prints --help and --version."""
        with output_failures():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand with the exit codes of `EXIT_CODES`. Blocks as long as it does."""
        _escape_what_cannot_be_written()
        try:
            with output_failures():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)  # ends the line with the terminal's ^C
            raise click.exceptions.Exit(INTERRUPTED_EXIT_CODE) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            raise failure(error) from error


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Return the commands of other packages by name. None of them replaces a command of this one."""
    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {entry.name: entry for entry in found if entry.name not in COMMANDS}


def _help_line(name: str) -> str:
    if name in COMMANDS:
        return COMMANDS[name][1]
    return LAB_COMMANDS.get(name) or f"Added by the package {_entry_points()[name].module.partition('.')[0]}."


def _escape_what_cannot_be_written() -> None:
    """Escape characters that the output cannot encode: file names need not be text, and outputs need not be Unicode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def failure(error: Exception) -> Failure:
    """Return the failure for `error`: the only place that decides between exit codes 2 and 3.

    Users can fix errors that HiCache raises deliberately, errors of the system and missing memory. All other errors,
    and broken invariants, are bugs: their traceback is written to a private file, or to stderr if that fails.
    """
    if isinstance(error, HiCacheError) and not isinstance(error, InvariantError):
        return Failure(str(error))
    if isinstance(error, OSError):
        names = [printable(repr(name)) for name in (error.filename, error.filename2) if name is not None]
        return Failure(": ".join([*names, error.strerror or str(error) or type(error).__name__]))
    if isinstance(error, MemoryError):
        return Failure("not enough memory; configure less, or end other programs")
    what = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    return Bug(f"this is a bug in HiCache: {what}; please report it with the traceback {_keep_traceback(error)}")


def _keep_traceback(error: Exception) -> str:
    """Write the traceback to a new file; return its location in words."""
    lines = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile("w", prefix="hicache-traceback-", suffix=".txt", delete=False,
                                         encoding="utf-8", errors="backslashreplace") as file:
            file.write(lines)
    except OSError:
        click.echo(printable(lines), err=True)
        return "above"
    return f"in {file.name}"


@contextlib.contextmanager
def output_failures() -> Iterator[None]:
    """Turn errors of standard output into a Failure, and an output closed by its reader into a silent Exit. Other code
    translates such errors itself: storage raises a BackendError."""
    if sys.stdout is None:
        raise Failure("standard output is closed; redirect it to a file or a terminal")
    try:
        yield
    except HiCacheError:
        raise
    except OSError as error:
        if error.errno not in _OUTPUT_ERRNOS or error.filename is not None:
            raise
        _abandon_stdout()
        if error.errno == errno.EPIPE:  # `hicache ls | head`: the reader has ended
            raise click.exceptions.Exit(BROKEN_PIPE_EXIT_CODE) from error
        raise Failure(f"cannot write to standard output: {error.strerror}") from error


def _abandon_stdout() -> None:
    """Discard the buffer of stdout, so that the interpreter does not fail on it at its exit."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


EXIT_CODES = """\b
Exit codes:
  0    done
  1    done, and a check found something: damage, different tokens, wrong bytes,
       an invalid configuration, pages skipped by a copy; or the answer was no
  2    not done: usage, configuration, or an error of the system
  3    not done: a bug in HiCache; the message names the file with its traceback
  130  ended by Ctrl-C; 143 by SIGTERM
  141  the reader of the output has ended, as with `| head`; without a message
"""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(__version__, prog_name="hicache")
def main() -> None:
    """A KV cache for LLM engines in three tiers: device memory, host memory and storage."""

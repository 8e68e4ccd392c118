"""The `hicache` command: version, help, and the way from a subcommand's name to its module."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
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

# name: where the command is, and its line in --help. Kept here, so that --help imports none of them.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "config": ("hicache.cli.config:config", "Write a ready configuration, check one, or list what can be configured."),
    "copy": ("hicache.cli.storage:copy", "Copy stored pages into another store."),
    "ctl": ("hicache.cli.ctl:ctl", "Ask or change a running daemon, or the cache inside an engine."),
    "demo": ("hicache.cli.demo:demo", "Serve a small model with and without the cache, and compare."),
    "dev-up": ("hicache.cli.dev_up:dev_up", "Run a real storage server for development until Ctrl-C."),
    "inspect": ("hicache.cli.verify:inspect", "Show the header of one stored page."),
    "ls": ("hicache.cli.storage_view:ls", "List what is in a store, by namespace."),
    "purge": ("hicache.cli.storage:purge", "Remove stored pages, all or by namespace, weights epoch and age."),
    "replay": ("hicache.cli.replay:replay", "Replay a request trace through the cache and check every byte."),
    "serve": ("hicache.cli.serve:serve", "Run the storage daemon of this node."),
    "stat": ("hicache.cli.storage_view:stat", "Sum up a store: pages, bytes, ages, chains."),
    "trace": ("hicache.cli.trace:trace", "Make up a request trace, or say what is in one."),
    "trim": ("hicache.cli.storage:trim", "Shrink a store to a size, tails of old chains first."),
    "verify": ("hicache.cli.verify:verify", "Read every page of a store and report damage."),
}
# The extra that brings what a command needs beyond the package's own dependencies.
EXTRAS: Mapping[str, str] = {"demo": "engine", "replay": "torch", "serve": "daemon"}
FOUND_EXIT_CODE = 1  # what a check has found, and an answer of "no"
USAGE_EXIT_CODE = 2
BUG_EXIT_CODE = 3
INTERRUPTED_EXIT_CODE = 130  # 128 and the number of SIGINT, as shells have it
BROKEN_PIPE_EXIT_CODE = 141  # the same of SIGPIPE
# What writing to standard output may fail with: closed, a full disk, over a limit or quota, a broken device.
_OUTPUT_ERRNOS = frozenset({errno.EPIPE, errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class Failure(click.ClickException):
    """An error the user can do something about: shown on stderr without a traceback."""

    exit_code = USAGE_EXIT_CODE

    def show(self, file: Any = None) -> None:
        """One line `hicache: ...` on stderr (a configuration with several problems: one line for each)."""
        click.echo(f"hicache: {printable(self.format_message())}", file=file, err=file is None)


class Bug(Failure):
    """An error that HiCache does not expect. The message says where its traceback is."""

    exit_code = BUG_EXIT_CODE


def printable(text: str) -> str:
    """`text` with escapes for all that a terminal would obey, or an output with an encoding refuse; lines stay lines.
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class LazyGroup(click.Group):
    """A group whose subcommands are named in `COMMANDS` and imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None if there is none of that name. Imports its module.

        Raises Failure if a package that it needs is not installed.
        """
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == __package__.partition(".")[0]:
                raise  # a module of ours: no installation helps
            hint = install_hint(EXTRAS[cmd_name]) if cmd_name in EXTRAS else f"install {error.name}"
            raise Failure(f"{cmd_name} needs the package {error.name}; {hint}") from error
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The command that `args` begins with. Raises UsageError that names the one that may be meant."""
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        if near and args[0] not in COMMANDS:
            ctx.fail(f"No such command {args[0]!r}; did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in --help, from `COMMANDS` alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """As click has it; --help and --version print here already."""
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


def _escape_what_cannot_be_written() -> None:
    """Names of files need not be text, nor need an output take all of Unicode: that is no reason to end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def failure(error: Exception) -> Failure:
    """What ends the command after `error`: the one place that decides between exit codes 2 and 3.

    A user can do something about errors that HiCache raises on purpose, about those of the system and about memory.
    All others, and broken invariants, are bugs: their traceback goes into a private file, or to stderr without one.
    """
    if isinstance(error, HiCacheError) and not isinstance(error, InvariantError):
        return Failure(str(error))
    if isinstance(error, OSError):
        names = [printable(repr(name)) for name in (error.filename, error.filename2) if name is not None]
        return Failure(": ".join([*names, error.strerror or str(error) or type(error).__name__]))
    if isinstance(error, MemoryError):
        return Failure("there is not enough memory; ask for less, or end other programs")
    what = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    return Bug(f"this is a bug in HiCache: {what}; please report it with the traceback {_keep_traceback(error)}")


def _keep_traceback(error: Exception) -> str:
    """Write the traceback into a file of its own; where that is, in words."""
    lines = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile("w", prefix="hicache-traceback-", suffix=".txt", delete=False,
                                         encoding="utf-8", errors="backslashreplace") as file:  # fmt: skip
            file.write(lines)
    except OSError:
        click.echo(printable(lines), err=True)
        return "above"
    return f"in {file.name}"


@contextlib.contextmanager
def output_failures() -> Iterator[None]:
    """Turn output that cannot be written into a Failure, and output whose reader has gone into a silent Exit. All else
    that fails with such an error is translated where it happens: storage raises a BackendError."""
    if sys.stdout is None:
        raise Failure("there is nowhere to write to: standard output is closed")
    try:
        yield
    except HiCacheError:
        raise
    except OSError as error:
        if error.errno not in _OUTPUT_ERRNOS or error.filename is not None:
            raise
        _abandon_stdout()
        if error.errno == errno.EPIPE:  # `hicache ls | head`: the reader has what it wanted
            raise click.exceptions.Exit(BROKEN_PIPE_EXIT_CODE) from error
        raise Failure(f"cannot write to standard output: {error.strerror}") from error


def _abandon_stdout() -> None:
    """Let what is still in the buffer of stdout go nowhere, so that the interpreter does not fail on it at its exit."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


EXIT_CODES = """\b
Exit codes:
  0    done, and nothing is wrong
  1    done, and a check found something: damage, other tokens, wrong bytes, a
       refused configuration, pages left out of a copy; or the answer was no
  2    not done: usage, configuration, or something that the system refuses
  3    not done: a bug in HiCache; the message says where its traceback is
  130  ended by Ctrl-C; 143 by SIGTERM
  141  the reader of the output has gone, as with `| head`; nothing is said
"""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(__version__, prog_name="hicache")
def main() -> None:
    """A KV cache for LLM engines in three tiers: device memory, host memory and storage."""

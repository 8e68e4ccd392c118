"""`hicache trace`: generates or records a request trace, or describes one."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import click

from hicache.cli.arguments import FILE, is_dash, read_dash
from hicache.cli.stores import JSON, print_json
from hicache.config.files import open_regular
from hicache.errors import InvalidInput
from hicache.units import counted

from ..replay.job import SYNTHETIC_REQUESTS
from ..traces.record import BLOCK_TOKENS_DEFAULT, LOG_LINE_BYTES_MAX, Recorder
from ..traces.request import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN, TraceRequest
from ..traces.synthetic import SERVICES, synthetic_trace
from ..traces.trace import REQUESTS_MAX, as_line, read_trace, trace_format, write_trace
from .arguments import SEED_MAX
from .replay_view import facts_lines, trace_facts


@click.group()
def trace() -> None:
    """Generate or record a request trace, or describe one."""


@trace.command(short_help="Write a synthetic trace to a file.")
@click.argument("file", type=FILE)
@click.option(
    "--requests", type=click.IntRange(1, REQUESTS_MAX), default=SYNTHETIC_REQUESTS, show_default=True, metavar="N"
)
@click.option(
    "--seed", type=click.IntRange(0, SEED_MAX), default=0, show_default=True, help="Seed of the random numbers."
)
@click.option(
    "--service", type=click.Choice(list(SERVICES)), default="mixed", show_default=True,
    help="The users: as in a recorded trace of conversations or of coding agents, or a mix.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def generate(file: Path, requests: int, seed: int, service: str, force: bool) -> None:
    """Write a synthetic trace to FILE (- for standard output). The mix has chats and agents with shared system prompts,
    and questions about documents."""
    _write(file, synthetic_trace(requests, seed, service), force)


@trace.command(short_help="Convert an engine's request log to a trace without prompts.")
@click.argument("log", type=FILE, default="-")
@click.option("-o", "--output", type=FILE, required=True, help="The trace to write; - is standard output.")
@click.option(
    "--block-tokens", type=click.IntRange(BLOCK_TOKENS_MIN, BLOCK_TOKENS_MAX), default=BLOCK_TOKENS_DEFAULT,
    show_default=True, metavar="N", help="Tokens of a block: prompts are compared in whole blocks.",
)
@click.option("--force", is_flag=True, help="Replace the trace if it exists.")
def record(log: Path, output: Path, block_tokens: int, force: bool) -> None:
    """Convert LOG (- for standard input), the request log of vLLM or SGLang, to a trace. The trace has numbers for
    blocks of prompts, and neither text nor tokens nor hashes.

    Ctrl-C or SIGTERM ends the recording and writes the trace so far.
    """
    if not is_dash(log) and log.exists() and output.exists() and log.samefile(output):
        raise InvalidInput(f"trace {output}: is the log itself, which would be lost; choose another --output")
    recorder = Recorder(block_tokens)
    with _opened(log) as file, until_signal(lambda: file.readline(LOG_LINE_BYTES_MAX)) as pieces:
        _write(output, recorder.requests(_lines(pieces, log)), force)
    if recorder.without_output:
        click.echo(f"{counted(recorder.without_output, 'request')} without a logged output, and so with output_length "
                   "0; vLLM logs outputs with --enable-log-outputs", err=True)
    for reason, count in recorder.left_out.items():
        click.echo(f"{counted(count, 'request')} left out: {reason}", err=True)
    if recorder.other_lines:
        click.echo(f"{counted(recorder.other_lines, 'other line')} skipped", err=True)


@contextlib.contextmanager
def _opened(log: Path) -> Iterator[BinaryIO]:
    if is_dash(log):
        yield sys.stdin.buffer
        return
    try:
        file = open_regular(log)
    except OSError as error:
        raise _unreadable(log, error) from error
    with file:
        yield file


def _unreadable(log: Path, error: OSError) -> InvalidInput:
    return InvalidInput(f"log {log}: cannot be read: {error.strerror}; check the path")


def _lines(pieces: Iterable[bytes], log: Path) -> Iterator[bytes]:
    """Yield the lines of a log from pieces of at most `LOG_LINE_BYTES_MAX`. A longer line becomes an empty one."""
    is_within = False
    try:
        for piece in pieces:
            is_end = piece.endswith(b"\n")
            if not is_within:
                yield piece if is_end or len(piece) < LOG_LINE_BYTES_MAX else b""
            is_within = not is_end
    except OSError as error:
        raise _unreadable(log, error) from error


def _write(file: Path, requests: Iterable[TraceRequest], force: bool) -> None:
    if is_dash(file):
        for request in requests:
            click.echo(as_line(request))
        return
    if file.exists() and not force:
        raise InvalidInput(f"trace {file}: already exists; replace it with --force")
    count = write_trace(file, requests)
    click.echo(f"{counted(count, 'request')} written to {file}")


@trace.command(short_help="Check a trace, and show how much can be reused.")
@click.argument("file", type=FILE)
@click.option("--requests", type=click.IntRange(1, REQUESTS_MAX), metavar="N", help="Only the first N requests.")
@JSON
def show(file: Path, requests: int | None, as_json: bool) -> None:
    """Check FILE (- for standard input) and print how long its prompts are and how much of them a cache could reuse."""
    with read_dash(file) as path:
        assert path is not None
        facts = trace_facts(trace_format(path), read_trace(path, requests))
    if as_json:
        print_json(facts)
    else:
        click.echo("\n".join(facts_lines(facts)))


@contextlib.contextmanager
def until_signal(read: Callable[[], bytes]) -> Iterator[Iterator[bytes]]:
    """Yield an iterator over the results of `read` up to the first empty one, or to the first SIGINT or SIGTERM.

    The signal ends a blocking `read`, but does not interrupt the code that uses the results. The second one ends the
    process as usual.
    """
    is_reading = is_stopped = False
    with contextlib.ExitStack() as handlers:

        def stop(_: int, __: object) -> None:
            nonlocal is_stopped
            is_stopped = True
            handlers.close()
            if is_reading:
                raise KeyboardInterrupt

        def results() -> Iterator[bytes]:
            nonlocal is_reading
            with contextlib.suppress(KeyboardInterrupt):
                while not is_stopped:
                    is_reading = True
                    try:
                        result = read()
                    finally:
                        is_reading = False
                    if not result:
                        return
                    yield result

        for number in (signal.SIGINT, signal.SIGTERM):
            handlers.callback(signal.signal, number, signal.signal(number, stop))
        yield results()

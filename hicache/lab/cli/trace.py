"""`hicache trace`: generates a request trace, or describes one."""

from __future__ import annotations

from pathlib import Path

import click

from ...cli.arguments import FILE, SEED_MAX, is_dash, read_dash
from ...cli.stores import JSON, print_json
from ...errors import InvalidInput
from ...units import counted
from ..replay.job import SYNTHETIC_REQUESTS
from ..traces.synthetic import synthetic_trace
from ..traces.trace import REQUESTS_MAX, as_line, read_trace, write_trace
from .replay_view import facts_lines, trace_facts


@click.group()
def trace() -> None:
    """Generate a request trace, or describe one."""


@trace.command(short_help="Write a synthetic trace to a file.")
@click.argument("file", type=FILE)
@click.option(
    "--requests", type=click.IntRange(1, REQUESTS_MAX), default=SYNTHETIC_REQUESTS, show_default=True, metavar="N"
)
@click.option(
    "--seed", type=click.IntRange(0, SEED_MAX), default=0, show_default=True, help="Seed of the random numbers."
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def generate(file: Path, requests: int, seed: int, force: bool) -> None:
    """Write a synthetic trace to FILE (- for standard output): chats and agents with shared system prompts, and
    questions about documents."""
    if is_dash(file):
        for request in synthetic_trace(requests, seed):
            click.echo(as_line(request))
        return
    if file.exists() and not force:
        raise InvalidInput(f"trace {file}: already exists; replace it with --force")
    count = write_trace(file, synthetic_trace(requests, seed))
    click.echo(f"{counted(count, 'request')} written to {file}")


@trace.command(short_help="Check a trace, and show how much can be reused.")
@click.argument("file", type=FILE)
@click.option("--requests", type=click.IntRange(1, REQUESTS_MAX), metavar="N", help="Only the first N requests.")
@JSON
def show(file: Path, requests: int | None, as_json: bool) -> None:
    """Check FILE (- for standard input) and print how long its prompts are and how much of them a cache could reuse."""
    with read_dash(file) as path:
        assert path is not None
        facts = trace_facts(read_trace(path, requests))
    if as_json:
        print_json(facts)
    else:
        click.echo("\n".join(facts_lines(facts)))

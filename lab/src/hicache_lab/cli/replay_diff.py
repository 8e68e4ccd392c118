"""`hicache replay diff`: two reports of replays side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from hicache.cli.arguments import FILE
from hicache.cli.main import Failure
from hicache.cli.tables import table
from hicache.config.files import open_regular

from ..replay.report import WAY_NAMES
from ..replay.result import ReplayResult, flat
from ..tier_names import TIER_NAMES


@click.command()
@click.argument("first", type=FILE)
@click.argument("second", type=FILE)
def diff(first: Path, second: Path) -> None:
    """Compare two reports of `hicache replay --json`: the entries of their setups that differ, and all figures."""
    click.echo("\n".join(diff_lines(_read(first), _read(second))))


def diff_lines(first: ReplayResult, second: ReplayResult) -> Iterator[str]:
    """Yield a table of two results: the entries of the setup that differ, then the figures and their change."""
    setups = [flat(asdict(result.setup)) for result in (first, second)]
    rows = []
    for name in dict.fromkeys([*setups[0], *setups[1]]):
        found = [str(setup.get(name, "")) for setup in setups]
        if found[0] != found[1]:
            rows.append((name, *found, ""))
    figures = [_figures(result) for result in (first, second)]
    for name in dict.fromkeys([*figures[0], *figures[1]]):
        before, after = (found.get(name, 0) for found in figures)
        rows.append((name, _shown(before), _shown(after), _change(before, after)))
    yield from table(("", "first>", "second>", "change>"), rows)


def _figures(result: ReplayResult) -> dict[str, float]:
    first = result.first_token
    return {
        "requests": result.requests.ended,
        "seconds": result.elapsed_s,
        "prompt tokens": result.tokens.prompt,
        **{f"tokens from {name}": result.tokens.hits.get(tier, 0) for tier, name in TIER_NAMES.items()},
        "tokens computed": result.tokens.computed,
        **{f"computed: {name.replace('.', ' ')}": count for name, count in result.tokens.reasons.items()},
        "first token, mean, ms": first.total_us / max(1, first.count) / 1000,
        "first token, p50, ms": first.p50_us / 1000,
        "first token, p99, ms": first.p99_us / 1000,
        **{f"bytes {name}": result.moved_bytes.get(way, 0) for way, name in WAY_NAMES.items()},
        **{f"pages evicted from {name}": result.evicted_pages.get(tier, 0) for tier, name in TIER_NAMES.items()},
        "preemptions": result.requests.preempted,
        "wrong bytes": result.wrong_bytes,
    }


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _change(before: float, after: float) -> str:
    if before == after:
        return "="
    return f"{100 * (after - before) / before:+.2f} %" if before else "new"


def _read(path: Path) -> ReplayResult:
    try:
        with open_regular(path) as file:
            return ReplayResult.from_json(file.read())
    except OSError as error:
        raise Failure(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Failure(f"{path}: is not a report of `hicache replay --json` of this version; make it again") from error

"""The output of `hicache plan`: all figures on one screen of 80 columns and 50 lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.console import Console

from hicache.cli.tables import table
from hicache.units import counted, format_size

from ..plan import Plan
from ..plan.tables import (
    break_even,
    format_duration,
    left_out,
    policy_table,
    routing_table,
    service_table,
    tier_table,
    unbroken,
)

LINES_MAX = 50
# Longer lines of sentences are hard to read.
_TEXT_WIDTH_MAX = 100


def print_plan(console: Console, plan: Plan) -> None:
    """Print the plan."""
    console.print("\n".join(plan_lines(plan, console.width)), highlight=False, markup=False, soft_wrap=True)


def plan_lines(plan: Plan, width: int) -> list[str]:
    """Return the lines of the plan for a terminal of this width: titles, tables, and sentences. Sentences that do not
    fit on the screen with a line of their own become one paragraph."""
    lines = [line for title in titles(plan) for line in textwrap.wrap(title, width)]
    for columns, rows in (tier_table(plan), service_table(plan), policy_table(plan), routing_table(plan)):
        if rows:
            lines += ["", *table(columns, rows, width=width)]
    notes = [break_even(plan), *(f"Left out: {missing}." for missing in left_out(plan))]
    lines += ["", *(line for note in notes if note is not None for line in _wrapped(note, width))]
    unknowns = _wrapped(f"Not known: {' '.join(plan.unknowns)}", width)
    advice = [line for sentence in plan.recommendation for line in _wrapped(sentence, width, "- ", "  ")]
    if len(lines) + len(advice) + len(unknowns) > LINES_MAX:
        advice = _wrapped(f"Recommendation: {' '.join(plan.recommendation)}", width)
    return [*lines, *advice, *unknowns]


def _wrapped(text: str, width: int, first: str = "", others: str = "") -> list[str]:
    lines = textwrap.wrap(
        unbroken(text), min(width, _TEXT_WIDTH_MAX), initial_indent=first, subsequent_indent=others
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def titles(plan: Plan) -> Iterator[str]:
    """Yield the lines that say what the plan is of."""
    setup = plan.setup
    duration = "at one time" if setup.duration_s is None else f"in {format_duration(setup.duration_s)}"
    yield (f"{setup.trace}: {counted(setup.requests, 'request')} {duration}, "
           f"{counted(plan.traffic.prompt_tokens, 'prompt token')}")
    nodes = f", {setup.nodes} nodes, routing {setup.routing}" if setup.nodes > 1 else ""
    yield f"{setup.model}: {format_size(setup.token_bytes)} per token, pages of {setup.page_size} tokens{nodes}"

"""The tables of a plan, for the screen and for the page. A column that has no figures is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from hicache.units import format_share, format_size

from ..tier_names import TIER_NAMES
from .curves import ENOUGH_SHARE
from .result import SERVICES, Plan, Size
from .wear import DAY_S

# Names of columns, those with `>` aligned to the right, and rows.
Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]
# A tier with this share of what a larger one finds is enough.
ENOUGH = f"{100 * ENOUGH_SHARE:.0f} %"
# A year as in the plan.
_YEAR_S = 365 * DAY_S


def tier_table(plan: Plan) -> Table:
    """Return size, found tokens and hits of each tier, the worth of one more GiB, and the size that is enough."""
    prompt, rows = plan.traffic.prompt_tokens, []
    for tier, name in TIER_NAMES.items():
        use, more, enough = plan.tiers[tier], plan.more_gib[tier], plan.curves[tier].enough
        rows.append((
            name, format_tier_size(plan.setup.sizes[tier]), format_share(use.found_tokens, prompt),
            format_share(use.hit_tokens, prompt), f"{more.tier_tokens:+,}",
            format_duration(more.prefill_s_per_day), "" if enough is None else format_size(enough.size.bytes),
        ))
    return _filled(("tier", "size>", "found>", "hits>", "next GiB finds>", "saves a day>", f"{ENOUGH} with>"), rows)


def format_tier_size(size: Size | None) -> str:
    """Return the size of a tier for people."""
    if size is None:
        return "unlimited"
    return format_size(size.bytes) if size.bytes else "none"


def service_table(plan: Plan) -> Table:
    """Return the times to first token by tiers."""
    rows = []
    for name, label in SERVICES.items():
        one = plan.services[name]
        times = (one.ttft_mean_s, one.ttft_p50_s, one.ttft_p99_s, one.prefill_s)
        hits = format_share(one.hit_tokens, plan.traffic.prompt_tokens)
        rows.append((label, hits, *(format_duration(time) for time in times)))
    return _filled(("with", "hits>", "first token, mean>", "p50>", "p99>", "computing>"), rows)


def policy_table(plan: Plan) -> Table:
    """Return the write policies that are modelled, none without a store."""
    rows = [
        (
            name, format_share(sum(policy.hit_tokens.values()), plan.traffic.prompt_tokens),
            format_size(policy.written_bytes),
            "" if policy.written_bytes_per_day is None else format_size(policy.written_bytes_per_day),
            "" if policy.years is None else format_duration(policy.years * _YEAR_S),
        )
        for name, policy in plan.policies.items() if policy is not None
    ]
    return _filled(("write policy", "hits>", "written>", "per day>", "worn in>"), rows)


def routing_table(plan: Plan) -> Table:
    """Return the routings of several nodes, none for one node. The best routings have a star."""
    fleet, prompt = plan.fleet, plan.traffic.prompt_tokens
    if fleet is None:
        return (), ()
    rows = []
    for name, one in fleet.routings.items():
        found = {tier: use.found_tokens for tier, use in one.tiers.items()}
        equal = "no size" if one.equal_storage is None else format_size(one.equal_storage.bytes)
        rows.append((
            f"{name} *" if name in fleet.equal else name, format_share(sum(found.values()), prompt),
            format_share(found["device"] + found["host"], prompt), f"{100 * one.busiest_share:.1f} %",
            format_duration(one.services["all"].ttft_mean_s), equal,
        ))
    return _filled(("routing", "found>", "on the node>", "busiest node>", "first token>", "L3 to match best>"), rows)


def left_out(plan: Plan) -> Iterator[str]:
    """Yield what the plan has no figures for, each with the option that gives them."""
    if plan.services["none"].ttft_mean_s is None:
        yield "times and break-even need --prefill-rate"
    if plan.setup.endurance_bytes is None and plan.setup.sizes["storage"] != Size(tokens=0, bytes=0):
        yield "years until L3 is worn need --endurance"
    if plan.setup.duration_s is None:
        yield "figures per day need a trace with different timestamps"


def break_even(plan: Plan) -> str | None:
    """Return the break-even of storage in words."""
    point = plan.break_even
    if point is None:
        return None
    if point.read_bytes_per_s is None:
        return "break-even of L3: none, copies from host memory are slower than computing"
    reads = plan.setup.speeds.storage.read_bytes_per_s
    pays = "never pays" if point.prefix_tokens is None else f"pays from {point.prefix_tokens:,} tokens on"
    return f"idle break-even of L3: {point.read_bytes_per_s / 1e9:.3g} GB/s; it reads {reads / 1e9:.3g} GB/s, {pays}"


def format_duration(seconds: float | None) -> str:
    """Return a time for people, in the largest unit in which it is at least one; empty for None."""
    if seconds is None:
        return ""
    for unit, length_s in (("years", _YEAR_S), ("days", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if abs(seconds) >= length_s:
            return f"{seconds / length_s:,.1f} {unit}"
    if not seconds:
        return "0 s"
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1000 * seconds:.3g} ms"


def unbroken(text: str) -> str:
    """Return text with a no-break space after each number, which keeps the number and its unit on one line."""
    return re.sub(r"(?<=\d) ", "\N{NO-BREAK SPACE}", text)


def _filled(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]

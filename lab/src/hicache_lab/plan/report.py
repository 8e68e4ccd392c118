"""The report of a plan as an HTML page without scripts or external resources, and its curves as CSV."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from hicache.units import exact_size, format_share, format_size

from ..pages import captioned, html_page, html_table, html_tiles
from ..plots import Axis, Curve, Mark, bars, linear_axis, lines
from ..tier_names import TIER_NAMES
from .result import SAME_SHARE, SERVICES, Plan
from .tables import (
    ENOUGH,
    Table,
    break_even,
    format_duration,
    format_tier_size,
    left_out,
    policy_table,
    routing_table,
    service_table,
    tier_table,
    unbroken,
)

# Ticks of sizes are powers of this number: about seven for a curve over four powers of ten. More do not fit.
_TICK_FACTOR = 4
_TICKS_MAX = 8


def html_report(plan: Plan) -> str:
    """Return the whole page."""
    title = f"Plan for {plan.setup.trace}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_subtitle(plan))}</p>',
        _sentences(plan.recommendation),
        _tiles(plan),
        "<h2>Sources of prompt tokens</h2>",
        _sources(plan),
        "<h2>Tiers</h2>",
        "<p>A tier <em>finds</em> pages that it has and no faster tier has. They are <em>hits</em> if fetching them "
        "pays with an idle device. Shares are of all prompt tokens.</p>",
        _table(tier_table(plan)),
        *(_curve(plan, tier, colour) for colour, tier in enumerate(TIER_NAMES)),
        "<h2>Time to first token</h2>",
        "<p>Without waiting in a queue; copies do not overlap with computing.</p>",
        _services(plan),
        *_storage(plan),
        *_routings(plan),
        "<h2>Not known</h2>",
        _sentences((*plan.unknowns, *(f"Left out: {missing}." for missing in left_out(plan)))),
        "<h2>Setup</h2>",
        html_table(("", ""), list(_setup(plan))),
    ]
    return html_page(title, parts)


def csv_report(plan: Plan) -> str:
    """Return the curves as CSV: a row for each tier and size."""
    rows = [
        f"{tier},{point.size.bytes},{point.size.tokens},{point.found_tokens}"
        for tier, curve in plan.curves.items() for point in curve.points
    ]
    return "\n".join(["tier,size_bytes,size_tokens,found_tokens", *rows]) + "\n"


def _subtitle(plan: Plan) -> str:
    setup = plan.setup
    duration = "" if setup.duration_s is None else f" in {format_duration(setup.duration_s)}"
    nodes = f"{setup.nodes} nodes, routing {setup.routing}" if setup.nodes > 1 else "one node"
    return f"{setup.requests:,} requests{duration}; model {setup.model}, {nodes}"


def _sentences(sentences: tuple[str, ...]) -> str:
    return "<ul>" + "".join(f"<li>{escape(unbroken(sentence))}</li>" for sentence in sentences) + "</ul>"


def _tiles(plan: Plan) -> str:
    prompt, all_, none = plan.traffic.prompt_tokens, plan.services["all"], plan.services["none"]
    tiles = [
        ("", f"{prompt / 1e6:,.2f} M", "prompt tokens"),
        ("", format_share(plan.traffic.reusable_tokens, prompt), "can be reused"),
        ("", format_share(all_.hit_tokens, prompt), "are hits of the tiers"),
    ]
    if none.ttft_mean_s is not None and all_.prefill_s is not None and none.prefill_s:
        tiles += [
            ("", format_duration(all_.ttft_mean_s), f"mean time to first token; {format_duration(none.ttft_mean_s)} "
                                                    "without a cache"),
            ("", f"{100 * (1 - all_.prefill_s / none.prefill_s):.1f} %", "of computing saved"),
        ]
    return html_tiles(tiles)


def _sources(plan: Plan) -> str:
    traffic = plan.traffic
    parts = {f"hits of {name}": plan.tiers[tier].hit_tokens for tier, name in TIER_NAMES.items()}
    parts["reusable, computed"] = traffic.reusable_tokens - sum(parts.values())
    parts["not reusable"] = traffic.prompt_tokens - traffic.reusable_tokens
    rows = [(name, float(tokens), format_share(tokens, traffic.prompt_tokens)) for name, tokens in parts.items()]
    title = "Prompt tokens by source"
    return captioned(title, bars(rows, colour=0, title=title))


def _curve(plan: Plan, tier: str, colour: int) -> str:
    """Return the figure of one tier: the share of prompt tokens that it finds, over its size."""
    curve, given, prompt = plan.curves[tier], plan.setup.sizes[tier], plan.traffic.prompt_tokens
    where = "on each node" if plan.setup.nodes > 1 and tier != "storage" else ""
    title = f"{TIER_NAMES[tier]}: prompt tokens found, over its size {where}".rstrip()
    named = [("bend", point.size, point.found_tokens) for point in curve.bends]
    if curve.enough is not None:
        named.append((f"{ENOUGH} of the most", curve.enough.size, curve.enough.found_tokens))
    if given is not None and given.bytes:
        named.append(("given", given, plan.tiers[tier].found_tokens))
    marks = [
        Mark(size.bytes, 100 * found / prompt, f"{name} {format_size(size.bytes)}: {format_share(found, prompt)}")
        for name, size, found in named
    ]
    sizes = [point.size.bytes for point in curve.points]
    shares = [100 * point.found_tokens / prompt for point in curve.points]
    x = _size_axis(min([*sizes, *(mark.x for mark in marks)]), max([*sizes, *(mark.x for mark in marks)]))
    y = linear_axis(max(shares), "share of prompt tokens", lambda percent: f"{percent:g} %")
    plot = lines(x, y, sizes, [Curve(title, shares, colour)], title=title, marks=marks)
    return captioned(title, plot)


def _size_axis(low: float, high: float) -> Axis:
    """Return a logarithmic axis of sizes with binary units."""
    powers = [power for power in (_TICK_FACTOR**k for k in range(26)) if low <= power <= high]
    shown = powers[:: -(-len(powers) // _TICKS_MAX) or 1]
    return Axis(low, high, [(power, format_size(power).replace(".0 ", " ")) for power in shown], "size", log=True)


def _services(plan: Plan) -> str:
    title = "Mean time to first token, by tiers"
    times = {label: plan.services[name].ttft_mean_s for name, label in SERVICES.items()}
    rows = [(label, time, format_duration(time)) for label, time in times.items() if time is not None]
    figure = captioned(title, bars(rows, colour=1, title=title)) if rows else ""
    return figure + _table(service_table(plan))


def _storage(plan: Plan) -> Iterator[str]:
    """Yield the section on storage, nothing without a store."""
    point, table = break_even(plan), policy_table(plan)
    if point is None and not table[1]:
        return
    yield "<h2>Storage</h2>"
    if point is not None:
        yield f"<p>{escape(point[0].upper() + point[1:])}.</p>"
    title = "Bytes written to L3, by write policy"
    rows = [(name, float(policy.written_bytes), format_size(policy.written_bytes))
            for name, policy in plan.policies.items() if policy is not None]
    if rows:
        yield captioned(title, bars(rows, colour=2, title=title)) + _table(table)


def _routings(plan: Plan) -> Iterator[str]:
    """Yield the section on routing, nothing for one node."""
    if plan.fleet is None:
        return
    title = "Prompt tokens found on the node that serves the request, by routing"
    prompt, rows = plan.traffic.prompt_tokens, []
    for name, one in plan.fleet.routings.items():
        on_node = one.tiers["device"].found_tokens + one.tiers["host"].found_tokens
        rows.append((name, float(on_node), format_share(on_node, prompt)))
    yield "<h2>Routing</h2>"
    yield captioned(title, bars(rows, colour=0, title=title)) + _table(routing_table(plan))
    yield '<p class="soft">The star marks the routings that find the most, and of these the most on the node. '
    yield f"Differences below {100 * SAME_SHARE:.0f} % of the found tokens do not count.</p>"


def _setup(plan: Plan) -> Iterator[tuple[str, str]]:
    setup = plan.setup
    compute, host, store = setup.speeds.compute, setup.speeds.host_bytes_per_s, setup.speeds.storage
    yield "model", f"{setup.model}, {exact_size(setup.token_bytes)} per token"
    yield "requests longer than L1, left out", f"{plan.traffic.too_long:,}, {plan.traffic.too_long_tokens:,} tokens"
    yield "relative prices of a GiB", ", ".join(f"{tier} {price:g}" for tier, price in setup.prices.items())
    yield "tokens per page", f"{setup.page_size}"
    for tier, size in setup.sizes.items():
        yield TIER_NAMES[tier], f"{format_tier_size(size)}{'' if size is None else f', {size.tokens:,} tokens'}"
    yield "all distinct pages of the trace", format_size(plan.traffic.footprint.bytes)
    yield "nodes", f"{setup.nodes}, routing {setup.routing}" if setup.nodes > 1 else "1"
    for name, rate in (("tokens", compute.tokens_per_s), ("token pairs", compute.pairs_per_s)):
        yield f"{name} computed per second", "not given" if rate is None else f"{rate:,.0f}"
    yield "copies between L1 and L2", f"{host / 1e9:g} GB/s in each direction"
    yield "store", (f"{store.read_bytes_per_s / 1e9:g} GB/s read, {store.fixed_s * 1e6:,.0f} us per page, "
                    f"{store.parallel} in parallel")
    endurance = setup.endurance_bytes
    yield "endurance of L3", "not given" if endurance is None else f"{endurance / 1e15:g} PB"
    yield "write_through_selective writes after", f"{setup.selective_hits} requests"


def _table(table: Table) -> str:
    columns, rows = table
    return html_table([name.removesuffix(">") for name in columns], rows)

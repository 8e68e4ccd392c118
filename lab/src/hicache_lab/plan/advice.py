"""The recommendation of a plan: plain sentences by clear rules, each with the numbers that it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hicache.units import counted, format_share, format_size

from ..tier_names import TIER_NAMES, TIERS
from .curves import ENOUGH_SHARE
from .result import SAME_SHARE, Fleet, Plan, Policy
from .tables import format_duration

# Disks are replaced after about as many years.
_WEAR_YEARS = 5.0
# Less computing per day than this is not worth a sentence.
_WORTH_S = 1.0

UNKNOWNS = (
    "Only the prompts of this trace are known. Other traffic, or a longer trace, reuses other pages.",
    "All tiers evict the least recently used page first, and begin empty.",
    "Times to first token are without waiting in queues, and copies do not overlap with compute.",
    "A page is in every tier as soon as it is computed: pages in flight, failures and timeouts are not modelled.",
    "Hits are those of an idle device. For requests that wait, the cache fetches more, up to all found tokens: see "
    "`hicache replay --virtual`.",
)


def recommendation(plan: Plan) -> tuple[str, ...]:
    """Return the sentences for a plan; its own field `recommendation` is ignored."""
    return tuple(_sentences(plan))


def _sentences(plan: Plan) -> Iterator[str]:
    yield from _too_long(plan)
    yield _reuse(plan)
    if plan.traffic.reusable_tokens:
        yield from _sizes(plan)
        yield from _next_gib(plan)
    yield from _service(plan)
    yield from _store(plan)
    yield from _wear(plan)
    if plan.fleet is not None:
        yield from _routing(plan, plan.fleet)


def _too_long(plan: Plan) -> Iterator[str]:
    traffic, device = plan.traffic, plan.setup.sizes["device"]
    if traffic.too_long and device is not None:
        share = format_share(traffic.too_long_tokens, traffic.prompt_tokens + traffic.too_long_tokens)
        yield (
            f"Left out: {counted(traffic.too_long, 'request')} with {traffic.too_long_tokens:,} prompt tokens ({share} "
            f"of the trace), longer than L1, which has {device.tokens:,} tokens. Use a larger L1 for them."
        )


def _reuse(plan: Plan) -> str:
    traffic = plan.traffic
    if not traffic.reusable_tokens:
        return f"None of the {traffic.prompt_tokens:,} prompt tokens can be reused: no tier is worth its memory."
    parts = ", ".join(
        f"{TIER_NAMES[tier]} {format_share(use.found_tokens, traffic.reusable_tokens)}"
        for tier, use in plan.tiers.items()
    )
    hits, found = (sum(getattr(use, name) for use in plan.tiers.values()) for name in ("hit_tokens", "found_tokens"))
    refused = "" if hits == found else "; the others are too few to fetch, or too slow for an idle device"
    return (
        f"{traffic.reusable_tokens:,} of {traffic.prompt_tokens:,} prompt tokens "
        f"({format_share(traffic.reusable_tokens, traffic.prompt_tokens)}) can be reused. Of these, the tiers have: "
        f"{parts}. {format_share(hits, traffic.reusable_tokens)} are hits{refused}."
    )


def _sizes(plan: Plan) -> Iterator[str]:
    for tier in TIERS:
        enough, given, name = plan.curves[tier].enough, plan.setup.sizes[tier], TIER_NAMES[tier]
        if enough is None:
            yield f"{name} finds nothing at any size that faster tiers lack."
            continue
        where = " per node" if plan.setup.nodes > 1 and tier != "storage" else ""
        has = "is not limited" if given is None else f"has {format_size(given.bytes)}{where}"
        bend = next(iter(plan.curves[tier].bends), None)
        at = "" if bend is None else (
            f" It finds most for its bytes at {format_size(bend.size.bytes)}: "
            f"{format_share(bend.found_tokens, plan.traffic.prompt_tokens)} of prompt tokens."
        )
        yield (
            f"{name} {has}.{at} {format_size(enough.size.bytes)} would find {100 * ENOUGH_SHARE:.0f} % of the "
            f"{plan.curves[tier].points[-1].found_tokens:,} tokens that it can add."
        )


def _next_gib(plan: Plan) -> Iterator[str]:
    saved = {tier: more.prefill_s_per_day or 0.0 for tier, more in plan.more_gib.items()}
    worth = {tier: saved[tier] / more.price for tier, more in plan.more_gib.items()}
    best = max((tier for tier in worth if saved[tier] >= _WORTH_S), key=worth.__getitem__, default=None)
    if best is not None:
        each = ", ".join(f"{TIER_NAMES[tier]} {worth[tier]:,.1f} s" for tier in worth)
        prices = ", ".join(f"{more.price:g}" for more in plan.more_gib.values())
        yield (
            f"For its price, the next GiB saves most on {TIER_NAMES[best]}: {plan.more_gib[best].saved_tokens:,} "
            f"tokens of the trace, or {saved[best]:,.0f} s of computing per day. Divided by assumed --prices of "
            f"{prices}: {each}."
        )


def _service(plan: Plan) -> Iterator[str]:
    without, device, both, all_ = (plan.services[name] for name in ("none", "device", "device_host", "all"))
    times = [each.ttft_mean_s for each in (without, device, both, all_)]
    if None in times or without.prefill_s is None or all_.prefill_s is None:
        return
    shown = [f"{time:.3f} s" for time in times if time is not None]
    load, nodes = "", counted(plan.setup.nodes, "node")
    if without.load is not None and all_.load is not None:
        load = f", {100 * all_.load:,.1f} % instead of {100 * without.load:,.1f} % of the time of {nodes}"
    yield (
        f"The mean time to first token without queues is {shown[0]} without a cache, {shown[1]} with L1, {shown[2]} "
        f"with L1 and L2, and {shown[3]} with all tiers. Computing takes {all_.prefill_s:,.0f} s instead of "
        f"{without.prefill_s:,.0f} s{load}."
    )
    if all_.load is not None and all_.load > 1:
        yield (
            "The trace asks for more computing than there is time: queues and times to first token grow to its end. It "
            f"needs at least {math.ceil(all_.load * plan.setup.nodes)} nodes."
        )


def _store(plan: Plan) -> Iterator[str]:
    point = plan.break_even
    if point is None:
        return
    reads = plan.setup.speeds.storage.read_bytes_per_s
    speed = f"{reads / 1e9:.2f} GB/s"
    if point.read_bytes_per_s is None:
        yield "No store pays: copying a page from host memory takes longer than computing it."
        return
    break_even = f"{point.read_bytes_per_s / 1e9:.2f} GB/s"
    if not point.is_above:
        wait_s = 1000 * plan.setup.token_bytes * (1 / reads - 1 / point.read_bytes_per_s)
        yield (
            f"The store reads {speed}, below the break-even of {break_even}: an idle device computes faster, so the "
            f"cache hardly reads or stores pages. It does for requests that wait: {format_duration(wait_s)} for each "
            "1,000 tokens of their hit."
        )
    elif point.prefix_tokens is None:
        yield (
            f"The store reads {speed}, above the break-even of {break_even}, but with its fixed time of "
            f"{1e6 * plan.setup.speeds.storage.fixed_s:,.0f} us per page computing is faster than reading."
        )
    else:
        yield (
            f"The store reads {speed}, above the break-even of {break_even}: fetching a prefix pays from "
            f"{point.prefix_tokens:,} tokens on."
        )


def _wear(plan: Plan) -> Iterator[str]:
    known = {name: policy for name, policy in plan.policies.items() if policy is not None}
    through = known.get("write_through")
    if through is None or through.written_bytes_per_day is None:
        return
    if plan.break_even is not None and not plan.break_even.is_above:
        return  # with an idle device, the cache stores one run in sixteen only
    daily = f"write_through writes {format_size(through.written_bytes_per_day)} per day to L3"
    if through.years is None:
        yield f"{daily}."
    elif through.years >= _WEAR_YEARS:
        yield f"{daily}, which wears its disks in {_span(through.years)}."
    else:
        yield f"{daily}, which wears its disks in only {_span(through.years)}."
        yield from _gentler(known, through)


def _span(years: float) -> str:
    return f"{years:,.1f} years" if years >= 1 else f"{years * 365:,.1f} days"


def _gentler(known: dict[str, Policy], through: Policy) -> Iterator[str]:
    for name, policy in known.items():
        if policy is not through and policy.written_bytes < through.written_bytes:
            hits, all_hits = sum(policy.hit_tokens.values()), sum(through.hit_tokens.values())
            yield (
                f"{name} writes {format_share(policy.written_bytes, through.written_bytes)} of these bytes, with "
                f"{format_share(hits, all_hits)} of the hits."
            )


def _routing(plan: Plan, fleet: Fleet) -> Iterator[str]:
    prompt = plan.traffic.prompt_tokens
    given = plan.setup.sizes["storage"]
    for name, one in fleet.routings.items():
        on_node = one.tiers["device"].found_tokens + one.tiers["host"].found_tokens
        text = (
            f"Routing {name} finds {format_share(on_node + one.tiers['storage'].found_tokens, prompt)} of prompt "
            f"tokens, {format_share(on_node, prompt)} on the node; its busiest node serves "
            f"{100 * one.busiest_share:.1f} %."
        )
        if name == fleet.best or given is None:
            yield text
        elif one.equal_storage is None:
            yield f"{text} No size of L3 makes it find as much as {fleet.best}."
        elif one.equal_storage.bytes > given.bytes:
            more = format_size(one.equal_storage.bytes - given.bytes)
            yield f"{text} To find as much as {fleet.best}, it needs {more} more L3."
        else:
            yield f"{text} It finds as much as {fleet.best}."
    if len(fleet.equal) > 1:
        yield (
            f"Routings {', '.join(fleet.equal)} differ by less than {100 * SAME_SHARE:.0f} % of the found tokens. A "
            "plan is not more exact, so it advises none of them before the others."
        )

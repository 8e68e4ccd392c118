"""Makes the plan of a trace: one pass over it for each routing, then sums over its stack distances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hicache.errors import InvalidInput
from hicache.units import GIB

from ..tier_names import TIERS
from ..traces.request import LENGTH_MAX
from ..traces.routing import Routing
from .advice import UNKNOWNS, recommendation
from .curves import Found, curve, reach, smallest_size
from .result import (
    SAME_SHARE,
    Curve,
    Fleet,
    MoreMemory,
    Plan,
    PlanInputs,
    Requests,
    RoutingPlan,
    Service,
    Setup,
    Size,
    StorageBreakEven,
    Traffic,
)
from .reuse import Counts, Reuse, reuse_of
from .tiers import Costs, Split, TierPages, costs, found, size_of, tier_pages, uses_of_tiers
from .wear import DAY_S, policies_of

# The routings that are compared.
_ROUTINGS = (Routing.RANDOM, Routing.SESSION, Routing.PREFIX)


def make_plan(requests: Requests, inputs: PlanInputs) -> Plan:
    """Return the plan of a trace. Reads it once, and with several nodes once for each routing.

    Raises InvalidInput for a trace without a request that fits into L1, sizes below 0, nodes below 1, and a page size
    that neither divides the trace's blocks nor is a multiple of them.
    """
    _require(inputs)
    tiers, times = tier_pages(inputs), costs(inputs)
    reuse = reuse_of(requests, inputs, inputs.routing, tiers.device)
    has = found(reuse, tiers)
    hits = times.hits(has)
    prompt_tokens = int(reuse.prompt_tokens.sum())
    most = found(reuse, replace(tiers, storage=None)).storage
    plan = Plan(
        setup=_setup(inputs, tiers, reuse),
        traffic=Traffic(
            prompt_tokens=prompt_tokens,
            output_tokens=reuse.output_tokens,
            reusable_tokens=int(most.sum()) * inputs.page_size,
            footprint=size_of(reuse.footprint_pages, inputs),
            too_long=reuse.too_long,
            too_long_tokens=reuse.too_long_tokens,
        ),
        tiers=uses_of_tiers(has, hits, inputs.page_size, prompt_tokens),
        curves=_curves(reuse, tiers, has, inputs),
        services=_services(reuse, has, times, inputs.nodes),
        more_gib={tier: _more_gib(tier, reuse, tiers, has, times, inputs) for tier in TIERS},
        break_even=_break_even(reuse, most, times) if times.computes and tiers.storage != 0 else None,
        policies=policies_of(reuse, tiers, has, times, inputs),
        fleet=_fleet(requests, inputs, tiers, times, reuse) if inputs.nodes > 1 else None,
        recommendation=(),
        unknowns=UNKNOWNS,
    )
    return replace(plan, recommendation=recommendation(plan))


def _require(inputs: PlanInputs) -> None:
    for tier in TIERS:
        size = getattr(inputs, f"{tier}_bytes")
        if size is not None and size < 0:
            raise InvalidInput(f"{tier}_bytes must be at least 0, got {size}")
        if not inputs.prices[tier] > 0:
            raise InvalidInput(f"prices must be above 0, got {inputs.prices[tier]} for {tier}")
    for name in ("nodes", "page_size", "selective_hits"):
        if getattr(inputs, name) < 1:
            raise InvalidInput(f"{name} must be at least 1, got {getattr(inputs, name)}")


def _setup(inputs: PlanInputs, tiers: TierPages, reuse: Reuse) -> Setup:
    sizes: Mapping[str, Size | None] = {
        tier: None if pages is None else size_of(pages, inputs)
        for tier, pages in zip(TIERS, (tiers.device, tiers.host, tiers.storage), strict=True)
    }
    return Setup(
        trace=inputs.trace,
        requests=len(reuse.prompt_tokens),
        duration_s=reuse.duration_s,
        model=inputs.model.name,
        token_bytes=inputs.model.token_bytes,
        page_size=inputs.page_size,
        sizes=sizes,
        nodes=inputs.nodes,
        routing=inputs.routing,
        speeds=inputs.speeds,
        endurance_bytes=inputs.endurance_bytes,
        selective_hits=inputs.selective_hits,
        prices=inputs.prices,
    )


def _found_by_size(reuse: Reuse, tiers: TierPages, has: Split) -> dict[str, Found]:
    """Return for each tier the function from its size to the pages that it finds beyond faster tiers."""
    near = reach(reuse.node, np.zeros_like(reuse.kv_pages), reuse.reusable_pages)
    on_device = int(has.device.sum())

    def host(sizes: Counts) -> Counts:
        return near(np.maximum(sizes, tiers.device + sizes // 2)) - on_device

    return {"device": near, "host": host, "storage": reach(reuse.shared, has.host, reuse.reusable_pages)}


def _curves(reuse: Reuse, tiers: TierPages, has: Split, inputs: PlanInputs) -> dict[str, Curve]:
    return {
        tier: curve(by_size, reuse.footprint_pages, inputs.page_size, inputs.model.token_bytes)
        for tier, by_size in _found_by_size(reuse, tiers, has).items()
    }


def _services(reuse: Reuse, has: Split, times: Costs, nodes: int) -> dict[str, Service]:
    nothing = np.zeros_like(has.device)
    return {
        "none": _service(reuse, Split(nothing, nothing, nothing), times, nodes),
        "device": _service(reuse, Split(has.device, has.device, has.device), times, nodes),
        "device_host": _service(reuse, times.hits(Split(has.device, has.host, has.host)), times, nodes),
        "all": _service(reuse, times.hits(has), times, nodes),
    }


def _service(reuse: Reuse, hits: Split, times: Costs, nodes: int) -> Service:
    hit_tokens = int(hits.storage.sum()) * times.page_size
    if not times.computes:
        return Service(
            hit_tokens=hit_tokens, ttft_mean_s=None, ttft_p50_s=None, ttft_p99_s=None, prefill_s=None, load=None
        )
    prefill_s = times.compute_s(hits.storage, reuse.prompt_tokens - hits.storage * times.page_size)
    ttft_s = prefill_s + times.copy_s(hits.storage - hits.device) + times.read_s(hits.storage - hits.host)
    p50_s, p99_s = np.percentile(ttft_s, (50, 99), method="inverted_cdf").tolist()
    return Service(
        hit_tokens=hit_tokens,
        ttft_mean_s=float(ttft_s.mean()),
        ttft_p50_s=p50_s,
        ttft_p99_s=p99_s,
        prefill_s=float(prefill_s.sum()),
        load=None if reuse.duration_s is None else float(prefill_s.sum()) / (reuse.duration_s * nodes),
    )


def _more_gib(
    tier: str, reuse: Reuse, tiers: TierPages, has: Split, times: Costs, inputs: PlanInputs
) -> MoreMemory:
    has_more = found(reuse, tiers.more(tier, GIB // times.page_bytes))
    before, after = times.hits(has), times.hits(has_more)
    per_day = None
    if times.computes and reuse.duration_s is not None:
        saved_s = times.compute_s(before.storage, (after.storage - before.storage) * times.page_size).sum()
        per_day = float(saved_s) * DAY_S / reuse.duration_s
    return MoreMemory(
        tier_tokens=(has_more.by_tier()[tier] - has.by_tier()[tier]) * times.page_size,
        saved_tokens=int((after.storage - before.storage).sum()) * times.page_size,
        prefill_s_per_day=per_day,
        price=inputs.prices[tier] * (1 if tier == "storage" else inputs.nodes),
    )


def _break_even(reuse: Reuse, reusable: Counts, times: Costs) -> StorageBreakEven:
    """Return the break-even of storage. The bandwidth is that for all reusable pages of the trace, or without any for
    all prompts. The prefix begins with the prompt, where attention is cheapest."""
    tokens = reusable * times.page_size if reusable.any() else reuse.prompt_tokens
    token_bytes = times.page_bytes / times.page_size
    compute_s = float(times.compute_s(np.zeros_like(tokens), tokens).sum() / tokens.sum())
    read_s = compute_s - token_bytes / times.speeds.host_bytes_per_s
    bandwidth = token_bytes / read_s if read_s > 0 else None
    pages = np.arange(1, LENGTH_MAX // times.page_size + 1)
    slower = times.read_s(pages) + times.copy_s(pages) > times.compute_s(np.zeros_like(pages), pages * times.page_size)
    # All lengths after the last one that does not pay. Longer prefixes than `LENGTH_MAX` do not exist.
    last = int(np.flatnonzero(slower)[-1]) + 1 if slower.any() else 0
    return StorageBreakEven(
        read_bytes_per_s=bandwidth,
        is_above=bandwidth is not None and times.speeds.storage.read_bytes_per_s >= bandwidth,
        prefix_tokens=(last + 1) * times.page_size if last < len(pages) else None,
    )


def _fleet(requests: Requests, inputs: PlanInputs, tiers: TierPages, times: Costs, reuse: Reuse) -> Fleet:
    """Return the comparison of routings. `reuse` is that of the routing of the inputs."""
    reuses = {
        routing: reuse if routing is inputs.routing else reuse_of(requests, inputs, routing, tiers.device)
        for routing in dict.fromkeys((*_ROUTINGS, inputs.routing))
    }
    splits = {routing: found(one, tiers) for routing, one in reuses.items()}
    totals = {routing: int(has.storage.sum()) for routing, has in splits.items()}
    same = SAME_SHARE * max(totals.values())
    most = max(totals.values()) - same
    on_node = {routing: int(has.host.sum()) for routing, has in splits.items() if totals[routing] >= most}
    equal = tuple(routing for routing, pages in on_node.items() if pages >= max(on_node.values()) - same)
    prompt_tokens = int(reuse.prompt_tokens.sum())

    def plan(routing: Routing) -> RoutingPlan:
        one, has = reuses[routing], splits[routing]
        beyond = _found_by_size(one, tiers, has)["storage"]
        enough = smallest_size(beyond, most - int(has.host.sum()), one.footprint_pages)
        return RoutingPlan(
            tiers=uses_of_tiers(has, times.hits(has), inputs.page_size, prompt_tokens),
            services=_services(one, has, times, inputs.nodes),
            busiest_share=max(one.node_tokens) / prompt_tokens,
            equal_storage=None if enough is None else size_of(enough, inputs),
        )

    best = min(equal, key=lambda each: max(reuses[each].node_tokens))
    return Fleet(best=best, equal=equal, routings={routing.value: plan(routing) for routing in splits})

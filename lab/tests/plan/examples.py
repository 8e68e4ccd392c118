"""A plan with figures of its own in each field, for the tests of its screen and its page."""

from __future__ import annotations

from typing import Any

from hicache.units import GIB
from hicache_lab.plan.result import (
    Curve,
    Fleet,
    MoreMemory,
    Plan,
    Point,
    Policy,
    RoutingPlan,
    Service,
    Setup,
    Size,
    StorageBreakEven,
    TierUse,
    Traffic,
)
from hicache_lab.speeds import ComputeSpeed, Speeds, StorageSpeed
from hicache_lab.traces.routing import Routing

PROMPT_TOKENS = 1_000_000
# A model with 1 MiB per token, so that 1,024 tokens are a GiB.
TOKEN_BYTES = 1 << 20


def gib(size: float) -> Size:
    """Return a size of so many GiB."""
    return Size(tokens=round(size * 1024), bytes=round(size * GIB))


def uses(device: int, host: int, storage: int) -> dict[str, TierUse]:
    """Return tiers that find so many tokens, a tenth of which are not hits."""
    return {
        tier: TierUse(found_tokens=found, hit_tokens=found * 9 // 10, share=found * 9 // 10 / PROMPT_TOKENS)
        for tier, found in (("device", device), ("host", host), ("storage", storage))
    }


def services(first_s: float) -> dict[str, Service]:
    """Return the services, each with half of the time of the one before."""
    return {
        name: Service(hit_tokens=90_000 * i, ttft_mean_s=first_s / 2**i, ttft_p50_s=first_s / 2**i / 10,
                      ttft_p99_s=first_s / 2**i * 10, prefill_s=7200 / 2**i, load=2 / 2**i)
        for i, name in enumerate(("none", "device", "device_host", "all"))
    }


def curve(most: int, enough: Size) -> Curve:
    """Return a curve over 1 to 512 GiB that rises to `most` tokens."""
    points = tuple(Point(size=gib(2**k), found_tokens=most * k // 9) for k in range(10))
    return Curve(points=points, bends=(points[3],), enough=Point(size=enough, found_tokens=most * 95 // 100))


def policy(share: int, years: float | None) -> Policy:
    """Return a policy that writes so many GiB."""
    hits = {"device": 90_000, "host": 45_000, "storage": 2000 * share}
    return Policy(hit_tokens=hits, written_bytes=share * GIB, written_bytes_per_day=24 * share * GIB, years=years)


def fleet() -> Fleet:
    """Return a comparison of two routings on four nodes."""
    routings = {
        "random": RoutingPlan(tiers=uses(50_000, 25_000, 200_000), services=services(4.0), busiest_share=0.26,
                              equal_storage=gib(333)),
        "prefix": RoutingPlan(tiers=uses(100_000, 50_000, 200_000), services=services(2.0), busiest_share=0.31,
                              equal_storage=gib(256)),
    }
    return Fleet(best=Routing.PREFIX, equal=(Routing.PREFIX,), routings=routings)


def example(**changes: Any) -> Plan:
    """Return the plan, with other values for some fields."""
    setup = Setup(
        trace="some <trace>.jsonl", requests=1234, duration_s=3600.0, model="a-model", token_bytes=TOKEN_BYTES,
        page_size=64, sizes={"device": gib(8), "host": gib(64), "storage": gib(256)}, nodes=1, routing=Routing.PREFIX,
        speeds=Speeds(compute=ComputeSpeed(tokens_per_s=1000.0),
                      storage=StorageSpeed(read_bytes_per_s=3e9, write_bytes_per_s=1e9)),
        endurance_bytes=10**15, selective_hits=2, prices={"device": 20.0, "host": 2.0, "storage": 0.5},
    )
    fields: dict[str, Any] = {
        "setup": setup,
        "traffic": Traffic(prompt_tokens=PROMPT_TOKENS, output_tokens=500, reusable_tokens=400_000, footprint=gib(512),
                           too_long=3, too_long_tokens=250_000),
        "tiers": uses(100_000, 50_000, 200_000),
        "curves": {"device": curve(400_000, gib(300)), "host": curve(300_000, gib(310)),
                   "storage": curve(250_000, gib(320))},
        "services": services(2.0),
        "more_gib": {tier: MoreMemory(tier_tokens=1000 * i, saved_tokens=100 * i, prefill_s_per_day=30.0 * i,
                                      price=10.0 / i)
                     for i, tier in enumerate(("device", "host", "storage"), 1)},
        "break_even": StorageBreakEven(read_bytes_per_s=1.5e9, is_above=True, prefix_tokens=128),
        "policies": {"write_through": policy(100, 10.5), "write_through_selective": policy(40, 0.1),
                     "write_back": policy(90, 12.0)},
        "fleet": None,
        "recommendation": ("Do <this>.", "Then do that."),
        "unknowns": ("The rest.",),
    }
    return Plan(**(fields | changes))

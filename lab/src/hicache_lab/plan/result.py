"""The plan of a trace: one frozen value, which is the JSON report.

Pages that a tier *has* are *found*. Pages that the cache also fetches, because that pays with an idle device, are
*hits*. Figures of tokens count prompt tokens, unless they say otherwise. Sizes of L1 and L2 are those of one node, L3
is shared by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from pydantic import TypeAdapter

from hicache.cli.model_shapes import ModelShape
from hicache.config import HiCacheConfig

from ..speeds import Speeds
from ..traces.request import TraceRequest
from ..traces.routing import Routing

# An assumption: a GiB of each tier costs about 30 times one of the next tier. Only ratios matter.
PRICES: Mapping[str, float] = {"device": 30.0, "host": 1.0, "storage": 0.03}
# A trace that can be read several times.
Requests: TypeAlias = Callable[[], Iterator[TraceRequest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """The system to plan. `device_bytes` and `host_bytes` are the sizes of L1 and L2 on each of `nodes` nodes,
    `storage_bytes` that of the shared L3: None without a limit, 0 without a store. All are rounded down to whole pages.
    `routing` decides which node serves a request. `endurance_bytes` is what may be written to L3 before it is worn.
    `prices` are the relative prices of a GiB by tier."""

    trace: str
    model: ModelShape
    device_bytes: int
    host_bytes: int
    storage_bytes: int | None
    page_size: int = HiCacheConfig().page_size
    nodes: int = 1
    routing: Routing = Routing.PREFIX
    speeds: Speeds = field(default_factory=Speeds)
    endurance_bytes: int | None = None
    selective_hits: int = HiCacheConfig().selective_hits
    prices: Mapping[str, float] = field(default_factory=lambda: PRICES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A number of tokens, in whole pages, and the bytes of their KV."""

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The trace and the system. `requests` are those that fit into L1. `sizes` is by tier: `device` and `host` on each
    node, `storage` for all; None is a store without a limit. `duration_s` is the time between the first and the last
    request, None if all have the same timestamp."""

    trace: str
    requests: int
    duration_s: float | None
    model: str
    token_bytes: int
    page_size: int
    sizes: Mapping[str, Size | None]
    nodes: int
    routing: Routing
    speeds: Speeds
    endurance_bytes: int | None
    selective_hits: int
    prices: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The tokens of a trace. `reusable_tokens` are the hits of an unlimited cache, in whole pages and without the last
    token of a prompt. `footprint` is all distinct pages of the trace, of outputs too: a larger tier is not fuller.
    `too_long` requests with `too_long_tokens` prompt tokens do not fit into L1. No other figure counts them, and
    replays leave them out."""

    prompt_tokens: int
    output_tokens: int
    reusable_tokens: int
    footprint: Size
    too_long: int
    too_long_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """Prompt tokens that one tier has and that no faster tier has (`found_tokens`), and those of them that are fetched
    because that pays (`hit_tokens`). `share` is hit tokens divided by all prompt tokens."""

    found_tokens: int
    hit_tokens: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Found tokens of one tier if it had this size."""

    size: Size
    found_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The found tokens of one tier over its size, by increasing size up to the footprint, while the other tiers keep
    theirs. The curve of L1 does not depend on other tiers. That of L2 counts pages that L1 lacks, that of L3 pages that
    L1 and L2 lack. `bends` are points of the curve after which a further byte adds far less, the strongest first: see
    `curves.bends`. `enough` is the smallest size with `curves.ENOUGH_SHARE` of the tokens of the last
    point, exactly; None if that has none."""

    points: tuple[Point, ...]
    bends: tuple[Point, ...]
    enough: Point | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The service of requests by some tiers. The times to first token are those of a request that does not wait in a
    queue and whose copies do not overlap with compute. `prefill_s` is the time of computing of all requests, without
    copies. `load` is its share of the time that all nodes have: above 1, they cannot serve the trace. All times are
    None without a rate of prefill, and `load` also without a duration."""

    hit_tokens: int
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    prefill_s: float | None
    load: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreMemory:
    """The worth of one more GiB of one tier; of L1 and L2, on each node. `tier_tokens` more tokens are found on this
    tier. `saved_tokens` of them are hits of no tier without the GiB: they are no longer computed. `prefill_s_per_day`
    is the computing time that they save, None without a rate of prefill or without a duration. `price` is the relative
    price of the GiB, on all nodes that get one."""

    tier_tokens: int
    saved_tokens: int
    prefill_s_per_day: float | None
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageBreakEven:
    """Where reading from storage takes as long as computing. No request waits for the device.

    `read_bytes_per_s` is that bandwidth, without the fixed times: None if the copy from host to device alone takes
    longer than computing. `is_above` is True if the store is at least as fast. `prefix_tokens` is the length from which
    on fetching a stored prefix pays, with the fixed times, None if it never does.
    """

    read_bytes_per_s: float | None
    is_above: bool
    prefix_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One write policy. `hit_tokens` are by tier; `written_bytes` went to L3 during the trace. Rates are None without a
    duration. `years` is the time until `endurance_bytes` are written: None without an endurance, a duration or
    writes."""

    hit_tokens: Mapping[str, int]
    written_bytes: int
    written_bytes_per_day: float | None
    years: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPlan:
    """The system with another routing. `busiest_share` is the share of all prompt tokens that the busiest node serves.
    `equal_storage` is the smallest L3 with which this routing finds as many tokens as the best routing does with the
    given L3, less `SAME_SHARE`; None if it never does."""

    tiers: Mapping[str, TierUse]
    services: Mapping[str, Service]
    busiest_share: float
    equal_storage: Size | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Several nodes with one store, by routing. `equal` are the routings that find the most tokens, and of these the
    most on the node: differences below `SAME_SHARE` of the found tokens are noise. `best` is the one of them with the
    least busy busiest node."""

    best: Routing
    equal: tuple[Routing, ...]
    routings: Mapping[str, RoutingPlan]


# Plans and replays differ by up to this share of all hits, so a smaller difference of two plans decides nothing.
SAME_SHARE = 0.02
# The keys of `Plan.services`, from no cache to all tiers.
SERVICES: Mapping[str, str] = {
    "none": "no cache",
    "device": "L1",
    "device_host": "L1 and L2",
    "all": "L1, L2 and L3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """See the module's docstring. `tiers`, `curves` and `more_gib` are by tier. `services` is by the names in
    `SERVICES`. `policies` is by write policy; None for a policy that is not modelled with several nodes, and all are
    None without a store. `break_even` is None without a rate of prefill or a store. `fleet` is None for one node.
    `recommendation` and `unknowns` are sentences."""

    setup: Setup
    traffic: Traffic
    tiers: Mapping[str, TierUse]
    curves: Mapping[str, Curve]
    services: Mapping[str, Service]
    more_gib: Mapping[str, MoreMemory]
    break_even: StorageBreakEven | None
    policies: Mapping[str, Policy | None]
    fleet: Fleet | None
    recommendation: tuple[str, ...]
    unknowns: tuple[str, ...]

    def to_json(self) -> str:
        """Return the report as JSON. The names of fields include their units."""
        return _PLAN.dump_json(self, indent=2).decode() + "\n"


_PLAN = TypeAdapter(Plan)

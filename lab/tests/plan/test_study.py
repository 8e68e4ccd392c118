"""The figures of a plan: equal to caches that evict page by page, and to sums by hand."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hicache.cli.model_shapes import ModelShape
from hicache.errors import InvalidInput
from hicache.keys import page_keys
from hicache.units import GIB
from hicache_lab.replay.ideal import Uses, lru_hits
from hicache_lab.replay.stand_in import page_seeds
from hicache_lab.speeds import ComputeSpeed, Speeds, StorageSpeed
from hicache_lab.tier_names import TIERS
from hicache_lab.traces.request import TraceRequest
from hicache_lab.traces.routing import Router, Routing
from hicache_lab.traces.synthetic import synthetic_trace
from hicache_lab.traces.tokens import TokenSource
from lab.tests.plan.world import PAGE_SIZE, conversations, fits, plan_inputs, plan_of, short_conversations
from lab.tests.replay.world import request
from tests.seeds import seeds

DAY_MS = 86_400_000


class Lru:
    """A cache that evicts the least recently used page, the tail of a path before its head."""

    def __init__(self, pages: int | None) -> None:
        self._size = pages
        self.cached: OrderedDict[int, None] = OrderedDict()

    def prefix(self, pages: Sequence[int]) -> int:
        """The number of first pages that are cached."""
        return next((i for i, page in enumerate(pages) if page not in self.cached), len(pages))

    def use(self, pages: Sequence[int]) -> set[int]:
        """Make the pages the most recently used ones. Return the evicted pages."""
        for page in reversed(pages):
            self.cached[page] = None
            self.cached.move_to_end(page)
        evicted = set()
        while self._size is not None and len(self.cached) > self._size:
            evicted.add(self.cached.popitem(last=False)[0])
        return evicted


def uses_of(trace: Sequence[TraceRequest]) -> list[Uses]:
    """The pages of each request, from the keys of its tokens."""
    source = TokenSource()
    keys = [page_keys(source.take(one).kv_tokens, PAGE_SIZE) for one in trace]
    return [Uses(page_seeds(of), (one.input_length - 1) // PAGE_SIZE) for of, one in zip(keys, trace, strict=True)]


def reference(
    trace: Sequence[TraceRequest], device: int, host: int, storage: int | None, nodes: int, routing: Routing
) -> tuple[dict[str, int], int]:
    """The found tokens by tier and the pages written to L3, by caches that evict page by page."""
    near = [Lru(device) for _ in range(nodes)]
    middle = [Lru(max(host, device + host // 2)) for _ in range(nodes)]
    shared, router = Lru(storage), Router(routing, nodes)
    found, written = dict.fromkeys(TIERS, 0), 0
    for one, uses in zip(trace, uses_of(trace), strict=True):
        node, pages = router.route(one), uses.pages.tolist()
        if not fits(one, device):
            continue
        hits, end = pages[: uses.reusable], 0
        for tier, cache in (("device", near[node]), ("host", middle[node]), ("storage", shared)):
            more = max(end, cache.prefix(hits))
            found[tier] += (more - end) * PAGE_SIZE
            end = more
        written += len(pages) - max(middle[node].prefix(pages), shared.prefix(pages))
        for cache in (near[node], middle[node], shared):
            cache.use(pages)
    return found, written


@pytest.mark.parametrize("seed", seeds(12))
def test_tiers_find_and_store_what_caches_find_that_evict_page_by_page(seed: int) -> None:
    numbers = random.Random(seed)
    nodes = numbers.choice([1, 1, 3])
    device, host = numbers.choice([0, 40, 60, 100, 400]), numbers.choice([0, 1, 50, 200])
    storage = numbers.choice([1, 300, 900, None])
    routing = numbers.choice(list(Routing))
    trace = conversations(seed)
    plan = plan_of(trace, device, host, storage, nodes=nodes, routing=routing)
    found, written = reference(trace, device, host, storage, nodes, routing)
    assert {tier: use.found_tokens for tier, use in plan.tiers.items()} == found
    through = plan.policies["write_through"]
    assert through is not None
    assert through.written_bytes == written * PAGE_SIZE


@pytest.mark.parametrize("pages", [0, 100, 200, 1000, 10_000])
def test_one_tier_has_the_hits_of_the_ideal_lru(pages: int) -> None:
    trace = list(synthetic_trace(150, 1))
    uses = [each for one, each in zip(trace, uses_of(trace), strict=True) if fits(one, pages)]
    assert plan_of(trace, pages, 0, 0).tiers["device"].hit_tokens == PAGE_SIZE * sum(lru_hits(uses, pages))


def test_reusable_tokens_are_the_hits_of_an_unlimited_cache_and_the_footprint_its_pages() -> None:
    trace = list(synthetic_trace(150, 1))
    uses = uses_of(trace)
    traffic = plan_of(trace, 0, 10, 10).traffic
    assert traffic.reusable_tokens == PAGE_SIZE * sum(lru_hits(uses, None))
    assert traffic.footprint.tokens == PAGE_SIZE * len({page for one in uses for page in one.pages.tolist()})
    assert traffic.footprint.bytes == traffic.footprint.tokens
    assert traffic.prompt_tokens == sum(one.input_length for one in trace)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("tier", TIERS)
def test_a_point_of_a_curve_is_what_a_tier_of_that_size_finds(tier: str, nodes: int) -> None:
    trace = short_conversations(5, 100)
    given = {"device": 100, "host": 60, "storage": 200}
    curve = plan_of(trace, *given.values(), nodes=nodes).curves[tier]
    assert len(curve.points) > 20
    assert curve.points[-1].found_tokens > 0
    for point in (*curve.points[::9], curve.points[-1], *curve.bends):
        sizes = given | {tier: point.size.tokens // PAGE_SIZE}
        if sizes["device"] < given["device"]:  # a curve counts the requests that fit into the given L1
            continue
        assert plan_of(trace, *sizes.values(), nodes=nodes).tiers[tier].found_tokens == point.found_tokens


def test_enough_is_the_smallest_size_with_95_percent_of_what_a_tier_can_add() -> None:
    trace = [one for one in conversations(5) if fits(one, 60)]
    curve = plan_of(trace, 0, 0, 0).curves["device"]
    assert curve.enough is not None
    pages, most = curve.enough.size.tokens // PAGE_SIZE, curve.points[-1].found_tokens
    found = [plan_of(trace, size, 0, 0).tiers["device"].found_tokens for size in (pages - 1, pages)]
    assert found[0] < 0.95 * most <= found[1] == curve.enough.found_tokens


# Milliseconds of one page: 64 to compute, 10 and 10 more to copy, 20 and 1 more for each two pages to read.
SLOW = Speeds(
    compute=ComputeSpeed(tokens_per_s=1000),
    host_bytes_per_s=6400,
    host_fixed_s=0.01,
    storage=StorageSpeed(read_bytes_per_s=3200, write_bytes_per_s=1000, fixed_s=0.001, parallel=2),
)


def test_the_time_to_first_token_is_compute_and_copy_and_read() -> None:
    # Three prompts of 8 pages and one more; the last one finds the first 8 pages.
    trace = [request(i, [i % 2, 9 + i], tail=64, output=1, at_ms=1000 * i) for i in range(3)]
    services = plan_of(trace, 0, 8, None, speeds=SLOW).services
    # Between its uses, block 0 is behind 9 other pages: nothing is on L2 (reaches 8), all in storage.
    assert {name: service.hit_tokens for name, service in services.items()} == {
        "none": 0, "device": 0, "device_host": 0, "all": 512
    }
    assert services["none"].ttft_mean_s == pytest.approx(0.576)
    assert services["none"].prefill_s == pytest.approx(3 * 0.576)
    # 64 tokens, a copy of 512 bytes, and four rounds of two operations for 512 bytes.
    last_s = 0.064 + 0.01 + 512 / 6400 + 4 * 0.001 + 512 / 3200
    assert services["all"].ttft_mean_s == pytest.approx((2 * 0.576 + last_s) / 3)
    assert services["all"].ttft_p50_s == pytest.approx(0.576)
    assert services["all"].prefill_s == pytest.approx(2 * 0.576 + 0.064)


def test_attention_makes_the_tail_of_a_prompt_dearer_than_its_head() -> None:
    trace = [request(i, [i % 2, 9 + i], tail=64, output=1) for i in range(3)]
    speeds = Speeds(compute=ComputeSpeed(tokens_per_s=1000, pairs_per_s=10_000))
    services = plan_of(trace, 100, 0, 0, speeds=speeds).services
    whole_s = 0.576 + 576 * 577 / 2 / 10_000
    assert services["none"].prefill_s == pytest.approx(3 * whole_s)
    assert services["device"].prefill_s == pytest.approx(3 * whole_s - (0.512 + 512 * 513 / 2 / 10_000))


@pytest.mark.parametrize(("read", "hits"), [(3200, 512), (1000, 0)])
def test_pages_are_read_from_storage_only_if_that_is_faster_than_computing(read: float, hits: int) -> None:
    trace = [request(i, [i % 2, 9 + i], tail=64, output=1) for i in range(3)]
    speeds = Speeds(compute=SLOW.compute, storage=StorageSpeed(read_bytes_per_s=read, write_bytes_per_s=1))
    plan = plan_of(trace, 0, 8, None, speeds=speeds)
    assert (plan.tiers["storage"].found_tokens, plan.tiers["storage"].hit_tokens) == (512, hits)
    assert plan_of(trace, 0, 8, None).tiers["storage"].hit_tokens == 512, "without a rate, every hit is fetched"


@pytest.mark.parametrize(("bus", "hits"), [(2000, 512), (500, 0)])
def test_pages_are_copied_from_host_only_if_that_is_faster_than_computing(bus: float, hits: int) -> None:
    trace = [request(i, [i % 2, 9 + i], tail=64, output=1) for i in range(3)]
    plan = plan_of(trace, 0, 100, 0, speeds=Speeds(compute=SLOW.compute, host_bytes_per_s=bus))
    assert (plan.tiers["host"].found_tokens, plan.tiers["host"].hit_tokens) == (512, hits)
    assert plan.services["all"].hit_tokens == hits


def test_a_prefix_below_the_threshold_is_not_read_from_storage() -> None:
    # Of 256 equal tokens, the last page cannot be a hit. The other 192 are fewer than `prefetch.threshold_tokens`.
    for tail, hits in ((256, 0), (320, 256)):
        trace = [request(i, [i % 2], tail=tail, output=1) for i in range(4)]
        assert plan_of(trace, 0, 0, None).tiers["storage"].hit_tokens == 2 * hits


def test_a_prefix_below_the_threshold_is_not_copied_from_host() -> None:
    # Pages of 8 tokens: one is below `load_back_threshold_tokens`, two are above.
    for tail, hits in ((16, 0), (24, 16)):
        trace = [request(i, [i % 2], tail=tail, output=1) for i in range(4)]
        plan = plan_of(trace, 0, 100, 0, page_size=8)
        assert plan.tiers["host"].found_tokens == 2 * (tail - 8)
        assert plan.tiers["host"].hit_tokens == 2 * hits


def test_one_more_gib_is_worth_the_difference_of_two_plans() -> None:
    # With pages of 64 MiB, a GiB has 16.
    trace = short_conversations(2, 64)
    speeds = Speeds(compute=ComputeSpeed(tokens_per_s=1, pairs_per_s=100), host_bytes_per_s=1e12)
    big: dict[str, Any] = {"model": ModelShape("big", 1 << 20), "speeds": speeds}
    given = {"device_bytes": 4 * GIB, "host_bytes": 6 * GIB, "storage_bytes": 12 * GIB}
    plan = plan_of(trace, 0, 0, 0, **{**big, **given})
    hits = sum(use.hit_tokens for use in plan.tiers.values())
    for tier in TIERS:
        larger = plan_of(trace, 0, 0, 0, **{**big, **given, f"{tier}_bytes": given[f"{tier}_bytes"] + GIB})
        more = plan.more_gib[tier]
        assert more.tier_tokens == larger.tiers[tier].found_tokens - plan.tiers[tier].found_tokens
        assert more.saved_tokens == sum(use.hit_tokens for use in larger.tiers.values()) - hits
        before_s, after_s = plan.services["all"].prefill_s, larger.services["all"].prefill_s
        assert before_s is not None
        assert after_s is not None
        per_day = (before_s - after_s) * DAY_MS / trace[-1].timestamp_ms
        assert more.prefill_s_per_day == pytest.approx(per_day, abs=1e-6 * before_s)
    assert plan.more_gib["storage"].saved_tokens > 0


def test_without_timestamps_or_a_rate_there_are_no_figures_per_day() -> None:
    same = [request(i, [1], output=1, at_ms=7) for i in range(3)]
    plan = plan_of(same, 10, 10, 10, speeds=SLOW, endurance_bytes=10)
    assert plan.setup.duration_s is None
    assert plan.more_gib["device"].prefill_s_per_day is None
    through = plan.policies["write_through"]
    assert through is not None
    assert (through.written_bytes_per_day, through.years) == (None, None)
    plan = plan_of([request(i, [1], at_ms=i) for i in range(3)], 10, 10, 10)
    assert plan.more_gib["device"].prefill_s_per_day is None
    assert plan.break_even is None
    assert plan.services["all"].ttft_mean_s is None


def test_break_even_is_the_bandwidth_at_which_a_read_and_a_copy_take_as_long_as_computing() -> None:
    trace = [request(i, [1], at_ms=i) for i in range(3)]
    # A token takes 1 ms to compute, 1/6.4 ms to copy: 0.84375 ms are left for its byte.
    point = plan_of(trace, 0, 1, None, speeds=SLOW).break_even
    assert point is not None
    assert point.read_bytes_per_s == pytest.approx(1000 / 0.84375)
    assert point.is_above
    # A page: 64 ms against 10 + 10 ms for the copy and 1 + 20 ms for the read.
    assert point.prefix_tokens == 64


def test_fetching_pays_only_from_the_length_on_that_outweighs_the_fixed_times() -> None:
    trace = [request(i, [1], at_ms=i) for i in range(3)]
    # n pages: 64 n ms against 10 n + 100 for the copy and 20 n + ceil(n / 2) for the read. 3: 192 > 192; 4: 256 > 222.
    storage = StorageSpeed(read_bytes_per_s=3200, write_bytes_per_s=1, fixed_s=0.001, parallel=2)
    speeds = Speeds(compute=SLOW.compute, host_bytes_per_s=6400, host_fixed_s=0.1001, storage=storage)
    point = plan_of(trace, 0, 1, None, speeds=speeds).break_even
    assert point is not None
    assert point.prefix_tokens == 4 * 64
    slow = Speeds(compute=SLOW.compute, storage=StorageSpeed(read_bytes_per_s=900, write_bytes_per_s=1))
    point = plan_of(trace, 0, 1, None, speeds=slow).break_even
    assert point is not None
    assert (point.is_above, point.prefix_tokens) == (False, None)


def test_without_a_bus_that_is_faster_than_computing_no_store_pays() -> None:
    speeds = Speeds(compute=SLOW.compute, host_bytes_per_s=500)
    point = plan_of([request(0, [1])], 0, 1, None, speeds=speeds).break_even
    assert point is not None
    assert (point.read_bytes_per_s, point.is_above, point.prefix_tokens) == (None, False, None)


def test_the_report_is_json_with_every_part() -> None:
    plan = plan_of(conversations(1), 20, 20, 100, nodes=2)
    report = json.loads(plan.to_json())
    assert report["setup"]["sizes"]["host"] == {"tokens": 20 * 64, "bytes": 20 * 64}
    assert set(report["curves"]) == set(report["tiers"]) == set(TIERS)
    assert report["fleet"]["best"] in report["fleet"]["routings"]
    assert json.loads(plan_of(conversations(1), 20, 20, None).to_json())["setup"]["sizes"]["storage"] is None


def test_an_empty_trace_is_rejected() -> None:
    with pytest.raises(InvalidInput, match="trace test: is empty"):
        plan_of([], 1, 1, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"host_bytes": -1}, "host_bytes must be at least 0, got -1"), ({"nodes": 0}, "nodes must be at least 1"),
     ({"page_size": 0}, "page_size must be at least 1"), ({"page_size": 48}, "does not fit to blocks")],
)
def test_wrong_inputs_are_rejected(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan_of([request(0, [1])], 1, 1, 1, **wrong)


def test_sizes_are_whole_pages() -> None:
    inputs = plan_inputs(9, 5, 7)
    assert (
        plan_of([request(0, [1])], 0, 0, 0, device_bytes=inputs.device_bytes + 63).setup.sizes["device"]
        == (plan_of([request(0, [1])], 9, 0, 0).setup.sizes["device"])
    )


def test_a_plan_needs_neither_torch_nor_a_replay() -> None:
    code = "import sys, hicache_lab.plan; print(sorted({'torch', 'hicache_lab.replay'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_percentiles_are_times_of_requests() -> None:
    trace = [request(i, [i], tail=tail, output=1) for i, tail in enumerate((64, 128, 256))]
    none = plan_of(trace, 0, 0, 0, speeds=SLOW).services["none"]
    assert none.ttft_p50_s == pytest.approx(0.128)
    assert none.ttft_p99_s == pytest.approx(0.256)
    assert none.ttft_mean_s == pytest.approx(np.mean([0.064, 0.128, 0.256]))

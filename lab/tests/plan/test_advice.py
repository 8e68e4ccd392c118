"""The sentences of a recommendation: by clear rules, with the numbers that they rest on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hicache.errors import InvalidInput
from hicache.units import format_size
from hicache_lab.plan.advice import recommendation
from hicache_lab.plan.result import Plan, Policy, StorageBreakEven
from hicache_lab.speeds import ComputeSpeed, Speeds, StorageSpeed
from hicache_lab.traces.routing import Routing
from lab.tests.plan.world import conversations, plan_of
from lab.tests.replay.world import request

SPEEDS = Speeds(compute=ComputeSpeed(tokens_per_s=1000))
# Two prompts of 9 pages in turn, four times. They share nothing; 8 pages of each are reused 3 times.
TURNS = [request(i, [2 * (i % 2), 2 * (i % 2) + 1], tail=64, output=1, at_ms=1000 * i) for i in range(8)]


def one_sentence(plan: Plan, part: str) -> str:
    """The only sentence with this part."""
    (found,) = [sentence for sentence in recommendation(plan) if part in sentence]
    return found


def has_sentence(plan: Plan, part: str) -> bool:
    """True if a sentence has this part."""
    return any(part in sentence for sentence in recommendation(plan))


def test_a_trace_without_reuse_needs_no_tier() -> None:
    plan = plan_of([request(i, [i], output=1) for i in range(4)], 10, 10, 10)
    assert plan.recommendation[0] == "None of the 2,048 prompt tokens can be reused: no tier is worth its memory."
    assert not has_sentence(plan, "would find")


def test_the_reusable_tokens_are_divided_among_tiers() -> None:
    # 6 of 8 requests find 8 pages, at distances 9 to 16: L1 has 4 pages of each, L2 reaches 15 pages, so 2 more.
    plan = plan_of(TURNS, 13, 4, None)
    assert plan.recommendation[0] == (
        "3,072 of 4,608 prompt tokens (66.7 %) can be reused. Of these, the tiers have: L1 device 50.0 %, "
        "L2 host 25.0 %, L3 storage 25.0 %. 75.0 % are hits; the others are too few to fetch, or too slow for an idle "
        "device."
    )


@pytest.mark.parametrize("device", [10, 17])
def test_a_size_is_compared_with_the_one_that_is_enough(device: int) -> None:
    plan = plan_of(TURNS, device, 0, None)
    # 95 % of 48 pages need distances below 17, and 17 pages of 64 bytes are 1088 bytes. The curve has one step.
    assert one_sentence(plan, "L1 device has") == (
        f"L1 device has {format_size(device * 64)}. It finds most for its bytes at 1.1 KiB: 66.7 % of prompt tokens. "
        "1.1 KiB would find 95 % of the 3,072 tokens that it can add."
    )


def test_a_curve_without_a_bend_has_no_size_that_is_best() -> None:
    plan = plan_of(TURNS, 10, 0, None)
    straight = {tier: replace(curve, bends=()) for tier, curve in plan.curves.items()}
    assert has_sentence(replace(plan, curves=straight), "L1 device has 640 B. 1.1 KiB would find")
    assert has_sentence(plan, "L3 storage is not limited.")


def test_a_tier_that_adds_nothing_is_named() -> None:
    plan = plan_of(TURNS, 100, 0, None)
    assert has_sentence(plan, "L3 storage finds nothing at any size that faster tiers lack.")


def test_the_next_gib_is_best_spent_where_it_saves_the_most_computing() -> None:
    plan = plan_of(TURNS, 0, 0, 0, speeds=SPEEDS)
    # A GiB has room for everything. With L1 it saves 3,072 tokens in 7 seconds: 3.072 s in 7 s.
    assert one_sentence(plan, "next GiB") == (
        "For its price, the next GiB saves most on L3 storage: 3,072 tokens of the trace, or 37,917 s of computing per "
        "day. Divided by assumed --prices of 30, 1, 0.03: L1 device 1,263.9 s, L2 host 37,917.3 s, L3 storage "
        "1,263,908.6 s."
    )
    dear = plan_of(TURNS, 0, 0, 0, speeds=SPEEDS, prices={"device": 1, "host": 2, "storage": 2})
    assert has_sentence(dear, "the next GiB saves most on L1 device")
    assert dear.setup.prices == {"device": 1, "host": 2, "storage": 2}
    fleet = plan_of(TURNS, 0, 0, 0, speeds=SPEEDS, nodes=3).more_gib
    assert [more.price for more in fleet.values()] == [90, 3, 0.03], "a GiB of L1 and L2 is one on each node"
    assert not has_sentence(plan_of(TURNS, 100, 0, None, speeds=SPEEDS), "next GiB")


def test_prompts_that_l1_cannot_hold_are_left_out_and_counted() -> None:
    long = [request(8 + i, [4 + 2 * i, 5 + 2 * i], output=1, at_ms=8000 + i) for i in range(2)]
    # An L1 of 10 pages holds prompts of 9 pages, and not those of 16.
    plan, without = (plan_of(trace, 10, 10, None, speeds=SPEEDS) for trace in (TURNS + long, TURNS))
    assert plan.recommendation[0] == (
        "Left out: 2 requests with 2,048 prompt tokens (30.8 % of the trace), longer than L1, which has 640 tokens. "
        "Use a larger L1 for them."
    )
    assert (plan.traffic.too_long, plan.traffic.too_long_tokens) == (2, 2048)
    assert replace(plan.traffic, too_long=0, too_long_tokens=0) == without.traffic
    assert (plan.tiers, plan.setup.requests) == (without.tiers, 8)
    assert plan.policies["write_through"] is not None and without.policies["write_through"] is not None
    assert plan.policies["write_through"].written_bytes == without.policies["write_through"].written_bytes
    assert not has_sentence(without, "longer than L1")
    with pytest.raises(InvalidInput, match="all 2 requests are longer than L1; use a larger L1"):
        plan_of(long, 10, 10, None)


def test_more_computing_than_there_is_time_is_named() -> None:
    # 8 prompts of 576 tokens, of which L1 saves 6 times 512: 1,536 tokens in 0.7 s.
    crowded = [replace(one, timestamp_ms=one.timestamp_ms / 10) for one in TURNS]
    plan = plan_of(crowded, 100, 0, 0, speeds=SPEEDS)
    loads = [plan.services[name].load for name in ("none", "all")]
    assert loads == [pytest.approx(4.608 / 0.7), pytest.approx(1.536 / 0.7)]
    assert one_sentence(plan, "time to first token").endswith(
        "Computing takes 2 s instead of 5 s, 219.4 % instead of 658.3 % of the time of 1 node."
    )
    assert one_sentence(plan, "more computing than there is time") == (
        "The trace asks for more computing than there is time: queues and times to first token grow to its end. It "
        "needs at least 3 nodes."
    )
    assert not has_sentence(plan_of(TURNS, 100, 0, 0, speeds=SPEEDS), "more computing than there is time")
    same_time = [replace(one, timestamp_ms=0) for one in TURNS]
    assert not has_sentence(plan_of(same_time, 100, 0, 0, speeds=SPEEDS), "% of the time")


def test_times_are_compared_with_and_without_tiers() -> None:
    plan = plan_of(TURNS, 100, 0, 0, speeds=SPEEDS)
    assert one_sentence(plan, "time to first token") == (
        "The mean time to first token without queues is 0.576 s without a cache, 0.192 s with L1, 0.192 s with L1 and "
        "L2, and 0.192 s with all tiers. Computing takes 2 s instead of 5 s, 21.9 % instead of 65.8 % of the time of 1 "
        "node."
    )
    assert not has_sentence(plan_of(TURNS, 100, 0, 0), "time to first token")


@pytest.mark.parametrize(
    ("point", "part"),
    [
        (StorageBreakEven(read_bytes_per_s=1e9, is_above=True, prefix_tokens=640), "fetching a prefix pays from 640"),
        (StorageBreakEven(read_bytes_per_s=1e9, is_above=True, prefix_tokens=None), "fixed time of 100 us per page"),
        (StorageBreakEven(read_bytes_per_s=4e9, is_above=False, prefix_tokens=None), "below the break-even of 4.00 GB"),
        (StorageBreakEven(read_bytes_per_s=None, is_above=False, prefix_tokens=None), "No store pays"),
    ],
)
def test_the_store_is_compared_with_its_break_even(point: StorageBreakEven, part: str) -> None:
    assert has_sentence(replace(plan_of(TURNS, 0, 1, None), break_even=point), part)


def test_a_slow_store_is_advised_with_the_wait_from_which_it_pays() -> None:
    # A token has one byte. Reading 1,000 of them takes 10 s, and computing them less the copy takes 4 s.
    speeds = Speeds(storage=StorageSpeed(read_bytes_per_s=100, write_bytes_per_s=100))
    point = StorageBreakEven(read_bytes_per_s=250, is_above=False, prefix_tokens=None)
    plan = replace(plan_of(TURNS, 0, 1, None, speeds=speeds), break_even=point)
    assert one_sentence(plan, "The store reads").endswith(
        "an idle device computes faster, so the cache hardly reads or stores pages. It does for requests that wait: "
        "6.00 s for each 1,000 tokens of their hit."
    )


def written(pages: int, years: float | None) -> Policy:
    """A policy that writes so much."""
    hits = {"device": 100, "host": 0, "storage": pages}
    return Policy(hit_tokens=hits, written_bytes=pages, written_bytes_per_day=1024.0, years=years)


@pytest.mark.parametrize(
    ("years", "sentence"),
    [(None, "write_through writes 1.0 KiB per day to L3."),
     (6.0, "write_through writes 1.0 KiB per day to L3, which wears its disks in 6.0 years."),
     (4.9, "write_through writes 1.0 KiB per day to L3, which wears its disks in only 4.9 years."),
     (0.01, "write_through writes 1.0 KiB per day to L3, which wears its disks in only 3.6 days.")],
)
def test_wear_is_reported_with_a_warning_below_five_years(years: float | None, sentence: str) -> None:
    policies = {"write_through": written(100, years), "write_back": written(50, years)}
    plan = replace(plan_of(TURNS, 0, 1, None), policies=policies)
    assert sentence in recommendation(plan)
    gentler = "write_back writes 50.0 % of these bytes, with 75.0 % of the hits."
    assert (gentler in recommendation(plan)) == (years is not None and years < 5)
    slow = StorageBreakEven(read_bytes_per_s=4e9, is_above=False, prefix_tokens=None)
    assert not has_sentence(replace(plan, break_even=slow), "write_through"), "the cache does not store"


def test_routings_are_compared_with_the_best() -> None:
    plan = plan_of(conversations(3), 200, 60, 300, nodes=3, routing=Routing.PREFIX)
    assert plan.fleet is not None
    for name, one in plan.fleet.routings.items():
        sentence = one_sentence(plan, f"Routing {name} finds")
        assert f"its busiest node serves {100 * one.busiest_share:.1f} %" in sentence
        assert ("more L3" in sentence or "as much as" in sentence) == (name != plan.fleet.best)


def test_a_difference_within_the_error_of_a_plan_advises_no_routing() -> None:
    plan = plan_of([request(i, [i % 40], output=1, at_ms=i) for i in range(400)], 400, 0, None, nodes=2)
    assert plan.fleet is not None
    assert plan.fleet.equal == ("session", "prefix") and plan.fleet.best in plan.fleet.equal
    assert has_sentence(plan, "Routings session, prefix differ by less than 2 % of the found tokens.")
    assert not has_sentence(plan, "more L3")
    apart = plan_of(conversations(3), 200, 60, 300, nodes=3)
    assert apart.fleet is not None
    assert len(apart.fleet.equal) == 1 and not has_sentence(apart, "differ by less")


def test_unknowns_say_what_a_plan_leaves_out() -> None:
    unknowns = " ".join(plan_of(TURNS, 0, 1, 1).unknowns)
    for part in ("an idle device", "prompts of this trace", "least recently used", "queues", "overlap"):
        assert part in unknowns

"""The bytes that write policies write, and the years until a store is worn."""

from __future__ import annotations

import random

import pytest

from hicache_lab.plan.result import Plan, Policy
from hicache_lab.traces.routing import Routing
from lab.tests.plan.test_study import Lru, uses_of
from lab.tests.plan.world import PAGE_SIZE, conversations, fits, plan_of
from lab.tests.replay.world import request
from tests.seeds import seeds


def policy(plan: Plan, name: str) -> Policy:
    """A write policy that is modelled."""
    found = plan.policies[name]
    assert found is not None
    return found


def pages(plan: Plan, name: str) -> int:
    """The pages that a policy writes."""
    return policy(plan, name).written_bytes // PAGE_SIZE


def test_write_through_writes_each_new_page_once_into_a_store_without_a_limit() -> None:
    plan = plan_of(conversations(1), 20, 20, None)
    assert pages(plan, "write_through") == plan.traffic.footprint.tokens // PAGE_SIZE


def test_a_page_that_storage_lost_is_written_again() -> None:
    # Three prompts of 8 pages in turn, twice, through a store of 20 pages: it has lost the last 4 of each.
    trace = [request(i, [i % 3], output=1, at_ms=i) for i in range(6)]
    assert pages(plan_of(trace, 0, 0, 20), "write_through") == 3 * 8 + 3 * 4
    assert pages(plan_of(trace, 0, 0, 24), "write_through") == 3 * 8
    assert pages(plan_of(trace, 24, 0, 20), "write_through") == 3 * 8, "pages on L1 are not computed again"


def test_selective_writes_store_a_page_at_its_second_use_and_find_it_at_the_third() -> None:
    trace = [request(i, [i % 2, 10 + i], output=1, at_ms=i) for i in range(6)]
    plan = plan_of(trace, 0, 0, None)
    # 0 and 1 are used three times, the blocks after them once.
    assert pages(plan, "write_through_selective") == 2 * 8
    assert policy(plan, "write_through_selective").hit_tokens["storage"] == 2 * 512
    assert policy(plan, "write_through").hit_tokens["storage"] == 4 * 512
    assert pages(plan_of(trace, 0, 0, None, selective_hits=3), "write_through_selective") == 2 * 8
    assert pages(plan_of(trace, 0, 0, None, selective_hits=4), "write_through_selective") == 0
    assert policy(plan_of(trace, 100, 0, None), "write_through_selective").hit_tokens["device"] == 4 * 512


@pytest.mark.parametrize("seed", seeds(3))
def test_selective_writes_from_the_first_use_are_write_through(seed: int) -> None:
    plan = plan_of(conversations(seed), 30, 40, 200, selective_hits=1)
    assert plan.policies["write_through_selective"] == plan.policies["write_through"]


@pytest.mark.parametrize("seed", seeds(6))
def test_write_back_stores_a_page_when_l1_evicts_it(seed: int) -> None:
    numbers = random.Random(seed)
    device, trace = numbers.choice([60, 100, 200, 5000]), conversations(seed)
    cache, written = Lru(device), set[int]()
    for one, uses in zip(trace, uses_of(trace), strict=True):
        written |= cache.use(uses.pages.tolist()) if fits(one, device) else set()
    assert pages(plan_of(trace, device, 0, None), "write_back") == len(written)


def test_the_years_are_the_endurance_divided_by_the_bytes_of_a_year() -> None:
    # 16 pages of 64 bytes in two days: 512 bytes a day.
    trace = [request(i, [i], output=1, at_ms=i * 2 * 86_400_000) for i in range(2)]
    through = policy(plan_of(trace, 0, 0, None, endurance_bytes=512 * 365 * 3), "write_through")
    assert through.written_bytes_per_day == pytest.approx(512)
    assert through.years == pytest.approx(3)
    assert policy(plan_of(trace, 0, 0, None), "write_through").years is None


def test_only_write_through_is_modelled_with_several_nodes_and_nothing_without_a_store() -> None:
    trace = conversations(1, requests=30)
    fleet = plan_of(trace, 20, 20, 100, nodes=2, routing=Routing.RANDOM).policies
    assert [name for name, found in fleet.items() if found is not None] == ["write_through"]
    assert set(plan_of(trace, 20, 20, 0).policies.values()) == {None}

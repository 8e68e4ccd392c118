"""Several nodes with one store: routings side by side."""

from __future__ import annotations

import pytest

from hicache_lab.plan.result import RoutingPlan
from hicache_lab.traces.routing import Routing
from hicache_lab.traces.synthetic import synthetic_trace
from lab.tests.plan.world import PAGE_SIZE, fits, plan_of

TRACE = [one for one in synthetic_trace(400, 4) if fits(one, 100)]


def found_tokens(one: RoutingPlan) -> int:
    """The tokens that all tiers find."""
    return sum(use.found_tokens for use in one.tiers.values())


@pytest.mark.parametrize("routing", list(Routing))
def test_each_routing_has_the_figures_of_its_own_plan(routing: Routing) -> None:
    plan = plan_of(TRACE, 100, 200, 400, nodes=4, routing=routing)
    assert plan.fleet is not None
    assert set(plan.fleet.routings) == {"random", "session", "prefix", routing.value}
    assert plan.fleet.routings[routing].tiers == plan.tiers
    assert plan.fleet.routings[routing].services == plan.services


def test_one_node_has_no_routing() -> None:
    assert plan_of(TRACE, 100, 200, 400).fleet is None


def test_the_equal_storage_is_the_smallest_with_which_a_routing_finds_as_much_as_the_best() -> None:
    fleet = plan_of(TRACE, 100, 200, 400, nodes=4).fleet
    assert fleet is not None
    best = 0.98 * max(found_tokens(one) for one in fleet.routings.values())
    random = fleet.routings["random"]
    assert fleet.best is not Routing.RANDOM
    assert found_tokens(random) < best
    assert random.equal_storage is not None
    pages = random.equal_storage.tokens // PAGE_SIZE
    assert pages > 400
    enough, less = (
        sum(use.found_tokens for use in plan_of(TRACE, 100, 200, size, nodes=4, routing=Routing.RANDOM).tiers.values())
        for size in (pages, pages - 1)
    )
    assert less < best <= enough


def test_the_busiest_node_has_its_share_of_the_prompts() -> None:
    fleet = plan_of(TRACE, 100, 200, 400, nodes=4, routing=Routing.ROTATE).fleet
    assert fleet is not None
    prompts = [sum(one.input_length for one in TRACE if one.index % 4 == node) for node in range(4)]
    assert fleet.routings["rotate"].busiest_share == pytest.approx(max(prompts) / sum(prompts))


def test_with_a_store_without_a_limit_the_best_routing_has_the_most_on_its_nodes() -> None:
    fleet = plan_of(TRACE, 100, 200, None, nodes=4).fleet
    assert fleet is not None
    assert len({found_tokens(one) for one in fleet.routings.values()}) == 1
    on_node = {name: found_tokens(one) - one.tiers["storage"].found_tokens for name, one in fleet.routings.items()}
    assert on_node[fleet.best] == max(on_node.values()) > on_node["random"]

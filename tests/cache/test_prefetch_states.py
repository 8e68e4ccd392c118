"""The states of prefetches: the table refuses moves that `RULES` lacks, and `check` finds a prefetch beside its row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache.cache.prefetch_states import RULES, Prefetch, PrefetchTable, State
from hicache.errors import InvariantError
from tests.cache.world import prompt

KEY = prompt(*range(1, 9))


def table_with(*rids: str) -> tuple[PrefetchTable, list[Prefetch]]:
    """Return a table with new prefetches, in order of arrival."""
    table = PrefetchTable()
    prefetches = [Prefetch(rid, KEY, arrival, 0.0) for arrival, rid in enumerate(rids)]
    for prefetch in prefetches:
        table.add(prefetch)
    return table, prefetches


def test_each_state_can_be_reached_from_a_new_prefetch_and_comes_to_rest() -> None:
    reached, ends = {State.NEW}, {State.ENDED}
    for _ in State:
        reached |= {state for known in reached for state in RULES[known].next}
        ends |= {state for state in State if RULES[state].next & ends}
    assert reached == ends == set(State)


def test_a_move_that_the_table_of_states_lacks_is_refused_and_changes_nothing() -> None:
    for state in State:
        for other in set(State) - RULES[state].next:
            table, (prefetch,) = table_with("a")
            table._by_state[State.NEW].clear()
            table._by_state[state][prefetch] = None
            prefetch.state = state
            with pytest.raises(InvariantError, match=f"'a' is {state.value}, and cannot become {other.value}"):
                table.move(prefetch, other)
            assert (prefetch.state, table.of(state)) == (state, [prefetch]) or state is State.QUEUED


def test_the_queue_is_in_order_of_arrival_and_other_states_are_in_order_of_their_moves() -> None:
    table, (first, second, third) = table_with("first", "second", "third")
    for prefetch in (second, third, first):
        table.move(prefetch, State.QUEUED)
    assert table.of(State.QUEUED) == [first, second, third]
    for prefetch in (third, first):
        table.move(prefetch, State.ENDED)
    assert (table.first(State.QUEUED), table.of(State.ENDED)) == (second, [third, first])


def lose_turn(table: PrefetchTable, prefetch: Prefetch) -> None:
    table._queue.clear()


def lose_request(table: PrefetchTable, prefetch: Prefetch) -> None:
    del table._by_rid[prefetch.rid]


def change_state(table: PrefetchTable, prefetch: Prefetch) -> None:
    prefetch.state = State.ENDED


def follow(table: PrefetchTable, prefetch: Prefetch) -> None:
    prefetch.leader = table.get("a")


def load_nothing(table: PrefetchTable, prefetch: Prefetch) -> None:
    prefetch.load = object()  # type: ignore[assignment]


def lack_pages(table: PrefetchTable, prefetch: Prefetch) -> None:
    prefetch.state = State.ARRIVED
    del table._by_state[State.QUEUED][prefetch]
    table._by_state[State.ARRIVED][prefetch] = None
    table._queue.clear()


@pytest.mark.parametrize("damage", [lose_turn, lose_request, change_state, follow, load_nothing, lack_pages])
def test_check_finds_a_prefetch_that_does_not_fit_its_state(damage: Callable[[PrefetchTable, Prefetch], Any]) -> None:
    table, (other, prefetch) = table_with("a", "b")
    for each in (other, prefetch):
        table.move(each, State.QUEUED)
    table.move(other, State.ENDED)
    table.check(holding=set())
    damage(table, prefetch)
    with pytest.raises(InvariantError, match="prefetch: "):
        table.check(holding=set())

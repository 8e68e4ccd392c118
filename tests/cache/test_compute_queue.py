"""Who waits for the device, for how long, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.cache.compute_queue import ARRIVALS_S_MIN, RECORDS_MIN, WINDOW, ComputeQueue
from hicache.errors import InvariantError

SPEED = 1000  # tokens per second


def queue_of(**left_tokens: int) -> ComputeQueue:
    """Return a queue of requests that have arrived at second 0."""
    queue = ComputeQueue()
    for rid, left in left_tokens.items():
        queue.arrive(rid, left, 0.0)
    return queue


def begun_every_second(waiting: int) -> ComputeQueue:
    """Return a queue in which requests of one token began at the seconds 1 to 8, while `waiting` others wait."""
    queue = queue_of(**{f"begun-{number}": 1 for number in range(8)}, **{f"r{number}": 1 for number in range(waiting)})
    for number in range(8):
        queue.progress(f"begun-{number}", 0, number + 1.0)
    return queue


def test_a_request_waits_for_the_tokens_of_those_before_it() -> None:
    queue = queue_of(a=1000, b=2000, c=4000)
    assert [queue.wait_s(rid, SPEED, 0.0) for rid in "abc"] == [0.0, 1.0, 3.0]


def test_a_running_request_delays_the_others_by_what_is_left_of_its_prompt() -> None:
    queue = queue_of(a=9000, b=1000, c=1)
    queue.progress("a", 8000, 0.0)
    assert queue.wait_s("c", SPEED, 0.0) == 9.0
    queue.progress("a", 500, 0.0)
    assert queue.wait_s("c", SPEED, 0.0) == 1.5
    queue.progress("a", 0, 0.0)
    assert queue.wait_s("c", SPEED, 0.0) == 1.0


def test_while_the_speed_of_computing_is_unknown_the_wait_is_zero() -> None:
    assert begun_every_second(9).wait_s("r8", 0, 8.0) == 0.0


def test_a_request_whose_pages_were_found_delays_the_others_less() -> None:
    queue = queue_of(a=4000, b=1)
    queue.expect("a", 1000)
    queue.expect("unknown", 5000)
    assert queue.wait_s("b", SPEED, 0.0) == 1.0


def test_a_request_that_waits_keeps_its_place_and_a_preempted_one_waits_before_all_others() -> None:
    queue = queue_of(a=1000, b=1000)
    queue.arrive("a", 3000, 1.0)
    assert queue.first(9) == ["a", "b"] and queue.wait_s("b", SPEED, 1.0) == 3.0
    queue.progress("a", 3000, 2.0)
    queue.leave("a")
    queue.arrive("a", 2000, 3.0, again=True)
    assert queue.first(9) == ["a", "b"] and queue.wait_s("b", SPEED, 3.0) == 2.0
    queue.leave("a")
    queue.arrive("a", 2000, 4.0)
    assert queue.first(9) == ["b", "a"] and queue.wait_s("b", SPEED, 4.0) == 0.0


def test_the_first_requests_are_those_that_arrived_first_and_still_wait() -> None:
    queue = queue_of(a=1, b=1, c=1, d=1)
    queue.progress("a", 1, 0.0)
    queue.leave("c")
    assert queue.first(1) == ["b"] and queue.first(9) == ["b", "d"]
    assert [rid for rid in "abcd" if queue.is_first(rid, 2)] == ["b", "d"]
    assert [rid for rid in "abcd" if queue.is_first(rid, 1)] == ["b"]


def test_the_wait_is_the_longer_one_of_the_tokens_and_of_the_begins() -> None:
    queue = begun_every_second(3)
    assert [queue.wait_s(f"r{number}", SPEED, 8.0) for number in range(3)] == [1.0, 2.0, 3.0]
    assert queue.wait_s("r2", SPEED, 9.5) == 1.5, "the next begin is due since half a second"
    assert queue.wait_s("r0", SPEED, 100.0) == 0.0
    queue.expect("r0", 60_000)
    assert queue.wait_s("r1", SPEED, 8.0) == 60.0


def test_the_begins_before_the_queue_was_empty_do_not_count() -> None:
    queue = begun_every_second(1)
    queue.progress("r0", 0, 9.0)
    queue.arrive("a", 1, 10.0)
    queue.arrive("b", 1, 10.0)
    assert queue.wait_s("b", SPEED, 10.0) == 1 / SPEED


def test_a_begin_that_leaves_the_queue_empty_says_nothing_about_waits() -> None:
    queue = queue_of()
    for number in range(20):  # each arrives after the last one has begun
        queue.arrive(str(number), 1, float(number))
        queue.progress(str(number), 0, float(number))
    queue.arrive("a", 1, 20.0)
    assert queue.wait_s("a", SPEED, 20.0) == 0.0


def test_the_rate_of_arrivals_is_that_of_the_last_ones() -> None:
    queue = ComputeQueue()
    for number in range(RECORDS_MIN):
        assert queue.arrivals_per_s(1.0) == 0.0, "a few arrivals do not show a rate"
        queue.arrive(str(number), 1, 0.0)
    assert queue.arrivals_per_s(1.0) > 0
    for number in range(WINDOW):
        queue.arrive(f"later-{number}", 1, 100 + number / 2)
    assert queue.arrivals_per_s(108.0) == pytest.approx(2.0)
    assert queue.arrivals_per_s(1000.0) < 0.02, "the arrivals have stopped"


def test_requests_that_arrive_at_once_do_not_show_a_high_rate() -> None:
    queue = queue_of(**{f"r{number}": 1 for number in range(WINDOW)})
    assert queue.arrivals_per_s(0.0) == queue.arrivals_per_s(0.001) == WINDOW / ARRIVALS_S_MIN


def test_a_request_that_has_left_delays_no_other() -> None:
    queue = queue_of(a=1000, b=1000, c=1)
    queue.progress("a", 1000, 0.0)
    queue.leave("a")
    queue.leave("b")
    queue.leave("unknown")
    assert queue.wait_s("c", SPEED, 0.0) == 0.0
    queue.leave("c")
    assert not queue and not queue.first(9)


ACTIONS = st.sampled_from(("arrive", "again", "expect", "progress", "leave"))


@given(st.lists(st.tuples(ACTIONS, st.sampled_from("abcd"), st.integers(-5, 5)), max_size=60))
def test_the_invariant_holds_after_each_call_and_all_requests_can_leave(steps: list[tuple[str, str, int]]) -> None:
    queue = ComputeQueue()
    for number, (action, rid, tokens) in enumerate(steps):
        if action == "again":
            queue.arrive(rid, tokens, float(number), again=True)
        elif action == "leave":
            queue.leave(rid)
        elif action == "expect":
            queue.expect(rid, tokens)
        else:
            (queue.arrive if action == "arrive" else queue.progress)(rid, tokens, float(number))
        queue.check()
        waits = [queue.wait_s(each, SPEED, float(number)) for each in queue.first(9)]
        assert waits == sorted(waits) and all(wait >= 0 for wait in waits)
    for rid in "abcd":
        queue.leave(rid)
    assert not queue and not queue.first(9)


def test_check_finds_a_waiting_request_without_tokens() -> None:
    queue = queue_of(a=1)
    queue._left["a"] = 0
    with pytest.raises(InvariantError, match="compute queue"):
        queue.check()
    del queue._left["a"]
    with pytest.raises(InvariantError, match="compute queue"):
        queue.check()

"""The number of requests of the S3 backend, in total and in flight, and its reaction to "slow down" replies."""

from __future__ import annotations

import contextlib
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.errors import ErrorKind, StoreError
from hicache.backends.prefix import EXACT_KEYS_MAX, stored_prefix
from hicache.backends.s3.client import Throttle
from hicache.backends.s3.driver import object_name
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import GET_ERROR, HIT, Subject, load, make_keys, soon, store_chain
from tests.backends.s3.bucket import errors, name, open_on
from tests.backends.s3.stub import StubS3, error, reply
from tests.waiting import wait_for


def test_exists_of_500_keys_takes_at_most_12_requests_when_all_or_none_are_there(store: Subject, stub: StubS3) -> None:
    keys = make_keys(500)
    assert store.backend.batch_exists(keys, deadline=soon()) == 0
    assert 0 < len(stub.requests) <= 12
    stub.objects.update({name(key): b"x" for key in keys})
    stub.forget_requests()
    assert store.backend.batch_exists(keys, deadline=soon()) == 500
    assert 0 < len(stub.requests) <= 12


@given(count=st.integers(0, 700), data=st.data())
def test_the_search_finds_the_end_of_every_prefix(count: int, data: st.DataObject) -> None:
    stored = data.draw(st.integers(0, count))
    asked: list[int] = []

    def ask(positions: list[int] | range) -> list[bool]:
        asked.extend(positions)
        return [position < stored for position in positions]

    assert stored_prefix(count, ask) == stored  # type: ignore[arg-type]
    assert len(asked) == len(set(asked)) <= max(20, EXACT_KEYS_MAX)


@given(there=st.lists(st.booleans(), max_size=300))
def test_with_holes_the_search_ends_at_a_hole_and_never_after_a_missing_page(there: list[bool]) -> None:
    """With many keys the first hole may be missed; the result is still the end of a run of stored pages."""
    found = stored_prefix(len(there), lambda positions: [there[position] for position in positions])
    assert found == len(there) or not there[found]
    assert found == 0 or there[found - 1]
    if len(there) <= EXACT_KEYS_MAX:
        assert found == next((position for position, is_there in enumerate(there) if not is_there), len(there))


def test_clear_takes_one_listing_and_one_removal_per_thousand_pages(store: Subject, stub: StubS3) -> None:
    """Pages are not looked up singly, and objects that are not pages of this namespace stay."""
    keys = make_keys(2500)
    others = {"test/notes.txt", object_name("test/", bytes(31) + b"\1", keys[0]), name(keys[0]) + ".old"}
    stub.objects.update(dict.fromkeys([*others, *map(name, keys)], b"x"))
    stub.forget_requests()
    assert store.backend.clear(deadline=soon()) == 2500
    assert (stub.listings, stub.methods()) == (3, ["POST"] * 3)
    assert set(stub.objects) == others
    assert errors(store) == {}


@pytest.mark.parametrize("verb", ["delete", "clear"])
def test_pages_that_the_server_does_not_remove_are_errors(store: Subject, stub: StubS3, verb: str) -> None:
    keys = make_keys(3)
    store_chain(store, keys)

    def remove() -> int:
        return store.backend.clear(deadline=soon()) if verb == "clear" else store.backend.delete(keys, deadline=soon())

    refused = b"<DeleteResult><Error><Key>x</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    stub.fault = lambda request: reply(200, refused) if request.method == "POST" else None
    assert remove() == 2
    assert errors(store) == {"access_denied": 1}
    stub.fault = lambda request: error(503, "SlowDown") if request.method == "POST" else None
    assert remove() == 0
    assert errors(store) == {"access_denied": 1, "throttled": 1}
    stub.fault = lambda request: None
    assert remove() == 3


@pytest.mark.parametrize("connections", [1, 3, 8])
def test_no_more_requests_are_in_flight_than_allowed(stub: StubS3, connections: int) -> None:
    """Control of the limits 1 and 3: with the limit 8, 8 requests are in flight."""
    store, keys = open_on(stub, connections=connections, timeout=30), make_keys(24)
    store_chain(store, keys)
    stub.forget_requests()
    gate = threading.Event()
    stub.fault = lambda request: None if gate.wait(30) else error(503, "SlowDown")
    with ThreadPoolExecutor(3) as threads:
        results = [threads.submit(load, store, keys) for _ in range(3)]
        try:
            wait_for(lambda: stub.running == connections)
        finally:
            gate.set()
        assert [result.result() for result in results] == [[HIT] * 24] * 3
    assert stub.running_max == connections


@pytest.mark.parametrize(("asked", "sent"), [("30", 1), ("0", 2), ("soon", 2)])
def test_a_server_that_asks_for_a_pause_gets_no_requests(store: Subject, stub: StubS3, asked: str, sent: int) -> None:
    keys = make_keys(1)
    stub.fault = lambda request: error(503, "SlowDown", retry_after=asked)
    assert load(store, keys) == [GET_ERROR]
    assert load(store, keys) == [GET_ERROR]
    assert len(stub.requests) == sent
    assert errors(store) == {"throttled": 2}


def ended(throttle: Throttle, kind: str | None) -> int:
    """End a request of `throttle` with an error of `kind`, None for an answer; return the new limit."""
    with contextlib.suppress(StoreError), throttle.turn(soon()):
        if kind is not None:
            raise StoreError(kind)
    return int(throttle._limit)


def test_slow_down_halves_the_limit_and_answers_raise_it_again() -> None:
    clock = ManualClock()
    throttle = Throttle(8, clock)
    assert ended(throttle, ErrorKind.ACCESS_DENIED) == 8, "the control"
    assert ended(throttle, ErrorKind.THROTTLED) == 4
    assert ended(throttle, ErrorKind.THROTTLED) == 4, "that request was already in flight before the cut"
    limits = [ended(throttle, None) for _ in range(40)]
    assert limits == sorted(limits) and limits[0] == 4 and limits[-1] == 8
    clock.advance(1.0)
    assert ended(throttle, ErrorKind.THROTTLED) == 4


def test_no_request_is_sent_in_a_pause_that_the_server_requested() -> None:
    clock = ManualClock()
    throttle = Throttle(8, clock)
    with contextlib.suppress(StoreError), throttle.turn(soon()):
        raise StoreError(ErrorKind.THROTTLED, retry_after_s=5.0)
    clock.advance(4.9)
    with pytest.raises(StoreError, match="requested a pause"), throttle.turn(soon()):
        pass
    clock.advance(0.2)
    with throttle.turn(soon()):
        pass


def test_a_request_that_waits_for_a_turn_ends_at_the_deadline() -> None:
    clock = ManualClock()
    throttle = Throttle(1, clock)

    def take_turn(deadline: float) -> None:
        with throttle.turn(deadline):
            pass

    with ThreadPoolExecutor(1) as threads, throttle.turn(math.inf):
        waiting = threads.submit(take_turn, clock() + 1.0)
        wait_for(waiting.done, lambda: clock.advance(1.0))
    with pytest.raises(StoreError) as caught:
        waiting.result()
    assert caught.value.kind is ErrorKind.DEADLINE
    take_turn(math.inf)

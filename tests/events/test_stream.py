"""The bounded stream, with one thread and with two."""

from __future__ import annotations

import threading
import time

import pytest

from hicache.errors import InvalidInput, InvariantError
from hicache.events import Cleared, EventStream, Medium, Recorded, Removed, Stored
from hicache.events.types import EVENT_OVERHEAD_BYTES


def removed(number: int) -> Removed:
    return Removed(Medium.HOST, (number.to_bytes(32, "big"),))


SIZE = removed(0).size_bytes
STORED = Stored(Medium.DEVICE, (bytes(32),), None, b"", bytes(16), 4)


def test_beyond_the_capacity_the_oldest_events_are_dropped_and_counted() -> None:
    stream = EventStream(3 * SIZE)
    for number in range(10):
        stream.put(removed(number))
        stream.check()
    state = stream.statistics()
    assert (state.events, state.dropped, state.held_events, state.held_bytes) == (10, 7, 3, 3 * SIZE)


def test_an_event_larger_than_the_capacity_is_kept_alone() -> None:
    stream = EventStream(1)
    for number in range(3):
        stream.put(removed(number))
        stream.check()
    assert stream.statistics().held_events == 1
    with pytest.raises(InvalidInput, match="is not valid"):
        EventStream(0)


def give_snapshot(stream: EventStream, *events: Recorded) -> None:
    snapshot = stream.begin_snapshot()
    for event in events:
        snapshot.put(event)
    snapshot.end()


def test_a_snapshot_goes_only_to_readers_that_requested_it_and_not_to_closed_ones() -> None:
    stream = EventStream(100 * SIZE)
    asks, follows = stream.subscribe(), stream.subscribe()
    asks.request_snapshot()
    give_snapshot(stream, STORED)
    assert (asks.drain(5), follows.drain(5)) == ((Cleared(), STORED), ())
    asks.close()
    asks.close()
    assert stream.statistics().readers == 1


@pytest.mark.parametrize("damage", ["hole", "sum", "capacity"])
def test_the_check_finds(damage: str) -> None:
    """Negative controls."""
    stream = EventStream(100 * SIZE)
    for number in range(3):
        stream.put(removed(number))
    if damage == "hole":
        del stream._events[1]
    elif damage == "sum":
        stream._held_bytes -= 1
    else:
        stream._capacity_bytes = 1
    with pytest.raises(InvariantError, match=damage):
        stream.check()


def test_the_size_of_an_event_includes_tokens_and_keys() -> None:
    assert Cleared().size_bytes == EVENT_OVERHEAD_BYTES
    assert STORED.size_bytes == SIZE + len(STORED.tokens)


def numbered(stream: EventStream) -> Stored:
    """Return the snapshot of this test: its page size is the number of events before it."""
    return STORED._replace(page_size=stream.statistics().events)


@pytest.mark.usefixtures("threads_switch_often")
def test_a_reader_on_another_thread_sees_each_event_once_or_a_gap(soak_factor: int) -> None:
    """The producer never waits, so it overtakes the reader repeatedly. The reader's events are still consistent."""
    events = 30_000 * soak_factor
    stream = EventStream(50 * SIZE)
    reader = stream.subscribe()
    problems: list[str] = []

    def follow() -> None:
        expected: int | None = 0  # the number of the next event; None between `Cleared` and the rest of a snapshot
        while expected != events and not problems:
            for event in reader.drain(20):
                if event == Cleared():
                    expected = None
                elif isinstance(event, Stored):
                    expected = event.page_size
                elif expected is not None and event == removed(expected):
                    expected += 1
                else:
                    problems.append(f"{event} instead of event {expected}")

    thread = threading.Thread(target=follow)
    thread.start()
    for number in range(events):
        stream.put(removed(number))
        if stream.snapshot_wanted:
            give_snapshot(stream, numbered(stream))
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        if stream.snapshot_wanted:
            give_snapshot(stream, numbered(stream))
        thread.join(0.001)
    assert not thread.is_alive() and not problems
    stream.check()

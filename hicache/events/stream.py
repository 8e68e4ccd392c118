"""The bounded stream between the scheduler, which makes events, and their readers.

Invariant: the stream holds the events with the numbers `oldest` to `next - 1`, without a hole, and they weigh no more
than the capacity unless it is a single one. Events are kept after they were read, so each reader goes at its own pace.
A reader that falls further behind than the capacity has a gap: it forgets everything, and a snapshot of the tree, which
it asks for and the scheduler provides, puts it right.

Locking design: the scheduler alone writes the events and the counters; it takes no lock and waits for nobody. A reader
belongs to one thread at a time. It finds events by number in a dictionary, whose single operations are atomic: an
event that is missing below `next` was dropped, which is all that a race can look like. `_wanted` and `_snapshot` of a
reader are single references, set by one side and cleared by the other. `_lock` guards the list of readers and is taken
where one comes or goes, never by the scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import InvalidInput, InvariantError
from .types import Cleared, Event, Stored


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """Counters since the stream was made, and what it holds now. `dropped` events may have been read before."""

    events: int
    dropped: int
    snapshots: int
    held_events: int
    held_bytes: int
    readers: int


class EventStream:
    """See the module's docstring. `capacity_bytes` bounds what the kept events weigh. Raises InvalidInput below 1."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise InvalidInput(f"event stream: a capacity of {capacity_bytes} bytes holds nothing")
        # Whether a reader waits for a snapshot; the scheduler looks at it once per step.
        self.snapshot_wanted = False
        self._capacity_bytes = capacity_bytes
        self._events: dict[int, Event] = {}
        self._next = 0
        self._oldest = 0
        self._held_bytes = 0
        self._snapshots = 0
        self._readers: tuple[EventReader, ...] = ()
        self._lock = threading.Lock()

    def put(self, event: Event) -> None:
        """Append an event, dropping the oldest if there is no room. Scheduler thread; never blocks."""
        number = self._next
        self._events[number] = event
        self._next = number + 1  # after the event is there: a reader takes a missing one for dropped
        self._held_bytes += event.size_bytes
        while self._held_bytes > self._capacity_bytes and self._oldest < number:
            # Counted before it is gone: a reader that misses it finds it in the count.
            oldest, self._oldest = self._oldest, self._oldest + 1
            self._held_bytes -= self._events.pop(oldest).size_bytes

    def put_snapshot(self, events: Iterable[Stored]) -> None:
        """Hand a description of the whole tree to the readers that wait for one. Scheduler thread; never blocks."""
        self.snapshot_wanted = False  # before the readers are looked at: one that asks from now on sets it again
        snapshot: tuple[int, tuple[Event, ...]] = (self._next, (Cleared(), *events))
        self._snapshots += 1
        for reader in self._readers:
            if reader._wanted:
                reader._wanted = False
                reader._snapshot = snapshot

    def subscribe(self) -> EventReader:
        """Return a reader that begins with the first event ever, so with a gap if that is gone. Any thread."""
        reader = EventReader(self)
        with self._lock:
            self._readers = (*self._readers, reader)
        return reader

    def statistics(self) -> StreamStatistics:
        """A snapshot of the counters. Any thread; the numbers may be of neighbouring moments."""
        return StreamStatistics(
            events=self._next, dropped=self._oldest, snapshots=self._snapshots, held_events=self._next - self._oldest,
            held_bytes=self._held_bytes, readers=len(self._readers),
        )  # fmt: skip

    def check(self) -> None:
        """Raises InvariantError if the invariant of the module does not hold. Scheduler thread."""
        if list(self._events) != list(range(self._oldest, self._next)):
            raise InvariantError("event stream: the kept events are not the newest ones without a hole")
        if self._held_bytes != sum(event.size_bytes for event in self._events.values()):
            raise InvariantError("event stream: held_bytes is not the sum over the events")
        if self._held_bytes > self._capacity_bytes and len(self._events) > 1:
            raise InvariantError("event stream: holds more than its capacity")


class EventReader:
    """One follower's place in a stream. Made by `EventStream.subscribe`; used by one thread at a time.

    `gaps` counts how often events were dropped before they were read. `in_sync` is False from a gap to the snapshot
    after it: what has come since is less than there is.
    """

    def __init__(self, stream: EventStream) -> None:
        self.gaps = 0
        self.in_sync = True
        self._stream = stream
        self._cursor = 0
        self._wanted = False
        self._snapshot: tuple[int, tuple[Event, ...]] | None = None

    def drain(self, events_max: int) -> tuple[Event, ...]:
        """Return the next events, `events_max` at most; none if nothing has happened. Never blocks.

        A gap comes as `Cleared`, once, and asks for a snapshot. Nothing follows until that arrives, because what
        happens to an unknown tree says nothing. A snapshot comes as `Cleared` and a `Stored` for everything, parents
        first, however many these are.
        """
        snapshot = self._snapshot
        if snapshot is not None:
            self._snapshot = None
            self.in_sync = True
            # The events before it are part of it. Some after it may have been read already; they come again.
            self._cursor, events = snapshot
            return events
        if not self.in_sync:
            return ()
        kept = self._stream._events
        end = min(self._stream._next, self._cursor + events_max)
        found = [kept.get(number) for number in range(self._cursor, end)]
        events = tuple(event for event in found if event is not None)
        if len(events) < len(found):
            self.in_sync = False
            self.gaps += 1
            self.request_snapshot()
            return (Cleared(),)
        self._cursor = end
        return events

    def request_snapshot(self) -> None:
        """Ask the scheduler for a description of the whole tree; `drain` returns it some steps later."""
        self._wanted = True
        self._stream.snapshot_wanted = True

    def close(self) -> None:
        """Leave the stream. Any thread; may be called twice."""
        with self._stream._lock:
            self._stream._readers = tuple(other for other in self._stream._readers if other is not self)

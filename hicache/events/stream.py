"""The bounded stream between the scheduler, which creates events, and their readers.

Invariant: the stream holds the events with the numbers `oldest` to `next - 1` without a hole, and their size is at most
the capacity, except for a single larger event. Events stay after they were read, so each reader has its own speed. A
reader that falls behind further than the capacity has a gap: it forgets everything and requests a snapshot of the tree
from the scheduler.

A snapshot comes in parts, because a large tree is walked in slices. Until it is complete, its readers read only the
snapshot, so the scheduler also puts each new event into the snapshot, between the parts.

Locking design: only the scheduler writes the events and the counters; it takes no lock and never waits. A reader
belongs to one thread at a time. It finds events by number in a dictionary, whose single operations are atomic: an event
that is missing below `next` was dropped, and a race cannot look different. `_wanted` of a reader is a single reference,
set by one side and cleared by the other. Snapshots reach a reader through deques, which the scheduler appends to and
the reader pops from. `_lock` guards the list of readers; `subscribe` and `close` take it, the scheduler never does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from ..errors import InvalidInput, InvariantError
from .types import Cleared, Event, Medium, Recorded, Removed, RemovedRun, Stored, StoredRun

# Pages on storage that a reader remembers, 125 bytes each. `PrefixIndex` keeps as many that are only on storage.
STORAGE_PAGES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """Counters since the stream was created, and its current content. `dropped` events may have been read before."""

    events: int
    dropped: int
    snapshots: int
    held_events: int
    held_bytes: int
    readers: int


class EventStream:
    """See the module's docstring. `capacity_bytes` limits the size of stored events. Raises InvalidInput below 1."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise InvalidInput(f"event stream: a capacity of {capacity_bytes} bytes is not valid; use at least 1")
        # True while a reader waits for a snapshot; the scheduler checks it once per step.
        self.snapshot_wanted = False
        self._capacity_bytes = capacity_bytes
        self._events: dict[int, Recorded] = {}
        self._next = 0
        self._oldest = 0
        self._held_bytes = 0
        self._snapshots = 0
        self._readers: tuple[EventReader, ...] = ()
        self._lock = threading.Lock()

    def put(self, event: Recorded) -> None:
        """Append an event, and drop the oldest ones while the stream is full. Scheduler thread; never blocks."""
        number = self._next
        self._events[number] = event
        self._next = number + 1  # after the event is added: a reader treats a missing one as dropped
        self._held_bytes += event.size_bytes
        while self._held_bytes > self._capacity_bytes and self._oldest < number:
            # Counted before it is removed, so a reader that misses it finds it in the count.
            oldest, self._oldest = self._oldest, self._oldest + 1
            self._held_bytes -= self._events.pop(oldest).size_bytes

    def begin_snapshot(self) -> Snapshot:
        """Begin a snapshot of the whole tree for the readers that wait for one. Scheduler thread; never blocks."""
        self.snapshot_wanted = False  # before the readers are visited: a later request sets it again
        self._snapshots += 1
        snapshot = Snapshot(self)
        for reader in self._readers:
            if reader._wanted:
                reader._wanted = False
                snapshot._feeds.append(feed := deque[Recorded | _End]([Cleared()]))
                reader._feeds.append(feed)
        return snapshot

    def request_snapshot(self) -> None:
        """Make all readers start over, for a change that events cannot describe. Scheduler thread."""
        for reader in self._readers:
            reader.request_snapshot()

    def subscribe(self) -> EventReader:
        """Return a reader that begins at event 0, so with a gap if that was dropped. Any thread."""
        reader = EventReader(self)
        with self._lock:
            self._readers = (*self._readers, reader)
        return reader

    def statistics(self) -> StreamStatistics:
        """Return the counters. Any thread; they may be of slightly different moments."""
        return StreamStatistics(
            events=self._next, dropped=self._oldest, snapshots=self._snapshots, held_events=self._next - self._oldest,
            held_bytes=self._held_bytes, readers=len(self._readers),
        )

    def check(self) -> None:
        """Raise InvariantError if the invariant of the module does not hold. Scheduler thread."""
        if list(self._events) != list(range(self._oldest, self._next)):
            raise InvariantError("event stream: the stored events are not the newest, or have a hole")
        if self._held_bytes != sum(event.size_bytes for event in self._events.values()):
            raise InvariantError("event stream: held_bytes is not the sum over the events")
        if self._held_bytes > self._capacity_bytes and len(self._events) > 1:
            raise InvariantError("event stream: holds more than its capacity")


class Snapshot:
    """A description of the whole tree, in flight to readers; it begins with `Cleared`. Scheduler thread."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._feeds: list[deque[Recorded | _End]] = []

    def put(self, event: Recorded) -> None:
        """Append an event: a part of the tree, or an event that was just put into the stream."""
        for feed in self._feeds:
            feed.append(event)

    def end(self) -> None:
        """Complete the snapshot. Its readers continue with the next event of the stream."""
        for feed in self._feeds:
            feed.append(_End(self._stream._next))


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a snapshot: the number of the event after it."""

    next: int


class EventReader:
    """The position of one reader in a stream. Created by `EventStream.subscribe`; used by one thread at a time.

    `gaps` counts how often events were dropped before they were read. `in_sync` is False from a gap until the end of
    the next snapshot, while the events so far describe only a part of the tree.

    Invariant: after a `Cleared`, and from the start, each page is stored on a medium and removed from it in turn, so a
    subscriber may count. The tree ensures this for device and host. It does not know which pages have left it and stay
    on storage, so the reader does: `_on_storage` are the pages that it has reported there, the least recently stored
    first. Beyond `storage_pages_max` it reports the first ones as removed, and forgets them.
    """

    def __init__(self, stream: EventStream, *, storage_pages_max: int = STORAGE_PAGES_MAX) -> None:
        self.gaps = 0
        self.in_sync = True
        self._stream = stream
        self._cursor = 0
        self._wanted = False
        self._feeds: deque[deque[Recorded | _End]] = deque()
        self._storage_pages_max = storage_pages_max
        self._on_storage: dict[bytes, bool] = {}  # the values are True
        self._ready: deque[Event] = deque()  # read from the stream and not returned yet

    def drain(self, events_max: int) -> tuple[Event, ...]:
        """Return the next events, at most `events_max`; an empty tuple if there are none. Never waits. Hashes the page
        keys of these events if they are not hashed yet.

        A gap becomes one `Cleared` and requests a snapshot. No events follow until the snapshot begins, because events
        of an unknown tree are meaningless. A snapshot is a `Cleared` and a `Stored` for each page, parents first, with
        the new events of that time between them.
        """
        ready = self._ready
        while not ready and (events := self._next_events(events_max)):
            for event in events:
                ready.extend(self._news(event))
        return tuple(ready.popleft() for _ in range(min(events_max, len(ready))))

    def _next_events(self, events_max: int) -> tuple[Event, ...]:
        if self._feeds and (events := self._drain_snapshot(events_max)):
            return events
        if not self.in_sync:
            return ()
        kept = self._stream._events
        end = min(self._stream._next, self._cursor + events_max)
        found = [kept.get(number) for number in range(self._cursor, end)]
        there = [event for event in found if event is not None]
        if len(there) < len(found):
            self.in_sync = False
            self.gaps += 1
            self.request_snapshot()
            return (Cleared(),)
        self._cursor = end
        return tuple(map(_resolved, there))

    def _drain_snapshot(self, events_max: int) -> tuple[Event, ...]:
        while len(self._feeds) > 1:  # a later snapshot replaces the earlier ones
            self._feeds.popleft()
        feed, events = self._feeds[0], list[Event]()
        self.in_sync = False
        while feed and len(events) < events_max:
            event = feed.popleft()
            if isinstance(event, _End):
                self._feeds.popleft()
                self.in_sync = True
                # The snapshot contains the events before it. Events after it may be read a second time.
                self._cursor = event.next
                break
            events.append(_resolved(event))
        return tuple(events)

    def _news(self, event: Event) -> list[Event]:
        """Return the parts of `event` that the subscriber does not know yet."""
        known = self._on_storage
        if isinstance(event, Cleared):
            known.clear()
        elif event.medium is Medium.STORAGE:
            if isinstance(event, Removed):
                gone = tuple(key for key in event.keys if known.pop(key, False))
                return [Removed(event.medium, gone)] if gone else []
            news: list[Event] = list(_runs([key not in known for key in event.keys], event))
            for key in event.keys:
                known.pop(key, None)
                known[key] = True
            oldest = first_beyond(known, self._storage_pages_max)
            for key in oldest:
                del known[key]
            return [*news, Removed(event.medium, oldest)] if oldest else news
        return [event]

    def request_snapshot(self) -> None:
        """Request a snapshot of the whole tree from the scheduler; `drain` returns it some steps later."""
        self._wanted = True
        self._stream.snapshot_wanted = True

    def close(self) -> None:
        """Unsubscribe. Idempotent. Any thread."""
        with self._stream._lock:
            self._stream._readers = tuple(other for other in self._stream._readers if other is not self)


def first_beyond(pages: Mapping[bytes, object], pages_max: int) -> tuple[bytes, ...]:
    """Return the first keys if there are more than `pages_max`: those beyond, and one in 256 of the others, because a
    dictionary finds its first key slowly after many were deleted there."""
    beyond = len(pages) - pages_max
    return tuple(islice(pages, beyond + pages_max // 256)) if beyond > 0 else ()


def _runs(chosen: Sequence[bool], event: Stored) -> Iterator[Stored]:
    """Yield the runs of `event` that consist of chosen pages."""
    position = 0
    for is_chosen, group in groupby(chosen):
        begin, position = position, position + len(list(group))
        if is_chosen:
            yield event.part(begin, position)


def _resolved(event: Recorded) -> Event:
    return event.resolve() if isinstance(event, (StoredRun, RemovedRun)) else event

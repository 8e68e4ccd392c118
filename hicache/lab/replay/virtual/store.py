"""A store in virtual time: a table of page keys behind the real `Store`, with the speed of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from ....backends.base import EvictionListener, StoredPage, Usage
from ....backends.driver import Incidents
from ....backends.limit import HIGH_WATER, LOW_WATER
from ....backends.order import EvictionOrder
from ....backends.pages import PageReads, PageWrites
from ....frame import Damage, FrameCodec, PageBuffer, TagStream
from ...speeds import StorageSpeed
from .clock import VirtualClock
from .machine import Link


class UnverifiedCodec(FrameCodec):
    """A codec for pages without bytes: every page is sound."""

    def accept(
        self, key: bytes, page: PageBuffer, stored_bytes: int, arrived: TagStream | None = None
    ) -> Damage | None:
        """Return None."""
        return None

    def is_sealed(self, key: bytes, page: PageBuffer) -> bool:
        """Return True."""
        return True


class Table:
    """The pages of one namespace in a store that several engines may share, and its device.

    Pages over `capacity_bytes` leave in the order of `EvictionOrder`, as in `file`, `memory` and the daemon. A store
    that `sweeps`, as S3, Redis and `shared_files` under a limit, evicts from `HIGH_WATER` down to `LOW_WATER`. The time
    and the interval of the sweep itself are left out.

    Invariant: a store with a capacity has a place in `order` for each of its pages.
    """

    def __init__(
        self, clock: VirtualClock, speed: StorageSpeed, page_bytes: int, capacity_bytes: int | None, *, sweeps: bool
    ) -> None:
        self.clock = clock
        self.speed = speed
        self.capacity_bytes = capacity_bytes
        self.keys: set[bytes] = set()
        self.order = EvictionOrder()
        self.reads, self.writes = Link(clock, speed.read_bytes_per_s), Link(clock, speed.write_bytes_per_s)
        self._page_bytes = page_bytes
        self._pages_max = None if capacity_bytes is None else capacity_bytes // page_bytes
        self._sweeps = sweeps

    def move(self, link: Link, pages: int) -> None:
        """Wait for one round of at most `speed.parallel` operations: their fixed times overlap."""
        _, end_s = link.reserve(pages * self._page_bytes, self.clock() + self.speed.fixed_s)
        self.clock.sleep(end_s - self.clock())

    def make_room(self, since: int) -> list[bytes] | None:
        """Evict pages last used before `since` until one more fits; return them, or None if none may leave."""
        if self._pages_max is None:
            return []
        limit = int(self._pages_max * HIGH_WATER) if self._sweeps else self._pages_max
        if len(self.keys) < limit:
            return []
        target = int(self._pages_max * LOW_WATER) if self._sweeps else limit - 1
        evicted = []
        while len(self.keys) > target:
            oldest = self.order.oldest()
            if oldest is None or oldest[1] > since:
                break
            self.discard(oldest[0])
            evicted.append(oldest[0])
        return evicted if len(self.keys) < self._pages_max else None

    def add(self, key: bytes, parent: bytes | None) -> None:
        """Add a page."""
        self.keys.add(key)
        if self._pages_max is not None:
            self.order.add(key, parent)

    def use(self, keys: Sequence[bytes]) -> None:
        """Count pages, head first, as used now."""
        if self._pages_max is not None:
            self.order.use(keys)

    def discard(self, key: bytes) -> None:
        """Remove a page."""
        self.keys.discard(key)
        self.order.discard(key)

    def usage(self) -> Usage:
        """Return the pages and their bytes."""
        return Usage(len(self.keys), len(self.keys) * self._page_bytes, self.capacity_bytes)


class TableDriver:
    """The driver of one engine over a Table. A batch does not evict its own pages or their ancestors."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self._evicted_pages = 0
        self._listener: EvictionListener = lambda keys: None

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Driver. Takes the fixed time of one operation."""
        self.table.clock.sleep(self.table.speed.fixed_s)
        return [key in self.table.keys for key in keys]

    def read(self, pages: PageReads[None]) -> None:
        """See Driver."""
        table, positions, hits = self.table, iter(pages), list[bytes]()
        while some := list(islice(positions, table.speed.parallel)):
            table.move(table.reads, sum(pages.keys[position] in table.keys for position in some))
            for position in some:
                if (key := pages.keys[position]) in table.keys:
                    pages.accept(position, pages.codec.frame_bytes, None)
                    hits.append(key)
                else:
                    pages.miss(position)
        table.use(hits)

    def write(self, pages: PageWrites) -> None:
        """See Driver. Rejects the tail of a batch that does not fit; its head stays."""
        table, keys = self.table, pages.keys
        since = table.order.now()
        table.use([*(parent for parent in pages.parents[:1] if parent), *keys])
        for start in range(0, len(keys), table.speed.parallel):
            if pages.is_late:
                break
            some = range(start, min(start + table.speed.parallel, len(keys)))
            table.move(table.writes, sum(keys[position] not in table.keys for position in some))
            for position in some:
                if keys[position] in table.keys:
                    pages.present(position)
                elif not pages.is_full:
                    self._write(pages, position, since)
        table.use(keys)

    def _write(self, pages: PageWrites, position: int, since: int) -> None:
        evicted = self.table.make_room(since)
        if evicted is None:
            pages.reject(position)
            return
        if evicted:
            self._evicted_pages += len(evicted)
            self._listener(evicted)
        self.table.add(pages.keys[position], pages.parents[position])
        pages.stored(position)

    def touch(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Touches."""
        self.table.clock.sleep(self.table.speed.fixed_s)
        self.table.use(keys)
        return [key in self.table.keys for key in keys]

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[None] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver."""
        removed = [key for key in keys if key in self.table.keys]
        for key in removed:
            self.table.discard(key)
        return len(removed), ()

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver. Yields nothing: the table has pages without bytes, and its namespace is not read by tools."""
        return iter(())

    def measure(self) -> Usage:
        """See Driver."""
        return self.table.usage()

    def incidents(self) -> Incidents:
        """See HasIncidents."""
        return Incidents(evicted_pages=self._evicted_pages)

    def watch_evictions(self, namespace: bytes, listener: EvictionListener) -> None:
        """See ReportsEvictions."""
        self._listener = listener

    def close(self) -> None:
        """See Driver. The table stays, for the other engines."""

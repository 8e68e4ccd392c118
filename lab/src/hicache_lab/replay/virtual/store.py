"""A store in virtual time: a table of page keys behind the real `Store`, with the speed of a device."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from hicache.backends.base import EvictionListener, StoredPage, Usage
from hicache.backends.driver import Incidents
from hicache.backends.limit import HIGH_WATER, LOW_WATER
from hicache.backends.order import AdaptivePages, EvictionOrder
from hicache.backends.pages import PageReads, PageWrites
from hicache.frame import Damage, FrameCodec, PageBuffer, TagStream
from hicache.tournament import PASSED_MAX

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


@dataclass(slots=True)
class Batch:
    """A write in progress. Its pages and their ancestors are used at `since` or later; `reserved` are its new pages
    with their parents, and `stored` those that have been added."""

    since: int
    reserved: dict[bytes, bytes | None]
    stored: list[bytes] = field(default_factory=list)


class Table:
    """The pages of one namespace in a store that several engines may share, and its device.

    Pages over `capacity_bytes` leave in the order of `EvictionOrder`, as in `memory` and the daemon. A store that
    `sweeps`, as S3, Redis and `shared_files` under a limit, evicts from `HIGH_WATER` down to `LOW_WATER`. The time and
    the interval of the sweep itself are left out. With `adaptive`, all engines share one tournament, as in the pool of
    a daemon; engines on files have one each.

    Invariant: a store with a capacity has a place in its order for each of its pages.
    """

    def __init__(
        self, clock: VirtualClock, speed: StorageSpeed, page_bytes: int, capacity_bytes: int | None, *, sweeps: bool,
        adaptive: bool = False,
    ) -> None:
        self.clock = clock
        self.speed = speed
        self.keys: set[bytes] = set()
        self._reads, self._writes = Link(clock, speed.read_bytes_per_s), Link(clock, speed.write_bytes_per_s)
        self._capacity_bytes = capacity_bytes
        self._page_bytes = page_bytes
        self._pages_max = None if capacity_bytes is None else capacity_bytes // page_bytes
        self._sweeps = sweeps
        self._adaptive = AdaptivePages(self._pages_max) if adaptive and self._pages_max is not None else None
        self._order = EvictionOrder(adaptive=self._adaptive)

    def move(self, pages: int, *, writes: bool) -> None:
        """Wait for one round of at most `speed.parallel` operations: their fixed times overlap."""
        link, size_bytes = self._writes if writes else self._reads, pages * self._page_bytes
        if writes and self.speed.links == 1:
            link, size_bytes = self._reads, int(size_bytes * self.speed.read_bytes_per_s / self.speed.write_bytes_per_s)
        _, end_s = link.reserve(size_bytes, self.clock() + self.speed.fixed_s)
        self.clock.sleep(end_s - self.clock())

    def begin_write(self, keys: Sequence[bytes], parents: Sequence[bytes | None]) -> Batch:
        """Protect a batch and its ancestors from evictions for it."""
        if self._adaptive is not None:
            self._adaptive.use(keys, *parents[:1])
        new = {key: parent for key, parent in zip(keys, parents, strict=True) if key not in self.keys}
        return Batch(0 if self._pages_max is None else self._protect(keys, parents[0]), new)

    def _protect(self, keys: Sequence[bytes], parent: bytes | None) -> int:
        """Use pages and their ancestors; return a time of the order before that."""
        since = self._order.now()
        self.use(keys if parent is None else [parent, *keys])
        return since

    def end_write(self, batch: Batch, keys: Sequence[bytes]) -> None:
        """End the protection."""
        self.use(keys)

    def make_room(self, batch: Batch) -> list[bytes] | None:
        """Evict pages until one more fits; return them, or None if it does not."""
        if self._pages_max is None:
            return []
        limit = int(self._pages_max * HIGH_WATER) if self._sweeps else self._pages_max
        if len(self.keys) < limit:
            return []
        target = int(self._pages_max * LOW_WATER) if self._sweeps else limit - 1
        evicted = []
        while len(self.keys) > target and (victim := self._victim(batch.since)) is not None:
            self.discard(victim)
            evicted.append(victim)
        return evicted if len(self.keys) < self._pages_max else None

    def add(self, key: bytes, parent: bytes | None) -> None:
        """Add a page."""
        self.keys.add(key)
        if self._pages_max is not None:
            self._order.add(key, parent)

    def hit(self, keys: Sequence[bytes], parent: bytes | None = None) -> None:
        """Count stored pages, head first, as used by a request, after `parent` if that is known."""
        if self._adaptive is not None:
            self._adaptive.use(keys, parent)
        self.use(keys)

    def parent_of(self, key: bytes) -> bytes | None:
        """Return the page before a page, if a read of the store finds it."""
        return None

    def use(self, keys: Sequence[bytes]) -> None:
        """Count pages, head first, as used now."""
        if self._pages_max is not None:
            self._order.use(keys)

    def discard(self, key: bytes) -> None:
        """Remove a page."""
        self.keys.discard(key)
        self._order.discard(key)

    def usage(self) -> Usage:
        """Return the pages and their bytes."""
        return Usage(len(self.keys), len(self.keys) * self._page_bytes, self._capacity_bytes)

    def _victim(self, since: float = math.inf) -> bytes | None:
        return self._order.victim(since)


@dataclass(slots=True)
class _Row:
    """A page in the index of a file store. `number` is the order of insertion, which decides between equal uses."""

    number: int
    parent: bytes | None
    last_use_s: float


class FileTable(Table):
    """A table in the order of `file`: the least recently used page without children leaves first. A write of a page is
    not a use of its ancestors.

    Invariant: `_children` counts the stored and reserved children of a page, and one more while its own batch is
    written. `_leaves` has an entry with its present last use for each page without any.
    """

    def __init__(
        self, clock: VirtualClock, speed: StorageSpeed, page_bytes: int, capacity_bytes: int | None, *,
        adaptive: bool = False,
    ) -> None:
        super().__init__(clock, speed, page_bytes, capacity_bytes, sweeps=False, adaptive=adaptive)
        self._rows: dict[bytes, _Row] = {}
        self._children: Counter[bytes] = Counter()
        self._leaves: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()

    def begin_write(self, keys: Sequence[bytes], parents: Sequence[bytes | None]) -> Batch:
        """See Table."""
        batch = super().begin_write(keys, parents)
        for key, parent in batch.reserved.items():
            self._children[key] += 1
            if parent is not None:
                self._children[parent] += 1
        return batch

    def _protect(self, keys: Sequence[bytes], parent: bytes | None) -> int:
        return 0  # reserved children protect a page

    def end_write(self, batch: Batch, keys: Sequence[bytes]) -> None:
        """See Table."""
        stored = set(batch.stored)
        for key, parent in batch.reserved.items():
            self._lose_child(key)
            if key not in stored and parent is not None:
                self._lose_child(parent)
        self.use([key for key in keys if key not in stored])

    def add(self, key: bytes, parent: bytes | None) -> None:
        """See Table. REQUIRES: the page is reserved."""
        self.keys.add(key)
        self._rows[key] = _Row(next(self._numbers), parent, self.clock())

    def use(self, keys: Sequence[bytes]) -> None:
        """See Table."""
        for key in keys:
            row = self._rows.get(key)
            if row is not None:
                row.last_use_s = self.clock()
                self._note_leaf(key)

    def discard(self, key: bytes) -> None:
        """See Table."""
        self.keys.discard(key)
        row = self._rows.pop(key, None)
        if row is not None and row.parent is not None:
            self._lose_child(row.parent)

    def _victim(self, since: float = math.inf) -> bytes | None:
        for passed in itertools.count():
            key = self._oldest_leaf()
            if key is None or self._adaptive is None or passed == PASSED_MAX:
                break
            if not self._adaptive.keeps(key, self.parent_of):
                break
            self.use([key])
        return key

    def _oldest_leaf(self) -> bytes | None:
        while self._leaves:
            last_use_s, number, key = self._leaves[0]
            row = self._rows.get(key)
            if row is not None and (row.last_use_s, row.number) == (last_use_s, number) and key not in self._children:
                return key
            heapq.heappop(self._leaves)
        return None

    def parent_of(self, key: bytes) -> bytes | None:
        """See Table: it is in the header of the page."""
        row = self._rows.get(key)
        return None if row is None else row.parent

    def _lose_child(self, key: bytes) -> None:
        self._children[key] -= 1
        if not self._children[key]:
            del self._children[key]
            self._note_leaf(key)

    def _note_leaf(self, key: bytes) -> None:
        row = self._rows.get(key)
        if row is not None and key not in self._children:
            heapq.heappush(self._leaves, (row.last_use_s, row.number, key))


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
            table.move(sum(pages.keys[position] in table.keys for position in some), writes=False)
            for position in some:
                if (key := pages.keys[position]) in table.keys:
                    pages.accept(position, pages.codec.frame_bytes, None)
                    hits.append(key)
                else:
                    pages.miss(position)
        table.hit(hits, table.parent_of(hits[0]) if hits else None)

    def write(self, pages: PageWrites) -> None:
        """See Driver. Rejects the tail of a batch that does not fit; its head stays."""
        table, keys = self.table, pages.keys
        batch = table.begin_write(keys, pages.parents)
        for start in range(0, len(keys), table.speed.parallel):
            if pages.is_late:
                break
            some = range(start, min(start + table.speed.parallel, len(keys)))
            table.move(sum(keys[position] not in table.keys for position in some), writes=True)
            for position in some:
                if keys[position] in table.keys or keys[position] not in batch.reserved:
                    pages.present(position)
                elif not pages.is_full:
                    self._write(pages, position, batch)
        table.end_write(batch, keys)

    def _write(self, pages: PageWrites, position: int, batch: Batch) -> None:
        evicted = self.table.make_room(batch)
        if evicted is None:
            pages.reject(position)
            return
        if evicted:
            self._evicted_pages += len(evicted)
            self._listener(evicted)
        key = pages.keys[position]
        self.table.add(key, pages.parents[position])
        batch.stored.append(key)
        pages.stored(position)

    def touch(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Touches."""
        self.table.clock.sleep(self.table.speed.fixed_s)
        self.table.hit([key for key in keys if key in self.table.keys])
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

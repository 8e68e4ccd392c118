"""The capacity of a file store: which pages are removed for others, and the size of a room.

Locking design: a `CapacityManager` changes only in transactions, except for `_full`, which any thread replaces as a
whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from ...clock import SYSTEM_CLOCK, Clock
from ...tournament import PASSED_MAX
from ...units import format_size
from .index import Index, IndexDamaged, PageRow, Totals
from .pages import error_name, page_name, remove_page
from .reconcile import reap
from .room import Room
from .store import FileStore, now_us

# The growth of the index and of directories between two checks of the free space is less than this.
_FLOOR_SLACK_BYTES = 1 << 20
# A page that is removed while a process reads it frees its blocks later. Check again, but do not empty the store for
# it.
_ROUNDS_MAX = 2
# One file that cannot be removed must not prevent other evictions; but retries on a failing disk must end.
_FAILURES_MAX = 3
# The growth of the index in one transaction.
INDEX_GROWTH_BYTES = 256 << 10
# A full store evicts in each batch, so it compares the sums with all rows at most so often, and 1 % of the time.
_COMPARE_S, _COMPARE_FACTOR = 60.0, 100.0
# After a write without room the store does not grow for this time, unless the file system gains room earlier.
_FULL_S = 60.0
# The room for pages between two transactions: see `room`. It is a small part of the capacity: other pages make way.
_ROOM_BYTES = 64 << 20
_ROOM_PAGES = 32
_ROOM_PARTS = 64
_ROOM_PAGES_MIN = 16


@dataclass(frozen=True, slots=True)
class _Full:
    """A failure for lack of room: the capacity until `until_s`, and the bytes that were free then."""

    capacity_bytes: int
    until_s: float
    free_bytes: int

    def ended(self, now_s: float, free: int, reserved: int) -> bool:
        """Return True if the store may grow again: other programs have freed room, or it is time to try."""
        is_over = now_s >= self.until_s and free >= reserved
        return is_over or free >= self.free_bytes + reserved + _FLOOR_SLACK_BYTES


class CapacityManager:
    """Keeps a store below its capacity and above its free-space floor; None and 0 mean no limit.

    It counts bytes of stored pages plus bytes reserved for pages being written, over all namespaces and processes. It
    makes room by repeatedly removing the least recently used page without children (tails before heads), but passes
    over pages that `keeps` names. A page's file is removed before the removal of its row is committed, so the index
    never counts too few bytes.

    A file system can be full, or its quota used up, at any size of the store. After such a failure, pages are evicted
    as if the store's present size, less room for the index to grow, was its capacity, for _FULL_S or until the file
    system gains room. Another failure in this time does not lower it: if other programs take the room that the store
    makes, it loses at most that room and one batch. Nothing is rejected for this limit: the file system decides.
    """

    def __init__(
        self, store: FileStore, capacity_bytes: int | None, free_space_floor_bytes: int, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.clock = clock
        self.capacity_bytes = capacity_bytes
        self.evicted_pages = 0
        self.on_evicted: Callable[[bytes, bytes], object] = lambda namespace, key: None
        # See AdaptivePages; the key of a page is namespace and key.
        self.keeps: Callable[[bytes, Callable[[bytes], bytes | None]], bool] = lambda name, parent_of: False
        self._floor_bytes = free_space_floor_bytes
        self._store = store
        self._full: _Full | None = None
        self._compare_after_s = -math.inf

    def fit(self, index: Index, errors: list[str]) -> int:
        """Evict until all limits hold. Return the bytes over capacity or floor, 0 on success. REQUIRES: a transaction.

        Appends the class of each error that prevented a removal. Raises OSError if the free space is unknown, and
        sqlite3.Error.
        """
        if max(self._over(index), self._over_full(index)) <= 0:
            return 0
        if self.clock() >= self._compare_after_s:
            self._compare(index)
        # Leftovers of dead processes are removed before readable pages.
        reap(index, self._store.system, self._store.root_fd, self._store.owner)
        for _ in range(_ROUNDS_MAX):
            over = max(self._over(index), self._over_full(index))
            if over <= 0:
                return 0
            self._evict(index, over, errors)
        if self._over_capacity(index.totals()) > 0:
            self._compare(index)
        return max(self._over(index), 0)

    def grant(self, index: Index, namespace: bytes, room: Room, frame_bytes: int, errors: list[str]) -> None:
        """Give `room` to the pages of the next calls, of `frame_bytes` at most, if the limits leave some; 0 is for a
        tool, with pages of any size. REQUIRES: a transaction. Raises as `fit`."""
        size = self.room_bytes(frame_bytes)
        if size:
            room.grant(index, namespace, size)
            if self.fit(index, errors):
                room.grant(index, namespace, 0)

    def room_bytes(self, frame_bytes: int) -> int:
        """Return the size of a room for pages of at most `frame_bytes`, 0 for none. Raises OSError."""
        limit = self.space()[0] - self._floor_bytes - _FLOOR_SLACK_BYTES
        if self.capacity_bytes is not None:
            limit = min(limit, self.capacity_bytes)
        size = min(max(_ROOM_BYTES, _ROOM_PAGES * frame_bytes), limit // _ROOM_PARTS)
        return size if 0 < frame_bytes <= size // _ROOM_PAGES_MIN and self._full is None else 0

    def _compare(self, index: Index) -> None:
        """Raise IndexDamaged if the index contradicts itself: wrong sums would evict all pages, or reject new ones."""
        began_s = self.clock()
        contradiction, ended_s = index.contradiction(), self.clock()
        self._compare_after_s = ended_s + max(_COMPARE_S, _COMPARE_FACTOR * (ended_s - began_s))
        if contradiction is not None:
            raise IndexDamaged(contradiction)

    def note_full(self, stored_bytes: int) -> None:
        """The file system had no room for a page or for the index, when so many bytes were stored. Raises OSError."""
        now_s = self.clock()
        if self._full is None or now_s >= self._full.until_s:
            self._full = _Full(stored_bytes - INDEX_GROWTH_BYTES, now_s + _FULL_S, self.space()[0])

    def why_full(self, index: Index) -> str:
        """Return which limit leaves no room, with numbers. REQUIRES: a transaction. Raises as `fit`."""
        totals = index.totals()
        if self._floor_bytes and self.space()[0] - totals.reserved < self._floor_bytes + _FLOOR_SLACK_BYTES:
            floor = format_size(self._floor_bytes)
            return f"free_space_floor is {floor}, and {self.space_left()}; lower free_space_floor, or use a larger disk"
        return (
            f"capacity is {format_size(self.capacity_bytes or 0)}, {format_size(totals.bytes)} are stored and "
            f"{format_size(totals.reserved)} are being written; raise capacity"
        )

    def space_left(self) -> str:
        """Return the free space in words. Raises OSError."""
        free, size = self.space()
        return f"the file system has {format_size(free)} free of {format_size(size)}"

    def space(self) -> tuple[int, int]:
        """Return the bytes of the file system that are free, and all. Raises OSError."""
        space = self._store.system.statvfs(self._store.root_fd)
        return space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize

    def _over_capacity(self, totals: Totals) -> int:
        return 0 if self.capacity_bytes is None else totals.bytes + totals.reserved - self.capacity_bytes

    def _over(self, index: Index) -> int:
        totals = index.totals()
        over = self._over_capacity(totals)
        if self._floor_bytes:
            # Reserved bytes that are already on the disk count twice, which is conservative.
            over = max(over, self._floor_bytes + _FLOOR_SLACK_BYTES - (self.space()[0] - totals.reserved))
        return over

    def _over_full(self, index: Index) -> int:
        full = self._full
        if full is None:
            return 0
        totals = index.totals()
        if full.ended(self.clock(), self.space()[0], totals.reserved):
            self._full = None
            return 0
        return totals.bytes + totals.reserved - full.capacity_bytes

    def _evict(self, index: Index, need: int, errors: list[str]) -> None:
        failures = 0
        while need > 0 and failures < _FAILURES_MAX:
            page = self._victim(index)
            if page is None:
                return
            try:
                remove_page(self._store.system, self._store.root_fd, page_name(page.namespace.hex(), page.key))
            except IsADirectoryError:
                pass  # a directory with files in place of a page: it is not a page, and not removed
            except OSError as error:
                errors.append(error_name(error))
                failures += 1
                index.touch(page.namespace, {page.key: now_us(self.clock)})  # at the end of the order
                continue
            if not index.drop(page.namespace, page.key):
                raise IndexDamaged("the next victim has no row under its key")
            self.evicted_pages += 1
            self.on_evicted(page.namespace, page.key)
            need -= page.size

    def _victim(self, index: Index) -> PageRow | None:
        """Return the next page to remove. Pages that are passed over count as used now; on a full file system, whose
        journal cannot grow, no page is."""
        for passed in itertools.count():
            page = index.oldest_leaf()
            if page is None or self._full is not None or passed == PASSED_MAX:
                break
            if not self.keeps(page.namespace + page.key, index.parent_of):
                break
            index.touch(page.namespace, {page.key: now_us(self.clock)})
        return page

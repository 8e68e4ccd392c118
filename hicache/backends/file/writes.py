"""Writes of a file store: capacity, and the steps of one `batch_set`.

Locking design: a `CapacityManager` changes only in transactions. A `Writes` belongs to one call; its `_write` runs in
several threads, each with its own position; they write their own slots of dictionaries and append to lists, both atomic
in CPython.
"""

from __future__ import annotations

import errno
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...supervised import SupervisedPool
from ..pages import PageWrites
from ..store import SETTLE_S
from .index import Index
from .pages import FULL_ERRNOS, TMP_DIR, PageFiles, error_name, page_name, remove_page
from .reconcile import reap
from .store import Store, now_us

# The growth of the index and of directories between two checks of the free space is less than this.
_FLOOR_SLACK_BYTES = 1 << 20
# A page that is removed while a process reads it frees its blocks later. Check again, but do not empty the store for
# it.
_ROUNDS_MAX = 2
# One file that cannot be removed must not prevent other evictions; but retries on a failing disk must end.
_FAILURES_MAX = 3
# The growth of the index in one transaction.
_INDEX_GROWTH_BYTES = 256 << 10
_INDEX_GROWTH_BYTES_PER_ROW = 1 << 10
# Released in addition, so that a page whose thread detected the full disk late can still be written.
_GIVEN_UP_PAGES = 2


class CapacityManager:
    """Keeps a store below its capacity and above its free-space floor; None and 0 mean no limit.

    It counts bytes of stored pages plus bytes reserved for pages being written, over all namespaces and processes. It
    makes room by repeatedly removing the least recently used page without children (tails before heads). A page's file
    is removed before the removal of its row is committed, so the index never counts too few bytes.
    """

    def __init__(self, store: Store, capacity_bytes: int | None, free_space_floor_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.evicted_pages = 0
        self.on_evicted: Callable[[bytes, bytes], object] = lambda namespace, key: None
        self._floor_bytes = free_space_floor_bytes
        self._store = store

    def fit(self, index: Index, errors: list[str]) -> int:
        """Evict until both limits hold. Return the missing bytes, 0 on success. REQUIRES: a transaction.

        Appends the class of each error that prevented a removal. Raises OSError if the free space is unknown, and
        sqlite3.Error.
        """
        if self._over(index) <= 0:
            return 0
        # Leftovers of dead processes are removed before readable pages.
        reap(index, self._store.system, self._store.root_fd, self._store.owner)
        for _ in range(_ROUNDS_MAX):
            over = self._over(index)
            if over <= 0:
                return 0
            self._evict(index, over, errors)
        return max(self._over(index), 0)

    def _over(self, index: Index) -> int:
        totals = index.totals()
        over = 0
        if self.capacity_bytes is not None:
            over = totals.bytes + totals.reserved - self.capacity_bytes
        if self._floor_bytes:
            space = self._store.system.statvfs(self._store.root_fd)
            # Reserved bytes that are already on the disk count twice, which is conservative.
            free = space.f_bavail * space.f_frsize - totals.reserved
            over = max(over, self._floor_bytes + _FLOOR_SLACK_BYTES - free)
        return over

    def _evict(self, index: Index, need: int, errors: list[str]) -> None:
        failures = 0
        while need > 0 and failures < _FAILURES_MAX:
            page = index.oldest_leaf()
            if page is None:
                return
            try:
                remove_page(self._store.system, self._store.root_fd, page_name(page.namespace.hex(), page.key))
            except IsADirectoryError:
                pass  # a directory with files in place of a page: it is not a page, and not removed
            except OSError as error:
                errors.append(error_name(error))
                failures += 1
                index.touch(page.namespace, {page.key: now_us()})  # at the end of the order
                continue
            index.drop(page.namespace, page.key)
            self.evicted_pages += 1
            self.on_evicted(page.namespace, page.key)
            need -= page.size


class Writes:
    """The pages of one `batch_set`. `run` settles all of them, except those that were not started before the deadline.
    `present` are the keys of already stored pages."""

    def __init__(
        self, store: Store, files: PageFiles, capacity: CapacityManager, pool: SupervisedPool[Any], pages: PageWrites
    ) -> None:
        self._store = store
        self._files = files
        self._capacity = capacity
        self._pool = pool
        self._pages = pages
        self._namespace = pages.codec.namespace
        self._namespace_hex = self._namespace.hex()
        self._writer = store.new_writer()
        self._todo: list[int] = []
        self._temporaries: dict[int, str] = {}
        self._lengths: dict[int, int] = {}
        self._full = False
        self.present: list[bytes] = []

    def run(self, before_reserving: Callable[[Index], None] | None = None, used_us: int | None = None) -> None:
        """Store the pages, last used at `used_us`, or now. `before_reserving` may update the index before victims are
        chosen.

        Blocks; does not raise storage errors.
        """
        self._look()
        if self._todo and self._reserve(before_reserving, now_us() if used_us is None else used_us):
            try:
                self._pool.run(len(self._todo), self._write)
            finally:
                self._publish()

    def _look(self) -> None:
        """Settle the pages that are already stored, and collect the others."""
        is_present = self._files.lookup(self._namespace_hex)
        for position, key in enumerate(self._pages.keys):
            try:
                if is_present(key):
                    self._pages.present(position)
                    self.present.append(key)
                else:
                    self._todo.append(position)
            except OSError as error:
                self._pages.fail(position, error_name(error))

    def _reserve(self, before_reserving: Callable[[Index], None] | None, used_us: int) -> bool:
        """Reserve room for as many pages from the head as fit, in one transaction; reject the others.

        A page reserves its whole frame until it is stored: its encoded size is known only then.
        """
        pages, size, capacity_bytes = self._pages, self._pages.codec.frame_bytes, self._capacity.capacity_bytes
        head = self._todo if capacity_bytes is None else self._todo[: capacity_bytes // size]
        try:
            with self._store.transaction(pages.deadline) as index:
                self._store.sweep(index)
                if before_reserving is not None:
                    before_reserving(index)
                keys, parents = [pages.keys[p] for p in head], [pages.parents[p] for p in head]
                index.reserve(self._namespace, keys, parents, self._writer, size, used_us)
                over = self._capacity.fit(index, pages.errors)
                if over:
                    head = head[: max(0, len(head) + -over // size)]
                    index.release(self._namespace, keys[len(head) :], self._writer)
        except (OSError, sqlite3.Error) as error:
            self._store.leftovers.add(self._writer)
            self._refuse(self._todo, error)
            return False
        for position in self._todo[len(head) :]:
            pages.reject(position)
        self._todo = head
        return bool(head)

    def _refuse(self, positions: Sequence[int], error: OSError | sqlite3.Error) -> None:
        """Settle pages that could not be stored. If the disk is full, the first of them is rejected, and with it all
        remaining pages after it."""
        reason = class_of(error)
        if not positions:
            self._pages.errors.append(reason)
        elif _says_full(error):
            self._pages.reject(min(positions), reason)
        else:
            for position in positions:
                self._pages.fail(position, reason)

    def _write(self, number: int) -> None:
        position = self._todo[number]
        if self._full:
            self._pages.reject(position)
            return
        if self._pages.is_late:
            return
        temporary = f"{TMP_DIR}/{self._store.new_writer()}"
        # Direct I/O needs aligned memory: see `PageFiles`.
        stored = [self._pages.sealed_frame(position)] if self._files.direct_io else self._pages.sealed(position)
        try:
            self._files.write(temporary, stored)
        except OSError as error:
            self._discard(temporary)
            self._refuse([position], error)
            # If one page does not fit, the pages after it do not fit either, or would follow a hole.
            self._full |= _says_full(error)
        else:
            self._lengths[position] = sum(buffer.nbytes for buffer in stored)
            self._temporaries[position] = temporary

    def _publish(self) -> None:
        """Rename the written pages and add their rows in one transaction, head first; release unused reservations."""
        pages = self._pages
        named: list[int] = []
        if self._full:
            self._make_room_for_the_index()
        unnamed = set(self._temporaries)
        try:
            with self._store.transaction(max(pages.deadline, time.monotonic() + SETTLE_S)) as index:
                for position, temporary in sorted(self._temporaries.items()):
                    try:
                        self._files.publish(temporary, page_name(self._namespace_hex, pages.keys[position]))
                        named.append(position)
                    except OSError as error:
                        unnamed.discard(position)
                        self._refuse([position], error)
                        if _says_full(error):
                            break  # the pages after it would follow a hole
                published = set(named)
                failed = [pages.keys[position] for position in self._todo if position not in published]
                if failed:
                    index.release(self._namespace, failed, self._writer)
                shorter = [position for position in named if self._lengths[position] != pages.codec.frame_bytes]
                if shorter:
                    lengths = {pages.keys[position]: self._lengths[position] for position in shorter}
                    index.resize(self._namespace, lengths, self._writer)
                if index.publish(self._writer) != len(named):
                    raise OSError(errno.ESTALE, "the index was rebuilt while the pages were written")
        except (OSError, sqlite3.Error) as error:
            # The files are renamed but not in the index: remove them, so that pages with ERROR are not visible.
            self._store.leftovers.add(self._writer)
            for position in named:
                self._discard(page_name(self._namespace_hex, pages.keys[position]))
            self._refuse(sorted(unnamed), error)
        else:
            for position in named:
                pages.stored(position)
                del self._temporaries[position]
        for temporary in self._temporaries.values():
            self._discard(temporary)

    def _make_room_for_the_index(self) -> None:
        """On a full disk, remove the last written pages, to make room for the rows of the others without a hole."""
        growth = _INDEX_GROWTH_BYTES + len(self._todo) * _INDEX_GROWTH_BYTES_PER_ROW
        for number, position in enumerate(sorted(self._temporaries, reverse=True)):
            if growth <= 0 and number >= _GIVEN_UP_PAGES:
                break
            growth -= self._lengths[position]
            self._reject(position)
        # A slow thread may have detected the full disk at an early page. There is room for that one now.
        self._full = False
        last = max(self._temporaries, default=-1)
        for number, position in enumerate(self._todo):
            if position < last and position not in self._temporaries:
                self._write(number)
        hole = min(position for position in self._todo if position not in self._temporaries)
        for position in [position for position in self._temporaries if position > hole]:
            self._reject(position)

    def _reject(self, position: int) -> None:
        self._discard(self._temporaries.pop(position))
        self._pages.reject(position)

    def _discard(self, name: str) -> None:
        try:
            remove_page(self._store.system, self._store.root_fd, name)
        except OSError as error:
            self._pages.errors.append(error_name(error))
            if name.startswith(TMP_DIR):
                self._store.leftovers.add(name.removeprefix(f"{TMP_DIR}/"))


def class_of(error: OSError | sqlite3.Error) -> str:
    """Return the name under which an error is counted: an errno's, or SQLite's own."""
    return error_name(error) if isinstance(error, OSError) else getattr(error, "sqlite_errorname", "SQLITE_ERROR")


def _says_full(error: OSError | sqlite3.Error) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL_ERRNOS
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)

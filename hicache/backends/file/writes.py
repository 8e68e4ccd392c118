"""The steps of one `batch_set` of a file store.

Locking design: a `FileWrites` belongs to one call; its `_write_share` runs in several threads, each with its own
positions; they write their own slots of dictionaries and append to lists, both atomic in CPython. `rejection` is the
reason of any of them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from ...logs import LimitedLog
from ...supervised import SupervisedPool
from ..pages import SETTLE_S, PageWrites
from .capacity import INDEX_GROWTH_BYTES, CapacityManager
from .index import Index
from .pages import DONE, FULL_ERRNOS, NOT_STARTED, TMP_DIR, PageFiles, error_name, page_name, remove_page
from .room import Stored
from .store import REJECTION, FileStore
from .system import why_no_room

_log = logging.getLogger(__name__)
# Each batch is rejected for the same reason until an operator acts.
_limited_log = LimitedLog(_log, 60.0)

_INDEX_GROWTH_BYTES_PER_ROW = 1 << 10
# The time of a page that is older than this is that of a copy, and not of a slow write.
_COPY_AGE_S = 60.0
# The classes of errors that eviction can end; a read-only file system is not one of them.
_NO_ROOM = frozenset({"ENOSPC", "EDQUOT", "SQLITE_FULL"})
# Released in addition, so that a page whose thread detected the full disk late can still be written.
_GIVEN_UP_PAGES = 2


class FileWrites:
    """The pages of one `batch_set`. `run` settles all of them, except those that were not started before the deadline.
    `present` are the keys of already stored pages. `rejection` is the reason why pages were rejected, or None."""

    def __init__(
        self, store: FileStore, files: PageFiles, capacity: CapacityManager, pool: SupervisedPool[Any],
        pages: PageWrites,
    ) -> None:
        self._store = store
        self._room = store.room
        self._used_us = self._taken_bytes = 0
        self._has_failed = False
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
        self._stored_bytes: int | None = None
        self.rejection: str | None = None
        self.present: list[bytes] = []

    def run(self, before_reserving: Callable[[Index], None], used_us: int) -> None:
        """Store the pages, last used at `used_us`. `before_reserving` may update the index before victims are chosen.

        Blocks; does not raise storage errors.
        """
        self._used_us = used_us
        self._look()
        if self._todo and not self._write_in_room(before_reserving) and self._reserve(before_reserving, used_us):
            try:
                self._write_shares()
            finally:
                self._publish()
        if self.rejection in _NO_ROOM:
            self._room.end()
            with contextlib.suppress(OSError):
                if self._stored_bytes is not None:
                    self._capacity.note_full(self._stored_bytes)
                space = self._store.system.statvfs(self._store.root_fd)
                self.rejection = f"{self.rejection}: {why_no_room(space)}"
        if self.rejection is not None:
            path = str(self._store.path)
            _limited_log.warn(path, "file store %s: rejects pages: %s", path, self.rejection)

    def _look(self) -> None:
        """Report the pages that are already stored, and collect the missing ones."""
        for position, answer in enumerate(self._files.lookup(self._namespace_hex, self._pages.keys)):
            if answer is True:
                self._pages.present(position)
                self.present.append(self._pages.keys[position])
            elif answer is False:
                self._todo.append(position)
            else:
                self._pages.fail(position, answer)

    def _reserve(self, before_reserving: Callable[[Index], None], used_us: int) -> bool:
        """Reserve room for as many pages from the head as fit, in one transaction; reject the others.

        A page reserves its whole frame until it is stored: its encoded size is known only then.
        """
        pages, size, capacity_bytes = self._pages, self._pages.codec.frame_bytes, self._capacity.capacity_bytes
        if not self._store.is_ready:
            self.rejection = REJECTION
            pages.reject(self._todo[0])
            return False
        head = self._todo if capacity_bytes is None else self._todo[: capacity_bytes // size]
        try:
            with self._store.transaction(pages.deadline) as index:
                self._store.sweep(index)
                before_reserving(index)
                keys, parents = [pages.keys[p] for p in head], [pages.parents[p] for p in head]
                self._stored_bytes = index.totals().bytes
                index.reserve(self._namespace, keys, parents, self._writer, size, used_us)
                over = self._capacity.fit(index, pages.errors)
                if over or len(head) < len(self._todo):
                    self.rejection = self._capacity.why_full(index)
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
            self.rejection = reason
        else:
            for position in positions:
                self._pages.fail(position, reason)

    def _write_shares(self) -> None:
        shares = self._files.shares(self._todo, self._pool.threads + 1)
        self._pool.run(len(shares), lambda number: self._write_share(shares[number]))

    def _write_share(self, positions: Sequence[int]) -> None:
        """Write pages to temporary files."""
        pages, clock = self._pages, self._capacity.clock
        if self._full:
            for position in positions:
                pages.reject(position)
        if self._full or pages.is_late:
            return
        names = [self._store.new_writer() for _ in positions]
        written = self._files.write_share(
            names, pages, positions, int(clock.wall_s() - _COPY_AGE_S), pages.deadline - clock()
        )
        for position, name, (outcome, length) in zip(positions, names, written, strict=True):
            if outcome == DONE:
                self._temporaries[position] = f"{TMP_DIR}/{name}"
                self._lengths[position] = length
            elif outcome != NOT_STARTED:
                self._discard(f"{TMP_DIR}/{name}")
                self._failed(position, OSError(outcome, os.strerror(outcome)))
            elif pages.is_full:
                pages.reject(position)

    def _failed(self, position: int, error: OSError) -> None:
        if self._taken_bytes:
            self._has_failed = True  # a transaction follows
            return
        self._refuse([position], error)
        # If one page does not fit, the pages after it do not fit either, or would follow a hole.
        self._full |= _says_full(error)

    def _publish(self) -> None:
        """Rename the written pages and add their rows in one transaction, head first; release unused reservations."""
        pages = self._pages
        named: list[int] = []
        if self._full:
            self._make_room_for_the_index()
        unnamed = set(self._temporaries)
        try:
            with self._store.transaction(max(pages.deadline, self._capacity.clock() + SETTLE_S)) as index:
                self._rename(named, unnamed)
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
                self._stored_bytes = index.totals().bytes
                self._capacity.grant(index, self._namespace, self._room, self._files.frame_bytes, pages.errors)
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

    def _rename(self, named: list[int], unnamed: set[int] | None) -> None:
        """Rename the written pages, head first, and add them to `named`. Settle those that fail, and take them out of
        `unnamed`; if it is None, end there."""
        pages, left = self._pages, sorted(self._temporaries)
        while left:
            names = [self._temporaries[position].removeprefix(f"{TMP_DIR}/") for position in left]
            done = self._files.publish_some(names, self._namespace_hex, [pages.keys[position] for position in left])
            named += left[:done]
            if done == len(left):
                return
            position, left = left[done], left[done + 1 :]
            try:
                self._files.publish(self._temporaries[position], page_name(self._namespace_hex, pages.keys[position]))
                named.append(position)
            except OSError as error:
                if unnamed is None:
                    return
                unnamed.discard(position)
                self._refuse([position], error)
                if _says_full(error):
                    return  # the pages after it would follow a hole

    def _take_room(self, size: int, before_reserving: Callable[[Index], None]) -> bool:
        """Take room from that of the last transaction, or from a new one if calls follow each other closely."""
        if self._room.take(size):
            return True
        if not self._room.is_open or size > self._capacity.room_bytes(self._files.frame_bytes):
            return False
        try:
            with self._store.transaction(self._pages.deadline) as index:
                before_reserving(index)
                self._capacity.grant(index, self._namespace, self._room, self._files.frame_bytes, self._pages.errors)
        except (OSError, sqlite3.Error):
            return False  # the next transaction has the same error, and tells it
        return self._room.take(size)

    def _write_in_room(self, before_reserving: Callable[[Index], None]) -> bool:
        """Store the pages in the room, so that the next transaction writes their rows. Return False if there is none,
        or after a failure: then the pages in `_todo` are left."""
        pages, named = self._pages, list[int]()
        size = len(self._todo) * pages.codec.frame_bytes
        if not self._take_room(size, before_reserving):
            return False
        self._taken_bytes = size
        try:
            self._write_shares()
            if not self._has_failed:
                self._rename(named, None)
        finally:
            self._room.put(size, [
                Stored(self._namespace, [pages.keys[p] for p in some], [pages.parents[p] for p in some], length,
                       self._used_us)
                for length in {self._lengths[position] for position in named}
                if (some := [position for position in named if self._lengths[position] == length])
            ])
            self._taken_bytes = 0
            for position in named:
                pages.stored(position)
                del self._temporaries[position]
        if not self._has_failed and not self._temporaries:
            return True
        self._room.end()
        for temporary in self._temporaries.values():
            self._discard(temporary)
        self._temporaries.clear()
        self._todo = [position for position in self._todo if position not in set(named)]
        return False

    def _make_room_for_the_index(self) -> None:
        """On a full disk, remove the last written pages, to make room for the rows of the others without a hole."""
        growth = INDEX_GROWTH_BYTES + len(self._todo) * _INDEX_GROWTH_BYTES_PER_ROW
        for number, position in enumerate(sorted(self._temporaries, reverse=True)):
            if growth <= 0 and number >= _GIVEN_UP_PAGES:
                break
            growth -= self._lengths[position]
            self._reject(position)
        # A slow thread may have detected the full disk at an early page. There is room for that one now.
        self._full = False
        last = max(self._temporaries, default=-1)
        for position in self._todo:
            if position < last and position not in self._temporaries:
                self._write_share([position])
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

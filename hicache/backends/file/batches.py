"""One `batch_set` of a file store, from the first look to the last outcome.

Locking design: an object of these classes belongs to one call. `_write` runs in several threads, each with a position
of its own; they write their own slots of dictionaries and append to lists, both atomic in CPython.
"""

from __future__ import annotations

import errno
import itertools
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...frame import FrameCodec
from ...supervised import SupervisedPool
from ..pages import PageWrites
from ..store import SETTLE_S
from .index import Index
from .pages import FULL_ERRNOS, TMP_DIR, LeftBehind, PageFiles, error_name, page_name, remove_page
from .room import Room
from .store import Store, now_us

# By this much the index may grow in one transaction.
_INDEX_GROWTH_BYTES = 256 << 10
_INDEX_GROWTH_BYTES_PER_ROW = 1 << 10
# Given up besides, so that a page whose thread was slow to find the disk full can still be written.
_GIVEN_UP_PAGES = 2


@dataclass(slots=True)
class Leftovers:
    """What a failure could not put back at once: temporary files, and reservations by writer. `sweep` tries again."""

    temporaries: set[str] = field(default_factory=set)
    writers: set[str] = field(default_factory=set)

    def sweep(self, store: Store, index: Index) -> None:
        """Give back what can be given back now. REQUIRES: a transaction of the store. Raises sqlite3.Error."""
        for temporary in list(self.temporaries):
            try:
                remove_page(store.system, store.root_fd, temporary)
            except OSError:
                continue  # counted when it failed first
            self.temporaries.discard(temporary)
        for writer in list(self.writers):
            index.release_all(writer)
            self.writers.discard(writer)


@dataclass(frozen=True, slots=True)
class FileContext:
    """What the calls of one backend share."""

    codec: FrameCodec
    store: Store
    files: PageFiles
    room: Room
    pool: SupervisedPool[Any]
    leftovers: Leftovers
    namespace_hex: str
    serial: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)

    def name_of(self, key: bytes) -> str:
        """Return the name of a page's file, relative to the root."""
        return page_name(self.namespace_hex, key)


class Writes:
    """The way of the pages of one `batch_set` into the store. `run` settles all of them but those that the deadline
    kept from being started. `present` are the keys of the pages that were there already."""

    def __init__(self, context: FileContext, pages: PageWrites) -> None:
        self._context = context
        self._pages = pages
        self._writer = f"{context.store.owner}.{context.serial()}"
        self._todo: list[int] = []
        self._temporaries: dict[int, str] = {}
        self._lengths: dict[int, int] = {}
        self._full = False
        self.present: list[bytes] = []

    def run(self, before_reserving: Callable[[Index], None]) -> None:
        """Store the pages. `before_reserving` may bring the index up to date before pages are chosen for eviction.

        Blocks; raises nothing for storage reasons.
        """
        self._look()
        if self._todo and self._reserve(before_reserving):
            try:
                self._context.pool.run(len(self._todo), self._write)
            finally:
                self._publish()

    def _look(self) -> None:
        """Settle the pages that are there already, and note what is to do."""
        is_present = self._context.files.lookup(self._context.namespace_hex)
        for position, key in enumerate(self._pages.keys):
            try:
                if is_present(key):
                    self._pages.present(position)
                    self.present.append(key)
                else:
                    self._todo.append(position)
            except OSError as error:
                self._pages.fail(position, error_name(error))

    def _reserve(self, before_reserving: Callable[[Index], None]) -> bool:
        """Take room for as much of the head as fits, in one transaction; the rest is rejected.

        A page takes room for its whole frame until it is stored: how short it gets is known only then.
        """
        context, pages, size = self._context, self._pages, self._context.codec.frame_bytes
        capacity_bytes = context.room.capacity_bytes
        head = self._todo if capacity_bytes is None else self._todo[: capacity_bytes // size]
        try:
            with context.store.transaction(pages.deadline) as index:
                context.leftovers.sweep(context.store, index)
                before_reserving(index)
                keys, parents = [pages.keys[p] for p in head], [pages.parents[p] for p in head]
                index.reserve(context.codec.namespace, keys, parents, self._writer, size, now_us())
                over = context.room.fit(context.store, index, pages.errors)
                if over:
                    head = head[: max(0, len(head) + -over // size)]
                    index.release(context.codec.namespace, keys[len(head) :], self._writer)
        except (OSError, sqlite3.Error) as error:
            context.leftovers.writers.add(self._writer)
            self._refuse(self._todo, error)
            return False
        for position in self._todo[len(head) :]:
            pages.reject(position)
        self._todo = head
        return bool(head)

    def _refuse(self, positions: Sequence[int], error: OSError | sqlite3.Error) -> None:
        """Settle pages that an error has kept from being stored. Without room the first of them is rejected, and with
        it all behind it that are not settled."""
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
        context = self._context
        temporary = f"{TMP_DIR}/{context.store.owner}.{context.serial()}"
        # Direct I/O moves aligned memory only: see `PageFiles`.
        stored = [self._pages.sealed_frame(position)] if context.files.direct_io else self._pages.sealed(position)
        try:
            context.files.write(temporary, stored)
        except LeftBehind as left:
            context.leftovers.temporaries.add(temporary)
            self._refuse([position], left.cause)
            self._full |= _says_full(left.cause)
        except OSError as error:
            self._refuse([position], error)
            # Where one page found no room the pages after it find none either, or leave a hole before them.
            self._full |= _says_full(error)
        else:
            self._lengths[position] = sum(buffer.nbytes for buffer in stored)
            self._temporaries[position] = temporary

    def _publish(self) -> None:
        """Give the written pages their names and rows in one transaction, head first, and free what was not used."""
        context, pages = self._context, self._pages
        named: list[int] = []
        if self._full:
            self._make_room_for_the_index()
        unnamed = set(self._temporaries)
        try:
            with context.store.transaction(max(pages.deadline, time.monotonic() + SETTLE_S)) as index:
                for position, temporary in sorted(self._temporaries.items()):
                    try:
                        context.files.publish(temporary, context.name_of(pages.keys[position]))
                        named.append(position)
                    except OSError as error:
                        unnamed.discard(position)
                        self._refuse([position], error)
                        if _says_full(error):
                            break  # the pages behind it would be behind a hole
                published = set(named)
                failed = [pages.keys[position] for position in self._todo if position not in published]
                if failed:
                    index.release(context.codec.namespace, failed, self._writer)
                shorter = [position for position in named if self._lengths[position] != context.codec.frame_bytes]
                if shorter:
                    lengths = {pages.keys[position]: self._lengths[position] for position in shorter}
                    index.resize(context.codec.namespace, lengths, self._writer)
                if index.publish(self._writer) != len(named):
                    raise OSError(errno.ESTALE, "the index was made again while the pages were written")
        except (OSError, sqlite3.Error) as error:
            # The names are given but not accounted for: take them back, so that ERROR means that nothing is visible.
            context.leftovers.writers.add(self._writer)
            for position in named:
                self._discard(context.name_of(pages.keys[position]))
            self._refuse(sorted(unnamed), error)
        else:
            for position in named:
                pages.stored(position)
                del self._temporaries[position]
        for temporary in self._temporaries.values():
            self._discard(temporary)

    def _make_room_for_the_index(self) -> None:
        """On a full disk give up the last pages written, or the rows of the others find no room, and leave no hole."""
        growth = _INDEX_GROWTH_BYTES + len(self._todo) * _INDEX_GROWTH_BYTES_PER_ROW
        for number, position in enumerate(sorted(self._temporaries, reverse=True)):
            if growth <= 0 and number >= _GIVEN_UP_PAGES:
                break
            growth -= self._lengths[position]
            self._reject(position)
        # A thread that was held up may have found the disk full at an early page. There is room for that one now.
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
            remove_page(self._context.store.system, self._context.store.root_fd, name)
        except OSError as error:
            self._pages.errors.append(error_name(error))
            if name.startswith(TMP_DIR):
                self._context.leftovers.temporaries.add(name)


def class_of(error: OSError | sqlite3.Error) -> str:
    """Return the name under which an error is counted: an errno's, or SQLite's own."""
    return error_name(error) if isinstance(error, OSError) else getattr(error, "sqlite_errorname", "SQLITE_ERROR")


def _says_full(error: OSError | sqlite3.Error) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL_ERRNOS
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)

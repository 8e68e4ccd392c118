"""One `batch_get` and one `batch_set` of a file store, from the first look to the last outcome.

Locking design: an object of these classes belongs to one call. `read` and `write` run in several threads, each with a
position of its own; they write their own slot of the outcome list and append to lists, both atomic in CPython.
"""

from __future__ import annotations

import errno
import itertools
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...frame import FrameCodec
from ..base import GetOutcome, SetOutcome
from ..calls import parents_of
from ..workers import WorkerPool
from .index import Index
from .pages import (
    FULL_ERRNOS,
    TMP_DIR,
    Damaged,
    LeftBehind,
    PageFiles,
    error_name,
    length_of,
    page_name,
    remove_damaged,
    remove_page,
)
from .room import Room
from .store import Store, now_us

# What was written or found damaged is put in order even if the deadline has passed: within this time at most.
SETTLE_S = 0.25
DEADLINE = "deadline"
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
class Parts:
    """What the batches of one backend share."""

    codec: FrameCodec
    namespace_hex: str
    store: Store
    files: PageFiles
    room: Room
    pool: WorkerPool
    leftovers: Leftovers
    serial: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)


class Reads:
    """The pages of one `batch_get`. After `run`, `outcomes`, `corrupt` (reasons) and `errors` (classes) are final."""

    def __init__(
        self, parts: Parts, keys: Sequence[bytes], frames: Sequence[memoryview], deadline: float
    ) -> None:
        self._parts = parts
        self._keys = keys
        self._frames = frames
        self._deadline = deadline
        self._damaged: list[tuple[int, Damaged]] = []
        self.outcomes = [GetOutcome.ERROR] * len(keys)
        self.corrupt: list[str] = []
        self.errors: list[str] = []

    def run(self) -> None:
        """Read all pages and remove the damaged ones. Blocks; raises nothing for storage reasons."""
        self._parts.pool.run(len(self._keys), self._read)
        if self._damaged:
            self._remove_damaged()

    def _read(self, position: int) -> None:
        if time.monotonic() >= self._deadline:
            self.errors.append(DEADLINE)
            return
        parts, key, frame = self._parts, self._keys[position], self._frames[position]
        try:
            stream = parts.codec.stream()
            found = parts.files.read(page_name(parts.namespace_hex, key), frame, stream)
            damage = parts.codec.accept(key, frame, length_of(found), stream)
            if damage is not None and damage.is_misfit:
                # Nothing is wrong with the page: it stays for those who can read it.
                self.outcomes[position] = GetOutcome.MISS
                self.errors.append(damage.value)
                return
            if damage is not None:
                raise Damaged(damage.value, found)
        except FileNotFoundError:
            self.outcomes[position] = GetOutcome.MISS
        except Damaged as refused:
            self.outcomes[position] = GetOutcome.CORRUPT
            self.corrupt.append(refused.reason)
            self._damaged.append((position, refused))
        except OSError as error:
            self.errors.append(error_name(error))
        else:
            self.outcomes[position] = GetOutcome.HIT

    def _remove_damaged(self) -> None:
        store = self._parts.store
        try:
            with store.transaction(max(self._deadline, time.monotonic() + SETTLE_S)) as index:
                for position, damage in self._damaged:
                    self._remove(store, index, position, damage)
        except (OSError, sqlite3.Error) as error:
            self.errors.append(class_of(error))

    def _remove(self, store: Store, index: Index, position: int, damage: Damaged) -> None:
        key = self._keys[position]
        name = page_name(self._parts.namespace_hex, key)
        try:
            if not remove_damaged(store.system, store.root_fd, name, damage.found):
                self.outcomes[position] = GetOutcome.MISS  # a full directory: not a page, and not ours to clear
            if not self._parts.files.present(name):
                index.drop(self._parts.codec.namespace, key)
        except OSError as error:
            self.errors.append(error_name(error))


class Writes:
    """The pages of one `batch_set`. After `run`, `outcomes` and `errors` (classes) are final."""

    def __init__(
        self,
        parts: Parts,
        keys: Sequence[bytes],
        frames: Sequence[memoryview],
        parent: bytes | None,
        deadline: float,
    ) -> None:
        self._parts = parts
        self._keys = keys
        self._frames = frames
        self._parents = parents_of(keys, parent)
        self._deadline = deadline
        self._writer = f"{parts.store.owner}.{parts.serial()}"
        self._todo: list[int] = []
        self._temporaries: dict[int, str] = {}
        self._lengths: dict[int, int] = {}
        self._full = False
        self.outcomes = [SetOutcome.ERROR] * len(keys)
        self.errors: list[str] = []

    def run(self, before_reserving: Callable[[Index], None]) -> None:
        """Store the pages. `before_reserving` may bring the index up to date before pages are chosen for eviction.

        Blocks; raises nothing for storage reasons.
        """
        if time.monotonic() >= self._deadline:
            self.errors += [DEADLINE] * len(self._keys)
            return
        repeated = self._look()
        if self._todo and self._reserve(before_reserving):
            try:
                self._parts.pool.run(len(self._todo), self._write)
            finally:
                self._publish()
        for position, first in repeated:
            stored = self.outcomes[first] is SetOutcome.STORED
            self.outcomes[position] = SetOutcome.PRESENT if stored else self.outcomes[first]

    def _look(self) -> list[tuple[int, int]]:
        """Note what is there and what is to do; pairs of a repeated key's position and its first one."""
        first_of = dict[bytes, int]()
        present = self._parts.files.lookup(self._parts.namespace_hex)
        repeated = []
        for position, key in enumerate(self._keys):
            first = first_of.setdefault(key, position)
            if first != position:
                repeated.append((position, first))
                continue
            try:
                if present(key):
                    self.outcomes[position] = SetOutcome.PRESENT
                else:
                    self._todo.append(position)
            except OSError as error:
                self.errors.append(error_name(error))
        return repeated

    def _reserve(self, before_reserving: Callable[[Index], None]) -> bool:
        """Take room for as much of the head as fits, in one transaction; the rest is turned away.

        A page takes room for its whole frame until it is stored: how short it gets is known only then.
        """
        parts, size = self._parts, self._parts.codec.frame_bytes
        head = self._todo if parts.room.capacity_bytes is None else self._todo[: parts.room.capacity_bytes // size]
        try:
            with parts.store.transaction(self._deadline) as index:
                parts.leftovers.sweep(parts.store, index)
                before_reserving(index)
                keys, parents = [self._keys[p] for p in head], [self._parents[p] for p in head]
                index.reserve(parts.codec.namespace, keys, parents, self._writer, size, now_us())
                over = parts.room.fit(parts.store, index, self.errors)
                if over:
                    head = head[: max(0, len(head) + -over // size)]
                    index.release(parts.codec.namespace, keys[len(head) :], self._writer)
        except (OSError, sqlite3.Error) as error:
            parts.leftovers.writers.add(self._writer)
            self._turn_away(self._todo, error)
            return False
        for position in self._todo[len(head) :]:
            self.outcomes[position] = SetOutcome.REJECTED
        self._todo = head
        return bool(head)

    def _turn_away(self, positions: Sequence[int], error: OSError | sqlite3.Error) -> None:
        self.errors.append(class_of(error))
        outcome = SetOutcome.REJECTED if _says_full(error) else SetOutcome.ERROR
        for position in positions:
            self.outcomes[position] = outcome

    def _write(self, number: int) -> None:
        position = self._todo[number]
        if self._full:
            self.outcomes[position] = SetOutcome.REJECTED
            return
        if time.monotonic() >= self._deadline:
            self.errors.append(DEADLINE)
            return
        parts, frame = self._parts, self._frames[position]
        temporary = f"{TMP_DIR}/{parts.store.owner}.{parts.serial()}"
        stored = parts.codec.seal(self._keys[position], frame, parent=self._parents[position])
        try:
            parts.files.write(temporary, stored)
        except LeftBehind as left:
            parts.leftovers.temporaries.add(temporary)
            self._turn_away([position], left.cause)
            self._full |= _says_full(left.cause)
        except OSError as error:
            self._turn_away([position], error)
            # Where one page found no room the pages after it find none either, or leave a hole before them.
            self._full |= _says_full(error)
        else:
            self._lengths[position] = len(stored)
            self._temporaries[position] = temporary

    def _publish(self) -> None:
        """Give the written pages their names and rows in one transaction, head first, and free what was not used."""
        parts = self._parts
        named: list[int] = []
        if self._full:
            self._make_room_for_the_index()
        try:
            with parts.store.transaction(max(self._deadline, time.monotonic() + SETTLE_S)) as index:
                for position, temporary in sorted(self._temporaries.items()):
                    try:
                        parts.files.publish(temporary, page_name(parts.namespace_hex, self._keys[position]))
                        named.append(position)
                    except OSError as error:
                        if _says_full(error):
                            # What comes after a page without room would be behind a hole.
                            self._turn_away([p for p in self._temporaries if p >= position], error)
                            break
                        self._turn_away([position], error)
                published = set(named)
                failed = [self._keys[position] for position in self._todo if position not in published]
                if failed:
                    index.release(parts.codec.namespace, failed, self._writer)
                shorter = [position for position in named if self._lengths[position] != parts.codec.frame_bytes]
                if shorter:
                    lengths = {self._keys[position]: self._lengths[position] for position in shorter}
                    index.resize(parts.codec.namespace, lengths, self._writer)
                if index.publish(self._writer) != len(named):
                    raise OSError(errno.ESTALE, "the index was made again while the pages were written")
        except (OSError, sqlite3.Error) as error:
            # The names are given but not accounted for: take them back, so that ERROR means that nothing is visible.
            parts.leftovers.writers.add(self._writer)
            for position in named:
                self._discard(page_name(parts.namespace_hex, self._keys[position]))
            self._turn_away([*self._temporaries], error)
        else:
            for position in named:
                self.outcomes[position] = SetOutcome.STORED
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
        self.outcomes[position] = SetOutcome.REJECTED

    def _discard(self, name: str) -> None:
        try:
            remove_page(self._parts.store.system, self._parts.store.root_fd, name)
        except OSError as error:
            self.errors.append(error_name(error))
            if name.startswith(TMP_DIR):
                self._parts.leftovers.temporaries.add(name)


def class_of(error: OSError | sqlite3.Error) -> str:
    """The name under which an error is counted: an errno's, or SQLite's own."""
    return error_name(error) if isinstance(error, OSError) else getattr(error, "sqlite_errorname", "SQLITE_ERROR")


def _says_full(error: OSError | sqlite3.Error) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL_ERRNOS
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)

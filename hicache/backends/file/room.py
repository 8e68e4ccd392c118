"""Room that one opening holds in the index, so that small writes need no transaction each.

The room counts as reserved, in a row of the writer `<owner>.0`. Until it is used up, or for ROOM_S, pages are written
and renamed without the store's lock. The next transaction of this opening adds their rows, and counts that much less as
reserved, so the index never counts too few bytes. Until then other processes neither evict these pages nor count them
as stored. After a kill the row stays until an opening has compared all files with the index.

Locking design: `_lock` guards all fields, for a few instructions. A transaction calls `record` first, perhaps `grant`,
and `committed` at its end, which drops only what was recorded.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import NamedTuple

from ...clock import Clock
from ...keys import PAGE_KEY_BYTES
from ..driver import Answer
from .index import Index

ROOM_WRITER = ".0"
# Long enough for a burst of single pages, and far shorter than the silence after which an owner counts as dead.
ROOM_S = 5.0


class Stored(NamedTuple):
    """Pages of one call that have files, of `size` bytes each, and no rows yet."""

    namespace: bytes
    keys: list[bytes]
    parents: list[bytes | None]
    size: int
    used_us: int


class Room:
    """The room of the opening `owner`. Thread-safe. `present` finds out which pages of a namespace have files: others
    were removed by another process."""

    def __init__(self, owner: str, clock: Clock) -> None:
        self.present: Callable[[bytes, Sequence[bytes]], Iterable[Answer]] = lambda namespace, keys: [True] * len(keys)
        self._writer = owner + ROOM_WRITER
        self._key = bytes.fromhex(owner).ljust(PAGE_KEY_BYTES, b"\0")
        self._clock = clock
        self._lock = threading.Lock()
        self._namespace = b""
        self._free_bytes = self._taken_bytes = self._granted_bytes = 0
        self._is_counted = self._is_held = False  # there is a row, as of this transaction and of the last
        self._until_s = -math.inf
        self._stored: list[Stored] = []
        self._recorded = 0

    @property
    def is_pending(self) -> bool:
        """True if pages have no rows yet."""
        return bool(self._stored)

    @property
    def is_open(self) -> bool:
        """True if there was a `grant` not long ago."""
        return self._clock() < self._until_s

    def take(self, size: int) -> bool:
        """Take `size` bytes for pages. Return False if the room is smaller, or too old."""
        with self._lock:
            if size > self._free_bytes or not self.is_open:
                return False
            self._free_bytes -= size
            self._taken_bytes += size
            return True

    def put(self, taken_bytes: int, stored: Iterable[Stored]) -> None:
        """Note the pages that were stored in bytes that were taken; the other bytes are no longer counted."""
        with self._lock:
            self._taken_bytes -= taken_bytes
            self._stored += stored

    def end(self) -> None:
        """Take no more pages before the next `grant`; the next transaction gives the room up."""
        with self._lock:
            self._free_bytes, self._until_s = 0, -math.inf

    def record(self, index: Index) -> None:
        """Add the rows of the pages. Raises sqlite3.Error."""
        with self._lock:
            stored = list(self._stored)
            self._recorded, self._granted_bytes = len(stored), 0
        for one in stored:
            there = [answer is not False for answer in self.present(one.namespace, one.keys)]
            keys, parents = list(compress(one.keys, there)), list(compress(one.parents, there))
            index.reserve(one.namespace, keys, parents, "", one.size, one.used_us)
        self._count(index)

    def grant(self, index: Index, namespace: bytes, size: int) -> None:
        """Hold `size` bytes for pages from now on. Raises sqlite3.Error."""
        self._namespace = namespace
        with self._lock:
            self._granted_bytes = max(0, size - self._free_bytes)
        self._count(index)

    def _count(self, index: Index) -> None:
        with self._lock:
            later = sum(one.size * len(one.keys) for one in self._stored[self._recorded :])
            held = self._free_bytes + self._granted_bytes + self._taken_bytes + later
        if held or self._is_held:
            index.release_all(self._writer)
        if held:
            index.reserve(self._namespace, [self._key], [None], self._writer, held, 0)
        self._is_counted = held > 0

    def committed(self) -> None:
        """The transaction was committed."""
        with self._lock:
            del self._stored[: self._recorded]
            self._free_bytes += self._granted_bytes
            if self._granted_bytes:
                self._until_s = self._clock() + ROOM_S
            self._recorded = self._granted_bytes = 0
            self._is_held = self._is_counted

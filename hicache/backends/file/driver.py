"""The file driver: one page per file, many processes on one directory, limits on bytes and on free space.

The steps of a `write`: find out which pages exist (stat); reserve room for the others in one transaction, evicting
as needed; write them to temporary files, with several threads; rename them in a second transaction. While the store has
a `room`, it needs neither transaction. A `read` only accesses files; uses are recorded in memory and written to the
index about once a second, so a kill may lose the recency of the last second. docs/formats/file_store.md specifies the
format.

Locking design: the threads of a SupervisedPool and the caller read and write pages, each page by one of them (see
`PageReads`). `_state` guards `_uses`, `_errors` and `_adaptive` and is held for some microseconds per page;
`_flush_after` and `rejection` are hints, written by any thread. Transactions start without `_state`; for `_capacity`
see `CapacityManager`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ...arguments import instance
from ...clock import SYSTEM_CLOCK, Clock
from ...config.storage import FileStorageOptions
from ...errors import InvalidInput
from ...frame import FrameCodec, first_bytes, header_of
from ...frame.header import PARENT
from ...keys import PAGE_KEY_BYTES
from ...logs import LimitedLog
from ...supervised import SupervisedPool
from ...units import format_size
from ..base import EvictionListener, PageId, StoredPage, Usage
from ..driver import Answer, Incidents
from ..errors import ErrorKind, StoreError
from ..order import AdaptivePages
from ..pages import PageReads, PageWrites
from .capacity import CapacityManager
from .index import Index, PageRow
from .mounts import UNKNOWN, misplaced
from .pages import (
    DONE,
    MISSING,
    NOT_STARTED,
    UNUSUAL,
    Identity,
    NotThePage,
    PageFiles,
    error_name,
    page_name,
    remove_damaged,
    remove_page,
)
from .reconcile import rows_of, stored_pages
from .store import FileStore, Removal, now_us
from .system import System
from .writes import FileWrites, class_of

# A daemon opens a store for each namespace.
_limits_log = LimitedLog(logging.getLogger(__name__), 3600.0)
T = TypeVar("T")

# Recency is written when this many uses wait, or when the oldest one has waited this long. At most `_USES_MAX` wait.
_USES_FLUSH = 4096
USES_FLUSH_S = 1.0
_USES_MAX = 65_536
# How long to wait for a busy store in order to write recency. After a timeout, the next batch does not wait again.
_FLUSH_WAIT_S = 0.02
_CLOSE_S = 5.0
_NO_FILE = "no file"
# How long to wait for a busy store in order to measure it.
_MEASURE_WAIT_S = 0.25
_EXISTS_PAGES_FIRST = 4
_EXISTS_PAGES_PER_CLOCK = 64


class FileDriver:
    """Pages in files. See the module's docstring; `Driver` describes each function. The identity of a file
    distinguishes it from its successor.

    Pages are files of a size that fits `codec`. It is None for a tool, which writes and removes pages of any size: then
    the store must exist, and damaged files stay, so that the tool can count them.

    The constructor opens the store, see `FileStore`. It raises NotOurs and BackendUnavailable, and InvalidInput for a
    capacity below one page. Open it after a fork and not before: neither its threads nor SQLite survive a fork. On a
    full or read-only disk it opens, reads and removes pages, and rejects new ones until its index can be written.
    `system` is for tests.
    """

    def __init__(
        self, codec: FrameCodec | None, options: FileStorageOptions, *, system: System | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.options = instance("options", options, FileStorageOptions)
        if codec is not None and options.capacity is not None and options.capacity < codec.frame_bytes:
            raise InvalidInput(
                f"file store: capacity {options.capacity} is below one page of {codec.frame_bytes} bytes;"
                " raise it, or use smaller pages"
            )
        self._clock = clock
        self._state = threading.Lock()
        self._uses: dict[PageId, int] = {}
        self._uses_since = math.inf
        self._flush_after = -math.inf
        self.rejection: str | None = None  # see ExplainsRejections
        self._errors: Counter[str] = Counter()
        self._store = FileStore(
            options.path, create=codec is not None, keep_damaged=codec is None, system=system, clock=clock
        )
        self._files = PageFiles(
            self._store.root_fd, codec, system=self._store.system, direct_io=options.direct_io, sync=options.sync
        )
        # An exception on one of its threads fails one page, which `PageReads` and `PageWrites` count.
        self._pool = SupervisedPool[Any]("file", options.io_threads - 1, clock=clock)
        self._store.room.present = lambda namespace, keys: self._files.lookup(namespace.hex(), keys)
        self._capacity = CapacityManager(self._store, options.capacity, options.free_space_floor, clock)
        self._listeners: dict[bytes, EvictionListener] = {}
        self._capacity.on_evicted = self._evicted
        self._adaptive: AdaptivePages | None = None
        if options.eviction_policy == "adaptive" and codec is not None and options.capacity is not None:
            self._adaptive = AdaptivePages(options.capacity // codec.frame_bytes)
            self._capacity.keeps = self._keeps
        if codec is not None:
            self._warn_of_sharing()
            self._fit(codec.frame_bytes)

    def _warn_of_sharing(self) -> None:
        """Warn if other machines may use the file system: the store opens, but only for this machine."""
        path, kind = str(self.options.path), UNKNOWN
        with contextlib.suppress(OSError):
            kind = self._store.system.file_system(self._store.root_fd)
        if advice := misplaced("file", kind):
            _limits_log.warn(f"sharing {path}", "file store %s: its file system is %s; %s", path, kind, advice)

    def _fit(self, frame_bytes: int) -> None:
        """Evict the pages over the limits, and warn of limits without room."""
        errors: list[str] = []

        def fit(index: Index) -> None:
            self._capacity.fit(index, errors)
            self._warn_of_limits(index.totals().bytes, frame_bytes)

        self._settled(self._clock() + _CLOSE_S, fit, None)
        self._count(*errors)

    def _count(self, *kinds: str) -> None:
        """Count errors that belong to no page of a call."""
        with self._state:
            self._errors.update(kinds)

    def _warn_of_limits(self, held_bytes: int, frame_bytes: int) -> None:
        """Warn if the file system does not have room for a page, or for the capacity. Raises OSError."""
        options, room = self.options, self._capacity.space()[0] + held_bytes - self.options.free_space_floor
        path, floor, left = str(options.path), format_size(options.free_space_floor), self._capacity.space_left()
        if room < frame_bytes:
            _limits_log.warn(path, "file store %s: free_space_floor is %s, and %s, so the store keeps nothing; lower "
                             "free_space_floor, or use a larger disk", path, floor, left)
        elif options.capacity is not None and room < options.capacity:
            _limits_log.warn(path, "file store %s: capacity is %s, and %s, of which free_space_floor is %s, so the "
                             "store has room for %s; lower capacity, or use a larger disk", path,
                             format_size(options.capacity), left, floor, format_size(room))

    def _settled(self, deadline: float, work: Callable[[Index], T], otherwise: T) -> T:
        """Return the result of `work` in a transaction. After a failure, count it and return `otherwise`."""
        try:
            with self._store.transaction(deadline) as index:
                self._store.sweep(index)
                return work(index)
        except (OSError, sqlite3.Error) as error:
            self._count(class_of(error))
            return otherwise

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> Iterator[Answer]:
        """See Driver. One stat per key; the index is not used."""
        start, count = 0, _EXISTS_PAGES_FIRST  # few at first: most lookups of a new prompt end at their first page
        while start < len(keys):
            if self._clock() >= deadline:
                raise StoreError(ErrorKind.DEADLINE)
            yield from self._files.lookup(namespace.hex(), keys[start : start + count])
            start, count = start + count, _EXISTS_PAGES_PER_CLOCK

    def read(self, pages: PageReads[Identity]) -> None:
        """See Driver. About once a second, takes the store's lock, if it is free within a moment, to write uses."""
        used: list[int] = []
        folder = pages.codec.namespace.hex()
        shares = self._files.shares(range(len(pages)), self.options.io_threads)

        def read_share(number: int) -> None:
            left = self._read_natively(pages, shares[number], used) if self._files.batches else shares[number]
            used.extend(p for p in left if not pages.is_late and self._read(folder, pages, p))

        self._pool.run(len(shares), read_share)
        used.sort()
        parent = bytes(header_of(pages.pages[used[0]])[PARENT]) if used else None  # joins the batches of a request
        self._note_request(pages.codec.namespace, [pages.keys[position] for position in used], parent)

    def _read_natively(
        self, pages: PageReads[Identity], positions: Sequence[int], used: list[int]
    ) -> Iterator[int]:
        """Read and settle pages, add the hits to `used`, and yield those that only `_read` can settle."""
        found = self._files.read_share(pages, positions, pages.deadline - self._clock())
        for position, outcome in zip(positions, found, strict=True):
            if isinstance(outcome, tuple):
                if pages.accept(position, outcome[2], outcome):
                    used.append(position)
            elif outcome == MISSING:
                pages.miss(position)
            elif outcome == DONE and pages.accept_proven(position):
                used.append(position)
            elif outcome in (DONE, UNUSUAL):
                yield position
            elif outcome != NOT_STARTED:
                pages.fail(position, error_name(OSError(outcome, "")))

    def _read(self, folder: str, pages: PageReads[Identity], position: int) -> bool:
        """Read and settle one page; return True for a hit."""

        def buffers(stored_bytes: int) -> list[memoryview]:
            if self._files.direct_io:  # needs aligned memory: see `PageFiles`
                return first_bytes([pages.frame(position)], stored_bytes)
            return pages.buffers(position, stored_bytes)

        stream = pages.stream()
        try:
            found = self._files.read(page_name(folder, pages.keys[position]), buffers, stream)
        except FileNotFoundError:
            pages.miss(position)
        except NotThePage as other:
            pages.damage(position, other.reason, other.found)
            if other.stays:
                pages.miss(position)
        except OSError as error:
            pages.fail(position, error_name(error))
        else:
            return pages.accept(position, found[2], found, stream)
        return False

    def touch(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[Answer]:
        """See Touches. One stat per key; the uses wait in memory like those of reads."""
        found = list(self.find(namespace, keys, deadline))
        self._note_request(namespace, [key for key, answer in zip(keys, found, strict=True) if answer is not False])
        return found

    def watch_evictions(self, namespace: bytes, listener: EvictionListener) -> None:
        """See ReportsEvictions. Evictions of other processes are not reported."""
        self._listeners[namespace] = listener

    def _evicted(self, namespace: bytes, key: bytes) -> None:
        if namespace in self._listeners:
            self._listeners[namespace]([key])

    def _note_request(self, namespace: bytes, keys: Sequence[bytes], parent: bytes | None = None) -> None:
        self._compete(namespace, keys, parent)
        self._note_uses(namespace, keys)

    def _compete(self, namespace: bytes, keys: Sequence[bytes], parent: bytes | None = None) -> None:
        """Record for `_keeps` that a request uses pages, head first, after `parent`."""
        if self._adaptive is not None:
            with self._state:
                self._adaptive.use([namespace + key for key in keys], parent and namespace + parent)

    def _keeps(self, name: bytes, parent_of: Callable[[bytes], bytes | None]) -> bool:
        with self._state:
            return self._adaptive is not None and self._adaptive.keeps(name, parent_of)

    def _note_uses(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        now = self._clock()
        with self._state:
            self._uses.update(dict.fromkeys([(namespace, key) for key in keys], now_us(self._clock)))
            self._uses_since = min(self._uses_since, now)
            due = len(self._uses) >= _USES_FLUSH or now - self._uses_since >= USES_FLUSH_S
            due = due and now >= self._flush_after
        if due:
            self._flush_uses(now + _FLUSH_WAIT_S)

    def _flush_uses(self, deadline: float) -> None:
        try:
            with self._store.transaction(deadline) as index:
                self._write_uses(index)
        except TimeoutError:
            self._flush_after = self._clock() + USES_FLUSH_S  # another thread or process holds the store
        except (OSError, sqlite3.Error) as error:
            self._count(class_of(error))
        with self._state:
            while len(self._uses) > _USES_MAX:
                del self._uses[next(iter(self._uses))]

    def _write_uses(self, index: Index) -> None:
        with self._state:
            uses, self._uses, self._uses_since = self._uses, {}, math.inf
        if uses:
            by_namespace: dict[bytes, dict[bytes, int]] = {}
            for (namespace, key), use in uses.items():
                by_namespace.setdefault(namespace, {})[key] = use
            for namespace, some in by_namespace.items():
                index.touch(namespace, some)

    def write(self, pages: PageWrites) -> None:
        """See Driver. Pages become visible at the end of the batch, head first."""
        self._compete(pages.codec.namespace, pages.keys, *pages.parents[:1])
        writes = FileWrites(self._store, self._files, self._capacity, self._pool, pages)
        used_us = now_us(self._clock)
        writes.run(self._write_uses, used_us if pages.used_s is None else min(int(pages.used_s * 1e6), used_us))
        if len(writes.present) < len(pages):
            self.rejection = writes.rejection
        self._note_uses(pages.codec.namespace, writes.present)

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[Identity] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver. One transaction for all of them. Works on a full disk, and without an index."""
        removed, kinds = 0, list[str]()
        try:
            with self._store.removing(deadline) as removal:
                for number, key in enumerate(keys):
                    try:
                        removed += self._remove(removal, namespace, key, None if found is None else found[number])
                    except OSError as error:
                        kinds.append(error_name(error))
            if removal.error is not None:
                kinds.append(class_of(removal.error))
        except (OSError, sqlite3.Error) as error:
            kinds.append(class_of(error))
        return removed, kinds

    def _remove(self, removal: Removal, namespace: bytes, key: bytes, found: Identity | None) -> bool:
        """Remove the file of a page, if there is one, and its row; with `found` only what was found at its name, and
        not its replacement. Raises OSError."""
        system, root_fd, name = self._store.system, self._store.root_fd, page_name(namespace.hex(), key)
        if found is not None:
            is_gone = remove_damaged(system, root_fd, name, found)
        elif is_gone := self._files.find(name) is not None:
            remove_page(system, root_fd, name)
        if found is None or (len(key) == PAGE_KEY_BYTES and self._files.find(name) is None):
            removal.pages.append((namespace, key))
        return is_gone

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver. First the files, then the rows without files. Holds the rows of the whole store until the files
        are listed: about 300 bytes per page."""
        rows: dict[PageId, PageRow] = {}
        rows = self._settled(deadline, lambda index: rows_of(index, namespace), rows)
        try:
            for page in stored_pages(self._store.system, self._store.root_fd, namespace, rows):
                if len(page.key) == PAGE_KEY_BYTES:
                    yield page
        except OSError as error:
            raise StoreError(class_of(error)) from error
        for space, key in rows:
            yield StoredPage(space, key, 0, None, damage=_NO_FILE)

    def measure(self) -> Usage:
        """See Driver. Pages and bytes of all namespaces in the root, which share the capacity."""
        try:
            with self._store.transaction(self._clock() + _MEASURE_WAIT_S) as index:
                self._store.sweep(index)
                totals = index.totals()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(class_of(error)) from error
        return Usage(totals.pages, totals.bytes, self.options.capacity)

    def incidents(self) -> Incidents:
        """See HasIncidents. `errors["direct_io_refused"]` means that the file system does not support direct I/O."""
        with self._state:
            errors = dict(self._errors)
        if self._files.direct_refused:
            errors["direct_io_refused"] = self._files.direct_refused
        return Incidents(errors, self._capacity.evicted_pages)

    def close(self) -> None:
        """See Driver. Also writes the uses that wait in memory."""
        self._pool.close()
        self._store.room.end()
        self._settled(self._clock() + _CLOSE_S, self._write_uses, None)
        self._store.close()

    def check(self) -> None:
        """Raise InvariantError if the index contradicts itself. For tests: reads all rows under the store's lock."""
        with self._store.transaction(self._clock() + _CLOSE_S) as index:
            index.check()

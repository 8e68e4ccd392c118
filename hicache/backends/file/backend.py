"""The file backend: one page per file, many processes on one directory, bounded by bytes and by free space.

The life of a `batch_set`: look which pages are there (stat); reserve room for the others in one transaction, evicting
where needed; write them to temporary files, several threads at once; give them their names in a second transaction.
A `batch_get` touches files only; that pages were used is noted in memory and written into the index now and then, so a
kill may lose the recency of the last second. The format of the store is in docs/formats/file_store.md.

Locking design: pages are read and written by the threads of a `WorkerPool` and by the caller, each page by one of them;
outcomes are slots of a list that only that thread writes. `_state` guards `_uses` and is held for a few instructions
only; `_flush_after` is a hint, written by any thread. Transactions are taken with `_state` free. `room` changes in
transactions only.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TypeVar

from ...errors import InvalidInput
from ...frame import FrameCodec
from ..base import BackendStatistics, EvictionListener, GetOutcome, SetOutcome, StorageBackend, Usage
from ..calls import Calls, check_batch, check_keys
from ..workers import WorkerPool
from .batches import DEADLINE, SETTLE_S, Leftovers, Parts, Reads, Writes, class_of
from .evicted import EvictedFile
from .index import Index, PageRow
from .pages import PageFiles, System, error_name, page_name, remove_page
from .room import Room
from .store import Removal, Store, now_us

T = TypeVar("T")

IO_THREADS_MAX = 64
# Recency is written when this many pages wait or the oldest one waits this long, and never more are kept.
_USES_FLUSH = 4096
USES_FLUSH_S = 1.0
_USES_MAX = 65_536
# Recency is not worth waiting for a busy store, and if that was in vain not again with the next batch.
_FLUSH_WAIT_S = 0.02
_CLOSE_S = 5.0
_EXISTS_PAGES_PER_CLOCK = 64


@dataclass(frozen=True, slots=True)
class FileBackendOptions:
    """Where a file store is and how much it may take.

    Behaviour: `path`, a directory of its own on a local file system; `capacity_bytes` for all pages in it, None for no
    limit but the floor; `free_space_floor_bytes` that stay free on that file system for others, 0 for none; `sync`
    writes a page to the device before it is published: it halves the write speed and saves, after a power cut, pages
    that would otherwise be found damaged and dropped.

    Performance: `io_threads` that read or write the pages of one batch (2 fill one NVMe drive or the page cache, more
    help on arrays); `direct_io` keeps pages out of the page cache, which is right if the working set is larger than
    the memory, and slower if it is not.

    Raises InvalidInput for values that cannot work.
    """

    path: str | PathLike[str]
    capacity_bytes: int | None = None
    free_space_floor_bytes: int = 0
    io_threads: int = 2
    direct_io: bool = False
    sync: bool = False

    def __post_init__(self) -> None:
        path: object = self.path
        if not isinstance(path, (str, PathLike)) or not str(path):
            raise InvalidInput(f"file store: path must name a directory, got {path!r}")
        for name, lowest, highest in (
            ("capacity_bytes", 1, None), ("free_space_floor_bytes", 0, None), ("io_threads", 1, IO_THREADS_MAX),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and name == "capacity_bytes":
                continue
            if type(value) is not int or value < lowest or (highest is not None and value > highest):
                limits = f"{lowest} .. {highest}" if highest else f"at least {lowest}"
                raise InvalidInput(f"file store: {name} must be a whole number, {limits}; got {value!r}")
        for name in ("direct_io", "sync"):
            if type(getattr(self, name)) is not bool:
                raise InvalidInput(f"file store: {name} must be true or false, got {getattr(self, name)!r}")


class FileBackend(StorageBackend):
    """Pages in files. See the module's docstring; `StorageBackend` says what each verb does.

    Raises NotOurs and BackendUnavailable from the constructor (which scans the store and may block for as long as that
    takes), InvalidInput for a capacity below one page. Open it after a fork and not before: neither its threads nor
    SQLite survive one, so in the child of a fork every verb is refused (`errors["forked"]`). On a disk that is full or
    read-only it opens, reads and removes pages, and turns others away until its index can be written. `system` is for
    tests.
    """

    def __init__(self, codec: FrameCodec, options: FileBackendOptions, *, system: System | None = None) -> None:
        super().__init__(codec)
        if options.capacity_bytes is not None and options.capacity_bytes < codec.frame_bytes:
            raise InvalidInput(
                f"file store: capacity_bytes {options.capacity_bytes} is below one page of {codec.frame_bytes} bytes;"
                " raise it, or use smaller pages"
            )
        self.options = options
        self._namespace_hex = codec.namespace.hex()
        self._calls = Calls(codec)
        self._state = threading.Lock()
        self._close_lock = threading.Lock()
        self._uses: dict[bytes, int] = {}
        self._uses_since = math.inf
        self._flush_after = -math.inf
        self._store = Store(options.path, create=True, system=system)
        self._usage = Usage(0, 0, options.capacity_bytes)
        files = PageFiles(
            self._store.root_fd,
            codec.fits,
            system=self._store.system,
            direct_io=options.direct_io,
            sync=options.sync,
        )
        self._parts = Parts(
            codec,
            self._namespace_hex,
            self._store,
            files,
            Room(options.capacity_bytes, options.free_space_floor_bytes),
            WorkerPool(options.io_threads, "hicache-file", lambda: self._calls.count(errors=["internal"])),
            Leftovers(),
        )
        self._store.at_fork = self._after_fork
        errors: list[str] = []
        room = self._parts.room
        self._settled(time.monotonic() + _CLOSE_S, lambda index: room.fit(self._store, index, errors), 0)
        self._calls.count(errors=errors)

    def _settled(self, deadline: float, work: Callable[[Index], T], otherwise: T) -> T:
        """What `work` gives in a transaction. A failure is counted instead of raised, and gives `otherwise`."""
        try:
            with self._store.transaction(deadline) as index:
                self._parts.leftovers.sweep(self._store, index)
                return work(index)
        except (OSError, sqlite3.Error) as error:
            self._calls.count(errors=[class_of(error)])
            return otherwise

    def _after_fork(self) -> None:
        """In the child: neither the threads nor SQLite came along, so each verb is refused."""
        self._calls.after_fork()
        self._close_lock = threading.Lock()

    def on_eviction(self, listener: EvictionListener) -> None:
        """See EvictionSource. Pages of other namespaces, which are evicted as well, are not told of."""
        namespace, namespace_hex, store = self.codec.namespace, self._namespace_hex, self._store

        def evicting(page: PageRow) -> None:
            if page.namespace == namespace:
                name = page_name(namespace_hex, page.key)
                listener(page.key, lambda: EvictedFile(store.system, store.root_fd, name))

        self._parts.room.evicting = evicting

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend. One stat per key; the file system alone decides."""
        check_keys(keys)
        with self._calls.enter() as is_open:
            if not is_open:
                self._calls.count(errors=[self._calls.refusal])
                return 0
            present = self._parts.files.lookup(self._namespace_hex)
            for position, key in enumerate(keys):
                if not position % _EXISTS_PAGES_PER_CLOCK and time.monotonic() >= deadline:
                    self._calls.count(errors=[DEADLINE])
                    return position
                try:
                    if not present(key):
                        return position
                except OSError as error:
                    self._calls.count(errors=[error_name(error)])
                    return position
            return len(keys)

    def batch_get(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, deadline: float
    ) -> list[GetOutcome]:
        """See StorageBackend. Takes the store's lock to remove damaged pages, and about once a second, if it is to be
        had within a moment, to note which pages were used."""
        check_batch(self.codec, keys, frames)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse_gets(len(keys))
            batch = Reads(self._parts, keys, frames, deadline)
            try:
                batch.run()
            finally:
                self._calls.count(gets=batch.outcomes, errors=batch.errors, corrupt=batch.corrupt)
            self._note_uses([k for k, outcome in zip(keys, batch.outcomes, strict=True) if outcome is GetOutcome.HIT])
        return batch.outcomes

    def _note_uses(self, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        now = time.monotonic()
        with self._state:
            self._uses.update(dict.fromkeys(keys, now_us()))
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
            self._flush_after = time.monotonic() + USES_FLUSH_S  # another thread or process holds the store
        except (OSError, sqlite3.Error) as error:
            self._calls.count(errors=[class_of(error)])
        with self._state:
            while len(self._uses) > _USES_MAX:
                del self._uses[next(iter(self._uses))]

    def _write_uses(self, index: Index) -> None:
        with self._state:
            uses, self._uses, self._uses_since = self._uses, {}, math.inf
        if uses:
            index.touch(self.codec.namespace, uses)

    def batch_set(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See StorageBackend. Two transactions per batch; pages appear together at its end, head first."""
        check_batch(self.codec, keys, frames, parent)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse_sets(len(keys))
            batch = Writes(self._parts, keys, frames, parent, deadline)
            try:
                batch.run(self._write_uses)
            finally:
                self._calls.count(sets=batch.outcomes, errors=batch.errors)
            self._note_uses(
                [k for k, outcome in zip(keys, batch.outcomes, strict=True) if outcome is SetOutcome.PRESENT]
            )
        return batch.outcomes

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend. One transaction for all of them. Works on a full disk, and without an index."""
        check_keys(keys)
        removed = 0
        if not keys:
            return 0
        with self._calls.enter() as is_open:
            if not is_open or time.monotonic() >= deadline:
                self._calls.count(errors=[DEADLINE if is_open else self._calls.refusal])
                return 0
            try:
                with self._store.removing(deadline) as removal:
                    removed = sum(self._delete(removal, key) for key in keys)
                error = removal.error
            except (OSError, sqlite3.Error) as failed:
                error = failed
            if error is not None:
                self._calls.count(errors=[class_of(error)])
        return removed

    def _delete(self, removal: Removal, key: bytes) -> bool:
        name = page_name(self._namespace_hex, key)
        try:
            there = self._parts.files.present(name)
            if there:
                remove_page(self._store.system, self._store.root_fd, name)
        except OSError as error:
            self._calls.count(errors=[error_name(error)])
            return False
        removal.pages.append((self.codec.namespace, key))
        return there

    def usage(self) -> Usage:
        """See StorageBackend. Pages and bytes of all namespaces in the root, since they share the capacity; what was
        found last while the index cannot be used."""
        with self._calls.enter() as is_open:
            if is_open:
                self._usage = self._settled(time.monotonic() + SETTLE_S, self._measured, self._usage)
        return self._usage

    def _measured(self, index: Index) -> Usage:
        totals = index.totals()
        return Usage(totals.pages, totals.bytes, self.options.capacity_bytes)

    def statistics(self) -> BackendStatistics:
        """See StorageBackend. `errors["direct_io_refused"]` says that the file system has no direct I/O."""
        found = self._calls.statistics()
        errors = dict(found.errors)
        if self._parts.files.direct_refused:
            errors["direct_io_refused"] = self._parts.files.direct_refused
        return replace(found, errors=errors, evicted_pages=self._parts.room.evicted_pages)

    def close(self) -> None:
        """See StorageBackend. Also writes the recency that waits in memory."""
        with self._close_lock:
            if not self._calls.close():
                return
            self._parts.pool.close()
            self._settled(time.monotonic() + _CLOSE_S, self._write_uses, None)
            self._store.close()

    def check(self) -> None:
        """Raise InvariantError if the index contradicts itself. For tests: reads all rows under the store's lock."""
        with self._store.transaction(time.monotonic() + _CLOSE_S) as index:
            index.check()

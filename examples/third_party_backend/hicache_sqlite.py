"""A store that keeps pages of HiCache in one SQLite file. It is small and keeps the whole contract of a driver.

    pages  id, namespace, key, used (Unix time), frame (the encoded page)

Use it for a few gigabytes on one machine. Several processes may share the file.

Locking design: a driver has one connection, and `_lock` is held during each use of it; SQLite orders the writers in
any case. A function waits until its deadline for the lock, and SQLite for other processes.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence

from hicache.backends.base import StoredPage, Usage
from hicache.backends.errors import ErrorKind, StoreError
from hicache.backends.pages import PageReads, PageWrites
from hicache.errors import BackendUnavailable
from hicache.frame import FrameCodec

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pages(id INTEGER PRIMARY KEY AUTOINCREMENT, namespace BLOB NOT NULL,
    key BLOB NOT NULL, used REAL NOT NULL, frame BLOB NOT NULL, UNIQUE(namespace, key))
"""
_INSERT = "INSERT OR IGNORE INTO pages(namespace, key, used, frame) VALUES(?, ?, ?, ?)"
_LISTED_AT_ONCE = 500
# The longest wait: locks and SQLite do not accept an infinite one.
_WAIT_S_MAX = 86_400.0


def _connect(path: str | os.PathLike[str]) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(os.fspath(path) or "/", isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode = WAL").fetchall()
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(_SCHEMA)
        except BaseException:
            db.close()
            raise
    except (sqlite3.Error, TypeError) as error:
        raise BackendUnavailable(f"sqlite store {path!r}: {error}; check path and permissions") from error
    return db


class SqliteDriver:
    """See the module's docstring, and `Driver` for each function. The number of its row identifies a stored object.

    Raises BackendUnavailable if the file cannot be opened.
    """

    def __init__(self, codec: FrameCodec | None, path: str | os.PathLike[str]) -> None:
        del codec  # pages of any size have room
        self._lock = threading.Lock()
        self._db = _connect(path)

    @contextlib.contextmanager
    def _locked(self, deadline: float, *, writing: bool = False) -> Iterator[sqlite3.Connection]:
        """Lock the connection; it waits for other processes until the deadline. `writing` begins a transaction."""
        wait_s = min(max(0.0, deadline - time.monotonic()), _WAIT_S_MAX)
        if not self._lock.acquire(timeout=wait_s):
            raise StoreError(ErrorKind.DEADLINE)
        try:
            left_s = min(max(0.0, deadline - time.monotonic()), _WAIT_S_MAX)
            self._db.execute(f"PRAGMA busy_timeout = {math.ceil(left_s * 1000)}")
            with self._db:  # commits; rolls back on an exception
                if writing:
                    self._db.execute("BEGIN IMMEDIATE")
                yield self._db
        except sqlite3.Error as error:
            raise StoreError(getattr(error, "sqlite_errorname", "SQLITE_ERROR")) from error
        finally:
            self._lock.release()

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> Iterator[bool]:
        """See Driver."""
        for key in keys:
            with self._locked(deadline) as db:
                is_stored = self._has(db, namespace, key)
            yield is_stored

    @staticmethod
    def _has(db: sqlite3.Connection, *where: bytes) -> bool:
        return db.execute("SELECT 1 FROM pages WHERE namespace = ? AND key = ?", where).fetchone() is not None

    def read(self, pages: PageReads[int]) -> None:
        """See Driver. Takes the lock for one page at a time, so that other calls can run during a long batch."""
        hits: list[tuple[float, int]] = []
        for position in pages:
            with self._locked(pages.deadline) as db:
                # Do not read an object that is larger than a page.
                found = db.execute(
                    "SELECT id, length(frame), CASE WHEN length(frame) <= ? THEN frame END FROM pages"
                    " WHERE namespace = ? AND key = ?",
                    (pages.codec.frame_bytes, pages.codec.namespace, pages.keys[position]),
                ).fetchone()
            if found is None:
                pages.miss(position)
                continue
            row, size, stored = found
            is_hit = pages.accept(position, size, row) if stored is None else pages.take(position, stored, row)
            if is_hit:
                hits.append((time.time(), row))
        if hits:
            with self._locked(pages.deadline, writing=True) as db:
                db.executemany("UPDATE pages SET used = ? WHERE id = ?", hits)

    def write(self, pages: PageWrites) -> None:
        """See Driver. All pages written before the deadline are one transaction."""
        new: list[int] = []
        namespace, used_s = pages.codec.namespace, time.time() if pages.used_s is None else pages.used_s
        try:
            with self._locked(pages.deadline, writing=True) as db:
                for position in pages:
                    key = pages.keys[position]
                    if self._has(db, namespace, key):
                        pages.present(position)
                        continue
                    new.append(position)
                    db.execute(_INSERT, (namespace, key, used_s, pages.sealed_frame(position)))
        except StoreError as error:
            if error.kind != "SQLITE_FULL" or not new:
                raise
            pages.reject(new[0])  # the transaction was rolled back, so later pages are not stored either
            return
        for position in new:
            pages.stored(position)

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[int] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver."""
        column, values = ("namespace", [namespace] * len(keys)) if found is None else ("id", found)
        with self._locked(deadline, writing=True) as db:
            where = list(zip(values, keys, strict=True))
            return max(0, db.executemany(f"DELETE FROM pages WHERE {column} = ? AND key = ?", where).rowcount), ()

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver. Reads a few hundred rows at a time, so that other calls can run during a long listing."""
        last = 0
        while True:
            with self._locked(deadline) as db:
                rows = db.execute(
                    "SELECT namespace, key, length(frame), used, id FROM pages"
                    " WHERE id > ? AND lower(hex(namespace)) LIKE ? || '%' ORDER BY id LIMIT ?",
                    (last, namespace, _LISTED_AT_ONCE),
                ).fetchall()
            if not rows:
                return
            last = rows[-1][-1]
            yield from (StoredPage(*row) for row in rows)

    def read_start(self, page: StoredPage, bytes_max: int, deadline: float) -> tuple[bytes, int] | None:
        """See Inspects. Makes `hicache ls`, `stat`, `copy`, `purge`, `trim` and `verify` work, and `capacity`."""
        with self._locked(deadline) as db:
            found = db.execute(
                "SELECT substr(frame, 1, ?), id FROM pages WHERE namespace = ? AND key = ?", (bytes_max, *page.id)
            ).fetchone()
        return None if found is None else (bytes(found[0]), found[1])

    def measure(self) -> Usage:
        """See Driver. Counts all namespaces of the file."""
        with self._locked(time.monotonic() + 1.0) as db:
            pages, size = db.execute("SELECT count(*), coalesce(sum(length(frame)), 0) FROM pages").fetchone()
        return Usage(pages, size, None)

    def close(self) -> None:
        """See Driver."""
        self._db.close()

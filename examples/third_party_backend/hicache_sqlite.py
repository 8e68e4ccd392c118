"""Pages of HiCache in one SQLite file: a small store, complete in every promise of the storage contract.

    pages  id, namespace, key, used (Unix time), frame (the stored form of the page)

Good for a few gigabytes on one machine, where one file is easier to keep than many. Several processes may share it.

Locking design: a backend has one connection, and `_lock` is held for all of a verb that uses it: SQLite orders the
writers anyway. A verb waits for the lock, and SQLite for other processes, no longer than the verb's deadline.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence

from hicache.backends.base import BackendStatistics, GetOutcome, SetOutcome, StorageBackend, Usage
from hicache.backends.calls import Calls, check_batch, check_keys
from hicache.backends.raw import RawStore, StoredPage
from hicache.errors import BackendUnavailable, InvalidInput
from hicache.frame import Damage, FrameCodec

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pages(id INTEGER PRIMARY KEY, namespace BLOB NOT NULL, key BLOB NOT NULL,
    used REAL NOT NULL, frame BLOB NOT NULL, UNIQUE(namespace, key))
"""
_INSERT = "INSERT OR IGNORE INTO pages(namespace, key, used, frame) VALUES(?, ?, ?, ?)"
# What an operator's command waits for a store that others use.
_TOOL_WAIT_S = 30.0
_LISTED_AT_ONCE = 500
# An infinite deadline still has to be a number for a lock and for SQLite.
_WAIT_S_MAX = 86_400.0


def _connect(path: str | os.PathLike[str]) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode = WAL").fetchall()
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(_SCHEMA)
        except BaseException:
            db.close()
            raise
    except sqlite3.Error as error:
        raise BackendUnavailable(f"sqlite store {os.fspath(path)}: {error}; check path and permissions") from error
    return db


def _class_of(error: sqlite3.Error | TimeoutError) -> str:
    """The class under which an error is counted: SQLite's own name for it."""
    return "deadline" if isinstance(error, TimeoutError) else getattr(error, "sqlite_errorname", "SQLITE_ERROR")


def _says_full(error: sqlite3.Error | TimeoutError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


class SqliteBackend(StorageBackend):
    """See the module's docstring; `StorageBackend` says what each verb does. Thread-safe.

    Raises InvalidInput for a path that is none, BackendUnavailable for a file that cannot be opened.
    """

    def __init__(self, codec: FrameCodec, path: str | os.PathLike[str]) -> None:
        super().__init__(codec)
        given: object = path
        if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
            raise InvalidInput(f"sqlite store: path must name a file, got {path!r}")
        self._calls = Calls(codec)
        self._lock = threading.Lock()
        self._db = _connect(path)
        self._usage = Usage(0, 0, None)

    @contextlib.contextmanager
    def _locked(self, deadline: float) -> Iterator[sqlite3.Connection]:
        """The connection, which waits for other processes up to the deadline. Raises TimeoutError, sqlite3.Error."""
        wait_s = min(max(0.0, deadline - time.monotonic()), _WAIT_S_MAX)
        if not wait_s or not self._lock.acquire(timeout=wait_s):
            raise TimeoutError("the store was busy until the deadline")
        try:
            left_s = min(max(0.0, deadline - time.monotonic()), _WAIT_S_MAX)
            self._db.execute(f"PRAGMA busy_timeout = {math.ceil(left_s * 1000)}")
            yield self._db
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _changing(self, deadline: float) -> Iterator[sqlite3.Connection]:
        """A transaction: all of the block, or nothing on an exception."""
        with self._locked(deadline) as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend."""
        check_keys(keys)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse()
            if keys:
                try:
                    with self._locked(deadline) as db:
                        for position, key in enumerate(keys):
                            if not self._has(db, key):
                                return position
                        return len(keys)
                except (sqlite3.Error, TimeoutError) as error:
                    self._calls.count(errors=[_class_of(error)])
        return 0

    def _has(self, db: sqlite3.Connection, key: bytes) -> bool:
        where = (self.codec.namespace, key)
        return db.execute("SELECT 1 FROM pages WHERE namespace = ? AND key = ?", where).fetchone() is not None

    def batch_get(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, deadline: float
    ) -> list[GetOutcome]:
        """See StorageBackend."""
        check_batch(self.codec, keys, frames)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse_gets(len(keys))
            outcomes = [GetOutcome.ERROR] * len(keys)
            corrupt, errors = list[str](), list[str]()
            rows: list[int] = []
            try:
                for position, (key, frame) in enumerate(zip(keys, frames, strict=True)):
                    # The lock for a page at a time, so that a long batch lets others in between.
                    with self._locked(deadline) as db:
                        row, damage = self._read(db, key, frame)
                        if row is None:
                            outcomes[position] = GetOutcome.MISS
                        elif damage is None:
                            outcomes[position] = GetOutcome.HIT
                            rows.append(row)
                        elif damage.is_misfit:
                            # Nothing is wrong with the page; others can use it.
                            outcomes[position] = GetOutcome.MISS
                            errors.append(damage)
                        else:
                            outcomes[position] = GetOutcome.CORRUPT
                            corrupt.append(damage)
                            db.execute("DELETE FROM pages WHERE id = ? AND key = ?", (row, key))
                if rows:
                    with self._changing(deadline) as db:
                        db.executemany("UPDATE pages SET used = ? WHERE id = ?", [(time.time(), row) for row in rows])
            except (sqlite3.Error, TimeoutError) as error:
                errors.append(_class_of(error))
            self._calls.count(gets=outcomes, corrupt=corrupt, errors=errors)
            return outcomes

    def _read(self, db: sqlite3.Connection, key: bytes, frame: memoryview) -> tuple[int | None, Damage | None]:
        """The row of a page, None if it is not there, and what is wrong with it."""
        # Python's sqlite3 has no read into a buffer: one copy, and none of what is larger than a page. One statement,
        # since other processes may remove the row, and use its number again, between two.
        found = db.execute(
            "SELECT id, length(frame), CASE WHEN length(frame) <= ? THEN frame END FROM pages"
            " WHERE namespace = ? AND key = ?",
            (self.codec.frame_bytes, self.codec.namespace, key),
        ).fetchone()
        if found is None:
            return None, None
        row, size, stored = found
        if not self.codec.fits(size):
            return row, Damage.SIZE
        frame[:size] = stored
        return row, self.codec.accept(key, frame, size)

    def batch_set(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See StorageBackend. One transaction for what fits into the deadline."""
        check_batch(self.codec, keys, frames, parent)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse_sets(len(keys))
            outcomes: list[SetOutcome] = []
            errors: list[str] = []
            try:
                with self._changing(deadline) as db:
                    for key, frame in zip(keys, frames, strict=True):
                        if time.monotonic() >= deadline:
                            errors.append("deadline")
                            break
                        outcomes.append(self._write(db, key, frame, parent))
                        parent = key
            except (sqlite3.Error, TimeoutError) as error:
                # The transaction is undone, so nothing of the batch is there. To be full is no trouble.
                outcomes, errors = [], [_class_of(error)]
                if _says_full(error):
                    outcomes, errors = [SetOutcome.REJECTED] * len(keys), []
            outcomes += [SetOutcome.ERROR] * (len(keys) - len(outcomes))
            self._calls.count(sets=outcomes, errors=errors)
            return outcomes

    def _write(self, db: sqlite3.Connection, key: bytes, frame: memoryview, parent: bytes | None) -> SetOutcome:
        if self._has(db, key):
            return SetOutcome.PRESENT
        stored = self.codec.seal(key, frame, parent=parent)
        db.execute(_INSERT, (self.codec.namespace, key, time.time(), stored))
        return SetOutcome.STORED

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend."""
        check_keys(keys)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse()
            if keys:
                try:
                    with self._changing(deadline) as db:
                        return db.executemany(
                            "DELETE FROM pages WHERE namespace = ? AND key = ?",
                            [(self.codec.namespace, key) for key in keys],
                        ).rowcount
                except (sqlite3.Error, TimeoutError) as error:
                    self._calls.count(errors=[_class_of(error)])
        return 0

    def usage(self) -> Usage:
        """See StorageBackend. All namespaces of the file."""
        with self._calls.enter() as is_open:
            if is_open:
                try:
                    with self._locked(time.monotonic() + 1.0) as db:
                        pages, size = db.execute(
                            "SELECT count(*), coalesce(sum(length(frame)), 0) FROM pages"
                        ).fetchone()
                        self._usage = Usage(pages, size, None)
                except (sqlite3.Error, TimeoutError) as error:
                    self._calls.count(errors=[_class_of(error)])
        return self._usage

    def statistics(self) -> BackendStatistics:
        """See StorageBackend."""
        return self._calls.statistics()

    def close(self) -> None:
        """See StorageBackend."""
        if self._calls.close():
            self._db.close()


class SqliteRawStore(RawStore):
    """The file as its operator sees it: what makes `hicache ls`, `stat`, `copy`, `purge`, `trim` and `verify` work, and
    what a limit (`capacity_bytes`) sweeps with. Raises BackendUnavailable."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._db = _connect(path)
        self._db.execute(f"PRAGMA busy_timeout = {round(_TOOL_WAIT_S * 1000)}")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise BackendUnavailable(f"sqlite store: {error}; check disk and permissions") from error

    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        """See RawStore."""
        last = 0
        while True:
            with self._translated():
                rows = self._db.execute(
                    "SELECT id, namespace, key, length(frame), used FROM pages"
                    " WHERE id > ? AND lower(hex(namespace)) LIKE ? || '%' ORDER BY id LIMIT ?",
                    (last, namespace, _LISTED_AT_ONCE),
                ).fetchall()
            if not rows:
                return
            last = rows[-1][0]
            yield from (StoredPage(*row[1:]) for row in rows)

    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        """See RawStore."""
        with self._translated():
            found = self._db.execute(
                "SELECT substr(frame, 1, ?) FROM pages WHERE namespace = ? AND key = ?",
                (bytes_max, page.namespace, page.key),
            ).fetchone()
        return None if found is None else bytes(found[0])

    def write(self, page: StoredPage, data: bytes, parent: bytes | None) -> bool:
        """See RawStore. The parent is in the header of `data`; no column repeats it."""
        used = time.time() if page.used_s is None else page.used_s
        try:
            return self._db.execute(_INSERT, (page.namespace, page.key, used, data)).rowcount > 0
        except sqlite3.Error as error:
            if _says_full(error):
                return False
            raise BackendUnavailable(f"sqlite store: {error}; check disk and permissions") from error

    def remove(self, pages: Sequence[StoredPage]) -> int:
        """See RawStore."""
        with self._translated(), self._db:  # which ends the transaction, one way or the other
            self._db.execute("BEGIN IMMEDIATE")
            removed = self._db.executemany(
                "DELETE FROM pages WHERE namespace = ? AND key = ?", [(page.namespace, page.key) for page in pages]
            ).rowcount
        return max(0, removed)

    def close(self) -> None:
        """See RawStore."""
        self._db.close()

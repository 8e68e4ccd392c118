"""The index of a file store: one SQLite row a page, shared by all processes of the store.

    pages       id, namespace, key, parent, writer, size, children, last_use
    namespaces  id, digest
    totals      one row: pages and bytes that are stored, bytes that are reserved

A row with an empty `writer` is a stored page. A row with a writer (`<owner>.<batch>`) is a reservation: room taken for
a page that its owner is writing. Invariants, kept in the transaction of each change (by triggers where rows come and
go) and tested by `check`:

1. `totals` are the sums over the rows.
2. `children` of a row is the number of rows, stored or reserved, whose parent it is. So the chain above a page that is
   being written is as safe from eviction as the chain above a stored one.

SQLite is the right size for this: several processes, atomic changes of many rows, recovery after a kill, and no server.
The file system has the last word on which pages exist; the index knows order, sizes and sums.

Locking design: no lock here. REQUIRES everywhere: the store's lock (see `store`), which also orders the processes.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...errors import InvariantError

_NAME = re.compile(r"index-[0-9a-f]{8}\.sqlite")
_FILE = re.compile(r"index-[0-9a-f]{8}\.sqlite(-wal|-shm|-journal)?")
SCHEMA_VERSION = 1
# Others wait for the store's lock and not for SQLite; what may still hold SQLite is a person with a shell on the file.
_BUSY_TIMEOUT_MS = 2_000
_WAL_BYTES_MAX = 16 << 20

_SCHEMA = """
CREATE TABLE namespaces(id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE);
CREATE TABLE totals(id INTEGER PRIMARY KEY CHECK (id = 1), pages INTEGER NOT NULL, bytes INTEGER NOT NULL,
    reserved INTEGER NOT NULL);
INSERT INTO totals VALUES(1, 0, 0, 0);
CREATE TABLE pages(id INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, key BLOB NOT NULL, parent BLOB,
    writer TEXT NOT NULL, size INTEGER NOT NULL, children INTEGER NOT NULL, last_use INTEGER NOT NULL);
CREATE UNIQUE INDEX by_key ON pages(namespace, key, writer);
CREATE INDEX by_parent ON pages(namespace, parent) WHERE parent IS NOT NULL;
CREATE INDEX by_writer ON pages(writer) WHERE writer != '';
CREATE INDEX leaves ON pages(last_use) WHERE children = 0 AND writer = '';
CREATE TRIGGER added AFTER INSERT ON pages BEGIN
    UPDATE pages SET children = children + 1 WHERE namespace = NEW.namespace AND key = NEW.parent;
    UPDATE totals SET pages = pages + (NEW.writer = ''), bytes = bytes + (NEW.writer = '') * NEW.size,
        reserved = reserved + (NEW.writer != '') * NEW.size;
END;
CREATE TRIGGER removed AFTER DELETE ON pages BEGIN
    UPDATE pages SET children = children - 1 WHERE namespace = OLD.namespace AND key = OLD.parent;
    UPDATE totals SET pages = pages - (OLD.writer = ''), bytes = bytes - (OLD.writer = '') * OLD.size,
        reserved = reserved - (OLD.writer != '') * OLD.size;
END;
"""
_INSERT = """
INSERT INTO pages(namespace, key, parent, writer, size, last_use, children)
VALUES(:namespace, :key, :parent, :writer, :size, :last_use,
    (SELECT count(*) FROM pages WHERE namespace = :namespace AND parent = :key))
"""


@dataclass(frozen=True, slots=True)
class Totals:
    """What the store holds: pages and bytes that are stored, and bytes reserved for pages being written."""

    pages: int
    bytes: int
    reserved: int


@dataclass(frozen=True, slots=True)
class PageRow:
    """One stored page. `last_use` is microseconds since 1970."""

    row: int
    namespace: bytes
    key: bytes
    size: int
    last_use: int


class IndexDamaged(Exception):
    """The index file is missing, of another version, or not a sound database; it has to be rebuilt."""


class Index:
    """An open index. All methods but `begin` run inside a transaction and may raise sqlite3.Error."""

    def __init__(self, path: str, *, new: bool = False) -> None:
        """Open the index at `path`. Raises IndexDamaged if it is not a sound one of this version, and sqlite3.Error."""
        self.path = path
        self._namespaces: dict[bytes, int] = {}
        self._db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False)
        try:
            self._configure()
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version != SCHEMA_VERSION and not new:
                raise IndexDamaged(f"version {version}")
            verdict = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise IndexDamaged("quick_check")
        except sqlite3.DatabaseError as error:
            self._db.close()
            if is_damage(error):
                raise IndexDamaged(str(error)) from error
            raise
        except BaseException:
            self._db.close()
            raise

    @classmethod
    def create(cls, folder: str) -> Index:
        """Make an empty index under a new name. It counts as damaged until `mark_sound` is committed.

        The name is new because a process that still has the old index open removes that one's log by name.
        """
        path = os.path.join(folder, f"index-{secrets.token_hex(4)}.sqlite")
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        index = cls(path, new=True)
        index._db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        return index

    def mark_sound(self) -> None:
        """Say, with the commit of this transaction, that the index is complete."""
        self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _configure(self) -> None:
        for pragma in (
            "journal_mode = WAL",
            "synchronous = NORMAL",  # a power cut may lose the last transactions; opening the store finds that
            f"journal_size_limit = {_WAL_BYTES_MAX}",
        ):
            self._db.execute(f"PRAGMA {pragma}").fetchall()

    def begin(self) -> None:
        """Start a transaction that may write."""
        self._db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Make the transaction's changes last; a kill after this keeps them."""
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        """Forget the transaction's changes, and the namespaces that were numbered in it."""
        self._namespaces.clear()
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def close(self) -> None:
        """Close the file; the last process to do so folds the write-ahead log into it."""
        self._db.close()

    def totals(self) -> Totals:
        """The sums over the whole store, every namespace."""
        return Totals(*self._db.execute("SELECT pages, bytes, reserved FROM totals").fetchone())

    def _namespace(self, digest: bytes) -> int:
        number = self._namespaces.get(digest)
        if number is None:
            self._db.execute("INSERT OR IGNORE INTO namespaces(digest) VALUES(?)", (digest,))
            number = int(self._db.execute("SELECT id FROM namespaces WHERE digest = ?", (digest,)).fetchone()[0])
            self._namespaces[digest] = number
        return number

    def reserve(
        self, namespace: bytes, keys: Sequence[bytes], parents: Sequence[bytes | None], writer: str, size: int, now: int
    ) -> None:
        """Take room of `size` bytes for each of `keys`, which are all different."""
        number = self._namespace(namespace)
        self._db.executemany(_INSERT, [
            {"namespace": number, "key": key, "parent": parent, "writer": writer, "size": size, "last_use": now}
            for key, parent in zip(keys, parents, strict=True)
        ])  # fmt: skip

    def release(self, namespace: bytes, keys: Iterable[bytes], writer: str) -> None:
        """Give back the room of some pages of a writer that will not be written."""
        number = self._namespace(namespace)
        self._db.executemany(
            "DELETE FROM pages WHERE namespace = ? AND key = ? AND writer = ?", [(number, key, writer) for key in keys]
        )

    def release_all(self, writer: str) -> None:
        """Give back all room of a writer."""
        self._db.execute("DELETE FROM pages WHERE writer = ? AND writer != ''", (writer,))

    def resize(self, namespace: bytes, lengths: Mapping[bytes, int], writer: str) -> None:
        """Set what pages of a writer really take, once that is known."""
        number = self._namespace(namespace)
        reserved = "SELECT coalesce(sum(size), 0) FROM pages WHERE writer = ? AND writer != ''"
        before = self._db.execute(reserved, (writer,)).fetchone()[0]
        self._db.executemany(
            "UPDATE pages SET size = ? WHERE namespace = ? AND key = ? AND writer = ? AND size != ?",
            [(length, number, key, writer, length) for key, length in lengths.items()],
        )
        after = self._db.execute(reserved, (writer,)).fetchone()[0]
        self._db.execute("UPDATE totals SET reserved = reserved + ?", (after - before,))

    def publish(self, writer: str) -> None:
        """Turn all reservations of a writer into stored pages; their files have their names by now."""
        # `writer != ''` lets SQLite use the index of reservations, which leaves out the many stored pages.
        self._db.execute(
            "DELETE FROM pages WHERE id IN (SELECT old.id FROM pages new CROSS JOIN pages old"
            " ON old.namespace = new.namespace AND old.key = new.key AND old.writer = ''"
            " WHERE new.writer = ? AND new.writer != '')",
            (writer,),
        )
        self._db.execute(
            "UPDATE totals SET (pages, bytes, reserved) = (SELECT totals.pages + count(*),"
            " totals.bytes + coalesce(sum(p.size), 0), totals.reserved - coalesce(sum(p.size), 0)"
            " FROM pages p WHERE p.writer = ? AND p.writer != '')",
            (writer,),
        )
        self._db.execute("UPDATE pages SET writer = '' WHERE writer = ? AND writer != ''", (writer,))

    def add(self, namespace: bytes, key: bytes, parent: bytes | None, size: int, last_use: int) -> None:
        """A stored page whose file was found without a row."""
        self._db.execute(_INSERT, {
            "namespace": self._namespace(namespace), "key": key, "parent": None if parent == key else parent,
            "writer": "", "size": size, "last_use": last_use,
        })  # fmt: skip

    def drop(self, namespace: bytes, key: bytes) -> bool:
        """Forget a stored page; False if there was none."""
        cursor = self._db.execute(
            "DELETE FROM pages WHERE namespace = ? AND key = ? AND writer = ''", (self._namespace(namespace), key)
        )
        return cursor.rowcount > 0

    def postpone(self, row: int, now: int) -> None:
        """Move a page that could not be removed to the end of the order."""
        self._db.execute("UPDATE pages SET last_use = ? WHERE id = ?", (now, row))

    def drop_row(self, row: int) -> None:
        """Forget a stored page by its row."""
        self._db.execute("DELETE FROM pages WHERE id = ?", (row,))

    def touch(self, namespace: bytes, uses: Mapping[bytes, int]) -> None:
        """Note when pages were last used, in microseconds since 1970; never turns the clock of a page back."""
        number = self._namespace(namespace)
        self._db.executemany(
            "UPDATE pages SET last_use = max(last_use, ?) WHERE namespace = ? AND key = ? AND writer = ''",
            [(use, number, key) for key, use in uses.items()],
        )

    def oldest_leaf(self) -> PageRow | None:
        """The stored page to evict next: least recently used of those that no stored or reserved page hangs on."""
        found = self._db.execute(
            "SELECT p.id, n.digest, p.key, p.size, p.last_use FROM pages p INDEXED BY leaves"
            " JOIN namespaces n ON n.id = p.namespace WHERE p.children = 0 AND p.writer = ''"
            " ORDER BY p.last_use LIMIT 1"
        ).fetchone()
        return None if found is None else PageRow(*found)

    def writers(self) -> list[str]:
        """All writers that hold reservations."""
        return [row[0] for row in self._db.execute("SELECT DISTINCT writer FROM pages WHERE writer != ''")]

    def reserved_keys(self, writer: str) -> list[tuple[bytes, bytes]]:
        """Namespace and key of each reservation of a writer."""
        return self._db.execute(
            "SELECT n.digest, p.key FROM pages p JOIN namespaces n ON n.id = p.namespace"
            " WHERE p.writer = ? AND p.writer != ''",
            (writer,),
        ).fetchall()

    def namespaces(self) -> list[bytes]:
        """Digests of all namespaces that ever had a page."""
        return [row[0] for row in self._db.execute("SELECT digest FROM namespaces ORDER BY id")]

    def stored(self, namespace: bytes, first: bytes, last: bytes) -> dict[bytes, int]:
        """Key and size of the stored pages of a namespace with `first <= key <= last`."""
        return dict(self._db.execute(
            "SELECT key, size FROM pages WHERE namespace = ? AND key BETWEEN ? AND ? AND writer = ''",
            (self._namespace(namespace), first, last),
        ))  # fmt: skip

    def older_than(self, namespaces: Iterable[bytes], before: int, limit: int) -> list[PageRow]:
        """Up to `limit` stored pages of the given namespaces last used before `before`, oldest first."""
        numbers = [self._namespace(digest) for digest in namespaces]
        found = self._db.execute(
            "SELECT p.id, n.digest, p.key, p.size, p.last_use FROM pages p JOIN namespaces n ON n.id = p.namespace"
            f" WHERE p.namespace IN ({','.join('?' * len(numbers))}) AND p.writer = '' AND p.last_use < ?"
            " ORDER BY p.last_use, p.id DESC LIMIT ?",
            (*numbers, before, limit),
        )
        return [PageRow(*row) for row in found]

    def recount(self) -> None:
        """Set all sums and child counts from the rows; a sound index is not changed by this."""
        self._db.execute(
            "UPDATE totals SET (pages, bytes, reserved) = (SELECT coalesce(sum(writer = ''), 0),"
            " coalesce(sum((writer = '') * size), 0), coalesce(sum((writer != '') * size), 0) FROM pages)"
        )
        wrong = self._db.execute(_WRONG_CHILDREN).fetchall()
        self._db.executemany("UPDATE pages SET children = ? WHERE id = ?", [(count, row) for row, count in wrong])

    def check(self) -> None:
        """Raise InvariantError if a sum or a child count contradicts the rows."""
        sums = self._db.execute(
            "SELECT coalesce(sum(writer = ''), 0), coalesce(sum((writer = '') * size), 0),"
            " coalesce(sum((writer != '') * size), 0) FROM pages"
        ).fetchone()
        if Totals(*sums) != self.totals():
            raise InvariantError(f"file index: the rows sum up to {Totals(*sums)}, noted is {self.totals()}")
        wrong = self._db.execute(_WRONG_CHILDREN).fetchall()
        if wrong:
            raise InvariantError(f"file index: {len(wrong)} pages have a wrong count of children")


def index_names(names: Iterable[str]) -> list[str]:
    """The indices among the names in a root: one, but right after its loss or in the middle of a rebuild."""
    return [name for name in names if _NAME.fullmatch(name)]


def index_files(names: Iterable[str], keep: str) -> list[str]:
    """All files of other indices than `keep`."""
    return [name for name in names if _FILE.fullmatch(name) and not name.startswith(keep)]


# A page may have a stored row and reservations; each of them carries the count of all rows that hang on its key.
_WRONG_CHILDREN = """
SELECT p.id, coalesce(c.number, 0) FROM pages p LEFT JOIN
    (SELECT namespace, parent, count(*) AS number FROM pages WHERE parent IS NOT NULL GROUP BY namespace, parent) c
    ON c.namespace = p.namespace AND c.parent = p.key
WHERE p.children != coalesce(c.number, 0)
"""


def is_damage(error: sqlite3.Error) -> bool:
    """True if SQLite says that the file is no sound database, rather than busy, full or unreadable now."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

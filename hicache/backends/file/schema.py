"""The tables, triggers and file header of the index of a file store. `index` explains them."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from typing import Any

SCHEMA_VERSION = 2
SCHEMA = (
    """CREATE TABLE namespaces(id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE CHECK (typeof(digest) = 'blob' AND length(digest) = 32))""",
    """CREATE TABLE totals(id INTEGER PRIMARY KEY CHECK (id = 1), pages INTEGER NOT NULL, bytes INTEGER NOT NULL,
    reserved INTEGER NOT NULL)""",
    """CREATE TABLE pages(id INTEGER PRIMARY KEY, namespace INTEGER NOT NULL,
    key BLOB NOT NULL CHECK (typeof(key) = 'blob' AND length(key) = 32),
    parent BLOB CHECK (parent IS NULL OR typeof(parent) = 'blob' AND length(parent) = 32),
    writer TEXT NOT NULL, size INTEGER NOT NULL CHECK (typeof(size) = 'integer' AND size >= 0),
    children INTEGER NOT NULL, last_use INTEGER NOT NULL CHECK (typeof(last_use) = 'integer'))""",
    "CREATE UNIQUE INDEX by_key ON pages(namespace, key, writer)",
    "CREATE INDEX by_parent ON pages(namespace, parent) WHERE parent IS NOT NULL",
    "CREATE INDEX by_writer ON pages(writer) WHERE writer != ''",
    "CREATE INDEX leaves ON pages(last_use) WHERE children = 0 AND writer = ''",
    """CREATE TRIGGER added AFTER INSERT ON pages BEGIN
    UPDATE pages SET children = children + 1 WHERE namespace = NEW.namespace AND key = NEW.parent;
    UPDATE totals SET pages = pages + (NEW.writer = ''), bytes = bytes + (NEW.writer = '') * NEW.size,
        reserved = reserved + (NEW.writer != '') * NEW.size;
END""",
    """CREATE TRIGGER removed AFTER DELETE ON pages BEGIN
    UPDATE pages SET children = children - 1 WHERE namespace = OLD.namespace AND key = OLD.parent;
    UPDATE totals SET pages = pages - (OLD.writer = ''), bytes = bytes - (OLD.writer = '') * OLD.size,
        reserved = reserved - (OLD.writer != '') * OLD.size;
END""",
)
SCHEMA_ROWS = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY rowid"
# The bytes of SQLite's file header that are the same in each index, by offset: page size, format and others. SQLite
# obeys them: one flipped bit makes an index read-only, switches to a log, or changes the encoding.
_HEADER = {
    0: b"SQLite format 3\0\x10\x00\x01\x01\x00\x40\x20\x20",
    44: (4).to_bytes(4, "big") + bytes(8) + (1).to_bytes(4, "big"),
    64: bytes(28),
}
HEADER_BYTES = 100


def has_our_header(header: bytes) -> bool:
    """Return True if the first HEADER_BYTES of a file are those of an index."""
    return all(header[offset:][: len(fixed)] == fixed for offset, fixed in _HEADER.items())


@functools.cache
def expected_schema() -> list[Any]:
    """Return the rows of SQLite's schema table in a valid index."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for statement in SCHEMA:
            db.execute(statement)
        return db.execute(SCHEMA_ROWS).fetchall()

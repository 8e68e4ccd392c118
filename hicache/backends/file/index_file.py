"""The file of a store's index: which file of the root it is, and its replacement if it is lost or damaged.

The index `index-<8 hex>.sqlite` is in the root, with SQLite's journal beside it. A replacement gets a new name, because
other processes may have the old file open: they compare the file with their own at each transaction.

Locking design: no lock here. REQUIRES everywhere: the store's lock, except for `abandon`, and for `close` while no
transaction is in flight.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import sqlite3
import stat
from collections.abc import Callable, Iterable

from .index import JOURNAL, JOURNAL_BYTES, Index, IndexDamaged, blames_file
from .pages import find_id, look_for_file, remove_temporary
from .system import OPEN_OR_CREATE_FLAGS, System

_log = logging.getLogger(__name__)

_NAME = re.compile(r"index-[0-9a-f]{8}\.sqlite")
_FILE = re.compile(r"index-[0-9a-f]{8}\.sqlite(-wal|-shm|-journal)?")


def index_files(names: Iterable[str]) -> list[str]:
    """Return all files of indices among the names in a root; for each index, its main file comes last."""
    return sorted((name for name in names if _FILE.fullmatch(name)), reverse=True)


def usable_index(system: System, root_fd: int) -> str | None:
    """Return the name of the index in a root, None unless exactly one regular file has such a name.

    There is none after a loss, and there may be two during a replacement. Raises OSError, and IndexDamaged if it or its
    journal is not a file that only this user reads and writes.
    """
    names = filter(_NAME.fullmatch, system.listdir(root_fd))
    files = [name for name in names if look_for_file(system, root_fd, name) is not None]
    if len(files) != 1:
        return None
    for name in (files[0], files[0] + JOURNAL):
        try:
            found = system.lstat(name, dir_fd=root_fd)
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o600 != 0o600:
            raise IndexDamaged(f"{name} is not a file that this user may read and write")
    return files[0]


class IndexFile:
    """The index of the root `root_fd`, whose path is `path`. `opened` is the open index, None before the first use and
    after a failure.

    Invariant: an index that was found damaged is not used again.
    """

    def __init__(self, system: System, path: str, root_fd: int) -> None:
        self.opened: Index | None = None
        self._system = system
        self._path = path
        self._root_fd = root_fd
        self._file_id: tuple[int, int] | None = None
        self._damaged = False

    def current(self, check: str, beat: Callable[[], None]) -> tuple[Index, bool]:
        """Return the index, opened again if its file was replaced, and True if it is a new, empty one, because the
        index was lost or damaged. See `Index` for `check` and `beat`. Raises OSError, sqlite3.Error and IndexDamaged.
        """
        if self.opened is not None:
            if not self._damaged and self._file_id == self._find(os.path.basename(self.opened.path)):
                return self.opened, False
            self.close()
        if not self._damaged:
            try:
                name = usable_index(self._system, self._root_fd)
                if name is not None:
                    return self._use(name, Index(os.path.join(self._path, name), check, beat)), False
            except IndexDamaged as damage:
                _log.warning("file store %s: rebuilding its index: %s", self._path, damage)
        # Old indices are removed first, to make room.
        self._remove_all()
        name = f"index-{secrets.token_hex(4)}.sqlite"
        self._system.close(self._system.open(name, OPEN_OR_CREATE_FLAGS | os.O_EXCL, dir_fd=self._root_fd))
        try:
            index = self._use(name, Index(os.path.join(self._path, name), beat=beat, create=True))
        except (OSError, sqlite3.Error):
            with contextlib.suppress(OSError):
                self._remove_all()
            raise
        self._damaged = False
        return index, True

    def _use(self, name: str, index: Index) -> Index:
        self.opened, self._file_id = index, None
        self._file_id = self._find(name)
        with contextlib.suppress(OSError):
            self._allocate(name + JOURNAL)
        return index

    def _find(self, name: str) -> tuple[int, int] | None:
        return find_id(self._system, self._root_fd, name)

    def _allocate(self, name: str) -> None:
        """Allocate the journal, unless the disk would be full then. SQLite ignores a journal of zeros."""
        space = self._system.statvfs(self._root_fd)
        with self._system.opened(name, OPEN_OR_CREATE_FLAGS, dir_fd=self._root_fd) as fd:
            there = self._system.fstat(fd).st_size
            missing = JOURNAL_BYTES - there
            if 0 < missing <= space.f_bavail * space.f_frsize // 2:
                self._system.pwritev(fd, [memoryview(bytes(missing))], there)

    def _remove_all(self) -> None:
        for name in index_files(self._system.listdir(self._root_fd)):
            remove_temporary(self._system, self._root_fd, name)

    def undo(self, error: BaseException) -> None:
        """Roll back the transaction that failed with `error`. Close the index if its file may be the cause: the next
        opening verifies it."""
        index = self.opened
        if isinstance(error, IndexDamaged):
            _log.warning("file store %s: its index is damaged: %s", self._path, error)
            self._damaged = True
        suspect = blames_file(error)
        try:
            if index is not None:
                index.rollback()
        except sqlite3.Error:
            suspect = True
        if suspect:
            self.close()

    def close(self) -> None:
        """Close the index. Idempotent."""
        index, self.opened = self.opened, None
        if index is not None:
            with contextlib.suppress(sqlite3.Error):
                index.close()

    def abandon(self) -> None:
        """Leave the open index unchanged in the child of a fork."""
        if self.opened is not None:
            self.opened.abandon()
            self.opened = None

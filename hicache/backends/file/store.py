"""One open store: its root, its lock, its index, and how the three are made to agree again after a crash.

Every page file is published and removed inside a transaction, that is under the store's lock. So whoever holds the lock
sees files and rows that agree, but for what a process that was killed inside a transaction has left:

| killed                                  | leaves                            | ends                          |
|-----------------------------------------|-----------------------------------|-------------------------------|
| while it writes pages                   | temporary files, reservations     | `reap`                        |
| while it gives pages their names        | files without rows, reservations  | `reap` (adopts whole pages)   |
| while it evicts, deletes or sweeps      | rows without files                | `reconcile`                   |

In all three the index says that more is used than there is, never less, so no limit is exceeded meanwhile. `reap` runs
when room gets short and at every opening; `reconcile` compares every file with its row and runs at every opening.

A process is known by its owner file in `tmp`, which it keeps locked: a lock ends with its process, in every container,
where a process id may mean somebody else.

Locking design: `transaction` takes the thread lock, then the file lock. The thread lock guards `_index`, `_stale` and
`_doubtful`; the file lock (flock on `lock`, polled, as no wait may outlast its deadline) orders all processes, and
SQLite's own locks are behind it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator

from ...errors import BackendUnavailable
from .index import Index, IndexDamaged, index_files, index_names, is_damage
from .pages import TMP_DIR, System
from .reconcile import OWNER_HEX_DIGITS, OWNER_SUFFIX, reap, reconcile
from .root import open_root

_log = logging.getLogger(__name__)

LOCK_FILE = "lock"
# An opening scans the directory under the lock: about 1.5 s for 100,000 pages, more on a cold disk.
OPEN_TIMEOUT_S = 60.0
_POLL_S_FIRST = 0.0002
_POLL_S_MAX = 0.005


def now_us() -> int:
    """Wall clock in microseconds: the unit of recency, since it has to mean the same after a restart."""
    return time.time_ns() // 1000


def wait_for_flock(system: System, fd: int, operation: int, deadline: float) -> None:
    """Lock the file `fd`. Blocks up to `deadline` (monotonic), by polling. Raises TimeoutError."""
    pause_s = _POLL_S_FIRST
    while True:
        try:
            return system.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "the store was locked until the deadline") from None
        time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
        pause_s = min(2 * pause_s, _POLL_S_MAX)


class Store:
    """An open file store. Thread-safe. Made by `FileBackend` and by tools that remove pages, of any namespace.

    With `keep_damaged` no file is removed for being damaged, only its row is dropped: for a tool that counts what it
    removes. Tools that only look take a `View`. Raises NotOurs and BackendUnavailable from the constructor, which
    blocks up to OPEN_TIMEOUT_S.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool,
        keep_damaged: bool = False,
        system: System | None = None,
    ) -> None:
        self.system = System() if system is None else system
        self._keep_damaged = keep_damaged
        self._thread_lock = threading.Lock()
        self._index: Index | None = None
        self._stale = False
        self._doubtful = False
        self._closers: list[Callable[[], None]] = []
        self.path, self.root_fd = open_root(path, create=create, system=self.system)
        self._closers.append(lambda: self.system.close(self.root_fd))
        try:
            self._open()
        except BackendUnavailable:
            self._release()
            raise
        except (OSError, sqlite3.Error) as error:
            self._release()
            raise BackendUnavailable(f"file store {self.path}: {error}; check disk, permissions, space") from error

    def _open(self) -> None:
        system, root_fd = self.system, self.root_fd
        with contextlib.suppress(FileExistsError):
            system.mkdir(TMP_DIR, dir_fd=root_fd)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock_fd = system.open(LOCK_FILE, flags, dir_fd=root_fd)
        self._closers.append(lambda: system.close(self._lock_fd))
        with self._locked(time.monotonic() + OPEN_TIMEOUT_S):
            # The owner file is made and locked under the store's lock, so nobody can take it for a dead one meanwhile.
            self.owner = secrets.token_hex(OWNER_HEX_DIGITS // 2)
            owner_name = f"{TMP_DIR}/{self.owner}{OWNER_SUFFIX}"
            owner_fd = system.open(owner_name, flags | os.O_EXCL, dir_fd=root_fd)
            self._closers.append(lambda: system.close(owner_fd))
            self._closers.append(lambda: system.unlink(owner_name, dir_fd=root_fd))
            system.flock(owner_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            index = self._current()
            with _changes(index):
                reap(index, system, root_fd, self.owner)
                self._reconcile(index)

    def _reconcile(self, index: Index) -> None:
        reconcile(index, self.system, self.root_fd, keep_damaged=self._keep_damaged)

    @contextlib.contextmanager
    def transaction(self, deadline: float) -> Iterator[Index]:
        """The index, changed by this block only: all of it on return, nothing on an exception.

        Blocks for the locks up to `deadline` (monotonic). Raises TimeoutError for them, sqlite3.Error and OSError.
        """
        with self._locked(deadline):
            try:
                index = self._current()
                with _changes(index):
                    if self._doubtful:
                        self._reconcile(index)
                    # Should this transaction be rolled back, files may have come or gone without their rows.
                    self._doubtful = True
                    yield index
                self._doubtful = False
            except sqlite3.Error as error:
                self._stale = self._stale or is_damage(error)
                raise

    @contextlib.contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        wait_s = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
        if not self._thread_lock.acquire(timeout=wait_s):
            raise TimeoutError(errno.ETIMEDOUT, "the store was busy until the deadline")
        try:
            wait_for_flock(self.system, self._lock_fd, fcntl.LOCK_EX, deadline)
            try:
                yield
            finally:
                self.system.flock(self._lock_fd, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def _current(self) -> Index:
        """The index; opened again if it was replaced, and rebuilt from the files if it is damaged, lost or doubtful."""
        if self._index is not None:
            if not self._stale and os.path.exists(self._index.path):
                return self._index
            self._index.close()
            self._index = None
        names = index_names(self.system.listdir(self.root_fd))
        if len(names) == 1 and not self._stale:
            try:
                self._index = Index(os.path.join(self.path, names[0]))
                return self._index
            except IndexDamaged as damage:
                _log.warning("file store: its index is rebuilt (%s)", damage)
        self._index = self._rebuild()
        self._stale = False
        return self._index

    def _rebuild(self) -> Index:
        index = Index.create(self.path)
        try:
            with _changes(index):
                self._reconcile(index)
                index.mark_sound()
            keep = os.path.basename(index.path)
            for name in index_files(self.system.listdir(self.root_fd), keep):
                with contextlib.suppress(FileNotFoundError):
                    self.system.unlink(name, dir_fd=self.root_fd)
        except BaseException:
            index.close()
            raise
        return index

    def close(self) -> None:
        """Close the index and all descriptors, and withdraw the owner file. REQUIRES: no transaction is under way."""
        self._release()

    def _release(self) -> None:
        if self._index is not None:
            with contextlib.suppress(sqlite3.Error):
                self._index.close()
            self._index = None
        while self._closers:
            with contextlib.suppress(OSError):
                self._closers.pop()()


@contextlib.contextmanager
def _changes(index: Index) -> Iterator[None]:
    index.begin()
    try:
        yield
        index.commit()
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            index.rollback()
        raise

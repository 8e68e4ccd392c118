"""One open store: its root, its lock, its index, and their recovery after a crash.

Every page file is published and removed under the store's lock, its row in a transaction under the same lock. So the
holder of the lock sees matching files and rows, except after a kill in between:

| killed                                  | leaves                            | fixed by                      |
|-----------------------------------------|-----------------------------------|-------------------------------|
| while writing pages                     | temporary files, reservations     | `reap`                        |
| while renaming pages                    | files without rows, reservations  | `reap` (adopts whole pages)   |
| while evicting, deleting or sweeping    | rows without files                | `reconcile`                   |

In all three cases the index counts more bytes than exist, never fewer, so limits hold. `reap` runs when room gets
short, and before the first transaction of an opening. `reconcile` compares files and rows after a transaction that
failed when files had changed, and in an opening that finds no proof for them: see `checked`. An owner file whose
process is dead, or closed before it could undo a failure, stays until an opening has done so.

A lost or damaged index is removed and rebuilt from the files. If there is no room for that, or the file system is
read-only, the store is open without an index: pages are read, which needs no index, and removed (`removing`); each
transaction tries again and fails.

A process is identified by its owner file in `tmp`, which it keeps locked: unlike a process id, a lock works across
containers and ends with its process. Between machines it may not work, so they exclude each other: see `owners`. A
transaction whose owner file is gone claims the store again, and then trusts neither its open index nor its rows.

The locks are flock's. POSIX record locks would not pass to the child of a fork, but they end when any descriptor of the
file is closed in the process, and do not exclude two openings in one process. An flock ends with the last copy of its
descriptor, so a child closes its copies right after the fork (`_after_fork`).

SQLite opens files by path. So each transaction first compares the path with the open root; if they differ, the root was
moved or replaced, and the transaction fails with ESTALE. Between that check and SQLite's own opening, only a user who
may rename the root or a directory above it can replace the directory.

Locking design: `transaction` and `removing` take the thread lock, then the file lock. The thread lock guards all
changing fields; if a transaction holds it, `close` leaves its work to the end of that transaction. The file lock (flock
on `lock`, polled, because each wait has a deadline) orders all processes, and is taken before SQLite's own locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import math
import os
import secrets
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...backoff import Backoff
from ...clock import SYSTEM_CLOCK, Clock
from ...errors import BackendUnavailable
from ...logs import LimitedLog
from ..base import PageId
from .checked import NOTHING, Trusted, note_closed, note_verified, take_checked
from .index import Index, IndexDamaged
from .index_file import IndexFile
from .owners import HEARTBEAT_S, OWNER_HEX_DIGITS, OWNER_SUFFIX, OwnerFile, UsedElsewhere
from .pages import FULL_ERRNOS, LOCK_FILE, TMP_DIR, file_id, find_id, remove_page, remove_temporary
from .reconcile import heartbeats, owners, reap, reconcile, reconcile_fan, remove_empty
from .root import MARKER, open_root, write_marker
from .system import OPEN_OR_CREATE_FLAGS, System

_log = logging.getLogger(__name__)
# Each transaction has the same error until an operator fixes it.
_limited_log = LimitedLog(_log, 60.0)

# An opening waits so long for a process that holds the lock and does not renew its heartbeat. One that compares a large
# store with its index renews it.
OPEN_TIMEOUT_S = 60.0
# How long a close waits for the other processes that close or use the store, to find out whether it is the last one.
_CLOSE_S = 1.0
_POLL_S_FIRST = 0.0002
_POLL_S_MAX = 0.005
_ADVICE = (
    "a store of type file is for one machine: for a directory that several machines share use storage.type "
    f"shared_files, or share a daemon (remote), redis, s3 or mooncake; if that process has ended, wait "
    f"{HEARTBEAT_S:.0f} s"
)
# SQLite opens no file whose name, with the journal's, is longer than 512 bytes.
_PATH_BYTES_MAX = 480
# Building an index scans the store. After a long build that found no room, transactions fail without another build for
# a multiple of that time, so that a full disk does not keep the lock busy.
_COSTLY_S = 0.25
_PAUSE_FACTOR = 10.0
_PAUSE_S_MAX = 10.0


def now_us(clock: Clock) -> int:
    """Return the wall clock in microseconds, the unit of recency, which must stay valid after a restart."""
    return int(clock.wall_s() * 1e6)


def wait_for_flock(system: System, fd: int, operation: int, deadline: float) -> None:
    """Lock the file `fd`. Blocks up to `deadline` of the system's clock, by polling. Raises TimeoutError."""
    backoff = Backoff(_POLL_S_FIRST, _POLL_S_MAX)
    while True:
        try:
            return system.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "the store was locked until the deadline") from None
        time.sleep(min(backoff.next_s(), max(0.0, deadline - time.monotonic())))


@dataclass(slots=True)
class Removal:
    """Pages whose files were removed. At the end, `error` is the reason why their rows stayed, or None."""

    pages: list[PageId] = field(default_factory=list)
    error: OSError | sqlite3.Error | None = None


class FileStore:
    """An open file store. Thread-safe. Used by `FileDriver` and by tools that remove pages, of any namespace.

    With `keep_damaged` damaged files are not removed, only their rows: for a tool that counts its removals. `owner` is
    the name of this opening in `tmp`. `leftovers` are the writers (see `new_writer`) whose reservations and temporary
    files could not be released after a failure; `sweep` tries again. `at_fork` is called in the child of a fork, where
    operations under the lock fail. The constructor raises NotOurs and BackendUnavailable, also if another machine uses
    the store, but not for a full or read-only disk. It blocks while another process compares the store with its index,
    and up to OPEN_TIMEOUT_S for one that makes no progress.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, create: bool, keep_damaged: bool = False, system: System | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.system = System() if system is None else system
        self.owner = secrets.token_hex(OWNER_HEX_DIGITS // 2)
        self.leftovers: set[str] = set()
        self._serial = itertools.count(1)
        self._keep_damaged = keep_damaged
        self._thread_lock = threading.Lock()
        self._lock_fd: int | None = None
        self._ended: tuple[int, str] | None = None
        self._is_open = self._is_sound = self._is_closed = False
        self._doubtful = True
        self._clock = clock
        self._pause_until = -math.inf
        self._refusal: OSError | sqlite3.Error | None = None
        if len(os.fsencode(os.path.abspath(path))) > _PATH_BYTES_MAX:
            raise BackendUnavailable(f"file store: the path is longer than {_PATH_BYTES_MAX} bytes; use a shorter one")
        self.path, self.root_fd = self._open_root(path, create)
        self._index_file = IndexFile(self.system, self.path, self.root_fd)
        self._owner_file = OwnerFile(self.system, self.root_fd, self.owner, clock)
        _stores.add(self)
        try:
            self._root_id = file_id(self.system.fstat(self.root_fd))
            self._open()
            self._is_open = True
        except BackendUnavailable:
            self.close()
            raise
        except UsedElsewhere as error:
            self.close()
            raise BackendUnavailable(f"file store {self.path}: {error.strerror}; {_ADVICE}") from error
        except OSError as error:
            self.close()
            raise BackendUnavailable(f"file store {self.path}: {error}; check disk, permissions, space") from error

    def _open_root(self, path: str | os.PathLike[str], create: bool) -> tuple[str, int]:
        try:
            return open_root(path, create=create, system=self.system)
        except BackendUnavailable as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in FULL_ERRNOS:
                raise
            return open_root(path, create=False, read_only=True, system=self.system)

    def _open(self) -> None:
        seen = heartbeats(self.system, self.root_fd)
        try:
            with self.transaction(self._clock() + OPEN_TIMEOUT_S):
                return
        except TimeoutError as error:
            if seen == heartbeats(self.system, self.root_fd):
                raise BackendUnavailable(
                    f"file store {self.path}: another process has held its lock for {OPEN_TIMEOUT_S:.0f} s and makes "
                    f"no progress; its disk hangs, or it is suspended ({TMP_DIR}/*{OWNER_SUFFIX} name the processes); "
                    "end it, or try again"
                ) from error
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, OSError) and error.errno not in FULL_ERRNOS:
                raise
            _log.warning("file store %s: open without an index, so it stores nothing: %s", self.path, error)
            return
        _log.warning("file store %s: waits for a process that compares its index with its files", self.path)
        self._open()

    def new_writer(self) -> str:
        """Return a new name for a reservation, or for a temporary file in `tmp`. Any thread."""
        return f"{self.owner}.{next(self._serial)}"

    def sweep(self, index: Index) -> None:
        """Release the `leftovers`, as far as possible now. REQUIRES: a transaction of this store. Raises
        sqlite3.Error."""
        for writer in list(self.leftovers):
            index.release_all(writer)
            with contextlib.suppress(OSError):  # counted at its first failure
                remove_page(self.system, self.root_fd, f"{TMP_DIR}/{writer}")
                self.leftovers.discard(writer)

    @contextlib.contextmanager
    def transaction(self, deadline: float) -> Iterator[Index]:
        """Yield the index for a transaction: committed on return, rolled back on an exception.

        Blocks for the locks up to `deadline`. Raises TimeoutError for them, sqlite3.Error and OSError.
        """
        with self._locked(deadline), self._changes() as index:
            yield index

    @contextlib.contextmanager
    def removing(self, deadline: float) -> Iterator[Removal]:
        """Hold the store's lock for a block that removes page files and records them in the yielded Removal.

        Their rows are removed at the end, if the index is writable. Rows that stay count too many bytes, and the next
        transaction removes them. Blocks and raises as `transaction`, except for errors of the index.
        """
        removal = Removal()
        with self._locked(deadline):
            try:
                self._claim()
            except UsedElsewhere:  # the pages are another machine's now
                raise
            except OSError as error:  # such as a full disk
                _log.debug("file store %s: removes pages without an owner file: %s", self.path, error)
            try:
                yield removal
            finally:
                self._forget(removal)

    def _forget(self, removal: Removal) -> None:
        if not removal.pages:
            return
        try:
            with self._changes() as index:
                for namespace, key in removal.pages:
                    index.drop(namespace, key)
        except (OSError, sqlite3.Error) as error:
            removal.error = error
            self._doubtful = True

    @contextlib.contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        wait_s = min(max(0.0, deadline - self._clock()), threading.TIMEOUT_MAX)
        until = time.monotonic() + wait_s
        thread_lock = self._thread_lock
        if not thread_lock.acquire(timeout=wait_s):
            raise TimeoutError(errno.ETIMEDOUT, "the store was busy until the deadline")
        try:
            if self._ended is not None:
                raise OSError(*self._ended)
            try:
                self._wait_for_lock(until)
                self._check_root()
                yield
            finally:
                # A child that was forked in this block must not unlock: the lock belongs to the parent.
                if self._lock_fd is not None:
                    self.system.flock(self._lock_fd, fcntl.LOCK_UN)
        finally:
            thread_lock.release()
            if self._is_closed:
                self._free()

    def _wait_for_lock(self, until: float) -> None:
        """Lock the lock file. If it was removed, as `rm -rf path/*` does, lock the new one, as other processes do."""
        while True:
            if self._lock_fd is None:
                self._check_root()
                self._lock_fd = self.system.open(LOCK_FILE, OPEN_OR_CREATE_FLAGS, dir_fd=self.root_fd)
            wait_for_flock(self.system, self._lock_fd, fcntl.LOCK_EX, until)
            if find_id(self.system, self.root_fd, LOCK_FILE) == file_id(self.system.fstat(self._lock_fd)):
                return
            fd, self._lock_fd = self._lock_fd, None
            self.system.flock(fd, fcntl.LOCK_UN)  # closing is not enough: see `raw`
            self.system.close(fd)

    def _check_root(self) -> None:
        """Raise ESTALE unless the path still refers to the open directory."""
        try:
            moved = file_id(self.system.lstat(self.path)) != self._root_id
        except (FileNotFoundError, NotADirectoryError):
            moved = True
        if moved:
            _limited_log.warn(
                str(self.path), "file store %s: its directory was moved, replaced or removed, so nothing is stored; "
                "move the directory back, or reopen the store, as a restart does", self.path,
            )
            raise OSError(errno.ESTALE, f"{self.path} was moved or replaced; move it back, or open it at its new path")

    @contextlib.contextmanager
    def _changes(self) -> Iterator[Index]:
        """See `transaction`. REQUIRES: both locks."""
        index = self._begin()
        try:
            yield index
            self._owner_file.beat()
            index.commit()
        except BaseException as error:
            # The rows are as before, but files may have changed.
            self._doubtful = index.follows_files or not isinstance(error, sqlite3.Error)
            self._index_file.undo(error)
            raise

    def _begin(self) -> Index:
        """Return the index, reconciled with the files and in a transaction. REQUIRES: both locks."""
        began = self._clock()
        if self._refusal is not None and began < self._pause_until:
            raise self._refusal.with_traceback(None)
        try:
            self._claim()
            try:
                return self._started()
            except IndexDamaged:  # detected now; the next one is built from the files
                return self._started()
        except (OSError, sqlite3.Error) as error:
            took_s = self._clock() - began
            if took_s >= _COSTLY_S:
                self._refusal = error
                self._pause_until = self._clock() + min(_PAUSE_FACTOR * took_s, _PAUSE_S_MAX)
            raise

    def _started(self) -> Index:
        trusted, dead = self._trust() if self._doubtful else (NOTHING, [])
        index, is_new = self._index_file.current(trusted.check, self._owner_file.beat)
        self._doubtful |= is_new
        try:
            if self._doubtful:
                index.begin()
                reap(index, self.system, self.root_fd, self.owner)
                self._reconcile(index, NOTHING if is_new else trusted)
                index.mark_sound()
                self._owner_file.beat()
                index.commit()
                self._doubtful, self._is_sound = False, True
                # Vouch for the index, and remove the owner files of processes whose work was compared: last, so that
                # after a kill in between they are still found. Without room for this, the next opening checks more.
                with contextlib.suppress(OSError):
                    note_verified(self.system, self.root_fd, os.path.basename(index.path))
                    for path in dead:
                        remove_temporary(self.system, self.root_fd, path)
            index.begin()
        except BaseException as error:
            self._index_file.undo(error)
            raise
        return index

    def _trust(self) -> tuple[Trusted, list[str]]:
        """Return what need not be checked, and the owner files of dead processes. Raises OSError."""
        alive, dead = owners(self.system, self.root_fd, self.owner)
        dead = [name for name in dead if name.endswith(OWNER_SUFFIX)]
        if not self._is_sound:
            return take_checked(self.system, self.root_fd, others=len(alive) > 1, dead=bool(dead)), dead
        # After a failed transaction. An index that was closed then, or because the owner file was gone, is verified.
        return NOTHING if self._index_file.opened is None else Trusted("", None), dead

    def _reconcile(self, index: Index, trusted: Trusted) -> None:
        system, root_fd, beat = self.system, self.root_fd, self._owner_file.beat
        if trusted.folders is None:
            by_names = trusted.check != NOTHING.check
            reconcile(index, system, root_fd, by_names=by_names, keep_damaged=self._keep_damaged, beat=beat)
        for folder in trusted.folders or ():
            beat()
            namespace, fan = (bytes.fromhex(name) for name in folder.split("/"))
            reconcile_fan(index, system, root_fd, namespace, fan, by_names=False, keep_damaged=self._keep_damaged)
        for digest in index.empty_namespaces():
            remove_empty(system, root_fd, digest.hex())

    def _claim(self) -> None:
        """Hold the owner file, under the store's lock, so that other processes do not consider its owner dead.

        It may have been removed: by a user, or by another machine after a silence of this process. So may the marker,
        without which the next opening would reject the directory. Raises UsedElsewhere and OSError.
        """
        try:
            is_new = self._owner_file.hold()
        except UsedElsewhere as error:
            if self._is_open:
                _limited_log.warn(
                    f"elsewhere {self.path}", "file store %s: %s, so nothing is stored here; %s",
                    self.path, error.strerror, _ADVICE,
                )
            raise
        if is_new:
            # SQLite may have stale parts of the index in memory.
            self._index_file.close()
            self._doubtful = True
        if find_id(self.system, self.root_fd, MARKER) is None:
            _log.warning("file store %s: its files were removed; writing its marker again", self.path)
            write_marker(self.root_fd, self.system)

    def close(self) -> None:
        """Close the index and all descriptors, and remove the owner file; if a transaction is in flight, at its end.

        The last process vouches for the store, so that the next opening need not compare it. Blocks up to _CLOSE_S for
        the lock, and then for the file system. Idempotent.
        """
        self._ended = self._ended or (errno.EBADF, "the store is closed")
        self._is_closed = True
        self._free()

    def _free(self) -> None:
        """Release everything, unless another thread is in a transaction: SQLite crashes if its connection is closed in
        the middle of a statement. That thread calls this at the end of its transaction."""
        thread_lock = self._thread_lock
        if thread_lock.acquire(blocking=False):
            try:
                self._free_locked()
            finally:
                thread_lock.release()

    def _free_locked(self) -> None:
        index, was_open, self._is_open = self._index_file.opened, self._is_open, False
        self._index_file.close()
        if was_open and self._is_sound and self._doubtful:
            self._owner_file.abandon()  # the next opening compares the store, as after a kill
        elif was_open and index is not None:
            with contextlib.suppress(OSError):
                self._leave(os.path.basename(index.path))
        self._owner_file.release()
        fds, self._lock_fd, self.root_fd = (self._lock_fd, self.root_fd), None, -1
        for fd in fds:
            if fd is not None and fd >= 0:
                with contextlib.suppress(OSError):
                    self.system.close(fd)

    def _leave(self, index: str) -> None:
        """Remove the owner file under the store's lock, and vouch for the store if no other process uses it. Raises
        OSError."""
        self._wait_for_lock(time.monotonic() + _CLOSE_S)
        try:
            self._check_root()
            alive, dead = owners(self.system, self.root_fd, self.owner)
            if len(alive) == 1 and not dead and self._owner_file.is_there():
                note_closed(self.system, self.root_fd, index)
            self._owner_file.release()
        finally:
            if self._lock_fd is not None:
                self.system.flock(self._lock_fd, fcntl.LOCK_UN)

    def after_fork(self) -> None:
        """Release the parent's resources in the child. A thread of the parent may have held each lock at the fork."""
        self._thread_lock = threading.Lock()
        self._is_open = False
        self._ended = (errno.ECHILD, "the store was opened before a fork; open it again in this process")
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)
        self._owner_file.abandon()
        self._index_file.abandon()


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store.after_fork()


os.register_at_fork(after_in_child=_after_fork)

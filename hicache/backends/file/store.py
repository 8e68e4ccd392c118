"""One open store: its root, its lock, its index, and their recovery after a crash.

Every page file is published and removed under the store's lock, its row in a transaction under the same lock, except
for pages in a `room`. So the holder of the lock sees matching files and rows, but for these, and after a kill between:

| killed                                  | leaves                            | fixed by                      |
|-----------------------------------------|-----------------------------------|-------------------------------|
| while writing pages                     | temporary files, reservations     | `reap`                        |
| while renaming pages                    | files without rows, reservations  | `reap` (adopts whole pages)   |
| while evicting, deleting or sweeping    | rows without files                | `reconcile`                   |
| with pages in its room                  | files without rows, the room      | `reconcile`                   |

In all these cases the index counts more bytes than exist, never fewer, so limits hold. `reap` runs when room gets
short, and before the first transaction of an opening. `reconcile` compares files and rows after a transaction that
failed when files had changed, and in an opening that finds no proof for them: see `checked`.

A thread opens the store. The constructor waits for it up to SERVE_AFTER_S; then pages are read, without the index. The
index counts enough after a kill once `reap` has run, so the thread compares in short transactions, between which all
processes store and evict. Without proof it may count too little, so the thread compares in one transaction; until its
end (`is_ready`) this opening rejects pages, and so do others, which wait for the lock.

An owner file whose process is dead, or closed before it had compared or undone a failure, says that rows may be without
files. An opening removes it before it compares in steps: then its own owner file says so, and stays if that is cut off.

A lost or damaged index is removed and rebuilt from the files. Without room for that, or on a read-only file system, the
store is open without an index: it reads and removes pages (`removing`); each transaction tries again and fails.

A process is identified by its owner file in `tmp`, which it keeps locked: unlike a process id, a lock works across
containers and ends with its process. Between machines it may not work, so they exclude each other: see `owners`. A
transaction whose owner file is gone claims the store again, and then trusts neither its open index nor its rows.

The locks are flock's: POSIX record locks end when the process closes any descriptor of the file, and do not exclude two
openings in it. An flock ends with its last copy, so a child closes its copies right after the fork (`after_fork`).

SQLite opens files by path. So each transaction first compares the path with the open root, and fails with ESTALE if the
root was moved or replaced. Between the two, only a user who may rename it or a directory above it can replace it.

Locking design: `transaction` and `removing` take the thread lock, then the file lock. The thread lock guards all
changing fields; if a transaction holds it, `close` leaves its work to the end of that transaction. The file lock (flock
on `lock`, polled, because each wait has a deadline) orders all processes, and is taken before SQLite's own locks. The
opener's thread writes `is_ready`, `_behind` and `_failure`; before `is_ready` no other thread takes a lock.

Longer than 500 lines because opening, transactions and close share the locks and what is known about the index.
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

from ...clock import SYSTEM_CLOCK, Clock
from ...errors import BackendUnavailable
from ...logs import LimitedLog
from ..base import PageId
from .checked import NAMES, NOTHING, Trusted, note_closed, note_verified, take_checked
from .index import Index, IndexDamaged
from .index_file import IndexFile
from .owners import HEARTBEAT_S, OWNER_HEX_DIGITS, OWNER_SUFFIX, OwnerFile, UsedElsewhere
from .pages import FULL_ERRNOS, LOCK_FILE, TMP_DIR, file_id, find_id, remove_page, remove_temporary
from .reconcile import folders_of, heartbeats, owners, reap, reconcile, remove_empty
from .room import Room
from .root import MARKER, open_root, write_marker
from .system import OPEN_OR_CREATE_FLAGS, System, wait_for_flock

_log = logging.getLogger(__name__)
# Each transaction has the same error until an operator fixes it.
_limited_log = LimitedLog(_log, 60.0)

# How long an opening waits for a process that holds the lock and does not renew its heartbeat, as a comparison does.
OPEN_TIMEOUT_S = 60.0
# How long the start of an engine waits for an opening: long enough to compare 300,000 names, or to verify 50,000 pages.
SERVE_AFTER_S = 1.0
REJECTION = "it compares its index with its files, or another process does, so pages are only read; wait for the end"
# For so long, and at least for one directory, a step of a comparison holds the lock; then others have the same time.
_STEP_S = 0.02
# How long a close waits for the other processes that close or use the store, to find out whether it is the last one.
_CLOSE_S = 1.0
_ADVICE = (
    "a store of type file is for one machine: for a directory that several machines share use storage.type "
    f"shared_files, or share a daemon (remote), redis, s3 or mooncake; if that process ended, wait {HEARTBEAT_S:.0f} s"
)
# SQLite opens no file whose name, with the journal's, is longer than 512 bytes.
_PATH_BYTES_MAX = 480
# After a long build of an index without enough room, transactions fail without another one for a multiple of that time.
_COSTLY_S = 0.25
_PAUSE_FACTOR, _PAUSE_S_MAX = 10.0, 10.0


def now_us(clock: Clock) -> int:
    """Return the wall clock in microseconds, the unit of recency, which must stay valid after a restart."""
    return int(clock.wall_s() * 1e6)


@dataclass(slots=True)
class Removal:
    """Pages whose files were removed. At the end, `error` is the reason why their rows stayed, or None."""

    pages: list[PageId] = field(default_factory=list)
    error: OSError | sqlite3.Error | None = None


class FileStore:
    """An open file store. Thread-safe. Used by `FileDriver` and by tools that remove pages, of any namespace.

    With `keep_damaged` damaged files are not removed, only their rows: for a tool that counts its removals. `owner` is
    the name of this opening in `tmp`. `leftovers` are the writers (see `new_writer`) whose reservations and temporary
    files could not be released after a failure; `sweep` tries again. In the child of a fork transactions fail. The
    constructor raises NotOurs and BackendUnavailable, also if another machine uses the store, but not for a full or
    read-only disk. It blocks up to SERVE_AFTER_S, with `keep_damaged` until files and index are compared; later errors
    are logged. Until `is_ready` is True, transactions fail at once, with REJECTION.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, create: bool, keep_damaged: bool = False, system: System | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.system = System() if system is None else system
        self.owner = secrets.token_hex(OWNER_HEX_DIGITS // 2)
        self.leftovers: set[str] = set()
        self.room = Room(self.owner, clock)
        self._serial = itertools.count(1)
        self._keep_damaged = keep_damaged
        self._thread_lock = threading.Lock()
        self._lock_fd: int | None = None
        self._ended: tuple[int, str] | None = None
        self._is_open = self._is_sound = self._is_closed = False
        self._doubtful = True
        self._behind: list[tuple[bytes, bytes]] = []  # directories that are still to be compared
        self.is_ready = False
        self._failure: BaseException | None = None
        self._opener_id = 0
        self._opener = threading.Thread(target=self._open_and_compare, name="hicache-file-open", daemon=True)
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
            try:
                self._opener.start()
                self._opener.join(None if keep_damaged else SERVE_AFTER_S)
            except RuntimeError:  # the system cannot start more threads
                self._open_and_compare()
            if self._failure is not None:
                raise self._failure
            self._is_open = True
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError) or isinstance(error, BackendUnavailable):
                raise
            is_rival = isinstance(error, UsedElsewhere)
            words = f"{error.strerror}; {_ADVICE}" if is_rival else f"{error}; check disk, permissions, space"
            raise BackendUnavailable(f"file store {self.path}: {words}") from error
        if self._opener.is_alive():
            _log.warning("file store %s: compares its index with its files in the background", self.path)

    def _open_root(self, path: str | os.PathLike[str], create: bool) -> tuple[str, int]:
        try:
            return open_root(path, create=create, system=self.system)
        except BackendUnavailable as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in FULL_ERRNOS:
                raise
            return open_root(path, create=False, read_only=True, system=self.system)

    def _open_and_compare(self) -> None:
        """Run the opener's thread."""
        self._opener_id, words = threading.get_ident(), "they agree"
        try:
            self._open()
            self.is_ready = True
            while self._behind:
                self._step()
        except BaseException as error:
            self._failure = None if self.is_ready else error
            words = f"it failed, and the next opening compares them: {error}"
        self.is_ready = True
        if self._is_open and not self._is_closed:  # the constructor did not wait for it
            _log.warning("file store %s: the comparison of index and files has ended: %s", self.path, words)

    def _step(self) -> None:
        """Compare some of the directories, in one transaction; then let others have the lock."""
        began, done = time.monotonic(), 0
        with self.transaction(self._clock() + OPEN_TIMEOUT_S) as index:
            while done < len(self._behind) and (not done or time.monotonic() - began < _STEP_S):
                folder, keep = self._behind[done], self._keep_damaged
                reconcile(index, self.system, self.root_fd, folder, by_names=True, keep_damaged=keep)
                done += 1
            if done == len(self._behind):
                reap(index, self.system, self.root_fd, self.owner, compares=True)
        del self._behind[:done]
        time.sleep(time.monotonic() - began if self._behind else 0.0)

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
            if self._is_closed or (isinstance(error, OSError) and error.errno not in FULL_ERRNOS):
                raise
            _log.warning("file store %s: open without an index, so it stores nothing: %s", self.path, error)
            return
        _log.warning("file store %s: waits for a process that compares its index with its files", self.path)
        self._open()

    def new_writer(self) -> str:
        """Return a new name for a reservation, or for a temporary file in `tmp`. Any thread."""
        return f"{self.owner}.{next(self._serial)}"

    def sweep(self, index: Index) -> None:
        """Release the `leftovers`, as far as possible now. REQUIRES: a transaction. Raises sqlite3.Error."""
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
        if not self.is_ready and threading.get_ident() != self._opener_id:
            raise TimeoutError(errno.EINPROGRESS, REJECTION)
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
            self.room.committed()
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
        index, is_new = self._index_file.current(trusted.check, self._beat)
        self._doubtful |= is_new
        try:
            if self._doubtful:
                index.begin()
                trusted = NOTHING if is_new else trusted
                compares = trusted.folders is None and (self.is_ready or trusted != NAMES)
                reap(index, self.system, self.root_fd, self.owner, compares=compares)
                self._reconcile(index, trusted)
                index.mark_sound()
                self._beat()
                index.commit()
                self._doubtful, self._is_sound = False, True
                # Vouch for the index, and remove the owner files of dead processes: last, so that after a kill before
                # that they are still found. Without room for this, the next opening checks more.
                with contextlib.suppress(OSError):
                    note_verified(self.system, self.root_fd, os.path.basename(index.path))
                    for path in dead:
                        remove_temporary(self.system, self.root_fd, path)
            index.begin()
            self.room.record(index)
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
        return NOTHING if self._index_file.opened is None else NAMES, dead

    def _reconcile(self, index: Index, trusted: Trusted) -> None:
        by_names = trusted == NAMES
        folders = folders_of(index, self.system, self.root_fd) if trusted.folders is None else trusted.folders
        if by_names and not self.is_ready:
            folders, self._behind = (), [*folders]
        for folder in folders:
            self._beat()
            reconcile(index, self.system, self.root_fd, folder, by_names=by_names, keep_damaged=self._keep_damaged)
        if trusted == NOTHING:
            index.recount()
        for digest in index.empty_namespaces():
            remove_empty(self.system, self.root_fd, digest.hex())

    def _beat(self) -> None:
        """Renew the heartbeat in a comparison, which ends if the store is closed meanwhile. Raises OSError."""
        if self._ended is not None and not self.is_ready:
            raise OSError(*self._ended)
        self._owner_file.beat()

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
        if self._opener.is_alive():
            self._opener.join(_CLOSE_S)

    def _free(self) -> None:
        """Release everything. SQLite crashes if it is closed in a statement, so a transaction calls this at its end."""
        thread_lock = self._thread_lock
        if thread_lock.acquire(blocking=False):
            try:
                self._free_locked()
            finally:
                thread_lock.release()

    def _free_locked(self) -> None:
        index, was_open, self._is_open = self._index_file.opened, self._is_open, False
        self._index_file.close()
        if was_open and self._is_sound and (self._doubtful or self._behind or self.room.is_pending):
            self._owner_file.abandon()  # the next opening compares the store, as after a kill
        elif was_open and self._is_sound and index is not None:
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
        self._is_open, self.is_ready = False, True
        self.room = Room(self.owner, self._clock)
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

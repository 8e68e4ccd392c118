"""The root of a shared store: an existing or new directory with a marker file, which other users may write too.

Nothing here relies on locks or on owners: servers may map user ids, and groups share such directories. New files get
the permissions that the root gives to those who can write to it, and no others: in a root of mode 0755 only this user
reads the pages, in one of mode 0775 or 2775 its group does.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ...clock import SYSTEM_CLOCK, Clock
from ...errors import BackendUnavailable, NotOurs
from ..file.pages import read_start
from ..file.system import READ_FLAGS, System

T = TypeVar("T")

MARKER = "HICACHE_SHARED"
_MARKER_TEXT = b"hicache shared files 1\n"
_FILE_MARKER = "HICACHE_STORE"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A server adds these to the root of a volume.
_OF_VOLUMES = frozenset({"lost+found"})
# Clients keep names and states for one second, the usual setting of FUSE.
_SETTLING_S = (0.1, 0.3, 0.9)
_UNSETTLED = frozenset({errno.ENOENT, errno.ESTALE})


class RootLost(OSError):
    """The store is not at its path any more. It is not a FileNotFoundError: no single page or directory is missing."""


class Root:
    """An open root: its absolute path and its descriptor, which stays open until the last call has ended.

    Locking design: `_lock` guards `_users` and `_is_closed`; it is held for a few instructions.
    """

    def __init__(self, path: str, fd: int, system: System) -> None:
        self.path = path
        self.fd = fd
        self._system = system
        self._lock = threading.Lock()
        self._users = 0
        self._is_closed = False

    def call(self, call: Callable[..., T], *args: Any) -> T:
        """Return `call(*args)`, which uses the descriptor. After ESTALE it is tried once more, with the root opened
        again: the server has forgotten a handle. Raises OSError; FileNotFoundError if a file below the fresh root is
        stale, because another machine has just removed or replaced it."""
        with self._lock:
            if self._is_closed:
                raise OSError(errno.EBADF, "the store is closed")
            self._users += 1
        try:
            try:
                return call(*args)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
            self._reopen()
            try:
                return call(*args)
            except OSError as error:
                if error.errno != errno.ESTALE or isinstance(error, RootLost):
                    raise
                raise FileNotFoundError(errno.ENOENT, "another machine has removed or replaced the file") from error
        finally:
            self._leave()

    def _reopen(self) -> None:
        """Replace the file behind the descriptor, if the store is at the same path. Raises RootLost, and changes
        nothing then. A call in progress never sees the number of another file."""
        try:
            with self._system.opened(self.path, _FLAGS, dir_fd=None) as fd:
                read_start(self._system, fd, MARKER, len(_MARKER_TEXT))
                os.dup2(fd, self.fd, inheritable=False)
        except OSError as error:
            raise RootLost(error.errno, f"the store cannot be opened again: {error.strerror}") from error

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._is_closed and not self._users
        if is_last:
            self._system.close(self.fd)

    def close(self) -> None:
        """Make no further calls. A thread that hangs in a call closes the descriptor when it returns: it must not find
        another file under its number."""
        with self._lock:
            self._is_closed = True
            self._users += 1
        self._leave()


def when_settled(call: Callable[[], T], clock: Clock, deadline: float = math.inf) -> T:
    """Return `call()`. Make it again, for about a second, while a directory that must exist is missing or its handle is
    stale: two machines that create it at the same time may see that on GlusterFS. Raises OSError."""
    for pause_s in _SETTLING_S:
        try:
            return call()
        except OSError as error:
            is_settled = error.errno not in _UNSETTLED or isinstance(error, RootLost)
            if is_settled or clock() + pause_s >= deadline:
                raise
        clock.sleep(pause_s)
    return call()


def open_root(path: str | os.PathLike[str], *, create: bool, system: System, clock: Clock = SYSTEM_CLOCK) -> Root:
    """Open a store's root. With `create`, turn an empty or missing directory into one; the directory above it must
    exist, because a missing mount point is not created.

    Blocks on the file system. Raises NotOurs for a directory with other files, BackendUnavailable for an unusable one.
    """
    absolute = os.path.abspath(os.fspath(path))
    try:
        if create:
            with contextlib.suppress(FileExistsError):
                system.mkdir(absolute)
            fd = when_settled(lambda: system.open(absolute, _FLAGS), clock)
        else:
            fd = system.open(absolute, _FLAGS)
        try:
            # The permissions of group and others, of those that include writing.
            mode = system.fstat(fd).st_mode
            system.shared_mode = (mode & stat.S_IRWXG if mode & stat.S_IWGRP else 0) | (
                mode & stat.S_IRWXO if mode & stat.S_IWOTH else 0
            )
            _check_marker(absolute, fd, create, system)
        except BaseException:
            system.close(fd)
            raise
    except OSError as error:
        if isinstance(error, NotOurs | BackendUnavailable):
            raise
        reason = error.strerror or type(error).__name__
        raise BackendUnavailable(
            f"shared files {absolute}: {reason}; check that the file system is mounted, and the permissions"
        ) from error
    return Root(absolute, fd, system)


def _check_marker(path: str, fd: int, create: bool, system: System) -> None:
    if _has_marker(path, fd, system):
        return
    names = {name for name in system.listdir(fd) if not name.startswith(".")} - _OF_VOLUMES
    if _FILE_MARKER in names:
        raise NotOurs(f"{path} is a store of the backend `file`, which is for one machine; use another directory")
    if not create:
        raise NotOurs(f"{path} is not a HiCache store of shared files: it has no {MARKER} file")
    # The marker is created first: if it exists now, another node has just created the store and may have filled it.
    if names and MARKER not in names and not _has_marker(path, fd, system):
        raise NotOurs(f"{path} is not empty and not a HiCache store of shared files; use a new sub-directory")
    try:
        marker = system.open(MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, dir_fd=fd)
    except FileExistsError:
        return
    try:
        system.pwritev(marker, [memoryview(_MARKER_TEXT)], 0)
    finally:
        system.close(marker)


def _has_marker(path: str, fd: int, system: System) -> bool:
    """Return False if there is no marker. Raises OSError, and BackendUnavailable for one of another version."""
    try:
        text = read_start(system, fd, MARKER, len(_MARKER_TEXT) + 1)
    except FileNotFoundError:
        return False
    if text and text != _MARKER_TEXT:  # empty: another node is creating the store
        raise BackendUnavailable(f"{path} has another version of the store; use another directory, or that version")
    return True


def check_mount(fd: int, system: System) -> None:
    """Raise OSError unless the marker has its text: without it, the mount may show other bytes than those stored."""
    if read_start(system, fd, MARKER, len(_MARKER_TEXT) + 1) != _MARKER_TEXT:
        raise OSError(errno.EIO, "the mount does not show the marker of the store as it was written")


def make_store(path: str | os.PathLike[str]) -> None:
    """Create an empty store at `path` if none exists. Raises as `open_root`."""
    system = System()
    open_root(path, create=True, system=system).close()


def is_shared_store(path: str | os.PathLike[str]) -> bool:
    """Return True if a directory has the marker. Raises OSError, except for a missing file."""
    try:
        os.close(os.open(os.path.join(path, MARKER), READ_FLAGS))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True

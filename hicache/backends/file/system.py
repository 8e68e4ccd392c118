"""The system calls of stores in files. Each goes through a `System`, so that a test can inject a failure or a kill.

Calls are relative to the descriptor of a root, so that a renamed or replaced root is never written by accident. A
`System` opens each directory below the root itself and does not follow links there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ...backoff import Backoff
from ...units import format_size
from .mounts import file_system_of, mount_id

DIR_MODE = 0o700
FILE_MODE = 0o600
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | _SAFE
OPEN_OR_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | _SAFE  # created if it is missing
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Opens a directory for lookups of names. A link gives ENOTDIR.
_STEP_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LIST_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# Less than one in so many inodes is few: ext4 has one per 16 KiB, so pages rarely use them up before the space.
_SCARCE = 20
# Longer than a machine id, a boot id or the name of a host (64 characters).
_FACT_CHARS_MAX = 128
_POLL_S_FIRST, _POLL_S_MAX = 0.0002, 0.005

_T = TypeVar("_T")


def _unless_refused(change_mode: Callable[..., None], *args: Any, **named: Any) -> None:
    """Change permissions, unless the file system decides them itself, as SMB does. Raises OSError."""
    try:
        change_mode(*args, **named)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
            raise


def why_no_room(space: os.statvfs_result) -> str:
    """Return why a file system that said ENOSPC has no room, and after `; ` what to do."""
    free, size = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    inodes, all_inodes = space.f_favail, space.f_files
    # The failed write has freed its inodes again.
    if inodes * _SCARCE < all_inodes and inodes * size < free * all_inodes:
        return (
            f"the file system has {inodes:,} free inodes of {all_inodes:,} (df -i), and {format_size(free)} free; "
            "remove other files there, lower capacity, or make a file system with more inodes"
        )
    return f"the file system has {format_size(free)} free of {format_size(size)}; make room, or use a larger disk"


class System:
    """The system calls of a file store. Tests inject errors, short transfers and kills here.

    A path below `dir_fd` is opened one directory at a time: a link or a file in place of a directory is a
    NotADirectoryError, and the link's target is not accessed. The operating system resolves a path without `dir_fd`.
    """

    # The permissions of group and others for new files and directories, with any umask.
    shared_mode = 0
    # Calls by descriptor are used directly, without a Python frame around each.
    close = staticmethod(os.close)
    fstat = staticmethod(os.fstat)
    fchmod = staticmethod(os.fchmod)
    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    fdatasync = staticmethod(os.fdatasync)
    fsync = staticmethod(os.fsync)
    flock = staticmethod(fcntl.flock)

    def listdir(self, fd: int) -> list[str]:
        return os.listdir(fd)

    def step(self, name: str, *, dir_fd: int | None = None) -> int:
        """Open a directory for lookups of names; do not follow links."""
        return os.open(name, _STEP_FLAGS, dir_fd=dir_fd)

    def _walk(self, path: str, dir_fd: int | None, call: Callable[[str, int | None], _T]) -> _T:
        """Make `call` with the last name of `path` and the directory of that name."""
        if dir_fd is None or "/" not in path:
            return call(path, dir_fd)
        *folders, name = path.split("/")
        fd = dir_fd
        try:
            for folder in folders:
                above, fd = fd, self.step(folder, dir_fd=fd)
                if above != dir_fd:
                    os.close(above)  # not `close`: closing a descriptor for lookups cannot lose data
            return call(name, fd)
        finally:
            if fd != dir_fd:
                os.close(fd)

    def open(self, path: str, flags: int, mode: int = FILE_MODE, *, dir_fd: int | None = None) -> int:
        fd = self._walk(path, dir_fd, lambda name, above: os.open(name, flags, mode, dir_fd=above))
        if self.shared_mode and flags & os.O_EXCL:
            try:
                _unless_refused(self.fchmod, fd, mode | (self.shared_mode & 0o666))
            except BaseException:
                os.close(fd)
                raise
        return fd

    @contextlib.contextmanager
    def opened(self, path: str, flags: int, *, dir_fd: int | None) -> Iterator[int]:
        """Open a file for a block."""
        fd = self.open(path, flags, dir_fd=dir_fd)
        try:
            yield fd
        finally:
            self.close(fd)

    def lstat(self, path: str, *, dir_fd: int | None = None) -> os.stat_result:
        return self._walk(path, dir_fd, lambda name, fd: os.stat(name, dir_fd=fd, follow_symlinks=False))

    def lstat_listed(self, path: str, *, dir_fd: int) -> os.stat_result:
        """`lstat` without a walk. REQUIRES: the caller has just listed the directory of `path`."""
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def is_mount_root(self, fd: int) -> bool:
        """Return True if the directory is the root of a mount, such as a volume. `/` is not."""
        above = self.step("..", dir_fd=fd)
        try:
            return mount_id(fd) != mount_id(above)
        finally:
            self.close(above)

    def readlink(self, fd: int) -> str:
        """Return the target of the link `fd`."""
        return os.readlink("", dir_fd=fd)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        self._walk(source, dir_fd, lambda old, old_fd: self._walk(
            target, dir_fd, lambda new, new_fd: os.rename(old, new, src_dir_fd=old_fd, dst_dir_fd=new_fd)
        ))

    def unlink(self, path: str, *, dir_fd: int) -> None:
        self._walk(path, dir_fd, lambda name, fd: os.unlink(name, dir_fd=fd))

    def mkdir(self, path: str, *, dir_fd: int | None = None) -> None:
        self._walk(path, dir_fd, self._mkdir)

    def _mkdir(self, name: str, dir_fd: int | None) -> None:
        os.mkdir(name, DIR_MODE, dir_fd=dir_fd)
        if self.shared_mode:
            set_group_id = os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode & stat.S_ISGID
            _unless_refused(os.chmod, name, DIR_MODE | self.shared_mode | set_group_id, dir_fd=dir_fd)

    def utime(self, path: str, used_ns: int | None, *, dir_fd: int) -> None:
        """Set the times of a file; None for now, by the clock of the file system if it has one."""
        given: dict[str, Any] = {} if used_ns is None else {"ns": (used_ns, used_ns)}
        self._walk(path, dir_fd, lambda name, fd: os.utime(name, dir_fd=fd, follow_symlinks=False, **given))

    def rmdir(self, path: str, *, dir_fd: int) -> None:
        self._walk(path, dir_fd, lambda name, fd: os.rmdir(name, dir_fd=fd))

    def statvfs(self, fd: int) -> os.statvfs_result:
        return os.statvfs(fd)

    def touch(self, fd: int) -> None:
        """Set the times of an open file to the present time of its file system."""
        os.utime(fd)

    def file_system(self, fd: int) -> str:
        return file_system_of(fd)

    def fact(self, path: str) -> str:
        """Return the first word of a file in which the system describes this machine, such as /etc/machine-id; `-` if
        there is none."""
        with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
            return (file.read(_FACT_CHARS_MAX).split() or ["-"])[0]
        return "-"


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

"""A file of shared memory of this user, and the kernel's locks on it. `shared_memory` explains what they protect."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import SharedMemoryError

# flock has no timeout: how often a process that waits for it tries again.
RETRY_S = 0.005


def open_file(path: Path, *, creates: bool = False) -> int:
    """Return a descriptor of this user's file, or create it. Raises FileNotFoundError, FileExistsError (with `creates`)
    and SharedMemoryError."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        if creates:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            os.fchmod(descriptor, 0o600)  # the umask may have removed bits
        else:
            require_own(path, os.lstat(path))
            descriptor = os.open(path, flags)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            require_own(path, os.fstat(descriptor))
            undo.pop_all()
    except (SharedMemoryError, FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise file_error(path, f"cannot be opened: {error.strerror}") from error
    return descriptor


def require_own(path: Path, state: os.stat_result) -> None:
    """Raise SharedMemoryError unless the file is a regular one that only this user can open."""
    if not stat.S_ISREG(state.st_mode):
        raise file_error(path, "is not a regular file; it is unchanged. Choose another name")
    if state.st_uid != os.geteuid():
        raise file_error(path, f"belongs to user {state.st_uid}, not {os.geteuid()}. Choose another name")
    if stat.S_IMODE(state.st_mode) != 0o600:
        raise file_error(path, f"has mode {stat.S_IMODE(state.st_mode):04o}, not 0600. Choose another name")


@contextlib.contextmanager
def flock(path: Path, descriptor: int, deadline: float) -> Iterator[None]:
    """Hold the exclusive lock of the whole file. Blocks until `deadline`; raises SharedMemoryError then."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                message = "is not ready in time: another process still creates it. Raise timeout_s, or end it"
                raise file_error(path, message) from None
            time.sleep(RETRY_S)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def file_error(path: Path, what: str) -> SharedMemoryError:
    """Return an error that begins with the path."""
    return SharedMemoryError(f"shared host pool: {path} {what}")


# struct flock of 64-bit Linux: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")


def lock_byte(descriptor: int, kind: int, at: int) -> bool:
    """Lock byte `at` for this open file. Return False if another open file holds it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, depending on the system
        return False
    return True


def is_locked(descriptor: int, first: int, count: int) -> bool:
    """Return True if another open file has locked one of `count` bytes; of all from `first` on with 0."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK

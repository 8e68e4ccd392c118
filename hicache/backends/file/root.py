"""The root directory of a file store: made, claimed, and refused if it is not ours.

A root is ours if we own it, nobody else may write it, and it carries the marker file we put there. A directory that has
anything in it but no marker is left untouched, whatever it is.
"""

from __future__ import annotations

import contextlib
import os
import stat

from ...errors import BackendUnavailable, NotOurs
from .pages import DIR_MODE, System

MARKER = "HICACHE_STORE"
STORE_VERSION = 1
_MARKER_TEXT = f"hicache file store {STORE_VERSION}\n".encode()
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Sub-directories that are looked into for a store, to say where it is.
_HINT_LOOKS_MAX = 100


def open_root(
    path: str | os.PathLike[str], *, create: bool, system: System, read_only: bool = False
) -> tuple[str, int]:
    """Absolute path and descriptor of a store's root; with `create`, an empty or missing directory becomes one.

    With `read_only` nothing is written, so it works on a read-only mount. REQUIRES: not both of them.
    Blocks on the file system. Raises NotOurs for a directory that is not ours or that others may write (left as it is),
    BackendUnavailable for one that cannot be opened, made or written.
    """
    absolute = os.path.abspath(os.fspath(path))
    try:
        fd = _open_directory(absolute, create, system)
        try:
            _check_owner(absolute, fd, system)
            _check_marker(absolute, fd, create, read_only, system)
        except BaseException:
            system.close(fd)
            raise
    except (NotOurs, BackendUnavailable):
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BackendUnavailable(f"file store {absolute}: {reason}; check the path and its permissions") from error
    return absolute, fd


def _open_directory(path: str, create: bool, system: System) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if os.path.islink(path):
        raise NotOurs(f"file store {path} is a symbolic link; give the directory it points to")
    if create and not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), mode=DIR_MODE, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another process makes the same store now
            system.mkdir(path)
    return system.open(path, flags)


def _check_owner(path: str, fd: int, system: System) -> None:
    found = system.fstat(fd)
    if found.st_uid != os.geteuid():
        raise NotOurs(f"file store {path} belongs to user id {found.st_uid}; use a directory of your own")
    if found.st_mode & stat.S_ISVTX and found.st_mode & _OTHERS_WRITE:
        # Such as /tmp: closing it to others would break what they do there.
        raise NotOurs(f"file store {path} is shared with others; use a directory of its own, such as {path}/hicache")
    if found.st_mode & _OTHERS_WRITE:
        raise NotOurs(f"file store {path} can be written by others; run chmod 700 on it")
    parent = system.lstat(os.path.dirname(path) or "/")
    if parent.st_mode & stat.S_IWOTH:
        if not parent.st_mode & stat.S_ISVTX:
            raise NotOurs(f"file store {path}: everybody may replace it, because its parent is open to all; move it")
        if stat.S_IMODE(found.st_mode) != DIR_MODE:
            raise NotOurs(f"file store {path} lies in a shared directory and is not private; run chmod 700 on it")


def _open_marker(path: str, fd: int, create: bool, flags: int, system: System) -> int:
    try:
        return system.open(MARKER, flags, dir_fd=fd)
    except FileNotFoundError:
        if not create:
            hint = _store_below(path, fd, system)
            raise NotOurs(f"{path} is not a HiCache file store: it has no {MARKER} file{hint}") from None
    if any(name != MARKER for name in system.listdir(fd)):
        try:
            # The marker is what a store gets first: if it is there now, another process has made the store meanwhile.
            return system.open(MARKER, flags, dir_fd=fd)
        except FileNotFoundError:
            raise NotOurs(f"{path} is not empty and not a HiCache file store; use a new sub-directory") from None
    return system.open(MARKER, flags | os.O_CREAT, dir_fd=fd)


def _store_below(path: str, fd: int, system: System) -> str:
    for name in sorted(system.listdir(fd))[:_HINT_LOOKS_MAX]:
        with contextlib.suppress(OSError):
            system.lstat(f"{name}/{MARKER}", dir_fd=fd)
            return f"; did you mean {os.path.join(path, name)}?"
    return ""


def _check_marker(path: str, fd: int, create: bool, read_only: bool, system: System) -> None:
    access = os.O_RDONLY if read_only else os.O_RDWR
    marker = _open_marker(path, fd, create, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, system)
    try:
        found = system.fstat(marker)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise NotOurs(f"{path}: its {MARKER} file was not written by this user")
        buffer = memoryview(bytearray(len(_MARKER_TEXT) + 1))
        text = bytes(buffer[: system.preadv(marker, buffer, 0)])
        if not text:
            # New, or its maker was killed right here; everybody who comes by to write writes the same bytes.
            if not read_only:
                system.pwritev(marker, memoryview(_MARKER_TEXT), 0)
        elif text != _MARKER_TEXT:
            raise BackendUnavailable(f"{path} has another store version; this one reads version {STORE_VERSION} only")
    finally:
        system.close(marker)

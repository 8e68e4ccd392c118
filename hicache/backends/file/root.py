"""The root directory of a file store: made, claimed, and refused if it is not ours.

A root is ours if we own it, nobody else may write it, and it carries the marker file we put there. A directory that has
anything in it but no marker is left untouched, whatever it is. Each directory above it belongs to root or to us, and
not everybody may write it unless it is sticky: the owner of a directory can put another one in the place of the store.

A group may write the directories above: shared groups (mode 2775) and a group of one's own are usual, and an
administrator has chosen the members.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable

from ...errors import BackendUnavailable, NotOurs
from .pages import DIR_MODE, LIST_FLAGS, System, read_head

MARKER = "HICACHE_STORE"
STORE_VERSION = 1
_MARKER_TEXT = f"hicache file store {STORE_VERSION}\n".encode()
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LINK_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# As many as Linux follows in one path.
_LINKS_MAX = 40
# Sub-directories that are looked into for a store, to say where it is.
_HINT_LOOKS_MAX = 100


def open_root(
    path: str | os.PathLike[str], *, create: bool, system: System, read_only: bool = False
) -> tuple[str, int]:
    """Absolute path and descriptor of a store's root; with `create`, an empty or missing directory becomes one.

    The path is the real one: links above the root are resolved here, once. Missing directories above the root are made
    with mode 0700. With `read_only` nothing is written, so it works on a read-only mount. REQUIRES: not both of them.
    Blocks on the file system. Raises NotOurs for a directory that is not ours or that others may write or replace (left
    as it is), BackendUnavailable for one that cannot be opened, made or written.
    """
    absolute = os.path.abspath(os.fspath(path))
    try:
        with contextlib.ExitStack() as on_failure:
            with contextlib.ExitStack() as opened:
                above, above_fd = _open_above(absolute, create, system, opened)
                absolute = os.path.join(above, os.path.basename(absolute))
                fd = _open_directory(absolute, above_fd, create, system)
                on_failure.callback(system.close, fd)
                _check_owner(absolute, fd, above_fd, system)
                _check_marker(absolute, fd, create, read_only, system)
            on_failure.pop_all()
    except (NotOurs, BackendUnavailable):
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BackendUnavailable(f"file store {absolute}: {reason}; check the path and its permissions") from error
    return absolute, fd


def _open_above(path: str, create: bool, system: System, opened: contextlib.ExitStack) -> tuple[str, int]:
    """Real path and descriptor of the directory above `path`, reached from `/` one checked directory at a time.

    Each step starts at the descriptor of the step before, so what is checked is what is opened. `opened` closes them.
    """

    def step(name: str, dir_fd: int | None) -> int:
        fd = system.step(name, dir_fd=dir_fd)
        opened.callback(system.close, fd)
        return fd

    names = [*reversed(os.path.dirname(path).split("/"))]
    where, fd, links = "/", step("/", None), 0
    _check_above(path, where, fd, system)
    while names:
        name = names.pop()
        if name in ("", "."):
            continue
        try:
            below = _open_or_make(step, name, fd, create, system)
        except NotADirectoryError:
            links += 1
            if links > _LINKS_MAX:
                raise OSError(errno.ELOOP, f"{where} leads to too many symbolic links") from None
            target = _link_target(path, os.path.join(where, name), fd, system)
            names += reversed(target.split("/"))
            if target.startswith("/"):
                where, fd = "/", step("/", None)
            continue
        where, fd = os.path.normpath(os.path.join(where, name)), below
        _check_above(path, where, fd, system)
    return where, fd


def _open_or_make(
    open_it: Callable[[str, int], int], name: str, dir_fd: int, create: bool, system: System
) -> int:
    try:
        return open_it(name, dir_fd)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):  # another process makes the same store now
        system.mkdir(name, dir_fd=dir_fd)
        if system.lstat(name, dir_fd=dir_fd).st_mode & 0o777 != DIR_MODE:
            system.rmdir(name, dir_fd=dir_fd)
            raise BackendUnavailable(f"file store: the umask takes rights of the owner from {name}; set it to 077")
    return open_it(name, dir_fd)


def _check_above(path: str, where: str, fd: int, system: System) -> None:
    found = system.fstat(fd)
    if found.st_uid not in (0, os.geteuid()):
        raise NotOurs(
            f"file store {path}: {where} above it belongs to user id {found.st_uid}, who can replace the store; "
            f"run chown on {where}, or use a path below directories of your own"
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise NotOurs(
            f"file store {path}: {where} above it can be written by everybody, who can replace the store; "
            f"run chmod o-w on {where}, or use another path"
        )


def _link_target(path: str, where: str, dir_fd: int, system: System) -> str:
    """Return the target of the link `where` in the directory `dir_fd`. A link of another user would choose the
    directory of the store, so it is refused."""
    fd = system.open(os.path.basename(where), _LINK_FLAGS, dir_fd=dir_fd)
    try:
        found = system.fstat(fd)
        if not stat.S_ISLNK(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{where} is not a directory")
        if found.st_uid not in (0, os.geteuid()):
            raise NotOurs(
                f"file store {path}: the symbolic link {where} belongs to user id {found.st_uid}; "
                "give the directory it points to"
            )
        return system.readlink(fd)
    finally:
        system.close(fd)


def _open_directory(path: str, above_fd: int, create: bool, system: System) -> int:
    name = os.path.basename(path) or "."

    def open_it(name: str, dir_fd: int) -> int:
        return system.open(name, LIST_FLAGS, dir_fd=dir_fd)

    try:
        return _open_or_make(open_it, name, above_fd, create, system)
    except NotADirectoryError:
        if stat.S_ISLNK(system.lstat(name, dir_fd=above_fd).st_mode):
            raise NotOurs(f"file store {path} is a symbolic link; give the directory it points to") from None
        raise


def _check_owner(path: str, fd: int, above_fd: int, system: System) -> None:
    found = system.fstat(fd)
    if found.st_uid != os.geteuid():
        raise NotOurs(f"file store {path} belongs to user id {found.st_uid}; use a directory of your own")
    if found.st_mode & stat.S_ISVTX and found.st_mode & _OTHERS_WRITE:
        # Such as /tmp: closing it to others would break what they do there.
        raise NotOurs(f"file store {path} is shared with others; use a directory of its own, such as {path}/hicache")
    if found.st_mode & _OTHERS_WRITE:
        raise NotOurs(f"file store {path} can be written by others; run chmod 700 on it")
    if system.fstat(above_fd).st_mode & stat.S_IWOTH and found.st_mode & 0o777 != DIR_MODE:
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
        text = bytes(buffer[: read_head(system, marker, buffer)])
        if not text:
            # New, or its maker was killed right here; everybody who comes by to write writes the same bytes.
            if not read_only:
                system.pwritev(marker, [memoryview(_MARKER_TEXT)], 0)
        elif text != _MARKER_TEXT:
            raise BackendUnavailable(f"{path} has another store version; this one reads version {STORE_VERSION} only")
    finally:
        system.close(marker)

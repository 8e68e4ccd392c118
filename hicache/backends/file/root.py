"""The root directory of a file store: creates and checks it.

A root is accepted if this user owns it, other users cannot write to it, and it has HiCache's marker file. A directory
with files but without the marker is only accepted if all of them are those of a store, as after a `rm` of the marker.
All others are not changed.

A path may also be a directory that this user can write but cannot close to others: that of root (a volume of
Kubernetes has mode 0777, or 2777 with `fsGroup`), or a shared one. Then the root is OWN_FOLDER in it, of mode 0700.

Each directory above the root must belong to root or this user. If everyone can write to it, other users can rename the
entries of this user, unless it is sticky. They cannot read or change the pages in the root, nor put a directory of
their own there, whose owner this module and each transaction (see `store`) would reject. They can move the store away,
which makes it lose its pages. So such a directory is rejected, unless it is the root of a mount: the containers that
mount a volume, like the members of a group with write access, were chosen by an administrator.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable

from ...errors import BackendUnavailable, NotOurs
from ...frame import HEADER_BYTES, FrameHeader
from .checked import CHECKED_FILE
from .index_file import index_files
from .owners import owner_of
from .pages import LOCK_FILE, TMP_DIR, is_hex, look, look_for_file, read_head, read_start
from .reconcile import listed
from .system import DIR_MODE, LIST_FLAGS, OPEN_OR_CREATE_FLAGS, System

MARKER = "HICACHE_STORE"
# The root in a directory that this user cannot close to others.
OWN_FOLDER = "hicache"
STORE_VERSION = 1
_MARKER_TEXT = f"hicache file store {STORE_VERSION}\n".encode()
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LINK_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# The most links in one path on Linux.
_LINKS_MAX = 40
# The most sub-directories that are searched for a store, for a hint in the error.
_HINT_LOOKS_MAX = 100


def open_root(
    path: str | os.PathLike[str], *, create: bool, system: System, read_only: bool = False
) -> tuple[str, int]:
    """Return the absolute path and the descriptor of a store's root; with `create`, turn an empty or missing directory
    into one.

    The root is `path`, or OWN_FOLDER in it: see the module. Links above the root are resolved here, once. Missing
    directories above the root are created with mode 0700. With `read_only` nothing is written, so it works on a
    read-only mount. REQUIRES: `create` and `read_only` are not both True. Blocks on the file system. Raises NotOurs,
    without changes, for a directory of another user or one that others may write or replace, BackendUnavailable for one
    that cannot be opened, created or written.
    """
    absolute = os.path.abspath(os.fspath(path))
    try:
        with contextlib.ExitStack() as on_failure:
            with contextlib.ExitStack() as opened:
                above, above_fd = _open_above(absolute, create, system, opened)
                absolute = os.path.join(above, os.path.basename(absolute))
                fd = _open_directory(absolute, above_fd, create, system)
                on_failure.callback(system.close, fd)
                if _cannot_be_closed(fd, system):
                    opened.push(on_failure.pop_all())
                    above_fd, absolute = fd, os.path.join(absolute, OWN_FOLDER)
                    fd = _open_own(absolute, above_fd, create, system)
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
    """Return the real path and the descriptor of the directory above `path`, opened from `/` one checked directory at a
    time.

    Each step uses the descriptor of the step before, so the checked directory is the opened one. `opened` closes them.
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


def _open_or_make(open_it: Callable[[str, int], int], name: str, dir_fd: int, create: bool, system: System) -> int:
    try:
        return open_it(name, dir_fd)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):  # another process is creating the same store
        system.mkdir(name, dir_fd=dir_fd)
        if system.lstat(name, dir_fd=dir_fd).st_mode & 0o777 != DIR_MODE:
            system.rmdir(name, dir_fd=dir_fd)
            raise BackendUnavailable(
                f"file store: the umask removes permissions of the owner from the new directory {name}; set the umask "
                "to 077"
            )
    return open_it(name, dir_fd)


def _check_above(path: str, where: str, fd: int, system: System) -> None:
    found = system.fstat(fd)
    if found.st_uid not in (0, os.geteuid()):
        raise NotOurs(
            f"file store {path}: {where} above it belongs to user id {found.st_uid}, who can replace the store; "
            f"run chown on {where}, or use a path below your own directories"
        )
    if found.st_mode & stat.S_IWOTH and not _keeps_entries(found, fd, system):
        raise NotOurs(
            f"file store {path}: {where} above it is writable by everyone, so others can move the store away; "
            f"run chmod o-w or chmod +t on {where}, mount a volume there, or use another path"
        )


def _keeps_entries(found: os.stat_result, fd: int, system: System) -> bool:
    """Return True if others cannot rename this user's entries, or only those with whom a volume is shared."""
    return bool(found.st_mode & stat.S_ISVTX) or system.is_mount_root(fd)


def _cannot_be_closed(fd: int, system: System) -> bool:
    """Return True for a directory of root, and for a shared one of this user that is not a store."""
    found = system.fstat(fd)
    if found.st_uid != os.geteuid():
        return found.st_uid == 0
    if not found.st_mode & _OTHERS_WRITE or not _keeps_entries(found, fd, system):
        return False
    return look(system, fd, MARKER) is None


def _open_own(path: str, above_fd: int, create: bool, system: System) -> int:
    above = os.path.dirname(path)
    _check_above(path, above, above_fd, system)
    try:
        return _open_directory(path, above_fd, create, system)
    except FileNotFoundError:
        raise _not_a_store(above, above_fd, system) from None
    except PermissionError:
        raise NotOurs(
            f"file store {above} belongs to user id {system.fstat(above_fd).st_uid}, and you may not create a "
            f"directory in it; run chown on it, or use your own directory; in a pod, set fsGroup"
        ) from None


def _link_target(path: str, where: str, dir_fd: int, system: System) -> str:
    """Return the target of the link `where` in the directory `dir_fd`. Rejects a link of another user, who could
    redirect the store."""
    with system.opened(os.path.basename(where), _LINK_FLAGS, dir_fd=dir_fd) as fd:
        found = system.fstat(fd)
        if not stat.S_ISLNK(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{where} is not a directory")
        if found.st_uid not in (0, os.geteuid()):
            raise NotOurs(
                f"file store {path}: the symbolic link {where} belongs to user id {found.st_uid}; "
                "use the directory it points to"
            )
        return system.readlink(fd)


def _open_directory(path: str, above_fd: int, create: bool, system: System) -> int:
    name = os.path.basename(path) or "."
    try:
        return _open_or_make(lambda name, fd: system.open(name, LIST_FLAGS, dir_fd=fd), name, above_fd, create, system)
    except NotADirectoryError:
        if stat.S_ISLNK(system.lstat(name, dir_fd=above_fd).st_mode):
            raise NotOurs(f"file store {path} is a symbolic link; use the directory it points to") from None
        raise


def _check_owner(path: str, fd: int, above_fd: int, system: System) -> None:
    found = system.fstat(fd)
    if found.st_uid != os.geteuid():
        raise NotOurs(f"file store {path} belongs to user id {found.st_uid}; use your own directory")
    if found.st_mode & _OTHERS_WRITE:
        raise NotOurs(
            f"file store {path} is writable by others; run chmod 700 on it; in a pod with fsGroup, set "
            "fsGroupChangePolicy to OnRootMismatch"
        )
    if system.fstat(above_fd).st_mode & stat.S_IWOTH and found.st_mode & 0o777 != DIR_MODE:
        raise NotOurs(f"file store {path} is in a shared directory and is not private; run chmod 700 on it")


def _open_marker(path: str, fd: int, create: bool, flags: int, system: System) -> int:
    try:
        return system.open(MARKER, flags, dir_fd=fd)
    except FileNotFoundError:
        if not create:
            raise _not_a_store(path, fd, system) from None
    if any(name != MARKER for name in system.listdir(fd)):
        try:
            # The marker is created first: if it exists now, another process has just created the store.
            return system.open(MARKER, flags, dir_fd=fd)
        except FileNotFoundError:
            if not _has_only_files_of_a_store(fd, system):
                raise NotOurs(f"{path} is not empty and not a HiCache file store; use a new sub-directory") from None
    return system.open(MARKER, flags | os.O_CREAT, dir_fd=fd)


def _not_a_store(path: str, fd: int, system: System) -> NotOurs:
    """Return the error for a directory without a marker, with a store below it as a hint."""
    hint = ""
    for name in sorted(system.listdir(fd))[:_HINT_LOOKS_MAX]:
        with contextlib.suppress(OSError):
            system.lstat(f"{name}/{MARKER}", dir_fd=fd)
            hint = f"; did you mean {os.path.join(path, name)}?"
            break
    return NotOurs(f"{path} is not a HiCache file store: it has no {MARKER} file{hint}")


def _has_only_files_of_a_store(fd: int, system: System) -> bool:
    """Return True if a store has created everything below this directory, as far as names and headers show. Reads one
    page of each directory of pages. Raises OSError."""

    def is_ours(name: str) -> bool:
        if name == TMP_DIR:
            below = listed(system, fd, name)
            return below is not None and all(owner_of(one) is not None for one in below)
        if is_hex(name, 64):
            fans = listed(system, fd, name)
            return fans is not None and all(_has_only_pages(fd, name, fan, system) for fan in fans)
        is_known = name in (LOCK_FILE, CHECKED_FILE) or bool(index_files([name]))
        return is_known and look_for_file(system, fd, name) is not None

    return all(is_ours(name) for name in system.listdir(fd))


def _has_only_pages(fd: int, namespace_hex: str, fan: str, system: System) -> bool:
    names = listed(system, fd, f"{namespace_hex}/{fan}") if is_hex(fan, 2) else None
    if names is None or not all(is_hex(name, 64) and name.startswith(fan) for name in names):
        return False
    header = None
    for name in names[:1]:
        with contextlib.suppress(OSError):
            header = FrameHeader.parse(read_start(system, fd, f"{namespace_hex}/{fan}/{name}", HEADER_BYTES))
        return header is not None and (header.namespace.hex(), header.page_key.hex()) == (namespace_hex, name)
    return True


def write_marker(fd: int, system: System) -> None:
    """Write the marker into a root that has none. Raises OSError."""
    with system.opened(MARKER, OPEN_OR_CREATE_FLAGS, dir_fd=fd) as marker:
        system.pwritev(marker, [memoryview(_MARKER_TEXT)], 0)


def _check_marker(path: str, fd: int, create: bool, read_only: bool, system: System) -> None:
    access = os.O_RDONLY if read_only else os.O_RDWR
    marker = _open_marker(path, fd, create, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, system)
    try:
        found = system.fstat(marker)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise NotOurs(f"{path}: its {MARKER} file is not a regular file of this user; use another directory")
        buffer = memoryview(bytearray(len(_MARKER_TEXT) + 1))
        text = bytes(buffer[: read_head(system, marker, buffer)])
        if not text:
            # New, or its creator was killed here; every writer writes the same bytes.
            if not read_only:
                system.pwritev(marker, [memoryview(_MARKER_TEXT)], 0)
        elif text != _MARKER_TEXT:
            raise BackendUnavailable(
                f"{path} has another store version; this HiCache only reads version {STORE_VERSION}; use another "
                "directory"
            )
    finally:
        system.close(marker)

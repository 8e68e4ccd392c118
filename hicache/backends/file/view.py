"""A file store seen from its files alone, by somebody who changes nothing.

Opening a `Store` makes files and index agree, which removes damaged files. A `View` makes, changes and removes nothing,
not even a lock file, so it also works on a read-only mount, and what it shows is what lies there.

Locking design: a view belongs to one thread. Page files are looked at without the store's lock: they appear and go in
one step each. The index is copied under a shared lock, so no transaction falls into the copy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .index import JOURNAL, Index, IndexDamaged, PageRow
from .pages import FULL_ERRNOS, System, is_hex
from .root import open_root
from .store import LOCK_FILE, PageId, usable_index, wait_for_flock

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK_TIMEOUT_S = 30.0
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A name below the root where a page belongs, whatever lies there. `key` is None where a directory of pages should
    be and something else is."""

    name: str
    namespace: bytes
    key: bytes | None


def places(system: System, root_fd: int, prefix: str = "") -> Iterator[Place]:
    """Return every place that holds something, namespace by namespace, of the namespaces whose digest begins with
    `prefix` in hexadecimal. Follows no link. Raises OSError.

    Names that are not a store's are left out. Holds the names of one directory of pages at a time.
    """
    for namespace in sorted(name for name in system.listdir(root_fd) if is_hex(name, 64) and name.startswith(prefix)):
        try:
            namespace_fd = system.open(namespace, _FOLDER_FLAGS, dir_fd=root_fd)
        except OSError as error:
            if not _is_absent(error):
                raise
            continue
        try:
            yield from _places_of(system, namespace_fd, namespace)
        finally:
            system.close(namespace_fd)


def _places_of(system: System, namespace_fd: int, namespace: str) -> Iterator[Place]:
    digest = bytes.fromhex(namespace)
    for fan in sorted(name for name in system.listdir(namespace_fd) if is_hex(name, 2)):
        try:
            fan_fd = system.open(fan, _FOLDER_FLAGS, dir_fd=namespace_fd)
        except FileNotFoundError:
            continue
        except OSError as error:
            if not _is_absent(error):
                raise
            yield Place(f"{namespace}/{fan}", digest, None)
            continue
        try:
            names = system.listdir(fan_fd)
        finally:
            system.close(fan_fd)
        for name in sorted(names):
            if is_hex(name, 64) and name.startswith(fan):
                yield Place(f"{namespace}/{fan}/{name}", digest, bytes.fromhex(name))


def _is_absent(error: OSError) -> bool:
    """True if there is no directory of that name: none, a file, or a link."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class View:
    """An open root to look at. Raises NotOurs and BackendUnavailable from the constructor."""

    def __init__(self, path: str | os.PathLike[str], *, system: System | None = None) -> None:
        self.system = System() if system is None else system
        self.path, self.root_fd = open_root(path, create=False, read_only=True, system=self.system)

    def index_rows(self) -> Mapping[PageId, PageRow]:
        """The stored pages that the index knows; none if there is no sound index that can be read.

        Copies the index into a temporary directory and reads the copy, because SQLite writes beside whatever it opens.
        Blocks up to half a minute for the store's lock. Raises OSError for that, and if the copy finds no room.
        """
        with tempfile.TemporaryDirectory(prefix="hicache-index-") as folder:
            with self._locked():
                copy = self._copy_index(folder)
            if copy is None:
                return {}
            try:
                index = Index(copy)
                try:
                    rows = index.all_stored()
                finally:
                    index.close()
            except sqlite3.Error:
                return {}
        return {(row.namespace, row.key): row for row in rows}

    def _copy_index(self, folder: str) -> str | None:
        try:
            name = usable_index(self.system, self.root_fd)
            if name is None:
                return None
            # With the journal, from which the changes are undone that a killed process has left half done.
            with contextlib.suppress(FileNotFoundError):
                self._copy(name + JOURNAL, os.path.join(folder, name + JOURNAL))
            self._copy(name, os.path.join(folder, name))
        except IndexDamaged:
            return None
        except OSError as error:
            if error.errno in FULL_ERRNOS:
                raise
            return None
        return os.path.join(folder, name)

    def _copy(self, name: str, target: str) -> None:
        fd = self.system.open(name, _FILE_FLAGS, dir_fd=self.root_fd)
        with open(fd, "rb") as source, open(target, "wb") as copy:
            while data := source.read(_COPY_BYTES):
                copy.write(data)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The store's lock, shared; none if nobody has opened this copy of a store yet."""
        try:
            fd = self.system.open(LOCK_FILE, _FILE_FLAGS, dir_fd=self.root_fd)
        except FileNotFoundError:
            yield
            return
        try:
            wait_for_flock(self.system, fd, fcntl.LOCK_SH, time.monotonic() + _LOCK_TIMEOUT_S)
            yield
        finally:
            # Closing is not enough: a child that was forked in this block has the descriptor too.
            self.system.flock(fd, fcntl.LOCK_UN)
            self.system.close(fd)

    def close(self) -> None:
        """Close the root."""
        self.system.close(self.root_fd)

"""The operator's view of a file store: pages of every namespace. Reads change nothing; writes work like an engine's.

Reading does not create, change or remove anything, not even a lock file, so it works on a read-only mount and also
shows damaged files. The first write or removal opens the store like an engine, which reconciles files and index, but
keeps damaged files, so that `verify` can count them.

Locking design: belongs to one thread. Page files are read without the store's lock, because they appear and disappear
atomically. The index is copied under the shared lock, so that the copy is between transactions. Writes and removals
take the lock as engines do.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike

from ...config.storage import FileStorageOptions
from ...errors import BackendError, BackendUnavailable, PageUnreadable
from ...frame import HEADER_BYTES, FrameCodec
from ...keys import PAGE_KEY_BYTES
from ...supervised import SupervisedPool
from ..base import SetOutcome
from ..pages import PageWrites
from ..raw import PageId, RawStore, StoredPage
from ..tools.verify import NO_KEYS, PageKeys, PageReport, read_page
from .index import JOURNAL, Index, IndexDamaged, PageRow
from .pages import (
    FULL_ERRNOS,
    LOCK_FILE,
    NOT_REGULAR,
    READ_FLAGS,
    PageFiles,
    System,
    identity,
    look,
    page_name,
    read_start,
    remove_damaged,
)
from .reconcile import stored_ids
from .root import open_root
from .store import FileStore, now_us, usable_index, wait_for_flock
from .writes import CapacityManager, Writes

_log = logging.getLogger(__name__)

_WAIT_S = 30.0
# Pages removed in one transaction: engines wait for the store at most that long.
_REMOVE_CHUNK = 256
_COPY_BYTES = 1 << 20
_FILE_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def make_store(path: str | PathLike[str]) -> None:
    """Create an empty store at `path` if none exists. Raises NotOurs and BackendUnavailable."""
    FileStore(path, create=True, keep_damaged=True).close()


def inspect_page(path: str | PathLike[str], *, keys: PageKeys = NO_KEYS) -> PageReport:
    """Read and verify one page file, including that its name and its namespace directory match its header.

    Blocks for one read. Never follows a link. Raises BackendUnavailable if the file cannot be read.
    """
    where, system = os.path.abspath(os.fspath(path)), System()
    folder, name = os.path.split(where)
    try:
        found = system.lstat(where)
        if not stat.S_ISREG(found.st_mode):
            kind = _FILE_KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file")
            return PageReport(found.st_size, damage=NOT_REGULAR, note=f"it is {kind}")
        names = (os.path.basename(os.path.dirname(folder)), name)
        page = read_page(found.st_size, lambda bytes_max: read_start(system, None, where, bytes_max), names, keys)
        assert page is not None
    except OSError as error:
        raise BackendUnavailable(f"page {where}: {error.strerror}; check the path and its permissions") from error
    return page[1]


class _SealedPage(PageWrites):
    """A page that is already sealed, to be written."""

    def __init__(self, page: StoredPage, data: bytes, parent: bytes | None) -> None:
        codec = FrameCodec(page.namespace, max(1, len(data) - HEADER_BYTES))
        super().__init__(codec, [page.key], [memoryview(data)], parent, time.monotonic() + _WAIT_S)
        self._data = data

    def sealed(self, position: int) -> list[memoryview]:
        """See PageWrites."""
        return [memoryview(self._data)]


class FileRaw(RawStore):
    """See the module's docstring. `used_s` is from the index, which engines update about every second.

    Raises NotOurs and BackendUnavailable from the constructor: the store must exist. `system` is for tests.
    """

    def __init__(self, options: FileStorageOptions, *, system: System | None = None) -> None:
        self._options = options
        self._system = System() if system is None else system
        self._path, self._root_fd = open_root(options.path, create=False, read_only=True, system=self._system)
        self._closed = False
        self._writing: tuple[FileStore, PageFiles, CapacityManager] | None = None
        self._pool = SupervisedPool[None]("file-raw", 0)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            if self._closed:
                raise BackendUnavailable(f"file store {self._path}: is closed; open it again")
            yield
        except BackendError:
            raise
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise BackendUnavailable(f"file store {self._path}: {reason}; check disk and permissions") from error

    def _to_write(self) -> tuple[FileStore, PageFiles, CapacityManager]:
        if self._writing is None:
            options = self._options
            store = FileStore(self._path, create=False, keep_damaged=True, system=self._system)
            files = PageFiles(
                store.root_fd, lambda length: True, system=store.system, direct_io=options.direct_io, sync=options.sync
            )
            self._writing = store, files, CapacityManager(store, options.capacity, options.free_space_floor)
        return self._writing

    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        """See RawStore. Holds the rows of the index during the listing: about 300 bytes per page. Does not follow
        links; a link in place of a directory of pages is listed under the first byte of their keys."""
        with self._translated():
            rows = self._rows()
            for page_id in stored_ids(self._system, self._root_fd, namespace):
                space, key = page_id
                found = look(self._system, self._root_fd, page_name(space.hex(), key))
                if found is None or (len(key) < PAGE_KEY_BYTES and stat.S_ISDIR(found.st_mode)):
                    continue  # removed, or a directory of pages again
                regular = stat.S_ISREG(found.st_mode) and len(key) == PAGE_KEY_BYTES
                used_us: int | None = None
                if rows is not None:
                    row = rows.get(page_id)
                    # A row that does not match its file is stale; then the file's time counts.
                    fits = row is not None and row.size == found.st_size
                    used_us = row.last_use if row is not None and fits else found.st_mtime_ns // 1000
                yield StoredPage(
                    space,
                    key,
                    found.st_size if regular else 0,
                    None if used_us is None else used_us / 1e6,
                    identity(found),
                    None if regular else NOT_REGULAR,
                )

    def _rows(self) -> Mapping[PageId, PageRow] | None:
        """Return the pages in the index; None without a readable index.

        Copies the index to a temporary directory and reads the copy, because SQLite writes files beside each database
        that it opens. Blocks up to half a minute for the store's lock. Logs a warning and returns None if that is not
        enough, or the copy does not fit: then the last uses are unknown.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="hicache-index-") as folder:
                with self._locked():
                    copy = self._copy_index(folder)
                return {} if copy is None else _rows_in(copy)
        except OSError as error:
            if error.errno not in FULL_ERRNOS and not isinstance(error, TimeoutError):
                raise
            _log.warning("file store %s: the last use of its pages is not known: %s", self._path, error)
            return None

    def _copy_index(self, folder: str) -> str | None:
        try:
            name = usable_index(self._system, self._root_fd)
            if name is None:
                return None
            # With the journal, which rolls back the incomplete changes of a killed process.
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
        fd = self._system.open(name, READ_FLAGS, dir_fd=self._root_fd)
        with open(fd, "rb") as source, open(target, "wb") as copy:
            while data := source.read(_COPY_BYTES):
                copy.write(data)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the store's shared lock, if the lock file exists (a copied store may not have one)."""
        try:
            fd = self._system.open(LOCK_FILE, READ_FLAGS, dir_fd=self._root_fd)
        except FileNotFoundError:
            yield
            return
        try:
            wait_for_flock(self._system, fd, fcntl.LOCK_SH, time.monotonic() + _WAIT_S)
            yield
        finally:
            # Closing is not enough: a child that was forked in this block also has the descriptor.
            self._system.flock(fd, fcntl.LOCK_UN)
            self._system.close(fd)

    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        """See RawStore. Does not follow links."""
        name = page_name(page.namespace.hex(), page.key)
        with self._translated():
            try:
                found = look(self._system, self._root_fd, name)
                if found is None:
                    return None
                return read_start(self._system, self._root_fd, name, bytes_max) if stat.S_ISREG(found.st_mode) else b""
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise PageUnreadable(f"file store {self._path}: page {name}: {error}; check the disk") from error

    def write(self, page: StoredPage, data: bytes, parent: bytes | None) -> bool:
        """See RawStore. Evicts as an engine would, but nothing for a page larger than the capacity. The page keeps its
        `used_s`."""
        with self._translated():
            store, files, capacity = self._to_write()
            if look(store.system, store.root_fd, page_name(page.namespace.hex(), page.key)) is not None:
                return False
            pages = _SealedPage(page, data, parent)
            used_us = now_us() if page.used_s is None else min(int(page.used_s * 1e6), now_us())
            Writes(store, files, capacity, self._pool, pages).run(used_us=used_us)
            (outcome,) = pages.finish()
        if outcome is SetOutcome.ERROR:
            raise BackendUnavailable(f"file store {self._path}: {pages.errors[0]}; check disk and permissions")
        return outcome is SetOutcome.STORED

    def remove(self, pages: Sequence[StoredPage]) -> int:
        """See RawStore. Holds the lock for a few hundred pages at a time, so that engines can continue. Works on a full
        disk. Removes empty directories."""
        removed = 0
        with self._translated():
            store, _, _ = self._to_write()
            for first in range(0, len(pages), _REMOVE_CHUNK):
                with store.removing(time.monotonic() + _WAIT_S) as removal:
                    for page in pages[first : first + _REMOVE_CHUNK]:
                        name = page_name(page.namespace.hex(), page.key)
                        found = look(store.system, store.root_fd, name)
                        if found is not None:
                            is_same = page.identity in (None, identity(found))
                            if not is_same or not remove_damaged(store.system, store.root_fd, name, identity(found)):
                                continue
                            removed += 1
                        if len(page.key) == PAGE_KEY_BYTES:
                            removal.pages.append((page.namespace, page.key))
        return removed

    def close(self) -> None:
        """See RawStore."""
        if self._closed:
            return
        self._closed = True
        self._pool.close()
        if self._writing is not None:
            self._writing[0].close()
        self._system.close(self._root_fd)


def _rows_in(path: str) -> Mapping[PageId, PageRow]:
    try:
        index = Index(path)
        try:
            return {(row.namespace, row.key): row for row in index.all_stored()}
        finally:
            index.close()
    except sqlite3.Error:
        return {}

"""The operator's view of a file store: pages of every namespace. Reads change nothing; writes work like an engine's.

Reading does not create, change or remove anything, not even a lock file, so it works on a read-only mount and also
shows damaged files. The first write or removal opens the store like an engine, which may reconcile files and index, but
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
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from os import PathLike

from ...config.storage import FileStorageOptions
from ...errors import BackendError, BackendUnavailable, PageUnreadable
from ...frame import FrameCodec
from ..base import PageId, StoredPage
from ..pages import PageWrites
from .driver import FileDriver
from .index import JOURNAL, Index, IndexDamaged, PageRow
from .index_file import usable_index
from .pages import FULL_ERRNOS, LOCK_FILE, Identity, look, page_name, read_object
from .reconcile import rows_of, stored_pages
from .root import open_root
from .store import FileStore
from .system import READ_FLAGS, System, wait_for_flock

_log = logging.getLogger(__name__)

_WAIT_S = 30.0
# Pages removed in one transaction: engines wait for the store at most that long.
_REMOVE_CHUNK = 256


def make_store(path: str | PathLike[str]) -> None:
    """Create an empty store at `path` if none exists. Raises NotOurs and BackendUnavailable."""
    FileStore(path, create=True, keep_damaged=True).close()


class FileInspection:
    """See the module's docstring, and `Inspects` for each function. `used_s` is from the index, which engines update
    about every second.

    Raises NotOurs and BackendUnavailable from the constructor: the store must exist. `system` is for tests.
    """

    def __init__(self, codec: FrameCodec | None, options: FileStorageOptions, *, system: System | None = None) -> None:
        del codec  # pages may have any size
        self._options = options
        self._system = System() if system is None else system
        self._path, self._root_fd = open_root(options.path, create=False, read_only=True, system=self._system)
        self._writing: FileDriver | None = None

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except BackendError:
            raise
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise BackendUnavailable(f"file store {self._path}: {reason}; check disk and permissions") from error

    def _to_write(self) -> FileDriver:
        if self._writing is None:
            self._writing = FileDriver(None, self._options, system=self._system)
        return self._writing

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver. Holds the rows of the index during the listing: about 300 bytes per page. Does not follow links.
        """
        with self._translated():
            yield from stored_pages(self._system, self._root_fd, namespace, self._rows())

    def _rows(self) -> dict[PageId, PageRow] | None:
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
            shutil.copyfileobj(source, copy)

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

    def read_start(self, page: StoredPage, bytes_max: int, deadline: float) -> tuple[bytes, Identity | None] | None:
        """See Inspects. Does not follow links."""
        name = page_name(page.namespace.hex(), page.key)
        with self._translated():
            try:
                return read_object(self._system, self._root_fd, name, bytes_max)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise PageUnreadable(f"file store {self._path}: page {name}: {error}; check the disk") from error

    def write(self, pages: PageWrites) -> None:
        """See Driver. Evicts as an engine would, but nothing for a page larger than the capacity. REQUIRES: it is one
        page."""
        with self._translated():
            driver = self._to_write()
            # An engine replaces what is not a page.
            if look(self._system, self._root_fd, page_name(pages.codec.namespace.hex(), pages.keys[0])) is not None:
                pages.present(0)
            else:
                driver.write(pages)

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[Identity] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver. Holds the lock for a few hundred pages at a time, so that engines can continue. Works on a full
        disk. Removes empty directories."""
        removed, errors = 0, list[str]()
        with self._translated():
            driver = self._to_write()
        for first in range(0, len(keys), _REMOVE_CHUNK):
            some = slice(first, first + _REMOVE_CHUNK)
            count, kinds = driver.remove(namespace, keys[some], deadline, None if found is None else found[some])
            removed += count
            errors += kinds
        return removed, errors

    def close(self) -> None:
        if self._writing is not None:
            self._writing.close()
        self._system.close(self._root_fd)


def _rows_in(path: str) -> dict[PageId, PageRow]:
    try:
        index = Index(path)
        try:
            return rows_of(index)
        finally:
            index.close()
    except sqlite3.Error:
        return {}

"""A file store as its operator sees it: pages of every namespace, read without changing anything, written like an
engine does.

Looking takes a `View`. The first write or removal opens the store as an engine does, which brings files and index
together, but leaves damaged files where they are: they are for `verify` to count.

Locking design: belongs to one thread; the store's lock orders it with engines and tools.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import time
from collections.abc import Iterator, Sequence
from os import PathLike

from ...config.storage import FileStorageOptions
from ...errors import BackendError, BackendUnavailable
from ..raw import RawStore, StoredPage
from .pages import (
    FULL_ERRNOS,
    READ_FLAGS,
    TMP_DIR,
    LeftBehind,
    PageFiles,
    System,
    look,
    look_for_file,
    page_name,
    read_head,
    remove_page,
)
from .reconcile import past_us
from .room import Room
from .store import Store, now_us
from .view import View, places

_WAIT_S = 30.0
# Pages removed in one transaction: engines wait for the store no longer than that takes.
_REMOVE_CHUNK = 256


def make_store(path: str | PathLike[str]) -> None:
    """Make an empty store at `path`, unless one is there. Raises NotOurs and BackendUnavailable."""
    Store(path, create=True, keep_damaged=True).close()


class FileRaw(RawStore):
    """See the module's docstring. `used_s` is from the index, which engines bring up to date about every second.

    Raises NotOurs and BackendUnavailable from the constructor: the store must exist. `system` is for tests.
    """

    def __init__(self, options: FileStorageOptions, *, system: System | None = None) -> None:
        self._options = options
        self._room = Room(options.capacity, options.free_space_floor)
        self._serial = 0
        self._store: Store | None = None
        self._view: View | None = View(options.path, system=system)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except BackendError:
            raise
        except LeftBehind as left:
            # The temporary file goes when the next engine or tool opens the store after this one has closed it.
            raise self._unavailable(left.cause) from left
        except (OSError, sqlite3.Error) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> BackendUnavailable:
        reason = getattr(error, "strerror", None) or str(error)
        return BackendUnavailable(f"file store {self._options.path}: {reason}; check disk and permissions")

    def _looking(self) -> View:
        if self._view is None:
            raise BackendUnavailable(f"file store {self._options.path}: is closed; open it again")
        return self._view

    def _writing(self) -> Store:
        view = self._looking()
        if self._store is None:
            self._store = Store(view.path, create=False, keep_damaged=True, system=view.system)
        return self._store

    def pages(self, namespace: str = "") -> Iterator[StoredPage]:
        """See RawStore. Holds the rows of the index meanwhile: some 300 bytes a page."""
        with self._translated():
            view = self._looking()
            rows = view.index_rows()
            for place in places(view.system, view.root_fd, namespace):
                if place.key is None:
                    continue
                found = look_for_file(view.system, view.root_fd, place.name)
                if found is None:
                    continue
                row = rows.get((place.namespace, place.key))
                # A row that does not fit its file is stale; the file's own time counts then.
                used_us = row.last_use if row is not None and row.size == found.st_size else found.st_mtime_ns // 1000
                yield StoredPage(place.namespace, place.key, found.st_size, used_us / 1e6)

    def read(self, page: StoredPage, bytes_max: int) -> bytes | None:
        """See RawStore. Follows no link."""
        with self._translated():
            view = self._looking()
            name = page_name(page.namespace.hex(), page.key)
            if look_for_file(view.system, view.root_fd, name) is None:
                return None
            try:
                fd = view.system.open(name, READ_FLAGS, dir_fd=view.root_fd)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                size = min(bytes_max, view.system.fstat(fd).st_size)
                data = memoryview(bytearray(size))
                return bytes(data[: read_head(view.system, fd, data)])
            finally:
                view.system.close(fd)

    def write(self, page: StoredPage, data: bytes, parent: bytes | None) -> bool:
        """See RawStore. Evicts as an engine would, and for a page over the capacity nothing; the page keeps its
        `used_s`."""
        if self._room.capacity_bytes is not None and len(data) > self._room.capacity_bytes:
            return False
        with self._translated():
            store = self._writing()
            name = page_name(page.namespace.hex(), page.key)
            if look(store.system, store.root_fd, name) is not None:
                return False
            self._serial += 1
            writer = f"{store.owner}.{self._serial}"
            used_us = now_us() if page.used_s is None else past_us(int(page.used_s * 1e6))
            with store.transaction(time.monotonic() + _WAIT_S) as index:
                index.reserve(page.namespace, [page.key], [parent], writer, len(data), used_us)
                if self._room.fit(store, index, []):
                    index.release_all(writer)
                    return False
            try:
                return self._write_reserved(store, name, data, writer)
            except BaseException:
                with store.transaction(time.monotonic() + _WAIT_S) as index:
                    index.release_all(writer)
                raise

    def _write_reserved(self, store: Store, name: str, data: bytes, writer: str) -> bool:
        options = self._options
        files = PageFiles(
            store.root_fd,
            lambda length: length == len(data),
            system=store.system,
            direct_io=options.direct_io,
            sync=options.sync,
        )
        temporary = f"{TMP_DIR}/{writer}"
        try:
            files.write(temporary, [memoryview(data)])
        except OSError as error:
            if error.errno not in FULL_ERRNOS:
                raise
            with store.transaction(time.monotonic() + _WAIT_S) as index:
                index.release_all(writer)
            return False
        with store.transaction(time.monotonic() + _WAIT_S) as index:
            if look(store.system, store.root_fd, name) is not None:
                remove_page(store.system, store.root_fd, temporary)
                index.release_all(writer)
                return False
            files.publish(temporary, name)
            if index.publish(writer) != 1:
                remove_page(store.system, store.root_fd, name)
                raise OSError(errno.ESTALE, "the index was made again while the page was written")
        return True

    def remove(self, pages: Sequence[StoredPage]) -> int:
        """See RawStore. Holds the lock for some hundred pages, so that engines may go on. Works on a full disk."""
        removed = 0
        with self._translated():
            store = self._writing()
            for first in range(0, len(pages), _REMOVE_CHUNK):
                with store.removing(time.monotonic() + _WAIT_S) as removal:
                    for page in pages[first : first + _REMOVE_CHUNK]:
                        name = page_name(page.namespace.hex(), page.key)
                        if look(store.system, store.root_fd, name) is not None:
                            remove_page(store.system, store.root_fd, name)
                            removed += 1
                        removal.pages.append((page.namespace, page.key))
        return removed

    def close(self) -> None:
        """See RawStore."""
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._view is not None:
            self._view.close()
            self._view = None

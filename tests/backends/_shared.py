"""Helpers for tests of shared files: open a store, with direct access to its page files."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from hicache.backends.file.system import FILE_MODE, System
from hicache.backends.limit import CapacityLimit
from hicache.backends.shared_files import SharedFilesDriver
from hicache.backends.store import UNGUARDED, Store
from hicache.backends.stored import StoredPages
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config.storage import SharedFilesStorageOptions
from hicache.frame import FrameCodec
from hicache_lab.conformance import Subject, driver_of
from tests.waiting import wait_for

from ._files import CODEC, OPENED, with_doors


def shared_options(path: Path, **options: Any) -> SharedFilesStorageOptions:
    return SharedFilesStorageOptions(**{"path": path, "free_space_floor": 0, **options})


def open_shared(
    root: Path, codec: FrameCodec = CODEC, *, system: System | None = None, clock: Clock = SYSTEM_CLOCK, **options: Any
) -> Subject:
    """Open a store of shared files at `root`, without a limit. A test need not close it."""
    driver = SharedFilesDriver(codec, shared_options(root, **options), system=system, clock=clock)
    backend = Store(driver, codec, UNGUARDED, name="shared_files", clock=clock)
    OPENED.append(backend)
    return with_doors(backend, root, codec)


def shared_driver(store: Subject) -> SharedFilesDriver:
    return driver_of(store.backend, SharedFilesDriver)


def temporaries(root: Path) -> list[str]:
    """Return the names of all temporary files of a store."""
    return sorted(path.name for path in root.rglob(".*"))


class OnPage(System):
    """A system in which the calls `call` on the file of `key`, or on its temporary file, fail with `code`: all of them,
    or only the first `times`. `hits` counts them."""

    def __init__(self, call: str, key: bytes, code: int, times: float = math.inf) -> None:
        self.call, self.key, self.code, self.times, self.hits = call, key.hex(), code, times, 0
        self.armed = True
        self._files: set[int] = set()

    def _reach(self, call: str, is_its: bool) -> None:
        if self.armed and is_its and call == self.call and self.hits < self.times:
            self.hits += 1
            raise OSError(self.code, os.strerror(self.code))

    def open(self, path: str, flags: int, mode: int = FILE_MODE, *, dir_fd: int | None = None) -> int:
        self._reach("open", self.key in path)
        fd = super().open(path, flags, mode, dir_fd=dir_fd)
        if self.key in path:
            self._files.add(fd)
        return fd

    def close(self, fd: int) -> None:
        is_its = fd in self._files
        self._files.discard(fd)
        os.close(fd)  # Linux frees the descriptor even if close fails
        self._reach("close", is_its)

    def fstat(self, fd: int) -> os.stat_result:
        self._reach("fstat", fd in self._files)
        return os.fstat(fd)

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:  # type: ignore[override]
        self._reach("preadv", fd in self._files)
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:  # type: ignore[override]
        self._reach("pwritev", fd in self._files)
        return os.pwritev(fd, buffers, offset)

    def lstat(self, path: str, *, dir_fd: int | None = None) -> os.stat_result:
        self._reach("lstat", self.key in path)
        return super().lstat(path, dir_fd=dir_fd)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        self._reach("rename", self.key in target)
        super().rename(source, target, dir_fd=dir_fd)

    def unlink(self, path: str, *, dir_fd: int) -> None:
        self._reach("unlink", self.key in path)
        super().unlink(path, dir_fd=dir_fd)


def open_limited(
    root: Path, pages: int, clock: Clock, *, system: System | None = None, is_listed: bool = True,
    adaptive: bool = False, **options: Any,
) -> Subject:
    """Open a store of shared files with a limit of so many pages. Its size is known, unless `is_listed` is False."""
    driver = SharedFilesDriver(CODEC, shared_options(root, **options), system=system, clock=clock)
    stored = StoredPages(driver, "shared_files", clock)
    limit = CapacityLimit(CODEC, stored, capacity_bytes=pages * CODEC.frame_bytes, adaptive=adaptive, clock=clock)
    backend = Store(driver, CODEC, UNGUARDED, name="shared_files", limit=limit, clock=clock)
    OPENED.append(backend)
    if is_listed:
        wait_for(lambda: limit._ledger.is_listed)
    return Subject(backend, lambda key: None, lambda key, data: None)

"""Helpers for tests of shared files: open a store, with direct access to its page files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hicache.backends.file.pages import System
from hicache.backends.shared_files import SharedFilesDriver
from hicache.backends.store import UNGUARDED, Store
from hicache.backends.testing import Subject, driver_of
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config.storage import SharedFilesStorageOptions
from hicache.frame import FrameCodec

from ._files import CODEC, OPENED, page_path


def shared_options(path: Path, **options: Any) -> SharedFilesStorageOptions:
    return SharedFilesStorageOptions(**{"path": path, "free_space_floor": 0, **options})


def open_shared(
    root: Path, codec: FrameCodec = CODEC, *, system: System | None = None, clock: Clock = SYSTEM_CLOCK, **options: Any
) -> Subject:
    """Open a store of shared files at `root`, without a limit. A test need not close it."""
    driver = SharedFilesDriver(codec, shared_options(root, **options), system=system, clock=clock)
    backend = Store(driver, codec, UNGUARDED, name="shared_files", clock=clock)
    OPENED.append(backend)

    def read(key: bytes) -> bytes | None:
        path = page_path(root, codec, key)
        return path.read_bytes() if path.exists() else None

    def write(key: bytes, data: bytes) -> None:
        page_path(root, codec, key).write_bytes(data)

    return Subject(backend, read, write)


def shared_driver(store: Subject) -> SharedFilesDriver:
    return driver_of(store.backend, SharedFilesDriver)

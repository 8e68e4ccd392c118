"""Helpers for tests of the file backend: open a store, inspect its directory, inject faults in system calls."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache.backends.file import FileDriver
from hicache.backends.file.inspection import FileInspection
from hicache.backends.file.pages import is_hex
from hicache.backends.file.system import System
from hicache.backends.limit import CapacityLimit
from hicache.backends.storage import Storage
from hicache.backends.store import UNGUARDED, Store
from hicache.backends.stored import StoredPages
from hicache.backends.tools.removal import RemovalProgress, purge_stored
from hicache.backends.tools.verify import NO_KEYS, PageKeys, ScrubProgress, verify_stored
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config import FileStorageOptions
from hicache.frame import Compression, FrameCodec
from hicache_lab.conformance import NAMESPACE, PAYLOAD_BYTES, Subject, driver_of

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
PAGE = CODEC.frame_bytes
MAC_KEY, CIPHER_KEY = b"k" * 32, b"c" * 32
# Their frames are as long as those of CODEC, but their encoded pages are shorter.
FORMS = {
    "plain": CODEC,
    "zstd": FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=Compression()),
    "gcm": FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[CIPHER_KEY]),
    "zstd+gcm": FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[CIPHER_KEY], compression=Compression()),
}
# Stores that a test has opened and may still be open: the fixture `stores_end` closes them, the last one first.
OPENED: list[Storage | StoredPages] = []
SYSTEM_CALLS = tuple(name for name in vars(System) if not name.startswith("_") and callable(getattr(System, name)))


def open_file(
    root: Path, codec: FrameCodec = CODEC, *, system: System | None = None, limit: CapacityLimit | None = None,
    clock: Clock = SYSTEM_CLOCK, **options: Any,
) -> Subject:
    """Open a file store at `root`, with direct access to its page files. A test need not close it."""
    driver = FileDriver(codec, file_options(root, **options), system=system, clock=clock)
    backend = Store(driver, codec, UNGUARDED, name="file", limit=limit, clock=clock)
    OPENED.append(backend)

    return with_doors(backend, root, codec)


def with_doors(backend: Storage, root: Path, codec: FrameCodec) -> Subject:
    """Return the store with direct access to its page files."""

    def read(key: bytes) -> bytes | None:
        path = page_path(root, codec, key)
        return path.read_bytes() if path.exists() else None

    def write(key: bytes, data: bytes) -> None:
        page_path(root, codec, key).write_bytes(data)

    return Subject(backend, read, write)


def file_driver(store: Subject) -> FileDriver:
    """Return the driver of a file store."""
    return driver_of(store.backend, FileDriver)


def file_options(path: Path, **options: Any) -> FileStorageOptions:
    """Return options of a store without limits except for the given ones."""
    return FileStorageOptions(**{"path": path, "capacity": None, "free_space_floor": 0, **options})


def open_stored(path: Path, **options: Any) -> StoredPages:
    """Open the pages of the store at `path` for an operator. A test need not close them."""
    OPENED.append(raw := StoredPages(FileInspection(None, file_options(path, **options)), "file"))
    return raw


def verify(root: Path, *, keys: PageKeys = NO_KEYS, **options: Any) -> ScrubProgress:
    """Return the result of a complete `verify` of a store."""
    with contextlib.closing(open_stored(root)) as raw:
        *_, last = verify_stored(raw, keys=keys, **options)
    return last


def purge(root: Path, **options: Any) -> RemovalProgress:
    """Return the result of a complete `purge` of a store."""
    with contextlib.closing(open_stored(root)) as raw:
        *_, last = purge_stored(raw, **options)
    return last


def page_path(root: Path, codec: FrameCodec, key: bytes) -> Path:
    return root / codec.namespace.hex() / key.hex()[:2] / key.hex()


def page_files(root: Path) -> list[Path]:
    """Return all page files of all namespaces."""
    return [path for path in root.glob("*/*/*") if is_hex(path.name, 64) and is_hex(path.parent.parent.name, 64)]


def disk_usage(root: Path) -> tuple[int, int]:
    """Return pages and bytes on the disk."""
    files = page_files(root)
    return len(files), sum(path.stat().st_size for path in files)


def bytes_on_disk(root: Path) -> int:
    """Return the bytes of page files and temporary pages, under the store's lock for a consistent sum."""
    if not (root / "lock").exists():
        return 0
    with (root / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _bytes_on_disk(root)


def _bytes_on_disk(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if is_hex(name, 64) or (os.path.basename(folder) == "tmp" and not name.endswith((".alive", ".0"))):
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except FileNotFoundError:
                    continue
    return total


def temporary_files(root: Path) -> list[str]:
    """Return the names of temporary pages and owner files."""
    return sorted(os.listdir(root / "tmp"))


def index_files(root: Path) -> list[Path]:
    return sorted(root.glob("index-*"))


def obstruct(path: Path, kind: str, outside: Path) -> None:
    """Put something that is not a regular file at a path, in place of a file. Links lead to `outside`, or nowhere."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind.startswith("link"):
        path.symlink_to(outside if kind == "link" else outside / "missing")
    elif kind == "socket":
        os.mknod(path, 0o140600)
    else:
        path.mkdir()
        if kind == "full directory":
            (path / "mine").write_text("keep me")


def changed(found: os.stat_result, *, size: int | None = None, ctime_ns: int | None = None) -> os.stat_result:
    """Return a state of a file with another size or time of change."""
    values = list(found)
    values[stat.ST_SIZE] = found.st_size if size is None else size
    named = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
    return os.stat_result(values, named if ctime_ns is None else {**named, "st_ctime_ns": ctime_ns})


def reserved_bytes(root: Path) -> int:
    """Return the bytes that the index reserves for pages being written, without the rooms of openings."""
    (path,) = root.glob("index-*.sqlite")
    db = sqlite3.connect(path)
    query = "SELECT coalesce(sum(size), 0) FROM pages WHERE writer != '' AND writer NOT LIKE '%.0'"
    try:
        return int(db.execute(query).fetchone()[0])
    finally:
        db.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Leftovers:
    """What has been opened and started since this object was made, and is still there. Descriptors and threads of
    earlier tests may end meanwhile."""

    def __init__(self) -> None:
        self._descriptors, self._threads = open_descriptors(), set(threading.enumerate())

    def found(self) -> tuple[int, list[threading.Thread]]:
        """Return the number of descriptors, and the threads."""
        new = [thread for thread in threading.enumerate() if thread not in self._threads]
        return max(0, open_descriptors() - self._descriptors), new


def check(store: Subject, root: Path) -> None:
    """Check that the index is consistent and matches the disk."""
    file_driver(store).check()
    usage = store.backend.usage()
    assert (usage.pages, usage.bytes) == disk_usage(root)
    assert [name for name in temporary_files(root) if not name.endswith(".alive")] == []


class Faulty(System):
    """A system that calls `before(name, number of this call)` ahead of each call and returns its result instead; None
    makes the real call."""

    def __init__(self, before: Callable[[str, int, tuple[Any, ...]], Any]) -> None:
        self.before = before
        self.counts: dict[str, int] = {}
        self.armed = True
        self.lock = threading.Lock()


def _wrap(name: str) -> Callable[..., Any]:

    def call(self: Faulty, *args: Any, **kwargs: Any) -> Any:
        if self.armed:
            with self.lock:
                self.counts[name] = number = self.counts.get(name, 0) + 1
            result = self.before(name, number, args)
            if result is not None:
                return result
        return getattr(super(Faulty, self), name)(*args, **kwargs)

    return call


for _name in SYSTEM_CALLS:
    setattr(Faulty, _name, _wrap(_name))

"""What the tests of the file backend share: opening a store, looking at its directory, faults at the seam."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache.backends.base import StorageBackend
from hicache.backends.file import FileBackend
from hicache.backends.file.pages import System, is_hex
from hicache.backends.file.raw import FileRaw
from hicache.backends.raw import RawStore
from hicache.backends.testing import NAMESPACE, PAYLOAD_BYTES, Store, soon
from hicache.backends.tools.removal import RemovalProgress, purge_raw
from hicache.backends.tools.verify import NO_KEYS, PageKeys, ScrubProgress, verify_raw
from hicache.config import FileStorageOptions
from hicache.frame import Compression, FrameCodec

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
PAGE = CODEC.frame_bytes
MAC_KEY, CIPHER_KEY = b"k" * 32, b"c" * 32
# The frames of these are as long as those of CODEC; what is stored of them is not, and is no frame.
FORMS = {
    "plain": CODEC,
    "zstd": FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=Compression()),
    "gcm": FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[CIPHER_KEY]),
    "zstd+gcm": FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=[CIPHER_KEY], compression=Compression()),
}
# What a test has opened and may be open still: the fixture `stores_end` closes it, the last one first.
OPENED: list[StorageBackend | RawStore] = []
SYSTEM_CALLS = tuple(name for name in vars(System) if not name.startswith("_"))


def open_file(root: Path, codec: FrameCodec = CODEC, *, system: System | None = None, **options: Any) -> Store:
    """A file store at `root`, with a side door to its page files. A test need not close it."""
    backend = FileBackend(codec, file_options(root, **options), system=system)
    OPENED.append(backend)

    def read(key: bytes) -> bytes | None:
        path = page_path(root, codec, key)
        return path.read_bytes() if path.exists() else None

    def write(key: bytes, data: bytes) -> None:
        page_path(root, codec, key).write_bytes(data)

    return Store(backend, read, write)


def file_options(path: Path, **options: Any) -> FileStorageOptions:
    """Options of a store without limits, other than those given."""
    return FileStorageOptions(**{"path": path, "capacity": None, "free_space_floor": 0, **options})


def open_raw(path: Path, **options: Any) -> FileRaw:
    """The file store at `path` as its operator sees it. A test need not close it."""
    OPENED.append(raw := FileRaw(file_options(path, **options)))
    return raw


def verify(root: Path, *, keys: PageKeys = NO_KEYS, **options: Any) -> ScrubProgress:
    """What a whole `verify` of a store finds."""
    with contextlib.closing(open_raw(root)) as raw:
        *_, last = verify_raw(raw, keys=keys, **options)
    return last


def purge(root: Path, **options: Any) -> RemovalProgress:
    """What a whole `purge` of a store does."""
    with contextlib.closing(open_raw(root)) as raw:
        *_, last = purge_raw(raw, **options)
    return last


def page_path(root: Path, codec: FrameCodec, key: bytes) -> Path:
    return root / codec.namespace.hex() / key.hex()[:2] / key.hex()


def page_files(root: Path) -> list[Path]:
    """All page files, of every namespace."""
    return [path for path in root.glob("*/*/*") if is_hex(path.name, 64) and is_hex(path.parent.parent.name, 64)]


def disk_usage(root: Path) -> tuple[int, int]:
    """Pages and bytes as they lie on the disk."""
    files = page_files(root)
    return len(files), sum(path.stat().st_size for path in files)


def bytes_on_disk(root: Path) -> int:
    """Bytes of page files and temporary files at one moment: taken under the store's lock, so that nothing moves."""
    if not (root / "lock").exists():
        return 0
    with (root / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _bytes_on_disk(root)


def _bytes_on_disk(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if is_hex(name, 64) or os.path.basename(folder) == "tmp":
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except FileNotFoundError:
                    continue
    return total


def temporary_files(root: Path) -> list[str]:
    """Temporary pages and owner files."""
    return sorted(os.listdir(root / "tmp"))


def index_files(root: Path) -> list[Path]:
    return sorted(root.glob("index-*"))


def reserved_bytes(root: Path) -> int:
    """Bytes that the index holds for pages being written."""
    (path,) = root.glob("index-*.sqlite")
    db = sqlite3.connect(path)
    try:
        return int(db.execute("SELECT reserved FROM totals").fetchone()[0])
    finally:
        db.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def check(store: Store, root: Path) -> None:
    """The index agrees with itself and with the disk."""
    backend = store.backend
    assert isinstance(backend, FileBackend)
    backend.check()
    usage = backend.usage()
    assert (usage.pages, usage.bytes) == disk_usage(root)
    assert [name for name in temporary_files(root) if not name.endswith(".alive")] == []


def exists(store: Store, keys: list[bytes]) -> int:
    return store.backend.batch_exists(keys, deadline=soon())


class Faulty(System):
    """A system that calls `before(name, number of this call)` ahead of each call; what that returns is the result,
    None lets the call happen."""

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

"""Openings of a file store beside a plain walk: `os.scandir` of all its directories, without a look at a file.

    python -m lab.benchmarks.openings [--path DIRECTORY] [--pages N]

The store has one namespace of pages of 4 KiB in chains of 32. Each page is a sparse file with a header, and its row is
written directly. "reads" is the time until an engine's opening returns, "stores" until it accepts pages, "compared"
until index and files are compared. After a kill, a page is stored again and again during the comparison; the longest
call is in the table. The files are in the caches of the system.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from hicache.backends.file import FileDriver
from hicache.backends.file.store import FileStore
from hicache.backends.store import UNGUARDED, Store
from hicache.config.storage import FileStorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec
from hicache.frame.header import KEY
from lab.benchmarks._table import Row, print_table, reduced, timed

_MEMORY = "/dev/shm"
_PAGE_BYTES = 4096
_CODEC = FrameCodec(b"o" * 32, _PAGE_BYTES - HEADER_BYTES)
_CHAIN_PAGES = 32
_ROWS = 4096
_FOREVER_S = 3600.0
_LOOK_S = 0.001


def make_store(root: Path, pages: int) -> None:
    """Make a store with this number of pages, and close it."""
    frame = memoryview(bytearray(_CODEC.frame_bytes))
    header = bytearray(_CODEC.seal(bytes(32), frame)[:HEADER_BYTES])
    store = FileStore(root, create=True)
    folders = [root / _CODEC.namespace.hex() / f"{fan:02x}" for fan in range(256)]
    for folder in folders:
        folder.mkdir(parents=True)
    descriptors = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in folders]
    for first in range(0, pages, _ROWS):
        numbers = range(first, min(first + _ROWS, pages))
        keys = [hashlib.sha256(number.to_bytes(8, "big")).digest() for number in numbers]
        for key in keys:
            header[KEY] = key
            fd = os.open(key.hex(), os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=descriptors[key[0]])
            os.write(fd, header)
            os.ftruncate(fd, _PAGE_BYTES)
            os.close(fd)
        parents = [keys[place - 1] if place % _CHAIN_PAGES else None for place in range(len(keys))]
        with store.transaction(_soon()) as index:
            index.reserve(_CODEC.namespace, keys, parents, "", _PAGE_BYTES, time.time_ns() // 1000)
    for fd in descriptors:
        os.close(fd)
    store.close()


def walk(root: Path) -> int:
    """Count the pages as a plain program does."""
    count = 0
    for folder in os.scandir(root / _CODEC.namespace.hex()):
        with os.scandir(folder) as entries:
            count += sum(1 for _ in entries)
    return count


def opened(root: Path) -> FileDriver:
    return FileDriver(_CODEC, FileStorageOptions(path=root, capacity=None, free_space_floor=0))


def kill(root: Path) -> None:
    """Open the store in a process that is killed."""
    pid = os.fork()
    if pid == 0:
        opened(root)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def lose_proof(root: Path) -> None:
    """Leave the store as a power failure, or a copy, does."""
    (root / "checked").unlink()


def lose_index(root: Path) -> None:
    for path in root.glob("index-*"):
        path.unlink()


STATES: dict[str, Callable[[Path], object]] = {
    "a clean close": lambda root: None,
    "a kill": kill,
    "a power failure or a copy": lose_proof,
    "a loss of the index": lose_index,
}


def open_and_store(root: Path, is_tried: bool) -> tuple[float, float, float, float]:
    """Return the seconds until an opening reads, stores, and has compared, and of the longest call that stores a page
    before that, if it is tried."""
    begin, calls_s = time.perf_counter(), [0.0]
    driver = opened(root)
    reads_s = time.perf_counter() - begin
    store = driver._store
    while not store.is_ready:
        store._opener.join(_LOOK_S)
    stores_s = time.perf_counter() - begin
    backend, frame, key = Store(driver, _CODEC, UNGUARDED), memoryview(bytearray(_CODEC.frame_bytes)), bytes(32)
    while store._opener.is_alive() and is_tried:
        calls_s.append(timed(lambda: backend.batch_set([key], [frame], parent=None, deadline=_soon())))
        backend.delete([key], deadline=_soon())
    store._opener.join()
    compared_s = time.perf_counter() - begin
    backend.close()
    return reads_s, stores_s, compared_s, max(calls_s)


def _soon() -> float:
    return time.monotonic() + _FOREVER_S


def run(root: Path, pages: int) -> list[Row]:
    """Measure an opening in each state, and a walk after it."""
    make_store(root, pages)
    rows = []
    for state, bring_about in STATES.items():
        bring_about(root)
        reads_s, stores_s, compared_s, call_s = open_and_store(root, state == "a kill")
        walk_s = timed(lambda: walk(root))
        times = {f"after {state}: reads": reads_s, "    stores": stores_s, "    compared": compared_s}
        for what, seconds in times.items():
            rows.append(Row(what, f"{seconds:.3f} s", f"{walk_s:.3f} s", seconds / walk_s))
        if state == "a kill":
            rows.append(Row("    longest batch_set of a page until then", f"{call_s:.3f} s"))
        if state == "a clean close":
            beside = opened(root)
            rows.append(Row("beside another process: stores", f"{timed(lambda: opened(root).close()):.3f} s"))
            beside.close()
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Openings of a file store beside a plain walk")
    parser.add_argument("--path", default=_MEMORY if os.access(_MEMORY, os.W_OK) else None)
    parser.add_argument("--pages", type=int, default=reduced(250_000, 1000), help="about 5.5 KB of memory for each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hicache-openings-", dir=options.path) as folder:
        rows = run(Path(folder, "store"), options.pages)
    print_table(f"Openings of a file store of {options.pages:,} pages, and a walk of its directories", rows)


if __name__ == "__main__":
    main()

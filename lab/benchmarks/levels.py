"""The cost of a second level for pages on the first: a file level and another against the file backend alone.

    python -m lab.benchmarks.levels [--path DIRECTORY] [--runs N] [--below memory|s3]

Both sides read the same files through the same file backend, in turns, from the page cache. That is the fastest store,
so it shows the cost of a composition best. A store through levels returns when the first level has the pages. Copies to
the second level are written afterwards; a separate row has their processor time. Reads from the second level have no
row: they cost as much as that level.

With `--below s3` the second level is a real S3 server on this machine, which gets the pages in the background.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

if __package__ in (None, ""):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from hicache.backends.compose import Levels, Part
from hicache.backends.file import FileDriver
from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.storage import Storage as AnyStorage
from hicache.backends.store import UNGUARDED, Store
from hicache.config import FileStorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec
from hicache_lab.devservers import SeaweedServer, Storage
from lab.benchmarks._table import Row, alternate, print_table, reduced, row

_KIB = 1 << 10
_FOREVER_S = 600.0
# The goal for the cost of a hit in the first level.
_GOAL = 1.05
# The goal for the cost of a store whose pages are copied to the second level after it has returned.
_STORE_GOAL = 1.2
_BATCH_BYTES = 128 << 20
_LOOKUP_KEYS = 500
# The limit of waiting copies to the second level: room for a whole batch.
_COPY_BYTES = 2 * _BATCH_BYTES


class _Bench:
    """One page size: a batch of frames, a file store, and that store with a second level."""

    def __init__(self, folder: str, page_kib: int, below: Storage) -> None:
        self.codec = FrameCodec(b"b" * 32, page_kib * _KIB - HEADER_BYTES)
        size = self.codec.frame_bytes
        self.pages = max(8, min(128, _BATCH_BYTES // size))
        self._map = mmap.mmap(-1, size * self.pages)
        whole = memoryview(self._map)
        for start in range(0, len(whole), _KIB):
            whole[start : start + 16] = os.urandom(16)
        self.frames = [whole[i * size : (i + 1) * size] for i in range(self.pages)]
        self.keys = [i.to_bytes(4, "big") * 8 for i in range(self.pages)]
        options = FileStorageOptions(path=os.path.join(folder, "store"), io_threads=2)
        self.file = Store(FileDriver(self.codec, options), self.codec, UNGUARDED)
        lower = open_spec(BackendSpec(below[0], below[1], guard=None), self.codec)
        self.levels = Levels(
            self.codec, [Part("file", self.file), Part("below", lower)], cascade_bytes_max=_COPY_BYTES
        )

    def store(self, backend: AnyStorage) -> Callable[[], object]:
        return lambda: backend.batch_set(self.keys, self.frames, parent=None, deadline=_soon())

    def read(self, backend: AnyStorage) -> Callable[[], object]:
        def read() -> None:
            outcomes = backend.batch_get(self.keys, self.frames, deadline=_soon())
            assert set(outcomes) == {"hit"}, outcomes

        return read


def _soon() -> float:
    return time.monotonic() + _FOREVER_S


def _read_row(folder: str, page_kib: int, runs: int, below: Storage) -> Row:
    bench = _Bench(folder, page_kib, below)
    try:
        bench.store(bench.file)()
        what = f"read {bench.pages} x {page_kib} KiB, all in the first level"
        return row(what, alternate(runs, [bench.read(bench.levels), bench.read(bench.file)]), _GOAL)
    finally:
        bench.levels.close()


def _store_rows(folder: str, page_kib: int, runs: int, below: Storage) -> list[Row]:
    bench = _Bench(folder, page_kib, below)
    try:
        sides: list[list[float]] = [[], []]
        work: list[list[float]] = [[], []]  # in processor time, until the copies are written
        for _ in range(runs):
            both: tuple[AnyStorage, ...] = (bench.levels, bench.file)
            for side, backend in enumerate(both):
                begun = time.process_time()
                sides[side] += alternate(1, [bench.store(backend)])[0]
                while any(copies.waiting for copies in bench.levels.copies().values()):
                    time.sleep(0.001)
                work[side].append(time.process_time() - begun)
                bench.levels.delete(bench.keys, deadline=_soon())
        what = f"store {bench.pages} x {page_kib} KiB, copied down in the background"
        return [row(what, sides, _STORE_GOAL), row("    processor time, copies included", work, None)]
    finally:
        bench.levels.close()


def _lookup_row(folder: str, runs: int, below: Storage) -> Row:
    bench = _Bench(folder, 4, below)
    try:
        keys = [i.to_bytes(4, "big") * 8 for i in range(_LOOKUP_KEYS)]
        frames = [bench.frames[0]] * _LOOKUP_KEYS
        for key, frame in zip(keys, frames, strict=True):
            bench.file.batch_set([key], [frame], parent=None, deadline=_soon())
        both: tuple[AnyStorage, ...] = (bench.levels, bench.file)
        sides: list[Callable[[], object]] = [
            lambda backend=backend: backend.batch_exists(keys, deadline=_soon())  # type: ignore[misc]
            for backend in both
        ]
        return row(f"look {_LOOKUP_KEYS} keys up, all in the first level", alternate(runs, sides), _GOAL)
    finally:
        bench.levels.close()


def run(
    path: str | None = None, *, runs: int = 60, page_kib: Sequence[int] = (256, 2048, 8192),
    below: Storage = ("memory", {}),
) -> list[Row]:
    """Measure in a directory below `path` (the current directory), which is removed again."""
    rows: list[Row] = []
    for size in page_kib:
        with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=path or os.getcwd()) as folder:
            rows.append(_read_row(folder, size, runs, below))
    for size in page_kib:
        with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=path or os.getcwd()) as folder:
            rows += _store_rows(folder, size, max(3, runs // 6), below)
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=path or os.getcwd()) as folder:
        rows.append(_lookup_row(folder, runs, below))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Levels of two stores against the file backend alone")
    parser.add_argument("--path", help="directory to write in (default: a temporary one below the current directory)")
    parser.add_argument("--runs", type=int, default=reduced(60), help="batches per side and case")
    parser.add_argument("--page-kib", type=int, nargs="+", default=[256, 2048, 8192][: reduced(3)])
    parser.add_argument("--below", choices=("memory", "s3"), default="memory", help="kind of the second level")
    options = parser.parse_args()
    with contextlib.ExitStack() as servers:
        below: Storage = ("memory", {})
        if options.below == "s3":
            server = servers.enter_context(SeaweedServer())
            os.environ.update(server.environ())
            below = server.storage()
        rows = run(options.path, runs=options.runs, page_kib=options.page_kib, below=below)
    title = f"Levels (file, {options.below}) against the file backend alone; a ratio of 1.05 is 5 % more"
    print_table(title, rows)


if __name__ == "__main__":
    main()

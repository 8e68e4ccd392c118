"""The file backend against a plain loop of open + preadv or pwritev + close on the same buffers.

    python -m lab.benchmarks.file_backend [--path DIRECTORY] [--threads N] [--seconds S]

Only ours has the integrity tag, the index, the temporary name and the rename. Both run in turns in one process with as
many threads, so that a slow moment of the machine affects both. It prints best and median of the rounds. Files are
removed after each round, outside the measured time.

Rows "in parts" compare our reads and writes of pages in 64 parts of an engine's memory with those of frames. Reads
follow the writes, so reads through the page cache hit it.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

if __package__ in (None, ""):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from hicache.backends.file import FileDriver
from hicache.backends.store import UNGUARDED, Store
from hicache.config import FileStorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec, PageBuffer, PageView, header_of, unseal
from lab.benchmarks._table import Row, print_table, rate_rows, reduced, timed

# These settings keep freed memory: memory returned to the machine is touched again at only 0.5 GB/s.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
_MIB = 1 << 20
_BATCH_PAGES = reduced(128, 4)
_PARTS = 64
_ROUNDS_MAX = reduced(15, 2)
_ROUNDS_MIN = 3
_FOREVER_S = 600.0
_SIDES = ("plain", "ours", "parts")


class _Bench:
    """One page size and one kind of I/O: buffers, a store, a plain directory."""

    def __init__(self, folder: str, page_bytes: int, batch: int, threads: int, direct: bool) -> None:
        self.codec = FrameCodec(b"b" * 32, page_bytes - HEADER_BYTES)
        size = self.codec.frame_bytes
        self._map = mmap.mmap(-1, size * batch)
        whole = memoryview(self._map)
        for start in range(0, len(whole), _MIB):
            whole[start : start + _MIB] = os.urandom(4096) * (_MIB // 4096)
        self.frames = [whole[i * size : (i + 1) * size] for i in range(batch)]
        self.views = [_in_parts(self.codec, frame) for frame in self.frames]
        self.keys = [i.to_bytes(4, "big") * 8 for i in range(batch)]
        self._threads = threads
        self._direct = os.O_DIRECT if direct else 0
        self._plain = os.path.join(folder, "plain")
        os.mkdir(self._plain)
        self.names = [os.path.join(self._plain, str(i)) for i in range(batch)]
        self._path = os.path.join(folder, "store")
        options = FileStorageOptions(path=self._path, capacity=None, io_threads=threads, direct_io=direct)
        self.backend = Store(FileDriver(self.codec, options), self.codec, UNGUARDED)

    def close(self) -> None:
        self.backend.close()
        shutil.rmtree(self._plain)
        shutil.rmtree(self._path)

    def _in_threads(self, work: Callable[[int], None]) -> None:
        share = -(-len(self.frames) // self._threads)

        def loop(thread: int) -> None:
            for i in range(thread * share, min((thread + 1) * share, len(self.frames))):
                work(i)

        helpers = [threading.Thread(target=loop, args=(n,)) for n in range(1, self._threads)]
        for helper in helpers:
            helper.start()
        loop(0)
        for helper in helpers:
            helper.join()

    def plain_write(self) -> None:
        def one(i: int) -> None:
            fd = os.open(self.names[i], os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct, 0o600)
            os.pwritev(fd, [self.frames[i]], 0)
            os.close(fd)

        self._in_threads(one)

    def plain_read(self) -> None:
        def one(i: int) -> None:
            fd = os.open(self.names[i], os.O_RDONLY | self._direct)
            os.preadv(fd, [self.frames[i]], 0)
            os.close(fd)

        self._in_threads(one)

    def our_write(self, pages: Sequence[PageBuffer]) -> None:
        outcomes = self.backend.batch_set(self.keys, pages, parent=None, deadline=time.monotonic() + _FOREVER_S)
        assert set(outcomes) == {"stored"}, outcomes

    def our_read(self, pages: Sequence[PageBuffer]) -> None:
        outcomes = self.backend.batch_get(self.keys, pages, deadline=time.monotonic() + _FOREVER_S)
        assert set(outcomes) == {"hit"}, outcomes

    def remove_plain(self) -> None:
        for name in self.names:
            os.unlink(name)

    def remove_ours(self) -> None:
        self.backend.delete(self.keys, deadline=time.monotonic() + _FOREVER_S)
        for header in (*self.frames, *map(header_of, self.views)):
            unseal(header)

    @property
    def bytes(self) -> int:
        return self.codec.frame_bytes * len(self.frames)


def _in_parts(codec: FrameCodec, frame: memoryview) -> PageView:
    """Return the payload of `frame` as a page in parts."""
    payload, step = frame[HEADER_BYTES : HEADER_BYTES + codec.payload_bytes], -(-codec.payload_bytes // _PARTS)
    parts = [payload[start : start + step] for start in range(0, codec.payload_bytes, step)]
    return PageView(memoryview(bytearray(HEADER_BYTES)), parts)


def _measure(bench: _Bench, seconds: float) -> dict[str, list[float]]:
    """Return the seconds per batch of each of the six sides, in turns."""
    times: dict[str, list[float]] = {f"{verb} {who}": [] for verb in ("write", "read") for who in _SIDES}
    end = time.monotonic() + seconds
    for number in range(_ROUNDS_MAX):
        if number > _ROUNDS_MIN and time.monotonic() >= end:
            break
        # The first side alternates: the second finds caches and the disk's buffers in a different state.
        for who in _SIDES[:: 1 if number % 2 else -1]:
            if who == "plain":
                times["write plain"].append(timed(bench.plain_write))
                times["read plain"].append(timed(bench.plain_read))
                bench.remove_plain()
                continue
            pages: Sequence[PageBuffer] = bench.views if who == "parts" else bench.frames
            times[f"write {who}"].append(timed(functools.partial(bench.our_write, pages)))
            times[f"read {who}"].append(timed(functools.partial(bench.our_read, pages)))
            bench.remove_ours()
    return {what: took[1:] for what, took in times.items()}  # the first round warms up


def run(
    path: str | None = None,
    *,
    threads: int = 2,
    page_mib: Sequence[int] = (2, 8),
    batch: int = _BATCH_PAGES,
    seconds: float = 18.0,
) -> list[Row]:
    """Measure in a directory below `path` (the current directory), which is removed again; about `seconds` per case."""
    rows: list[Row] = []
    for direct in (False, True):
        for mib in page_mib:
            with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=path or os.getcwd()) as folder:
                bench = _Bench(folder, mib * _MIB, batch, threads, direct)
                try:
                    times = _measure(bench, seconds)
                    refused = bench.backend.statistics().errors.get("direct_io_refused")
                    kind = "page cache" if not direct else "O_DIRECT refused" if refused else "O_DIRECT"
                    label = f"{batch} x {mib} MiB, {kind}"
                    rows += rate_rows(label, bench.bytes, times, 0.8)
                    in_parts = {verb.replace("parts", "ours"): took for verb, took in times.items() if "parts" in verb}
                    in_parts |= {verb.replace("ours", "frames"): took for verb, took in times.items() if "ours" in verb}
                    rows += rate_rows(f"{label}, in parts", bench.bytes, in_parts, None, other="frames")
                finally:
                    bench.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="File backend against a plain loop")
    parser.add_argument("--path", help="directory to write in (default: a temporary one below the current directory)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=18.0, help="per case; there are four")
    parser.add_argument("--page-mib", type=int, nargs="+", default=[2, 8][: reduced(2)])
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in _MALLOC.items()):
        os.execve(sys.executable, [sys.executable, os.path.abspath(__file__), *sys.argv[1:]], {**os.environ, **_MALLOC})
    rows = run(options.path, threads=options.threads, page_mib=options.page_mib, seconds=options.seconds)
    print_table(f"File backend against a plain loop, {options.threads} threads", rows)


if __name__ == "__main__":
    main()

"""Shared files: two processes on two mounts of one directory, the costs beside other ways, and a large listing.

    python -m lab.benchmarks.shared_files [--seconds S] [--side-seconds S] [--pages N] [--kinds KIND ...]

The first tables have the same load for the backends `shared_files` (ours) and `file` (the reference), opened as an
engine does: two processes, each on its own mount, store chains of 8 new pages of 128 KiB and read each other's recent
chains, with a capacity of 64 MiB. A backend that does not open such a directory is "refused". The kinds of mounts are
in `tests/shared_mounts/mounts.py`; standard error says why a kind is left out.

The tables of rates compare one process on one mount: with `file` in a directory in memory, and with a plain loop of
write and rename, or read, by as many threads on GlusterFS. The listing is of empty files in memory, so it shows the
cost of HiCache and of the kernel, and not that of a server.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from hicache.backends.file import FileDriver
from hicache.backends.limit import CapacityLimit
from hicache.backends.shared_files import SharedFilesDriver
from hicache.backends.store import UNGUARDED, Store
from hicache.backends.stored import StoredPages
from hicache.config.storage import FileStorageOptions, SharedFilesStorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec, unseal
from lab.benchmarks._table import Row, alternate, print_table, rate_rows, row, timed
from tests.shared_mounts.mounts import KINDS, shared_mounts, unavailable
from tests.shared_mounts.node import Report
from tests.shared_mounts.nodes import NodeFailed, Nodes, jobs_of, stored_bytes
from tests.waiting import wait_for

_KIB, _MIB = 1 << 10, 1 << 20
_PAGE_BYTES = 128 * _KIB
_CAPACITY_BYTES = 64 * _MIB
_BATCH_BYTES = 64 * _MIB
_LOOKUP_KEYS = 128
_FOREVER_S = 600.0
_ROUNDS_MIN = 3
_MEMORY = "/dev/shm"
_FANS = 256
_REFUSED = "refused"
_NAMES = {
    "plain": "one directory", "bindfs": "locks of each mount", "bindfs-locks": "locks of both mounts",
    "gluster": "GlusterFS", "gluster-uncached": "GlusterFS without client caches",
}


def run_nodes(kind: str, seconds: float) -> list[Row]:
    """Measure both backends on two mounts of a kind."""
    ours, theirs = (_cells(kind, backend, seconds) for backend in ("shared_files", "file"))
    return [Row(what, ours.get(what, _REFUSED), theirs.get(what, _REFUSED)) for what in {**ours, **theirs}]


def _cells(kind: str, backend: str, seconds: float) -> dict[str, str]:
    """Return the results of one backend by name; none if it refuses such a directory."""
    with shared_mounts(kind) as mounts, tempfile.TemporaryDirectory() as folder, Nodes(Path(folder)) as nodes:
        jobs = jobs_of(
            mounts, backend=backend, seconds=seconds, page_bytes=_PAGE_BYTES, capacity_bytes=_CAPACITY_BYTES
        )
        peaks = [0]
        try:
            reports = nodes.run(jobs, lambda: peaks.append(stored_bytes(mounts.directory / "store")))
        except NodeFailed as error:
            print(f"{backend} on {kind}: {error}", file=sys.stderr)
            return {}
    return _results(reports, max(peaks))


def _results(reports: Sequence[Report], peak_bytes: int) -> dict[str, str]:
    def total(field: str) -> str:
        return f"{sum(getattr(report, field) for report in reports):,}"

    kinds = sorted({kind for report in reports for kind in report.kinds})
    return {
        "pages stored": total("stored"),
        "hits": total("hits"),
        "failed pages": total("errors") + (f" ({', '.join(kinds)})" if kinds else ""),
        "damaged pages, found by the store": total("corrupt"),
        "hits with wrong bytes": total("wrong"),
        "rejected pages": total("rejected"),
        "evicted pages": total("evicted"),
        "largest size of the store": f"{peak_bytes / _MIB:.0f} MiB",
        "median of a batch_set": f"{max(report.set_s for report in reports) * 1e3:.1f} ms",
    }


class _Bench:
    """One page size: frames and keys, and the stores or plain files that they go to."""

    def __init__(self, page_kib: int) -> None:
        self.codec = FrameCodec(b"b" * 32, page_kib * _KIB - HEADER_BYTES)
        pages = _BATCH_BYTES // self.codec.frame_bytes
        self.frames = [memoryview(bytearray(os.urandom(_KIB) * (self.codec.frame_bytes // _KIB))) for _ in range(pages)]
        self.keys = [number.to_bytes(4, "big") * 8 for number in range(pages)]
        self.bytes = pages * self.codec.frame_bytes

    def shared(self, path: Path, threads: int = 8) -> Store:
        options = SharedFilesStorageOptions(path=path, free_space_floor=0, io_threads=threads)
        return Store(SharedFilesDriver(self.codec, options), self.codec, UNGUARDED)

    def file(self, path: Path) -> Store:
        options = FileStorageOptions(path=path, capacity=None, free_space_floor=0)
        return Store(FileDriver(self.codec, options), self.codec, UNGUARDED)

    def write(self, store: Store) -> None:
        outcomes = store.batch_set(self.keys, self.frames, parent=None, deadline=_soon())
        assert set(outcomes) == {"stored"}, outcomes

    def read(self, store: Store) -> None:
        outcomes = store.batch_get(self.keys, self.frames, deadline=_soon())
        assert set(outcomes) == {"hit"}, outcomes

    def remove(self, store: Store) -> None:
        store.delete(self.keys, deadline=_soon())
        for frame in self.frames:
            unseal(frame)

    def plain_write(self, folder: Path, threads: int) -> None:
        def write(number: int) -> None:
            fd = os.open(folder / f".{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.pwritev(fd, [self.frames[number]], 0)
            os.close(fd)
            os.rename(folder / f".{number}", folder / f"{number}")

        _in_threads(threads, len(self.frames), write)

    def plain_read(self, folder: Path, threads: int) -> None:
        def read(number: int) -> None:
            fd = os.open(folder / f"{number}", os.O_RDONLY)
            done = 0
            while done < self.codec.frame_bytes:
                done += os.preadv(fd, [self.frames[number][done:]], done)
            os.close(fd)

        _in_threads(threads, len(self.frames), read)


def _soon() -> float:
    return time.monotonic() + _FOREVER_S


def _in_threads(threads: int, count: int, work: Callable[[int], None]) -> None:
    def loop(first: int) -> None:
        for number in range(first, count, threads):
            work(number)

    helpers = [threading.Thread(target=loop, args=(first,)) for first in range(threads)]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()


def _rounds(seconds: float) -> Iterator[int]:
    """Yield the numbers of rounds, for about `seconds`."""
    end_s, number = time.monotonic() + seconds, 0
    while number <= _ROUNDS_MIN or time.monotonic() < end_s:
        yield number
        number += 1


def run_beside_file(seconds: float, page_kib: Sequence[int] = (2048, 128)) -> list[Row]:
    """Measure `shared_files` beside `file` in a local directory in memory; about `seconds` per page size."""
    rows: list[Row] = []
    for kib in page_kib:
        with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=_memory()) as folder:
            bench = _Bench(kib)
            stores = {"ours": bench.shared(Path(folder, "shared")), "file": bench.file(Path(folder, "file"))}
            times: dict[str, list[float]] = {f"{verb} {who}": [] for verb in ("write", "read") for who in stores}
            for number in _rounds(seconds):
                for who in list(stores)[:: 1 if number % 2 else -1]:
                    times[f"write {who}"].append(timed(functools.partial(bench.write, stores[who])))
                    times[f"read {who}"].append(timed(functools.partial(bench.read, stores[who])))
                    bench.remove(stores[who])
            times = {what: took[1:] for what, took in times.items()}  # the first round warms up
            rows += rate_rows(f"{len(bench.keys)} x {kib} KiB", bench.bytes, times, None, other="file")
            for store in stores.values():
                store.close()
    return [*rows, _lookup_row(seconds)]


def _lookup_row(seconds: float) -> Row:
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=_memory()) as folder:
        bench = _Bench(4)
        stores = [bench.shared(Path(folder, "shared")), bench.file(Path(folder, "file"))]
        keys, frames = bench.keys[:_LOOKUP_KEYS], bench.frames[:_LOOKUP_KEYS]
        for store in stores:
            store.batch_set(keys, frames, parent=None, deadline=_soon())
            for frame in frames:
                unseal(frame)
        sides: list[Callable[[], object]] = [
            functools.partial(store.batch_exists, keys, deadline=time.monotonic() + _FOREVER_S) for store in stores
        ]
        found = row(f"time to look {_LOOKUP_KEYS} keys up", alternate(max(20, int(50 * seconds)), sides), None)
        for store in stores:
            store.close()
        return found


def run_beside_plain(kind: str, seconds: float, page_kib: Sequence[int] = (2048, 128), threads: int = 8) -> list[Row]:
    """Measure `shared_files` beside a plain loop of as many threads on a mount; about `seconds` per page size."""
    rows: list[Row] = []
    for kib in page_kib:
        with shared_mounts(kind) as mounts:
            bench, store_path, plain = _Bench(kib), mounts.paths[0] / "store", mounts.paths[0] / "plain"
            plain.mkdir()
            store = bench.shared(store_path, threads)
            sides = ("ours", "plain")
            times: dict[str, list[float]] = {f"{verb} {who}": [] for verb in ("write", "read") for who in sides}
            for number in _rounds(seconds):
                for who in sides[:: 1 if number % 2 else -1]:
                    if who == "ours":
                        times["write ours"].append(timed(functools.partial(bench.write, store)))
                        times["read ours"].append(timed(functools.partial(bench.read, store)))
                        bench.remove(store)
                    else:
                        times["write plain"].append(timed(functools.partial(bench.plain_write, plain, threads)))
                        times["read plain"].append(timed(functools.partial(bench.plain_read, plain, threads)))
                        shutil.rmtree(plain)
                        plain.mkdir()
            times = {what: took[1:] for what, took in times.items()}
            rows += rate_rows(f"{len(bench.keys)} x {kib} KiB", bench.bytes, times, None)
            store.close()
    return rows


def run_listing(pages: int) -> list[Row]:
    """List a store of empty pages in memory: alone, and as the first sweep of a limit, which keeps the chains."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=_memory()) as folder:
        codec = FrameCodec(b"b" * 32, 4 * _KIB - HEADER_BYTES)
        root = Path(folder, "store")
        options = SharedFilesStorageOptions(path=root, free_space_floor=0)
        SharedFilesDriver(codec, options).close()
        _make_files(root / codec.namespace.hex(), pages)
        driver = SharedFilesDriver(codec, options)
        begun_bytes, begun_s = _rss_bytes(), time.perf_counter()
        count = sum(1 for _ in driver.pages("", 0.0))
        listed_s, listed_bytes = time.perf_counter() - begun_s, _rss_bytes() - begun_bytes
        assert count == pages
        limit = CapacityLimit(codec, StoredPages(driver, "shared_files"), capacity_bytes=1 << 50)
        begun_bytes, begun_s = _rss_bytes(), time.perf_counter()
        limit.start()
        wait_for(lambda: driver.swept.ended > 0, timeout_s=_FOREVER_S, pause_s=0.01)
        swept_s, swept_bytes = time.perf_counter() - begun_s, _rss_bytes() - begun_bytes
        limit.stop()
        limit.close()
        driver.close()
    return [
        Row("list", f"{listed_s:.1f} s"),
        Row("    growth of memory", f"{listed_bytes / _MIB:.0f} MiB"),
        Row("first sweep", f"{swept_s:.1f} s"),
        Row("    growth of memory, for the chains", f"{swept_bytes / _MIB:.0f} MiB"),
    ]


def _make_files(namespace: Path, pages: int) -> None:
    """Make empty files with the names of pages, evenly in the directories of their first byte."""
    namespace.mkdir()
    for fan in range(_FANS):
        folder = namespace / f"{fan:02x}"
        folder.mkdir()
        fd = os.open(folder, os.O_RDONLY)
        for number in range(fan, pages, _FANS):
            os.mknod(f"{fan:02x}{number:062x}", 0o100600, dir_fd=fd)
        os.close(fd)


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _memory() -> str | None:
    return _MEMORY if os.access(_MEMORY, os.W_OK) else None


def _available(kinds: Sequence[str]) -> list[str]:
    """Return the kinds of mounts that this machine can make."""
    reasons = {kind: unavailable(kind) for kind in kinds}
    for reason in filter(None, reasons.values()):
        print(f"left out: {reason}", file=sys.stderr)
    return [kind for kind, reason in reasons.items() if reason is None]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Shared files on two mounts, beside other ways, and a large listing")
    parser.add_argument("--seconds", type=float, default=15.0, help="per kind of mounts and backend")
    parser.add_argument("--side-seconds", type=float, default=10.0, help="per page size beside another way")
    parser.add_argument("--pages", type=int, default=1_000_000, help="of the listing")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of mounts")
    options: Any = parser.parse_args()
    kinds = _available(options.kinds)
    for kind in kinds:
        title = f"Two processes, {_NAMES[kind]}: shared_files, and file as the reference, {options.seconds:g} s each"
        print_table(title, run_nodes(kind, options.seconds))
    rows = run_beside_file(options.side_seconds)
    print_table("shared_files beside file, one process in memory; rates: above 1 is faster", rows)
    if "gluster" in kinds:
        rows = run_beside_plain("gluster", options.side_seconds)
        print_table("shared_files beside a plain loop of 8 threads on GlusterFS; rates: above 1 is faster", rows)
    print_table(f"A listing of {options.pages:,} empty files in memory", run_listing(options.pages))


if __name__ == "__main__":
    main()

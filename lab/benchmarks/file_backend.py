"""The file backend against a plain loop of open + preadv or pwritev + close on the same buffers.

    python -m lab.benchmarks.file_backend [--path DIRECTORY] [--threads N] [--seconds S] [--only PART] [--peer WHEELS]

Only ours has the integrity tag, the index, the temporary name and the rename. Both run in turns in one process with as
many threads, so that a slow moment of the machine affects both. It prints best and median of the rounds. Files are
removed after each round, outside the measured time.

"disk": large pages in DIRECTORY, through the page cache and with O_DIRECT. Rows "in parts" compare our reads and
writes of pages in 64 parts of an engine's memory with those of frames. Reads follow the writes, so reads through the
page cache hit it.

"small": pages of 4 KiB to 2 MiB on a RAM disk, where the cost of a page shows and not that of its bytes. "One page per
call" calls us once per page, beside the plain loop in one thread. Lookups are beside a plain loop of `os.stat` relative
to the directory's descriptor. Other projects' file stores are beside ours if they are installed or if WHEELS is the
directory of their unpacked wheels (`_peers`). The rows say whether the directory was a RAM disk: it is /dev/shm if that
is a tmpfs, otherwise the DIRECTORY.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from hicache.backends.file import FileDriver
from hicache.backends.file.mounts import file_system
from hicache.backends.store import UNGUARDED, Store
from hicache.config import FileStorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec, PageBuffer, PageView, header_of, unseal
from lab.benchmarks._peers import LMCACHE, SGLANG, file_peers
from lab.benchmarks._table import Row, print_table, rate_rows, reduced, timed
from lab.benchmarks.engines._sides import with_malloc

# A write, a read, and the removal after them, which is not measured.
Turn: TypeAlias = tuple[Callable[[], object], Callable[[], object], Callable[[], object]]

_KIB = 1 << 10
_MIB = 1 << 20
_RAM_DISK = Path("/dev/shm")
_BATCH_PAGES = reduced(128, 4)
_PARTS = 64
_SMALL_KIB = (4, 64, 256, 2048)
_ONE_PER_CALL_GOAL = 0.5
_ROUNDS_MAX = reduced(15, 2)
_SMALL_ROUNDS_MAX = reduced(60, 2)
_ROUNDS_MIN = 3
_FOREVER_S = 600.0


class FileBench:
    """One page size and one kind of I/O: buffers, a store, a plain directory, and other projects' stores if given."""

    def __init__(
        self, folder: str, page_bytes: int, batch: int, threads: int, direct: bool = False, *,
        wheels: str | None = None, with_peers: bool = False,
    ) -> None:
        self.codec = FrameCodec(b"b" * 32, page_bytes - HEADER_BYTES)
        size = self.codec.frame_bytes
        self._map = mmap.mmap(-1, size * batch)
        whole, noise = memoryview(self._map), os.urandom(4 * _KIB)
        for start in range(0, len(whole), 4 * _KIB):
            whole[start : start + 4 * _KIB] = noise
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
        self.peers = file_peers(wheels, Path(folder), self.frames, threads) if with_peers else {}

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.backend.close()
        shutil.rmtree(self._plain)
        shutil.rmtree(self._path)

    def sides(self) -> dict[str, Turn]:
        """Return the sides of whole batches: the plain loop, ours, and other projects' stores."""
        write, read = (functools.partial(call, self.frames) for call in (self.our_write, self.our_read))
        peers = {who: (peer.write, peer.read, peer.remove) for who, peer in self.peers.items()}
        plain = (self.plain_write, self.plain_read, self.remove_plain)
        return {"plain": plain, "ours": (write, read, self.remove_ours), **peers}

    def sides_in_parts(self) -> dict[str, Turn]:
        """Return the sides of whole batches: the plain loop, ours, and ours with pages in parts."""
        write, read = (functools.partial(call, self.views) for call in (self.our_write, self.our_read))
        return self.sides() | {"parts": (write, read, self.remove_ours)}

    def sides_one_by_one(self) -> dict[str, Turn]:
        """Return the sides of calls of one page: the plain loop in one thread, and ours."""
        plain = (self.plain_write_in_one_thread, self.plain_read_in_one_thread, self.remove_plain)
        return {"plain": plain, "ours": (self.our_write_one_by_one, self.our_read_one_by_one, self.remove_ours)}

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
        self._in_threads(self._write_one)

    def plain_read(self) -> None:
        self._in_threads(self._read_one)

    def plain_write_in_one_thread(self) -> None:
        for i in range(len(self.frames)):
            self._write_one(i)

    def plain_read_in_one_thread(self) -> None:
        for i in range(len(self.frames)):
            self._read_one(i)

    def _write_one(self, i: int) -> None:
        fd = os.open(self.names[i], os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct, 0o600)
        os.pwritev(fd, [self.frames[i]], 0)
        os.close(fd)

    def _read_one(self, i: int) -> None:
        fd = os.open(self.names[i], os.O_RDONLY | self._direct)
        os.preadv(fd, [self.frames[i]], 0)
        os.close(fd)

    def our_write(self, pages: Sequence[PageBuffer]) -> None:
        outcomes = self.backend.batch_set(self.keys, pages, parent=None, deadline=time.monotonic() + _FOREVER_S)
        assert set(outcomes) == {"stored"}, outcomes

    def our_read(self, pages: Sequence[PageBuffer]) -> None:
        outcomes = self.backend.batch_get(self.keys, pages, deadline=time.monotonic() + _FOREVER_S)
        assert set(outcomes) == {"hit"}, outcomes

    def our_write_one_by_one(self) -> None:
        for key, frame in zip(self.keys, self.frames, strict=True):
            outcomes = self.backend.batch_set([key], [frame], parent=None, deadline=time.monotonic() + _FOREVER_S)
            assert outcomes == ["stored"], outcomes

    def our_read_one_by_one(self) -> None:
        for key, frame in zip(self.keys, self.frames, strict=True):
            outcomes = self.backend.batch_get([key], [frame], deadline=time.monotonic() + _FOREVER_S)
            assert outcomes == ["hit"], outcomes

    def our_lookup(self) -> None:
        assert self.backend.batch_exists(self.keys, deadline=time.monotonic() + _FOREVER_S) == len(self.keys)

    def our_lookup_one_by_one(self) -> None:
        for key in self.keys:
            assert self.backend.batch_exists([key], deadline=time.monotonic() + _FOREVER_S) == 1

    def plain_lookup(self) -> None:
        folder = os.open(self._plain, os.O_PATH)
        for name in self.names:
            os.stat(os.path.basename(name), dir_fd=folder)
        os.close(folder)

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


def measure(sides: Mapping[str, Turn], rounds_max: int, seconds: float) -> dict[str, list[float]]:
    """Return the seconds per batch of the writes and reads of each side, in turns, and those of processor time."""
    times: dict[str, list[float]] = {}
    end = time.monotonic() + seconds
    for number in range(rounds_max):
        if number > _ROUNDS_MIN and time.monotonic() >= end:
            break
        # The first side alternates: the second finds caches and the disk's buffers in a different state.
        for who in list(sides)[:: 1 if number % 2 else -1]:
            write, read, remove = sides[who]
            for verb, work in (("write", write), ("read", read)):
                cpu_s = time.process_time()
                times.setdefault(f"{verb} {who}", []).append(timed(work))
                times.setdefault(f"{verb} {who} cpu", []).append(time.process_time() - cpu_s)
            remove()
    return {what: took[1:] for what, took in times.items()}  # the first round warms up


def _processor_rows(label: str, pages: int, times: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return rows of the processor time of a page beside each other side; a ratio above 1 means that ours is less."""
    rows = []
    for verb, other in itertools.product(("read", "write"), ("plain", SGLANG, LMCACHE)):
        if f"{verb} {other} cpu" in times:
            ours, theirs = (statistics.median(times[f"{verb} {who} cpu"]) / pages * 1e6 for who in ("ours", other))
            what = f"{verb} {label}, processor time of a page, {other}"
            rows.append(Row(what, f"{ours:.1f} us", f"{theirs:.1f} us", theirs / ours))
    return rows


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
                bench = FileBench(folder, mib * _MIB, batch, threads, direct)
                try:
                    times = measure(bench.sides_in_parts(), _ROUNDS_MAX, seconds)
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


def ram_disk(path: str | None) -> tuple[str, str]:
    """Return the directory for small pages and its kind in words: /dev/shm if it is a tmpfs, otherwise `path`."""
    if file_system(_RAM_DISK) == "tmpfs" and os.access(_RAM_DISK, os.W_OK):
        return str(_RAM_DISK), "RAM disk"
    folder = path or os.getcwd()
    return folder, f"no RAM disk but {file_system(Path(folder))}"


def run_small(
    path: str | None = None, *, threads: int = 2, batch: int = _BATCH_PAGES, seconds: float = 6.0,
    wheels: str | None = None,
) -> list[Row]:
    """Measure small pages beside those of 2 MiB on the RAM disk; about `seconds` per case. `wheels` is the directory of
    other projects' unpacked wheels."""
    rows: list[Row] = []
    place, kind = ram_disk(path)
    for kib in _SMALL_KIB:
        with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=place) as folder:
            bench = FileBench(folder, kib * _KIB, batch, threads, wheels=wheels, with_peers=True)
            try:
                label = f"{batch} x {kib} KiB, {kind}"
                times = measure(bench.sides(), _SMALL_ROUNDS_MAX, seconds)
                rows += rate_rows(label, bench.bytes, times, 0.8)
                for peer in (SGLANG, LMCACHE):
                    rows += rate_rows(f"{label}, {peer}", bench.bytes, times, 1.0, other=peer)
                rows += _processor_rows(label, batch, times)
                times = measure(bench.sides_one_by_one(), _SMALL_ROUNDS_MAX, seconds)
                goal = _ONE_PER_CALL_GOAL if 64 <= kib <= 256 else None
                rows += rate_rows(f"{label}, one page per call", bench.bytes, times, goal)
                rows += _processor_rows(f"{label}, one page per call", batch, times)
                if kib == _SMALL_KIB[0]:
                    rows += _lookup_rows(bench, kind)
            finally:
                bench.close()
    return rows


def _lookup_rows(bench: FileBench, kind: str) -> list[Row]:
    """Return rows of the time to look up one stored page; a ratio above 1 means that ours is faster."""
    bench.plain_write()
    bench.our_write(bench.frames)
    calls = {"plain": bench.plain_lookup, "ours": bench.our_lookup, "one": bench.our_lookup_one_by_one}
    pages, rows = len(bench.keys), []
    times: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(_SMALL_ROUNDS_MAX):
        for who, call in calls.items():
            times[who].append(timed(call))
    for who, what in (("ours", f"lookup of {pages} pages"), ("one", "lookup, one page per call")):
        for best, pick in (("best", min), ("median", statistics.median)):
            ours, reference = (pick(times[side]) / pages * 1e6 for side in (who, "plain"))
            label = f"{what}, {kind}, time of a page, {best} of {_SMALL_ROUNDS_MAX}"
            rows.append(Row(label, f"{ours:.1f} us", f"{reference:.1f} us", reference / ours))
    bench.remove_plain()
    bench.remove_ours()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="File backend against a plain loop")
    parser.add_argument("--path", help="directory to write in (default: a temporary one below the current directory)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=18.0, help="per case of the disk; there are four")
    parser.add_argument("--page-mib", type=int, nargs="+", default=[2, 8][: reduced(2)], help="pages on the disk")
    parser.add_argument("--only", choices=("small", "disk"), help="one of the two tables")
    parser.add_argument("--peer", help="directory with the unpacked wheels of SGLang and LMCache")
    options = parser.parse_args()
    with_malloc("lab.benchmarks.file_backend")
    if options.only != "disk":
        rows = run_small(options.path, threads=options.threads, wheels=options.peer)
        print_table(f"Small pages against a plain loop and other projects' stores, {options.threads} threads", rows)
    if options.only != "small":
        rows = run(options.path, threads=options.threads, page_mib=options.page_mib, seconds=options.seconds)
        print_table(f"File backend against a plain loop, {options.threads} threads", rows)


if __name__ == "__main__":
    main()

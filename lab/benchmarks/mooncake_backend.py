"""The Mooncake backend against bare library calls on the same registered memory.

    python -m lab.benchmarks.mooncake_backend [--seconds S] [--page-kib K ...] [--batch-mib M]

Starts a master, and a daemon that holds pages in another process. Both sides take turns with one client, one batch of
frames in one registered memory, and the same keys. The bare side calls the library once for all pages. Ours looks pages
up, seals them, moves them in chunks and checks them. The rows without an integrity tag compare equal work; the tag is
work that the library does not do.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

if __package__ in (None, ""):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from hicache.backends.mooncake import MooncakeDriver
from hicache.backends.mooncake.client import join_store
from hicache.backends.mooncake.session import Names
from hicache.backends.store import UNGUARDED, Store
from hicache.config import MooncakeStorageOptions
from hicache.frame import HEADER_BYTES, FrameCodec, TagKind, unseal
from hicache.mapping import address_of
from hicache_lab.devservers import MooncakeClientDaemon, MooncakeMaster
from lab.benchmarks._table import Row, print_table, rate_rows, reduced, timed

# These settings keep freed memory: memory returned to the machine is touched again at only 0.5 GB/s.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
_KIB, _MIB = 1 << 10, 1 << 20
_ROUNDS_MAX = reduced(25, 2)
_ROUNDS_MIN = 3
_FOREVER_S = 600.0
_GOAL = 0.95
_LEASE_MS = 10_000  # Mooncake's default; a batch must be read within it


class _Bench:
    """One page size, one kind of tag, one location of the pages: frames, the backend, and the bare library."""

    def __init__(self, options: MooncakeStorageOptions, page_bytes: int, batch_bytes: int, tag: TagKind) -> None:
        self.codec = FrameCodec(b"b" * 32, page_bytes - HEADER_BYTES, tag=tag)
        size, batch = self.codec.frame_bytes, max(1, batch_bytes // page_bytes)
        self._map = mmap.mmap(-1, size * batch)
        self._whole = memoryview(self._map)
        for start in range(0, len(self._whole), size):
            self._whole[start : start + size] = os.urandom(4096) * (size // 4096)
        self.frames = [self._whole[i * size : (i + 1) * size] for i in range(batch)]
        self.keys = [i.to_bytes(4, "big") * 8 for i in range(batch)]
        self.backend = Store(MooncakeDriver(self.codec, options), self.codec, UNGUARDED)
        self.backend.register_memory(self._whole)
        self._library, self._pool = join_store(options)
        self._names = Names("plain/").of(self.codec.namespace, self.keys)
        self._ours = Names(options.prefix).of(self.codec.namespace, self.keys)
        self._addresses = [[address_of(frame)] for frame in self.frames]
        self._sizes = [[size]] * batch

    def close(self) -> None:
        self._library.leave()
        self._pool.close()
        self.backend.close()

    def plain_write(self) -> None:
        assert set(self._library.put(self._names, self._addresses, self._sizes)) == {0}

    def plain_read(self) -> None:
        assert set(self._library.get(self._names, self._addresses, self._sizes)) == {self.codec.frame_bytes}

    def our_write(self) -> None:
        outcomes = self.backend.batch_set(self.keys, self.frames, parent=None, deadline=time.monotonic() + _FOREVER_S)
        assert set(outcomes) == {"stored"}, (Counter(outcomes), self.backend.statistics().errors)

    def our_read(self) -> None:
        outcomes = self.backend.batch_get(self.keys, self.frames, deadline=time.monotonic() + _FOREVER_S)
        assert set(outcomes) == {"hit"}, (Counter(outcomes), self.backend.statistics().errors)

    def our_lookup(self) -> None:
        assert self.backend.batch_exists(self.keys, deadline=time.monotonic() + _FOREVER_S) == len(self.keys)

    def plain_lookup(self) -> None:
        assert set(self._library.exist(self._names)) == {1}

    def forget(self) -> None:
        self._library.remove(self._names + self._ours, force=True)
        for frame in self.frames:
            unseal(frame)

    @property
    def bytes(self) -> int:
        return self.codec.frame_bytes * len(self.frames)


def _measure(bench: _Bench, seconds: float) -> dict[str, list[float]]:
    """Return the seconds per batch of each of the four sides, in turns."""
    times: dict[str, list[float]] = {"write plain": [], "write ours": [], "read plain": [], "read ours": []}
    end = time.monotonic() + seconds
    for number in range(_ROUNDS_MAX):
        if number > _ROUNDS_MIN and time.monotonic() >= end:
            break
        # The first side alternates: the second finds caches in a different state.
        for mine in (number % 2 == 0, number % 2 == 1):
            bench.forget()
            who, write, read = ("ours", bench.our_write, bench.our_read) if mine else (
                "plain", bench.plain_write, bench.plain_read,
            )
            times[f"write {who}"].append(timed(write))
            times[f"read {who}"].append(timed(read))
    bench.forget()
    return {what: took[1:] for what, took in times.items()}  # the first round warms up


def _lookups(options: MooncakeStorageOptions, pages: int = 500) -> Row:
    """Return the row of a lookup of `pages` stored pages."""
    bench = _Bench(options, 4 * _KIB, pages * 4 * _KIB, TagKind.NONE)
    try:
        bench.our_write()
        bench.plain_write()
        times = [[timed(work) for _ in range(50)] for work in (bench.our_lookup, bench.plain_lookup)]
        bench.forget()
    finally:
        bench.close()
    ours, plain = min(times[0]), min(times[1])
    return Row(f"exists of {pages} pages, best of 50", f"{ours * 1e3:.2f} ms", f"{plain * 1e3:.2f} ms", plain / ours)


def run(*, page_kib: Sequence[int] = (256, 2048, 8192), batch_mib: int = 128, seconds: float = 6.0) -> list[Row]:
    """Measure with pages in this process's segment, then in another process; about `seconds` per case."""
    rows: list[Row] = []
    segment_bytes = 4 * batch_mib * _MIB
    for place, own_bytes in (("own segment", segment_bytes), ("other process", 0)):
        with MooncakeMaster(lease_ms=_LEASE_MS) as master:
            daemon = None if own_bytes else MooncakeClientDaemon(master, segment_bytes=segment_bytes)
            if daemon is not None:
                daemon.start()
            options = MooncakeStorageOptions(
                master=master.address, segment=own_bytes, admin=master.metrics_address, staging=8 * _MIB
            )
            try:
                for kib in page_kib:
                    for tag, goal in ((TagKind.NONE, _GOAL), (TagKind.XXH3_128, None)):
                        bench = _Bench(options, kib * _KIB, batch_mib * _MIB, tag)
                        try:
                            times = _measure(bench, seconds)
                            label = f"{len(bench.frames)} x {kib} KiB, {place}, {'no tag' if goal else 'tag'}"
                            rows += rate_rows(label, bench.bytes, times, goal)
                        finally:
                            bench.close()
                rows.append(_lookups(options))
            finally:
                if daemon is not None:
                    daemon.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Mooncake backend against bare library calls")
    parser.add_argument("--seconds", type=float, default=6.0, help="per case; there are twelve")
    parser.add_argument("--page-kib", type=int, nargs="+", default=[256, 2048, 8192][: reduced(3)])
    parser.add_argument("--batch-mib", type=int, default=128)
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in _MALLOC.items()):
        os.execve(sys.executable, [sys.executable, os.path.abspath(__file__), *sys.argv[1:]], {**os.environ, **_MALLOC})
    rows = run(page_kib=options.page_kib, batch_mib=options.batch_mib, seconds=options.seconds)
    print_table("Mooncake backend against bare library calls", rows)


if __name__ == "__main__":
    main()

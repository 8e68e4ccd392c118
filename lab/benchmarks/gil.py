"""Reads and writes of files and Redis while another thread of the process computes in Python, as a scheduler does.

    python -m lab.benchmarks.gil [--path DIRECTORY] [--seconds S] [--peer WHEELS]

A thread needs the interpreter's lock (GIL) before each step of Python. While another thread computes, it waits for the
lock up to 5 ms each time (`sys.getswitchinterval`), so I/O that returns to Python after each system call loses most of
its rate. A batch that is one call without the lock loses nothing.

Each side moves the same pages in batches, from the same memory: ours, a plain loop in Python, and SGLang's and
LMCache's stores if they are installed or if WHEELS is the directory of their unpacked wheels (`_peers`). The same loop
computes all the time, on a core of its own: "idle" in another process, "busy" in a thread of this one. So the
interpreter's lock is the only difference, and not a core that is taken. Rows "busy : idle" are each side's rate while
busy, as a share of its idle rate: 1 is best. Rows "busy" are the rates. A ratio above 1 means that ours is faster, or
loses less.

Other programs on the cores hide the lock: a loop that waits for its core does not take the lock from a thread that
reads. Then rates while busy are up to ten times as high as on a quiet machine, and differ between runs.

Files are on a RAM disk, as in `file_backend`; Redis is a Valkey server on TCP, as in `redis_backend`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

from hicache_lab.devservers import ValkeyServer
from lab.benchmarks._busy import BusyProcess, BusyThread
from lab.benchmarks._peers import LMCACHE, SGLANG
from lab.benchmarks._table import Row, print_table, rate, reduced, timed
from lab.benchmarks.engines._sides import with_malloc
from lab.benchmarks.file_backend import FileBench, Turn, ram_disk
from lab.benchmarks.redis_backend import RedisBench

Loops: TypeAlias = Mapping[str, AbstractContextManager[object]]
Seconds: TypeAlias = dict[tuple[str, str, str], list[float]]

_KIB = 1 << 10
# Pages of a batch by their size in KiB.
_BATCHES = {64: reduced(64, 4), 256: reduced(64, 4), 2048: reduced(16, 4)}
# One thread of each side, so that two cores are enough: one for the loop and one for I/O.
_THREADS = 1
# A batch that is faster is read several times: within a millisecond the loop may not ask for the lock at all.
_READ_S_MIN = 0.02
_ROUNDS_MAX = reduced(40, 2)
_ROUNDS_MIN = reduced(4, 2)


def measure(sides: Mapping[str, Turn], loops: Loops, seconds: float) -> Seconds:
    """Return the seconds of the writes and reads of each side under each loop, by verb, side and loop, in turns."""
    times: Seconds = {}
    end = time.monotonic() + seconds
    for number in range(_ROUNDS_MAX):
        if number >= _ROUNDS_MIN and time.monotonic() >= end:
            break
        for who in list(sides)[:: 1 if number % 2 else -1]:
            write, read, remove = sides[who]
            for loop, computes in loops.items():
                with computes:
                    wrote, took = timed(write), _timed_often(read)
                remove()
                if number:  # the first round warms up
                    times.setdefault(("write", who, loop), []).append(wrote)
                    times.setdefault(("read", who, loop), []).append(took)
    return times


def _timed_often(work: Callable[[], object]) -> float:
    """Return the mean seconds of a call, over as many calls as take a while."""
    calls, begin = 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < _READ_S_MIN:
        work()
        calls += 1
    return took / calls


def rows_of(label: str, size_bytes: int, times: Seconds, others: Sequence[str]) -> list[Row]:
    """Return the rows of one page size: ours beside each other side, by the medians."""
    median = {case: statistics.median(taken) for case, taken in times.items()}
    rows = []
    for verb in ("write", "read"):
        ours_s, ours_kept = median[verb, "ours", "busy"], median[verb, "ours", "idle"] / median[verb, "ours", "busy"]
        for other in others:
            goal = None if other == "plain" else 1.0
            if (verb, other, "busy") not in median:
                rows.append(Row(f"{verb} {label}, busy : idle, {other}", f"{ours_kept:.3f}"))
                rows.append(Row(f"{verb} {label}, busy, {other}", rate(size_bytes, ours_s), goal=goal))
                continue
            other_s = median[verb, other, "busy"]
            kept = median[verb, other, "idle"] / other_s
            what = f"{verb} {label}, busy : idle, {other}"
            rows.append(Row(what, f"{ours_kept:.3f}", f"{kept:.3f}", ours_kept / kept))
            rates = (rate(size_bytes, ours_s), rate(size_bytes, other_s))
            rows.append(Row(f"{verb} {label}, busy, {other}", *rates, other_s / ours_s, goal))
    return rows


def file_rows(path: str | None, loops: Loops, seconds: float, wheels: str | None) -> tuple[str, list[Row]]:
    """Return the title and the rows of files; about `seconds` per page size."""
    rows: list[Row] = []
    place, kind = ram_disk(path)
    for kib, batch in _BATCHES.items():
        with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=place) as folder:
            bench = FileBench(folder, kib * _KIB, batch, _THREADS, wheels=wheels, with_peers=True)
            try:
                times = measure(bench.sides(), loops, seconds)
            finally:
                bench.close()
        rows += rows_of(f"{batch} x {kib} KiB", bench.bytes, times, ("plain", SGLANG, LMCACHE))
    return f"Files while another thread computes in Python, {kind}, one thread", rows


def redis_rows(loops: Loops, seconds: float, wheels: str | None) -> tuple[str, list[Row]]:
    """Return the title and the rows of Redis; about `seconds` per page size."""
    rows: list[Row] = []
    with ValkeyServer() as server:
        for kib, batch in _BATCHES.items():
            bench = RedisBench(server, kib * _KIB, batch, tcp=True, connections=_THREADS, wheels=wheels)
            try:
                sides = {who: (write, read, bench.clear) for who, (write, read) in bench.sides().items()}
                times = measure(sides, loops, seconds)
            finally:
                bench.close()
            rows += rows_of(f"{batch} x {kib} KiB", bench.bytes, times, ("plain", LMCACHE))
    return "Redis while another thread computes in Python, TCP, one connection", rows


def main() -> None:
    parser = argparse.ArgumentParser(description="I/O while another thread of the process computes in Python")
    parser.add_argument("--path", help="directory of the files if there is no RAM disk (default: a temporary one)")
    parser.add_argument("--seconds", type=float, default=8.0, help="per page size; there are six")
    parser.add_argument("--peer", help="directory with the unpacked wheels of SGLang and LMCache")
    options = parser.parse_args()
    with_malloc("lab.benchmarks.gil")
    cores = sorted(os.sched_getaffinity(0))
    thread, process = BusyThread(cores[0]), BusyProcess(cores[0])
    os.sched_setaffinity(0, cores[1:] or cores)  # threads and servers that are started from here inherit it
    loops: Loops = {"idle": process, "busy": thread}
    try:
        print_table(*file_rows(options.path, loops, options.seconds, options.peer))
        print_table(*redis_rows(loops, options.seconds, options.peer))
    finally:
        thread.close()
        process.close()


if __name__ == "__main__":
    main()

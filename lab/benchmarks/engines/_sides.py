"""Measures two stores in turns: seconds and processor time of each call."""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.benchmarks._table import Row, rate

# These settings keep freed memory: memory returned to the machine is touched again at only 0.5 GB/s.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
_MIB = 1 << 20
# Memory that the host has not yet given to the machine is touched well below this rate, other memory above it.
_COLD_GB_S = 0.7
_PIECE_MIB, _COLD_PIECES = 64, 4
# Storage counts as complete once its files have not changed for this long.
_QUIET_S, _QUIET_S_MAX = 1.0, 60.0


@dataclass
class Side:
    """One store: `write`, `read` and `remove` handle all pages, under the keys of round `number`."""

    write: Callable[[int], object]
    read: Callable[[int], object]
    remove: Callable[[int], object]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, what: str, work: Callable[[int], object], number: int) -> None:
        cpu_s, start_s = time.process_time(), time.perf_counter()
        work(number)
        self.seconds.setdefault(what, []).append(time.perf_counter() - start_s)
        self.cpu_s.setdefault(what, []).append(time.process_time() - cpu_s)


def with_malloc(module: str) -> None:
    """Restart as `python -m module` with the environment MALLOC, unless this process has it."""
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **MALLOC})


def measure_warm(sides: Sequence[Side], rounds: int) -> None:
    """Make rounds of a write and a read. Files are removed after each, so that the page cache reuses the same memory.
    The first round only warms up; the first side alternates."""
    for number in range(rounds + 1):
        for side in sides[:: 1 if number % 2 else -1]:
            side.measure("write", side.write, number)
            side.measure("read", side.read, number)
            side.remove(number)
        if not number:
            for side in sides:
                side.seconds.clear()
                side.cpu_s.clear()


def measure_cold(sides: Sequence[Side], rounds: int) -> None:
    """Make rounds of a write into memory that the host has not yet given: files stay until the end. Free memory that it
    has given is allocated first, up to 8 GiB; the first round, which is not counted, uses up the rest."""
    if not rounds:
        return
    taken = _take_warm_memory(8 << 30)
    for number in range(1, rounds + 2):
        for side in sides[:: 1 if number % 2 else -1]:
            side.measure("cold write", side.write, -number)
    for side in sides:
        del side.seconds["cold write"][0], side.cpu_s["cold write"][0]
        for number in range(1, rounds + 2):
            side.remove(-number)
    del taken


def _take_warm_memory(bytes_max: int) -> list[mmap.mmap]:
    """Allocate memory until it is slow to touch."""
    taken: list[mmap.mmap] = []
    piece, slow = b"\1" * _MIB, 0
    while slow < _COLD_PIECES and len(taken) * _PIECE_MIB * _MIB < bytes_max:
        memory = mmap.mmap(-1, _PIECE_MIB * _MIB)
        start_s = time.perf_counter()
        for at in range(0, len(memory), _MIB):
            memory[at : at + _MIB] = piece
        rate = len(memory) / (time.perf_counter() - start_s) / 1e9
        slow = slow + 1 if rate < _COLD_GB_S else 0
        taken.append(memory)
    return taken


def wait_until_stored(store: Path) -> None:
    """Wait until no file was added below `store` for a while."""
    end, seen, since = time.monotonic() + _QUIET_S_MAX, -1, time.monotonic()
    while time.monotonic() < end and time.monotonic() - since < _QUIET_S:
        found = sum(1 for path in store.rglob("*") if path.is_file())
        if found != seen:
            seen, since = found, time.monotonic()
        time.sleep(0.1)


def rows_of(label: str, ours: Side, other: Side, page_bytes: int, pages: int) -> list[Row]:
    """Return rows of rates, best and median, and processor time per page; a ratio above 1 means that ours is better."""
    rows = []
    for what, taken in ours.seconds.items():
        for kind, pick in (("best", min), ("median", statistics.median)):
            mine, theirs = pick(taken), pick(other.seconds[what])
            rows.append(Row(
                f"{what} {label}, {kind} of {len(taken)}", rate(page_bytes * pages, mine),
                rate(page_bytes * pages, theirs), theirs / mine,
            ))
        mine, theirs = (statistics.median(side.cpu_s[what]) / pages * 1e6 for side in (ours, other))
        what_cpu = f"{what} {label}, processor time a page"
        rows.append(Row(what_cpu, f"{mine:.0f} us", f"{theirs:.0f} us", theirs / mine))
    return rows

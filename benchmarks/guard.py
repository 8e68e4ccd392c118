"""The cost of the guard: calls to the file backend with and without it, and the check of a scheduler in each step.

    python -m benchmarks.guard

The store is in memory (tmpfs if there is one), so that only the calls cost time: no store is faster. The guard adds
about ten microseconds to a call of any size. ratio = with the guard : without it. For the check (the row "look"), the
reference is a limit, since a scheduler makes it twice per step.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hicache.backends.base import StorageBackend
from hicache.backends.file import FileBackend
from hicache.backends.guard import Direction, GuardedBackend, may_pass
from hicache.config import FileStorageOptions
from hicache.frame import FrameCodec

from ._table import Row, alternate, print_table, row

PAYLOAD_BYTES = 2 << 20
BATCH_PAGES = 16
RUNS = 100
LOOKS = 1000
# Bookkeeping may cost a few microseconds per step.
LOOK_LIMIT_US = 2.0
# The goal for a controller's usual read, a batch of large pages. Single lookups have no goal, as they move no bytes.
GOAL = 1.05
_MEMORY = "/dev/shm"


def run(folder: Path) -> list[Row]:
    """Return one row per verb, and that of the check."""
    codec = FrameCodec(bytes(32), PAYLOAD_BYTES)
    plain = FileBackend(codec, FileStorageOptions(path=folder / "store", io_threads=2))
    guard = GuardedBackend(plain)
    keys = [hashlib.sha256(number.to_bytes(4, "little")).digest() for number in range(BATCH_PAGES)]
    frames = [memoryview(bytearray(codec.frame_bytes)) for _ in keys]
    guard.batch_set(keys, frames, parent=None, deadline=_soon())
    guard.batch_get(keys, frames, deadline=_soon())
    verbs: dict[str, Callable[[StorageBackend], object]] = {
        f"lookup of {BATCH_PAGES} pages": lambda b: b.batch_exists(keys, deadline=_soon()),
        "read of 1 page of 2 MiB": lambda b: b.batch_get(keys[:1], frames[:1], deadline=_soon()),
        f"read of {BATCH_PAGES}": lambda b: b.batch_get(keys, frames, deadline=_soon()),
        f"store of {BATCH_PAGES} that are there": lambda b: b.batch_set(keys, frames, parent=None, deadline=_soon()),
    }
    rows = []
    for what, verb in verbs.items():
        times = alternate(RUNS, [lambda v=verb: v(guard), lambda v=verb: v(plain)])  # type: ignore[misc]
        rows.append(row(what, times, GOAL if what.startswith("read") else None))

    def look() -> None:
        for _ in range(LOOKS):
            may_pass(guard, Direction.READ)

    (looks,) = alternate(RUNS // 10, [look])
    rows.append(row("look of the scheduler", [[taken / LOOKS for taken in looks]], limit_us=LOOK_LIMIT_US))
    guard.close()
    return rows


def _soon() -> float:
    return time.monotonic() + 60.0


def main() -> None:
    """Command line."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None) as folder:
        rows = run(Path(folder))
    print_table("Guard (reference: the file backend alone; ratio = with the guard : without)", rows)


if __name__ == "__main__":
    main()

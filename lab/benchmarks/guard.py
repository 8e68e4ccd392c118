"""The cost of the shell: calls of a file store and of its driver alone, and the check of a scheduler in each step.

    python -m lab.benchmarks.guard

The store is in memory (tmpfs if there is one), so that only the calls cost time: no store is faster. The shell (guard,
checks, counts) adds some ten microseconds to a call of any size. ratio = store : its driver. For the check (the row
"look"), the reference is a limit, since a scheduler makes it twice per step.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hicache.backends.base import Direction
from hicache.backends.file import FileDriver
from hicache.backends.file.pages import Identity
from hicache.backends.pages import PageReads, PageWrites
from hicache.backends.store import Store
from hicache.config import FileStorageOptions
from hicache.frame import FrameCodec

from ._table import Row, alternate, print_table, reduced, row

PAYLOAD_BYTES = 2 << 20
BATCH_PAGES = 16
RUNS = 100
LOOKS = reduced(1000, 2)
# Bookkeeping may cost a few microseconds per step.
LOOK_LIMIT_US = 2.0
# The goal for a controller's usual read, a batch of large pages. Single lookups have no goal, as they move no bytes.
GOAL = 1.05
_MEMORY = "/dev/shm"


def run(folder: Path) -> list[Row]:
    """Return one row per verb, and that of the check."""
    codec = FrameCodec(bytes(32), PAYLOAD_BYTES)
    driver = FileDriver(codec, FileStorageOptions(path=folder / "store", io_threads=2))
    store = Store(driver, codec)
    keys = [hashlib.sha256(number.to_bytes(4, "little")).digest() for number in range(BATCH_PAGES)]
    frames = [memoryview(bytearray(codec.frame_bytes)) for _ in keys]

    def read(pages: int) -> None:
        reads: PageReads[Identity] = PageReads(codec, keys[:pages], frames[:pages], _soon())
        driver.read(reads)
        reads.finish()

    def write() -> None:
        writes = PageWrites(codec, keys, frames, None, _soon())
        driver.write(writes)
        writes.finish()

    store.batch_set(keys, frames, parent=None, deadline=_soon())
    store.batch_get(keys, frames, deadline=_soon())
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        f"lookup of {BATCH_PAGES} pages": (
            lambda: store.batch_exists(keys, deadline=_soon()),
            lambda: list(driver.find(codec.namespace, keys, _soon())),
        ),
        "read of 1 page of 2 MiB": (
            lambda: store.batch_get(keys[:1], frames[:1], deadline=_soon()), lambda: read(1),
        ),
        f"read of {BATCH_PAGES}": (
            lambda: store.batch_get(keys, frames, deadline=_soon()), lambda: read(BATCH_PAGES),
        ),
        f"store of {BATCH_PAGES} that are there": (
            lambda: store.batch_set(keys, frames, parent=None, deadline=_soon()), write,
        ),
    }
    rows = [
        row(what, alternate(RUNS, list(sides)), GOAL if what.startswith("read") else None)
        for what, sides in calls.items()
    ]

    def look() -> None:
        for _ in range(LOOKS):
            store.may_pass(Direction.READ)

    (looks,) = alternate(RUNS // 10, [look])
    rows.append(row("look of the scheduler", [[taken / LOOKS for taken in looks]], limit_us=LOOK_LIMIT_US))
    store.close()
    return rows


def _soon() -> float:
    return time.monotonic() + 60.0


def main() -> None:
    """Command line."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None) as folder:
        rows = run(Path(folder))
    print_table("Shell (reference: the driver alone; ratio = store : driver)", rows)


if __name__ == "__main__":
    main()

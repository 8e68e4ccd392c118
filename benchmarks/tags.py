"""The price of a page's tag: checking a frame, warm in the processor's cache and cold, against copying as many bytes.

    python -m benchmarks.tags

Warm is how the file backend checks, right after the read; the reference, a copy of the page in memory, is the least
that any backend has to do for it. ratio = time of the check : time of the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hicache.frame import FrameCodec, TagKind

from ._table import Row, print_table

KEY = bytes(32)
MAC_KEY = bytes(range(32))
COLD_BYTES = 256 << 20  # more than the last-level cache holds


def best(runs: int, work: Callable[[], object]) -> float:
    """Seconds of the best run."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def run() -> list[Row]:
    """One row per page size, tag and temperature."""
    rows = []
    for payload in (2 << 20, 8 << 20):
        for name, codec in (
            ("XXH3-128", FrameCodec(bytes(32), payload, tag=TagKind.XXH3_128)),
            ("AES-256-GMAC", FrameCodec(bytes(32), payload, mac_keys=[MAC_KEY])),
        ):
            count = COLD_BYTES // payload
            memory = np.ones((count, codec.frame_bytes), dtype=np.uint8)
            target = np.zeros_like(memory)
            frames = [memoryview(row.data) for row in memory]
            for frame in frames:
                codec.seal(KEY, frame)
            warm = best(50, lambda c=codec, f=frames[0]: c.check(KEY, f))  # type: ignore[misc]
            cold = best(5, lambda c=codec, fs=frames: [c.check(KEY, f) for f in fs]) / count  # type: ignore[misc]
            copy = best(5, lambda t=target, m=memory: np.copyto(t, m)) / count  # type: ignore[misc]
            for label, seconds in (("warm", warm), ("cold", cold)):
                what = f"{name}, {payload >> 20} MiB page, {label}"
                rows.append(Row(what, speed(payload, seconds), speed(payload, copy), seconds / copy))
    return rows


def speed(size: int, seconds: float) -> str:
    """As text."""
    return f"{size / seconds / 1e9:.1f} GB/s"


def main() -> None:
    """Command line."""
    print_table("Tags (reference: one copy of the page in memory; ratio = time of the check : time of the copy)", run())


if __name__ == "__main__":
    main()

"""Copies between L1 and L2: pages of 2 MiB and 8 MiB, in both directions, against one contiguous copy of equal size.

    python -m lab.benchmarks.copies [--device cuda]

The reference is a single large copy by one thread, measured in the same run; ratio = ours : reference speed. Results
are the best of many runs, with the median in brackets. `lab.benchmarks.copies_cuda` has the rows of a CUDA device.

The rows "verified" are loads with `integrity.verify: load`: a thread computes the tags of all frames, then the copy
starts. Their reference is the load without verification.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import numpy as np
import torch

from hicache.frame import FrameCodec
from hicache.geometry import KVGeometry
from hicache.tiers import HostPool, HostWindow, create_copy_engine, create_device_pool
from hicache.tiers.copy_cpu import copy_in_parts, copy_rows
from hicache.tiers.device import known_device

from ._table import Row, print_table, reduced

WAIT_S = 60.0
GOAL = 0.85
KEY = bytes(range(32))


def seconds(runs: int, work: Callable[[], object]) -> list[float]:
    """Return the seconds of each run."""
    times = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times[1:]


def speed(size: int, times: list[float]) -> str:
    """Return the best and median speed of moving `size` bytes, as text."""
    return f"{size / min(times) / 1e9:.1f} GB/s ({size / statistics.median(times) / 1e9:.1f})"


def rows_of(geometry: KVGeometry, pages: int, runs: int) -> list[Row]:
    """Return rows of both directions for one page size. `pages` are copied at once, in scattered order."""
    pool, host = create_device_pool(geometry, pages), HostPool(geometry, pages)
    copies = create_copy_engine(pool.blocks, HostWindow(host))
    order = np.random.default_rng(0).permutation(pages).astype(np.int32)
    size = pages * geometry.payload_bytes
    flat_host, flat_device = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def backup() -> None:
        copies.backup(order + 1, order[::-1].copy()).wait(WAIT_S)

    def load() -> None:
        copies.load(order, order + 1).wait(WAIT_S)

    rows = []
    for what, ours, target, source in (
        ("L1 to L2", backup, flat_host, flat_device),
        ("L2 to L1", load, flat_device, flat_host),
    ):
        times = seconds(runs, ours)
        limits = seconds(runs, partial(target.copy_, source))
        label = f"{what}, {geometry.payload_bytes >> 20} MiB pages"
        rows.append(Row(label, speed(size, times), speed(size, limits), min(limits) / min(times), GOAL))
    rows.append(verified_row(geometry, host, partial(seconds, runs), load))
    copies.close(WAIT_S)
    return rows


def verified_row(
    geometry: KVGeometry, host: HostPool, timed: Callable[[Callable[[], object]], list[float]], load: Callable[[], None]
) -> Row:
    """Return a row of a load with verification, beside one without."""
    codec = FrameCodec(bytes(32), geometry.payload_bytes)
    frames = host.frames(np.arange(host.pages, dtype=np.int32))
    for frame in frames:
        codec.seal(KEY, frame)

    def verified() -> None:
        if any(codec.check(KEY, frame) for frame in frames):
            raise SystemExit("a frame is not the page that was sealed")
        load()

    size = host.pages * geometry.payload_bytes
    times, plain = timed(verified), timed(load)
    label = f"L2 to L1, {geometry.payload_bytes >> 20} MiB pages, verified"
    return Row(label, speed(size, times), speed(size, plain), min(plain) / min(times))


def run(*, pages: int = 64, runs: int = 20) -> list[Row]:
    """Return all rows of the CPU: pages of 2 MiB and 8 MiB in the shape of Llama-3.1-8B."""
    torch.set_num_threads(1)  # for the reference: a copy engine on the CPU has one thread per direction
    shapes = [KVGeometry(layers=32, heads=heads, head_dim=128, page_size=64) for heads in (2, 8)]
    return [row for shape in shapes for row in rows_of(shape, reduced(pages, 2), reduced(runs))]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="a torch device, such as cuda or cuda:1")
    device = parser.parse_args().device
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; leave --device out for the copies of the CPU")
    if device.startswith("cuda"):
        from .copies_cuda import rows  # noqa: PLC0415  needs a device

        cuda = known_device(device)
        name = f"{torch.cuda.get_device_name(cuda)}, {datetime.now(UTC):%Y-%m-%d}"
        print_table(f"Copies between L1 and L2 ({name})", rows(cuda))
    else:
        how = "numpy: the native helper is not built" if copy_rows is copy_in_parts else "the native helper"
        print_table(f"Copies between L1 and L2 (CPU threads, {how}; reference: one contiguous copy)", run())


if __name__ == "__main__":
    main()

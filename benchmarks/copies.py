"""Copies between L1 and L2: pages of 2 MiB and 8 MiB, both directions, against one contiguous copy of as many bytes.

    python -m benchmarks.copies [--device cuda]

The reference is what the bus (on the CPU: the memory, to one thread) gives to a single large copy between pinned host
memory and the device, measured in the same run; ratio = ours : reference speed. Best of many runs, the median in
brackets.

The rows "verified" are loads with `integrity.verify: load`: a thread computes the tags of all frames, then the copy
starts. Their reference is the load without it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from hicache.frame import FrameCodec
from hicache.geometry import KVGeometry
from hicache.tiers import HostPool, HostWindow, create_copy_engine, create_device_pool

from ._table import Row, print_table

WAIT_S = 60.0
GOAL = 0.85
KEY = bytes(range(32))


def seconds(runs: int, device: torch.device, work: Callable[[], object]) -> list[float]:
    """Seconds of each run, to the end of the work on the device."""
    times = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return times[1:]


def speed(size: int, times: list[float]) -> str:
    """Best and median speed of moving `size` bytes."""
    return f"{size / min(times) / 1e9:.1f} GB/s ({size / statistics.median(times) / 1e9:.1f})"


def rows_of(geometry: KVGeometry, device: torch.device, pages: int, runs: int) -> list[Row]:
    """Both directions for one page size. `pages` are copied at once, in scattered order."""
    pool = create_device_pool(geometry, pages, device)
    host = HostPool(geometry, pages, pin=device if device.type == "cuda" else None)
    copies = create_copy_engine(pool.blocks, HostWindow(host))
    order = np.random.default_rng(0).permutation(pages).astype(np.int32)
    size = pages * geometry.payload_bytes
    flat_host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat_device = torch.zeros(size, dtype=torch.uint8, device=device)

    def backup() -> None:
        copies.backup(order + 1, order[::-1].copy()).wait(WAIT_S)

    def load() -> None:
        copies.load(order, order + 1).wait(WAIT_S)

    rows = []
    for what, ours, target, source in (
        ("L1 to L2", backup, flat_host, flat_device),
        ("L2 to L1", load, flat_device, flat_host),
    ):
        times = seconds(runs, device, ours)
        limits = seconds(runs, device, partial(target.copy_, source, non_blocking=True))
        label = f"{what}, {geometry.payload_bytes >> 20} MiB pages"
        rows.append(Row(label, speed(size, times), speed(size, limits), min(limits) / min(times), GOAL))
    rows.append(verified_row(geometry, host, partial(seconds, runs, device), load))
    copies.close(WAIT_S)
    return rows


def verified_row(
    geometry: KVGeometry, host: HostPool, timed: Callable[[Callable[[], object]], list[float]], load: Callable[[], None]
) -> Row:
    """A load whose frames are verified before, beside one without."""
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


def run(device_name: str = "cpu", *, pages: int = 64, runs: int = 20) -> list[Row]:
    """All rows: pages of 2 MiB and 8 MiB in the shape of Llama-3.1-8B."""
    torch.set_num_threads(1)  # of the reference on the CPU: a copy engine has one thread for each direction
    shapes = [KVGeometry(layers=32, heads=heads, head_dim=128, page_size=64) for heads in (2, 8)]
    return [row for shape in shapes for row in rows_of(shape, torch.device(device_name), pages, runs)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="a torch device, such as cuda or cuda:1")
    device = parser.parse_args().device
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU threads"
    print_table(f"Copies between L1 and L2 ({name}; reference: one contiguous copy)", run(device))


if __name__ == "__main__":
    main()

"""Copies between L1 and L2 on a CUDA device: both paths, alone, in both directions at once, and beside compute.

    python -m lab.benchmarks.copies --device cuda

1,000 pages of 1, 16 and 64 tokens, in the shapes of Llama-3.1-8B and DeepSeek-V3. The reference is one large copy
between pinned memory and the device in the same run, or two copies for both directions at once. ratio = ours :
reference speed. The goal is shown at the path that `transfer.path: auto` takes. The rows of compute are times: ratio =
limit : ours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from hicache.config import TransferConfig
from hicache.geometry import KVGeometry, KVLayout, PageShape, Piece
from hicache.tiers import HostPool, HostWindow, KVPool, Transfer, create_device_pool
from hicache.tiers.copy_cuda import CudaCopyEngine

from ._table import Row

PAGES = 1000
RUNS = 5
WAIT_S = 120.0
GOALS = {64: 0.9, 16: 0.8, 1: 0.5}  # by tokens of a page
SLOWED = {"direct": 0.9, "staged": 0.8}  # the share of its speed that a matrix product keeps during copies
SUBMIT_S = 1e-3
LAUNCH_S = 1e-3
FLAT_BYTES = 1 << 30
MATRIX = 8192


def shapes() -> Iterator[tuple[str, KVGeometry]]:
    """Yield the geometries of one rank, largest pages first."""
    for tokens in GOALS:
        yield "Llama-3.1-8B", KVGeometry(layers=32, heads=8, head_dim=128, page_size=tokens)
        yield "DeepSeek-V3", KVGeometry(layers=61, heads=1, head_dim=576, page_size=tokens, layout=KVLayout.MLA)


class Flat:
    """One large copy in each direction, each on its own stream.

    Its host memory is a pool of one page, on the same NUMA node as all pools.
    """

    def __init__(self, device: torch.device) -> None:
        page = PageShape(1, (Piece("flat", FLAT_BYTES),))
        self._device = [torch.zeros(FLAT_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
        self._pools = [HostPool(page, 1, pin=device) for _ in range(2)]
        self._host = [HostWindow(pool).rows[0, 0] for pool in self._pools]
        self._streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]  # type: ignore[no-untyped-call]

    def rate(self, *directions: str) -> float:
        """Return the bytes per second of all `directions` together, best of some runs."""
        return max(self._once(directions) for _ in range(RUNS))

    def _once(self, directions: tuple[str, ...]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for number, direction in enumerate(directions):
            with torch.cuda.stream(self._streams[number]):
                sides = self._device[number], self._host[number]
                target, source = sides if direction == "load" else sides[::-1]
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return len(directions) * FLAT_BYTES / (time.perf_counter() - begin)


class Side:
    """One path between the pools."""

    def __init__(self, pool: KVPool, host: HostPool, path: str) -> None:
        numbers = np.random.default_rng(0)
        self.pages = (numbers.permutation(PAGES) + 1).astype(np.int32)
        self.frames = numbers.permutation(PAGES).astype(np.int32)
        self.bytes = PAGES * host.payload_bytes
        self.copies = CudaCopyEngine(pool.blocks, HostWindow(host), TransferConfig(path=path))
        self.submits: list[float] = []

    def submit(self, direction: str) -> Transfer:
        begin = time.perf_counter()
        if direction == "load":
            transfer = self.copies.load(self.frames, self.pages)
        else:
            transfer = self.copies.backup(self.pages, self.frames)
        self.submits.append(time.perf_counter() - begin)
        return transfer

    def rate(self, *directions: str) -> float:
        """As `Flat.rate`."""
        return max(self._once(directions) for _ in range(RUNS))

    def _once(self, directions: tuple[str, ...]) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        transfers = [self.submit(direction) for direction in directions]
        for transfer in transfers:
            if not transfer.wait(WAIT_S) or transfer.error is not None:
                raise SystemExit(f"a copy failed: {transfer.error}")
        return len(directions) * self.bytes / (time.perf_counter() - begin)


def rows(device: torch.device) -> list[Row]:
    """Return all rows."""
    torch.cuda.set_device(device)
    flat, found = Flat(device), []
    limits = {directions: flat.rate(*directions) for directions in (("load",), ("backup",), ("load", "backup"))}
    for name, geometry in shapes():
        with pools(geometry, device) as (pool, host):
            chosen = CudaCopyEngine(pool.blocks, HostWindow(host))
            for path in ("direct", "staged"):
                side = Side(pool, host, path)
                goal = GOALS[geometry.page_size] if path == chosen.path else None
                label = f"{name}, page of {geometry.page_size}, {path}"
                for directions, limit in limits.items():
                    rate = side.rate(*directions)
                    what = f"{label}: {' and '.join(directions)}"
                    found.append(Row(what, f"{rate / 1e9:.1f} GB/s", f"{limit / 1e9:.1f} GB/s", rate / limit, goal))
                submit_s = statistics.median(side.submits)
                found.append(Row(
                    f"{label}: submit {PAGES} pages", f"{submit_s * 1e6:.0f} us", f"{SUBMIT_S * 1e6:.0f} us",
                    SUBMIT_S / submit_s, 1.0,
                ))
                found += compute_rows(label, side, geometry.layers, SLOWED[path], is_chosen=path == chosen.path)
                side.copies.close(WAIT_S)
            chosen.close(WAIT_S)
    return found


@contextmanager
def pools(geometry: KVGeometry, device: torch.device) -> Iterator[tuple[KVPool, HostPool]]:
    """L1 and L2 of `PAGES` pages, freed at the end."""
    yield create_device_pool(geometry, PAGES, device), HostPool(geometry, PAGES, pin=device)
    torch.cuda.empty_cache()


def compute_rows(label: str, side: Side, layers: int, kept: float, *, is_chosen: bool) -> list[Row]:
    """Return rows of a forward pass that waits for a load layer by layer, of a matrix product during copies in both
    directions, and of the longest launch of such a product: the driver makes it wait for the submission of copies."""
    a, b = (torch.randn(MATRIX, MATRIX, device=side.copies.blocks.device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)

    def compute(products: int) -> float:
        longest = 0.0
        for _ in range(products):
            begin = time.perf_counter()
            torch.mm(a, b, out=product)
            longest = max(longest, time.perf_counter() - begin)
        return longest

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(RUNS + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times[1:])

    load_s = side.bytes / side.rate("load")
    products = max(1, round(load_s / layers / seconds(lambda: compute(1))))
    compute_s = seconds(lambda: compute(products * layers))

    def forward() -> None:
        transfer = side.submit("load")
        for layer in range(layers):
            transfer.wait_layer(layer, torch.cuda.current_stream())
            compute(products)

    forward_s = seconds(forward)
    limit_s = 1.05 * max(load_s, compute_s) + max(load_s, compute_s) / layers
    goal = 1.0 if is_chosen else None
    found = [Row(
        f"{label}: forward behind a load", f"{forward_s * 1e3:.1f} ms", f"{limit_s * 1e3:.1f} ms", limit_s / forward_s,
        goal,
    )]
    count = max(1, round(0.5 * load_s / (compute_s / (products * layers))))
    alone_s = seconds(lambda: compute(count))
    beside, launches = [], []
    for _ in range(RUNS):
        transfers = [side.submit("load"), side.submit("backup")]
        transfers[0].wait_layer(0)  # both copies have started
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        launches.append(compute(count))
        ended.record()
        for transfer in transfers:
            transfer.wait(WAIT_S)
        torch.cuda.synchronize()
        beside.append(begun.elapsed_time(ended) / 1e3)
    beside_s = statistics.median(beside)
    found.append(Row(
        f"{label}: matrix product beside copies", f"{beside_s * 1e3:.1f} ms", f"{alone_s * 1e3:.1f} ms",
        alone_s / beside_s, kept if is_chosen else None,
    ))
    launch_s = statistics.median(launches)
    found.append(Row(
        f"{label}: longest launch beside copies", f"{launch_s * 1e3:.2f} ms", f"{LAUNCH_S * 1e3:.2f} ms",
        LAUNCH_S / launch_s, goal,
    ))
    return found

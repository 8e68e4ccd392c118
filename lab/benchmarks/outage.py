"""The cost of a storage outage for the scheduler: its steps while the store hangs, beside steps with a good store.

    python -m lab.benchmarks.outage

Two equal caches run in turns, each with a store behind a guard. From the first step on, every call of one store hangs
past all deadlines, as with a stopped server. A step polls, looks for requests whose prefetch is done, admits one, ends
it, and sometimes begins the prefetch of a new prompt. All prompts are new, so both caches look up, copy and store
the same pages. The steps include those before the breaker opens, and those after it with probes. The limit is 1 ms more
for the slowest step in a hundred.
"""

from __future__ import annotations

import array
import gc
import itertools
import logging
import statistics
import time

import numpy as np

from hicache.backends.memory import MemoryDriver
from hicache.backends.store import Store
from hicache.cache import HiRadixCache
from hicache.config import HiCacheConfig, PrefetchConfig, TransferConfig
from hicache.controller import HiCacheController
from hicache.frame import FrameCodec
from hicache.geometry import KVGeometry
from hicache.keys import RadixKey
from hicache.tiers import HostPool, HostWindow, create_copy_engine, create_device_pool
from hicache_lab.faults import FaultyDriver

from ._table import Row, print_table, reduced, row

GEOMETRY = KVGeometry(layers=2, heads=1, head_dim=8, page_size=64)
RUN_PAGES = 8  # per request
REQUESTS = 128  # L1 has room for so many
ROUNDS = reduced(3)
STEPS = reduced(2000, 100)  # per side in a round
STEPS_PER_REQUEST = 2
# The pause after a step, in which workers run; an engine's step takes longer.
PAUSE_S = 0.001
# Short, so that calls become overdue, the breaker opens, and probes hang during the run.
DEADLINE_S = 0.25
LIMIT_US = 1000.0
WAIT_S = 10.0


class Side:
    """A cache over a store, and its scheduler."""

    def __init__(self) -> None:
        pages = REQUESTS * RUN_PAGES
        device, host = create_device_pool(GEOMETRY, pages), HostPool(GEOMETRY, 2 * pages)
        self.faults = FaultyDriver(MemoryDriver())
        self.store = Store(self.faults, FrameCodec(bytes(32), GEOMETRY.payload_bytes))
        config = HiCacheConfig(
            prefetch=PrefetchConfig(timeout_base=DEADLINE_S),
            transfer=TransferConfig(store_host_share=64 * RUN_PAGES / host.pages, storage_deadline=DEADLINE_S),
        )
        controller = HiCacheController(host, create_copy_engine(device.blocks, HostWindow(host)), self.store, config)
        self.cache = HiRadixCache(device, host, controller)
        self.taken_s: list[float] = []
        self.ended = 0
        self._waiting: dict[str, RadixKey] = {}
        self._number = itertools.count()

    def work(self, steps: int) -> None:
        """Make `steps` steps, with pauses."""
        for _ in range(steps):
            self.step()
            time.sleep(PAUSE_S)

    def step(self) -> None:
        """Make one timed step of the scheduler."""
        number = next(self._number)
        key = _prompt(number) if number % STEPS_PER_REQUEST == 0 else None
        began_s = time.perf_counter()
        self.cache.poll()
        ready = next((rid for rid in self._waiting if self.cache.check_prefetch_progress(rid)), None)
        if ready is not None:
            self._serve(ready)
        if key is not None:
            self.cache.prefetch_from_storage(str(number), key)
            self._waiting[str(number)] = key
        self.taken_s.append(time.perf_counter() - began_s)

    def _serve(self, rid: str) -> None:
        request = self.cache.begin_request(rid, self._waiting[rid])
        self.cache.start_loading()
        if request is not None:  # otherwise there is room in the next step
            self.cache.cache_finished_req(request, self._waiting.pop(rid))
            self.ended += 1

    def close(self) -> None:
        """Release the hanging calls, and close the cache."""
        self.faults.release()
        assert self.cache.drain(WAIT_S)
        assert self.cache.close()


def _prompt(number: int) -> RadixKey:
    tokens = np.random.default_rng(number).integers(0, 128_000, RUN_PAGES * GEOMETRY.page_size + 1)
    return RadixKey.of(array.array("q", tokens.tolist()))


def run() -> list[Row]:
    """Return all rows."""
    stalled: list[list[float]] = []
    healthy: list[list[float]] = []
    opens: list[int] = []
    ended = [0, 0]
    for number in range(ROUNDS):
        sides = Side(), Side()
        for side in sides:
            side.work(STEPS // 10)
            side.taken_s.clear()
        sides[0].faults.hang()
        for side in sides if number % 2 else reversed(sides):
            gc.disable()
            side.work(STEPS)
            gc.enable()
        stalled.append(sides[0].taken_s)
        healthy.append(sides[1].taken_s)
        opens.append(sum(breaker.opens for breaker in sides[0].store.guard_statistics().breakers.values()))
        for place, side in enumerate(sides):
            ended[place] += side.ended
            side.close()
    rows = [_row(percent, stalled, healthy) for percent in (50, 99)]
    added_us = 1e6 * (statistics.median(_percentiles(stalled, 99)) - statistics.median(_percentiles(healthy, 99)))
    rows.append(Row("added to the 99th percentile", f"{added_us:.1f} us", f"{LIMIT_US:.0f} us", added_us / LIMIT_US, 1))
    rows.append(Row("requests served", str(ended[0]), str(ended[1]), ended[1] / ended[0]))
    rows.append(Row("times that a breaker opened, per round", f"{min(opens)} to {max(opens)}"))
    return rows


def _row(percent: int, ours: list[list[float]], reference: list[list[float]]) -> Row:
    return row(f"step, {percent}th percentile", [_percentiles(side, percent) for side in (ours, reference)], None)


def _percentiles(rounds: list[list[float]], percent: int) -> list[float]:
    return [statistics.quantiles(times, n=100)[percent - 1] for times in rounds]


def main() -> None:
    """Command line."""
    logging.getLogger("hicache").setLevel(logging.CRITICAL)  # hanging workers are expected here
    print_table(
        "Outage (ours: the store hangs; reference: a good store, or the limit; best of all rounds, median in brackets)",
        run(),
    )


if __name__ == "__main__":
    main()

"""The cost of the cache for the scheduler: a `poll`, and all calls for a request.

    python -m lab.benchmarks.poll [TRACE]

*Poll*: idle, with 64 operations in flight, and when all 64 end at once. The operations are 32 reads from storage, 16
stores and 16 copies to L2, of a real cache and controller; the benchmark holds and releases storage and the copy
engine. The limit is 200 us.

*Request*: the processor time of the scheduler's thread in calls of the cache, per request of a replay with the default
tiers (docs/replay.md). The limit is 1 ms for 99 of 100 requests of the public conversation trace. Without TRACE a
synthetic trace is replayed. Its mean with `eviction_policy: adaptive` is compared with that of `lru`, and with the
default `explain.pages` with that of 0.
"""

from __future__ import annotations

import argparse
import array
import threading
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from hicache.backends.base import GetOutcome
from hicache.backends.memory import MemoryDriver
from hicache.backends.pages import PageReads, PageWrites
from hicache.backends.store import UNGUARDED, Store
from hicache.cache import HiRadixCache
from hicache.config import HiCacheConfig, PrefetchConfig
from hicache.controller import HiCacheController
from hicache.errors import TransferError
from hicache.frame import FrameCodec
from hicache.geometry import KVGeometry
from hicache.keys import RadixKey, page_keys
from hicache.tiers import CopyEngine, EngineBlocks, Fence, HostPool, HostWindow, Transfer, create_device_pool
from hicache.types import PageIds

from ._table import Row, print_table, reduced, row
from .hits import replayed

GEOMETRY = KVGeometry(layers=2, heads=1, head_dim=8, page_size=64)
READS, STORES, COPIES = 32, 16, 16
RUN_PAGES = 8  # per operation
ROUNDS = reduced(30)
LIMIT_US, IDLE_LIMIT_US = 200.0, 20.0
WAIT_S = 10.0
REPLAYED_REQUESTS = reduced(600, 20)
REQUEST_LIMIT_US = 1000.0
PAIRED_REQUESTS, PAIRED_ROUNDS = reduced(600, 20), reduced(5)
# Room for most of what is used again, so that both policies evict the same pages, and little room.
ROOMY_TOKENS, FULL_TOKENS = 1 << 20, 1 << 16
EVICTED_PAGES = 131_072  # the default of `explain.pages`


class HeldDriver(MemoryDriver):
    """A driver whose reads and writes wait for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def read(self, pages: PageReads[bytes]) -> None:
        self.go.wait()
        super().read(pages)

    def write(self, pages: PageWrites) -> None:
        self.go.wait()
        super().write(pages)


class HeldTransfer(Transfer):
    """A transfer that is done when its engine releases it."""

    def __init__(self, go: threading.Event) -> None:
        self._go = go

    @property
    def error(self) -> TransferError | None:
        return None

    @property
    def seconds(self) -> float | None:
        return None

    def done(self) -> bool:
        return self._go.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._go.wait(timeout_s)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        self._go.wait()


class HeldCopies(CopyEngine):
    """A copy engine that moves nothing; copies wait for the event that was current when they began."""

    def __init__(self, blocks: EngineBlocks, window: HostWindow) -> None:
        super().__init__(blocks, window)
        self.go = threading.Event()

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        return HeldTransfer(self.go)

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        return HeldTransfer(self.go)

    def close(self, timeout_s: float) -> bool:
        return True


def prompt(number: int) -> RadixKey:
    """Return the key of `RUN_PAGES` whole pages, plus one token that is always computed."""
    tokens = np.random.default_rng(number).integers(0, 128_000, RUN_PAGES * GEOMETRY.page_size + 1)
    return RadixKey.of(array.array("q", tokens.tolist()))


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, for at most `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the operations did not start in time")
        time.sleep(0.0005)


class Load:
    """A cache with 64 operations in flight."""

    def __init__(self) -> None:
        pages = (READS + STORES + COPIES) * RUN_PAGES
        device, host = create_device_pool(GEOMETRY, pages + 1), HostPool(GEOMETRY, 4 * pages)
        self.driver = HeldDriver()
        self.store = Store(self.driver, FrameCodec(bytes(32), GEOMETRY.payload_bytes), UNGUARDED)
        self.copies = HeldCopies(device.blocks, HostWindow(host))
        config = HiCacheConfig(prefetch=PrefetchConfig(timeout_base=60.0))
        self.cache = HiRadixCache(device, host, HiCacheController(host, self.copies, self.store, config))
        self._fill_storage(host)
        self.driver.go.clear()
        self._insert(range(READS, READS + STORES))
        self.copies.go.set()
        self.cache.poll()  # handles the finished copies, which starts the stores
        self.copies.go = threading.Event()
        for number in range(READS):
            assert self.cache.prefetch_from_storage(str(number), prompt(number))
        until(self._all_found)
        self._insert(range(READS + STORES, READS + STORES + COPIES))

    def _fill_storage(self, host: HostPool) -> None:
        frame = [memoryview(bytearray(host.frame_bytes)) for _ in range(RUN_PAGES)]
        for number in range(READS):
            keys = page_keys(prompt(number).tokens, GEOMETRY.page_size)
            self.store.batch_set(keys, frame, parent=None, deadline=time.monotonic() + WAIT_S)

    def _insert(self, numbers: range) -> None:
        for number in numbers:
            key, pages = prompt(number), self.cache.page_source.alloc(RUN_PAGES)
            assert pages is not None
            self.cache.insert(key, pages)
        self.cache.poll()  # starts the copies

    def _all_found(self) -> bool:
        self.cache.poll()
        return self.cache.controller.read_pages == READS * RUN_PAGES

    def let_go(self) -> None:
        """End all operations, except for their acks."""
        statistics_of = self.cache.controller.statistics
        self.driver.go.set()
        until(lambda: statistics_of().backend.gets.get(GetOutcome.HIT) == READS * RUN_PAGES)  # type: ignore[union-attr]
        until(lambda: not (statistics_of().queues.reads or statistics_of().queues.backup))
        time.sleep(0.002)  # the last ack follows its count
        self.copies.go.set()


def timed(poll: Callable[[], object]) -> float:
    """Return the seconds of one poll."""
    begin = time.perf_counter()
    poll()
    return time.perf_counter() - begin


def run() -> list[Row]:
    """Return all rows of the first table."""
    idle: list[float] = []
    under_way: list[float] = []
    at_once: list[float] = []
    for _ in range(ROUNDS):
        load = Load()
        under_way += [timed(load.cache.poll) for _ in range(200)]
        load.let_go()
        at_once.append(timed(load.cache.poll))
        load.cache.drain(WAIT_S)
        idle += [timed(load.cache.poll) for _ in range(200)]
        assert load.cache.close()
    return [
        row("poll, nothing to do", [idle], limit_us=IDLE_LIMIT_US),
        row("poll, 64 operations in flight", [under_way], limit_us=LIMIT_US),
        row("poll, 64 operations ended since", [at_once], limit_us=LIMIT_US),
    ]


def request_rows(trace: str | None) -> list[Row]:
    """Return rows of the scheduler's processor time per request of a replay."""
    times = replayed(trace, REPLAYED_REQUESTS, virtual=False)["scheduler"]["request_cpu"]
    return [
        Row(f"request of a replay, {percentile}th percentile", f"{times[field]:.0f} us", f"{REQUEST_LIMIT_US:.0f} us",
            times[field] / REQUEST_LIMIT_US, 1.0)
        for percentile, field in ((50, "p50_us"), (99, "p99_us"))
    ]


def paired_rows(trace: str | None, name: str, ours: object, reference: object, tokens: int, goal: float) -> list[Row]:
    """Return the row of two values of the entry `name`, in runs of both in turns, with `tokens` on L1 and 4 times as
    many on L2."""
    means: list[list[float]] = [[], []]
    for _ in range(PAIRED_ROUNDS):
        for value, found in zip((ours, reference), means, strict=True):
            times = replayed(
                trace, PAIRED_REQUESTS, "", virtual=False, storage="null", device__tokens=tokens,
                host__tokens=4 * tokens, **{"eviction_policy": "lru", name: value},
            )["scheduler"]["request_cpu"]
            found.append(times["total_us"] / times["count"])
    our_us, reference_us = map(median, means)
    return [Row("request of a replay, mean", f"{our_us:.0f} us", f"{reference_us:.0f} us", our_us / reference_us, goal)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="The cost of the cache for the scheduler")
    parser.add_argument("trace", nargs="?", help="the public conversation trace (default: a synthetic one)")
    trace = parser.parse_args().trace
    print_table("Poll (the limit as reference; best of all runs, median in brackets)", run())
    print_table("Processor time of the scheduler per request (the limit as reference)", request_rows(trace))
    print_table("Processor time of the scheduler per request with adaptive eviction (lru as reference)",
                paired_rows(trace, "eviction_policy", "adaptive", "lru", ROOMY_TOKENS, 1.05))
    print_table("Processor time of the scheduler per request with the memory of evicted pages (none as reference)",
                paired_rows(trace, "explain__pages", EVICTED_PAGES, 0, FULL_TOKENS, 1.02))


if __name__ == "__main__":
    main()

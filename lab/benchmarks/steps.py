"""The steps of the scheduler while the tree grows to a million nodes, and while it churns at that size.

    python -m lab.benchmarks.steps [--numpy]

The cache is a real one with L1 and L2, without storage; its copies move no bytes. A prompt has one of a thousand first
pages and 8 pages of its own. Matches of its heads make each page a node. *Grow*: until L1 is full. *Churn*: after that,
as many prompts as fill L1 half again; each evicts as many pages as it needs. A step is one call of the scheduler:

    match   of a prompt, or of one of its heads
    evict   `alloc` of the pages of a prompt, which evicts once L1 is full
    insert  of the prompt
    poll    after each prompt

Times are those of the processor in the scheduler's thread, including the garbage collector, from which the objects of
the imported packages are frozen, as vLLM does. The reference is the limit of 10 ms for the 99.9th percentile. `--numpy`
disables our native helper.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from hicache import ghosts
from hicache.cache import HiRadixCache
from hicache.config import HiCacheConfig
from hicache.controller import HiCacheController
from hicache.geometry import KVGeometry
from hicache.keys import RadixKey, chain
from hicache.radix import eviction, prefixes, stored
from hicache.tiers import HostPool, HostWindow, create_device_pool

from ._table import Row, print_table, reduced
from .poll import HeldCopies

GEOMETRY = KVGeometry(layers=1, heads=1, head_dim=1, page_size=16)
NODES = reduced(1_000_000, 2_000)
HOST_PAGES = reduced(100_000, 200)
STEMS, OWN_PAGES = reduced(1_000, 10), 8
LIMIT_MS = 10.0

T = TypeVar("T")


class Scheduler:
    """A cache, and the times of the steps on it in milliseconds, by name."""

    def __init__(self) -> None:
        device, host = create_device_pool(GEOMETRY, NODES + 1), HostPool(GEOMETRY, HOST_PAGES)
        copies = HeldCopies(device.blocks, HostWindow(host))
        copies.go.set()
        config = HiCacheConfig(page_size=GEOMETRY.page_size)
        self.cache = HiRadixCache(device, host, HiCacheController(host, copies, None, config))
        self.times_ms: dict[str, list[float]] = {}
        self._random = np.random.default_rng(1)
        self._stems = self._random.integers(0, 128_000, (STEMS, GEOMETRY.page_size))

    def serve(self, prompts: int) -> None:
        """Serve so many prompts, and note the times of their steps."""
        cache, source = self.cache, self.cache.page_source
        self.times_ms = {name: [] for name in ("match", "evict", "insert", "poll")}
        for _ in range(prompts):
            own = self._random.integers(0, 128_000, OWN_PAGES * GEOMETRY.page_size)
            key = RadixKey.of(np.concatenate((self._stems[self._random.integers(STEMS)], own)))
            self._step("match", cache.match_prefix, key)
            while (pages := self._step("evict", source.alloc, 1 + OWN_PAGES)) is None:
                self._step("poll", cache.poll)  # ends the copies of the victims to L2
            inserted = self._step("insert", cache.insert, key, pages)
            source.free(pages[: inserted.present_pages])
            for end in range(1, 1 + OWN_PAGES):
                self._step("match", cache.match_prefix, key.head(end * GEOMETRY.page_size))
            self._step("poll", cache.poll)

    def _step(self, name: str, step: Callable[..., T], *arguments: object) -> T:
        begin = time.thread_time()
        result = step(*arguments)
        self.times_ms[name].append((time.thread_time() - begin) * 1e3)
        return result

    def rows(self, what: str) -> Iterator[Row]:
        """Yield a row per kind of step."""
        for name, times in self.times_ms.items():
            usual, high, highest, longest = np.percentile(times, (50, 99, 99.9, 100)).tolist()
            text = f"{usual:.3f} ms, {high:.2f}, {highest:.2f}, {longest:.1f}"
            yield Row(f"{what}: {name}", text, f"{LIMIT_MS:.0f} ms", highest / LIMIT_MS, 1.0)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numpy", action="store_true", help="disable our native helper")
    if parser.parse_args().numpy:
        for module in (chain, eviction, ghosts, prefixes, stored):
            vars(module)["untrack"] = id
    scheduler = Scheduler()
    gc.collect()
    gc.freeze()
    rows: list[Row] = []
    for what, pages in (("grow", NODES), ("churn", NODES // 2)):
        scheduler.serve(pages // OWN_PAGES)
        rows += scheduler.rows(what)
    nodes = f"{scheduler.cache.tree.node_count:,}"
    print_table(f"Steps of the scheduler, {nodes} nodes at the end (p50, p99, p99.9, longest; ratio of p99.9)", rows)
    scheduler.cache.close()


if __name__ == "__main__":
    main()

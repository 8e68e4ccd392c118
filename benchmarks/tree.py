"""The scheduler thread's own work: page keys, match, insert, eviction, an idle poll, and bytes per cached page.

    python -m benchmarks.tree [--peer DIR]

With `--peer`, SGLang's native tree core runs side by side on the same prompts (see `benchmarks._native`); its time is
the reference. Each figure is the best of many runs, the two sides taking turns; the median is in brackets.
"""

from __future__ import annotations

import argparse
import array
import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hicache.backends.memory import MemoryBackend
from hicache.cache import HiRadixCache
from hicache.controller import HiCacheController
from hicache.frame import FrameCodec
from hicache.geometry import KVGeometry
from hicache.keys import RadixKey, page_keys, token_bytes
from hicache.radix import POLICIES, RadixTree
from hicache.tiers import HostPool, create_copy_engine, create_device_pool

from ._native import NativeTree, load_bindings
from ._table import Row, print_table

PAGE = 64
PROMPT = 32_768
TREE_PAGES = 100_000


def tokens(count: int, seed: int) -> array.array[int]:
    """Random token ids as an engine holds them."""
    return array.array("q", np.random.default_rng(seed).integers(0, 128_000, count).tolist())


def alternate(runs: int, *sides: Callable[[], object]) -> list[list[float]]:
    """Seconds of each run of each side, taking turns; the collector is off meanwhile."""
    times: list[list[float]] = [[] for _ in sides]
    gc.disable()
    for _ in range(runs):
        for side, taken in zip(sides, times, strict=True):
            begin = time.perf_counter()
            side()
            taken.append(time.perf_counter() - begin)
    gc.enable()
    return times


def row(what: str, times: list[list[float]], goal: float | None) -> Row:
    """Ours first, the reference second if there is one. A ratio above 1 means that we are slower."""
    text = [f"{min(t) * 1e6:.1f} us ({statistics.median(t) * 1e6:.1f})" for t in times]
    ratio = min(times[0]) / min(times[1]) if len(times) > 1 else None
    return Row(what, text[0], text[1] if len(times) > 1 else None, ratio, goal)


class Pair:
    """Our tree and, if there is one, the peer's, with the same contents."""

    def __init__(self, bindings: Any) -> None:
        self.ours = RadixTree(PAGE, POLICIES["lru"]())
        self.peer = NativeTree(bindings, PAGE) if bindings else None
        self._next_page = 1

    def insert(self, prompt: array.array[int]) -> None:
        """Into both, untimed."""
        for side in self.inserts(prompt):
            side()

    def inserts(self, prompt: array.array[int]) -> list[Callable[[], object]]:
        """One insert per side."""
        count = len(prompt) // PAGE
        pages = np.arange(self._next_page, self._next_page + count, dtype=np.int32)
        slots = torch.arange(self._next_page * PAGE, (self._next_page + count) * PAGE)
        self._next_page += count
        sides: list[Callable[[], object]] = [lambda: self.ours.insert(RadixKey.of(prompt), pages)]
        if self.peer is not None:
            peer = self.peer
            sides.append(lambda: peer.insert(prompt, slots))
        return sides

    def matches(self, prompt: array.array[int]) -> list[Callable[[], object]]:
        """One match per side, from the engine's array to the answer."""
        sides: list[Callable[[], object]] = [lambda: self.ours.match(RadixKey.of(prompt))]
        if self.peer is not None:
            peer = self.peer
            sides.append(lambda: peer.match(prompt))
        return sides


def key_rows(bindings: Any) -> list[Row]:
    """Page keys of a 128k-token prompt."""
    prompt = tokens(131_072, 1)
    sides: list[Callable[[], object]] = [lambda: page_keys(token_bytes(prompt), PAGE)]
    if bindings:
        sides.append(lambda: bindings.get_hash_str(prompt, None, PAGE))
        assert [key.hex() for key in page_keys(token_bytes(prompt), PAGE)] == bindings.get_hash_str(prompt, None, PAGE)
    return [row("page keys of 128k tokens", alternate(60, *sides), 1.4)]


def tree_rows(bindings: Any) -> list[Row]:
    """Match and insert in a tree of 100,000 pages."""
    pair = Pair(bindings)
    numbers = random.Random(2)
    for seed in range(TREE_PAGES * PAGE // PROMPT):
        pair.insert(tokens(PROMPT, 1000 + seed))
    flat = tokens(PROMPT, 7)
    pair.insert(flat)
    deep = tokens(PROMPT, 8)
    for cut in sorted(numbers.sample(range(1, PROMPT // PAGE), 47)):
        pair.insert(deep[: cut * PAGE])
    pair.insert(deep)
    rows = [
        row("match 32k cached tokens, 1 node", alternate(300, *pair.matches(flat)), 2.0),
        row("match 32k cached tokens, 48 nodes", alternate(300, *pair.matches(deep)), 2.0),
    ]
    inserts = [alternate(1, *pair.inserts(tokens(PROMPT, 5000 + seed))) for seed in range(60)]
    times = [[run[side][0] for run in inserts] for side in range(len(inserts[0]))]
    rows.append(row("insert 32k new tokens", times, 2.0))
    return rows


def eviction_rows(bindings: Any) -> list[Row]:
    """Evicting 64 pages among many leaves of one page each."""
    rows = []
    for leaves in (1_000, 10_000, 100_000):
        pair = Pair(bindings)
        numbers = np.random.default_rng(leaves)
        stem = tokens(PAGE, 9)
        ids = numbers.permutation(1 << 20)[:leaves]
        for unique in ids.tolist():
            pair.insert(stem + array.array("q", [unique] * PAGE))
        sides: list[Callable[[], object]] = [lambda p=pair: p.ours.evict_device(64)]  # type: ignore[misc]
        if pair.peer is not None:
            sides.append(lambda p=pair: p.peer.evict(64 * PAGE))  # type: ignore[misc]
        rows.append(row(f"evict 64 of {leaves:,} leaves", alternate(10, *sides), None if leaves < 10_000 else 1.0))
    return rows


def poll_row() -> Row:
    """One poll with nothing to do, storage attached."""
    shape = KVGeometry(layers=2, heads=1, head_dim=8, page_size=PAGE)
    device, host = create_device_pool(shape, 16), HostPool(shape, 16)
    backend = MemoryBackend(FrameCodec(bytes(32), shape.payload_bytes))
    cache = HiRadixCache(device, host, HiCacheController(host, create_copy_engine(device, host), backend))
    times = alternate(20_000, cache.poll)
    cache.close()
    return Row("idle poll", f"{min(times[0]) * 1e6:.2f} us ({statistics.median(times[0]) * 1e6:.2f})", "20 us",
               statistics.median(times[0]) / 20e-6, 1.0)  # fmt: skip


def memory_rows() -> list[Row]:
    """Bytes of bookkeeping per cached page: keys, page ids of L1 and L2, storage keys, nodes, queue entries."""
    rows = []
    for what, pages_per_node, count in (("one node per page", 1, 20_000), ("512 pages per node", 512, 40)):
        prompts = [tokens(PAGE * pages_per_node, 100 + i) for i in range(count)]
        tracemalloc.start()
        tree = RadixTree(PAGE, POLICIES["lru"]())
        for i, prompt in enumerate(prompts):
            ids = np.arange(i * pages_per_node, (i + 1) * pages_per_node, dtype=np.int32)
            node = tree.insert(RadixKey.of(prompt), ids).node
            tree.page_keys(node)
            tree.accept_backup(node, ids)
        size = tracemalloc.get_traced_memory()[0] / (count * pages_per_node)
        tracemalloc.stop()
        rows.append(Row(f"bookkeeping per page, {what}", f"{size:.0f} B", "1024 B", size / 1024, 1.0))
    return rows


def run(peer: Path | None = None) -> list[Row]:
    """All rows; the reference is the peer at `peer`, the unpacked wheel, if given."""
    bindings = load_bindings(peer) if peer else None
    return [
        *key_rows(bindings), *tree_rows(bindings), *eviction_rows(bindings), poll_row(), *memory_rows(),
    ]  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="directory with SGLang's unpacked wheel")
    arguments = parser.parse_args()
    peer = "SGLang's native core" if arguments.peer else "none (give --peer)"
    print_table(f"Tree (page size {PAGE}; reference: {peer}; ratio = ours : reference time)", run(arguments.peer))


if __name__ == "__main__":
    main()

"""The tree's own work on the scheduler thread: page keys, match, insert, eviction, and bytes per cached page.

    python -m lab.benchmarks.tree [--peer DIR] [--numpy]

With `--peer`, SGLang's native tree core runs on the same prompts in turns with ours (see `lab.benchmarks._native`); its
time is the reference. Each result is the best of many runs, with the median in brackets. Memory is as in a process that
has served for a while: both sides allocate memory that was used before. `--numpy` disables our native helper.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hicache.cache.recorder import EventRecorder
from hicache.events import EventStream
from hicache.keys import RadixKey, chain, page_keys, token_bytes, token_ids
from hicache.radix import POLICIES, RadixTree
from hicache.tiers import device, token_slots

from ._native import NativeTree, load_bindings
from ._table import Row, Sides, alternate, print_table, reduced, row

PAGE_SIZES = (16, 64)
PROMPT = 32_768
TREE_PAGES = reduced(100_000, 2_000)
LONG_PROMPT = reduced(1 << 20, 1 << 13)  # with pages of one token
DEEP = 48  # nodes of the deep prompt
LEAVES = (1_000, 10_000, 100_000)[: reduced(3)]
EVENT_BYTES = 32 << 20
# Goals differ because 64 bytes of tokens take two blocks of SHA-256, and 256 bytes take five: with smaller pages, the
# fixed cost of a key matters more.
PAGE_KEY_GOALS = {16: 1.2, 64: 1.0}
USED_BYTES = 512 << 20  # more than the inserts of one table allocate


def use_memory() -> None:
    """Make the C library keep freed memory; then write and free `USED_BYTES`.

    Otherwise inserts would include the kernel's time to clear pages of memory. That takes longer than the insert, and
    affects the side that allocates more.
    """
    libc = ctypes.CDLL(None)
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)
        if libc.mallopt(parameter, 1 << 30) != 1:
            raise RuntimeError("mallopt(3) failed; use glibc")
    parts = [b"x" * (1 << 20) for _ in range(USED_BYTES >> 20)]
    parts.clear()


def tokens(count: int, seed: int) -> array.array[int]:
    """Return random token ids, in the type that engines use."""
    return array.array("q", np.random.default_rng(seed).integers(0, 128_000, count).tolist())


class Pair:
    """Our tree and, if there is one, the peer's, with the same contents."""

    def __init__(self, bindings: Any, page_size: int, policy: str = "lru", *, events: bool = False) -> None:
        self.page_size = page_size
        observer = EventRecorder(EventStream(EVENT_BYTES)) if events else None
        self.ours = RadixTree(page_size, POLICIES[policy], observer=observer)
        self.peer = NativeTree(bindings, page_size, policy) if bindings else None
        self._next_page = 1

    def insert(self, prompt: array.array[int]) -> None:
        """Insert into both sides, untimed."""
        for side in self.inserts(prompt):
            side()

    def inserts(self, prompt: array.array[int]) -> Sides:
        """Return one insert per side."""
        count = len(prompt) // self.page_size
        first, self._next_page = self._next_page, self._next_page + count
        pages = np.arange(first, first + count, dtype=np.int32)
        sides: Sides = [lambda: self.ours.insert(RadixKey.of(prompt), pages)]
        if (peer := self.peer) is not None:
            slots = torch.arange(first * self.page_size, (first + count) * self.page_size)
            sides.append(lambda: peer.insert(prompt, slots))
        return sides

    def matches(self, prompt: array.array[int]) -> Sides:
        """Return one match per side, from the engine's array to the answer: ours with page ids, the peer's without."""
        sides: Sides = [lambda: self.ours.match(RadixKey.of(prompt))]
        if (peer := self.peer) is not None:
            sides.append(lambda: peer.match(prompt))
        return sides

    def matches_with_slots(self, prompt: array.array[int]) -> Sides:
        """As `matches`, plus the int64 tensor of the prefix's token slots that an engine needs."""

        def ours() -> torch.Tensor:
            return torch.from_numpy(token_slots(self.ours.match(RadixKey.of(prompt)).device_pages, self.page_size))

        sides: Sides = [ours]
        if (peer := self.peer) is not None:
            sides.append(lambda: peer.match_with_slots(prompt))
            assert torch.equal(ours(), peer.match_with_slots(prompt))
        return sides

    def evictions(self, pages: int) -> Sides:
        """Return one eviction per side."""
        sides: Sides = [lambda: self.ours.evict_device(pages)]
        if (peer := self.peer) is not None:
            sides.append(lambda: peer.evict(pages * self.page_size))
        return sides


def key_rows(bindings: Any) -> Iterator[Row]:
    """Yield rows of page keys of a 128k-token prompt."""
    prompt = tokens(131_072, 1)
    for page_size in PAGE_SIZES:
        sides: Sides = [lambda size=page_size: page_keys(token_bytes(prompt), size)]  # type: ignore[misc]
        if bindings:
            sides.append(lambda size=page_size: bindings.get_hash_str(prompt, None, size))  # type: ignore[misc]
            ours = [key.hex() for key in page_keys(token_bytes(prompt), page_size)]
            assert ours == bindings.get_hash_str(prompt, None, page_size)
        yield row(f"page keys of 128k tokens, pages of {page_size}", alternate(60, sides), PAGE_KEY_GOALS[page_size])


def tree_rows(bindings: Any, page_size: int) -> Iterator[Row]:
    """Yield rows of match and insert in a tree of 100,000 pages."""
    pair = Pair(bindings, page_size)
    for seed in range(TREE_PAGES * page_size // PROMPT):
        pair.insert(tokens(PROMPT, 1000 + seed))
    flat, deep = tokens(PROMPT, 7), tokens(PROMPT, 8)
    pair.insert(flat)
    cuts = sorted(random.Random(2).sample(range(1, PROMPT // page_size), DEEP - 1))
    for cut in cuts:
        pair.insert(deep[: cut * page_size])
    pair.insert(deep)
    for prompt, shape in ((flat, "flat"), (deep, f"{DEEP} nodes")):
        yield row(f"match, {shape}", alternate(600, pair.matches(prompt)))
        yield row(f"match and hand over slots, {shape}", alternate(300, pair.matches_with_slots(prompt)))
    branches = [deep[: cut * page_size] + tokens(page_size, cut) for cut in cuts]
    for branch in branches:
        pair.insert(branch)

    def visit_branches() -> None:
        for branch in reversed(branches):  # so that the next match guesses wrong at every node
            pair.ours.match(RadixKey.of(branch))

    yield row(f"match, {DEEP} nodes, siblings since", alternate(100, pair.matches(deep), visit_branches))
    inserts = [alternate(1, pair.inserts(tokens(PROMPT, 5000 + seed))) for seed in range(reduced(60))]
    yield row("insert of new tokens", [[run[side][0] for run in inserts] for side in range(len(inserts[0]))])


def token_rows(bindings: Any) -> Iterator[Row]:
    """Yield rows of a prompt of a million tokens in pages of one token."""
    pair, prompt = Pair(bindings, 1), tokens(LONG_PROMPT, 7)
    pair.insert(prompt)
    yield row("match", alternate(100, pair.matches(prompt)))
    yield row("match and hand over slots", alternate(50, pair.matches_with_slots(prompt)))
    yield row("insert of cached tokens", alternate(50, pair.inserts(prompt)))
    inserts = [alternate(1, pair.inserts(tokens(LONG_PROMPT, 6000 + seed))) for seed in range(reduced(20))]
    yield row("insert of new tokens", [[run[side][0] for run in inserts] for side in range(len(inserts[0]))])


def eviction_row(bindings: Any, page_size: int, leaves: int, policy: str = "lru", *, events: bool = False) -> Row:
    """Return the row of evicting 64 pages among many leaves of one page each."""
    pair = Pair(bindings, page_size, policy, events=events)
    stem = tokens(page_size, 9)
    for unique in np.random.default_rng(leaves).permutation(1 << 20)[:leaves].tolist():
        pair.insert(stem + array.array("q", [unique] * page_size))
    what = f"evict 64 of {leaves:,} leaves" + (f", {policy}" if policy != "lru" else "")
    if events:  # the peer records none
        return row(f"{what}, pages of {page_size}, with KV events", alternate(15, pair.evictions(64)), None)
    return row(what, alternate(15, pair.evictions(64)))


def memory_rows() -> Iterator[Row]:
    """Yield rows of bookkeeping bytes per cached page: keys, page ids of L1 and L2, storage keys, nodes, queue entries.
    """
    leaves = reduced(4096, 4)
    forks = [[2 + (leaf >> level & 1) for level in range(leaves.bit_length() - 1)] for leaf in range(leaves)]
    for what, size, prompts in (
        ("all in leaves of one page", 16, [tokens(16, seed) for seed in range(reduced(20_000))]),
        ("all in leaves of one page", 64, [tokens(64, seed) for seed in range(reduced(20_000))]),
        ("a fork behind every page", 64, [array.array("q", np.repeat(fork, 64).tolist()) for fork in forks]),
        ("runs of 512 pages", 64, [tokens(512 * 64, seed) for seed in range(reduced(40))]),
    ):
        tracemalloc.start()
        tree = RadixTree(size, POLICIES["lru"])
        pages = 0
        for prompt in prompts:
            ids = np.arange(pages, pages + len(prompt) // size, dtype=np.int32)
            inserted = tree.insert(RadixKey.of(prompt), ids)
            pages += len(ids) - inserted.present_pages
        for node in tree.nodes():
            tree.page_keys(node)
            tree.accept_backup(node, ids[:1].repeat(tree.pages(node)))
        per_page = tracemalloc.get_traced_memory()[0] / pages
        tracemalloc.stop()
        yield Row(f"bookkeeping per page of {size}, {what}", f"{per_page:.0f} B", "1024 B", per_page / 1024, 1.0)


def run(peer: Path | None = None) -> Iterator[tuple[str, list[Row]]]:
    """Yield all tables. If given, the reference is the peer in `peer`, an unpacked wheel."""
    bindings = load_bindings(peer) if peer else None
    yield "page keys and memory", [*key_rows(bindings), *memory_rows()]
    for page_size in PAGE_SIZES:
        rows = list(tree_rows(bindings, page_size))
        rows += [eviction_row(bindings, page_size, leaves) for leaves in LEAVES]
        yield f"32k cached tokens, page size {page_size}", rows
    yield "a million cached tokens, page size 1", list(token_rows(bindings))
    others = [policy for policy in POLICIES if policy not in ("lru", "adaptive")]  # which has the order of lru
    rows = [eviction_row(bindings, 64, 10_000, policy) for policy in others]
    rows += [eviction_row(bindings, page_size, 10_000, events=True) for page_size in PAGE_SIZES]
    yield "other policies at page size 64, and KV events at 16 and 64", rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="directory with SGLang's unpacked wheel")
    parser.add_argument("--numpy", action="store_true", help="disable our native helper")
    arguments = parser.parse_args()
    if arguments.numpy:
        token_ids.pack_token_ids = chain.hash_pages = device.fill_slots = None
    use_memory()
    peer = "reference: SGLang's native core; ratio = our time : its time"
    notes = [peer if arguments.peer else "no reference without --peer"]
    notes += ["without the native helper"] if token_ids.pack_token_ids is None else []
    for title, rows in run(arguments.peer):
        print_table(f"{title} ({'; '.join(notes)})", rows)


if __name__ == "__main__":
    main()

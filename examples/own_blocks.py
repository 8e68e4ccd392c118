"""An engine that keeps its KV in blocks of its own and uses HiCache for the host and storage.

    python examples/own_blocks.py DIRECTORY

The engine owns the tensors, says which block a request has, and computes; here the "model" only stamps its KV. The
cache says what is on the host, lends host pages, and stores them. The first run computes each prompt once and finds it
on the host the second time; a second run with the same directory finds it in storage. Here one process decides and
copies. An engine with worker processes gives each of them a `HostWindow` of a `SharedHostPool` and copies there.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import numpy as np
import torch

from hicache import HiCacheConfig, Namespace, PageShape, Piece, RadixKey
from hicache.cache import HostCache, create_host_cache
from hicache.tiers import EngineBlocks, HostWindow, Transfer, create_copy_engine
from hicache.types import PageIds

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, DIM = 4, 64, 16, 2, 8
# A page of HiCache is two blocks of the engine: larger pages move faster, smaller ones match more.
PAGE_BLOCKS = 2
PAGE_TOKENS = PAGE_BLOCKS * BLOCK_TOKENS
BLOCK_BYTES = 2 * BLOCK_TOKENS * HEADS * DIM * 4  # K and V of one layer, float32
TIMEOUT_S = 30.0


class Engine:
    """The scheduler's side (the cache, the block numbers) and the worker's side (tensors, copies) in one process."""

    def __init__(self, cache: HostCache) -> None:
        self.cache = cache
        # The layout of vLLM: K and V first, so that a block is two pieces of memory per layer.
        self.kv = [torch.zeros(2, BLOCKS, BLOCK_TOKENS, HEADS, DIM) for _ in range(LAYERS)]
        blocks = EngineBlocks([[layer[0], layer[1]] for layer in self.kv])
        self.copies = create_copy_engine(blocks, HostWindow(cache.host, blocks_per_page=PAGE_BLOCKS))

    def serve(self, rid: str, prompt: list[int]) -> int:
        """One request from arrival to end; how many of its tokens were not computed. The next request has its blocks.

        A real scheduler runs many at a time. It waits for nothing here: it looks again in its next step.
        """
        key = page_hashes(prompt)
        self.cache.prefetch(rid, key)  # from storage to the host, if it is there and pays
        while not self.cache.check_prefetch(rid):
            self.cache.poll()
            time.sleep(0.0005)  # nothing to compute: leave the interpreter to the threads that read
        blocks = np.arange(-(-len(prompt) // BLOCK_TOKENS), dtype=np.int32)
        cached = self.load(rid, key, blocks, (len(prompt) - 1) // PAGE_TOKENS)
        self.compute(prompt, blocks, cached)
        self.write_back(rid, key, blocks)
        self.cache.abort(rid)  # the request has ended
        self.cache.poll()  # once per step: takes in what has ended, and starts writing to storage
        return cached

    def load(self, rid: str, key: RadixKey, blocks: PageIds, pages_max: int) -> int:
        """Copy what the host has into the request's blocks; how many tokens that are. The last one must be computed."""
        pages = min(self.cache.lookup(rid, key).pages, pages_max)
        load = self.cache.begin_load(rid, key, 0, pages) if pages else None
        if load is None:
            return 0
        # The host pages are held until `end_load`.
        transfer = self.copies.load(host_blocks(load.host_pages), blocks[: pages * PAGE_BLOCKS])
        finish(transfer)  # or `transfer.wait_layer(i)` right before the forward reads layer i
        self.cache.end_load(load, transfer.seconds)  # None if it failed: then the prompt is computed
        return 0 if transfer.error else pages * PAGE_TOKENS

    def compute(self, prompt: list[int], blocks: PageIds, start: int) -> None:
        """Stands for the forward: reads the KV of the tokens before `start`, writes that of the others."""
        positions = np.arange(len(prompt))
        slots = torch.from_numpy(blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS)
        for layer, kv in enumerate(self.kv):
            rows = kv.view(2, BLOCKS * BLOCK_TOKENS, HEADS, DIM)
            expected = (torch.tensor(prompt, dtype=torch.float32) + layer).view(1, -1, 1, 1).expand(2, -1, HEADS, DIM)
            if not torch.equal(rows[:, slots[:start]], expected[:, :start]):
                raise SystemExit("the cache has brought other KV than was computed")
            rows[:, slots[start:]] = expected[:, start:]

    def write_back(self, rid: str, key: RadixKey, blocks: PageIds) -> None:
        """Copy to the host what it lacks of the request's whole pages; the cache then writes it to storage."""
        write = self.cache.begin_write(rid, key)
        if write is None:
            return
        first = write.start_page * PAGE_BLOCKS
        targets = host_blocks(write.host_pages)
        transfer = self.copies.backup(blocks[first : first + len(targets)], targets)
        # Until the copy has ended, the blocks are neither freed nor written. With several workers: until all have.
        finish(transfer)
        self.cache.end_write(write, complete=transfer.error is None)


def finish(transfer: Transfer) -> None:
    """Wait for a copy. One that does not end has the pages for good: they must not be given back."""
    if not transfer.wait(TIMEOUT_S):
        raise SystemExit("a copy is stuck")


def page_hashes(prompt: list[int]) -> RadixKey:
    """The key of a prompt from hashes that the engine makes: each names all tokens up to the end of its page."""
    chain, hashes = hashlib.sha256(b"own_blocks"), []
    for end in range(PAGE_TOKENS, len(prompt) + 1, PAGE_TOKENS):
        chain.update(np.array(prompt[end - PAGE_TOKENS : end], dtype="<u4").tobytes())
        hashes.append(chain.digest())
    return RadixKey.of_hashes(hashes)


def host_blocks(pages: PageIds) -> PageIds:
    """The blocks of host pages, in order."""
    runs = [np.arange(page * PAGE_BLOCKS, (page + 1) * PAGE_BLOCKS, dtype=np.int32) for page in pages.tolist()]
    return np.concatenate(runs)


def main() -> None:
    """Serve two prompts twice, with nothing left on the device in between."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/own_blocks.py DIRECTORY")
    config = HiCacheConfig.model_validate({
        "page_size": PAGE_TOKENS,
        "host": {"tokens": 2048},
        "prefetch": {"threshold_tokens": 64, "policy": "wait_complete"},
        "storage": {"type": "file", "options": {"path": str(Path(sys.argv[1]) / "pages"), "capacity": "64MiB"}},
    })  # fmt: skip
    # Block by block, in each layer by layer: the order in which a window reads a frame.
    pieces = [Piece(f"block{i}.layer{layer}", BLOCK_BYTES) for i in range(PAGE_BLOCKS) for layer in range(LAYERS)]
    namespace = Namespace(
        model="stamp", geometry=PageShape(PAGE_TOKENS, tuple(pieces)), key_hash="sha256 of prefixes",
        engine_layout=f"[2, blocks, {BLOCK_TOKENS}, heads, dim] float32",
    )  # fmt: skip
    prompts = {"a": list(range(500)), "b": [*range(200), *range(1000, 1300)]}
    with create_host_cache(config, namespace) as cache:
        engine = Engine(cache)
        for visit in (1, 2):
            for name, prompt in prompts.items():
                cached = engine.serve(f"{name}-{visit}", prompt)
                print(f"prompt {name}, visit {visit}: {cached} of {len(prompt)} tokens from the cache")
                for layer in engine.kv:
                    layer.fill_(torch.nan)  # nothing is left on the device
        hits = cache.statistics().hit_tokens
        print(f"in all: {hits['host']} tokens from the host, {hits['storage']} from storage")


if __name__ == "__main__":
    main()

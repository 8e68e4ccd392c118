"""An engine that manages its own device blocks and uses HiCache for host memory and storage.

    python examples/own_blocks.py DIRECTORY

The engine owns the tensors, assigns blocks to requests and computes. The cache finds pages on the host, reserves host
pages for writes, and stores them. The first run computes each prompt once and finds it on the host on the second
visit. A second run with the same directory finds it in storage.

In this program one process schedules and copies. In an engine with worker processes, each worker has a `HostWindow` of
a `SharedHostPool` and copies its own blocks. There is no model: `compute` derives its KV from the token numbers.
docs/host_cache.md is the guide.
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
# A page of HiCache is two blocks of the engine. Larger pages are copied faster; smaller pages match more tokens.
PAGE_BLOCKS = 2
PAGE_TOKENS = PAGE_BLOCKS * BLOCK_TOKENS
BLOCK_BYTES = 2 * BLOCK_TOKENS * HEADS * DIM * 4  # K and V of one layer, float32
TIMEOUT_S = 30.0


class Engine:
    """A scheduler (the cache and the block numbers) and a worker (the tensors and the copies) in one process."""

    def __init__(self, cache: HostCache) -> None:
        self.cache = cache
        # The layout of vLLM: K and V are the first dimension, so a block is two pieces of memory per layer.
        self.kv = [torch.zeros(2, BLOCKS, BLOCK_TOKENS, HEADS, DIM) for _ in range(LAYERS)]
        blocks = EngineBlocks([[layer[0], layer[1]] for layer in self.kv])
        self.copies = create_copy_engine(blocks, HostWindow(cache.host, blocks_per_page=PAGE_BLOCKS))

    def serve(self, rid: str, prompt: list[int]) -> int:
        """Serve one request from its arrival to its end. Return how many of its tokens came from the cache.

        The next request uses the same blocks. A real scheduler runs many requests at a time and does not wait: it
        checks the prefetch again in its next step.
        """
        key = page_hashes(prompt)
        self.cache.prefetch(rid, key)  # from storage to the host, if that pays
        while not self.cache.check_prefetch(rid):
            self.cache.poll()
            time.sleep(0.0005)  # there is nothing to compute: let the reading threads run
        blocks = np.arange(-(-len(prompt) // BLOCK_TOKENS), dtype=np.int32)
        cached = self.load(rid, key, blocks, (len(prompt) - 1) // PAGE_TOKENS)  # the last token must be computed
        self.compute(prompt, blocks, cached)
        self.write_back(rid, key, blocks)
        self.cache.abort(rid)  # the request has ended
        self.cache.poll()  # once per step: handles completed work and starts writes to storage
        return cached

    def load(self, rid: str, key: RadixKey, blocks: PageIds, pages_max: int) -> int:
        """Copy up to `pages_max` pages from the host into the request's blocks. Return the number of tokens copied."""
        pages = min(self.cache.lookup(rid, key).pages, pages_max)
        load = self.cache.begin_load(rid, key, 0, pages) if pages else None
        if load is None:
            return 0
        # The host pages are held until `end_load`.
        transfer = self.copies.load(host_blocks(load.host_pages), blocks[: pages * PAGE_BLOCKS])
        finish(transfer)  # or `transfer.wait_layer(i)` right before the forward reads layer i
        self.cache.end_load(load, transfer.seconds)  # None after a failed copy: the prompt is computed
        return 0 if transfer.error else pages * PAGE_TOKENS

    def compute(self, prompt: list[int], blocks: PageIds, start: int) -> None:
        """Check the KV of the tokens before `start` and write the KV of the others. Replaces the forward."""
        positions = np.arange(len(prompt))
        slots = torch.from_numpy(blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS)
        for layer, kv in enumerate(self.kv):
            rows = kv.view(2, BLOCKS * BLOCK_TOKENS, HEADS, DIM)
            expected = (torch.tensor(prompt, dtype=torch.float32) + layer).view(1, -1, 1, 1).expand(2, -1, HEADS, DIM)
            if not torch.equal(rows[:, slots[:start]], expected[:, :start]):
                raise SystemExit("the KV from the cache differs from the computed KV")
            rows[:, slots[start:]] = expected[:, start:]

    def write_back(self, rid: str, key: RadixKey, blocks: PageIds) -> None:
        """Copy the request's whole pages that the host lacks. The cache then writes them to storage."""
        write = self.cache.begin_write(rid, key)
        if write is None:
            return
        first = write.start_page * PAGE_BLOCKS
        targets = host_blocks(write.host_pages)
        transfer = self.copies.backup(blocks[first : first + len(targets)], targets)
        # Do not free or overwrite the blocks until the copies of all workers have ended.
        finish(transfer)
        self.cache.end_write(write, complete=transfer.error is None)


def finish(transfer: Transfer) -> None:
    """Wait for a copy. If it hangs, do not free its pages: it may still access them."""
    if not transfer.wait(TIMEOUT_S):
        raise SystemExit(f"a copy has not ended after {TIMEOUT_S} s; restart the engine")


def page_hashes(prompt: list[int]) -> RadixKey:
    """Return the key of a prompt, from the engine's own hashes: each covers all tokens up to the end of its page."""
    chain, hashes = hashlib.sha256(b"own_blocks"), []
    for end in range(PAGE_TOKENS, len(prompt) + 1, PAGE_TOKENS):
        chain.update(np.array(prompt[end - PAGE_TOKENS : end], dtype="<u4").tobytes())
        hashes.append(chain.digest())
    return RadixKey.of_hashes(hashes)


def host_blocks(pages: PageIds) -> PageIds:
    """Return the blocks of host pages, in order."""
    runs = [np.arange(page * PAGE_BLOCKS, (page + 1) * PAGE_BLOCKS, dtype=np.int32) for page in pages.tolist()]
    return np.concatenate(runs)


def main() -> None:
    """Serve two prompts twice; empty the device after each request."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/own_blocks.py DIRECTORY")
    config = HiCacheConfig.model_validate({
        "page_size": PAGE_TOKENS,
        "host": {"tokens": 2048},
        "prefetch": {"threshold_tokens": 64, "policy": "wait_complete"},
        "storage": {"type": "file", "options": {"path": str(Path(sys.argv[1]) / "pages"), "capacity": "64MiB"}},
    })
    # All layers of the first block, then of the next: the order in which a window reads a frame.
    pieces = [Piece(f"block{i}.layer{layer}", BLOCK_BYTES) for i in range(PAGE_BLOCKS) for layer in range(LAYERS)]
    namespace = Namespace(
        model="stamp", geometry=PageShape(PAGE_TOKENS, tuple(pieces)), key_hash="sha256 of prefixes",
        engine_layout=f"[2, blocks, {BLOCK_TOKENS}, heads, dim] float32",
    )
    prompts = {"a": list(range(500)), "b": [*range(200), *range(1000, 1300)]}
    with create_host_cache(config, namespace) as cache:
        engine = Engine(cache)
        for visit in (1, 2):
            for name, prompt in prompts.items():
                cached = engine.serve(f"{name}-{visit}", prompt)
                print(f"prompt {name}, visit {visit}: {cached} of {len(prompt)} tokens from the cache")
                for layer in engine.kv:
                    layer.fill_(torch.nan)  # empty the device
        hits = cache.statistics().hit_tokens
        print(f"in all: {hits['host']} tokens from the host, {hits['storage']} from storage")


if __name__ == "__main__":
    main()

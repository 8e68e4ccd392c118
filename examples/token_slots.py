"""An engine that keeps its own request table and allocates token slots, the rows to which its kernels write.

    python examples/token_slots.py

The pages of the slots come from the cache, which evicts to make room. The program serves four prompts that do not fit
into L1 together. It serves the first one again while it is cached, and once more after its eviction.
"""

from __future__ import annotations

import torch

from hicache import HiCacheConfig, HiRadixCache, KVGeometry, Namespace, RadixKey
from hicache.cache import create_cache
from hicache.tiers import MHATokenToKVPool, PagedTokenToKVPoolAllocator, token_slots

PAGE_SIZE = 16
GEOMETRY = KVGeometry(layers=4, heads=2, head_dim=16, page_size=PAGE_SIZE, dtype="float32")
CONFIG = HiCacheConfig.model_validate({"page_size": PAGE_SIZE, "device": {"tokens": 160}})
DECODED = 5


def write(cache: HiRadixCache, slots: torch.Tensor) -> None:
    """Write a constant as KV of the tokens at `slots`, in every layer. Replaces the forward."""
    assert isinstance(cache.device, MHATokenToKVPool)
    kv = torch.ones(len(slots), GEOMETRY.heads, GEOMETRY.head_dim)
    for layer in range(GEOMETRY.layers):
        cache.device.set_kv_buffer(layer, slots, kv, kv)


def serve(cache: HiRadixCache, allocator: PagedTokenToKVPoolAllocator, prompt: list[int]) -> int:
    """Compute the missing tokens of a prompt, decode a few tokens and insert the pages into the tree. Return the hits.

    This engine uses hits on L1 only, and locks them. `begin_request` matches, locks and allocates in one call, and also
    loads from L2.
    """
    key = RadixKey.of(prompt)
    match = cache.match_prefix(key.head((len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE))
    tree, node = cache.tree, match.device_node
    tree.lock(node)  # before the allocation, which may evict
    cached = len(match.device_pages) * PAGE_SIZE
    prefix = torch.from_numpy(token_slots(match.device_pages, PAGE_SIZE))
    last = prefix[-1:] if cached else torch.tensor([-1])
    prefix_lens, seq_lens = torch.tensor([cached]), torch.tensor([len(prompt)])
    own = allocator.alloc_extend(prefix_lens, seq_lens, last, len(prompt) - cached)
    if own is None:
        raise SystemExit("L1 is full; a scheduler would retry in its next step")
    write(cache, own)
    for count in range(1, DECODED + 1):
        slot = allocator.alloc_decode(torch.tensor([len(prompt) + count]), own[-1:])
        if slot is None:
            raise SystemExit("L1 is full; a scheduler would end or preempt a request")
        write(cache, slot)
        own = torch.cat((own, slot))
    slots = torch.cat((prefix, own))
    whole = len(prompt) // PAGE_SIZE
    pages = (slots[: whole * PAGE_SIZE : PAGE_SIZE] // PAGE_SIZE).to(torch.int32).numpy()
    inserted = cache.insert(key, pages)
    with allocator.free_group():
        # Pages that another request has inserted since the match exist twice: free this request's copies.
        allocator.free(slots[cached : inserted.present_pages * PAGE_SIZE])
        allocator.free(slots[whole * PAGE_SIZE :])  # the partial page and the decoded tokens
    tree.unlock(node)
    cache.poll()
    return cached


def main() -> None:
    """Serve more prompts than fit into L1."""
    with create_cache(CONFIG, Namespace(model="stamp", geometry=GEOMETRY)) as cache:
        # With `prefix_cache: false` the cache is a ChunkCache, which has no tree.
        if not isinstance(cache, HiRadixCache):
            raise SystemExit("token slots over the cache need a tree; set prefix_cache: true")
        allocator = PagedTokenToKVPoolAllocator(cache.page_source, PAGE_SIZE, "cpu", debug=True)
        for number in (0, 0, 1, 2, 3, 0):
            prompt = list(range(1000 * number, 1000 * number + 60))
            cached = serve(cache, allocator, prompt)
            print(f"prompt {number}: {cached} of {len(prompt)} tokens cached")
            cache.check()
            cache.drain(10)


if __name__ == "__main__":
    main()

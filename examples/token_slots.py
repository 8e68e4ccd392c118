"""Token slots: an engine that keeps its own request table and asks for the rows that its kernels write to.

    python examples/token_slots.py

Pages still come from the cache, which evicts to make room; the slots are computed on the device. Four prompts that do
not fit together are computed one after the other, and the first one again.
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
    """Stands for the forward: stamps the KV of the tokens at `slots`, in every layer."""
    assert isinstance(cache.device, MHATokenToKVPool)
    kv = torch.ones(len(slots), GEOMETRY.heads, GEOMETRY.head_dim)
    for layer in range(GEOMETRY.layers):
        cache.device.set_kv_buffer(layer, slots, kv, kv)


def serve(cache: HiRadixCache, allocator: PagedTokenToKVPoolAllocator, prompt: list[int]) -> int:
    """Compute what is not cached of a prompt, decode a few tokens, hand the pages to the tree; tokens that were hits.

    This engine uses hits on L1 alone, and holds them by a lock. `begin_request` does all of that, and loads from L2.
    """
    key = RadixKey.of(prompt)
    match = cache.match_prefix(key.head((len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE))
    tree, node = cache.tree, match.device_node
    tree.lock(node)  # before anything is allocated, which may evict
    cached = len(match.device_pages) * PAGE_SIZE
    prefix = torch.from_numpy(token_slots(match.device_pages, PAGE_SIZE))
    last = prefix[-1:] if cached else torch.tensor([-1])
    prefix_lens, seq_lens = torch.tensor([cached]), torch.tensor([len(prompt)])
    own = allocator.alloc_extend(prefix_lens, seq_lens, last, len(prompt) - cached)
    if own is None:
        raise SystemExit("L1 has no room; a scheduler would try again in its next step")
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
        # What another request has put into the tree meanwhile, beyond the hits of this one, is there twice.
        allocator.free(slots[cached : inserted.present_pages * PAGE_SIZE])
        allocator.free(slots[whole * PAGE_SIZE :])  # the partial page, and what was decoded
    tree.unlock(node)
    cache.poll()
    return cached


def main() -> None:
    """Serve more prompts than fit."""
    with create_cache(CONFIG, Namespace(model="stamp", geometry=GEOMETRY)) as cache:
        # With `prefix_cache: false` it is a ChunkCache, which has no tree to insert pages into.
        if not isinstance(cache, HiRadixCache):
            raise SystemExit("token slots over the cache need prefix_cache: true")
        allocator = PagedTokenToKVPoolAllocator(cache.page_source, PAGE_SIZE, "cpu", debug=True)
        for number in (0, 0, 1, 2, 3, 0):
            prompt = list(range(1000 * number, 1000 * number + 60))
            cached = serve(cache, allocator, prompt)
            print(f"prompt {number}: {cached} of {len(prompt)} tokens cached")
            cache.check()
            cache.drain(10)


if __name__ == "__main__":
    main()

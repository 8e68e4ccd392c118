"""RadixAttention: attention over the paged KV of L1, one module per layer of a model, in front of a backend.

It has the name of SGLang's class (Zheng et al., 2024) and does not use the tree. The backend writes the KV of new
tokens to a pool, reads the KV of all tokens and computes the product: `SdpaBackend` with PyTorch, or your own. A
forward needs no other call of HiCache, because reading a layer waits for the load of that layer:

    batch = AttentionBatch(cache.device, rows.table, [Queries(row, cached_tokens, new_tokens), ...])   # once
    attended = attention[layer](q, k, v, batch)                                                        # in each layer

A batch may mix prefills, prefills after a cached prefix, and decodes.
"""

from .radix_attention import AttentionBackend, AttentionBatch, PagedKeys, Queries, RadixAttention, forward_context
from .sdpa import SdpaBackend

__all__ = ["AttentionBackend", "AttentionBatch", "PagedKeys", "Queries", "RadixAttention", "SdpaBackend",
           "forward_context"]

# Set here, because the interface does not know its implementations.
AttentionBatch.default_backend = SdpaBackend()

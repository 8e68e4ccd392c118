"""A forward over `RadixAttention`, which reads KV from L1 and waits for the load of each layer.

    python examples/own_forward.py

The program computes a prompt, evicts its pages from L1 and serves the prompt again. The second forward runs while the
pages are loaded from the host, and gives the same result.
"""

from __future__ import annotations

import torch

from hicache import HiCacheConfig, KVGeometry, Namespace, RadixKey
from hicache.attention import AttentionBatch, Queries, RadixAttention
from hicache.cache import TreeCache, create_cache
from hicache.tiers import RequestToTokenPool

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WORDS = 4, 4, 2, 16, 64, 1000
GEOMETRY = KVGeometry(layers=LAYERS, heads=KV_HEADS, head_dim=HEAD_DIM, page_size=16, dtype="float32")


class Model:
    """Layers of attention with random weights."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.embedding = torch.randn(WORDS, HIDDEN)
        self.qkv = torch.randn(LAYERS, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM) / HIDDEN**0.5
        self.output = torch.randn(LAYERS, HEADS * HEAD_DIM, HIDDEN) / HIDDEN**0.5
        self.attention = [RadixAttention(HEADS, HEAD_DIM, KV_HEADS, layer) for layer in range(LAYERS)]

    def forward(self, tokens: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return the hidden states of new tokens, `[tokens, HIDDEN]`, and write their KV."""
        state = self.embedding[tokens]
        for layer, attention in enumerate(self.attention):
            q, k, v = (state @ self.qkv[layer]).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], 1)
            state = torch.tanh(state + attention(q, k, v, batch) @ self.output[layer])
        return state


def serve(cache: TreeCache, rows: RequestToTokenPool, model: Model, prompt: list[int]) -> tuple[int, torch.Tensor]:
    """Serve one request. Return how many tokens came from the cache, and the last hidden state."""
    key = RadixKey.of(prompt)
    request, taken = cache.begin_request("request", key), rows.alloc(1)
    if request is None or taken is None:
        raise SystemExit("L1 is full; a scheduler would retry in its next step")
    (row,) = taken
    cache.start_loading()
    rows.write(row, request.pages, cache.page_size)
    cached = request.cached_tokens
    # A batch has one entry per request: a prefill, or a decode with one new token.
    batch = AttentionBatch(cache.device, rows.table, [Queries(row, cached, len(prompt) - cached)])
    last = model.forward(torch.tensor(prompt[cached:]), batch)[-1]
    cache.cache_finished_req(request, key)
    rows.free(row)
    return cached, last


@torch.inference_mode()
def main() -> None:
    """Compute a prompt, then serve it from the host and compare the results."""
    config = HiCacheConfig.model_validate({
        "page_size": GEOMETRY.page_size,
        "device": {"tokens": 1024},
        "host": {"ratio": 2},
        "load_back_threshold_tokens": 16,
        "break_even": {"mode": "always"},
    })
    prompt, model, rows = list(range(500)), Model(), RequestToTokenPool(1, 1024)
    with create_cache(config, Namespace(model="random", geometry=GEOMETRY)) as cache:
        computed = serve(cache, rows, model, prompt)
        cache.drain(timeout_s=10)  # waits for the copies to the host
        cache.evict(cache.device.pages)
        loaded = serve(cache, rows, model, prompt)
    print(f"computed: {computed[0]} of {len(prompt)} tokens from the cache")
    print(f"loaded: {loaded[0]} of {len(prompt)} tokens from the cache")
    print(f"the same result: {torch.allclose(computed[1], loaded[1], rtol=1e-4, atol=1e-4)}")


if __name__ == "__main__":
    main()

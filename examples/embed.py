"""The calls of a scheduler, in their order.

    python examples/embed.py DIRECTORY

The first run computes every prompt on its first visit; the second visit hits the device. A second run with the same
directory finds the prefixes in storage. There is no model: `compute` writes a constant as KV. Replace it by a forward
over `cache.device`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from hicache import HiCacheConfig, KVGeometry, Namespace, RadixKey
from hicache.cache import RequestKV, TreeCache, create_cache

GEOMETRY = KVGeometry(layers=4, heads=2, head_dim=16, page_size=16, dtype="float32")


def compute(cache: TreeCache, request: RequestKV, tokens: int) -> None:
    """Write a constant as KV of the tokens from `request.cached_tokens` on, into the request's own pages."""
    for layer in range(GEOMETRY.layers):
        for region in cache.device.blocks.layers[layer]:  # rows of bytes, one per page
            region[request.pages[request.shared_pages :]] = tokens % 251


def serve(cache: TreeCache, rid: str, prompt: list[int], tenant: str) -> RequestKV:
    """Serve one request from its arrival to its end. A real scheduler interleaves many requests."""
    key = RadixKey.of(prompt, cache_salt=tenant)
    cache.prefetch_from_storage(rid, key)
    while not cache.check_prefetch_progress(rid):
        cache.poll()
        time.sleep(0.0005)  # there is nothing to compute: let the reading threads run
    request = cache.begin_request(rid, key)
    if request is None:
        raise SystemExit("L1 is full; a scheduler would retry in its next step")
    transfer = cache.start_loading()
    if transfer is not None:
        for layer in range(GEOMETRY.layers):
            transfer.wait_layer(layer)  # a forward waits right before it reads the layer
    compute(cache, request, len(prompt))
    cache.cache_finished_req(request, key)
    cache.poll()
    return request


def main() -> None:
    """Serve the same prompt for two tenants, twice each."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/embed.py DIRECTORY")
    config = HiCacheConfig.model_validate({
        "page_size": GEOMETRY.page_size,
        "device": {"tokens": 2048},
        "host": {"ratio": 2},
        "prefetch": {"threshold_tokens": 64},
        "storage": {"type": "file", "options": {"path": str(Path(sys.argv[1]) / "pages"), "capacity": "64MiB"}},
    })
    with create_cache(config, Namespace(model="stamp", geometry=GEOMETRY)) as cache:
        for visit in range(2):
            for tenant in ("alice", "bob"):
                request = serve(cache, f"{tenant}-{visit}", list(range(500)), tenant)
                print(
                    f"{tenant}, visit {visit + 1}: {request.device_hit_tokens} tokens from the device, "
                    f"{request.host_hit_tokens} from the host, {request.storage_hit_tokens} from storage"
                )


if __name__ == "__main__":
    main()

"""Two tensor-parallel ranks that find the same prefixes. Each is a process with its own shard.

    python examples/ranks.py DIRECTORY

The ranks have pools of different sizes and separate stores. Each rank prints its hits; they are the same on both. A
second run with the same directory finds the prefix in both stores.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import cast

import torch.distributed as dist

from hicache import HiCacheConfig, KVGeometry, Namespace, RadixKey
from hicache.cache import TreeCache, create_cache
from hicache.config import RanksConfig
from hicache.controller import TorchRankGroup
from hicache.controller.ranks import Reducer
from hicache.errors import RankError

SIZE = 2
DEADLINE_S = 30.0
GEOMETRY = KVGeometry(layers=4, heads=1, head_dim=16, page_size=16, dtype="float32")
PROMPT = list(range(500))
REST_S = 0.0005


def serve(cache: TreeCache, rid: str) -> str:
    """Serve one request. All ranks make the same calls in the same order, so they take the same number of steps."""
    key = RadixKey.of(PROMPT)
    cache.prefetch_from_storage(rid, key)
    while not cache.check_prefetch_progress(rid):
        cache.poll()
        time.sleep(REST_S)
    request = cache.begin_request(rid, key)
    if request is None:
        raise SystemExit("L1 is full; a scheduler would retry in its next step")
    transfer = cache.start_loading()
    for layer in range(GEOMETRY.layers):
        if transfer is not None:
            transfer.wait_layer(layer)
        for region in cache.device.blocks.layers[layer]:
            region[request.pages[request.shared_pages :]] = 1
    found = f"{request.device_hit_tokens} tokens from the device, {request.storage_hit_tokens} from storage"
    cache.cache_finished_req(request, key)
    cache.poll()
    return found


def rank_main(rank: int, folder: str, found: SimpleQueue[str]) -> None:
    """Serve the prompt twice as one rank. Put a line for each visit into `found`."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SIZE)
    # The cache needs its own group, so that its collectives cannot mix with those of the engine.
    group = TorchRankGroup(cast(Reducer, dist.new_group(backend="gloo")), RanksConfig(deadline=DEADLINE_S))
    config = HiCacheConfig.model_validate({
        "page_size": GEOMETRY.page_size,
        "device": {"tokens": 2048 + 512 * rank},  # all ranks use the smallest size
        "prefetch": {"threshold_tokens": 64},
        "storage": {"type": "file", "options": {"path": f"{folder}/rank-{rank}", "capacity": "64MiB"}},
    })
    namespace = Namespace(model="stamp", geometry=GEOMETRY, tp_rank=rank, tp_size=SIZE)
    try:
        with create_cache(config, namespace, ranks=group) as cache:
            for visit in range(2):
                hits = serve(cache, f"visit-{visit}")
                found.put(f"rank {rank} of {SIZE}, L1 of {cache.device.allocator.capacity} pages: {hits}")
    except RankError as error:
        raise SystemExit(f"rank {rank}: {error}") from error  # not recoverable: end and restart all ranks
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/ranks.py DIRECTORY")
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rendezvous").unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    children = [context.Process(target=rank_main, args=(rank, str(folder), found)) for rank in range(SIZE)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    while not found.empty():
        print(found.get())
    if any(child.exitcode for child in children):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

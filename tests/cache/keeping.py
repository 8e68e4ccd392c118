"""Engines whose L2 stays after their end (`host.shared.keep`). As a program, an engine that runs until it is killed:

    python -m tests.cache.keeping KIND CONFIGURATION

KIND is `radix` or `host`. The program serves PROMPTS, waits until their pages are sealed, leaves a write incomplete,
prints "ready" and waits for a signal.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.cache import HiRadixCache, HostCache, create_cache, create_host_cache
from hicache.config import HiCacheConfig
from hicache.keys import Namespace, RadixKey
from tests.cache.world import GEOMETRY, NAMESPACE, prompt
from tests.waiting import wait_for

PROMPTS = [prompt(*range(first, first + 5)) for first in (10, 20, 30)]
PAGES = 15  # of all prompts
PAGE_TOKENS = GEOMETRY.page_size


def options(name: str, *, keep: bool = True, host_pages: int = 32, **sections: Any) -> dict[str, Any]:
    """Return the configuration of an engine with its L2 under `name`."""
    return {
        "page_size": PAGE_TOKENS,
        "host": {"tokens": host_pages * PAGE_TOKENS, "shared": {"name": name, "keep": keep}},
        "load_back_threshold_tokens": PAGE_TOKENS,
        "break_even": {"mode": "always"},
        "prefetch": {"threshold_tokens": PAGE_TOKENS, "timeout_base": 30, "host_share": 1},
        **sections,
    }


def expected(key: RadixKey, page: int) -> npt.NDArray[np.uint8]:
    """Return the expected bytes of a page of a prompt, uint8 `[layers, layer_bytes]`."""
    page_key = key.page_keys(PAGE_TOKENS, key.seed, 0, page + 1)[page]
    stream = hashlib.shake_128(page_key).digest(GEOMETRY.payload_bytes)
    return np.frombuffer(stream, np.uint8).reshape(GEOMETRY.layers, GEOMETRY.layer_bytes)


class Engine:
    """An engine that calls a cache. `wrong` counts the pages that came from the cache with wrong bytes."""

    cache: HiRadixCache | HostCache
    wrong: int

    def serve(self, key: RadixKey) -> int:
        """Serve a prompt; return how many pages came from the cache."""
        raise NotImplementedError

    def step(self) -> None:
        """Run one scheduler step."""
        self.cache.poll()
        self.cache.check()

    def settle(self) -> None:
        """Wait until all operations have ended."""
        assert self.cache.drain(30)
        self.cache.check()


class RadixEngine(Engine):
    """An engine over a HiRadixCache."""

    cache: HiRadixCache

    def __init__(self, config: HiCacheConfig, namespace: Namespace = NAMESPACE) -> None:
        cache = create_cache(config, namespace, device_pages=16)
        assert isinstance(cache, HiRadixCache)
        self.cache = cache
        self.wrong = 0

    def serve(self, key: RadixKey) -> int:
        rid = key.tokens[:4].hex()
        self.cache.prefetch_from_storage(rid, key)
        wait_for(lambda: self.cache.check_prefetch_progress(rid), self.step)
        request = self.cache.begin_request(rid, key)
        assert request is not None
        transfer = self.cache.start_loading()
        if transfer is not None:
            transfer.wait_layer(GEOMETRY.layers - 1)
        for number, page in enumerate(request.pages[: key.pages(PAGE_TOKENS)].tolist()):
            for (region,), content in zip(self.cache.device.blocks.layers, expected(key, number), strict=True):
                row = region.numpy()[page]
                if number < request.shared_pages:
                    self.wrong += not np.array_equal(row, content)
                else:
                    row[:] = content
        found = request.shared_pages
        self.cache.cache_finished_req(request, key)
        return found


class HostEngine(Engine):
    """An engine that has its own device cache, over a HostCache."""

    cache: HostCache

    def __init__(self, config: HiCacheConfig, namespace: Namespace = NAMESPACE) -> None:
        self.cache = create_host_cache(config, namespace)
        self.wrong = 0

    def serve(self, key: RadixKey) -> int:
        rid, cache = key.tokens[:4].hex(), self.cache
        key = key.head(key.pages(PAGE_TOKENS) * PAGE_TOKENS)
        cache.prefetch(rid, key)
        wait_for(lambda: cache.check_prefetch(rid), self.step)
        found = cache.lookup(rid, key).pages
        if found:
            load = cache.begin_load(rid, key, 0, found)
            assert load is not None
            for number, page in enumerate(load.host_pages.tolist()):
                self.wrong += cache.host.payload(page) != expected(key, number).tobytes()
            cache.end_load(load, 0.001)
        write = cache.begin_write(rid, key)
        if write is not None:
            for number, page in enumerate(write.host_pages.tolist(), write.start_page):
                cache.host.payload(page)[:] = expected(key, number).tobytes()
            cache.end_write(write, complete=True)
        cache.abort(rid)
        return found


KINDS: dict[str, type[RadixEngine] | type[HostEngine]] = {"radix": RadixEngine, "host": HostEngine}


def main(kind: str, config: str) -> None:
    engine = KINDS[kind](HiCacheConfig.model_validate(json.loads(config)))
    for key in PROMPTS:
        engine.serve(key)
        engine.settle()
    page = engine.cache.host.alloc(1)
    assert page is not None
    engine.cache.host.payload(int(page[0]))[:100] = bytes(range(100))  # an incomplete copy
    print("ready", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])

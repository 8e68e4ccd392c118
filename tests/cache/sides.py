"""A cache of each kind with content, and an image of all state that a rejected call must not change."""

from __future__ import annotations

from typing import Any

from hicache.cache import ChunkCache, HiRadixCache, RequestKV, SessionCache, TreeCache
from hicache.keys import RadixKey
from tests.cache.world import GEOMETRY, AutoClosed, World, prompt
from tests.radix.machine import image

KINDS = ("tiered", "chunk", "session")
SERVED, RUNNING = prompt(1, 2), prompt(3, 4)


class Side(AutoClosed):
    """A cache that has served one prompt and runs a request of another, whose KV is written.

    In a session cache the request is a turn of the session `s`.
    """

    def __init__(self, kind: str, *, number: int = 0) -> None:
        self.world = World(kind=SessionCache if kind == "session" else HiRadixCache)
        self.cache: TreeCache = self.world.cache
        if kind == "chunk":
            self.cache = ChunkCache(self.world.device)
        elif isinstance(self.cache, SessionCache):
            self.cache.open_session("s")
            self.cache.join_session("running", "s")
        self.serve("served", prompt(1 + 10 * number, 2))
        self.key = prompt(3 + 10 * number, 4)
        self.request = self.begin("running", self.key)
        self.world.leave()
        super().__init__()

    @property
    def tiered(self) -> HiRadixCache:
        """Return the cache with tiers, for calls that other kinds do not have."""
        assert isinstance(self.cache, HiRadixCache)
        return self.cache

    @property
    def sessions(self) -> SessionCache:
        assert isinstance(self.cache, SessionCache)
        return self.cache

    def begin(self, rid: str, key: RadixKey) -> RequestKV:
        request = self.cache.begin_request(rid, key)
        assert request is not None
        self.world.fill(key, request.pages, request.shared_pages)
        return request

    def serve(self, rid: str, key: RadixKey) -> RequestKV:
        """Run a whole request and wait for its copies; the request has ended."""
        request = self.begin(rid, key)
        self.cache.cache_finished_req(request, key)
        self.world.settle()
        return request

    def image(self) -> dict[str, Any]:
        """Return counters, tree, requests, and all bytes of L1 and L2."""
        self.cache.check()
        tree, request = self.world.cache.tree, self.request
        return {
            "statistics": self.cache.statistics(),
            "tree": image(tree),
            "sessions": self.cache.session_statistics() if isinstance(self.cache, SessionCache) else None,
            "request": (request.pages.tolist(), request.shared_pages, request.key, request.ended),
            "l1": [
                region.numpy().tobytes() for layer in self.world.device.blocks.layers for region in layer
            ],
            "l1 free": self.world.device.allocator.free_pages,
            "l2": self.world.host.buffer.tobytes(),
            "attached": self.world.cache.storage.attached,
        }

    def close(self) -> None:
        """End the running request as usual, and assert that every used page belongs to the tree."""
        self.leave()
        if not self.request.ended:
            self.world.compare(self.key, self.request.pages[: len(self.key) // GEOMETRY.page_size])
            self.cache.cache_finished_req(self.request, self.key)
        assert self.cache.close()
        self.cache.check()
        self.world.cache.close()
        assert self.world.wrong_pages == 0
        tree = self.world.cache.tree
        assert self.world.device.allocator.used_pages == tree.device_evictable_pages

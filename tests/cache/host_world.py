"""A small HostCache, and an engine that calls it. The workers of the engine write the expected bytes of each page.

The bytes derive from the page key and the epoch, and all pages from the cache are compared with them.
"""

from __future__ import annotations

from collections.abc import Callable

from hicache.backends.kept import KeptFrames
from hicache.backends.storage import Storage
from hicache.cache import HostCache, HostLoad, HostWrite
from hicache.cache.break_even import BreakEven, Rates
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config import HiCacheConfig, TransferConfig
from hicache.controller import HiCacheController
from hicache.frame import FrameCodec
from hicache.keys import TOKEN_BYTES, RadixKey
from hicache.radix import RadixTree
from hicache.tiers import HostPool
from tests.cache.world import GEOMETRY, NAMESPACE, Stepped, configured, every_hit, memory_backend, prompt
from tests.stamps import Stamps

__all__ = ["GEOMETRY", "NAMESPACE", "HostWorld", "every_hit", "memory_backend", "prompt"]
PAGE_TOKENS = GEOMETRY.page_size


class HostWorld(Stepped):
    """A cache of `host_pages` over `backend`. `kind` is its class, for tests that break one on purpose."""

    cache: HostCache

    def __init__(  # noqa: PLR0913 - the parts that tests replace
        self,
        *,
        host_pages: int = 32,
        backend: Storage | None = None,
        config: HiCacheConfig | None = None,
        transfer: TransferConfig | None = None,
        position_bytes: int = TOKEN_BYTES,
        open_storage: Callable[[int], Storage] | None = None,
        break_even: BreakEven | None = None,
        host_codec: Callable[[int], FrameCodec] | None = None,
        kept: KeptFrames | None = None,
        host: HostPool | None = None,
        kind: type[HostCache] = HostCache,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.host = host or HostPool(GEOMETRY, host_pages)
        self.controller = HiCacheController(
            self.host, None, backend, configured(config, transfer), rates=len(Rates()), clock=clock
        )
        self.cache = kind(
            self.host,
            self.controller,
            position_bytes=position_bytes,
            open_storage=open_storage,
            break_even=break_even,
            host_codec=host_codec,
            kept=kept,
        )
        self.stamps = Stamps(GEOMETRY)
        self._epochs: dict[RadixTree, int] = {}
        super().__init__()

    def stamp(self, key: RadixKey, page: int, epoch: int | None = None) -> bytes:
        """Return the expected bytes of a page of a prompt."""
        keys = key.page_keys(PAGE_TOKENS, key.seed, 0, page + 1)
        return self.stamps.payload(keys[page], self.cache.weights_epoch if epoch is None else epoch)

    def copy(self, key: RadixKey, write: HostWrite, *, epoch: int | None = None) -> None:
        """Write the pages of `write`, as the workers do between `begin_write` and `end_write`."""
        for number, page in enumerate(write.host_pages.tolist(), write.start_page):
            self.host.payload(page)[:] = self.stamp(key, number, epoch)

    def compare(self, key: RadixKey, load: HostLoad, *, epoch: int | None = None) -> None:
        """Read the pages of `load`, as the workers do between `begin_load` and `end_load`, and compare their bytes."""
        for number, page in enumerate(load.host_pages.tolist(), load.start_page):
            assert self.host.payload(page) == self.stamp(key, number, epoch), f"page {number} of {load.rid} is wrong"

    def begin_write(self, rid: str, key: RadixKey, start_page: int = 0) -> HostWrite:
        """Begin a write. REQUIRES: L2 lacks pages of `key` and has room."""
        write = self.cache.begin_write(rid, key, start_page)
        assert write is not None
        return write

    def begin_load(self, rid: str, key: RadixKey, start_page: int, end_page: int) -> HostLoad:
        """Begin a load. REQUIRES: the pages are on L2."""
        load = self.cache.begin_load(rid, key, start_page, end_page)
        assert load is not None
        return load

    def write(self, rid: str, key: RadixKey, start_page: int = 0) -> HostWrite:
        """Write all pages that L2 lacks."""
        write = self.begin_write(rid, key, start_page)
        self.copy(key, write)
        self.cache.end_write(write, complete=True)
        self.cache.check()
        return write

    def load(self, rid: str, key: RadixKey, *, seconds: float = 0.001) -> int:
        """Load all pages that are on L2, and end the request. Return the number of pages."""
        found = self.cache.lookup(rid, key)
        assert not found.loading
        if found.pages:
            load = self.begin_load(rid, key, 0, found.pages)
            self.compare(key, load)
            self.cache.end_load(load, seconds)
        self.cache.abort(rid)
        self.cache.check()
        return found.pages

    def prefetch(self, rid: str, key: RadixKey) -> bool:
        """Prefetch, and wait for it. Return True if it was started."""
        started = self.cache.prefetch(rid, key)
        self.until(lambda: self.cache.check_prefetch(rid))
        return started

    def audit(self) -> None:
        """Assert that all pages of all trees, also of retired ones, have the right bytes."""
        for tree in self.cache._trees.all():
            epoch = self._epochs.setdefault(tree, self.cache.weights_epoch)
            for node in tree.nodes():
                assert node.device is None and node.host is not None
                for page_key, page in zip(tree.page_keys(node), node.host.tolist(), strict=True):
                    assert self.host.payload(page) == self.stamps.payload(page_key, epoch), repr(node)

    @property
    def free_pages(self) -> int:
        return self.host.allocator.free_pages

    def settle(self) -> None:
        """Step until no prefetch or store is in flight."""
        self.until(lambda: self.controller.idle)
        self.cache.poll()

    def close(self) -> None:
        """Close the cache, and assert that no page is reserved or held."""
        self.leave()
        self.settle()
        assert len(self.cache._trees.all()) == 1
        assert self.host.allocator.used_pages == self.cache.tree.host_evictable_pages
        assert self.cache.close()
        self.cache.check()

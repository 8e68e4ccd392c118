"""An engine that calls a cache in random order, on real threads. The tiers of the cache are much too small."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from hicache.backends.storage import Storage
from hicache.cache import RequestKV
from hicache.config import HiCacheConfig, PrefetchConfig, TransferConfig
from hicache.keys import RadixKey, page_keys
from hicache.types import PageIds
from tests.cache.world import GEOMETRY, World, prompt
from tests.stamps import Stamps
from tests.tuned import tuned

STEPS = 150
NO_POLICIES: Mapping[str, Any] = {}


class StampedWorld(World):
    """A world that writes and compares whole runs of pages at once, ten times faster than page by page."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._stamps = Stamps(GEOMETRY)
        # A row of a layer is K and then V.
        self._blocks = [np.split(region.numpy(), 2, axis=1) for (region,) in self.device.blocks.layers]

    def fill(self, key: RadixKey, pages: PageIds, first: int) -> None:
        rows = self._rows(key, len(pages))
        for layer, blocks in enumerate(self._blocks):
            for index, block in enumerate(blocks):
                block[pages[first : len(rows)]] = self._stamps.table[layer, index, rows[first:]]

    def compare(self, key: RadixKey, pages: PageIds) -> None:
        rows = self._rows(key, len(pages))
        assert len(rows) == len(pages)
        right = rows >= 0
        for layer, blocks in enumerate(self._blocks):
            for index, block in enumerate(blocks):
                right &= (block[pages] == self._stamps.table[layer, index, rows]).all(axis=1)
        self.compared_pages += len(pages)
        self.wrong_pages += len(pages) - int(right.sum())

    def _rows(self, key: RadixKey, pages: int) -> PageIds:
        return self._stamps.rows(page_keys(key.tokens, GEOMETRY.page_size, key.seed)[:pages])


def small_world(
    backend: Storage,
    *,
    device_pages: int = 24,
    host_pages: int = 40,
    scale: int = 1,
    timeout_s: float = 0.005,
    policies: Mapping[str, Any] = NO_POLICIES,
    prefetch_policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout",
    **changes: Any,
) -> World:
    """Return a world that reaches all its limits often. `scale` multiplies the limits; `changes` go to World."""
    return StampedWorld(
        device_pages=device_pages * scale, host_pages=host_pages * scale, backend=backend,
        config=HiCacheConfig(
            load_back_threshold_tokens=4,
            prefetch=tuned(
                PrefetchConfig,
                policy=prefetch_policy, threshold_tokens=8, timeout_base=timeout_s, timeout_per_1024_tokens=0,
                operations_max=4,
            ),
            transfer=tuned(
                TransferConfig,
                storage_batch_pages=2 * scale, write_pages_max=30 * scale, load_pages_max=20 * scale,
                store_host_share=0.3,
            ),
            **policies,
        ),
        **changes,
    )


class RandomEngine:
    """An engine that runs a few requests and chooses each next action at random. Prompts grow with `scale`."""

    def __init__(self, numbers: random.Random, world: World, scale: int = 1) -> None:
        self.random = numbers
        self.world = world
        self.waiting: list[tuple[str, RadixKey]] = []
        self.running: list[tuple[RequestKV, RadixKey]] = []
        self.count = 0
        self._scale = scale

    def prompt(self) -> RadixKey:
        length = self.random.randint(1, 10)
        salt = self.random.choice([None, None, "tenant"])
        # Each choice is `scale` pages long, so that prompts share long runs.
        pages = [page for page in self.random.choices(range(3), k=length) for _ in range(self._scale)]
        return prompt(*pages, tail=self.random.randint(1, 3), salt=salt)

    def arrive(self) -> None:
        rid, key = f"r{self.count}", self.prompt()
        self.count += 1
        self.world.cache.prefetch_from_storage(rid, key)
        self.waiting.append((rid, key))

    def admit(self) -> None:
        for rid, key in list(self.waiting):
            if len(self.running) < 4 and self.world.cache.check_prefetch_progress(rid):
                request = self.world.try_begin(rid, key)
                if request is not None:
                    self.waiting.remove((rid, key))
                    self.running.append((request, key))

    def share(self) -> None:
        if self.running:
            request, key = self.random.choice(self.running)
            self.world.cache.cache_unfinished_req(request, key)

    def finish(self) -> None:
        if self.running:
            request, key = self.running.pop(self.random.randrange(len(self.running)))
            self.world.cache.cache_finished_req(request, key if self.random.random() < 0.9 else None)

    def abort(self) -> None:
        if self.waiting and self.random.random() < 0.2:
            rid, _ = self.waiting.pop(self.random.randrange(len(self.waiting)))
            self.world.cache.abort_prefetch(rid)

    def pressure(self) -> None:
        self.world.cache.evict(self._scale * self.random.randint(1, 12))

    def pin(self) -> None:
        """Rarely: pin the cached pages of a prompt for a short time. Some pins are released before they expire."""
        if self.random.random() < 0.3:
            pin = self.world.cache.pin(self.prompt(), ttl_s=0.02)
            if pin is not None and self.random.random() < 0.3:
                pin.release()

    def clear(self) -> None:
        """Rarely: empty the cache."""
        if self.random.random() < 0.05:
            self.world.cache.clear()

    def next_action(self) -> Callable[[], None]:
        actions = [self.arrive, self.arrive, self.admit, self.admit, self.share, self.finish, self.finish]
        actions += [self.abort, self.pressure, self.pin, self.clear, self.world.step, self.world.step]
        return self.random.choice(actions)

    def act(self) -> None:
        """Take the next random action."""
        self.next_action()()
        self.world.cache.check()

    def run(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.act()
        self.settle()

    def settle(self) -> None:
        """Serve the waiting requests, end all requests, and wait for all operations."""
        while self.waiting or self.running:
            self.wind_down()
        self.world.settle()

    def wind_down(self) -> None:
        """Finish one request, admit waiting ones, and run a step."""
        self.finish()
        self.admit()
        self.world.step()

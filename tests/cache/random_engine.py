"""An engine that does random things to a cache whose tiers are far too small."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hicache.backends.base import StorageBackend
from hicache.cache import CacheOptions, RequestKV
from hicache.controller import ControllerOptions
from hicache.keys import RadixKey
from tests.cache.world import World, codec, prompt

STEPS = 150


def small_world(
    backend: StorageBackend, *, device_pages: int = 24, host_pages: int = 40, timeout_s: float = 0.005, **changes: Any
) -> World:
    """A world whose every bound is hit all the time; `changes` are further arguments of World."""
    return World(
        device_pages=device_pages, host_pages=host_pages, backend=backend,
        options=CacheOptions(
            prefetch_threshold_tokens=8, load_back_threshold_tokens=4,
            prefetch_timeout_base_s=timeout_s, prefetch_timeout_per_1024_tokens_s=0,
        ),
        controller_options=ControllerOptions(
            storage_batch_pages=2, write_pages_max=30, load_pages_max=20, prefetch_operations_max=4,
            backup_bytes_max=12 * codec().frame_bytes,
        ),
        **changes,
    )  # fmt: skip


class RandomEngine:
    """Keeps a few requests running and does the next random thing to one of them."""

    def __init__(self, numbers: random.Random, world: World) -> None:
        self.random = numbers
        self.world = world
        self.waiting: list[tuple[str, RadixKey]] = []
        self.running: list[tuple[RequestKV, RadixKey]] = []
        self.count = 0

    def prompt(self) -> RadixKey:
        length = self.random.randint(1, 10)
        salt = self.random.choice([None, None, "tenant"])
        return prompt(*[self.random.randrange(3) for _ in range(length)], tail=self.random.randint(1, 3), salt=salt)

    def arrive(self) -> None:
        rid, key = f"r{self.count}", self.prompt()
        self.count += 1
        self.world.cache.prefetch_from_storage(rid, key)
        self.waiting.append((rid, key))

    def admit(self) -> None:
        for rid, key in list(self.waiting):
            if len(self.running) < 4 and self.world.cache.check_prefetch_progress(rid):
                request = self.world.begin(rid, key)
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
        self.world.cache.evict(self.random.randint(1, 12))

    def next_action(self) -> Callable[[], None]:
        actions = [self.arrive, self.arrive, self.admit, self.admit, self.share, self.finish, self.finish]
        actions += [self.abort, self.pressure, self.world.step, self.world.step]
        return self.random.choice(actions)

    def run(self) -> None:
        for _ in range(STEPS):
            self.next_action()()
            self.world.cache.check()
        while self.waiting or self.running:
            self.wind_down()
        self.world.settle()

    def wind_down(self) -> None:
        """Bring the requests nearer to their end."""
        self.finish()
        self.admit()
        self.world.step()

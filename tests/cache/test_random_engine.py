"""Random requests on real threads over three tiers that are far too small; every page served is compared bytewise."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest

from hicache.cache import CacheOptions, RequestKV
from hicache.controller import ControllerOptions
from hicache.frame import HEADER_BYTES
from hicache.keys import RadixKey
from tests.cache.world import World, codec, memory_backend, prompt
from tests.seeds import rng, seeds

STEPS = 150


@pytest.fixture(autouse=True)
def _switch_threads_often() -> Iterator[None]:
    """Have the interpreter switch threads every few instructions, which brings races out."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class RandomEngine:
    """Keeps a few requests running and does the next random thing to one of them."""

    def __init__(self, numbers: random.Random) -> None:
        self.random = numbers
        self.world = World(
            device_pages=24, host_pages=40, backend=memory_backend(100 * codec().frame_bytes),
            options=CacheOptions(
                prefetch_threshold_tokens=8, load_back_threshold_tokens=4,
                prefetch_timeout_base_s=0.005, prefetch_timeout_per_1024_tokens_s=0,
            ),
            controller_options=ControllerOptions(
                storage_batch_pages=2, write_pages_max=30, load_pages_max=20, prefetch_operations_max=4,
                backup_bytes_max=12 * codec().frame_bytes,
            ),
        )  # fmt: skip
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

    def run(self) -> None:
        actions = [self.arrive, self.arrive, self.admit, self.admit, self.share, self.finish, self.finish]
        actions += [self.abort, self.pressure, self.world.step, self.world.step]
        for _ in range(STEPS):
            self.random.choice(actions)()
            self.world.cache.check()
        while self.waiting or self.running:
            self.finish()
            self.admit()
            self.world.step()
        self.world.settle()


@pytest.mark.parametrize("seed", seeds(30))
def test_random_requests_are_served_right_bytes_and_the_books_balance(seed: int) -> None:
    engine = RandomEngine(rng(seed))
    engine.run()
    hits = engine.world.cache.statistics().hit_tokens
    engine.world.close()
    assert engine.world.wrong_pages == 0
    assert engine.world.compared_pages > 0
    assert hits["device"] > 0 and hits["host"] + hits["storage"] > 0


def test_the_comparison_finds_a_byte_that_changed_on_l2() -> None:
    """Negative control: with one payload byte of a host page changed, the engine counts a wrong page."""
    world = World(backend=None)
    world.serve("a", prompt(1, 2))
    world.settle()
    world.cache.evict(100)
    node = world.cache.match_prefix(prompt(1, 2)).node
    assert node.host is not None
    world.host.frame(int(node.host[0]))[HEADER_BYTES] ^= 1
    world.serve("b", prompt(1, 2))
    assert world.wrong_pages == 1
    world.wrong_pages = 0
    world.close()

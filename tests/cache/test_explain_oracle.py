"""Random traces beside an oracle that remembers everything (`shadow`): all accounts agree with it, token by token.

The caches, workers, stores and faults are those of the other random tests. TEST_SEED=n replays one seed, SOAK_FACTOR=n
runs n times as many.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from hicache.backends.storage import Storage
from hicache.cache import HiRadixCache, HostLoad, HostWrite
from hicache.cache.explain import Explainer, Missed, PromptTokens
from hicache.config import BreakEvenConfig, TransferConfig
from hicache.events.types import Medium
from hicache.ghosts import KINDS, Kind, Reason
from hicache.keys import PAGE_KEY_BYTES, TOKEN_BYTES, RadixKey
from hicache.radix import Node, RadixTree
from tests.cache.host_world import PAGE_TOKENS, HostWorld, every_hit, memory_backend, prompt
from tests.cache.shadow import Shadow
from tests.cache.test_engine_cache import Engine, engine_of
from tests.cache.test_random_sessions import RandomTalks
from tests.cache.world import prefetch
from tests.seeds import rng, seeds
from tests.simulation.memory import Finding
from tests.simulation.setting import Parts, Setting
from tests.simulation.simulation import Simulation
from tests.tuned import tuned

pytestmark = pytest.mark.long


def simulate(seed: int, draw: Callable[[random.Random], Setting], *, hints: bool = False,
             explainer: type[Explainer] = Explainer) -> Shadow:
    """Run one seed of the simulation with the oracle. Raises Finding."""
    shadows: list[Shadow] = []

    def attach(cache: HiRadixCache) -> None:
        cache.explainer.__class__ = explainer
        shadows.append(shadow := Shadow(cache, lambda: simulation.clock.time_s))
        shadow.watch_requests()

    parts = Parts(draw=draw, hints=hints, after=attach)
    simulation = Simulation.__new__(Simulation)  # the oracle needs its clock before it is complete
    simulation.__init__(seed, parts)  # type: ignore[misc]
    simulation.run()
    return shadows[0]


@pytest.mark.parametrize(
    ("draw", "hints", "count"),
    [(Setting.draw, False, 25), (Setting.draw_long, False, 20), (Setting.draw_pooled, False, 8),
     (Setting.draw_long, True, 8)],
    ids=["short", "long", "pooled", "hinted"],
)
def test_the_accounts_of_a_simulation_are_those_of_the_oracle(
    draw: Callable[[random.Random], Setting], hints: bool, count: int
) -> None:
    """All policies, sizes and faults; clears, new weights, other engines, harmed and switched storage."""
    all_seeds, kinds, hits, compared = seeds(count), Counter[Kind](), Counter[str](), 0
    for seed in all_seeds:
        try:
            shadow = simulate(seed, draw, hints=hints)
        except Finding as finding:
            raise AssertionError(f"TEST_SEED={seed} replays this.\n{finding}") from finding
        kinds.update(shadow.kinds)
        hits.update(shadow.hits)
        compared += shadow.compared
    assert compared > 5 * len(all_seeds)
    usual = {Reason.NEW, Reason.EVICTED, Reason.NOT_STORED, Reason.LATE, Reason.UNAVAILABLE, Reason.TAIL}
    assert len(all_seeds) < count or (usual <= {reason for reason, _ in kinds} and hits["device"] and hits["host"])
    assert set(kinds) <= set(KINDS)


@pytest.mark.parametrize("seed", seeds(6))
def test_the_accounts_of_sessions_are_those_of_the_oracle(seed: int) -> None:
    """The partial page of a session counts as on L1."""
    engine = RandomTalks(rng(seed))
    shadow = Shadow(engine.talks.cache, engine.talks.clock)
    shadow.watch_requests()
    engine.run()
    engine.talks.close()
    assert shadow.compared > 20


class RandomEngineRequests:
    """An engine that owns its pages, and runs requests with long common prefixes on a small L1 and L2."""

    def __init__(self, numbers: random.Random, engine: Engine) -> None:
        self.random, self.engine = numbers, engine
        self.shadow = Shadow(engine.cache)
        self.shadow.watch_engine()

    def begin(self) -> None:
        if len(self.engine.running) < 3:
            tokens = [number for number in self.random.choices(range(3), k=self.random.randint(1, 6)) for _ in "abcd"]
            self.engine.begin([*tokens, *self.random.choices(range(3), k=self.random.randint(1, 4))])

    def compute(self) -> None:
        for request in self.engine.running:
            self.engine.compute(request, self.random.randint(1, 8))

    def end(self) -> None:
        if self.engine.running:
            self.engine.end(self.random.choice(self.engine.running))

    def empty(self) -> None:
        if self.random.random() < 0.2 and not self.engine.running:
            self.engine.cache.clear()

    def make_room(self) -> None:
        self.engine.cache.make_room(self.random.randint(1, 8))

    def run(self, steps: int) -> None:
        actions = [self.begin, self.begin, self.compute, self.end, self.end, self.make_room, self.empty]
        for _ in range(steps):
            self.random.choice(actions)()
            self.engine.cache.poll()
            self.engine.check()


@pytest.mark.parametrize("seed", seeds(4))
def test_the_accounts_of_an_engine_that_owns_l1_are_those_of_the_oracle(seed: int) -> None:
    numbers = rng(seed)
    entries: dict[str, Any] = {
        "pages": 14, "bigram_keys": numbers.random() < 0.3, "host": {"tokens": numbers.choice([40, 200])},
        "write_policy": numbers.choice(["write_through", "write_through_selective", "write_back"]),
        "load_back_threshold_tokens": numbers.choice([1, 8]),
    }
    if numbers.random() < 0.7:
        entries["storage"] = {"type": "memory"}
    with engine_of(**entries) as engine:
        requests = RandomEngineRequests(numbers, engine)
        requests.run(150)
        assert requests.shadow.compared > 20


class RandomHostRequests:
    """An engine that manages its device pages: a few requests at a time, each in the order of HostCache. `stores` by
    epoch are those of the process before."""

    def __init__(self, seed: int, stores: dict[int, Storage] | None = None, *, hashed: bool = False) -> None:
        self.random = numbers = rng(seed)
        self.hashed, stored = hashed, stores is not None
        self.stores = {} if stores is None else stores
        self.world = HostWorld(
            host_pages=numbers.choice([10, 20, 100]),
            backend=self._open(0) if stored else None,
            open_storage=self._open if stored else None,
            config=every_hit(
                write_policy=numbers.choice(["write_through", "write_through_selective"]),
                break_even=BreakEvenConfig(mode=numbers.choice(["always", "measure"])),
                load_back_threshold_tokens=numbers.choice([4, 4, 12]),
                prefetch=prefetch(
                    policy=numbers.choice(["timeout", "best_effort", "wait_complete"]), timeout_base=0.05,
                    threshold_tokens=numbers.choice([4, 12]),
                ),
            ),
            transfer=tuned(TransferConfig, store_host_share=1.0, storage_batch_pages=2),
            position_bytes=PAGE_KEY_BYTES if self.hashed else TOKEN_BYTES,
        )
        self.world.leave()
        self.shadow = Shadow(self.world.cache)
        self.shadow.watch_host()
        self.waiting: list[tuple[str, RadixKey]] = []
        self.loading: list[tuple[RadixKey, HostLoad]] = []
        self.computing: list[tuple[str, RadixKey]] = []
        self.writing: list[tuple[RadixKey, HostWrite]] = []
        self.count = 0

    def _open(self, epoch: int) -> Storage:
        return self.stores.setdefault(epoch, memory_backend(epoch=epoch))

    def arrive(self) -> None:
        if len(self.waiting) + len(self.loading) + len(self.computing) >= 4:
            return
        pages = self.random.choices(range(2), k=self.random.randint(1, 7))
        key = prompt(*pages, tail=0, salt=self.random.choice([None, None, "tenant"]))
        if self.hashed:
            key = RadixKey.of_hashes(key.page_keys(PAGE_TOKENS, key.seed, 0, len(pages)))
        self.count += 1
        rid = f"r{self.count}"
        if self.random.random() < 0.9:
            self.world.cache.prefetch(rid, key)
        self.waiting.append((rid, key))

    def begin(self) -> None:
        """Look a request up. If something pays, load it; otherwise compute it."""
        if not self.waiting:
            return
        rid, key = self.random.choice(self.waiting)
        cache = self.world.cache
        if not cache.check_prefetch(rid) and self.random.random() < 0.9:
            return
        device = self.random.choice([0, 0, self.random.randrange(key.pages(PAGE_TOKENS) + 1)])
        found = cache.lookup(rid, key, device, unshared=self.random.random() < 0.1)
        if found.loading:
            return
        self.waiting.remove((rid, key))
        unshared = cache._requests[rid].unshared
        if found.pages and not unshared and self.random.random() < 0.9:
            load = cache.begin_load(rid, key, device, device + found.pages)
            assert load is not None
            self.loading.append((key, load))
        else:
            cache.record_progress(rid, 0)
            self.computing.append((rid, key))

    def end_load(self) -> None:
        if self.loading:
            key, load = self.loading.pop(self.random.randrange(len(self.loading)))
            self.world.cache.end_load(load, self.random.choice([0.001, 0.001, None]))
            self.world.cache.record_progress(load.rid, 0)
            self.computing.append((load.rid, key))

    def write(self) -> None:
        if self.computing:
            rid, key = self.computing.pop(self.random.randrange(len(self.computing)))
            if self.random.random() < 0.9 and (write := self.world.cache.begin_write(rid, key)) is not None:
                self.writing.append((key, write))
            self.world.cache.abort(rid)

    def end_write(self) -> None:
        if self.writing:
            key, write = self.writing.pop(0)
            epoch = self.world._epochs.setdefault(write._tree, self.world.cache.weights_epoch)
            self.world.copy(key, write, epoch=epoch)
            self.world.cache.end_write(write, complete=self.random.random() < 0.9)

    def empty(self) -> None:
        if self.random.random() < 0.2:
            cache = self.world.cache
            cache.update_weights(cache.weights_epoch + 1) if self.random.random() < 0.5 else cache.clear()

    def run(self, steps: int = 300) -> None:
        actions = [self.arrive, self.arrive, self.begin, self.begin, self.begin, self.end_load, self.end_load]
        actions += [self.write, self.write, self.end_write, self.end_write, self.world.step, self.empty]
        for _ in range(steps):
            self.random.choice(actions)()
            self.world.step()
        while self.waiting or self.loading or self.computing or self.writing:
            for action in (self.begin, self.end_load, self.write, self.end_write, self.world.step):
                action()
        self.world.close()


@pytest.mark.parametrize("seed", seeds(8))
def test_the_accounts_of_a_host_cache_are_those_of_the_oracle(seed: int) -> None:
    """The second process finds the pages of the first one in storage, and knows of no other."""
    numbers = rng(seed)
    stores: dict[int, Storage] | None = {} if numbers.random() < 0.7 else None
    hashed = numbers.random() < 0.5
    for process in range(2):
        requests = RandomHostRequests(seed + process, stores, hashed=hashed)
        requests.run(200)
        assert requests.shadow.compared > 10


# Negative controls: explainers that are broken on purpose


class ForgetsDepartures(Explainer):
    """Does not record that pages leave memory."""

    def left(self, tree: RadixTree, node: Node, medium: Medium, *, has_storage: bool, now_s: float) -> None:
        return


class ForgetsClears(Explainer):
    """Does not record that the cache is emptied."""

    def cleared(self, tree: RadixTree, now_s: float) -> None:
        tree.on_left = None


class CountsFoundPagesAsNew(Explainer):
    """Forgets what storage has answered."""

    def begin(
        self, account: PromptTokens, key: RadixKey, tree: RadixTree, hits: tuple[int, int, int], whole_pages: int,
        missed: Missed,
    ) -> None:
        missed = missed._replace(answer=missed.answer._replace(end_page=0, is_whole=True))
        super().begin(account, key, tree, hits, whole_pages, missed)


class CountsAnotherTier(Explainer):
    """Names the other tier of memory."""

    def left(self, tree: RadixTree, node: Node, medium: Medium, *, has_storage: bool, now_s: float) -> None:
        other = Medium.HOST if medium is Medium.DEVICE else Medium.DEVICE
        super().left(tree, node, other, has_storage=has_storage, now_s=now_s)


class IgnoresTheWeights(Explainer):
    """Does not compare the epoch of a page with that of the weights."""

    def left(self, tree: RadixTree, node: Node, medium: Medium, *, has_storage: bool, now_s: float) -> None:
        self.epoch = tree.epoch
        super().left(tree, node, medium, has_storage=has_storage, now_s=now_s)

    def begin(
        self, account: PromptTokens, key: RadixKey, tree: RadixTree, hits: tuple[int, int, int], whole_pages: int,
        missed: Missed,
    ) -> None:
        ghosts = self._ghosts._generations
        for ghost in ghosts:
            ghost.update({page: departure._replace(epoch=self.epoch) for page, departure in ghost.items()})
        super().begin(account, key, tree, hits, whole_pages, missed)


class CountsOnePageLess(Explainer):
    """Takes the last whole page for a part of the tail: the sum is still right."""

    def begin(
        self, account: PromptTokens, key: RadixKey, tree: RadixTree, hits: tuple[int, int, int], whole_pages: int,
        missed: Missed,
    ) -> None:
        super().begin(account, key, tree, hits, max(sum(hits), whole_pages - 1), missed)


@pytest.mark.parametrize(
    "kind",
    [ForgetsDepartures, ForgetsClears, CountsFoundPagesAsNew, CountsAnotherTier, IgnoresTheWeights, CountsOnePageLess],
)
def test_the_oracle_finds_an_explainer_that_is_broken(kind: type[Explainer]) -> None:
    for seed in range(40):
        try:
            simulate(seed, Setting.draw_long, explainer=kind)
        except Finding as finding:
            assert "the oracle expects" in str(finding)
            return
    pytest.fail("not found within 40 seeds")

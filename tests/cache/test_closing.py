"""`close` stores the pages that storage lacks, most recently used first, and counts those that it could not."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import Direction, SetOutcome
from hicache.backends.calls import Call
from hicache.backends.guard import Override
from hicache.config import HiCacheConfig
from hicache.controller.ranks import TorchRankGroup
from hicache.frame import PageBuffer
from hicache.keys import RadixKey
from hicache.shared_memory import path_of
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import Indices
from tests.cache.host_world import HostWorld
from tests.cache.keeping import PAGE_TOKENS, RadixEngine, options
from tests.cache.world import GatedBackend, LastingBackend, World, codec, every_hit, memory_backend, prompt
from tests.ranks import gloo_ranks
from tests.waiting import wait_for

pytestmark = pytest.mark.long

PROMPTS = [prompt(*range(first, first + 5)) for first in (10, 20, 30, 40)]
PAGES = 20  # of all prompts
BACK = every_hit(write_policy="write_back")
SELECTIVE = "write_through_selective"


def stored_pages(backend: LastingBackend, key: RadixKey) -> int:
    """Return how many leading pages of a prompt are stored."""
    keys = key.page_keys(PAGE_TOKENS, key.seed, 0, key.pages(PAGE_TOKENS))
    peek = functools.partial(backend.driver.peek, backend.codec.namespace)
    return next((number for number, key in enumerate(keys) if peek(key) is None), len(keys))


def closed(world: World | HostWorld, timeout_s: float | None = None) -> int:
    """Close the cache of a world, whose threads must end. Return the pages that it could not store."""
    world.leave()
    assert world.cache.close(timeout_s)
    world.cache.check()
    return world.cache.statistics().unsaved_pages


def compute(world: World, keys: Sequence[RadixKey] = PROMPTS) -> None:
    for number, key in enumerate(keys):
        world.serve(f"r{number}", key)


def computed(backend: LastingBackend, **parts: Any) -> World:
    """Return a world with write_back that has computed PROMPTS."""
    world = World(**{"device_pages": 24, "backend": backend, "config": BACK, **parts})
    compute(world)
    return world


class FullBackend(LastingBackend):
    """A store that takes `pages` pages, and rejects all others."""

    def __init__(self, pages: int) -> None:
        super().__init__(codec())
        self.left, self.calls = pages, 0

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        self.calls += 1
        taken = min(self.left, len(keys))
        self.left -= taken
        outcomes = super()._set(call, keys[:taken], pages[:taken], parent)
        return outcomes + [SetOutcome.REJECTED] * (len(keys) - taken)


@pytest.mark.parametrize(
    ("host_pages", "config", "stored"), [(32, BACK, 5), (6, BACK, 5), (32, every_hit(write_policy=SELECTIVE), 0)],
    ids=["together", "in waves, because L2 is small", "not worth it, because they were used once"],
)
def test_the_pages_that_are_only_on_l1_are_stored(host_pages: int, config: HiCacheConfig, stored: int) -> None:
    backend = memory_backend()
    world = computed(backend, host_pages=host_pages, config=config)
    assert closed(world) == 0
    assert [stored_pages(backend, key) for key in PROMPTS] == [stored] * 4


def test_the_most_recently_used_prompts_are_stored_first_and_each_from_its_first_page() -> None:
    backend = FullBackend(8)
    world = computed(backend, host_pages=5)
    world.attempt("again", PROMPTS[1])
    assert closed(world) == PAGES - 5  # a run that is stored in part counts as a whole
    assert [stored_pages(backend, key) for key in PROMPTS] == [0, 5, 0, 3]


def test_pages_that_are_stored_already_are_not_stored_again() -> None:
    backend = GatedBackend()
    config = every_hit(write_policy="write_back", transfer={"store_host_share": 1.0})
    world = World(device_pages=24, backend=backend, config=config)
    compute(world, PROMPTS[:2])
    world.cache.evict(10)  # which writes back and stores
    compute(world, PROMPTS[2:])
    world.settle()
    assert backend.statistics().sets[SetOutcome.STORED] == 10
    assert closed(world) == 0
    sets = backend.statistics().sets
    assert sets[SetOutcome.STORED] == PAGES and not sets.get(SetOutcome.PRESENT)


def test_pages_whose_store_was_dropped_are_stored_at_the_end() -> None:
    """The relative of write_back: with write_through they wait for their next use, which does not come."""
    backend = GatedBackend()
    backend.writes.clear()
    world = World(device_pages=24, backend=backend, config=every_hit(transfer={"store_host_share": 0.2}))
    compute(world)
    world.until(lambda: world.cache.writeback_pages == 0 and backend.entered.is_set())
    world.until(lambda: world.controller._backup_pages == 0)
    assert world.cache.statistics().controller.refused["backup"] > 0
    backend.writes.set()
    assert closed(world) == 0
    assert [stored_pages(backend, key) for key in PROMPTS] == [5, 5, 5, 5]


def test_a_host_cache_stores_its_pages_whose_store_was_dropped() -> None:
    backend = GatedBackend()
    backend.writes.clear()
    world = HostWorld(backend=backend, config=every_hit(transfer={"store_host_share": 0.2}))
    keys = [key.head(20) for key in PROMPTS]
    for number, key in enumerate(keys):
        world.write(f"r{number}", key)
    assert world.cache.statistics().controller.refused["backup"] > 0
    backend.writes.set()
    assert closed(world) == 0
    assert [stored_pages(backend, key) for key in keys] == [5, 5, 5, 5]


def test_without_storage_nothing_is_copied_and_nothing_counts_as_lost() -> None:
    world = World(device_pages=24, config=BACK)
    compute(world)
    assert closed(world) == 0
    assert world.cache.statistics().controller.written_pages == 0


def test_a_store_that_takes_nothing_is_tried_twice_and_all_pages_are_counted() -> None:
    backend = FullBackend(0)
    world = computed(backend)
    assert closed(world) == PAGES
    assert 0 < backend.calls <= 2 * len(PROMPTS)


def test_a_store_that_hangs_does_not_delay_the_end_beyond_its_time() -> None:
    backend = GatedBackend()
    backend.writes.clear()
    world = computed(backend)
    world.leave()
    assert not world.cache.close(0.3)
    assert world.cache.statistics().unsaved_pages == PAGES
    backend.writes.set()
    wait_for(lambda: world.cache.statistics().controller.workers_alive == 0)


def test_pages_of_earlier_weights_are_not_stored() -> None:
    stores = [memory_backend(epoch=0), memory_backend(epoch=1)]
    world = World(device_pages=24, backend=stores[0], config=BACK, open_storage=lambda epoch: stores[epoch])
    compute(world)
    world.cache.update_weights(1)
    world.until(lambda: world.controller.backend is stores[1])
    assert closed(world) == 0
    assert [stored_pages(store, PROMPTS[0]) for store in stores] == [0, 0]


class BrokenLoads(CpuCopyEngine):
    """A copy engine whose loads fail on the device."""

    def _load_layer(self, layer: int, host_blocks: Indices, blocks: Indices) -> None:
        raise OSError("device lost")


def test_after_a_failed_device_copy_nothing_is_stored_because_l1_is_unknown() -> None:
    backend = memory_backend()
    world = World(device_pages=24, backend=backend, config=BACK, copies=BrokenLoads)
    compute(world, PROMPTS[:2])
    world.cache.evict(5)
    world.settle()
    assert world.admit("again", PROMPTS[0]).load is not None
    world.cache.start_loading()
    world.settle()
    assert closed(world) == 5
    assert [stored_pages(backend, key) for key in PROMPTS[:2]] == [5, 0]


def test_all_ranks_store_their_pages() -> None:
    """Two ranks with different stores, of which none waits for the other at its end."""
    backends = [memory_backend(), memory_backend()]

    def run(group: TorchRankGroup, backend: LastingBackend) -> int:
        world = World(device_pages=24, host_pages=8, backend=backend, config=BACK, ranks=group)
        compute(world)
        return closed(world)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, gloo_ranks(2, deadline_s=60), backends)) == [0, 0]
    for backend in backends:
        assert [stored_pages(backend, key) for key in PROMPTS] == [5, 5, 5, 5]


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"hicache-test-closing-{os.getpid()}"
    yield chosen
    path_of(chosen).unlink(missing_ok=True)


def test_memory_that_is_kept_for_the_next_process_gets_the_pages_of_l1(name: str) -> None:
    for expected in (0, 5):
        engine = RadixEngine(HiCacheConfig.model_validate(options(name, write_policy="write_back")))
        with closing(engine.cache):
            assert [engine.serve(key) for key in PROMPTS[:3]] == [expected] * 3
        assert engine.wrong == 0
        del engine
        gc.collect()  # unmaps the memory, like the end of a process


def test_the_log_says_how_many_pages_were_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**options("", write_policy="write_back"), "host": {"tokens": 128}}
    config["storage"] = {"type": "file", "options": {"path": str(tmp_path / "pages")}}
    engine = RadixEngine(HiCacheConfig.model_validate(config))
    for key in PROMPTS[:3]:
        engine.serve(key)
    engine.cache.storage.override(Direction.WRITE, Override.OFF)
    with caplog.at_level("WARNING", logger="hicache.cache"):
        assert engine.cache.close()
    assert engine.cache.statistics().unsaved_pages == 15
    assert "15 pages are lost" in caplog.text


def engine_of(directory: Path, host_pages: int, policy: str = "write_back") -> RadixEngine:
    """Return an engine over a file store, with 16 pages of L1."""
    config = options("", host_pages=host_pages, write_policy=policy)
    config["host"] = {"tokens": host_pages * PAGE_TOKENS}
    config["storage"] = {"type": "file", "options": {"path": str(directory)}}
    return RadixEngine(HiCacheConfig.model_validate(config))


def serve_unsaved(engine: RadixEngine, keys: Sequence[RadixKey]) -> None:
    """Serve prompts while an operator has switched off the writes of the store."""
    engine.cache.storage.override(Direction.WRITE, Override.OFF)
    for key in keys:
        engine.cache.evict(max(0, 6 - engine.cache.device.allocator.free_pages))
        engine.settle()
        engine.serve(key)
    engine.settle()


@pytest.mark.parametrize(
    ("policy", "host_pages"), [("write_back", 15), ("write_back", 20), ("write_through", 8), ("write_through", 20)]
)
def test_after_an_outage_pages_of_l1_replace_no_page_of_l2_that_is_not_stored(
    tmp_path: Path, policy: str, host_pages: int
) -> None:
    keys = [prompt(*range(first, first + 5)) for first in range(10, 70, 10)]
    engine = engine_of(tmp_path, host_pages, policy)
    serve_unsaved(engine, keys)
    peeks = [engine.cache.peek(key) for key in keys]
    cached = [peek.device_pages + peek.host_pages for peek in peeks]
    engine.cache.storage.override(Direction.WRITE, Override.AUTO)
    assert engine.cache.close()
    assert engine.cache.statistics().unsaved_pages == 0
    again = engine_of(tmp_path, 64, "write_through")
    with closing(again.cache):
        assert [again.serve(key) for key in keys] == cached
    assert sum(cached) >= 15


def test_pages_of_l2_that_give_way_to_their_prefix_at_the_end_count_as_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """L2 is full of continuations that cannot be stored before their common prefix, which is only on L1."""
    keys = [prompt(1, 2, 3, 4, 5, *range(first, first + 3)) for first in (10, 20, 30)]
    engine = engine_of(tmp_path, 6)
    serve_unsaved(engine, [prompt(1, 2, 3, 4, 5)])
    for key in keys[:2]:
        serve_unsaved(engine, [key])
        engine.cache.evict(3)
        engine.settle()
    serve_unsaved(engine, keys[2:])
    assert [engine.cache.peek(key).host_pages for key in keys] == [3, 3, 0]
    engine.cache.storage.override(Direction.WRITE, Override.AUTO)
    with caplog.at_level("WARNING", logger="hicache.cache"):
        assert engine.cache.close()
    assert engine.cache.statistics().unsaved_pages == 6
    assert "6 pages are lost" in caplog.text
    again = engine_of(tmp_path, 32)
    with closing(again.cache):
        assert [again.serve(key) for key in keys] == [5, 5, 8]


@pytest.mark.parametrize("is_used", [False, True])
def test_pages_that_storage_has_evicted_are_stored_again_only_if_they_were_used_since(is_used: bool) -> None:
    """Otherwise they would replace pages that were used later."""
    backend = memory_backend(capacity_bytes=10 * codec().frame_bytes)
    world = World(device_pages=32, backend=backend, config=every_hit(transfer={"store_host_share": 1.0}))
    compute(world)
    world.settle()
    world.until(lambda: world.cache.statistics().lost_pages == 10)
    assert [stored_pages(backend, key) for key in PROMPTS] == [0, 0, 5, 5]
    if is_used:
        world.cache.tree.match(PROMPTS[0])
    assert closed(world) == 0
    assert [stored_pages(backend, key) for key in PROMPTS] == ([5, 0, 0, 5] if is_used else [0, 0, 5, 5])

"""Two pipeline stages of unequal length with two tensor-parallel ranks each, over one file store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hicache.cache import HiRadixCache, create_cache
from hicache.cache.break_even import PREFILL_TOKENS_MIN, WINDOW, Route
from hicache.config import HiCacheConfig
from hicache.controller import RankGroup
from hicache.geometry import KVGeometry
from hicache.keys import Namespace, RadixKey, page_keys
from tests.cache.ranked import decisions
from tests.cache.world import WAIT_S, World, prompt
from tests.ranks import gloo_ranks
from tests.waiting import wait_for

pytestmark = pytest.mark.long

PAGE_SIZE = 4
# Layers of each stage: a page of the first stage has almost twice the bytes of a page of the second.
STAGE_LAYERS = (9, 5)
PAGE_BYTES = tuple(layers * 2 * PAGE_SIZE * 2 * 16 * 4 for layers in STAGE_LAYERS)
TP_SIZE = 2
PREFILL_TOKENS_PER_S = 1000
PAGES = 6
PROMPT = prompt(*range(1, PAGES + 1))


class Shard(World):
    """The cache of one rank and its part of the engine."""

    def __init__(self, config: HiCacheConfig, group: RankGroup) -> None:
        stage, tp_rank = divmod(group.rank, TP_SIZE)
        self.geometry = KVGeometry(
            layers=STAGE_LAYERS[stage], heads=2, head_dim=16, page_size=PAGE_SIZE, dtype="float32"
        )
        namespace = Namespace(
            "test", self.geometry, tp_rank=tp_rank, tp_size=TP_SIZE, pp_rank=stage, pp_size=len(STAGE_LAYERS)
        )
        self.shard = namespace.digest
        cache = create_cache(config, namespace, ranks=group)
        assert isinstance(cache, HiRadixCache)
        self.cache = cache
        self.device, self.host, self.controller = self.cache.device, self.cache.host, self.cache.controller
        self.wrong_pages = self.compared_pages = 0


class Ranks:
    """All ranks of one engine, stepped in turn. Asserts after each step that they have decided identically."""

    def __init__(self, folder: Path, break_even: dict[str, Any]) -> None:
        config = HiCacheConfig.model_validate({
            "page_size": PAGE_SIZE,
            "device": {"size": 100 * 1024},  # more pages for the shorter stage
            "host": {"tokens": 64 * PAGE_SIZE},
            "load_back_threshold_tokens": 1,
            "prefetch": {"threshold_tokens": PAGE_SIZE, "policy": "wait_complete"},
            "storage": {"type": "file", "options": {"path": str(folder)}},
            "break_even": break_even,
        })
        groups = gloo_ranks(len(STAGE_LAYERS) * TP_SIZE, deadline_s=WAIT_S)
        with ThreadPoolExecutor(len(groups)) as pool:  # each waits for the others
            self.shards = list(pool.map(lambda group: Shard(config, group), groups))

    def step(self) -> None:
        for shard in self.shards:
            shard.step()
        self.compare()

    def compare(self) -> None:
        assert len({decisions(shard, []) for shard in self.shards}) == 1

    def until(self, condition: Callable[[Shard], bool]) -> None:
        wait_for(lambda: all([condition(shard) for shard in self.shards]), self.step, timeout_s=WAIT_S)

    def serve(self, rid: str, key: RadixKey) -> tuple[int, int, int]:
        """Serve a prompt on all ranks and compare all pages. Return its hits on L1, L2 and storage, in tokens."""
        for shard in self.shards:
            shard.cache.prefetch_from_storage(rid, key)
        self.until(lambda shard: shard.cache.check_prefetch_progress(rid))
        hits = set()
        for shard in self.shards:
            request = shard.try_begin(rid, key)
            assert request is not None
            shard.cache.cache_finished_req(request, key)
            hits.add((request.device_hit_tokens, request.host_hit_tokens, request.storage_hit_tokens))
        self.compare()
        self.until(lambda shard: shard.controller.idle)
        (same,) = hits
        return same

    def close(self) -> None:
        for shard in self.shards:
            assert shard.cache.close()
            shard.cache.check()
            assert shard.wrong_pages == 0


Start = Callable[..., Ranks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that closes the running engine and starts another one."""
    running: list[Ranks] = []

    def start(break_even: dict[str, Any] | None = None) -> Ranks:
        while running:
            running.pop().close()
        running.append(Ranks(tmp_path / "pages", break_even or {"mode": "always"}))
        return running[-1]

    yield start
    while running:
        running.pop().close()


def fill_l1(ranks: Ranks) -> None:
    """Fill L1 with other prompts, so that the earlier ones are evicted."""
    for number in range(4):
        ranks.serve(f"other{number}", prompt(*range(100 + 10 * number, 105 + 10 * number)))


def test_pages_of_unequal_stages_are_loaded_from_l2_and_storage(start: Start) -> None:
    ranks = start()
    assert len({shard.host.payload_bytes for shard in ranks.shards}) == 2
    assert len({shard.device.allocator.capacity for shard in ranks.shards}) == 1
    assert ranks.serve("first", PROMPT) == (0, 0, 0)
    fill_l1(ranks)
    assert ranks.serve("again", PROMPT) == (0, PAGES * PAGE_SIZE, 0)
    ranks = start()
    assert ranks.serve("restarted", PROMPT)[2] == PAGES * PAGE_SIZE
    assert all(shard.compared_pages >= PAGES for shard in ranks.shards)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_page_that_one_rank_lacks_shortens_the_prefix_on_all_ranks(start: Start, rank: int) -> None:
    ranks = start()
    ranks.serve("first", PROMPT)
    store = ranks.shards[rank].controller.backend
    assert store is not None
    lost = page_keys(PROMPT.tokens, PAGE_SIZE, PROMPT.seed)[2]
    store.delete([lost], deadline=time.monotonic() + WAIT_S)
    ranks = start()
    assert ranks.serve("restarted", PROMPT)[2] == 2 * PAGE_SIZE
    ranks = start()
    assert ranks.serve("stored again", PROMPT)[2] == PAGES * PAGE_SIZE


def measured(ranks: Ranks, host_bytes_per_s: float) -> Ranks:
    """Let all ranks measure this speed, a slow prefill, and fast storage."""
    for shard in ranks.shards:
        rule = shard.cache.break_even
        for _ in range(WINDOW):
            rule.observe_prefill(PREFILL_TOKENS_MIN, PREFILL_TOKENS_MIN / PREFILL_TOKENS_PER_S)
            rule.observe_transfer(Route.LOAD, 1, PAGE_BYTES[0] / host_bytes_per_s)
            rule.observe_transfer(Route.PREFETCH, 1, 1e-9)
    ranks.step()
    ranks.step()  # decisions use the speeds that were exchanged in the step before
    return ranks


def test_stages_of_unequal_pages_agree_on_the_break_even(start: Start) -> None:
    """A load pays for a page of the shorter stage, but not for a page of the longer one."""
    between = sum(PAGE_BYTES) / 2 * PREFILL_TOKENS_PER_S / PAGE_SIZE
    ranks = measured(start({"writes": "always"}), between)
    ranks.serve("first", PROMPT)
    fill_l1(ranks)
    assert ranks.serve("again", PROMPT) == (0, 0, 0)
    ranks = measured(start({"writes": "always"}), 4 * between)
    assert ranks.serve("restarted", PROMPT)[2] == PAGES * PAGE_SIZE

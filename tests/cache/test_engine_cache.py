"""An EngineCache under an engine that owns the slots of L1, as SGLang does: free list, table of slots, locks, requests.

The engine writes bytes into its pages that depend on the whole prefix, and compares all pages that it gets. After each
step the cache is consistent, and each page is free, the tree's or a request's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hicache.backends.base import GetOutcome
from hicache.backends.calls import Call
from hicache.backends.storage import Storage
from hicache.cache import EngineCache, create_cache
from hicache.cache.engine_cache import Found, Prefix
from hicache.config import HiCacheConfig, TransferConfig
from hicache.controller import HiCacheController
from hicache.errors import ConfigError, InvalidInput
from hicache.frame import PageBuffer
from hicache.keys import RadixKey
from hicache.tiers import EngineBlocks, EnginePages, HostPool, HostWindow, KVPool
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import NO_PAGES, Indices, PageIds
from tests.cache.world import GEOMETRY, NAMESPACE, GatedBackend
from tests.seeds import seeds
from tests.spans import Spans
from tests.tuned import tuned
from tests.waiting import wait_for

PAGE = GEOMETRY.page_size
STEPS = 120


class FreeList:
    """The free list of an engine: an `EnginePages` that checks what it gets."""

    first = 1
    group_open = False

    def __init__(self, pages: int) -> None:
        self.capacity = pages
        self.used_pages = 0
        self.free_ids = list(range(1, pages + 1))

    @property
    def free_pages(self) -> int:
        return len(self.free_ids)

    def alloc(self, count: int) -> PageIds | None:
        pages = self.take(count)
        if pages is not None:
            self.used_pages += count
        return pages

    def free(self, pages: PageIds) -> None:
        self.used_pages -= len(pages)
        self.give(pages)

    def take_over(self, count: int) -> None:
        self.used_pages += count

    def take(self, count: int) -> PageIds | None:
        """Allocate for a request."""
        if count > len(self.free_ids):
            return None
        taken, self.free_ids = self.free_ids[:count], self.free_ids[count:]
        return np.array(taken, np.int32)

    def give(self, pages: PageIds) -> None:
        """Free the pages of a request."""
        assert not set(self.free_ids) & set(pages.tolist()), "freed twice"
        self.free_ids += pages.tolist()

    @contextmanager
    def free_group(self) -> Iterator[None]:
        yield

    def check(self) -> None:
        assert len(set(self.free_ids)) == len(self.free_ids) and self.used_pages >= 0


@dataclass(eq=False)
class Request:
    rid: str
    tokens: list[int]
    row: list[int]  # its page of each page of tokens
    shared_pages: int
    lock: Prefix
    hits: tuple[int, int, int]
    key: RadixKey  # of all its tokens
    done_pages: int = 0


class Engine:
    """An engine with `pages` pages on L1 whose requests compute a page per token run."""

    def __init__(self, pages: int = 24, device: str = "cpu", **entries: object) -> None:
        shape = ((pages + 1) * PAGE, GEOMETRY.heads, GEOMETRY.head_dim)
        self.regions = [[torch.zeros(shape, device=device) for _ in range(2)] for _ in range(GEOMETRY.layers)]
        self.stream = torch.cuda.current_stream() if device == "cuda" else None
        self.pages = FreeList(pages)
        config = {
            "page_size": PAGE, "host": {"tokens": 200}, "break_even": {"mode": "always"},
            "load_back_threshold_tokens": 1, "prefetch": {"policy": "wait_complete", "threshold_tokens": 1}, **entries,
        }
        cache = create_cache(
            HiCacheConfig.model_validate(config), NAMESPACE, device=device,
            device_blocks=EngineBlocks(self.regions, first=1, slots_per_block=PAGE), engine_pages=self.pages,
        )
        assert isinstance(cache, EngineCache)
        self.cache = cache
        self.running: list[Request] = []
        self.count = 0
        self.bigram = bool(entries.get("bigram_keys"))

    def key(self, tokens: list[int]) -> RadixKey:
        positions = len(tokens) - self.bigram
        kind = 8 if self.bigram else 4
        return RadixKey.of(tokens, bigram=self.bigram) if positions > 0 else RadixKey(b"", b"", kind)

    def begin(self, tokens: list[int]) -> Request | None:
        """Admit a request as SGLang does; None if there is no room now."""
        self.count += 1
        rid, cache = f"r{self.count}", self.cache
        key = self.key(tokens[:-1])
        cache.prefetch_from_storage(rid, key)
        wait_for(lambda: cache.check_prefetch_progress(rid), cache.poll, pause_s=0.0005)
        cache.take_so_far(rid)
        found = cache.find(key)
        needed = -(-len(tokens) // PAGE) - found.device_pages
        cache.lock(found.device)
        try:
            room = self.pages.free_pages + cache.tree.device_evictable_pages
            if needed > room:
                cache.abort_prefetch(rid)
                return None
            loaded = cache.load(rid, found) if found.host_pages else 0
            assert loaded in (0, found.host_pages)
            found = Found(found.device, found.device_pages, found.end if loaded else found.device, loaded or 0)
            cache.lock(found.end)
        finally:
            cache.unlock(found.device)
        account = cache.begin(rid, key, found, prompt_tokens=len(tokens))
        hits = account.device, account.host, account.storage
        prefix = cache.device_pages(found.end)
        own = self.take(needed - found.host_pages)
        row = [*prefix.tolist(), *own.tolist()]
        request = Request(rid, tokens, row, len(prefix), found.end, hits, self.key(tokens), len(prefix))
        if (transfer := cache.start_loading()) is not None:
            for layer in range(GEOMETRY.layers):
                transfer.wait_layer(layer, self.stream)
        self.compare(request, len(prefix))
        self.running.append(request)
        return request

    def take(self, count: int) -> PageIds:
        """Return pages for a request; the engine counts evictable pages as free, so there must be enough."""
        if (short := count - self.pages.free_pages) > 0:
            assert self.cache.make_room(short) >= short
        pages = self.pages.take(count)
        assert pages is not None
        return pages

    def compute(self, request: Request, pages: int) -> None:
        """Compute up to `pages` more whole pages, and share them."""
        end = min(request.key.pages(PAGE), request.done_pages + pages)
        for number in range(request.done_pages, end):
            self.write(request.row[number], self.stamp(request, number))
        request.done_pages = max(request.done_pages, end)
        if self.stream is not None:
            self.cache.record_fence(self.stream.record_event())
        self.cache.record_progress(request.rid, max(0, len(request.tokens) - request.done_pages * PAGE))
        self.share(request)

    def share(self, request: Request) -> None:
        key = self.key(request.tokens[: request.done_pages * PAGE + self.bigram])
        start, old = request.shared_pages, request.lock
        mine = np.array(request.row[start : request.done_pages], np.int32)
        if not len(mine):
            return
        shared = self.cache.share(
            request.rid, key, old, start, mine, continues=request.done_pages * PAGE < len(request.tokens)
        )
        if shared.prefix is old:
            return
        if shared.present_pages:
            self.pages.give(mine[: shared.present_pages])
            request.row[start : request.done_pages] = shared.pages.tolist()
        self.cache.lock(shared.prefix)
        self.cache.unlock(old)
        request.lock, request.shared_pages = shared.prefix, request.done_pages

    def end(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.give(np.array(request.row[request.shared_pages :], np.int32))
        self.cache.unlock(request.lock)
        self.cache.end(request.rid)

    def stamp(self, request: Request, page: int) -> float:
        (key,) = request.key.page_keys(PAGE, b"", 0, page + 1)[page:]
        return float(int.from_bytes(key[:3], "little"))

    def write(self, page: int, stamp: float) -> None:
        for layer in self.regions:
            for region in layer:
                region[page * PAGE : (page + 1) * PAGE] = stamp

    def compare(self, request: Request, pages: int) -> None:
        for number in range(pages):
            slots = slice(request.row[number] * PAGE, (request.row[number] + 1) * PAGE)
            stamp = self.stamp(request, number)
            assert all((region[slots] == stamp).all() for layer in self.regions for region in layer)

    def check(self) -> None:
        self.cache.check()
        own = [page for one in self.running for page in one.row[one.shared_pages :]]
        tree = self.pages.used_pages
        assert len(own) + tree + self.pages.free_pages == self.pages.capacity
        assert not set(own) & set(self.pages.free_ids)

    def close(self) -> None:
        for request in list(self.running):
            self.end(request)
        assert not len(self.cache._queue)
        assert self.cache.drain(20)
        self.check()
        assert self.cache.close(20)


@contextmanager
def engine_of(**arguments: object) -> Iterator[Engine]:
    engine = Engine(**arguments)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


def whole(engine: Engine, tokens: list[int]) -> Request:
    """Run a request from its beginning to its end."""
    while (request := engine.begin(tokens)) is None:  # copies to L2 in flight lock their pages
        assert engine.cache.drain(20)
    engine.compute(request, len(tokens))
    engine.end(request)
    return request


def tokens_of(name: int, pages: int) -> list[int]:
    return [name * 1000 + number for number in range(pages * PAGE + 1)]


def test_the_span_of_a_request_has_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans(monkeypatch)
    with engine_of() as engine:
        whole(engine, tokens_of(1, 8))
        whole(engine, [*tokens_of(1, 8)[:16], *tokens_of(2, 2)])
    assert spans.usage() == [(33, 0, 32, {"new": 32, "tail": 1}), (25, 16, 8, {"new": 8, "tail": 1})]
    spans.check()


def test_prompts_that_do_not_fit_on_l1_together_hit_on_l2() -> None:
    with engine_of() as engine:
        asked = [tokens_of(name, 8) for name in range(6)]
        assert [whole(engine, one).hits for one in asked] == [(0, 0, 0)] * 6
        assert all(sum(whole(engine, one).hits) == 8 * PAGE for one in asked)
        found = engine.cache.statistics()
        assert found.hit_tokens["host"] > 0 and found.requests == 12
        engine.check()


def test_equal_prompts_at_once_share_the_pages_of_the_first() -> None:
    with engine_of() as engine:
        first, second = engine.begin(tokens_of(1, 5)), engine.begin(tokens_of(1, 5))
        assert first is not None and second is not None
        engine.compute(first, 3)
        engine.compute(second, 5)
        engine.compute(first, 5)
        assert first.row[:5] == second.row[:5]
        engine.check()
        engine.end(first)
        engine.end(second)
        assert engine.pages.used_pages == 5


def test_what_counts_as_evictable_can_be_freed_under_write_back() -> None:
    """Also if L2 must take it first: an engine fails if memory that counts as free is not."""
    with engine_of(write_policy="write_back") as engine:
        for name in range(3):
            whole(engine, tokens_of(name, 7))
        evictable = engine.cache.tree.device_evictable_pages
        assert engine.cache.drain(10) and evictable == 21
        assert engine.cache.make_room(evictable) == evictable
        assert engine.pages.free_pages == 24
        assert sum(whole(engine, tokens_of(0, 7)).hits) == 7 * PAGE


def test_pins_give_way_if_nothing_else_can() -> None:
    with engine_of(host={"tokens": 40}, write_policy="write_back", pin_host_share=1.0) as engine:
        for name in range(3):
            whole(engine, tokens_of(name, 8))
            engine.cache.pin(RadixKey.of(tokens_of(name, 8)), 60)
            assert engine.cache.drain(10)
        evictable = engine.cache.tree.device_evictable_pages
        assert engine.cache.make_room(evictable) == evictable
        engine.check()


def test_a_flush_keeps_storage_and_new_weights_leave_it(tmp_path: object) -> None:
    storage = {"type": "file", "options": {"path": str(tmp_path), "free_space_floor": 0}}
    with engine_of(storage=storage) as engine:
        whole(engine, tokens_of(1, 6))
        assert engine.cache.drain(10)
        engine.cache.clear()
        assert engine.pages.used_pages == 0
        assert whole(engine, tokens_of(1, 6)).hits == (0, 0, 6 * PAGE)
        assert engine.cache.drain(10)
        engine.cache.update_weights(1)
        assert whole(engine, tokens_of(1, 6)).hits == (0, 0, 0)


def test_a_request_of_a_replaced_tree_ends_normally() -> None:
    with engine_of() as engine:
        request = engine.begin(tokens_of(1, 6))
        assert request is not None
        engine.compute(request, 3)
        engine.cache.clear()
        engine.compute(request, 6)
        assert request.shared_pages == 3
        engine.check()
        engine.end(request)
        assert engine.cache.drain(10) and engine.pages.used_pages == 0
        assert whole(engine, tokens_of(1, 6)).hits == (0, 0, 0)


def test_a_promise_is_kept_as_a_whole_or_not_at_all() -> None:
    with engine_of(transfer=tuned(TransferConfig, load_pages_max=4, write_pages_max=4)) as engine:
        whole(engine, tokens_of(1, 8))
        assert engine.cache.drain(10)
        engine.cache.make_room(8)
        found = engine.cache.find(RadixKey.of(tokens_of(1, 8)[:-1]))
        assert found.device_pages == 0 and 0 < found.host_pages <= 4
        assert engine.cache.load("r", found) == found.host_pages
        assert engine.cache.load("s", engine.cache.find(RadixKey.of(tokens_of(1, 8)[:-1]))) is None
        engine.cache.start_loading()
        assert engine.cache.drain(10)


@pytest.mark.parametrize("policy", ["write_through", "write_back", "write_through_selective"])
@pytest.mark.parametrize("seed", seeds(3))
def test_random_requests_get_their_own_bytes_and_lose_no_page(policy: str, seed: int, tmp_path: object) -> None:
    draw = random.Random(f"{policy} {seed}")
    storage = {"type": "file", "options": {"path": str(tmp_path), "free_space_floor": 0, "capacity": "1MiB"}}
    entries = {"host": {"tokens": draw.choice([40, 100, 300])}, "write_policy": policy, "bigram_keys": bool(seed % 2)}
    if draw.random() < 0.7:
        entries["storage"] = storage
    with engine_of(**entries) as engine:
        for _ in range(STEPS):
            step(engine, draw)
            engine.cache.poll()
            engine.check()
        assert engine.cache.statistics().requests > 10


def step(engine: Engine, draw: random.Random) -> None:
    kind = draw.random()
    if kind < 0.35 and len(engine.running) < 3:
        begun = tokens_of(draw.randrange(5), draw.randrange(1, 9))
        engine.begin(begun + [draw.randrange(50_000, 60_000) for _ in range(draw.randrange(3 * PAGE))])
    elif kind < 0.7 and engine.running:
        engine.compute(draw.choice(engine.running), draw.randrange(1, 6))
    elif kind < 0.9 and engine.running:
        engine.end(draw.choice(engine.running))
    elif kind < 0.94:
        engine.cache.make_room(draw.randrange(1, 10))
    elif kind < 0.96:
        engine.cache.pin(engine.key(tokens_of(draw.randrange(5), 4)), 60)
    elif kind < 0.98:
        engine.cache.clear()


def build(
    pages: int, copies: type[CpuCopyEngine], backend: Storage | None = None, **entries: object
) -> tuple[FreeList, EngineCache]:
    """Return a cache without a configured store, and the free list of its engine."""
    shape = ((pages + 1) * PAGE, GEOMETRY.heads, GEOMETRY.head_dim)
    regions = [[torch.zeros(shape) for _ in range(2)] for _ in range(GEOMETRY.layers)]
    free, host = FreeList(pages), HostPool(GEOMETRY, 2 * pages)
    pool = KVPool(GEOMETRY, EngineBlocks(regions, first=1, slots_per_block=PAGE), owned=free)
    config = HiCacheConfig.model_validate({"page_size": PAGE, **entries})
    controller = HiCacheController(host, copies(pool.blocks, HostWindow(host)), backend, config)
    return free, EngineCache(pool, host, controller)


class _BatchByBatch(GatedBackend):
    """A store that reads one batch for each `reads.set()`."""

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        outcomes = super()._get(call, keys, pages)
        self.reads.clear()
        return outcomes


def test_a_prefetch_gives_way_that_has_locked_pages_which_the_engine_counted() -> None:
    """Pages that arrive from storage can be on L1 by then, computed by another request. The prefetch locks them."""
    prefetch = {"threshold_tokens": 1, "policy": "wait_complete"}
    store, key = _BatchByBatch(), RadixKey.of(tokens_of(1, 6))
    batches = {"storage_batch_pages": 4}
    free, cache = build(8, CpuCopyEngine, store, write_policy="write_back", prefetch=prefetch, transfer=batches)
    with cache:

        def compute(rid: str) -> None:
            pages = free.take(6)
            assert pages is not None
            cache.share(rid, key, cache.root, 0, pages)

        compute("first")
        assert cache.make_room(6) == 6 and cache.drain(10)
        cache.clear()
        store.reads.clear()
        store.entered.clear()
        assert cache.prefetch_from_storage("waits", key)
        wait_for(store.entered.is_set, cache.poll)
        compute("second")
        assert cache.tree.device_evictable_pages == 6
        store.reads.set()
        wait_for(lambda: cache.take_so_far("waits") == 4, cache.poll)
        assert cache.tree.device_evictable_pages == 2
        assert cache.make_room(6) == 6
        store.reads.set()


class _BrokenBackups(CpuCopyEngine):
    """A copy engine that cannot copy to L2."""

    def _backup_layer(self, layer: int, blocks: Indices, host_blocks: Indices) -> None:
        raise OSError("device lost")


def test_a_failed_copy_to_l2_ends_reuse_and_not_the_next_forward() -> None:
    free, cache = build(8, _BrokenBackups)
    with cache:
        key, pages = RadixKey.of(tokens_of(1, 2)), free.take(2)
        assert pages is not None
        shared = cache.share("r", key, cache.root, 0, pages)
        assert shared.prefix.node.parent is not None
        assert cache.drain(10)
        assert cache.start_loading() is None
        assert cache.find(key).device_pages == 0
        again = free.take(1)
        assert again is not None
        assert cache.share("s", RadixKey.of(tokens_of(2, 1)), cache.root, 0, again).pages is NO_PAGES


def test_settings_that_contradict_an_engine_with_its_own_slots_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"sessions\.enabled: true"):
        Engine(sessions={"enabled": True})
    with pytest.raises(ConfigError, match="prefix_cache: false"):
        Engine(prefix_cache=False)
    config = HiCacheConfig.model_validate({"page_size": PAGE, "host": {"tokens": 64}})
    with pytest.raises(ConfigError, match="pass device_blocks"):
        create_cache(config, NAMESPACE, engine_pages=FreeList(4))
    assert isinstance(FreeList(4), EnginePages) and not len(NO_PAGES)
    with engine_of() as engine, pytest.raises(InvalidInput, match="8 bytes per position"):
        engine.cache.find(RadixKey(b"", b"", 8))


def test_what_is_left_of_a_prompt_counts_from_its_arrival_to_its_last_chunk() -> None:
    with engine_of(storage={"type": "memory", "options": {"capacity": "16MiB"}}) as engine:
        left, tokens = engine.cache._queue._left, tokens_of(1, 4)
        whole(engine, tokens_of(1, 2))
        assert engine.cache.drain(20)
        engine.cache.prefetch_from_storage("waits", engine.key(tokens[:-1]))
        assert left == {"waits": 2 * PAGE}  # without the pages of L1
        request = engine.begin(tokens)
        assert request is not None and left == {"waits": 2 * PAGE, request.rid: 2 * PAGE}
        assert engine.cache._queue.first(9) == ["waits"]
        engine.compute(request, 1)
        assert left == {"waits": 2 * PAGE, request.rid: PAGE + 1}
        engine.end(request)  # a retraction
        assert left == {"waits": 2 * PAGE}
        engine.cache.abort_prefetch("waits")
        assert left == {}

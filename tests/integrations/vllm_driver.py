"""vLLM's scheduler and workers as a connector sees them, without vLLM.

The driver has a block pool, preemption, chunks, drafts and two batches in flight. It makes calls in the order of vLLM
0.32. Like a model, a forward writes correct bytes only if the blocks hold the correct bytes of all tokens before;
otherwise it writes garbage. The correct bytes of a position derive from all tokens up to it.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hicache.cache import create_host_cache
from hicache.cache.host_cache import _host_pages
from hicache.config import HiCacheConfig
from hicache.events import EventStream, Medium, PageBlocks
from hicache.integrations.vllm.forwards import Forward
from hicache.integrations.vllm.jobs import Report, Step
from hicache.integrations.vllm.layout import BlockLayout
from hicache.integrations.vllm.scheduler import SchedulerSide
from hicache.keys import Namespace, RadixKey, token_bytes
from hicache.tiers import SharedHostPool
from tests.events.router import Block, BlockRouter, blocks_in
from tests.waiting import WAIT_S, wait_for

from .vllm_parts import BLOCK, LAYERS, PARTS_MAX, REGIONS, SLOT, Blocks, Done, Form, Request, Row, Scheduled, Worker


class Engine:
    """One engine. The scheduler and the workers run in one process."""

    def __init__(
        self, folder: Path | None, name: str, form: Form, chance: random.Random,
        kinds: tuple[type[SchedulerSide], type[Worker]],
    ) -> None:
        self.form = form
        self.layerwise, self.batches = form.layerwise, form.batches
        self.drafts, self.caching = form.drafts, form.caching
        page = BLOCK * form.page_blocks
        self.layout = BlockLayout(BLOCK, page, (BLOCK * REGIONS * SLOT,) * LAYERS, form.ranks, form.replicas)
        self.pool = SharedHostPool(name, self.layout.shape, form.pages, processes=1, timeout_s=WAIT_S)
        options = {"path": str(folder), "capacity": "16MiB", "free_space_floor": 0, "max_age": form.max_age}
        storage = {"type": "file", "options": options}
        config = HiCacheConfig.model_validate({
            "page_size": page, "load_back_threshold_tokens": 1, "break_even": {"mode": "always"},
            "prefetch": {"threshold_tokens": 1, "timeout_base": WAIT_S},
            "transfer": {"io_workers": 1}, "host": {"tokens": 1},
            **({} if folder is None else {"storage": storage}),
        })
        namespace = Namespace(
            "a model", self.layout.shape, tp_size=form.ranks, ranks_share_pages=True, key_hash="of the test"
        )
        self.cache = create_host_cache(config, namespace, host=self.pool, clock=form.clock)
        stream = EventStream(form.event_bytes)
        self.cache.record_events(stream)
        self.events, self.router = stream.subscribe(), BlockRouter()
        self.described: dict[bytes, PageBlocks] = {}  # by page key
        self.scheduler = kinds[0](
            self.cache, self.layout, layerwise=form.layerwise, shares_blocks=form.caching, blocks_of=self.blocks_of
        )
        self.scheduler.on_device = lambda block: block in self.blocks.by_hash
        memory = [[[torch.zeros(form.blocks, BLOCK * SLOT, dtype=torch.uint8) for _ in range(REGIONS)]
                   for _ in range(LAYERS)] for _ in range(form.ranks)]
        self.workers = [kinds[1](self.pool, self.layout, rank, memory[rank]) for rank in range(form.ranks)]
        # [rank][layer][region] of [blocks, BLOCK, SLOT]
        self.memory = [[[one.numpy().reshape(form.blocks, BLOCK, SLOT) for one in layer] for layer in rank]
                       for rank in memory]
        self.blocks = Blocks(form.blocks)
        self.chance = chance
        self.weights = 0
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preempted: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.queue: deque[Done] = deque()
        self.garbage_allowed = False
        self.compares_accounts = True
        self.measured: list[Forward] = []
        self.before_update: Callable[[], object] = lambda: None  # called where vLLM handles aborts
        self._counts: dict[str, dict[str, int]] = {"received": {}, "released": {}}
        self._failed_pending: set[str] = set()
        self._troubled: set[Request] = set()
        # The tokens and the cached tokens of the last attempt of each request that has run without trouble.
        self._attempts: dict[str, tuple[int, int]] = {}

    # Clients

    def add(self, request: Request) -> Request:
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.scheduler.arrive(request, request.identity)
        return request

    def abort(self, request: Request) -> bool:
        """Abort a request. Return True if it had not ended."""
        if request.status != "finished":
            request.aborted = True
            self._finish(request)
        return request.aborted

    def reset(self, *, weights: bool) -> bool:
        """Call `reset_prefix_cache(reset_running_requests=True)`, and the connector if `weights` change. Return False
        if a block is in use, as vLLM does."""
        while self.running:
            self._preempt(self.running.pop(), drops=True)
        if len(self.blocks.free) < self.form.blocks - 1:
            return False
        self.blocks.by_hash.clear()
        self.blocks.hash_of.clear()
        if weights:
            self.weights += 1
            self.scheduler.new_weights()
        return True

    # Steps

    def step(self) -> None:
        """Run one iteration of vLLM's loop."""
        if len(self.queue) < self.batches and (self.requests or not self.queue):
            scheduled = self.schedule()
            self.queue.append(self.execute(scheduled))
            if len(self.queue) < self.batches:
                return
        self.before_update()
        self.update(self.queue.popleft())

    def run(self, *requests: Request) -> None:
        """Step until the requests have ended and nothing is in flight."""
        wait_for(lambda: all(one.status == "finished" for one in requests), self.step, pause_s=0)
        names = {one.request_id for one in requests}
        wait_for(lambda: not (self.queue or names & self.requests.keys()), self.step, pause_s=0)

    def start(self, *requests: Request) -> None:
        """Add requests and step until they run or load. Before, the connector looks them up in storage."""
        for request in requests:
            self.add(request)
        wait_for(lambda: all(one.status != "waiting" for one in requests), self.step)

    def serve(self, tokens: list[int], answer: int = 1, **options: Any) -> Request:
        """Serve one prompt to its end."""
        request = self.add(self.request(tokens, answer, **options))
        self.run(request)
        return request

    def request(self, tokens: list[int], answer: int = 1, **options: Any) -> Request:
        options.setdefault("request_id", f"r{self.chance.getrandbits(48):x}")
        following = [1000 + self.chance.randrange(50) for _ in range(answer)]
        return Request(tokens=tokens + following, known=len(tokens), **options)

    def forget_device(self) -> None:
        """Forget the cached blocks of the device, as if other requests had used them."""
        assert not self.running
        self.blocks.by_hash.clear()
        self.blocks.hash_of.clear()

    def sleep(self) -> None:
        """Give the memory of the device back: its content is lost, and nothing may read it."""
        for worker, layers in zip(self.workers, self.memory, strict=True):
            worker.drain()
            for regions in layers:
                for slots in regions:
                    slots[:] = 0
        self.forget_device()

    def release(self, *kinds: str) -> None:
        for worker in self.workers:
            worker.held.difference_update(kinds)
            for kind in kinds:
                worker.release(kind)

    def hold(self, *kinds: str) -> None:
        for worker in self.workers:
            worker.held.update(kinds)

    def fail(self, *kinds: str, rank: int = 0) -> None:
        self.workers[rank].failing = set(kinds)

    # Routers

    def blocks_of(self, request: Request, page: int) -> PageBlocks:
        """Return the blocks of a page, as the connector describes them."""
        first, per_page = page * self.layout.blocks_per_page, self.layout.blocks_per_page
        hashes = request.block_hashes[first : first + per_page]
        tokens = token_bytes(request.tokens[first * BLOCK : (first + per_page) * BLOCK])
        found = PageBlocks(
            b"".join(hashes), request.block_hashes[first - 1] if first else None, tokens, (None,) * per_page
        )
        self.described[RadixKey.of_hashes(hashes[-1:], extra_key=request.adapter).tokens] = found
        return found

    def check_events(self) -> None:
        """Assert that a router knows the blocks on the host, and those on storage as far as the tree knows them. Does
        nothing while it waits for a snapshot."""
        with self.scheduler._lock:
            self.router.follow(self.events)
            if not self.events.in_sync:
                return
            tree = self.cache.tree
            on_host = [key for node in tree.nodes() if node.host is not None for key in tree.page_keys(node)]
            assert self.router.on[Medium.HOST] == self._blocks(on_host), "a router has wrong blocks"
            stored = self.router.on[Medium.STORAGE]
            assert self._blocks(tree.stored.ends()).items() <= stored.items(), "a router lacks stored blocks"

    def _blocks(self, keys: Iterable[bytes]) -> dict[bytes, Block]:
        found: dict[bytes, Block] = {}
        for key in keys:
            assert key in self.described, "a router has wrong blocks: the connector did not describe a page"
            found |= blocks_in(self.described[key])
        return found

    # vLLM's scheduler

    def schedule(self) -> Scheduled:
        budget = self.form.budget
        rows: list[Row] = []
        index, preempted = 0, False
        while index < len(self.running) and budget:
            request = self.running[index]
            tokens = min(request.known + request.placeholders - request.num_computed_tokens, budget)
            if tokens <= 0 or request.num_computed_tokens >= len(request.tokens):
                index += 1
                continue
            drafts = min(self.drafts, budget - tokens) if request.num_computed_tokens + tokens == request.known else 0
            while not (fits := self._allocate(request, request.num_computed_tokens + tokens + drafts)):
                if self.scheduler.frees_blocks_soon or self.running[-1].in_flight:
                    break
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            if not fits:
                break
            rows.append(self._row(request, tokens, drafts))
            budget -= tokens + drafts
            index += 1
        if not preempted:
            self._admit(rows, budget)
        counts = {row.request.request_id: row.tokens for row in rows}
        scheduled = Scheduled(counts, self.preempted, rows, Step())
        self.preempted = set()
        tables = {row.request.request_id: row.blocks for row in rows}
        step = self.scheduler.build_step(scheduled, tables.get)
        for request, _, _, _, tokens in rows:
            request.num_computed_tokens += tokens
            request.in_flight += 1
            if self.batches > 1 and request.num_computed_tokens >= request.known + request.placeholders:
                request.placeholders += 1
        scheduled.step = pickle.loads(pickle.dumps(step))
        return scheduled

    def _admit(self, rows: list[Row], budget: int) -> None:
        for request in sorted(self.waiting, key=lambda one: not one.blocks):  # requests with blocks first
            if not budget:
                break
            if request.status == "loading":
                if request.request_id not in self.received:
                    continue
                self._promote(request)
            if request.stale:
                continue
            external, later = 0, False
            if request.num_computed_tokens == 0:
                local = self.blocks.find(request.block_hashes[: (request.known - 1) // BLOCK]) if self.caching else []
                if request.skip_reading_prefix_cache:
                    local = []
                found = self.scheduler.match(request, len(local) * BLOCK)
                if request.skip_reading_prefix_cache:
                    if found is None:  # its adapter is not identified, so it is not counted
                        self._trouble(request)
                    found = 0
                if found is None:
                    continue
                external, later = found, bool(found) and not self.layerwise
                computed = len(local) * BLOCK + external
                assert computed < request.known and external % BLOCK == 0
            else:
                computed, local = request.num_computed_tokens, []
            tokens = 0 if later else min(request.known - computed, budget)
            self.blocks.touch(local)
            request.blocks += local
            if (later and not self._fits_beside_others(request)) or not self._allocate(request, computed + tokens):
                if local:
                    self.blocks.give(request.blocks)
                    request.blocks = []
                break
            self.scheduler.allocated(request, request.blocks, external)
            request.matched += external
            request.num_computed_tokens = computed
            if later:  # counted at the end of the load, also if it is aborted then
                self._attempts.pop(request.request_id, None)
                request.status = "loading"
                continue
            self.waiting.remove(request)
            self.running.append(request)
            request.status = "running"
            if request not in self._troubled:
                self._attempts[request.request_id] = request.known, computed
            if external:
                self.blocks.remember(request, computed)
            rows.append(self._row(request, tokens, 0))
            budget -= tokens

    def _fits_beside_others(self, request: Request) -> bool:
        """Return True if the blocks suffice for this prompt and all begun ones. Otherwise vLLM does not start the load:
        the prompts could block each other."""
        begun = [one for one in self.waiting if one.blocks] + self.running
        missing = sum(max(0, -(-one.known // BLOCK) - len(one.blocks)) for one in [request, *begun])
        return missing <= len(self.blocks.free)

    def _row(self, request: Request, tokens: int, drafts: int) -> Row:
        accepted = min(self.chance.randint(0, drafts), max(0, len(request.tokens) - 1 - request.known))
        begin = request.num_computed_tokens
        if self.caching:
            self.blocks.remember(request, min(begin + tokens, request.known))
        return Row(request, list(request.blocks), begin, tokens + accepted, tokens + drafts)

    def _allocate(self, request: Request, tokens: int) -> bool:
        taken = self.blocks.take(max(0, -(-tokens // BLOCK) - len(request.blocks)))
        request.blocks += taken or []
        return taken is not None

    def _promote(self, request: Request) -> None:
        self.received.remove(request.request_id)
        request.status = "waiting"
        if request.request_id in self.failed:
            self.failed.remove(request.request_id)
            self._trouble(request)
            request.num_computed_tokens = 0
            self._free(request)
            return
        self._compare(request, request.num_computed_tokens)
        if self.caching:
            self.blocks.remember(request, request.num_computed_tokens)

    def _preempt(self, request: Request, *, drops: bool = False) -> None:
        self._free(request)
        request.status, request.num_computed_tokens, request.placeholders = "waiting", 0, 0
        request.stale = request.in_flight
        self.waiting.insert(0, request)
        self.preempted.add(request.request_id)

    def _finish(self, request: Request) -> None:
        loads = request.status == "loading" and request.request_id not in self.received
        self.received.discard(request.request_id)
        self.failed.discard(request.request_id)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        request.status = "finished"
        waits = self.scheduler.finish(request.request_id)
        if not (waits or loads):
            self._free(request)
            del self.requests[request.request_id]

    def _free(self, request: Request) -> None:
        """Free the blocks, at once or when no step in flight writes to them."""
        if request.in_flight:
            request.deferred += request.blocks
        else:
            self.blocks.give(request.blocks)
        request.blocks = []

    # vLLM's workers

    def execute(self, scheduled: Scheduled) -> Done:
        report, collected = None, []
        if scheduled.step.measured is not None:
            self.measured.append(scheduled.step.measured)
        for worker in self.workers:
            worker.flush(scheduled.step)
            worker.begin_step(scheduled.step)
            if self.layerwise and scheduled.step.loads:
                worker.start_loads(scheduled.step)
                for layer in range(LAYERS):
                    worker.wait_layer(layer)
        # All ranks compute together: wrong KV on one rank spoils the output of all.
        for row in scheduled.rows:
            self._forward(*row)
        for worker in self.workers:
            if not (self.layerwise and scheduled.step.loads):
                worker.start_loads(scheduled.step)
            if not self.drafts or not scheduled.rows:
                worker.start_saves(scheduled.step)
            worker.settle()
            collected.append(worker.collect(scheduled.step))
            mine = worker.take_report()
            report = report.merge(mine) if report and mine else report or mine
            if self.drafts and scheduled.rows:  # the drafter runs first
                worker.start_saves(scheduled.step)
        return Done(scheduled, pickle.loads(pickle.dumps(report)), collected)

    def _forward(self, request: Request, blocks: list[int], begin: int, right: int, tokens: int) -> None:
        sound = self._holds(request, blocks, begin)
        assert sound or self.garbage_allowed, f"{request.request_id} computes from wrong KV"
        kv = request.kv(self.weights)
        for position in range(begin, begin + tokens):
            good = sound and position < begin + right and position < len(kv)
            garbage = np.full((PARTS_MAX, LAYERS, REGIONS, SLOT), self.chance.randrange(256), np.uint8)
            value = kv[position] if good else garbage
            for rank, layers in enumerate(self.memory):
                for layer, regions in enumerate(layers):
                    for region, slots in enumerate(regions):
                        slots[blocks[position // BLOCK], position % BLOCK] = value[self._part(rank), layer, region]

    def _part(self, rank: int) -> int:
        return rank // self.layout.replicas

    def _holds(self, request: Request, blocks: list[int], tokens: int) -> bool:
        """True if the blocks hold the correct bytes of the first `tokens` tokens on all ranks."""
        kv, count = request.kv(self.weights), -(-tokens // BLOCK)
        for rank, layers in enumerate(self.memory):
            for layer, regions in enumerate(layers):
                for region, slots in enumerate(regions):
                    there = slots[blocks[:count]].reshape(-1, SLOT)[:tokens]
                    if not np.array_equal(there, kv[:tokens, self._part(rank), layer, region]):
                        return False
        return True

    def _compare(self, request: Request, tokens: int) -> None:
        assert self._holds(request, request.blocks, tokens), f"{request.request_id} was loaded with wrong bytes"

    # vLLM's update

    def update(self, done: Done) -> None:
        spoiled = self._invalid({block for one in done.collected for block in one.invalid_blocks}, done.scheduled)
        received = self._all("received", done)
        self._failed_pending |= {rid for one in done.collected for rid in one.failed}
        for rid in self._failed_pending & received:
            self._failed_pending.remove(rid)
            if self.requests[rid].status == "loading":
                self.failed.add(rid)
        for request, _, _, right, tokens in done.scheduled.rows:
            request.in_flight -= 1
            if request.deferred and not request.in_flight:
                self.blocks.give(request.deferred)
                request.deferred = []
            if request.stale:
                request.stale -= 1
            elif request.status == "running" and request not in spoiled:
                self._output(request, right, tokens)
        self.scheduler.report(done.report or Report())
        for rid in received:
            request = self.requests[rid]
            if request.status == "loading":
                self.received.add(rid)
            else:
                assert request.status == "finished"
                self._free(request)
                del self.requests[rid]
        for rid in self._all("released", done):
            request = self.requests.pop(rid)
            assert request.status == "finished"
            self._free(request)

    def _output(self, request: Request, right: int, tokens: int) -> None:
        request.num_computed_tokens -= tokens - right
        if request.num_computed_tokens - (request.in_flight if self.batches > 1 else 0) < request.known:
            return  # a chunk of the prompt
        request.known = request.known + 1 if self.batches > 1 else request.num_computed_tokens + 1
        request.placeholders = max(0, request.placeholders - 1)
        request.hash_blocks()
        if self.caching:
            self.blocks.remember(request, min(request.num_computed_tokens, request.known - 1))
        if request.known == len(request.tokens):
            self._finish(request)

    def _invalid(self, blocks: set[int], scheduled: Scheduled) -> set[Request]:
        spoiled = set()
        for request in self.running if blocks else ():
            for index, block in enumerate(request.blocks):
                if block in blocks and request.request_id in scheduled.num_scheduled_tokens:
                    request.num_computed_tokens = index * BLOCK
                    request.placeholders = 0
                    spoiled.add(request)
                    self._trouble(request)
                    break
        return spoiled

    def _trouble(self, request: Request) -> None:
        self._troubled.add(request)
        self._attempts.pop(request.request_id, None)

    def _all(self, kind: str, done: Done) -> set[str]:
        """Return the requests that all ranks have now reported, counted as in vLLM's KVOutputAggregator."""
        counts, complete = self._counts[kind], set()
        for one in done.collected:
            for rid in getattr(one, kind):
                assert rid in self.requests, f"{rid} was reported as {kind}, but is unknown"
                counts[rid] = counts.get(rid, 0) + 1
                if counts[rid] == len(self.workers):
                    del counts[rid]
                    complete.add(rid)
        return complete

    # Inspection

    def pages_on_host(self, request: Request) -> int:
        """Return how many pages of a request L2 has. Raises AssertionError if one has wrong bytes."""
        with self.scheduler._called():
            self.cache.poll()
            self.cache.check()
            tokens = self.layout.page_tokens
            known = Request("audit", request.tokens, request.known, request.salt, request.adapter)
            last = known.block_hashes[self.layout.blocks_per_page - 1 :: self.layout.blocks_per_page]
            key = RadixKey.of_hashes(last, extra_key=request.adapter)
            match = self.cache.tree.match(key)
            pages = match.pages
            if pages:
                kv = request.kv(self.weights)
                for number, page in enumerate(_host_pages(self.cache.tree, match.node, pages).tolist()):
                    part = kv[number * tokens : (number + 1) * tokens, : self.layout.parts]
                    shaped = part.reshape(-1, BLOCK, self.layout.parts, LAYERS, REGIONS, SLOT)
                    payload = shaped.transpose(2, 0, 3, 4, 1, 5).tobytes()
                    assert bytes(self.pool.payload(page)) == payload, f"page {number} of {request.request_id} is wrong"
            return pages

    def wind_down(self) -> None:
        """End all requests, and check that no block, job or page is left."""
        self.release("load", "save")
        self.run(*self.requests.values())
        assert sorted(self.blocks.free) == list(range(1, self.form.blocks)), "blocks are lost"
        side = self.scheduler
        assert not (side._jobs or side._requests or side.frees_blocks_soon or side._loads or len(self.cache._queue))
        statistics = self.cache.statistics()
        assert (statistics.controller.queues.load, statistics.controller.queues.write) == (0, 0)
        with side._called():
            assert self.cache.drain(WAIT_S)
            self.cache.check()
        self.check_accounts()

    def check_accounts(self) -> None:
        """Compare the account of each request that has run with vLLM's own numbers."""
        for rid, (tokens, cached) in self._attempts.items():
            account = self.cache.explainer.recent[rid]
            assert account.tokens == account.cached + sum(account.computed.values()), account
            if self.compares_accounts:
                assert (account.tokens, account.cached) == (tokens, cached), (account, tokens, cached)

    def close(self) -> None:
        self.release("load", "save")
        for worker in self.workers:
            assert worker.close(WAIT_S)
        self.scheduler.close()
        self.pool.unlink()


@contextmanager
def engine_on(
    folder: Path | None,
    name: str,
    *,
    chance: random.Random | None = None,
    kinds: tuple[type[SchedulerSide], type[Worker]] = (SchedulerSide, Worker),
    **form: Any,
) -> Iterator[Engine]:
    """Start an engine; at the end, wind it down and close it. `kinds` are the classes of both sides, for tests that
    break one of them on purpose."""
    engine = Engine(folder, name, Form(**form), chance or random.Random(0), kinds)
    try:
        yield engine
        engine.wind_down()
    finally:
        engine.close()

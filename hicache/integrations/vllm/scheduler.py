"""The part in vLLM's scheduler process: decides which pages are loaded and saved, and owns the cache over the shared
frames.

Per request and in this order:

    arrive -> match (until it is not None) -> allocated -> (build_step, report per step) -> finish

One request has at most one load in flight, and a save for each step in which it filled pages. A job ends when all
workers have reported it. By vLLM's own rule, an ended request keeps its blocks until its saves have ended; then it is
forgotten here.

Only pages on L2, which are verified, are offered to vLLM, so a load can only fail by a fault of the device. After a
failed load, pages are not offered to that request again, because vLLM would load them repeatedly if blocks are scarce.

Locking design: vLLM calls from one thread. The thread `hicache-idle` calls `poll` while vLLM makes no steps, so that an
idle engine also stores saved pages and serves the operator's commands. One lock guards everything; vLLM's calls hold it
for microseconds, and `poll` runs only if there was no call for `_IDLE_S`, so that the pages that `match` has just
offered are not evicted.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from ...cache import HostCache
from ...cache.host_cache import HostLoad, HostWrite
from ...events import PageBlocks
from ...keys import RadixKey
from ...types import NO_PAGES, PageIds
from ..options import hints_of
from .forwards import Forward, ForwardTimes
from .jobs import CopyJob, Ended, Report, Step
from .layout import BlockLayout

logger = logging.getLogger(__name__)

# After this time without a call the engine is idle, or computes a long step, and the thread calls `poll`.
_IDLE_S = 0.02
# The pause of a step that computes and loads nothing, because its requests wait for storage: vLLM repeats it at once,
# and a busy loop would take the interpreter's lock from the reading threads.
_REST_S = 0.0005
# How long a request waits for the identity of its adapter; then it shares no pages. Reading 1 GB takes about a second.
_IDENTIFY_S = 2.0


class EngineRequest(Protocol):
    """The used fields of vLLM's request."""

    request_id: str
    num_computed_tokens: int
    block_hashes: Sequence[bytes]
    skip_reading_prefix_cache: bool
    trace_headers: Mapping[str, str] | None
    cache_salt: str | None
    kv_hints: object
    kv_transfer_params: Mapping[str, Any] | None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the output so far."""


class EngineStep(Protocol):
    """The used fields of vLLM's scheduler output."""

    num_scheduled_tokens: Mapping[str, int]
    preempted_req_ids: set[str] | None


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request that has not ended. `adapter` will be its `extra_key` when it has begun, `start_tokens` are the tokens
    that vLLM had at the last match; `tried_pages` the pages that were saved or could not be. A failed save is repeated
    once. `waits` until its first step, and again after a preemption."""

    request: EngineRequest
    adapter: Future[str] | None
    arrived_s: float
    begun: bool = False
    waits: bool = True
    extra_key: str | None = None
    start_tokens: int = 0
    tried_pages: int = 0
    saves_again: bool = True
    storage_pages: int = 0
    saves: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Open:
    """A job in flight, and its reports. `handle` is None for a lost load."""

    rid: str
    handle: HostLoad | HostWrite | None
    ended: Ended = field(default_factory=Ended)


class SchedulerSide:
    """See the module's docstring. `layerwise`: the forward waits for loads layer by layer, instead of vLLM scheduling
    the request after they have ended. `shares_blocks`: vLLM's prefix cache is on. Otherwise each request loads its own
    copy of a page. `blocks_of` returns the blocks of a page of a request, for events that routers read; None for events
    without them. `in_lockstep`: other engines wait for each step of this one. `on_device` is True for the hash of a
    block that vLLM's prefix cache has. Owns the cache: `close` closes it.
    """

    def __init__(
        self, cache: HostCache, layout: BlockLayout, *, layerwise: bool = False, shares_blocks: bool = True,
        blocks_of: Callable[[Any, int], PageBlocks] | None = None, in_lockstep: bool = False,
    ) -> None:
        self.cache = cache
        self.on_device: Callable[[bytes], bool] = lambda _: False
        self._clock = cache.controller.clock
        self._times = ForwardTimes(cache.record_prefill)
        self._layout, self._page_bytes = layout, layout.shape.payload_bytes
        self._layerwise = layerwise
        self._shares_blocks = shares_blocks
        self._blocks_of = blocks_of
        self._in_lockstep = in_lockstep
        self._lock = threading.RLock()
        self._requests: dict[str, _Tracked] = {}
        self._jobs: dict[int, _Open] = {}
        self._numbers = itertools.count()
        self._loads: list[CopyJob] = []  # for the next step
        self._release: dict[str, set[int]] = {}  # ended requests and their saves in flight
        self._released: list[str] = []  # for the next step
        self._copied: Counter[str] = Counter()
        self._called_s = self._clock()
        self._closing = threading.Event()
        self._idle = threading.Thread(target=self._poll_when_idle, name="hicache-idle", daemon=True)
        self._idle.start()

    # A request

    def arrive(self, request: EngineRequest, adapter: Future[str] | None = None) -> None:
        """Start to read the pages of a new request from storage. The result of `adapter` identifies inputs outside the
        block hashes, such as the weights of an adapter; reading begins in the first `match` that finds it."""
        with self._called():
            if request.request_id not in self._requests:
                tracked = self._requests[request.request_id] = _Tracked(request, adapter, self._clock())
                self.cache.record_arrival(request.request_id, request.num_tokens)
                self._begin(tracked)
                if (hints := hints_of(request)) is not None:  # now the cache knows the trace of their spans
                    self.cache.hint(hints, request.request_id, cache_salt=request.cache_salt)

    def match(self, request: EngineRequest, computed_tokens: int) -> int | None:
        """Return how many tokens after the first `computed_tokens`, which are whole blocks, can be loaded. None: call
        it again in a later step, because the adapter or storage is being read or another request is loading one of the
        pages."""
        with self._called():
            rid, tracked = request.request_id, self._requests[request.request_id]
            if not self._begin(tracked):
                return None
            pages, (start, own_tokens) = self._prompt_pages(request), divmod(computed_tokens, self._layout.page_tokens)
            wanted = not request.skip_reading_prefix_cache and start < pages
            if wanted and not self.cache.check_prefetch(rid, start):
                return None
            key = self._key(tracked, pages)
            # Also without wanted pages: the cache counts the request, and records the weights of its pages.
            found = self.cache.lookup(
                rid, key, start, own_copy=not self._shares_blocks, prompt_tokens=request.num_tokens,
                own_tokens=own_tokens, unshared=request.skip_reading_prefix_cache,
            )
            if found.loading and wanted:
                return None
            tracked.start_tokens = computed_tokens
            if not found.pages or not wanted:
                return 0
            return (start + found.pages) * self._layout.page_tokens - computed_tokens

    def allocated(self, request: EngineRequest, blocks: Sequence[int], tokens: int) -> None:
        """Load `tokens` tokens after those that vLLM had at the last `match` into `blocks`, all blocks of the request.
        """
        if not tokens:
            return
        with self._called():
            rid, tracked = request.request_id, self._requests[request.request_id]
            begin = tracked.start_tokens // self._layout.block_tokens
            end = begin + tokens // self._layout.block_tokens
            per_page = self._layout.blocks_per_page
            start_page, end_page = begin // per_page, -(-end // per_page)
            load = self.cache.begin_load(rid, self._key(tracked, end_page), start_page, end_page)
            device = np.array(blocks[begin:end], np.int32)
            if load is None:  # evicted from L2 since the match
                tracked.storage_pages = 0
                self._loads.append(self._open(rid, None, device, NO_PAGES))
                return
            tracked.storage_pages = load.storage_pages
            hosts = self._host_blocks(load.host_pages)[begin - start_page * per_page :][: end - begin]
            self._loads.append(self._open(rid, load, device, hosts))

    def loaded_from_storage(self, request: EngineRequest) -> int:
        """Return how many tokens of the last load came from storage for this request."""
        return self._requests[request.request_id].storage_pages * self._layout.page_tokens

    def finish(self, rid: str) -> bool:
        """Forget an ended request. Return True if its blocks must stay until the workers report the end of its saves.
        """
        with self._called():
            tracked = self._requests.pop(rid, None)
            if tracked is None:
                return False
            self.cache.abort(rid)
            if tracked.saves:
                self._release[rid] = tracked.saves
                self._released.append(rid)
            return bool(tracked.saves)

    @property
    def frees_blocks_soon(self) -> bool:
        """True while an ended request waits for its saves."""
        return bool(self._release)

    # A step

    def build_step(
        self, step: EngineStep, block_ids: Callable[[str], Sequence[int] | None]
    ) -> Step:
        """Return the orders of a step, and complete ended operations. `block_ids` returns the blocks of a scheduled
        request."""
        with self._called():
            self.cache.poll()
            idle = not step.num_scheduled_tokens
            orders = Step(layerwise=self._layerwise, idle=idle and not self._in_lockstep)
            # Includes a request that was aborted after it: its blocks were already free.
            preempted = step.preempted_req_ids or set()
            saving = {job.rid for job in self._jobs.values() if isinstance(job.handle, HostWrite)}
            orders.flush += saving & preempted
            for rid in preempted & self._requests.keys():
                victim = self._requests[rid]
                victim.saves.clear()  # they belong to lost blocks
                victim.waits = True
                self.cache.record_arrival(rid, victim.request.num_tokens, again=True)
            orders.loads, self._loads = self._loads, []
            orders.release, self._released = self._released, []
            prompt_tokens = decoded_tokens = 0
            for rid, tokens in step.num_scheduled_tokens.items():
                tracked = self._requests.get(rid)
                if tracked is None:
                    continue
                request = tracked.request
                left_tokens = request.num_tokens - request.num_computed_tokens
                if left_tokens > 1:
                    prompt_tokens += tokens
                else:  # with drafts, several tokens
                    decoded_tokens += tokens
                if left_tokens > 1 or tracked.waits:
                    tracked.waits = False
                    left_tokens -= tokens  # a last single one counts as decoding
                    self.cache.record_progress(rid, left_tokens if left_tokens > 1 else 0)
                self._save(tracked, request.num_computed_tokens + tokens, block_ids, orders)
            forward = Forward(prompt_tokens, decoded_tokens)
            if not (self._layerwise and orders.loads) and self._times.is_wanted(forward):
                orders.measured = forward
        if idle and not orders.loads and (self._requests or self._release):
            self._clock.sleep(_REST_S)
        return orders

    def report(self, report: Report) -> None:
        """Process the workers' reports. A job ends once all workers have reported it."""
        with self._called():
            if report.forward is not None:
                self._times.observe(*report.forward)
            for number, ended in report.jobs.items():
                job = self._jobs.get(number)
                if job is None:
                    logger.warning("a worker reports the end of job %d, which is not in flight", number)
                    continue
                job.ended.merge(ended)
            self._end_jobs()

    def take_copied(self) -> dict[str, Any]:
        """Return the sums of the successful copies since the last call, as in `CopyStats`; empty without any."""
        with self._lock:
            copied, self._copied = self._copied, Counter()
        return dict(copied)

    # The engine

    def new_weights(self) -> None:
        """Switch to a new weights epoch: earlier pages are no longer served or stored.

        The epoch is the time in nanoseconds: a counter would restart with the process, and could find pages of other
        weights from an earlier run. It also rises if the clock was set back.
        """
        with self._called():
            self.cache.update_weights(max(int(1e9 * self._clock.wall_s()), self.cache.weights_epoch + 1))

    def close(self) -> None:
        """Stop polling and close the cache. Copies in flight are abandoned."""
        self._closing.set()
        self._idle.join()
        with self._lock:
            self.cache.close()

    @contextmanager
    def _called(self) -> Iterator[None]:
        """Let the engine's thread call the cache, which the idle thread may have polled since."""
        self._called_s = self._clock()
        with self._lock:
            self.cache.take_over()
            yield

    def _poll_when_idle(self) -> None:
        while not self._clock.wait_set(self._closing, _IDLE_S):
            if self._clock() - self._called_s < _IDLE_S:
                continue
            with self._lock:
                if self._clock() - self._called_s >= _IDLE_S and not self.cache.closed:
                    self.cache.take_over()
                    self.cache.poll()

    def _begin(self, tracked: _Tracked) -> bool:
        """Start to read the pages of a request from storage, once. Return False while its adapter is not identified."""
        if tracked.begun:
            return True
        request, adapter = tracked.request, tracked.adapter
        if adapter is not None:
            if not adapter.done() and self._clock() < tracked.arrived_s + _IDENTIFY_S:
                return False
            tracked.extra_key = adapter.result() if adapter.done() else uuid.uuid4().hex
        tracked.begun = True
        if not request.skip_reading_prefix_cache:
            pages = self._prompt_pages(request)
            key = self._key(tracked, pages)
            # vLLM evicts the end of a prompt first, so the pages on the device are the first ones.
            there = bisect_left(self._last_blocks(request, pages), True, key=lambda block: not self.on_device(block))
            if self.cache.prefetch(request.request_id, key, device_pages=there, trace=request.trace_headers):
                self._describe(request, key, 0)
        return True

    def _prompt_pages(self, request: EngineRequest) -> int:
        """Return how many pages may be loaded: the last token must be computed for its logits."""
        hashed = len(request.block_hashes) // self._layout.blocks_per_page
        return min((request.num_tokens - 1) // self._layout.page_tokens, hashed)

    def _key(self, tracked: _Tracked, pages: int) -> RadixKey:
        """Return the key of the first `pages` pages: the hash of a page is that of its last block, which covers all
        blocks before it."""
        return RadixKey.of_hashes(self._last_blocks(tracked.request, pages), extra_key=tracked.extra_key)

    def _last_blocks(self, request: EngineRequest, pages: int) -> Sequence[bytes]:
        per_page = self._layout.blocks_per_page
        return request.block_hashes[per_page - 1 : pages * per_page : per_page]

    def _describe(self, request: EngineRequest, key: RadixKey, start_page: int) -> None:
        """Describe the pages of `key` from `start_page` on, which may enter the tree, by the blocks of `request`."""
        if self._blocks_of is not None:
            self.cache.describe_blocks(key, start_page, partial(self._blocks_of, request))

    def _save(
        self, tracked: _Tracked, tokens: int, block_ids: Callable[[str], Sequence[int] | None], orders: Step
    ) -> None:
        """Order the save of those pages of the first `tokens` tokens that are missing on L2."""
        request = tracked.request
        pages = min(tokens // self._layout.page_tokens, len(request.block_hashes) // self._layout.blocks_per_page)
        if pages <= tracked.tried_pages or not tracked.begun:
            return
        blocks = block_ids(request.request_id)
        if blocks is None:
            return
        tracked.tried_pages = pages
        key = self._key(tracked, pages)
        write = self.cache.begin_write(request.request_id, key)
        if write is None:
            return
        self._describe(request, key, write.start_page)
        hosts = self._host_blocks(write.host_pages)
        begin = write.start_page * self._layout.blocks_per_page
        device = np.array(blocks[begin : begin + len(hosts)], np.int32)
        orders.saves.append(self._open(request.request_id, write, device, hosts))
        tracked.saves.add(orders.saves[-1].id)

    def _open(self, rid: str, handle: HostLoad | HostWrite | None, device: PageIds, hosts: PageIds) -> CopyJob:
        """Return a new job; a lost load without a `handle`."""
        job = CopyJob(next(self._numbers), rid, device, hosts, lost=handle is None)
        self._jobs[job.id] = _Open(rid, handle)
        return job

    def _end_jobs(self) -> None:
        """End the jobs that all ranks have ended.

        If a layer-wise load fails, its forward computes garbage, also on ranks where the load succeeded. So a save
        waits for the layer-wise loads before it, and fails with them.
        """
        loading = False
        for number, job in list(self._jobs.items()):
            if job.ended.ranks < self._layout.ranks:
                loading |= self._layerwise and not isinstance(job.handle, HostWrite)
            elif not (loading and isinstance(job.handle, HostWrite)):
                del self._jobs[number]
                self._end(number, job)

    def _end(self, number: int, job: _Open) -> None:
        if not isinstance(job.handle, HostWrite):
            if job.handle is not None:
                self.cache.end_load(job.handle, None if job.ended.failed else job.ended.seconds)
            if self._layerwise and job.ended.failed:
                for other in self._jobs.values():
                    other.ended.failed |= isinstance(other.handle, HostWrite)
        else:
            self.cache.end_write(job.handle, complete=not job.ended.failed)
            tracked = self._requests.get(job.rid)
            if job.ended.failed and tracked is not None and tracked.saves_again:
                tracked.saves_again = False
                tracked.tried_pages = min(tracked.tried_pages, job.handle.start_page)
            saves = self._release.get(job.rid, set()) if tracked is None else tracked.saves
            saves.discard(number)
            if not saves:
                self._release.pop(job.rid, None)
        if job.handle is not None and not job.ended.failed:
            name, copied = "loaded" if isinstance(job.handle, HostLoad) else "saved", self._copied
            copied[f"{name}_pages"] += (pages := len(job.handle.host_pages))
            copied[f"{name}_bytes"] += pages * self._page_bytes
            copied[f"{name}_seconds"] += job.ended.seconds  # type: ignore[assignment]  # a Counter adds any number

    def _host_blocks(self, pages: PageIds) -> PageIds:
        """Return the host blocks of host pages, in order, int32."""
        per_page = self._layout.blocks_per_page
        blocks = np.add.outer(pages * per_page, np.arange(per_page))
        return blocks.reshape(-1).astype(np.int32)

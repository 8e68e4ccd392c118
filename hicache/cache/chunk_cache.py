"""ChunkCache: the interface of a cache, without caching.

Each request has its own pages from start to end. Pages do not outlive their request, and there is neither L2 nor
storage. Prefills in several chunks work, because a request keeps its pages between them. It is for comparisons, and for
models or traffic for which reuse does not pay.

Called by the scheduler thread alone; no lock.

Invariant, verified by `check()`: used pages of L1 = pages held by requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..arguments import instance, number, whole
from ..controller import ControllerStatistics
from ..errors import InvalidInput, InvariantError
from ..events import EventStream, Publisher
from ..ghosts import Reason
from ..hints import Outcome, OutcomeStatus, envelope_of
from ..keys import RadixKey, require_epoch
from ..radix import Match, Peek, RadixTree, make_policy
from ..tiers import Fence, KVPool, TrailingPool, Transfer
from ..types import NO_PAGES
from .break_even import BreakEven
from .device_tier import Eviction
from .explain import Explainer, PromptTokens
from .misuse import OwnerThread
from .pins import Pin
from .recorder import EventRecorder
from .requests import RequestKV, RunningRequests, computed_pages, missing_pages, require_beginning
from .statistics import NO_TIER, CacheCounters, CacheStatistics, TierStatistics
from .trailing import TrailingTier

_UNDECIDED = BreakEven().statistics()
# The time for a publisher to send its last events. There are none, so it ends at once.
CLOSE_S = 1.0


class ChunkCache:
    """See the module's docstring; the contract of each method is in `TreeCache`. Takes plain and bigram keys."""

    def __init__(self, device: KVPool, *, weights_epoch: int = 0, trailing: Sequence[TrailingPool] = ()) -> None:
        self.page_size = device.geometry.page_size
        self.device = device
        self.weights_epoch = require_epoch(weights_epoch)
        self._tree = RadixTree(self.page_size, make_policy("lru"))  # stays empty
        self._nothing = self._tree.match(RadixKey(b""))
        self._running = RunningRequests()
        self._trailing = TrailingTier(trailing, device)
        self._counters = CacheCounters()
        self.explainer = Explainer(0, self._counters, math.inf)
        self._caller = OwnerThread()
        self._events: EventRecorder | None = None
        self._publisher: Publisher | None = None
        self._closed = False

    def match_prefix(self, key: RadixKey) -> Match:
        """Return a match of zero pages."""
        instance("key", key, RadixKey)
        return self._nothing

    def peek(self, key: RadixKey) -> Peek:
        """Return zero pages on each tier."""
        instance("key", key, RadixKey)
        return Peek(0, 0)

    def prefetch_from_storage(self, rid: str, key: RadixKey, *, trace: Mapping[str, str] | None = None) -> bool:
        """Return False: the cache has no storage."""
        instance("rid", rid, str)
        instance("key", key, RadixKey)
        if trace is not None:
            instance("trace", trace, Mapping)  # type: ignore[type-abstract]
        return False

    def check_prefetch_progress(self, rid: str) -> bool:
        """Return True: requests never wait."""
        instance("rid", rid, str)
        return True

    def abort_prefetch(self, rid: str) -> None:
        """Do nothing."""
        instance("rid", rid, str)

    def begin_request(self, rid: str, key: RadixKey, *, priority: int = 0) -> RequestKV | None:
        """Return new pages for all of `key`; None if L1 has no room now. Raises as every cache does."""
        _, priority = require_beginning(rid, key, priority, self.device)
        if self._closed:
            raise InvalidInput("the cache is closed; build a new one")
        self._caller.require()
        self._running.require_new(rid)
        request = RequestKV(rid, key, NO_PAGES, 0, self._tree, self._nothing.node, priority)
        self._running.add(request)
        if not self.extend(request, key.prompt_tokens):
            self._running.end(request)
            return None
        request.account = PromptTokens(rid, 0.0, key.prompt_tokens, computed={(Reason.UNSHARED, ""): key.prompt_tokens})
        self.explainer.count(request.account)
        return request

    def start_loading(self) -> Transfer | None:
        """Return None: pages are never loaded."""
        return None

    def record_fence(self, fence: Fence) -> None:
        """Do nothing: pages are never copied."""
        instance("fence", fence, Fence)  # type: ignore[type-abstract]

    def extend(self, request: RequestKV, total_tokens: int) -> bool:
        """Make room for KV of `total_tokens` tokens. Return False and change nothing if L1 is full."""
        self._running.require(request)
        missing = missing_pages(request, total_tokens, self.device)
        if missing <= 0:
            return True
        pages = self.device.allocator.alloc(missing)
        if pages is None:
            self._counters.skipped["no_device_room"] += 1
            return False
        request.pages = np.concatenate((request.pages, pages))
        return True

    def prepare(self, request: RequestKV, start: int, end: int) -> bool:
        """As `TreeCache.prepare`."""
        self._running.require(request)
        prepared = self._trailing.prepare(request, start, end, shares=False)
        self._counters.skipped["no_slots"] += 0 if prepared else 1
        return prepared

    def cache_unfinished_req(self, request: RequestKV, key: RadixKey) -> None:
        """Share nothing; the request keeps its pages. Raises InvalidInput as every cache does."""
        self._running.require(request)
        computed_pages(request, key, self.page_size)

    def cache_finished_req(self, request: RequestKV, key: RadixKey | None) -> None:
        """End a request and free all its pages."""
        self._running.require(request)
        if key is not None:
            self.cache_unfinished_req(request, key)
        self._trailing.end(request)
        self.device.allocator.free(request.pages)
        self._running.end(request)

    def evict(self, pages: int) -> Eviction:
        """Evict nothing: all pages belong to requests."""
        return Eviction(freed_pages=0, writeback_pages=0, short_pages=whole("pages", pages))

    @property
    def writeback_pages(self) -> int:
        """0: pages are never copied."""
        return 0

    def pin(self, key: RadixKey, ttl_s: float) -> Pin | None:
        """Return None: pages do not outlive their request."""
        instance("key", key, RadixKey)
        number("ttl_s", ttl_s, positive=True)
        return None

    def hint(self, envelope: object, rid: str | None = None, *, cache_salt: str | None = None) -> list[Outcome]:
        """Reject all actions: nothing is kept."""
        return [
            Outcome(action.action_id, action.action_type, OutcomeStatus.REJECTED, "prefix_cache is off")
            for action in envelope_of(envelope).actions
        ]

    def clear(self) -> None:
        """Do nothing."""

    def update_weights(self, epoch: int) -> None:
        """Record the epoch. Raises InvalidInput for one that is not an integer above the current one."""
        self.weights_epoch = require_epoch(epoch, above=self.weights_epoch)

    def record_events(self, stream: EventStream, publisher: Publisher | None = None) -> None:
        """Serve snapshots to the readers of `stream`: they are always empty."""
        instance("stream", stream, EventStream)
        if self._counters.requests or self._events is not None:
            raise InvalidInput("events: call record_events once, before the first request")
        self._events, self._publisher = EventRecorder(stream), publisher

    def name_origin(
        self, *, extra_key: str | None = None, cache_salt: str | None = None, lora_id: int | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Do nothing: the cache makes no events."""
        if self._events is not None:
            self._events.describe(extra_key, cache_salt, lora_id, lora_name)

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Do nothing: the cache fetches nothing."""
        whole("tokens", tokens)
        number("seconds", seconds)

    def poll(self) -> bool:
        """Return False: operations are never in flight."""
        if self._events is not None:
            self._events.poll(self._tree)
        return False

    def take_over(self) -> None:
        """Make the calling thread the owner, which makes all calls from now on."""
        self._caller.take_over()

    def statistics(self) -> CacheStatistics:
        """Return a snapshot of requests and L1; everything else is zero."""
        return CacheStatistics(
            **self._counters.totals(),
            nodes=0,
            pinned_pages=0,
            weights_epoch=self.weights_epoch,
            device=TierStatistics.of(self.device.allocator, 0, 0, self.device.geometry.payload_bytes),
            host=NO_TIER,
            break_even=_UNDECIDED,
            controller=ControllerStatistics(),
            events=None if self._events is None else self._events.stream.statistics(),
            publisher=None if self._publisher is None else self._publisher.statistics(),
        )

    def check(self) -> None:
        """Raises InvariantError if L1's free list or the invariant of this class is broken."""
        self.device.allocator.check()
        self._counters.check()
        used, own = self.device.allocator.used_pages, self._running.check()
        if used != own:
            raise InvariantError(f"L1: {used} pages in use, {own} held by requests")
        self._trailing.check(list(self._running), [])

    def drain(self, timeout_s: float) -> bool:
        """Return True: operations are never in flight."""
        number("timeout_s", timeout_s, most=math.inf)
        return True

    def close(self, timeout_s: float | None = None) -> bool:
        """Reject further requests and end the publisher, which blocks. Return True."""
        timeout_s = CLOSE_S if timeout_s is None else number("timeout_s", timeout_s)
        if self._publisher is not None and not self._closed:
            self._publisher.close(timeout_s)
        self._closed = True
        return True

    def __enter__(self) -> ChunkCache:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

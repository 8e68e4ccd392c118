"""HiRadixCache: the tree cache for an engine. The tree decides, the controller copies, this class manages requests.

The order of the calls is that of `TreeCache` (and DESIGN.md, "the life of one page"). All calls are made on the
scheduler's thread, which owns the tree, both free lists and all request state, so no lock is needed. Calls neither wait
for I/O nor raise storage errors.

Conservation, verified by `check()`: for L1, free + held by nodes + held by requests = capacity; for L2, free + held by
nodes + reserved for operations = capacity. Device pages of a copy belong to nodes, which the copy keeps locked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Unpack

import numpy as np

from ..arguments import WHOLE_MAX, instance, whole
from ..controller import Acks, HiCacheController
from ..errors import InvariantError, TransferError
from ..keys import RadixKey
from ..radix import Inserted, Match, Node, Peek, RadixTree
from ..tiers import FailedTransfer, Fence, HostPool, KVPool, PageSource, TrailingPool, Transfer, require_pages
from ..types import PageIds
from .break_even import Route
from .device_tier import DeviceTier, Eviction
from .explain import Missed, PromptTokens
from .pins import Pin
from .requests import RequestKV, RunningRequests, computed_pages, missing_pages, require_beginning
from .statistics import CacheStatistics, TierStatistics
from .tiered import TieredCache, TieredOptions
from .trailing import TrailingTier


class Reused(NamedTuple):
    """The cached pages of a request that begins: the path to `node`, `device_pages` on L1 and then `loaded_pages` that
    are loaded."""

    tree: RadixTree
    node: Node
    device_pages: int
    loaded_pages: int


class HiRadixCache(TieredCache):
    """See the module's docstring; `TreeCache` has the contract of the common methods.

    `create_cache` builds one from a configuration. `running` are its requests.
    """

    _prefetches_at_once = True

    def __init__(
        self, device: KVPool, host: HostPool, controller: HiCacheController, *,
        trailing: Sequence[TrailingPool] = (), **options: Unpack[TieredOptions],
    ) -> None:
        super().__init__(host, controller, device.allocator, **options)
        self.device = device
        self.running = RunningRequests(self._queue.leave)
        self._trailing = TrailingTier(trailing, device, controller, self._verifier)
        self._l1 = DeviceTier(
            device.allocator, self._trees, self._l2, controller, self._counters, self.break_even,
            self._trailing, self._prefetcher.share.release_arrived,
        )
        # The verifier verifies the pages that a request is about to load; slots are filled from copies on L2.
        if self._verifier is None and not trailing:
            self._prefetcher.share.promote = self._l1.promote
        self._prefetcher.may_have_room = self._may_have_room
        if trailing and self._verifier is None:  # it does not let the copies of pages on L1 be loaded
            self._prefetcher.match = self._match
        self._hints.device = self._l1
        self._device_fault: TransferError | None = None
        self._untold_fault: TransferError | None = None  # to be raised in the next forward

    # Requests

    def match_prefix(self, key: RadixKey) -> Match:
        """Return the longest cached prefix of `key`, in whole pages, and mark it as used."""
        return self.tree.match(key)

    def peek(self, key: RadixKey) -> Peek:
        """Return how many pages of `key` are cached and reusable. Changes nothing."""
        return self.tree.peek(self._reusable(key))

    def begin_request(self, rid: str, key: RadixKey, *, priority: int = 0) -> RequestKV | None:
        """As `TreeCache.begin_request`. After None, with write_back, pages may be about to become free."""
        pages, priority = require_beginning(rid, key, priority, self.device)
        self._require_service()
        self.running.require_new(rid)
        tree, reusable = self.tree, self._reusable(key)
        if self._prefetcher.is_active(rid) and not self._l1.may_have_room(pages - tree.peek(reusable).device_pages):
            self.caller.refused(rid, self.running, self.device.pages)
            return None  # pages that are still being read can arrive until there is room
        self._prefetcher.conclude(rid)
        match = self._match(tree, reusable)
        there = tree.match(reusable, marks=False) if self._trailing.pools else match
        needed = pages - match.device_count
        tree.lock(match.node)
        has_room = self._l1.make_room(needed)
        while not (has_room or self.running) and self._prefetcher.give_way():
            has_room = self._l1.make_room(needed)
        if not has_room:
            tree.unlock(match.node)
            self.caller.refused(rid, self.running, self.device.pages)
            return None
        context = self._contexts.pop(rid, None)
        node, loaded, load = self._l1.load_back(tree, match, context)
        tree.move_lock(match.node, node)
        shared = np.concatenate((match.device_pages, loaded)) if len(loaded) else match.device_pages
        own = self._l1.alloc(needed - len(loaded))
        if own is None:
            raise InvariantError("L1: no pages are free for a request after room was made for it")
        request = RequestKV(rid, key, np.concatenate((shared, own)), len(shared), tree, node, priority, load)
        if not self._trailing.begin(request):
            self._counters.skipped["no_slots"] += 1
            tree.unlock(node)
            self._l1.free(own)
            return None
        self.running.add(request)
        self.caller.forget_refusals(rid)
        answer = self._prefetcher.answer(rid)
        missed = Missed(there.pages, there.node, self._l1.unloaded, answer, self._continue_turn(request))
        request.account = self._account(rid, key.prompt_tokens, context)
        self._begun(request.account, key, Reused(tree, node, match.device_count, len(loaded)), missed, priority)
        return request

    def _continue_turn(self, request: RequestKV) -> int:
        """Give a request that begins further KV on L1. Return its tokens: none."""
        return 0

    def start_loading(self) -> Transfer | None:
        """Start the loads of this step as one copy. REQUIRES: called once per step, before the forward."""
        fault, self._untold_fault = self._untold_fault, None
        self.device.loading = self.controller.launch_loads() if fault is None else FailedTransfer(fault)
        return self.device.loading

    def record_fence(self, fence: Fence) -> None:
        """Make the copies that start from now on wait for `fence`."""
        self.controller.record_fence(fence)

    def extend(self, request: RequestKV, total_tokens: int) -> bool:
        """Make room for KV of `total_tokens` tokens. Return False and change nothing if L1 is full."""
        self.running.require(request)
        missing = missing_pages(request, total_tokens, self.device)
        if missing <= 0:
            return True
        pages = self._l1.alloc(missing)
        if pages is None:
            return False
        request.pages = np.concatenate((request.pages, pages))
        return True

    def prepare(self, request: RequestKV, start: int, end: int) -> bool:
        """As `TreeCache.prepare`."""
        self.running.require(request)
        shares = request.tree is self.tree and self._device_fault is None
        prepared = self._trailing.prepare(request, start, end, shares=shares)
        if not prepared:
            self._counters.skipped["no_slots"] += 1
        return prepared

    def cache_unfinished_req(self, request: RequestKV, key: RadixKey) -> None:
        """As `TreeCache.cache_unfinished_req`. The lock moves to the end of the shared pages. Does nothing for a
        request of earlier weights, while pages of the tree are being loaded, and after a device copy has failed."""
        self.caller.require()
        self.running.require(request)
        full = computed_pages(request, key, self.page_size)
        self._queue.progress(request.rid, len(request.key) - len(key), self.controller.time_s())
        if request.tree is not self.tree or self._device_fault is not None:
            return
        shared = request.shared_pages
        if self.controller.is_loading and self.tree.awaits_load(key, request.last_node, shared):
            return
        uses = self._note_uses(request.rid, key, full)
        inserted = self.tree.insert(
            key, request.pages[shared:full], priority=request.priority, below=request.last_node, start_page=shared,
            uses=uses,
        )
        if present := inserted.present_pages:
            pages, duplicates = self.tree.device_pages(inserted.node), request.pages[shared : shared + present]
            self._trailing.replace(duplicates, pages[shared : shared + present])
            self._l1.free(duplicates)
            request.pages = np.concatenate((pages, request.pages[full:]))
        new_pages = full - shared - inserted.present_pages
        self._l1.request_pages -= new_pages
        self.explainer.wrote(request.account, new_pages * self.page_size)
        self.tree.move_lock(request.last_node, inserted.node)
        request.last_node, request.shared_pages = inserted.node, full
        request.gathers = len(key) < len(request.key) and self._l1.gathers(inserted.node)
        if full * self.page_size > len(request.key):
            request.key = key.head(full * self.page_size)
        self._pins.used(inserted.node)
        if not request.gathers:
            self._l1.used(inserted.node)

    def cache_finished_req(self, request: RequestKV, key: RadixKey | None) -> None:
        """As `TreeCache.cache_finished_req`. Cancels a load of an aborted request that has not started."""
        self.caller.require()
        self.running.require(request)
        if key is not None:
            self.cache_unfinished_req(request, key)
            self._hints.note(request.rid, key)
        if request.gathers and request.tree is self.tree:
            self._l1.used(request.last_node)
        self._trailing.end(request)
        self._l1.read(request.pages[: request.shared_pages])
        self._l1.free(request.pages[request.shared_pages :])
        request.tree.unlock(request.last_node)
        if key is None and request.load is not None:
            self._l1.cancel_load(request.load)
        self._trees.sweep()
        self.running.end(request)
        self.explainer.end(request.account)
        self._hints.ends(request.rid, completed=key is not None and request.tree is self.tree)

    def insert(self, key: RadixKey, device_pages: PageIds, *, priority: int = 0) -> Inserted:
        """Insert L1 pages with the whole pages of `key` into the tree, and back them up as the policy says.

        The caller keeps `device_pages[:present_pages]`, which the tree had. REQUIRES: they came from `page_source`.
        """
        priority = whole("priority", priority, -WHOLE_MAX)
        self.tree.require_fitting(key)
        uses = self._note_uses(None, key, key.pages(self.page_size))
        inserted = self.tree.insert(key, require_pages(device_pages), priority=priority, uses=uses)
        new_pages = len(device_pages) - inserted.present_pages
        self._l1.request_pages -= new_pages
        self.explainer.wrote(None, new_pages * self.page_size)
        self._l1.read(device_pages)
        self._l1.used(inserted.node)
        return inserted

    @property
    def page_source(self) -> PageSource:
        """Pages for the caller or a token allocator of the engine. `alloc` evicts as needed; `free` takes back pages
        that were not inserted into the tree.
        """
        return self._l1

    def evict(self, pages: int) -> Eviction:
        """Evict `pages` pages from L1, or as many as possible. Return how many are free now, soon, and missing."""
        self.caller.require()
        return self._l1.evict(whole("pages", pages))

    @property
    def writeback_pages(self) -> int:
        """L1 pages that are being copied to L2 for their eviction."""
        return self._l1.writeback_pages

    @property
    def request_pages(self) -> int:
        """L1 pages that belong to requests only, or to the caller by `page_source`."""
        return self._l1.request_pages

    def pin(self, key: RadixKey, ttl_s: float) -> Pin | None:
        """As in `TieredCache`; the pages are also copied to L2."""
        pin = super().pin(key, ttl_s)
        if pin is not None and pin.pages:
            self._l1.used(pin.node)
        return pin

    # Storage

    def prefetch_from_storage(self, rid: str, key: RadixKey, *, trace: Mapping[str, str] | None = None) -> bool:
        """As `TreeCache.prefetch_from_storage`; the reads begin now or in turn."""
        context = self._note_trace(instance("rid", rid, str), trace)
        reusable = self._reusable(key)
        self.caller.called()
        in_service = self._device_fault is None and not self.closed
        if in_service and self._verifier is not None:
            self._verifier.ask(rid, reusable)
        return in_service and self._prefetcher.start(rid, reusable, context, at_once=self._prefetches_at_once)

    def check_prefetch_progress(self, rid: str) -> bool:
        """Return True once the prefetch has ended or its time is over, and while storage is paused; its pages are then
        in the tree. With `integrity.verify: load`, the frames that the request would load must also be verified."""
        self.caller.called()
        return self._prefetcher.ready(rid) and (self._verifier is None or self._verifier.ready(rid))

    def abort_prefetch(self, rid: str) -> None:
        """Stop the prefetch of a request that will not run. Arrived pages stay; the remaining ones are freed later."""
        if self._verifier is not None:
            self._verifier.forget(rid)
        self._prefetcher.abort(rid)
        self._contexts.pop(rid, None)
        self._hints.ends(rid, completed=False)
        self.caller.forget_refusals(rid)

    # Each step

    def _take_in(self, acks: Acks) -> None:
        if acks.fault is not None:
            # The content of the device is unknown now. To never serve a wrong byte, further requests are rejected.
            self._device_fault = self._untold_fault = acks.fault
            self._l1.halt()
        for backup in acks.failed_backups:
            self._l1.failed(backup)
        for backup in acks.written:
            self._l1.written(backup)
        for loads, outcome in ((acks.loaded, "loaded"), (acks.failed_loads, "failed")):
            for load in loads:
                if self._trailing.loaded(load):
                    continue
                self._l1.loaded(load, outcome)
                self._prefetcher.share.loaded(load)
        for page_count, seconds in acks.load_times:
            self.break_even.observe_transfer(Route.LOAD, page_count, seconds)
        super()._take_in(acks)

    def _save(self, node: Node) -> bool:
        if self._device_fault is not None:
            return False
        return self._l1.save(node) if node.host is None else super()._save(node)

    def _match(self, tree: RadixTree, key: RadixKey) -> Match:
        """Return the longest cached prefix of `key` that a request can use, which trailing pools may shorten."""
        match = tree.match(key)
        pages = self._trailing.usable(match)
        return match if pages == match.device_count else tree.match(key.head(pages * self.page_size))

    def _reusable(self, key: RadixKey) -> RadixKey:
        """Return the whole pages of `key` that may come from the cache: the last token is always computed."""
        self.tree.require_fitting(key)
        reusable = self._reusable_pages(key) * self.page_size
        # Lookups use whole pages only, so a partial page need not be cut off, which would copy the key.
        return key if len(key) < reusable + self.page_size else key.head(reusable)

    def _reusable_pages(self, key: RadixKey) -> int:
        return (key.prompt_tokens - 1) // self.page_size

    def _require_service(self) -> None:
        if self._device_fault is not None:
            raise self._device_fault
        super()._require_service()

    def _begun(self, account: PromptTokens, key: RadixKey, reused: Reused, missed: Missed, priority: int) -> None:
        """Count a request that begins with the pages of `reused`, and complete its account."""
        rid, (tree, node, device_pages, loaded_pages) = account.rid, reused
        if self._verifier is not None:
            self._verifier.forget(rid)
        pages = device_pages + loaded_pages
        known_pages = self._note_uses(rid, key, pages, begins=True).known_pages
        if tree is self.tree:
            tree.use(node, priority, pages - known_pages)
            self._begins(rid, key, node)
            self._l2.reused(node)
            self._l1.used(node)
        self._queue.progress(rid, key.prompt_tokens - pages * self.page_size, self.controller.time_s())
        arrived, promoted = self._prefetcher.take_arrived(rid)
        arrived += max(0, promoted - device_pages)  # L1 has evicted them since
        promoted = min(device_pages, promoted)
        arrived = min(loaded_pages, max(0, arrived - (missed.pages - pages)))  # the last pages that are in memory
        hits = device_pages - promoted, loaded_pages - arrived, arrived + promoted
        self.explainer.begin(account, key, tree, hits, self._reusable_pages(key), missed)

    def _may_have_room(self, pages: int) -> bool:
        """Return True if L1 may have room for a request. Without running ones it has: they alone keep pages long."""
        return not self.running or self._l1.may_have_room(pages)

    # State

    def statistics(self) -> CacheStatistics:
        """Return a snapshot of all tiers. Any thread may call it; it may query the store's usage."""
        device, tree = self.device, self.tree
        pages, evictable = tree.device_pages_total, tree.device_evictable_pages
        tier = TierStatistics.of(device.allocator, pages, evictable, device.geometry.payload_bytes)
        return replace(super().statistics(), device=tier)

    def check(self) -> None:
        """Raises InvariantError if a tree, a pool or a count is inconsistent. Visits every node."""
        super().check()
        self._l1.check()
        self._trailing.check(list(self.running), self._l1.pages_in_backups())
        if self.running.check() > self.request_pages:
            raise InvariantError(f"L1: {self.request_pages} pages are not the tree's, requests hold more")

"""HiRadixCache: the tree cache an engine embeds. The tree decides, the controller moves, this class keeps the books.

The engine calls, per request and in this order (DESIGN.md, "the life of one page"):

    prefetch_from_storage -> check_prefetch_progress -> begin_request -> start_loading -> (forward, layer by layer)
    -> extend* -> cache_unfinished_req* -> cache_finished_req

and `poll` once per step. All of it on one thread, the scheduler's, which owns the tree, both free lists and all request
state; so there is no lock. No call does I/O or waits for any. No call raises for a storage reason.

Conservation, verified by `check()`: for L1, free + held by nodes + held by requests = capacity; for L2, free + held by
nodes + lent to operations = capacity. Device pages of a copy belong to nodes, which the copy keeps locked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from ..controller import CopyOperation, HiCacheController
from ..errors import InvalidInput, InvariantError, TransferError
from ..keys import TOKEN_BYTES, RadixKey
from ..radix import POLICIES, RUN_PAGES_MAX, Inserted, Match, Node, RadixTree, check_tree
from ..tiers import HostPool, KVPool, Transfer
from ..types import NO_PAGES, PageIds
from .backup import WriteThrough
from .books import Books, HostLedger
from .options import CacheOptions
from .prefetch import Prefetcher
from .statistics import CacheStatistics, TierStatistics

# How often `drain` looks again while it waits. It is for shutdown and tests, where a millisecond does not matter.
DRAIN_WAIT_S = 0.001


@dataclass(slots=True, eq=False)
class RequestKV:
    """The KV of one running request.

    `pages` are all its L1 pages in order. The first `shared_pages` belong to the tree and are locked by this request;
    the others are its own. The hit counts say where the prefix of its prompt came from, in tokens.
    """

    rid: str
    key: RadixKey
    pages: PageIds
    shared_pages: int
    last_node: Node
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    ended: bool = False

    @property
    def cached_tokens(self) -> int:
        """Leading prompt tokens whose KV need not be computed."""
        return self.device_hit_tokens + self.host_hit_tokens + self.storage_hit_tokens


class HiRadixCache:
    """See the module's docstring. `create_cache` builds one from a configuration."""

    def __init__(
        self,
        device: KVPool,
        host: HostPool,
        controller: HiCacheController,
        options: CacheOptions | None = None,
    ) -> None:
        self.options = options or CacheOptions()
        if self.options.eviction_policy not in POLICIES:
            raise InvalidInput(f"eviction policy {self.options.eviction_policy!r}; known: {', '.join(POLICIES)}")
        self.page_size = device.geometry.page_size
        self.device = device
        self.host = host
        self.controller = controller
        bounds = controller.options
        self.tree = RadixTree(
            self.page_size,
            POLICIES[self.options.eviction_policy](),
            run_pages_max=min(RUN_PAGES_MAX, bounds.write_pages_max, bounds.load_pages_max, host.pages),
        )
        self._request_pages = 0
        self._books = Books()
        self._ledger = HostLedger(host, self.tree, self._books)
        self._prefetcher = Prefetcher(self.tree, self._ledger, controller, self.options, self._books)
        self._backup = WriteThrough(self.tree, self._ledger, controller, self._books)
        self._device_fault: TransferError | None = None
        self._closed = False

    # Requests

    def match_prefix(self, key: RadixKey) -> Match:
        """The longest cached prefix of `key`, in whole pages; marks it as used."""
        return self.tree.match(key)

    def begin_request(self, rid: str, key: RadixKey) -> RequestKV | None:
        """Give a request its KV: the cached prefix, loaded back where it is on L2, and own pages for the rest of `key`.

        At least the last token is left to compute, since its logits are wanted. None if L1 has no room now (evicting
        all that may be evicted); the tree is then unchanged. Raises TransferError after a device copy has failed.
        """
        self._require_service()
        self._prefetcher.conclude(rid)
        match = self.tree.match(self._reusable(key))
        needed = -(-len(key) // self.page_size) - len(match.device_pages)
        self.tree.lock(match.node)
        if self.device.allocator.free_pages + self.tree.device_evictable_pages < needed:
            self.tree.unlock(match.node)
            self._books.skipped["no_device_room"] += 1
            return None
        node, loaded = self.load_back(match)
        if node is not match.node:
            self.tree.lock(node)
            self.tree.unlock(match.node)
        shared = np.concatenate((match.device_pages, loaded)) if len(loaded) else match.device_pages
        own = self._alloc_device(needed - len(loaded))
        if own is None:
            raise InvariantError("L1: evictable pages were counted that could not be evicted")
        self._request_pages += len(own)
        request = RequestKV(rid, key, np.concatenate((shared, own)), len(shared), node)
        self._count_hits(request, len(match.device_pages), len(loaded))
        return request

    def load_back(self, match: Match) -> tuple[Node, PageIds]:
        """Bring the L2 part of `match` to L1, as much as fits; the last node then on L1, and the new L1 pages in order.

        No pages if it does not pay or nothing fits. The pages count as being on L1 at once; whoever computes with them
        waits for the transfer of `start_loading`, layer by layer. REQUIRES: `match.node` is locked by the caller, and
        nothing was evicted since the match.
        """
        if match.host_hit_pages == 0:
            return match.device_node, NO_PAGES
        if match.host_hit_pages * self.page_size < self.options.load_back_threshold_tokens:
            self._books.skipped["load_too_short"] += 1
            return match.device_node, NO_PAGES
        room = min(self.controller.load_room, self.device.allocator.free_pages + self.tree.device_evictable_pages)
        nodes: list[Node] = []
        host_runs: list[PageIds] = []
        count = 0  # pages that fit
        for node in reversed(list(self.tree.span(match.node, match.host_hit_pages))):
            if node.host is None:
                raise InvariantError(f"load back of a node that is not on L2: {node!r}")
            if count + len(node.host) > room:
                self.controller.refuse_load()
                break
            nodes.append(node)
            host_runs.append(node.host)
            count += len(node.host)
        pages = self._alloc_device(count) if count * self.page_size >= self.options.load_back_threshold_tokens else None
        if pages is None or not nodes:
            return match.device_node, NO_PAGES
        done = 0
        for node, run in zip(nodes, host_runs, strict=True):
            self.tree.set_device(node, pages[done : done + len(run)].copy())
            done += len(run)
        self.tree.lock(nodes[-1])
        self.controller.submit_load(nodes[-1], np.concatenate(host_runs), pages)
        return nodes[-1], pages

    def start_loading(self) -> Transfer | None:
        """Start the loads of this step as one copy. REQUIRES: called once per step, before the forward.

        The forward calls `wait_layer(i)` on what is returned before it reads layer i; None if no load is under way. On
        a stream device this and `poll` are called with the stream current that the forward runs on: copies are ordered
        against that one.
        """
        return self.controller.launch_loads()

    def extend(self, request: RequestKV, tokens: int) -> bool:
        """Make room for `tokens` tokens of KV in all; False if L1 is full (then nothing changed)."""
        self._require_running(request)
        missing = -(-tokens // self.page_size) - len(request.pages)
        if missing <= 0:
            return True
        pages = self._alloc_device(missing)
        if pages is None:
            self._books.skipped["no_device_room"] += 1
            return False
        request.pages = np.concatenate((request.pages, pages))
        self._request_pages += missing
        return True

    def cache_unfinished_req(self, request: RequestKV, key: RadixKey) -> None:
        """Share what a running request has computed: the whole pages of `key`, all of whose KV is written.

        Its copies of pages that the tree had already are freed and `request.pages` names the tree's instead; the lock
        moves to the end of what is shared.
        """
        self._require_running(request)
        full = len(key) // self.page_size
        if key.seed != request.key.seed or not self.tree.covers(request.last_node, key.tokens):
            raise InvalidInput(f"request {request.rid!r}: the key does not begin with what the request shares already")
        if full > len(request.pages):
            raise InvalidInput(f"request {request.rid!r}: {full} pages of tokens, but only {len(request.pages)} of KV")
        inserted = self.tree.insert(key, request.pages[:full])
        shared, present = request.shared_pages, inserted.present_pages
        if present > shared:
            self._free_device(request.pages[shared:present])
            request.pages = np.concatenate((self.tree.device_pages(inserted.node), request.pages[full:]))
        self._request_pages -= full - shared
        self.tree.lock(inserted.node)
        self.tree.unlock(request.last_node)
        request.last_node, request.shared_pages = inserted.node, full
        self._backup.inserted(inserted.node)

    def cache_finished_req(self, request: RequestKV, key: RadixKey | None) -> None:
        """End a request: share the whole pages of `key` (None: share nothing, as after an abort) and free the rest."""
        self._require_running(request)
        if key is not None:
            self.cache_unfinished_req(request, key)
        own = request.pages[request.shared_pages :]
        self._free_device(own)
        self._request_pages -= len(own)
        self.tree.unlock(request.last_node)
        request.pages = NO_PAGES
        request.shared_pages = 0
        request.ended = True

    def insert(self, key: RadixKey, device_pages: PageIds) -> Inserted:
        """Hand L1 pages that hold the whole pages of `key` to the tree, and back them up.

        The caller keeps `device_pages[:present_pages]`, which the tree had already. REQUIRES: the pages came from
        `alloc_pages`.
        """
        inserted = self.tree.insert(key, device_pages)
        self._request_pages -= len(device_pages) - inserted.present_pages
        self._backup.inserted(inserted.node)
        return inserted

    def alloc_pages(self, count: int) -> PageIds | None:
        """L1 pages for the caller, evicting as needed; None if there is no room (then nothing changed)."""
        pages = self._alloc_device(count)
        if pages is not None:
            self._request_pages += count
        return pages

    def free_pages(self, pages: PageIds) -> None:
        """Return pages of `alloc_pages` that were not handed to the tree."""
        self._free_device(pages)
        self._request_pages -= len(pages)

    def evict(self, pages: int) -> int:
        """Take at least `pages` pages off L1; how many it were, fewer if the rest is locked."""
        freed = self.tree.evict_device(pages)
        self._free_device(freed)
        self._books.evicted_pages["device"] += len(freed)
        return len(freed)

    # Storage

    def prefetch_from_storage(self, rid: str, key: RadixKey) -> bool:
        """Start reading what storage has of `key` beyond L1 and L2. False if it is not worth it or not possible now.

        Then, or once `check_prefetch_progress` says so, the request may begin.
        """
        if self._device_fault is not None or self._closed:
            return False
        return self._prefetcher.start(rid, self._reusable(key))

    def check_prefetch_progress(self, rid: str) -> bool:
        """Whether the request need not wait for its prefetch (any more).

        True once the prefetch has ended or its time is over; what has arrived by then is in the tree.
        """
        return self._prefetcher.ready(rid)

    def abort_prefetch(self, rid: str) -> None:
        """Stop the prefetch of a request that will not run. What has arrived stays; the rest comes back later."""
        self._prefetcher.abort(rid)

    # Each step

    def poll(self) -> bool:
        """Take in everything that ended since the last step and start what is queued; once per step. Never blocks.

        Returns whether anything ended.
        """
        acks = self.controller.poll()
        if acks is not None:
            for copy, error in acks.failed_copies:
                self._copy_failed(copy, error)
            for copy in acks.written:
                self._backup.written(copy)
            for copy in acks.loaded:
                self.tree.unlock(copy.tag)
            for operation in acks.found:
                self._prefetcher.found(operation)
            for operation in acks.prefetched:
                self._prefetcher.ended(operation)
            for backup in acks.stored:
                self._backup.stored(backup)
        self.controller.launch_writes()
        return acks is not None

    def _copy_failed(self, copy: CopyOperation, error: TransferError) -> None:
        # What the device holds is unknown now. A wrong byte must not be served, so no further request may begin.
        self._device_fault = error
        self._backup.halt()
        if copy.tag.backup_pending:
            self._backup.write_failed(copy)
        else:
            self.tree.unlock(copy.tag)

    # Memory

    def _alloc_device(self, count: int) -> PageIds | None:
        free = self.device.allocator.free_pages
        if free < count:
            if free + self.tree.device_evictable_pages < count:
                return None
            self.evict(count - free)
        return self.device.allocator.alloc(count)

    def _free_device(self, pages: PageIds) -> None:
        self.device.allocator.free(pages)

    def _reusable(self, key: RadixKey) -> RadixKey:
        """The whole pages of `key` that may come from the cache: its last token is always computed."""
        tokens = (len(key) - 1) // self.page_size * self.page_size
        return RadixKey(key.tokens[: tokens * TOKEN_BYTES], key.seed)

    def _require_service(self) -> None:
        if self._device_fault is not None:
            raise self._device_fault
        if self._closed:
            raise InvalidInput("the cache is closed; build a new one")

    def _require_running(self, request: RequestKV) -> None:
        if request.ended:
            raise InvalidInput(f"request {request.rid!r} has ended; its pages belong to others now")

    def _count_hits(self, request: RequestKV, device_pages: int, loaded_pages: int) -> None:
        from_storage = min(loaded_pages, self._prefetcher.take_arrived(request.rid))
        request.device_hit_tokens = device_pages * self.page_size
        request.host_hit_tokens = (loaded_pages - from_storage) * self.page_size
        request.storage_hit_tokens = from_storage * self.page_size
        books = self._books
        books.requests += 1
        books.prompt_tokens += len(request.key)
        books.hit_tokens["device"] += request.device_hit_tokens
        books.hit_tokens["host"] += request.host_hit_tokens
        books.hit_tokens["storage"] += request.storage_hit_tokens

    # State

    def statistics(self) -> CacheStatistics:
        """A snapshot of all tiers. May be called from any thread; asks the backend for its usage."""
        books = self._books
        return CacheStatistics(
            requests=books.requests,
            prompt_tokens=books.prompt_tokens,
            hit_tokens=dict(books.hit_tokens),
            evicted_pages=dict(books.evicted_pages),
            skipped=dict(books.skipped),
            nodes=self.tree.node_count,
            device=TierStatistics(
                capacity_pages=self.device.pages,
                free_pages=self.device.allocator.free_pages,
                cached_pages=self.tree.device_evictable_pages + self.tree.device_protected_pages,
                page_bytes=self.device.geometry.payload_bytes,
            ),
            host=TierStatistics(
                capacity_pages=self.host.pages,
                free_pages=self.host.allocator.free_pages,
                cached_pages=self.tree.host_pages,
                page_bytes=self.host.frame_bytes,
            ),
            controller=self.controller.statistics(),
        )

    def check(self) -> None:
        """Raises InvariantError if the tree, a pool or the books are inconsistent. Visits every node."""
        check_tree(self.tree)
        self.device.allocator.check()
        self.host.allocator.check()
        nodes = self.tree.device_evictable_pages + self.tree.device_protected_pages
        if self.device.allocator.used_pages != nodes + self._request_pages:
            raise InvariantError(
                f"L1: {self.device.allocator.used_pages} pages in use, "
                f"{nodes} held by nodes and {self._request_pages} by requests"
            )
        if self.host.allocator.used_pages != self.tree.host_pages + self._ledger.lent_pages:
            raise InvariantError(
                f"L2: {self.host.allocator.used_pages} pages in use, "
                f"{self.tree.host_pages} held by nodes and {self._ledger.lent_pages} lent"
            )

    def drain(self, timeout_s: float) -> bool:
        """Poll until no copy, prefetch or store is under way; blocks. False if some still are after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self.controller.launch_loads()
        while not self.controller.idle:
            if time.monotonic() >= deadline:
                return False
            if not self.poll():
                time.sleep(DRAIN_WAIT_S)
        return True

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish queued copies and stores and end all threads; blocks up to `timeout_s` (None: as configured).

        Prefetches are given up. False if something was left; stored objects are whole or absent all the same.
        """
        deadline = time.monotonic() + (self.options.shutdown_deadline_s if timeout_s is None else timeout_s)
        self._closed = True
        self.controller.stop_prefetching()
        self.drain(deadline - time.monotonic())
        ended = self.controller.close(max(0.0, deadline - time.monotonic()))
        self.poll()
        return ended

    def __enter__(self) -> HiRadixCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""HostCache: L2 and L3 for an engine that manages its device pages itself, such as vLLM.

The engine decides which pages to load and write; its workers copy them. Per request and in this order:

    prefetch -> check_prefetch -> lookup -> begin_load -> (workers copy) -> end_load
    -> (forward) -> begin_write -> (workers copy) -> end_write -> abort

and `poll` once per step. One scheduler decides for all workers that share the host pool, on one thread, so there is no
lock. Only `drain` and `close` wait for I/O. Calls do not raise storage errors.

A key has only whole pages, which may be cached. All page numbers count from the start of the prompt. An engine that
must compute the last token of a prompt leaves out the page of that token, or loads fewer pages than `lookup` offers.

    load   `begin_load` holds the pages on L2 until `end_load`, so they are not evicted or changed
    write  `begin_write` reserves pages of L2; they enter the tree after `end_write`, when all workers have copied

Invariants, verified by `check()` together with those of `TieredCache`: every node is only on L2; the pages of a load
are on L2 and held; a page of a write is not in a tree and not in another write; a complete write that is not in the
tree waits for another write with its prefix.

Longer than 500 lines because lookups, loads, writes and the account of a request share its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Unpack

import numpy as np

from .. import tracing
from ..arguments import instance, number, whole
from ..controller import HiCacheController
from ..errors import InvalidInput, InvariantError
from ..events import PageBlocks
from ..ghosts import Kind, Reason
from ..keys import RadixKey, common_pages
from ..radix import Match, Node, RadixTree
from ..tiers import HostPool, PageAllocator
from ..types import NO_PAGES, PageIds
from .break_even import Route
from .explain import Missed, StorageAnswer
from .statistics import CacheStatistics
from .tiered import TieredCache, TieredOptions


@dataclass(frozen=True, slots=True)
class HostMatch:
    """The result of `lookup`: `pages` pages from the start page on. `loading`: another request is loading one of them,
    or they are being verified (`integrity.verify`), so the engine should look up again later."""

    pages: int
    loading: bool


@dataclass(slots=True, eq=False)
class _Request:
    """The state of a request until `abort`: its tree, the length that was decided on with the decision, and whether a
    load failed.

    Its prompt has `tokens` tokens, of which the device had `start_page` pages and `own_tokens` of the next one, and L2
    `pages` up to `node`. It `runs` once it has made progress. It is counted once for each attempt: when its load has
    ended, or without a load when it is computed or written."""

    tree: RadixTree
    key: RadixKey
    node: Node
    tokens: int
    decided_pages: int = 0
    pays: bool = False
    failed: bool = False
    start_page: int = 0
    own_tokens: int = 0
    pages: int = 0
    unshared: bool = False
    loads: int = 0  # in flight
    runs: bool = False
    counted: bool = False
    unloaded: Kind = (Reason.NO_ROOM, "")
    answer: StorageAnswer | None = None  # once its prefetch has ended


@dataclass(frozen=True, slots=True, eq=False)
class HostLoad:
    """A handle: the pages of `rid` from `start_page` on are held in `host_pages` (int32, read-only).

    They end at `_node`; `storage_pages` of them came from storage for `_request`."""

    rid: str
    start_page: int
    host_pages: PageIds
    _tree: RadixTree = field(repr=False)
    _node: Node = field(repr=False)
    _request: _Request = field(repr=False)
    storage_pages: int
    _span: tracing.Span | None = field(repr=False)


@dataclass(slots=True, eq=False)
class HostWrite:
    """A handle: the pages of `rid` from `start_page` on are copied to `host_pages` (int32, read-only).

    They belong to `_key`. `_anchor`, the end of their prefix on L2, is held. `_complete`: all workers have copied."""

    rid: str
    start_page: int
    host_pages: PageIds
    _key: RadixKey = field(repr=False)
    _tree: RadixTree = field(repr=False)
    _anchor: Node = field(repr=False)
    _complete: bool = field(default=False, repr=False)

    @property
    def _end_page(self) -> int:
        return self.start_page + len(self.host_pages)


class HostCache(TieredCache):
    """See the module's docstring. `create_host_cache` builds one from a configuration.

    Raises InvalidInput for `write_back`, and for a pool that is in use.
    """

    def __init__(self, host: HostPool, controller: HiCacheController, **options: Unpack[TieredOptions]) -> None:
        super().__init__(host, controller, PageAllocator(0), **options)
        if self.config.write_policy == "write_back":
            raise InvalidInput(
                "write_policy: 'write_back' copies pages that L1 evicts, but this engine evicts from its device by "
                "itself; use write_through or write_through_selective"
            )
        used = host.allocator.used_pages - (0 if self._l2.kept is None else self._l2.kept.held)
        if used:
            raise InvalidInput(f"host: {used} pages are in use; each cache needs its own pool")
        self._requests: dict[str, _Request] = {}
        self._loads: set[HostLoad] = set()
        self._writes: dict[HostWrite, None] = {}  # in order of `begin_write`
        self._loaded_pages = self._written_pages = 0

    # Storage

    def prefetch(
        self, rid: str, key: RadixKey, *, device_pages: int = 0, trace: Mapping[str, str] | None = None
    ) -> bool:
        """Start reading from storage the part of `key` that is not on L2, now or in turn. Return False if that does not
        pay or is not possible. Look up the request then, or once `check_prefetch` is True.
        The first `device_pages` pages, which the device has, are read only if later ones pay for both: L2 keeps whole
        prefixes. `trace` has the request's W3C headers, `traceparent` and `tracestate`, for its spans.
        """
        context = self._note_trace(instance("rid", rid, str), trace)
        self.tree.require_fitting(key)
        self.caller.called()
        return not self.closed and self._prefetcher.start(rid, key, context, whole("device_pages", device_pages))

    def describe_blocks(self, key: RadixKey, start_page: int, blocks_of: Callable[[int], PageBlocks]) -> None:
        """Describe the pages of `key` from `start_page` on by the engine's blocks, for KV events that routers can read.

        Call it after `prefetch` and `begin_write`. `blocks_of` is called at once with the number of each page that is
        not described yet. Does nothing without events. Raises InvalidInput for tokens.
        """
        if not key.is_given:
            raise InvalidInput("key: it has tokens, which events have anyway; describe page keys of the engine")
        self.tree.require_fitting(key)
        if self._events is not None:
            self._events.describe_blocks(key, start_page, blocks_of)

    def check_prefetch(self, rid: str, device_pages: int = 0) -> bool:
        """Return True once the prefetch of a request has ended or its time is over, while storage is paused, and if the
        device has its pages by now."""
        self.caller.called()
        return self._prefetcher.ready(rid, whole("device_pages", device_pages))

    def abort(self, rid: str) -> None:
        """Forget a request that has ended or will not run. REQUIRES: called once for each request that was looked up.

        Its prefetch stops; pages that have arrived stay on L2. Loads and writes continue to their ends.
        """
        self._prefetcher.abort(rid)
        if self._verifier is not None:
            self._verifier.forget(rid)
        if (request := self._requests.pop(rid, None)) is None:
            self._hints.ends(rid, completed=False)
        else:
            request.counted |= not request.runs
        self._end_request(rid)

    # Loads

    def lookup(
        self, rid: str, key: RadixKey, start_page: int = 0, *, own_copy: bool = False, prompt_tokens: int | None = None,
        own_tokens: int = 0, unshared: bool = False,
    ) -> HostMatch:
        """Return how many pages of `key` from `start_page` on are on L2; zero if loading them does not pay.

        Marks them as used. The prefetch continues until `begin_load`, `begin_write` or `abort`: another lookup may find
        more. Whether a length pays is decided once until the request begins to load, even if it is looked up again; it
        is not decided while another request loads one of the pages; with `own_copy`, that does not matter. After a
        failed load, it is zero until `abort`. For the account of the request: `prompt_tokens` (None: those of `key`),
        `own_tokens` that the device has of the page at `start_page`, and `unshared`: it will load nothing.
        """
        start_page = whole("start_page", start_page)
        match = self._match(rid, key)
        self._hints.note(rid, key)
        request = self._request(rid, key, match, start_page)
        request.key, request.node, request.pages, request.start_page = key, match.node, match.pages, start_page
        request.own_tokens, request.unshared = own_tokens, unshared
        if prompt_tokens is not None:
            request.tokens = prompt_tokens
        pages = 0 if request.failed else max(0, match.pages - start_page)
        loading = not own_copy and self._is_loading(rid, match.node, pages)
        pays = pages > 0 and (loading or self._pays(request, pages))
        self._queue.expect(rid, (self._key_pages(key) - start_page - pages * pays) * self.page_size)
        if not pays:
            self._take_arrived(rid, request)  # the pages that arrived for it need not be held
            return HostMatch(0, loading=False)
        if self._verifier is not None and not loading:
            if not self._verifier.prove(rid, key, match, pages):
                return HostMatch(pages, loading=True)
            pages = self._verifier.loadable(match.node, pages)
            request.unloaded = Reason.DAMAGED, ""
            if not pages:  # the first page is damaged, so no load begins, and the pages need not be held
                self._take_arrived(rid, request)
        return HostMatch(pages, loading)

    def begin_load(self, rid: str, key: RadixKey, start_page: int, end_page: int) -> HostLoad | None:
        """Hold the pages `start_page ... end_page - 1` of `key` on L2 until `end_load`, and return their locations.

        Return None, holding nothing, if one of them has left L2: look up the request again then. Raises
        InvalidInput for pages that `key` does not have.
        """
        end_page = whole("end_page", end_page, 1, self._key_pages(key))
        start_page = whole("start_page", start_page, 0, end_page - 1)
        match = self._match(rid, self.tree.head(key, end_page))
        if match.pages < end_page:
            return None
        pages = end_page - start_page
        if self._verifier is not None and self._verifier.loadable(match.node, pages) < pages:
            self._counters.skipped["load_not_verified"] += 1
            return None
        tree, node = self.tree, match.node
        if start_page:
            tree.match(self.tree.head(key, start_page))  # splits, so that a node ends there
        request = self._request(rid, key, match, start_page)
        request.decided_pages = 0
        tree.hold_host(node)
        host_pages = _host_pages(tree, node, pages)
        arrived = self._conclude(rid, request) - (self.tree.peek(key).host_pages - end_page)  # more has arrived since
        request.loads, request.counted = request.loads + 1, False
        span = tracing.begin("load", self._contexts.get(rid), pages=pages)
        load = HostLoad(rid, start_page, host_pages, tree, node, request, max(0, min(arrived, pages)), span)
        self._loads.add(load)
        return load

    def end_load(self, load: HostLoad, seconds: float | None) -> None:
        """End a load that took `seconds`; None if it failed. REQUIRES: the workers no longer read the pages.

        A failed load is not measured, and lookups of its request find nothing until `abort`. Raises InvalidInput for a
        load that has ended, or is of another cache.
        """
        if seconds is not None:
            seconds = number("seconds", seconds)
        if instance("load", load, HostLoad) not in self._loads:
            raise InvalidInput("load: it has ended, or another cache began it")
        self.caller.require()
        self._loads.remove(load)
        tracing.end(load._span, outcome="failed" if seconds is None else "loaded")
        pages = len(load.host_pages)
        load._tree.release_host(load._node)
        self._trees.sweep()
        load._request.loads -= 1
        load._request.failed |= seconds is None
        self._count(load.rid, load._request, None if seconds is None else load)
        self._end_request(load.rid)
        if seconds is None:
            self._counters.skipped["load_failed"] += 1
            return
        self._loaded_pages += pages
        self.break_even.observe_transfer(Route.LOAD, pages, seconds)

    # Writes

    def begin_write(self, rid: str, key: RadixKey, start_page: int = 0) -> HostWrite | None:
        """Reserve L2 pages for the pages of `key` that are neither on L2 nor in other writes.

        `start_page` is the first page that the workers can copy. Return None, holding nothing, if there is nothing to
        write, and for a request that was looked up before the last `clear` or `update_weights`: its KV may be of
        earlier weights. Also return None, and count it, if L2 lacks a page before `start_page`, or is full even after
        evicting. REQUIRES: a request that was not looked up was computed with the current weights.
        """
        self._require_service()
        request = self._requests.get(instance("rid", rid, str))
        start_page = whole("start_page", start_page)
        end_page = self._key_pages(key)
        tree = self.tree
        self._conclude(rid, request)
        if request is not None:
            self._count(rid, request)
            if request.tree is not tree:
                return None
        self._hints.note(rid, key)
        match = tree.match(key)
        if self._uses is not None:  # pages that another request writes or wrote are also used by this one
            self._use(rid, key, end_page, match, begins=request is None)
        begin = self._reach(key, match.pages)
        if begin >= end_page:
            return None
        if begin < start_page:
            self._counters.skipped["backup_prefix_not_on_host"] += 1
            return None
        tree.hold_host(match.node)  # so that making room does not evict the prefix
        host_pages = self._l2.reserve(end_page - begin)
        if host_pages is None:
            tree.release_host(match.node)
            self._counters.skipped["backup_no_host_room"] += 1
            return None
        write = HostWrite(rid, begin, host_pages, self.tree.head(key, end_page), tree, match.node)
        self._writes[write] = None
        return write

    def end_write(self, write: HostWrite, *, complete: bool) -> None:
        """End a write. With `complete`, its pages enter the tree and are stored as the write policy says; otherwise
        they are freed.

        Complete pages enter the tree once their prefix is on L2. If the prefix never arrives, and after `clear`, they
        are freed. REQUIRES: all workers have copied, or with `complete=False`, the workers no longer write the pages.
        Raises InvalidInput for a write that has ended, or is of another cache.
        """
        instance("complete", complete, bool)
        if instance("write", write, HostWrite) not in self._writes or write._complete:
            raise InvalidInput("write: it has ended, or another cache began it")
        self.caller.require()
        if complete:
            self._written_pages += len(write.host_pages)
            write._complete = True
            self._show_complete([write])
        else:
            self._counters.skipped["backup_failed"] += 1
            self._end_write(write, write.host_pages)
            self._show_complete(self._behind(write))
        self._trees.sweep()

    # Emptying

    def clear(self) -> None:
        """Forget all pages of L2; does not block. Storage keeps its pages.

        Loads and writes keep their pages until they end; the pages of such a write do not enter the tree.
        """
        super().clear()
        self._show_complete(list(self._writes))
        self._trees.sweep()

    def _match(self, rid: str, key: RadixKey) -> Match:
        """Match the pages of a request, also those that have arrived from storage so far."""
        self._require_service()
        self.tree.require_fitting(key)
        self._prefetcher.take_so_far(instance("rid", rid, str))
        return self.tree.match(key)

    def _request(self, rid: str, key: RadixKey, match: Match, start_page: int) -> _Request:
        """Return the state of a request. Count a new one as a user of its pages on the device and of `match` on L2."""
        request = self._requests.get(rid)
        if request is None:
            tokens = self._key_pages(key) * self.page_size
            request = self._requests[rid] = _Request(self.tree, key, match.node, tokens)
            self._begins(rid, key, match.node)
            self._l2.reused(match.node)
            self._use(rid, key, max(start_page, match.pages), match, begins=True)
        return request

    def _conclude(self, rid: str, request: _Request | None) -> int:
        """End the prefetch of a request that begins. Return how many of its pages have arrived."""
        self._prefetcher.conclude(rid)
        return self._take_arrived(rid, request)

    def _take_arrived(self, rid: str, request: _Request | None) -> int:
        """As `Prefetcher.take_arrived`, which forgets what `_count` needs: note it."""
        if request is not None and (request.answer is None or self._prefetcher.knows(rid)):
            request.answer = self._prefetcher.answer(rid)
        return self._prefetcher.take_arrived(rid)[0]

    def record_arrival(self, rid: str, left_tokens: int, *, again: bool = False) -> None:
        """As in `TieredCache`. A request that waits `again` is a new attempt."""
        super().record_arrival(rid, left_tokens, again=again)
        if again and (request := self._requests.get(rid)) is not None:
            request.counted = request.runs = False

    def record_progress(self, rid: str, left_tokens: int) -> None:
        """As in `TieredCache`. The request is counted, unless it waits for a load."""
        super().record_progress(rid, left_tokens)
        if (request := self._requests.get(rid)) is not None:
            request.runs = True
            if not (request.counted or request.loads):
                self._conclude(rid, request)
                self._count(rid, request)

    def _count(self, rid: str, request: _Request, load: HostLoad | None = None) -> None:
        """Count an attempt of a request, with the pages of its `load`; see `_Request`."""
        if request.counted or request.loads:
            return
        request.counted = True
        loaded, storage = (0, 0) if load is None else (len(load.host_pages), load.storage_pages)
        device = request.start_page if load is None else load.start_page
        whole_pages = max(self._key_pages(request.key), device + loaded)
        kind = (Reason.UNAVAILABLE, "") if request.failed else request.unloaded
        answer = request.answer or self._prefetcher.answer(rid)
        own_tokens = request.own_tokens if load is None else 0  # a load copies a whole page, as far as the account says
        tokens = max(request.tokens, whole_pages * self.page_size)
        account = self._account(rid, tokens, self._contexts.get(rid))
        missed = Missed(request.pages, request.node, kind, answer, own_tokens)
        if request.unshared:
            missed = missed._replace(pages=whole_pages, kind=(Reason.UNSHARED, ""))
        hits = device, loaded - storage, storage
        self.explainer.begin(account, request.key, request.tree, hits, whole_pages, missed)

    def _use(self, rid: str, key: RadixKey, pages: int, match: Match, *, begins: bool) -> None:
        """Count a request as a user of `pages` pages of `key`, of which L2 has `match`; store those that are now due.
        """
        known_pages = self._note_uses(rid, key, pages, begins=begins).known_pages
        self.tree.use(match.node, 0, match.pages - known_pages)
        self._l2.store_path(match.node, self._saved_hits_min)

    def _pays(self, request: _Request, pages: int) -> bool:
        """Return True if loading that many pages pays. Decided again only for another number of pages."""
        if pages == request.decided_pages:
            return request.pays
        tokens = pages * self.page_size
        request.decided_pages, request.pays = pages, False
        if tokens < self.config.load_back_threshold_tokens:
            self._counters.skipped["load_too_short"] += 1
            request.unloaded = Reason.NOT_WORTH, ""
        elif not self.break_even.decide(Route.LOAD, tokens, pages).go:
            self._counters.skipped["load_does_not_pay"] += 1
            request.unloaded = Reason.NOT_WORTH, ""
        else:
            request.pays, request.unloaded = True, (Reason.NO_ROOM, "")
        return request.pays

    def _is_loading(self, rid: str, node: Node, pages: int) -> bool:
        """Return True if another request is loading one of the last `pages` pages, which end with `node`."""
        nodes: set[Node] = set()
        while pages > 0 and node.parent is not None:
            if node.host_ref:  # each page that is being loaded has one
                nodes.add(node)
            pages -= self.tree.pages(node)
            node = node.parent
        return bool(nodes) and any(
            load.rid != rid
            and load._tree is self.tree
            and not nodes.isdisjoint(load._tree.span(load._node, len(load.host_pages)))
            for load in self._loads
        )

    def _reach(self, key: RadixKey, pages: int) -> int:
        """Return how many pages of `key` L2 will have after the current writes, if it has `pages` now."""
        reached = -1
        while reached < pages:
            reached = pages
            for write in self._writes:
                is_near = write._tree is self.tree and write.start_page <= pages < write._end_page
                if is_near and self._same_page(key, write._key, pages):
                    pages = max(pages, common_pages(write._key.tokens, key.tokens, 0, self.tree.page_bytes))
        return pages

    def _same_page(self, key: RadixKey, other: RadixKey, page: int) -> bool:
        part = slice(page * self.tree.page_bytes, (page + 1) * self.tree.page_bytes)
        return key.tokens[part] == other.tokens[part] and key.seed == other.seed

    def _show_complete(self, writes: list[HostWrite]) -> None:
        """Put complete `writes` whose prefix is on L2 into the tree, free those whose prefix will not arrive, and
        repeat that for the writes that follow them. Empties `writes`.
        """
        while writes:
            write = writes.pop()
            if write not in self._writes or not write._complete:
                continue
            gone = write._tree is not self.tree or self.closed
            present = 0 if gone else self.tree.peek(self.tree.head(write._key, write.start_page)).host_pages
            if not gone and present == write.start_page:
                writes += self._show(write)
            elif gone or self._reach(write._key, present) < write.start_page:
                self._end_write(write, write.host_pages)
                writes += self._behind(write)

    def _show(self, write: HostWrite) -> list[HostWrite]:
        """Put the pages of a write into the tree. Return the writes directly after it, for which they are held."""
        tree = write._tree
        uses = self._note_uses(write.rid, write._key, write._end_page)
        node, unused = tree.insert_host(write._key, write.start_page, write.host_pages, uses=uses)
        tokens = (len(write.host_pages) - len(unused)) * self.page_size
        self.explainer.wrote(self.explainer.recent.get(write.rid), tokens)
        self._end_write(write, unused)
        self._l2.store_path(node, self._saved_hits_min)
        following = [other for other in self._behind(write) if other.start_page <= write._end_page]
        for other in following:
            match = tree.match(self.tree.head(other._key, other.start_page))
            tree.hold_host(match.node)
            tree.release_host(other._anchor)
            other._anchor = match.node
        return following

    def _behind(self, write: HostWrite) -> list[HostWrite]:
        """Return the writes that begin after the first page of `write` and share it: all that wait for it, and more."""
        return [
            other
            for other in self._writes
            if other.start_page > write.start_page
            and other._tree is write._tree
            and self._same_page(other._key, write._key, write.start_page)
        ]

    def _end_write(self, write: HostWrite, unused: PageIds) -> None:
        del self._writes[write]
        self._l2.commit(len(write.host_pages), unused)
        write._tree.release_host(write._anchor)
        self._end_request(write.rid)

    def _end_request(self, rid: str) -> None:
        """End the span of a request that has ended, and carry out its hints, once its copies have ended."""
        copies: list[HostLoad | HostWrite] = [*self._loads, *self._writes]
        if rid not in self._requests and all(copy.rid != rid for copy in copies):
            self._contexts.pop(rid, None)
            self.explainer.end(self.explainer.recent.get(rid))
            self._hints.ends(rid)

    def _key_pages(self, key: RadixKey) -> int:
        """Return the number of whole pages of a key. Raises InvalidInput for a key of another kind than the cache's."""
        self.tree.require_fitting(key)
        return key.pages(self.page_size)

    # State

    def statistics(self) -> CacheStatistics:
        """Return a snapshot of both tiers and of the engine's copies; `device` is `NO_TIER`. Any thread may call it."""
        state = super().statistics()
        queues = state.controller.queues
        loads, writes = list(self._loads), list(self._writes)  # each is one operation in CPython
        copying_pages = sum(len(load.host_pages) for load in loads) + sum(len(write.host_pages) for write in writes)
        queues = replace(
            queues, load=len(loads), write=len(writes), host_pages_reserved=queues.host_pages_reserved + copying_pages
        )
        controller = replace(
            state.controller, queues=queues, loaded_pages=self._loaded_pages, written_pages=self._written_pages
        )
        return replace(state, controller=controller)

    def check(self) -> None:
        """Raises InvariantError if a tree, L2 or a count is inconsistent. Visits every node."""
        super().check()
        for load in self._loads:
            there = np.array_equal(_host_pages(load._tree, load._node, len(load.host_pages)), load.host_pages)
            if not (there and load._node.host_ref):
                raise InvariantError(f"load of {load.rid!r}: its pages are not on L2, or not held")
        reserved = [write.host_pages for write in self._writes]
        held = (node.host for tree in self._trees.all() for node in tree.nodes() if node.host is not None)
        ids = np.concatenate([NO_PAGES, *reserved, *held])
        if len(np.unique(ids)) != len(ids):
            raise InvariantError("L2: a page of a write is a node's too, or another write's")
        writing_pages = sum(map(len, reserved))
        if not 0 <= self._l2.reserved_pages - writing_pages - self.warming_pages <= self.controller.read_pages:
            raise InvariantError(f"L2: {self._l2.reserved_pages} pages are reserved, {writing_pages} for writes")
        for write in self._writes:
            present = self.tree.peek(write._key).host_pages
            if write._complete and self._reach(write._key, present) < write.start_page:
                raise InvariantError("a write is complete and waits for no other, but is not in the tree")


def _host_pages(tree: RadixTree, node: Node, pages: int) -> PageIds:
    """Return the L2 pages of the run of `pages` pages that ends at `node`."""
    runs = [part.host for part in tree.span(node, pages) if part.host is not None]
    return np.concatenate(runs[::-1])

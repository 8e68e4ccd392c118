"""EngineCache: a HiRadixCache for an engine that owns the slots of L1 and the state of its requests.

Such an engine allocates and frees slots itself, keeps the table of each request's slots, locks prefixes, and decides
which request runs; SGLang does so. The cache holds only the pages of its tree. Its L1 is a KVPool over the engine's
tensors with the engine's own free list (`EnginePages`). Per request and in this order:

    prefetch_from_storage -> check_prefetch_progress -> find -> lock -> load -> begin -> start_loading
    -> (forward) -> record_fence -> record_progress and share* -> unlock -> end

`find` promises pages of L2, and `load` loads all of them or none. `share` gives the tree whole pages that the request
has computed, at each chunk and at its end; the engine then uses the pages of the tree instead of its duplicates, and
locks the new prefix. Pages that the request has not shared are the engine's to free.

The engine counts pages that are not locked as free, and its scheduler fails if they are not when it needs them. So
`make_room` waits for copies to L2, and ends prefetches and pins if nothing else can make room.

`begin_request` and the other methods for requests that the cache manages are not for this class. All calls are made on
the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Unpack

from ..controller import Acks, HiCacheController
from ..errors import InvalidInput
from ..events import EventStream
from ..ghosts import Kind, Reason
from ..keys import RadixKey
from ..radix import Match, Node, RadixTree
from ..tiers import EnginePages, HostPool, KVPool
from ..types import NO_PAGES, PageIds
from .break_even import Route
from .explain import Missed, PromptTokens
from .radix_cache import HiRadixCache, Reused
from .tiered import TieredOptions

# A copy that takes longer is stuck. The engine waits for it, as it would for memory.
COPY_WAIT_S_MAX = 10.0
# The pause between two looks at copies in flight.
_COPY_POLL_S = 0.0001


class Prefix(NamedTuple):
    """The end of a prefix in a tree. A split of its node does not change it."""

    tree: RadixTree
    node: Node

    @property
    def is_empty(self) -> bool:
        """True for the start of all prompts."""
        return self.node.parent is None


class Found(NamedTuple):
    """The cached part of a prompt: `device_pages` up to `device`, on L1, and `host_pages` after them up to `end`, which
    `load` can load."""

    device: Prefix
    device_pages: int
    end: Prefix
    host_pages: int


class Shared(NamedTuple):
    """The result of `share`: the new end of the request's prefix, and `pages`, those of the tree from the first shared
    page on. The first `present_pages` of them differ from those passed, which the engine frees."""

    prefix: Prefix
    pages: PageIds
    present_pages: int


class EngineCache(HiRadixCache):
    """See the module's docstring. `create_cache` builds one if it gets `engine_pages`."""

    # A lookup locks the prefix before it, so it starts in `poll`: later in a step the engine has counted those pages.
    _prefetches_at_once = False

    def __init__(
        self, device: KVPool, host: HostPool, controller: HiCacheController, **options: Unpack[TieredOptions]
    ) -> None:
        super().__init__(device, host, controller, **options)
        if not isinstance(device.allocator, EnginePages):
            raise InvalidInput("EngineCache: the pool has no free list of an engine; pass `engine_pages`")
        self._pages = device.allocator
        # The request whose pages were not loaded last, and why.
        self._unloaded: tuple[str, Kind] = "", (Reason.NO_ROOM, "")

    @property
    def event_stream(self) -> EventStream | None:
        """The stream of `record_events`; None without one."""
        return None if self._events is None else self._events.stream

    # Requests

    def find(self, key: RadixKey) -> Found:
        """Return the cached prefix of `key`, in whole pages, and mark it as used. Return nothing after a failed copy
        of the device: the content of L1 is unknown then."""
        tree = self.tree
        if self._device_fault is not None:
            return self.nothing
        match = tree.match(key)
        end, host_pages = self._loadable(match)
        device = Prefix(tree, match.device_node)
        return Found(device, match.device_count, Prefix(tree, end) if host_pages else device, host_pages)

    def _loadable(self, match: Match) -> tuple[Node, int]:
        """Return the deepest node that one load may reach, and the pages of L2 up to it. Does not depend on the loads
        in flight, so that a request that waits is promised no less later."""
        tree, pages, end = self.tree, 0, match.device_node
        pages_max = self.config.load_pages_max
        for node in reversed(list(tree.span(match.node, match.host_hit_pages))):
            if self._verifier is not None and not self._verifier.may_load(node):
                break
            if pages + tree.pages(node) > pages_max:
                break
            pages, end = pages + tree.pages(node), node
        return (end, pages) if pages * self.page_size >= self.config.load_back_threshold_tokens else (end, 0)

    def lock(self, prefix: Prefix) -> None:
        """Keep the pages up to `prefix` on the tiers they are on until `unlock`."""
        prefix.tree.lock(prefix.node)

    def unlock(self, prefix: Prefix) -> None:
        """Undo one `lock`."""
        prefix.tree.unlock(prefix.node)
        if prefix.tree is not self.tree:
            self._trees.sweep()

    def device_pages(self, prefix: Prefix) -> PageIds:
        """Return the L1 pages from the start of the prompt to `prefix`. REQUIRES: `prefix` is on L1."""
        return prefix.tree.device_pages(prefix.node)

    def load(self, rid: str, found: Found) -> int | None:
        """Load all `host_pages` of `found` to L1, evicting as needed. Return how many pages are loaded: all, or 0 if
        computing them is faster or L1 has no room; None while other loads fill the queue. `start_loading` starts the
        copy. REQUIRES: `found` is of this step."""
        tree, node, pages = found.end.tree, found.end.node, found.host_pages
        if tree is not self.tree or self._device_fault is not None or not pages:
            return 0
        if pages > self.controller.load_room:
            self.controller.refused["load"] += 1
            return None
        if not self.break_even.decide(Route.LOAD, pages * self.page_size, pages).go:
            self._counters.skipped["load_does_not_pay"] += 1
            self._unloaded = rid, (Reason.NOT_WORTH, "")
            return 0
        tree.hold_host(node)
        tree.lock(found.device.node)  # its eviction for the pages below it would be in vain
        self.make_room(pages - self.device.allocator.free_pages)
        load = self._l1.load_path(tree, node, self._contexts.get(rid))
        tree.unlock(found.device.node)
        tree.release_host(node)
        self._unloaded = rid, (Reason.NO_ROOM, "")
        return 0 if load is None else pages

    def begin(
        self, rid: str, key: RadixKey, found: Found, *, priority: int = 0, prompt_tokens: int | None = None
    ) -> PromptTokens:
        """Note that a request begins with the pages of `found`; its prefetch ends. `found.host_pages` are those that
        were loaded. `prompt_tokens` (None: those of `key`) include the tokens that the engine has cut off. Return its
        account. REQUIRES: the caller has locked `found.end`."""
        self._prefetcher.conclude(rid)
        tokens = key.prompt_tokens if prompt_tokens is None else prompt_tokens
        account = self._account(rid, tokens, self._contexts.pop(rid, None))
        reused = Reused(*found.end, found.device_pages, found.host_pages)
        self._begun(account, key, reused, self._missed(rid, key, found), priority)
        return account

    def _missed(self, rid: str, key: RadixKey, found: Found) -> Missed:
        (tree, node), answer, size = found.end, self._prefetcher.answer(rid), self.tree.page_bytes
        pages, kind = found.device_pages + found.host_pages, (Reason.NO_ROOM, "")
        if self._device_fault is not None:
            return Missed(key.pages(self.page_size), node, (Reason.UNAVAILABLE, ""), answer)
        if key.tokens[pages * size : (pages + 1) * size] in node.children:
            match = tree.match(key, marks=False)
            pages, node = match.pages, match.node
            if self._unloaded[0] == rid:
                kind = self._unloaded[1]
            elif (pages - found.device_pages) * self.page_size < self.config.load_back_threshold_tokens:
                kind = Reason.NOT_WORTH, ""
            elif self._verifier is not None:
                kind = Reason.LATE, "verification"
        return Missed(pages, node, kind, answer)

    def end(self, rid: str, completed: str | None = None) -> None:
        """Note that a request has ended, or was preempted: no other waits for its prompt now. If it has `completed`,
        pass the id that `share` got: its hints are carried out."""
        self._queue.leave(rid)
        self.explainer.end(self.explainer.recent.get(rid))
        if completed is not None:
            self._hints.ends(completed)

    def share(
        self, rid: str, key: RadixKey, prefix: Prefix, start_page: int, pages: PageIds, *, priority: int = 0,
        continues: bool = False, session_id: str | None = None,
    ) -> Shared:
        """Share the pages of `key` from `start_page` on, which are on L1 in `pages` and whose KV is computed or queued
        before the next fence. The tree takes over those that it lacks.

        `continues`: more of the prompt follows, so a copy to L2 may wait for it. `session_id` is for events. Changes
        nothing, and returns `prefix` itself, for a tree that was replaced, while pages of the tree that `pages`
        duplicate are being loaded, and after a device copy has failed. REQUIRES: `prefix` is locked and has
        `start_page` pages.
        """
        self.caller.called()
        tree, node = prefix
        is_stale = tree is not self.tree or self._device_fault is not None
        if is_stale or (self.controller.is_loading and tree.awaits_load(key, node, start_page)):
            return Shared(prefix, NO_PAGES, 0)
        uses = self._note_uses(rid, key, start_page + len(pages))
        self._hints.note(rid, key)
        if self._events is not None:
            self._events.session_id = session_id
        inserted = tree.insert(key, pages, priority=priority, below=node, start_page=start_page, uses=uses)
        if self._events is not None:
            self._events.session_id = None
        present = inserted.present_pages
        self._pages.take_over(len(pages) - present)
        self.explainer.wrote(self.explainer.recent.get(rid), (len(pages) - present) * self.page_size)
        end = inserted.node
        self._pins.used(end)
        if not (continues and self._l1.gathers(end)):
            self._l1.used(end)
        return Shared(Prefix(tree, end), tree.device_pages(end)[start_page:] if present else pages, present)

    def take_so_far(self, rid: str) -> int:
        """Put the pages of a prefetch that have arrived into the tree; it goes on. Return how many have arrived."""
        return self._prefetcher.take_so_far(rid)

    # State

    @property
    def root(self) -> Prefix:
        """The empty prefix."""
        return Prefix(self.tree, self.tree.match(RadixKey(b"", b"", self.tree.position_bytes)).node)

    @property
    def nothing(self) -> Found:
        """The result of `find` for a prompt of which nothing is cached."""
        return Found(self.root, 0, self.root, 0)

    @property
    def copies_in_flight(self) -> tuple[int, int]:
        """The copies to L2 and to L1 in flight."""
        return self._l1.copies_in_flight

    # Room

    def make_room(self, pages: int) -> int:
        """Free `pages` pages of L1 for the engine. Return how many are free more than before; fewer only if too few
        could be evicted at the call, and no copy to L2 in flight unlocks more.

        Blocks while pages must be copied to L2 first. Then prefetches end that alone lock pages of L1: arriving pages
        may have moved their lock to pages that the engine has counted. If pages that could be evicted at the call are
        still held, arrived pages and pins are not held any more, and at last stores are waited for, which hold the
        pages above them in the tree.
        """
        self.caller.require()
        held, before, promised = self._pages, self._pages.used_pages, self.tree.device_evictable_pages
        until_s = self.controller.time_s() + COPY_WAIT_S_MAX
        stores = lambda: self._l2.stores_in_flight if self.tree.device_evictable_pages else 0  # noqa: E731
        promote, self._prefetcher.share.promote = self._prefetcher.share.promote, None  # it would take the room
        try:
            while (short := pages - (before - held.used_pages)) > 0:
                if self._l1.evict(max(0, short - self._l1.writeback_pages)).freed_pages:
                    continue
                if self._await(lambda: self._l1.copies_in_flight[0], until_s):
                    continue
                if self._prefetcher.give_way():
                    continue
                if before - held.used_pages >= promised:
                    break
                if not (self._give_way() or self._await(stores, until_s)):
                    break
        finally:
            self._prefetcher.share.promote = promote
        return before - held.used_pages

    def _await(self, in_flight: Callable[[], int], until_s: float) -> bool:
        """Wait for the end of an operation while some are in flight. Return False if there are none. Starts no work
        that locks pages: the engine has counted those that it may evict."""
        controller = self.controller
        while in_flight() and controller.time_s() < until_s:
            acks = controller.poll()
            if acks is not None:
                self._take_in(acks)
                self._trees.sweep()
            controller.launch_backups()
            controller.report(self.break_even.rates())
            if acks is not None:
                return True
            controller.clock.sleep(_COPY_POLL_S)
        return False

    def _give_way(self) -> bool:
        """End what holds pages of L1 for requests that have not begun, or operators. Return False if there is none."""
        if self._prefetcher.share.release_arrived():
            return True
        pins = len(self._pins.active)
        self._pins.clear()
        self._counters.skipped["pin_gave_way"] += pins
        return pins > 0

    def _take_in(self, acks: Acks) -> None:
        super()._take_in(acks)
        if acks.fault is not None and not (acks.failed_loads or self.controller.has_ranks):
            self._untold_fault = None  # a copy to L2 failed, so L1 is whole, and the next forward need not fail

    def _reusable(self, key: RadixKey) -> RadixKey:
        """Return `key`: the engine has cut off the tokens that it computes."""
        self.tree.require_fitting(key)
        return key

    def _reusable_pages(self, key: RadixKey) -> int:
        return key.pages(self.page_size)

"""L2: its reserved pages, and the stores from L2 to storage.

Runs are stored root first, because a page in storage is useful only with its whole prefix. The host pages of a node are
held while it is being stored. A run that could not be stored is tried again at its next use.

Stores must not cost hits on L2: waiting stores hold at most a share of L2, and are cancelled when L2 has no room. A
store is cancelled only if a worker has not begun it, and after all stores that continue its chain. With ranks stores
are not cancelled (see `HiCacheController.cancel_store`), so only the share limits them.

Storage does not see hits on L1 and L2, so it is notified of each stored run that a request reuses, once in
`TOUCH_EVERY_S`, in one operation per second. So a chain stays in storage as long as it is used here. Pages that storage
turns out to lack, by its replies or by its evictions in this process, count as not stored, so the next use stores them
again. With ranks storage is notified too, but missing pages are ignored: each rank would learn of different pages.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..backends.base import Direction
from ..backends.kept import KeptFrames
from ..controller import HiCacheController, StoreOperation
from ..errors import InvariantError
from ..frame import Damage
from ..ghosts import Reason
from ..logs import LimitedLog
from ..radix import Node, RadixTree, may_leave_host, may_lose_copy
from ..tiers import HostPool
from ..types import PageIds
from .break_even import Ahead, BreakEven, Route
from .statistics import CacheCounters
from .trees import Trees, require_conservation

logger = logging.getLogger(__name__)

# While copies of pages on L1 use more than this share of L2, they are evicted before pages that are only on L2.
COPIES_SHARE_MAX = 0.5
# The time between two notifications for a run: much shorter than the time that a page stays in a useful store.
TOUCH_EVERY_S = 60.0
# The time between two notifications: one per step would keep a worker busy with small calls.
TOUCH_PAUSE_S = 1.0
# Bytes of page keys waiting for a notification: 16,384 pages. Further uses are dropped; the next one notifies.
TOUCH_BYTES_MAX = 512 << 10


@dataclass(eq=False, repr=False)
class HostTier:
    """See the module's docstring.

    `kept` are frames of a previous process, which are evicted first.

    Invariants: used pages of the pool = pages held by nodes + `reserved_pages` of operations + pages of `kept`.
    `_stores` has the stores that are not acknowledged, in order of submission, each with the last node of its run
    (which may have been split since). The nodes of these runs are `store_pending` and held; other nodes are not
    `store_pending`. `_used` are page keys of stored runs that were used, tails before heads, of `_used_bytes` together.
    """

    host: HostPool
    _trees: Trees
    _controller: HiCacheController
    _counters: CacheCounters
    _break_even: BreakEven
    kept: KeptFrames | None = None

    def __post_init__(self) -> None:
        self.reserved_pages = 0
        self._gate = self._controller.gate
        self._stores: dict[StoreOperation, tuple[RadixTree, Node]] = {}
        self._used: list[bytes] = []
        self._used_bytes = 0
        self._touch_at_s = -math.inf
        self._damaged: dict[Node, RadixTree] = {}  # found damaged while they were held
        self._log = LimitedLog(logger, clock=self._controller.clock)

    # Pages

    def reserve(self, count: int) -> PageIds | None:
        """Return `count` unsealed pages for an operation, evicting as needed. If there is no room, cancel waiting
        stores; if that does not help either, return None and evict nothing.
        """
        tree = self._trees.current
        if count > self.room:
            self._cancel_stores(count - self.room)
        if count > self.room:
            return None
        missing = count - self.host.allocator.free_pages
        if missing > 0 and self.kept is not None:
            given = np.array(self.kept.give_way(missing), np.int32)
            self.host.free(given)
            missing -= len(given)
        if missing > tree.host_evictable_pages:
            return None  # a worker has taken a kept frame since, for a read
        if missing > 0:
            self.free_evicted(tree.evict_host(missing, copy_pages_max=int(COPIES_SHARE_MAX * self.host.pages)))
        pages = self.host.alloc(count)
        if pages is not None:
            self.reserved_pages += count
        return pages

    @property
    def room(self) -> int:
        """Pages that `reserve` can give now without cancelling stores."""
        kept_pages = 0 if self.kept is None else self.kept.room
        return self.host.allocator.free_pages + self._trees.current.host_evictable_pages + kept_pages

    @property
    def stores_in_flight(self) -> int:
        """The stores that are not acknowledged; their nodes are held."""
        return len(self._stores)

    def free_evicted(self, pages: PageIds) -> None:
        """Take back pages that the tree has evicted from L2."""
        if len(pages):
            self.host.free(pages)
            self._counters.evicted_pages["host"] += len(pages)

    def commit(self, count: int, unused: PageIds) -> None:
        """End the reservation of `count` pages: the tree holds them, except for `unused`, which are freed."""
        self.reserved_pages -= count
        if len(unused):
            self.host.free(unused)

    def release(self, pages: PageIds) -> None:
        """End the reservation of `pages` and free them."""
        self.commit(len(pages), pages)

    def drop(self, tree: RadixTree, node: Node) -> None:
        """Evict `node` from L2 if nothing holds it there. Unless it is also on L1, evict its descendants first, which
        cannot be found without it."""
        below = [node]
        for part in below if node.device is None else ():
            below.extend(part.children.values())
        for part in below[1:]:
            part.loss = node.loss
        leaves = [tree.leave_host(part) for part in reversed(below) if may_leave_host(part) or may_lose_copy(part)]
        if leaves:  # freed at once: freeing them one by one takes as long as all the rest
            self.host.free(np.concatenate(leaves))

    def drop_damaged(self, tree: RadixTree, node: Node, key: bytes, damage: Damage, label: str) -> None:
        """Count and log the page `key` of `node`, which has changed on L2, and `drop` the node: now, or once nothing
        holds it. Until then it is not loaded before it was verified again."""
        self._counters.verified_pages["damaged"] += 1
        self._log.warn(
            damage, "L2: page %s of %s failed verification (%s); it is removed and computed again",
            key.hex()[:8], label or "no label", damage.value,
        )
        node.proved_until_s, node.loss = -math.inf, Reason.DAMAGED.value
        self._damaged[node] = tree
        self.drop_released()

    def drop_released(self) -> None:
        """Drop damaged nodes that are not held any more. Call it once per step; does nothing without any."""
        for node, tree in list(self._damaged.items()):
            if not (node.host_ref or (node.lock_ref and node.device is None)):
                del self._damaged[node]
                self.drop(tree, node)

    def fetch_s(self, pages: int) -> float:
        """Return the expected time for reading so many pages from storage, 0 while it is unknown."""
        return self._break_even.fetch_s(pages) or 0.0

    def are_in_storage(self, keys: Sequence[bytes]) -> bool:
        """Return True if pages that were just read are in storage. False if they came from kept frames, now freed."""
        return self.kept is None or not self.kept.were_read(keys)

    # From L2 to storage

    def may_store(self, node: Node) -> bool:
        """Return True if storage lacks the pages of `node` and would accept them now."""
        return (
            not node.stored
            and not self._trees.current.stores_on_host
            and self._gate.may(Direction.WRITE)
            and self._controller.has_store_room(self._trees.current.pages(node))
            and self._is_worth(node)
        )

    def store_path(self, node: Node, hits_min: int = 0) -> None:
        """Store the missing runs of the path to `node`, root first: the runs on L2 that at least `hits_min` requests
        have used, and their prefix.
        """
        if not self._gate.attached:
            return
        lacking: list[Node] = []
        while node.parent is not None:
            missing = node.host is not None and not (node.stored or node.store_pending)
            if missing and (lacking or node.hit_count >= hits_min):
                lacking.append(node)
            node = node.parent
        for part in reversed(lacking):
            self.store(part)  # if storage does not take it, its descendants note why

    def reused(self, node: Node) -> None:
        """Note the stored runs of the path to `node`, which a new request reuses, for `report_uses`. Hashes nothing."""
        if not (self._gate.attached and self._controller.stores_pages):
            return
        time_s = self._controller.time_s()
        while node.parent is not None:
            if node.stored and time_s - node.touched_s >= TOUCH_EVERY_S and (keys := node.page_keys) is not None:
                if self._used_bytes + len(keys) > TOUCH_BYTES_MAX:
                    self._counters.skipped["touch_dropped"] += 1
                else:
                    node.touched_s = time_s
                    self._used.append(keys)
                    self._used_bytes += len(keys)
            node = node.parent

    def report_uses(self) -> None:
        """Notify storage of the reused runs, at most every `TOUCH_PAUSE_S`. Call it once per step."""
        if not self._used or (time_s := self._controller.time_s()) < self._touch_at_s:
            return
        if self._gate.may(Direction.WRITE) and self._controller.touch(self._used[::-1]):
            self._used, self._used_bytes = [], 0
            self._touch_at_s = time_s + TOUCH_PAUSE_S

    def lost(self, keys: Sequence[bytes]) -> None:
        """Record that storage lacks these pages: they and their descendants are stored again at their next use."""
        self._counters.lost_pages += self._trees.current.stored.forget(keys)

    def store(self, node: Node) -> bool:
        """Store `node` if storage lacks it. Return True if its pages are in storage or in flight to it."""
        if not self._gate.attached or node.host is None or node.parent is None:
            return False
        if node.stored or node.store_pending:
            return True
        root = node.parent.parent is None
        if not (root or node.parent.stored or node.parent.store_pending):
            node.loss = node.parent.loss
            return False
        if not self._gate.may(Direction.WRITE):
            self._counters.skipped["store_paused"] += 1
            node.loss = "paused"
            return False
        if not (node.parent.store_pending or self._pays(node)):
            node.loss = "not_worth"
            return False
        if not self._controller.takes_store(len(node.host)):
            node.loss = "queue"
            return False
        tree = self._trees.current
        chain = tree.stored.begin(node)
        store = self._controller.submit_store(chain, node.host, begins_prompt=root, is_sealed=node.sealed)
        self._stores[store] = tree, node
        tree.hold_host(node)
        return True

    def unsaved(self, hits_min: int) -> list[Node]:
        """Return the runs that storage lacks although they are worth storing, most recently used first, so parents
        before children: those that at least `hits_min` requests have used, and pinned ones. Not those that storage has
        lost since their last use: most were evicted there, and would replace pages that were used later. Without
        storage, return an empty list. Visits every node.
        """
        if not self._gate.attached:
            return []
        found = [
            node
            for node in self._trees.current.nodes()
            if not node.stored
            and (node.pin_ref or (node.hit_count >= hits_min and node.lost_access != node.last_access))
            and self._is_worth(node)
        ]
        return sorted(found, key=lambda node: -node.last_access)

    def takes_save(self, pages: int) -> bool:
        """Return True if `pages` pages of L1 that must be stored fit on L2 now, without cancelling stores. Frames that
        are kept for the next process replace pages that are only on L2, but not each other.
        """
        room = self.room
        if (tree := self._trees.current).stores_on_host:
            copies = tree.host_copy_pages + self.reserved_pages
            room = min(room, int(COPIES_SHARE_MAX * self.host.pages) - copies)
        return pages <= room

    def _is_worth(self, node: Node) -> bool:
        tree = self._trees.current
        return tree.stores_on_host or self._break_even.would(Route.STORE, *self._fetch_of(node)).go

    def _pays(self, node: Node) -> bool:
        """Return True if a hit on `node` could pay. A run that continues one in flight is stored with it."""
        if self._trees.current.stores_on_host or self._break_even.decide(Route.STORE, *self._fetch_of(node)).go:
            return True
        self._counters.skipped["store_does_not_pay"] += 1
        return False

    def _fetch_of(self, node: Node) -> tuple[int, int, Ahead]:
        """Return the tokens and pages of the prompt up to the end of a run, and what would be ahead of a fetch of them,
        as for the last prefetches."""
        tree, pages = self._trees.current, 0
        while node.parent is not None:
            pages += tree.pages(node)
            node = node.parent
        return pages * tree.page_size, pages, self._break_even.usual_ahead

    def stored(self, store: StoreOperation) -> None:
        """Handle the end of a store. If a page is missing, its next use tries again."""
        tree = self._end_store(store, stored=store.stored, loss="full" if store.rejected else "failed")
        if tree is self._trees.current:
            self._counters.skipped["store_incomplete"] += not store.stored
            # From this rank's result; the ranks then agree whether all may store.
            if store.storage is not self._gate.storage:
                return  # its store has been replaced since
            if store.complete:
                self._gate.succeeded(Direction.WRITE)
            elif self._controller.stores_pages and store.damage is None:
                self._gate.failed(Direction.WRITE)

    def _cancel_stores(self, pages: int) -> None:
        """Cancel waiting stores, newest first, until `pages` more pages of L2 can be evicted.

        Cancels nothing if that cannot be enough. It may still not be enough, because stores that a worker has begun
        continue. A cancelled page is stored again at its next use.
        """
        for store in self._releasing(pages):
            if not self._controller.cancel_store(store):
                break  # a worker has begun it, and all older ones before it
            self._end_store(store, stored=False, loss="no_room")
            self._counters.skipped["store_gave_way"] += 1

    def _releasing(self, pages: int) -> list[StoreOperation]:
        """Return the newest stores whose end makes `pages` more pages of L2 evictable; an empty list if all are not
        enough.

        A store is chosen only if nothing else holds its run on L2, not even a store that continues its chain.
        """
        tree = self._trees.current
        chosen: list[StoreOperation] = []
        released: Counter[Node] = Counter()  # holds that end with the chosen stores
        for store, (owner, node) in reversed(self._stores.items()):
            if pages <= 0:
                break
            in_use = (node.device is None and node.lock_ref) or node.host_ref > released[node] + 1
            if in_use or owner is not tree:
                continue
            chosen.append(store)
            part = node
            while part.parent is not None:
                released[part] += 1
                if part.host_ref > released[part]:
                    break
                if part.host is not None and (part.device is not None or not part.lock_ref):
                    pages -= tree.pages(part)
                part = part.parent
        return chosen if pages <= 0 else []

    def _end_store(self, store: StoreOperation, *, stored: bool, loss: str) -> RadixTree:
        """End a store. `loss` is why the run is not stored, if it is not."""
        tree, node = self._stores.pop(store)
        for part in () if stored else tree.span(node, store.chain.pages):
            part.loss = loss
        tree.stored.end(node, store.chain, stored=stored)
        if store.codec is not None and store.complete:
            for part in tree.span(node, store.chain.pages):
                part.sealed = True
        tree.release_host(node)
        if store.codec is not None and store.damage is not None:
            (number, damage), end = store.damage, store.chain.pages
            for part in tree.span(node, end):
                if (end := end - tree.pages(part)) <= number:
                    self.drop_damaged(tree, part, store.chain.keys()[number], damage, store.codec.label)
                    break
        return tree

    def check(self) -> None:
        """Raises InvariantError if an invariant does not hold. Visits every node."""
        trees = self._trees.all()
        others = self.reserved_pages + (0 if self.kept is None else self.kept.held)
        require_conservation("L2", self.host.allocator, sum(tree.host_pages for tree in trees), others)
        pages = 0
        for store, (tree, node) in self._stores.items():
            pages += store.chain.pages
            if not all(part.store_pending and part.host_ref for part in tree.span(node, store.chain.pages)):
                raise InvariantError(f"store: its run, which ends at {node!r}, is not marked or not held")
        marked = sum(tree.pages(node) for tree in trees for node in tree.nodes() if node.store_pending)
        if not marked == pages == self._controller.store_pages:
            raise InvariantError(
                f"store: {marked} pages are marked, {pages} in stores, {self._controller.store_pages} in the controller"
            )

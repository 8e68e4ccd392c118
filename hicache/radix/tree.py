"""The radix tree over pages: cached prefixes, their tiers, their locks, and the order of eviction.

The tree makes decisions and moves no bytes. It takes page ids, returns page ids to be freed, and uses no stream, thread
or socket. It belongs to the scheduler thread, so no lock is needed.

Invariants, verified by `check_tree`:
1. Prefix closure: a node on L1 has its parent on L1 (roots count as on L1).
2. Each node is on L1, L2 or both; else it is removed, after the nodes below it. No two nodes hold the same page id.
3. `lock_ref`, `host_ref` and `pin_ref` of a node count its users plus each child whose own count is not 0. So a count
   is not 0 if that of a descendant is not 0. A locked node stays on its tiers; only its copy on L2 may be evicted if it
   is on L1. A held node stays on L2, or in the tree if it is on L1 only. A pinned node stays in the tree.
4. Each node that may leave a tier has exactly one valid entry in that tier's eviction queue; no node has two. L2 has a
   queue of the nodes on L2 only, and a stack of the copies of nodes that are also on L1.
5. The page counts are the sums over the nodes.

Longer than 500 lines because every operation here changes the same page counts, reference counts and eviction queues,
which only hold together. `PrefixTree` has the part without them: the structure and the page keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ..errors import InvalidInput, InvariantError
from ..events.types import Medium
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES, RadixKey, common_pages
from ..policies import EvictionPolicy
from ..types import NO_PAGES, PageIds, concat
from .adaptive import AdaptiveEviction
from .eviction import EvictionQueues
from .hinted import HintedOrder, TickTimes
from .node import NO_HISTORY, Node, UseHistory, may_grow, may_leave_device
from .prefixes import PrefixTree, TreeObserver
from .results import Evicted, EvictionChoice, Inserted, Match, Peek
from .stored import StoredPrefixes

# The pages of a node, or its tokens if these are more pages. Longer nodes would make single operations too large; with
# shorter ones, a lookup would take longer for the nodes than for the bytes of the tokens.
RUN_PAGES_MAX = 1024
RUN_TOKENS = 4096

# A victim at least twice as long as needed is split, so that one eviction does not drop a whole conversation. The
# pieces have at least this many pages, because each piece is a node that every later match has to visit.
CUT_PAGES_MIN = 16

# An eviction from L1 spares at most this many victims that would be lost because L2 has no room for them now.
SPARED_MAX = 16


class RadixTree(PrefixTree):
    """See the module's docstring.

    `run_pages_max` bounds the size of a node further. A long prompt becomes a chain of nodes, whose backups and loads
    fit into bounded queues one by one. `adaptive` decides which nodes an eviction passes over.
    """

    def __init__(
        self, page_size: int, policy: EvictionPolicy, *, run_pages_max: int = RUN_TOKENS,
        position_bytes: int = TOKEN_BYTES, observer: TreeObserver | None = None,
        adaptive: AdaptiveEviction | None = None,
    ) -> None:
        run_pages_max = min(run_pages_max, max(RUN_PAGES_MAX, RUN_TOKENS // page_size))
        super().__init__(page_size, position_bytes, run_pages_max, observer)
        self.stored = StoredPrefixes(self)
        self.seals_host = False  # True: pages that arrive from storage are sealed on L2, and those that are stored
        self.stores_on_host = False  # True: L2 itself is the storage; its pages are sealed for the next process
        self.device_evictable_pages = 0
        self.device_protected_pages = 0
        self.host_pages = 0
        self.host_evictable_pages = 0  # pages of nodes on L2 that are not held, and not locked if on L2 only
        self.host_copy_pages = 0  # pages of nodes that are on L1 and L2
        self.pinned_pages = 0
        self.queues = EvictionQueues(policy)
        self.times = TickTimes()
        self.epoch = 0  # of the weights
        self.on_left: Callable[[RadixTree, Node, Medium], None] | None = None  # before a node leaves the tree
        self._policy = policy
        self._hinted: HintedOrder | None = None
        self.adaptive = adaptive
        if adaptive is not None:
            self.queues.device.keeps = lambda node: node.host is None and self._keeps(adaptive, node)
            if adaptive.keeps_host:
                self.queues.host.keeps = partial(self._keeps, adaptive)

    @property
    def device_pages_total(self) -> int:
        """The number of pages on L1."""
        return self.device_evictable_pages + self.device_protected_pages

    def hinted(self, now_s: Callable[[], float]) -> HintedOrder:
        """Return the order of eviction with hints, which applies from the first call on."""
        if self._hinted is None:
            self._hinted = HintedOrder(self.queues, self._policy, self.times, now_s)
        return self._hinted

    # Lookup and insertion

    def match(self, key: RadixKey, *, marks: bool = True) -> Match:
        """Return the longest cached prefix in whole pages. Marks it as used, unless it `marks` nothing; splits a node
        if the match ends inside.

        Raises InvalidInput if the key is not of this tree's kind, as all lookups and insertions do.
        """
        path = self._use_path(key) if marks else self._walk(key, marks=False)
        # Prefix closure: the nodes on L1 are the first nodes of the path.
        device_runs = [node.device for node in path if node.device is not None]
        host_hit = sum(map(self.pages, path[len(device_runs) + 1 :]))
        count = sum(map(len, device_runs))
        return Match(path[-1], path[len(device_runs)], device_runs, count, host_hit, count + host_hit)

    def peek(self, key: RadixKey) -> Peek:
        """Return what `match` would find. Does not mutate: no node is marked as used or split."""
        self.require_fitting(key)
        tokens, page_bytes = key.tokens, self.page_bytes
        end = len(tokens) - len(tokens) % page_bytes
        root = self._roots.get(key.seed)
        device_pages = host_pages = offset = 0
        children = {} if root is None else root.children
        while offset < end and (child := children.get(tokens[offset : offset + page_bytes])) is not None:
            whole = tokens.startswith(child.key, offset)
            count = self.pages(child) if whole else common_pages(child.key, tokens, offset, page_bytes)
            if child.device is not None:
                device_pages += count
            else:
                host_pages += count
            if not whole:
                break
            offset += len(child.key)
            children = child.children
        return Peek(device_pages, host_pages)

    def insert(
        self, key: RadixKey, device_pages: PageIds, *, priority: int = 0, below: Node | None = None,
        start_page: int = 0, uses: UseHistory = NO_HISTORY,
    ) -> Inserted:
        """Add the whole pages of `key` from `start_page` on, with the L1 pages that hold them.

        Runs on L2 only return to L1 in these pages; runs on L1 keep their pages. The tree takes over
        `device_pages[present_pages:]`. A present run counts one more request, unless `uses` says that this request was
        counted before, and gets at least `priority`. A new run counts its `uses`. If the path ends at a node that
        `may_grow` allows, with equal priority and uses, the new pages are appended to that node.
        REQUIRES: the path to `below`, if any, is the first `start_page` pages of `key`, on L1, and locked by the
        caller; else `start_page` is 0. Raises InvalidInput, and changes nothing, if the page counts differ.
        """
        self.require_fitting(key)
        pages = key.pages(self.page_size) - start_page
        if len(device_pages) != pages:
            raise InvalidInput(f"insert: {len(device_pages)} pages for {pages} pages of tokens")
        path = self._use_path(key, below, start_page * self.page_bytes)
        node = path[0]
        end_page = start_page + pages
        is_like = priority == node.priority and uses.of_run(start_page, end_page) == (node.hit_count, end_page)
        if len(path) == 1 and is_like and may_grow(node) and 0 < pages <= self.run_pages_max - self.pages(node):
            self._grow(node, key.tokens[start_page * self.page_bytes : end_page * self.page_bytes], device_pages)
            return Inserted(node, 0)
        present = done = 0
        for node in path[1:]:
            count = len(node.key) // self.page_bytes
            node.hit_count += start_page + done >= uses.known_pages
            node.priority = max(node.priority, priority)
            if node.device is None:
                self.set_device(node, device_pages[done : done + count].copy())
            else:
                present += count
            done += count
        for added, begin, end in self._add_runs(node, key, start_page + done, end_page, uses, priority):
            node = added
            self.set_device(node, device_pages[begin - start_page : end - start_page].copy())
        return Inserted(node, present)

    def insert_host(
        self, key: RadixKey, start_page: int, host_pages: PageIds, keys: list[bytes] | None = None, *,
        stored: bool = True, uses: UseHistory = NO_HISTORY, below: Node | None = None,
    ) -> tuple[Node, PageIds]:
        """Add L2 pages: `host_pages[i]` holds page `start_page + i` of `key`. Return the deepest node of the path, and
        the pages that the tree did not take because it has them or lacks their prefix; the caller frees these.

        With `keys`, the page keys, the pages were read from storage, which still has them if `stored`; a new run counts
        no request yet. Without `keys`, a request has just computed the pages, and is one of their `uses`. REQUIRES: the
        pages are complete and verified; the path to `below`, if any, is the first `start_page` pages of `key`.
        """
        tokens = key.tokens[: (start_page + len(host_pages)) * self.page_bytes]
        first = 0 if below is None else start_page
        path = self._use_path(RadixKey(tokens, key.seed, key.position_bytes), below, first * self.page_bytes)
        node = path[0]
        unused: list[PageIds] = []
        done = first - start_page  # the path covers so many of `host_pages`; negative before the first one
        for node in path[1:]:
            begin, done = done, done + len(node.key) // self.page_bytes
            run = host_pages[max(begin, 0) : max(done, 0)]
            if begin >= 0 and node.host is None and not node.backup_pending:  # a backup brings its own pages
                self._gain_host(node, run, None if keys is None else keys[begin:done], stored)
            else:
                unused.append(run)
        if done < 0:
            return node, host_pages
        for added, begin, end in self._add_runs(node, key, start_page + done, start_page + len(host_pages), uses):
            node = added
            if keys is not None:
                node.hit_count = 0
            part = slice(begin - start_page, end - start_page)
            self._gain_host(node, host_pages[part], None if keys is None else keys[part], stored)
        return node, concat(unused)

    def accept_backup(self, node: Node, host_pages: PageIds) -> PageIds:
        """Record that the backup of the run that ends at `node` has been copied to `host_pages`.

        Return the pages that the tree did not take because it has them; the caller frees these.
        """
        unused: list[PageIds] = []
        done = 0
        for part in reversed(list(self.span(node, len(host_pages)))):
            begin, done = done, done + len(part.key) // self.page_bytes
            part.backup_pending, part.copied, part.loss = False, True, ""
            run = host_pages[begin:done]
            if part.host is None:
                self.set_host(part, run.copy())
            else:
                unused.append(run)
        return concat(unused)

    def _gain_host(self, node: Node, host_pages: PageIds, keys: list[bytes] | None, stored: bool) -> None:
        """Record that `node` is on L2 and, with `keys`, that its pages came from storage."""
        if keys is not None:
            node.page_keys = b"".join(keys)
            if stored:
                self.stored.mark(node)
        self.set_host(node, host_pages.copy())
        node.sealed = keys is not None and self.seals_host

    def use(self, node: Node, priority: int = 0, new_pages: float = math.inf) -> None:
        """Count a request that reuses the path to `node`, and raise the path's priority to at least `priority`.

        The request is counted only for runs within the last `new_pages` pages: the runs above have counted it before.
        """
        while node.parent is not None:
            new_pages -= len(node.key) // self.page_bytes
            node.hit_count += new_pages >= 0
            node.priority = max(node.priority, priority)
            node = node.parent

    def awaits_load(self, key: RadixKey, below: Node, start_page: int) -> bool:
        """True if a node that `insert` would find below `below` is still being loaded. Does not mutate."""
        node, offset = below, start_page * self.page_bytes
        if node.parent is None:
            node = self._roots.get(key.seed, node)
        while (child := node.children.get(key.tokens[offset : offset + self.page_bytes])) is not None:
            if child.load_pending:
                return True
            if not key.tokens.startswith(child.key, offset):
                break
            node, offset = child, offset + len(child.key)
        return False

    def device_pages(self, node: Node) -> PageIds:
        """Return the L1 pages from the start of the prompt to the end of `node`. REQUIRES: `node` is on L1."""
        runs: list[PageIds] = []
        while node.parent is not None:
            if node.device is None:
                raise InvariantError(f"not on L1: {node!r}")
            runs.append(node.device)
            node = node.parent
        return concat(runs[::-1])

    # Locks, holds, pins: a walk up ends at the first ancestor whose count was not 0 (invariant 3)

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors on the tiers they are on until `unlock`."""
        while node.parent is not None:
            if node.lock_ref == 0:
                if node.device is None:
                    self._count_host(node, -1)
                else:
                    count = len(node.device)
                    self.device_evictable_pages -= count
                    self.device_protected_pages += count
            node.lock_ref += 1
            if node.lock_ref > 1:
                break
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises InvariantError if there was none."""
        while node.parent is not None:
            if node.lock_ref < 1:
                raise InvariantError(f"unlock without lock: {node!r}")
            node.lock_ref -= 1
            if node.lock_ref > 0:
                break
            if node.device is None:
                self._count_host(node, +1)
            else:
                count = len(node.device)
                self.device_evictable_pages += count
                self.device_protected_pages -= count
            self.queues.offer(node)
            node = node.parent

    def move_lock(self, node: Node, below: Node) -> None:
        """Call `lock(below)`, then `unlock(node)`: their common ancestors stay locked all the time."""
        if below is not node:
            self.lock(below)
            self.unlock(node)

    def hold_host(self, node: Node) -> None:
        """Keep the L2 pages of `node` and its ancestors until `release_host`, and nodes on L1 only in the tree."""
        while node.parent is not None:
            if node.host_ref == 0:
                self._count_host(node, -1)
            node.host_ref += 1
            if node.host_ref > 1:
                break
            node = node.parent

    def release_host(self, node: Node) -> None:
        """Undo one `hold_host`. Raises InvariantError if there was none."""
        while node.parent is not None:
            if node.host_ref < 1:
                raise InvariantError(f"release without hold: {node!r}")
            node.host_ref -= 1
            if node.host_ref > 0:
                break
            self._count_host(node, +1)
            self.queues.offer(node)
            node = node.parent

    def pin(self, node: Node) -> None:
        """Keep `node` and its ancestors in the tree until `unpin`: they stay on L2, and leave L1 only for L2."""
        self.hold_host(node)
        while node.parent is not None:
            node.pin_ref += 1
            if node.pin_ref > 1:
                break
            self.pinned_pages += self.pages(node)
            node = node.parent

    def unpin(self, node: Node) -> None:
        """Undo one `pin`."""
        part = node
        while part.parent is not None:
            part.pin_ref -= 1
            if part.pin_ref > 0:
                break
            self.pinned_pages -= self.pages(part)
            part = part.parent
        self.release_host(node)

    # Tiers

    def set_device(self, node: Node, pages: PageIds) -> None:
        """Record that `node` is on L1 at `pages`. REQUIRES: it was not on L1, and its parent is."""
        self._count_host(node, -1)
        node.device = pages
        if node.host is not None:
            self.host_copy_pages += len(pages)
            self._count_host(node, +1)
        if node.lock_ref:
            self.device_protected_pages += len(pages)
        else:
            self.device_evictable_pages += len(pages)
        if node.parent is not None:
            node.parent.device_children += 1
        self.queues.offer(node)
        if self.observer is not None:
            self.observer.stored(Medium.DEVICE, self, node)

    def set_host(self, node: Node, pages: PageIds) -> None:
        """Record that `node` is on L2 at `pages`. REQUIRES: it was not on L2, and the bytes are complete."""
        node.host, node.sealed, node.proved_until_s = pages, False, -math.inf
        self.host_pages += len(pages)
        if node.device is not None:
            self.host_copy_pages += len(pages)
        self._count_host(node, +1)
        self.queues.offer(node)
        if self.observer is not None:
            self.observer.stored(Medium.HOST, self, node)

    def leave_device(self, node: Node) -> PageIds:
        """Remove `node` from L1, and from the tree if it is on L1 only. Return its L1 pages, which are free now.

        REQUIRES: `may_leave_device(node)`; a node on L1 only has no children.
        """
        parent, pages = node.parent, node.device
        if pages is None or parent is None:
            raise InvariantError(f"not on L1: {node!r}")
        if self.observer is not None:
            self.observer.removed(Medium.DEVICE, self, node)
        self.device_evictable_pages -= len(pages)
        parent.device_children -= 1
        if node.host is None:
            node.device = None
            self._remove(node, Medium.DEVICE)
        else:
            self._end_copy(node)
            node.device = None
            self.queues.offer(node)
            self.queues.offer(parent)
        return pages

    def evict_device(self, pages: int, write_back: Callable[[Node], EvictionChoice] | None = None) -> Evicted:
        """Evict `pages` pages from L1, fewer if not enough may leave, at most about twice as many.

        Leaves are evicted first, in the policy's order. L2 copies stay. For a victim without a copy, `write_back`
        decides: it may start a copy, but must not change the structure above the victim. Without `write_back` such a
        victim is dropped, with the nodes below it on L2, unless it is held.
        """
        freed: list[PageIds] = []
        host_freed: list[PageIds] = []
        spared: list[Node] = []
        last: list[Node] = []  # dropped only if the other victims are too few
        missing, writeback_pages, lost_pages = pages, 0, 0
        # Member access on an enum is slow.
        keep, lose, writing_back = EvictionChoice.KEEP, EvictionChoice.LOSE, EvictionChoice.WRITING_BACK
        while missing > 0 and (node := self.queues.device.pop()) is not None:
            count = self._cut(node, missing)
            if node.host is None:
                choice = EvictionChoice.DROP if write_back is None else write_back(node)
                if choice is keep or (node.host_ref and choice is not writing_back):
                    spared.append(node)
                    continue
                if choice is lose and len(last) < SPARED_MAX:
                    last.append(node)
                    continue
                if choice is writing_back:
                    writeback_pages += count
                    missing -= count
                    continue
                if node.children:
                    host_freed += self._drop_below(node)
                lost_pages += count if choice is lose else 0
            missing -= count
            freed.append(self.leave_device(node))
        for node in last:
            # A node that lost its last child on L2 was offered again: it may have left, or be in flight to L2.
            if missing > 0 and may_leave_device(node) and not node.host_ref:
                host_freed += self._drop_below(node)
                freed.append(self.leave_device(node))
                missing -= len(freed[-1])
                lost_pages += len(freed[-1])
        for node in (*spared, *last):
            self.queues.offer(node)
        return Evicted(concat(freed), writeback_pages, concat(host_freed), lost_pages)

    def evict_host(self, pages: int, *, copy_pages_max: int = 0) -> PageIds:
        """Evict `pages` pages from L2, fewer if not enough may leave, at most about twice as many. Return their ids.

        Copies of nodes on L1 are evicted first while there are more than `copy_pages_max` pages of them, else last; the
        newest first, because these stay on L1 longest. The other victims leave the tree: leaves first, in the policy's
        order.
        """
        freed: list[PageIds] = []
        missing = pages
        while missing > 0:
            node = self.queues.copies.pop() if self.host_copy_pages > copy_pages_max else None
            node = node or self.queues.host.pop() or self.queues.copies.pop()
            if node is None:
                break
            missing -= self._cut(node, missing)
            freed.append(self.leave_host(node))
        return concat(freed)

    def split(self, tail: Node, pages: int) -> Node:
        """Split as in `PrefixTree`, index the head if it is stored, and offer it for eviction."""
        head = super().split(tail, pages)
        if head.stored:
            self.stored.mark(head)
        self.queues.offer(head)
        return head

    def leave_host(self, node: Node) -> PageIds:
        """Remove `node` from L2 as `leave_device` does from L1. REQUIRES: `may_leave_host` or `may_lose_copy`."""
        pages = node.host
        if pages is None:
            raise InvariantError(f"not on L2: {node!r}")
        if self.observer is not None:
            self.observer.removed(Medium.HOST, self, node)
        self.host_pages -= len(pages)
        self._count_host(node, -1)
        if node.device is None:
            node.host = None
            self._remove(node, Medium.HOST)
        else:
            self._end_copy(node)
            node.host = None
            if self.stores_on_host:
                self.stored.unmark(node)
        return pages

    def _use_path(self, key: RadixKey, node: Node | None = None, offset: int = 0) -> list[Node]:
        path = self._walk(key, node, offset)
        if self.queues.fall_on_use:
            for used in path:
                self.queues.requeue(used)
        return path

    def _grow(self, node: Node, key: bytes, pages: PageIds) -> None:
        """Append `pages` on L1, whose key bytes are `key`, to `node`."""
        prior = None if self.observer is None else self.prior(node)
        node.key += key
        node.device = concat([NO_PAGES if node.device is None else node.device, pages])
        node.page_keys = node.key if self.position_bytes == PAGE_KEY_BYTES else None
        node.chain = node.block = node.last_id = None
        self.device_protected_pages += len(pages)
        if self.observer is not None and prior is not None:
            self.observer.grown(self, node, len(pages), prior)

    def _keeps(self, adaptive: AdaptiveEviction, node: Node) -> bool:
        keeps = (node.hint is None or not node.hint.decides(node)) and adaptive.keeps(node)
        if keeps:
            node.kept_at = self.tick
        return keeps

    def _cut(self, victim: Node, pages: int) -> int:
        """Split off the head of a victim that has at least twice the needed pages. Return the victim's new length."""
        count = len(victim.key) // self.page_bytes
        if count < 2 * CUT_PAGES_MIN or count < 2 * pages:
            return count
        needed = max(pages, CUT_PAGES_MIN)
        self.split(victim, count - needed)
        return needed

    def _drop_below(self, node: Node) -> list[PageIds]:
        """Remove all nodes below `node`, and return their pages. REQUIRES: they are on L2 only, and not held."""
        below: list[Node] = []
        stack = list(node.children.values())
        while stack:
            part = stack.pop()
            below.append(part)
            stack.extend(part.children.values())
        return [self.leave_host(part) for part in reversed(below)]

    def _end_copy(self, node: Node) -> None:
        """Record that `node` leaves one of its two tiers."""
        self.host_copy_pages -= self.pages(node)
        self.queues.copies.forget(node)

    def _remove(self, node: Node, medium: Medium) -> None:
        if self.on_left is not None:
            self.on_left(self, node, medium)
        if node.stored:
            self.stored.unmark(node)
        parent = self._detach(node)
        self.queues.forget(node)
        self.queues.offer(parent)

    def _count_host(self, node: Node, sign: int) -> None:
        """Add `sign` times the pages of `node` to `host_evictable_pages` if they are evictable. Call it with -1 before
        and with +1 after a change of locks, holds or tiers."""
        if node.host is not None and not node.host_ref and (node.device is not None or not node.lock_ref):
            self.host_evictable_pages += sign * len(node.host)

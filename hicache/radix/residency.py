"""The nodes of a radix tree and where they reside: structure, page keys, locks, tiers and what leaves them next.

`RadixTree` adds lookup and insertion on top. See there for the invariants, which `check_tree` verifies. Owned by the
scheduler thread; no lock.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ..errors import InvariantError
from ..events.types import Medium
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES, PageChain, key_page_bytes, page_keys, split_keys
from ..policies import EvictionPolicy
from ..types import NO_PAGES, PageIds
from .eviction import DeviceQueue, EvictionQueue, HostQueue
from .node import NO_CHILDREN, Node, may_leave_host
from .observer import TreeObserver

# A victim more than twice as long as what is needed is cut, so that one eviction does not throw away a whole
# conversation; but not into pieces smaller than this, because every piece is a node that each later match has to pass.
CUT_PAGES_MIN = 16


class Fate(enum.Enum):
    """What becomes of an L1 victim that has no copy on L2."""

    DROP = "drop"  # it leaves the tree
    SAVING = "saving"  # a copy to L2 was started; it leaves L1 when that has arrived
    KEEP = "keep"  # it must not be lost and cannot be saved now


class Evicted(NamedTuple):
    """`pages` are free now, `saving_pages` more will be once their copies to L2 have arrived."""

    pages: PageIds
    saving_pages: int


class Residency:
    """Nodes below one root per seed, each on L1, on L2 or on both.

    `page_size` is in tokens, or in bigrams; `position_bytes` is the kind of the keys (see `RadixKey`), `page_bytes` are
    the key bytes of one page. Where the engine gives the page keys, a node's key and its page keys are the same bytes.
    """

    def __init__(
        self, page_size: int, position_bytes: int, policy: EvictionPolicy, observer: TreeObserver | None
    ) -> None:
        self.page_size = page_size
        self.position_bytes = position_bytes
        self.page_bytes = key_page_bytes(page_size, position_bytes)
        self.observer = observer
        self.device_evictable_pages = 0
        self.device_protected_pages = 0
        self.host_pages = 0
        self.host_evictable_pages = 0  # host-only pages that nobody locks or holds
        self.pinned_pages = 0
        self.node_count = 0
        self._roots: dict[bytes, Node] = {}
        self._clock = 0
        self._next_id = 0
        self._device_queue = DeviceQueue(policy)
        self._host_queue = HostQueue(policy)

    @property
    def device_pages_total(self) -> int:
        """Pages on L1."""
        return self.device_evictable_pages + self.device_protected_pages

    @property
    def host_protected_pages(self) -> int:
        """L2 pages that may not leave now: held, locked, pinned, or on L1 too."""
        return self.host_pages - self.host_evictable_pages

    def roots(self) -> list[Node]:
        """The roots, one per seed in use."""
        return list(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        stack = self.roots()
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def pages(self, node: Node) -> int:
        """Pages of the node's run."""
        return len(node.key) // self.page_bytes

    def span(self, node: Node, pages: int) -> Iterator[Node]:
        """The nodes that together are the last `pages` pages up to and with `node`, deepest first.

        An operation on a node finds all parts of it here, into however many it was split since.
        """
        while pages > 0:
            if node.parent is None:
                raise InvariantError("span: ran over the root; a node was removed under an operation")
            parent = node.parent
            pages -= len(node.key) // self.page_bytes
            yield node
            node = parent
        if pages < 0:
            raise InvariantError("span: the operation began inside a node")

    # Page keys

    def page_keys(self, node: Node) -> list[bytes]:
        """Storage keys of the node's pages; computed when first asked for, for the ancestors too."""
        missing = []
        part = node
        while part.page_keys is None and part.parent is not None:
            missing.append(part)
            part = part.parent
        for part in reversed(missing):
            part.page_keys = b"".join(page_keys(part.key, self.page_bytes // TOKEN_BYTES, self.last_key(part.parent)))
        return split_keys(node.page_keys or b"")

    def last_key(self, node: Node | None) -> bytes:
        """What the key of the page after `node` is chained from: its last page key; the seed for a root."""
        if node is None:
            return b""
        if node.page_keys is None:
            self.page_keys(node)
        return (node.page_keys or b"")[-PAGE_KEY_BYTES:]

    def prior(self, node: Node) -> bytes | PageChain:
        """As `last_key`, but hashes nothing: where the key is not known, the chain that has it."""
        unknown: list[Node] = []
        while node.page_keys is None and node.chain is None and node.parent is not None:
            unknown.append(node)
            node = node.parent
        prior = node.chain if node.page_keys is None and node.chain is not None else self.last_key(node)
        for part in reversed(unknown):
            prior = PageChain(part.key, self.page_bytes // TOKEN_BYTES, prior)
        return prior

    def begin_store(self, node: Node) -> PageChain:
        """Record that the pages of `node` are being stored; their keys, which the storage worker hashes."""
        parent = node.parent
        if parent is None:
            raise InvariantError("store: a root has no pages")
        known = None if node.page_keys is None else self.page_keys(node)
        node.chain = PageChain(node.key, self.page_bytes // TOKEN_BYTES, self.prior(parent), known)
        node.store_pending = True
        return node.chain

    def end_store(self, node: Node, chain: PageChain, *, stored: bool) -> None:
        """Record that the store of a run that ends at `node` has ended. Its keys are kept if they were hashed."""
        keys, end = chain.hashed, chain.pages
        for part in self.span(node, chain.pages):
            begin = end - self.pages(part)
            part.store_pending, part.chain = False, None
            if keys is not None and part.page_keys is None:
                part.page_keys = b"".join(keys[begin:end])
            if stored:
                self.set_stored(part)
            end = begin

    # Locks, holds, pins

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors on the tiers they are on until `unlock`."""
        while node.parent is not None:
            self._lock_alone(node)
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises InvariantError if there was none."""
        while node.parent is not None:
            if node.lock_ref < 1:
                raise InvariantError(f"unlock without lock: {node!r}")
            node.lock_ref -= 1
            if node.lock_ref == 0:
                if node.device is not None:
                    count = len(node.device)
                    self.device_evictable_pages += count
                    self.device_protected_pages -= count
                self._count_host(node, +1)
                self._offer(node)
            node = node.parent

    def move_lock(self, node: Node, below: Node) -> None:
        """As `lock(below)` and `unlock(node)`. REQUIRES: `node` is locked, and `below` is it or one of its descendants.

        A root stands for all roots of its seed, since one without children is not kept.
        """
        while below is not node:
            if below.parent is None:
                if node.parent is None:
                    return
                raise InvariantError(f"move_lock: not below {node!r}")
            self._lock_alone(below)
            below = below.parent

    def _lock_alone(self, node: Node) -> None:
        if node.lock_ref == 0 and node.device is not None:
            count = len(node.device)
            self.device_evictable_pages -= count
            self.device_protected_pages += count
        self._count_host(node, -1)
        node.lock_ref += 1

    def hold_host(self, node: Node) -> None:
        """Keep the L2 pages of `node` and its ancestors until `release_host`. They may leave L1 meanwhile."""
        while node.parent is not None:
            self._count_host(node, -1)
            node.host_ref += 1
            node = node.parent

    def release_host(self, node: Node) -> None:
        """Undo one `hold_host`. Raises InvariantError if there was none."""
        while node.parent is not None:
            if node.host_ref < 1:
                raise InvariantError(f"release without hold: {node!r}")
            node.host_ref -= 1
            self._count_host(node, +1)
            self._offer(node)
            node = node.parent

    def pin(self, node: Node) -> None:
        """Keep `node` and its ancestors in the tree until `unpin`: they leave L1 for L2 only, and L2 not at all."""
        self.hold_host(node)
        while node.parent is not None:
            if node.pin_ref == 0:
                self.pinned_pages += self.pages(node)
            node.pin_ref += 1
            node = node.parent

    def unpin(self, node: Node) -> None:
        """Undo one `pin`."""
        part = node
        while part.parent is not None:
            part.pin_ref -= 1
            if part.pin_ref == 0:
                self.pinned_pages -= self.pages(part)
            part = part.parent
        self.release_host(node)

    # Tiers

    def set_device(self, node: Node, pages: PageIds) -> None:
        """Record that `node` is on L1 at `pages`. REQUIRES: it was not, and its parent is."""
        self._count_host(node, -1)
        node.device = pages
        if node.lock_ref:
            self.device_protected_pages += len(pages)
        else:
            self.device_evictable_pages += len(pages)
        if node.parent is not None:
            node.parent.device_children += 1
        self._offer(node)
        if self.observer is not None:
            self.observer.stored(Medium.DEVICE, self, node)

    def set_host(self, node: Node, pages: PageIds) -> None:
        """Record that `node` is on L2 at `pages`. REQUIRES: it was not, its parent is, and the bytes are complete."""
        node.host = pages
        self.host_pages += len(pages)
        self._count_host(node, +1)
        self._offer(node)
        if self.observer is not None:
            self.observer.stored(Medium.HOST, self, node)

    def set_stored(self, node: Node) -> None:
        """Record that L3 has the pages of `node`. The tree does not learn when L3 drops them."""
        node.stored = True
        if self.observer is not None:
            self.observer.stored(Medium.STORAGE, self, node)

    def forget_stored(self) -> None:
        """Record that L3 has nothing of what is in the tree: another store is to be used. Visits every node."""
        for node in reversed(list(self.nodes())):
            if node.stored:
                node.stored = False
                if self.observer is not None:
                    self.observer.removed(Medium.STORAGE, self, node)

    def leave_device(self, node: Node) -> PageIds:
        """Take `node` off L1, and out of the tree if it is on no other tier; its L1 pages, which are free now.

        REQUIRES: `may_leave_device`.
        """
        parent, pages = node.parent, node.device
        if pages is None or parent is None:
            raise InvariantError(f"not on L1: {node!r}")
        if self.observer is not None:
            self.observer.removed(Medium.DEVICE, self, node)
        self.device_evictable_pages -= len(pages)
        node.device = None
        self._count_host(node, +1)
        parent.device_children -= 1
        if node.host is None:
            self._remove(node)
        else:
            self._offer(node)
            self._offer(parent)
        return pages

    def evict_device(self, pages: int, save: Callable[[Node], Fate] | None = None) -> Evicted:
        """Take `pages` pages off L1 if that many may leave, else fewer; at most some twice as many.

        Leaves first, in the policy's order. What is on L2 stays there; for the rest `save` is asked what to do, and may
        start a copy but must leave the structure above the victim as it is. Without `save` it is dropped, unless it is
        pinned.
        """
        freed: list[PageIds] = []
        kept: list[Node] = []
        missing, saving_pages = pages, 0
        while missing > 0 and (node := self._device_queue.pop()) is not None:
            count = self._cut(node, missing)
            if node.host is None:
                fate = save(node) if save is not None else Fate.KEEP if node.pin_ref else Fate.DROP
                if fate is Fate.KEEP:
                    kept.append(node)
                    continue
                if fate is Fate.SAVING:
                    saving_pages += count
                    missing -= count
                    continue
            missing -= count
            freed.append(self.leave_device(node))
        for node in kept:
            self._offer(node)
        return Evicted(np.concatenate(freed) if freed else NO_PAGES, saving_pages)

    def evict_host(self, pages: int) -> PageIds:
        """Take `pages` pages off L2 if that many may leave, else fewer; the freed page ids, at most some twice as many.

        Only runs that are on no other tier leave, which removes them. Leaves first, in the policy's order.
        """
        freed: list[PageIds] = []
        missing = pages
        while missing > 0 and (node := self._host_queue.pop()) is not None:
            missing -= self._cut(node, missing)
            if node.host is None:
                raise InvariantError(f"not on L2: {node!r}")
            if self.observer is not None:
                self.observer.removed(Medium.HOST, self, node)
            freed.append(node.host)
            self.host_pages -= len(node.host)
            self._remove(node)
        return np.concatenate(freed) if freed else NO_PAGES

    def queues(self) -> tuple[EvictionQueue, EvictionQueue]:
        """The L1 and L2 eviction queues, for `check_tree`."""
        return self._device_queue, self._host_queue

    # Structure

    def _new_node(self, parent: Node | None, key: bytes, priority: int = 0) -> Node:
        self._next_id += 1
        node = Node(self._next_id, parent, key, self._clock, priority)
        if parent is not None:
            self.node_count += 1
            if self.position_bytes == PAGE_KEY_BYTES:
                node.page_keys = key
        return node

    def _add_child(self, parent: Node, key: bytes, priority: int = 0) -> Node:
        if parent.parent is None and parent.page_keys is not None:
            self._roots[parent.page_keys] = parent
        node = self._new_node(parent, key, priority)
        self._file(parent, node)
        return node

    def _file(self, parent: Node, child: Node) -> None:
        """Enter `child` under its first page, in place of a node that begins with the same one."""
        if parent.children is NO_CHILDREN:
            parent.children = {}
        parent.children[child.key[: self.page_bytes]] = child
        parent.recent_child = child

    def _cut(self, victim: Node, pages: int) -> int:
        """Split off the head of a victim if at least as much stays as is needed; how many pages the victim has then."""
        count, needed = self.pages(victim), max(pages, CUT_PAGES_MIN)
        head = count - needed
        if head < needed:
            return count
        self.split(victim, head)
        return count - head

    def split(self, tail: Node, pages: int) -> Node:
        """Make the first `pages` pages of `tail` a node of their own, its new parent, which is returned.

        Everything is divided: tokens, page ids, page keys; locks, holds, pins and operations under way count for both.
        REQUIRES: 0 < pages < pages of `tail`.
        """
        parent = tail.parent
        if parent is None:
            raise InvariantError("split: a root has no pages")
        cut = pages * self.page_bytes
        head = self._new_node(parent, tail.key[:cut], tail.priority)
        head.created, head.last_access, head.hit_count = tail.created, tail.last_access, tail.hit_count
        head.lock_ref, head.host_ref, head.pin_ref = tail.lock_ref, tail.host_ref, tail.pin_ref
        head.load_pending, head.backup_pending = tail.load_pending, tail.backup_pending
        head.store_pending, head.stored = tail.store_pending, tail.stored
        if tail.device is not None:
            head.device, tail.device = tail.device[:pages].copy(), tail.device[pages:].copy()
            head.device_children = 1
        if tail.host is not None:
            head.host, tail.host = tail.host[:pages].copy(), tail.host[pages:].copy()
        if tail.page_keys is not None:
            key_cut = pages * PAGE_KEY_BYTES
            head.page_keys, tail.page_keys = tail.page_keys[:key_cut], tail.page_keys[key_cut:]
        # A dictionary keeps the key it has; taken out first, the head of one page and its key are one object.
        del parent.children[tail.key[: self.page_bytes]]
        tail.key = tail.key[cut:]
        tail.parent = head
        if tail.chain is not None:
            # It may begin above `head`, in an earlier head of the same run.
            head.chain = tail.chain.head(tail.chain.pages - self.pages(tail))
        self._file(parent, head)
        self._file(head, tail)
        return head

    def _remove(self, node: Node) -> None:
        parent = node.parent
        if parent is None or node.children:
            raise InvariantError(f"cannot remove {node!r}: it is a root or has children")
        del parent.children[node.key[: self.page_bytes]]
        if parent.recent_child is node:
            parent.recent_child = None
        if not parent.children:
            parent.children = NO_CHILDREN
        self._count_host(node, -1)
        node.host = None
        self._device_queue.forget(node)
        self._host_queue.forget(node)
        self.node_count -= 1
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children and parent.page_keys is not None:
            self._roots.pop(parent.page_keys, None)

    def _count_host(self, node: Node, sign: int) -> None:
        """Take `node` in or out of `host_evictable_pages`; called after a change that may, before one that must."""
        if node.device is None and node.host is not None and not node.lock_ref and not node.host_ref:
            self.host_evictable_pages += sign * len(node.host)

    def _offer(self, node: Node) -> None:
        """Enter `node` into the eviction queues of the tiers it may leave now."""
        if node.lock_ref:
            return
        if node.device is not None:
            if not node.device_entry and node.device_children == 0:
                self._device_queue.push(node)
        elif not node.host_entry and may_leave_host(node):
            self._host_queue.push(node)

    def _reorder(self, path: list[Node]) -> None:
        """Enter the candidates among just used nodes again, under their new rank."""
        for node in path:
            if node.device_entry:
                self._device_queue.push(node)
            if node.host_entry:
                self._host_queue.push(node)

"""The radix tree over pages: which prefixes are cached, on which tier, and what leaves next.

The tree decides and moves no byte: it takes page ids, hands page ids back to be freed, and never sees a stream, a
thread or a socket. It belongs to the scheduler thread, so there is no lock.

Invariants, verified by `check_tree`:
1. Prefix closure: a node on L1 has its parent on L1, a node on L2 has its parent on L2 (roots count as both).
2. A node is on L1 or on L2, else it is removed. No page id is held by two nodes.
3. `lock_ref` of a parent is at least that of each child. A locked node leaves no tier.
4. Each node that may leave a tier has one entry in that tier's eviction queue, and no node has two.
5. The page counts below are the sums over the nodes.

There is one root per seed (`extra_key`, `cache_salt`), so equal tokens under two seeds never share a node. Tokens are
compared as bytes: a page is a slice and a dictionary key, and a run compares at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ..errors import InvalidInput, InvariantError
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES, RadixKey, page_keys
from ..types import NO_PAGES, PageIds
from .eviction import EvictionPolicy, EvictionQueue
from .node import Node, may_leave_device, may_leave_host

# A victim longer than what is needed is cut, so that one eviction does not throw away a whole conversation; but not
# into pieces smaller than this, because every piece is a node that each later match has to pass.
CUT_PAGES_MIN = 16


# A node of this many pages still matches at the speed of memory; more would make single operations too large.
RUN_PAGES_MAX = 1024


class Match(NamedTuple):
    """The cached prefix of a prompt. Page counts are from the start of the prompt; the L1 part always comes first."""

    node: Node  # deepest matched node, a root if nothing matched
    device_node: Node  # deepest matched node on L1
    host_node: Node  # deepest matched node on L2
    device_pages: PageIds  # int32, the L1 pages; not to be written to
    host_hit_pages: int  # pages behind them that are on L2 only
    pages: int  # all matched pages


class Inserted(NamedTuple):
    """What an insert did. The first `present_pages` pages were on L1 already: the caller's copies are duplicates."""

    node: Node
    present_pages: int


class RadixTree:
    """See the module's docstring. `page_size` is in tokens.

    `run_pages_max` bounds a node, and with it every operation on one: a long prompt becomes a chain of nodes, whose
    backup and load fit into bounded queues piece by piece.
    """

    def __init__(self, page_size: int, policy: EvictionPolicy, *, run_pages_max: int = RUN_PAGES_MAX) -> None:
        self.page_size = page_size
        self._run_pages_max = run_pages_max
        self.device_evictable_pages = 0
        self.device_protected_pages = 0
        self.host_pages = 0
        # Host-only pages that nobody locks or holds. An upper bound of what evict_host can free: a hold protects the
        # ancestors of its node too, which are counted here.
        self.host_evictable_pages = 0
        self.node_count = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._clock = 0
        self._next_id = 0
        self._device_queue = EvictionQueue(policy, may_leave_device, _forget_device)
        self._host_queue = EvictionQueue(policy, may_leave_host, _forget_host)

    # Lookup and insert

    def match(self, key: RadixKey) -> Match:
        """The longest cached prefix in whole pages. Marks it as used; splits a node if the match ends inside it."""
        path = self._walk(self._root(key.seed), key.tokens)
        node = device_node = path[0]
        runs: list[PageIds] = []
        host_hit = 0
        for node in path[1:]:
            if node.device is not None:
                runs.append(node.device)
                device_node = node
            elif node.host is not None:
                host_hit += len(node.host)
        host_node = node
        while host_node.host is None and host_node.parent is not None:
            host_node = host_node.parent
        device_pages = runs[0] if len(runs) == 1 else np.concatenate(runs) if runs else NO_PAGES
        return Match(node, device_node, host_node, device_pages, host_hit, len(device_pages) + host_hit)

    def insert(self, key: RadixKey, device_pages: PageIds) -> Inserted:
        """Add the whole pages of `key` with the L1 pages that hold them.

        Runs that were only on L2 come back to L1 with the given pages; what was on L1 stays as it is. The tree takes
        over `device_pages[present_pages:]`. Raises InvalidInput, and changes nothing, if the counts differ.
        """
        pages = len(key.tokens) // self._page_bytes
        if len(device_pages) != pages:
            raise InvalidInput(f"insert: {len(device_pages)} pages for {pages} pages of tokens")
        path = self._walk(self._root(key.seed), key.tokens)
        node = path[0]
        present = done = 0
        for node in path[1:]:
            count = len(node.key) // self._page_bytes
            if node.device is None:
                self.set_device(node, device_pages[done : done + count].copy())
            else:
                present += count
            done += count
        while done < pages:
            end = min(done + self._run_pages_max, pages)
            node = self._add_child(node, key.tokens[done * self._page_bytes : end * self._page_bytes])
            self.set_device(node, device_pages[done:end].copy())
            done = end
        return Inserted(node, present)

    def insert_host(self, key: RadixKey, start_page: int, host_pages: PageIds, keys: list[bytes]) -> PageIds:
        """Add pages read from storage as L2 pages: `host_pages[i]` holds page `start_page + i` of `key`.

        `keys` are their page keys. Returns the pages that the tree did not take (it has them, or their prefix is no
        longer on L2); the caller frees those. REQUIRES: the pages are complete and verified.
        """
        tokens = key.tokens[: (start_page + len(host_pages)) * self._page_bytes]
        path = self._walk(self._root(key.seed), tokens)
        node = path[0]
        unused: list[PageIds] = []
        done = -start_page  # pages of `host_pages` that the path covers so far; negative before the first of them
        for node in path[1:]:
            begin, done = done, done + len(node.key) // self._page_bytes
            run = host_pages[max(begin, 0) : max(done, 0)]
            if begin >= 0 and node.host is None and self._may_gain_host(node):
                node.page_keys = b"".join(keys[begin:done])
                node.stored = True
                self.set_host(node, run.copy())
            else:
                unused.append(run)
        takes = done >= 0 and self._on_host(node)
        while takes and done < len(host_pages):
            end = min(done + self._run_pages_max, len(host_pages))
            node = self._add_child(
                node, tokens[(start_page + done) * self._page_bytes : (start_page + end) * self._page_bytes]
            )
            node.page_keys = b"".join(keys[done:end])
            node.stored = True
            self.set_host(node, host_pages[done:end].copy())
            done = end
        unused.append(host_pages[max(done, 0) :])
        return np.concatenate(unused) if unused else NO_PAGES

    # Locks

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors where they are until `unlock`."""
        while node.parent is not None:
            if node.lock_ref == 0 and node.device is not None:
                count = len(node.device)
                self.device_evictable_pages -= count
                self.device_protected_pages += count
            self._count_host(node, -1)
            node.lock_ref += 1
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

    def hold_host(self, node: Node, pages: int) -> None:
        """Keep the L2 pages of the last `pages` pages up to `node` until `release_host`."""
        for part in self.span(node, pages):
            self._count_host(part, -1)
            part.host_ref += 1

    def release_host(self, node: Node, pages: int) -> None:
        """Undo one `hold_host` with the same arguments."""
        for part in self.span(node, pages):
            part.host_ref -= 1
            self._count_host(part, +1)
            self._offer(part)

    def span(self, node: Node, pages: int) -> Iterator[Node]:
        """The nodes that together are the last `pages` pages up to and with `node`, deepest first.

        An operation on a node finds all parts of it here, into however many it was split since.
        """
        while pages > 0:
            if node.parent is None:
                raise InvariantError("span: ran over the root; a node was removed under an operation")
            parent = node.parent
            pages -= len(node.key) // self._page_bytes
            yield node
            node = parent
        if pages < 0:
            raise InvariantError("span: the operation began inside a node")

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

    def set_host(self, node: Node, pages: PageIds) -> None:
        """Record that `node` is on L2 at `pages`. REQUIRES: it was not, its parent is, and the bytes are complete."""
        node.host = pages
        self.host_pages += len(pages)
        self._count_host(node, +1)
        self._offer(node)

    def evict_device(self, pages: int) -> PageIds:
        """Take at least `pages` pages off L1 if that many may leave; returns the freed page ids, fewer if not.

        Backed-up runs stay as tombstones, others are removed. Leaves first, in the policy's order.
        """
        return self._evict(self._device_queue, pages, lambda node: node.device, self._leave_device)

    def evict_host(self, pages: int) -> PageIds:
        """Take at least `pages` pages off L2 if that many may leave; returns the freed page ids, fewer if not.

        Only runs that are on no other tier leave, which removes them. Leaves first, in the policy's order.
        """
        return self._evict(self._host_queue, pages, lambda node: node.host, self._leave_host)

    def _evict(
        self,
        queue: EvictionQueue,
        pages: int,
        run_of: Callable[[Node], PageIds | None],
        leave: Callable[[Node], None],
    ) -> PageIds:
        freed: list[PageIds] = []
        missing = pages
        while missing > 0:
            node = queue.pop()
            run = None if node is None else run_of(node)
            if node is None or run is None:
                break
            cut = len(run) - max(missing, CUT_PAGES_MIN)
            if cut >= CUT_PAGES_MIN:
                self._split(node, cut)
                run = run[cut:].copy()
            missing -= len(run)
            freed.append(run)
            leave(node)
        return np.concatenate(freed) if freed else NO_PAGES

    def page_keys(self, node: Node) -> list[bytes]:
        """Storage keys of the node's pages; computed when first asked for, for the ancestors too."""
        missing = []
        part = node
        while part.page_keys is None and part.parent is not None:
            missing.append(part)
            part = part.parent
        for part in reversed(missing):
            part.page_keys = b"".join(page_keys(part.key, self.page_size, self.last_key(part.parent)))
        keys = node.page_keys or b""
        return [keys[i : i + PAGE_KEY_BYTES] for i in range(0, len(keys), PAGE_KEY_BYTES)]

    def last_key(self, node: Node | None) -> bytes:
        """What the key of the page after `node` is chained from: its last page key; the seed for a root."""
        if node is None:
            return b""
        if node.page_keys is None:
            self.page_keys(node)
        return (node.page_keys or b"")[-PAGE_KEY_BYTES:]

    def device_pages(self, node: Node) -> PageIds:
        """The L1 pages from the start of the prompt to the end of `node`. REQUIRES: `node` is on L1."""
        runs: list[PageIds] = []
        while node.parent is not None:
            if node.device is None:
                raise InvariantError(f"not on L1: {node!r}")
            runs.append(node.device)
            node = node.parent
        return np.concatenate(runs[::-1]) if runs else NO_PAGES

    def covers(self, node: Node, tokens: bytes) -> bool:
        """Whether the whole path to the end of `node` is a prefix of `tokens`."""
        path: list[Node] = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        offset = 0
        for part in reversed(path):
            if not tokens.startswith(part.key, offset):
                return False
            offset += len(part.key)
        return True

    def accept_backup(self, node: Node, host_pages: PageIds) -> PageIds:
        """Record that a backup of the run that ended at `node` has arrived in `host_pages`.

        Returns the pages the tree did not take because their prefix is not on L2; the caller frees them.
        """
        unused: list[PageIds] = []
        done = 0
        for part in reversed(list(self.span(node, len(host_pages)))):
            begin, done = done, done + len(part.key) // self._page_bytes
            part.backup_pending = False
            run = host_pages[begin:done]
            if part.parent is not None and part.host is None and self._on_host(part.parent):
                self.set_host(part, run.copy())
            else:
                unused.append(run)
        return np.concatenate(unused) if unused else NO_PAGES

    def roots(self) -> list[Node]:
        """The roots, one per seed in use."""
        return list(self._roots.values())

    # Inside

    def _root(self, seed: bytes) -> Node:
        """The root of a seed. A new one enters the tree with its first child, so that lookups leave nothing behind."""
        root = self._roots.get(seed)
        if root is None:
            root = self._new_node(None, b"")
            root.page_keys = seed
        return root

    def _new_node(self, parent: Node | None, key: bytes) -> Node:
        self._next_id += 1
        if parent is not None:
            self.node_count += 1
        return Node(self._next_id, parent, key, self._clock)

    def _walk(self, root: Node, tokens: bytes) -> list[Node]:
        """Root and matched nodes down to where `tokens` leaves the tree; a node it leaves halfway is split there."""
        self._clock = now = self._clock + 1
        page_bytes = self._page_bytes
        end = len(tokens) - len(tokens) % page_bytes
        path = [root]
        children, offset = root.children, 0
        starts_with, append = tokens.startswith, path.append
        while offset < end:
            child = children.get(tokens[offset : offset + page_bytes])
            if child is None:
                break
            run = child.key
            # Runs are whole pages, so one that is found in `tokens` here does not reach beyond `end`.
            if not starts_with(run, offset):
                self._split(child, self._common_pages(run, tokens, offset, end))
                child = child.parent or root
                child.last_access = now
                append(child)
                break
            child.last_access = now
            append(child)
            offset += len(run)
            children = child.children
        return path

    def _common_pages(self, run: bytes, tokens: bytes, offset: int, end: int) -> int:
        """How many whole pages `run` shares with `tokens[offset:end]`. The first page is known to be shared."""
        page_bytes = self._page_bytes
        low, high = 1, min(len(run), end - offset) // page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(run[: middle * page_bytes], offset):
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, tail: Node, pages: int) -> None:
        """Make the first `pages` pages of `tail` a node of their own, its new parent. Everything held is divided."""
        parent = tail.parent
        if parent is None:
            raise InvariantError("split: a root has no pages")
        cut = pages * self._page_bytes
        head = self._new_node(parent, tail.key[:cut])
        head.last_access = tail.last_access
        head.lock_ref, head.host_ref = tail.lock_ref, tail.host_ref
        head.backup_pending, head.stored = tail.backup_pending, tail.stored
        if tail.device is not None:
            head.device, tail.device = tail.device[:pages].copy(), tail.device[pages:].copy()
            head.device_children = 1
        if tail.host is not None:
            head.host, tail.host = tail.host[:pages].copy(), tail.host[pages:].copy()
        if tail.page_keys is not None:
            key_cut = pages * PAGE_KEY_BYTES
            head.page_keys, tail.page_keys = tail.page_keys[:key_cut], tail.page_keys[key_cut:]
        parent.children[head.key[: self._page_bytes]] = head
        tail.key = tail.key[cut:]
        tail.parent = head
        head.children[tail.key[: self._page_bytes]] = tail

    def _add_child(self, parent: Node, key: bytes) -> Node:
        if parent.parent is None and parent.page_keys is not None:
            self._roots[parent.page_keys] = parent
        node = self._new_node(parent, key)
        parent.children[key[: self._page_bytes]] = node
        return node

    def _on_host(self, node: Node) -> bool:
        return node.host is not None or node.parent is None

    def _may_gain_host(self, node: Node) -> bool:
        # A pending backup brings host pages of its own.
        return not node.backup_pending and node.parent is not None and self._on_host(node.parent)

    def _leave_device(self, node: Node) -> None:
        parent = node.parent
        if node.device is None or parent is None:
            raise InvariantError(f"not on L1: {node!r}")
        self.device_evictable_pages -= len(node.device)
        node.device = None
        self._count_host(node, +1)
        parent.device_children -= 1
        if node.host is None:
            self._remove(node)
        else:
            self._offer(node)
            self._offer(parent)

    def _leave_host(self, node: Node) -> None:
        if node.host is None:
            raise InvariantError(f"not on L2: {node!r}")
        self.host_pages -= len(node.host)
        self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        if parent is None or node.children:
            raise InvariantError(f"cannot remove {node!r}: it is a root or has children")
        del parent.children[node.key[: self._page_bytes]]
        self._count_host(node, -1)
        node.host = None
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
            if not node.in_device_queue and node.device_children == 0:
                node.in_device_queue = True
                self._device_queue.push(node)
        elif not node.in_host_queue and may_leave_host(node):
            node.in_host_queue = True
            self._host_queue.push(node)

    def queues(self) -> tuple[EvictionQueue, EvictionQueue]:
        """The L1 and L2 eviction queues, for `check_tree`."""
        return self._device_queue, self._host_queue


def _forget_device(node: Node) -> None:
    node.in_device_queue = False


def _forget_host(node: Node) -> None:
    node.in_host_queue = False

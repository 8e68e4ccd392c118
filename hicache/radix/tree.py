"""The radix tree over pages: which prefixes are cached, on which tier, and what leaves next.

The tree decides and moves no byte: it takes page ids, hands page ids back to be freed, and never sees a stream, a
thread or a socket. It belongs to the scheduler thread, so there is no lock.

Invariants, verified by `check_tree`:
1. Prefix closure: a node on L1 has its parent on L1, a node on L2 has its parent on L2 (roots count as both).
2. A node is on L1 or on L2, else it is removed. No page id is held by two nodes.
3. `lock_ref`, `host_ref` and `pin_ref` of a parent are at least those of each child. A locked node leaves no tier, a
   held one does not leave L2, a pinned one does not leave the tree.
4. Each node that may leave a tier has one valid entry in that tier's eviction queue, and no node has two.
5. The page counts are the sums over the nodes.

There is one root per seed (`extra_key`, `cache_salt`), so equal tokens under two seeds never share a node. Tokens are
compared as bytes: a page is a slice and a dictionary key, and a run compares at the speed of memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arguments import instance
from ..errors import InvalidInput, InvariantError
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES, RadixKey
from ..policies import EvictionPolicy
from ..types import NO_PAGES, PageIds
from .node import Node
from .observer import TreeObserver
from .residency import Residency

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


class Peek(NamedTuple):
    """What a match would find, in pages: on L1, and behind them on L2 only."""

    device_pages: int
    host_pages: int


class Inserted(NamedTuple):
    """What an insert did. The first `present_pages` pages that were given were on L1 already: they are duplicates."""

    node: Node
    present_pages: int


class InsertedHost(NamedTuple):
    """What an insert of L2 pages did: the deepest node of the path, and the pages that the tree did not take."""

    node: Node
    unused: PageIds


class RadixTree(Residency):
    """See the module's docstring.

    `run_pages_max` bounds a node, and with it every operation on one: a long prompt becomes a chain of nodes, whose
    backup and load fit into bounded queues piece by piece.
    """

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy,
        *,
        run_pages_max: int = RUN_PAGES_MAX,
        position_bytes: int = TOKEN_BYTES,
        observer: TreeObserver | None = None,
    ) -> None:
        super().__init__(page_size, position_bytes, policy, observer)
        self._run_pages_max = run_pages_max
        self._reorders = policy.falls_on_use

    def match(self, key: RadixKey) -> Match:
        """The longest cached prefix in whole pages. Marks it as used; splits a node if the match ends inside it.

        Raises InvalidInput, as all lookups and insertions do, where `require_fitting` does.
        """
        path = self._walk(key)
        # Prefix closure: a tier holds the path down to some node, and nothing below it.
        device_runs = [node.device for node in path if node.device is not None]
        host_runs = [node.host for node in path if node.host is not None]
        device_node, host_node = path[len(device_runs)], path[len(host_runs)]
        device_pages = _joined(device_runs)
        host_hit = sum(map(len, host_runs[len(device_runs) :]))
        return Match(path[-1], device_node, host_node, device_pages, host_hit, len(device_pages) + host_hit)

    def peek(self, key: RadixKey) -> Peek:
        """What `match` would find. Changes nothing: no node is marked or split."""
        self.require_fitting(key)
        tokens, page_bytes = key.tokens, self.page_bytes
        end = len(tokens) - len(tokens) % page_bytes
        root = self._roots.get(key.seed)
        device_pages = host_pages = offset = 0
        children = {} if root is None else root.children
        while offset < end and (child := children.get(tokens[offset : offset + page_bytes])) is not None:
            whole = tokens.startswith(child.key, offset)
            count = self.pages(child) if whole else self._common_pages(child.key, tokens, offset, end)
            if child.device is not None:
                device_pages += count
            else:
                host_pages += count
            if not whole:
                break
            offset += len(child.key)
            children = child.children
        return Peek(device_pages, host_pages)

    def use(self, node: Node, priority: int = 0) -> None:
        """Count a request that reuses the path to `node`, and raise the path's priority to at least `priority`."""
        while node.parent is not None:
            node.hit_count += 1
            node.priority = max(node.priority, priority)
            node = node.parent

    def insert(
        self,
        key: RadixKey,
        device_pages: PageIds,
        *,
        priority: int = 0,
        below: Node | None = None,
        start_page: int = 0,
    ) -> Inserted:
        """Add the whole pages of `key` from `start_page` on, with the L1 pages that hold them.

        Runs that were only on L2 come back to L1 with the given pages; what was on L1 stays as it is. The tree takes
        over `device_pages[present_pages:]`. What is there already counts one more request and gets at least `priority`.
        Raises InvalidInput, and changes nothing, if the page counts differ. REQUIRES: the path to `below`, if given, is
        the first `start_page` pages of `key`, and on L1; else `start_page` is 0.
        """
        self.require_fitting(key)
        pages = key.pages(self.page_size) - start_page
        if len(device_pages) != pages:
            raise InvalidInput(f"insert: {len(device_pages)} pages for {pages} pages of tokens")
        path = self._walk(key, below, start_page * self.page_bytes)
        node = path[0]
        present = done = 0
        for node in path[1:]:
            count = len(node.key) // self.page_bytes
            node.hit_count += 1
            node.priority = max(node.priority, priority)
            if node.device is None:
                self.set_device(node, device_pages[done : done + count].copy())
            else:
                present += count
            done += count
        while done < pages:
            end = min(done + self._run_pages_max, pages)
            run = key.tokens[(start_page + done) * self.page_bytes : (start_page + end) * self.page_bytes]
            node = self._add_child(node, run, priority)
            self.set_device(node, device_pages[done:end].copy())
            done = end
        return Inserted(node, present)

    def insert_host(
        self, key: RadixKey, start_page: int, host_pages: PageIds, keys: list[bytes] | None = None
    ) -> InsertedHost:
        """Add L2 pages: `host_pages[i]` holds page `start_page + i` of `key`.

        `keys` are their page keys if they were read from storage: a new run counts no request yet. Without, a request
        has just computed them. Pages that the tree does not take (it has them, or their prefix is no longer on L2) are
        the caller's to free. REQUIRES: the pages are complete and verified.
        """
        tokens = key.tokens[: (start_page + len(host_pages)) * self.page_bytes]
        path = self._walk(RadixKey(tokens, key.seed, key.position_bytes))
        node = path[0]
        unused: list[PageIds] = []
        done = -start_page  # pages of `host_pages` that the path covers so far; negative before the first of them
        for node in path[1:]:
            begin, done = done, done + len(node.key) // self.page_bytes
            run = host_pages[max(begin, 0) : max(done, 0)]
            if begin >= 0 and node.host is None and self._may_gain_host(node):
                self._gain_host(node, run, None if keys is None else keys[begin:done])
            else:
                unused.append(run)
        takes = done >= 0 and _on_host(node)
        while takes and done < len(host_pages):
            end = min(done + self._run_pages_max, len(host_pages))
            node = self._add_child(
                node, tokens[(start_page + done) * self.page_bytes : (start_page + end) * self.page_bytes]
            )
            node.hit_count = 0 if keys is not None else 1
            self._gain_host(node, host_pages[done:end], None if keys is None else keys[done:end])
            done = end
        unused.append(host_pages[max(done, 0) :])
        return InsertedHost(node, np.concatenate(unused))

    def accept_backup(self, node: Node, host_pages: PageIds) -> PageIds:
        """Record that a backup of the run that ended at `node` has arrived in `host_pages`.

        Returns the pages the tree did not take because their prefix is not on L2; the caller frees them.
        """
        unused: list[PageIds] = []
        done = 0
        for part in reversed(list(self.span(node, len(host_pages)))):
            begin, done = done, done + len(part.key) // self.page_bytes
            part.backup_pending = False
            run = host_pages[begin:done]
            if part.parent is not None and part.host is None and _on_host(part.parent):
                self.set_host(part, run.copy())
            else:
                unused.append(run)
        return np.concatenate(unused) if unused else NO_PAGES

    def awaits_load(self, key: RadixKey, below: Node, start_page: int) -> bool:
        """Whether one of the nodes that `insert` would find behind `below` is still being loaded. Changes nothing."""
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
        """The L1 pages from the start of the prompt to the end of `node`. REQUIRES: `node` is on L1."""
        runs: list[PageIds] = []
        while node.parent is not None:
            if node.device is None:
                raise InvariantError(f"not on L1: {node!r}")
            runs.append(node.device)
            node = node.parent
        return _joined(runs[::-1])

    def require_fitting(self, key: RadixKey) -> None:
        """Raises InvalidInput unless `key` is a key of the kind that this tree has: plain, bigram or given."""
        if instance("key", key, RadixKey).position_bytes == self.position_bytes:
            return
        if key.is_given:
            hint = "this cache hashes tokens: use a cache that takes given page keys, or `RadixKey.of`"
        elif self.position_bytes == PAGE_KEY_BYTES:
            hint = "this cache takes given page keys: use `RadixKey.of_hashes`"
        else:
            hint = "bigram and plain keys do not mix"
        raise InvalidInput(
            f"radix key: {key.position_bytes} bytes a position, the tree has {self.position_bytes}; {hint}"
        )

    # Inside

    def _root(self, seed: bytes) -> Node:
        """The root of a seed. A new one enters the tree with its first child, so that lookups leave nothing behind."""
        root = self._roots.get(seed)
        if root is None:
            root = self._new_node(None, b"")
            root.page_keys = seed
        return root

    def _walk(self, key: RadixKey, node: Node | None = None, offset: int = 0) -> list[Node]:
        """Root and matched nodes down to where `key` leaves the tree; a node it leaves halfway is split there.

        Begins at `node`, if given, behind the first `offset` bytes of `key`; what is above counts as used all the same.
        """
        self.require_fitting(key)
        self._clock = now = self._clock + 1
        tokens, page_bytes = key.tokens, self.page_bytes
        end = len(tokens) - len(tokens) % page_bytes
        if node is None or node.parent is None:
            node = self._root(key.seed)  # a root that was empty when it was asked for may have been replaced since
        above: Node | None = node
        while above is not None:
            above.last_access = now
            above = above.parent
        path = [node]
        starts_with, append = tokens.startswith, path.append
        while offset < end:
            child = node.recent_child
            # Most prompts follow the one before them, so the look-up by page is mostly saved. A child whose whole run
            # is in `tokens` here is the right one, because siblings differ in their first page; and it does not reach
            # beyond `end`, because runs are whole pages.
            if child is None or not starts_with(child.key, offset):
                child = node.children.get(tokens[offset : offset + page_bytes])
                if child is None:
                    break
                if not starts_with(child.key, offset):
                    child = self.split(child, self._common_pages(child.key, tokens, offset, end))
                node.recent_child = child
            child.last_access = now
            append(child)
            offset += len(child.key)
            node = child
        if self._reorders:
            self._reorder(path)
        return path

    def _common_pages(self, run: bytes, tokens: bytes, offset: int, end: int) -> int:
        """How many whole pages `run` shares with `tokens[offset:end]`. The first page is known to be shared."""
        page_bytes = self.page_bytes
        low, high = 1, min(len(run), end - offset) // page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(run[: middle * page_bytes], offset):
                low = middle
            else:
                high = middle - 1
        return low

    def _gain_host(self, node: Node, host_pages: PageIds, keys: list[bytes] | None) -> None:
        """Record that `node` is on L2, and with `keys` that it came from storage."""
        if keys is not None:
            node.page_keys = b"".join(keys)
            node.stored = True
        self.set_host(node, host_pages.copy())

    def _may_gain_host(self, node: Node) -> bool:
        # A pending backup brings host pages of its own.
        return not node.backup_pending and node.parent is not None and _on_host(node.parent)


def _joined(runs: list[PageIds]) -> PageIds:
    """The runs as one array. Joining bytes takes half the time of `np.concatenate`."""
    if len(runs) > 1:
        return np.frombuffer(b"".join(runs), dtype=np.int32)  # type: ignore[arg-type]  # an array is a buffer
    return runs[0] if runs else NO_PAGES


def _on_host(node: Node) -> bool:
    return node.host is not None or node.parent is None

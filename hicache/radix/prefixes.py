"""The structure of the radix tree: find, add, split and remove runs of pages, and compute their page keys.

Tokens are compared as bytes: a page is a slice and a dictionary key, and a run is compared at memory speed. There is
one root per seed (`extra_key`, `cache_salt`), so equal tokens under two seeds never share a node. Nothing here reads or
changes the tiers of a run: those are the subject of `RadixTree`, which extends this class. The index of stored runs and
the observers need only this part. Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ..arguments import instance
from ..errors import InvalidInput, InvariantError
from ..events.types import Medium
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES, PageChain, RadixKey, common_pages, key_page_bytes, page_keys, split_keys
from ..lazy import untrack
from .node import NO_CHILDREN, Node, UseHistory


class _Roots(dict[bytes, Node]):
    """The roots of a tree, by seed. Their end breaks the cycles of parents and children. The collector does not visit
    them, so they end with the tree, after all finalizers, which may need it."""

    __slots__ = ()

    def nodes(self) -> Iterator[Node]:
        stack = list(self.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def __del__(self) -> None:
        for node in self.nodes() if untrack is not id else ():
            node.parent = node.hint = None


class PrefixTree:
    """Nodes below one root per seed.

    Invariants, verified by `check_tree`: a node is filed at its parent under its first page. Its run has 1 to
    `run_pages_max` whole pages and, if its page keys are known, one key for each. `node_count` counts the nodes without
    the roots.

    `page_size` is in tokens or bigrams. `position_bytes` is the kind of the keys (see `RadixKey`), `page_bytes` the key
    bytes of one page. If the engine passes the page keys, a node's key and its page keys are the same bytes. An
    `observer` is notified of pages that a medium gains and loses.

    With the native helper, the garbage collector visits neither the nodes nor the collections that hold many of them: a
    full collection of a million nodes would stop the scheduler for half a second. So reference counts must free a node
    that is removed, and a node must not refer to anything that refers to the tree. See `_Roots` for the others.
    """

    def __init__(
        self, page_size: int, position_bytes: int, run_pages_max: int, observer: TreeObserver | None = None
    ) -> None:
        self.page_size = page_size
        self.position_bytes = position_bytes
        self.page_bytes = key_page_bytes(page_size, position_bytes)
        self.run_pages_max = run_pages_max
        self.observer = observer
        self.node_count = 0
        self._roots = _Roots()
        self.tick = 0  # of the last use
        self._next_id = 0

    def roots(self) -> list[Node]:
        """Return the roots, one per seed in use."""
        return list(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes except for the roots, parents first."""
        return self._roots.nodes()

    def pages(self, node: Node) -> int:
        """Return the number of pages of the node's run."""
        return len(node.key) // self.page_bytes

    def span(self, node: Node, pages: int) -> Iterator[Node]:
        """Iterate over the nodes that hold the last `pages` pages up to the end of `node`, deepest first.

        So an operation finds all parts of its node after any number of splits.
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
        """Return the storage keys of the node's pages. The first call computes them, also for the ancestors."""
        missing = []
        part = node
        while part.page_keys is None and part.parent is not None:
            missing.append(part)
            part = part.parent
        for part in reversed(missing):
            if part.chain is not None:
                part.page_keys = b"".join(part.chain.keys()[-self.pages(part) :])
            else:
                prior = self.last_key(part.parent)
                part.page_keys = b"".join(page_keys(part.key, self.page_bytes // TOKEN_BYTES, prior))
        return split_keys(node.page_keys or b"")

    def run_keys(self, node: Node) -> bytes | PageChain:
        """Return the page keys of `node`, 32 bytes each, without hashing. If they are unknown, return a chain that ends
        with them; the node keeps the chain until the keys are known."""
        chain = node.chain
        if node.page_keys is None:
            if chain is None:
                node.chain = chain = PageChain(node.key, self.page_bytes // TOKEN_BYTES, self.prior_of(node))
            if chain.hashed is None:
                return chain
            node.page_keys = b"".join(chain.hashed[-self.pages(node) :])
        if chain is not None and not node.store_pending:
            node.chain = None
        return node.page_keys

    def prior_of(self, node: Node) -> bytes | PageChain:
        """Return the prior from which the keys of `node` are chained. Hashes nothing."""
        return b"" if node.parent is None else self.prior(node.parent)

    def last_key(self, node: Node | None) -> bytes:
        """Return the key from which the next page after `node` is chained: its last page key, or the seed of a root."""
        if node is None:
            return b""
        if node.page_keys is None:
            self.page_keys(node)
        return (node.page_keys or b"")[-PAGE_KEY_BYTES:]

    def prior(self, node: Node) -> bytes | PageChain:
        """Return `last_key` without hashing: if the key is unknown, a chain that ends with it."""
        unknown: list[Node] = []
        while node.page_keys is None and node.chain is None and node.parent is not None:
            unknown.append(node)
            node = node.parent
        prior = node.chain if node.page_keys is None and node.chain is not None else self.last_key(node)
        for part in reversed(unknown):
            prior = PageChain(part.key, self.page_bytes // TOKEN_BYTES, prior)
        return prior

    def head(self, key: RadixKey, pages: int) -> RadixKey:
        """Return the key of the first `pages` pages."""
        return key.head(pages * self.page_bytes // key.position_bytes)

    def require_fitting(self, key: RadixKey) -> None:
        """Raise InvalidInput unless `key` is of this tree's kind: tokens, bigrams or page keys."""
        if instance("key", key, RadixKey).position_bytes == self.position_bytes:
            return
        if key.is_given:
            hint = "this cache hashes tokens: use a cache of page keys, or `RadixKey.of`"
        elif self.position_bytes == PAGE_KEY_BYTES:
            hint = "this cache takes page keys: use `RadixKey.of_hashes`"
        else:
            hint = "bigram and plain keys do not mix"
        raise InvalidInput(
            f"radix key: {key.position_bytes} bytes per position, the tree has {self.position_bytes}; {hint}"
        )

    def _root(self, seed: bytes) -> Node:
        """Return the root of a seed. A new root enters the tree only with its first child, so lookups add nothing."""
        root = self._roots.get(seed)
        if root is None:
            root = self._new_node(None, b"")
            root.page_keys = seed
        return root

    def _walk(
        self, key: RadixKey, node: Node | None = None, offset: int = 0, *, marks: bool = True
    ) -> list[Node]:
        """Return the root and the matched nodes. If the match ends inside a node, split that node there.

        The walk begins at `node`, if any, after the first `offset` bytes of `key`. All nodes of the path and above
        `node` are marked as used, unless it `marks` nothing.
        """
        self.require_fitting(key)
        tokens, page_bytes = key.tokens, self.page_bytes
        end = len(tokens) - len(tokens) % page_bytes
        if node is None or node.parent is None:
            node = self._root(key.seed)  # the caller's root, if it was empty, may have been replaced since
        path = [node]
        starts_with, append = tokens.startswith, path.append
        while offset < end:
            child = node.recent_child
            # Most prompts follow the same path as the previous one, so this mostly saves the lookup by page. A child
            # whose whole run matches `tokens` here is the right one, because siblings differ in their first page. It
            # does not reach beyond `end`, because runs are whole pages.
            if child is None or not starts_with(child.key, offset):
                child = node.children.get(tokens[offset : offset + page_bytes])
                if child is None:
                    break
                if not starts_with(child.key, offset):
                    child = self.split(child, common_pages(child.key, tokens, offset, page_bytes))
                node.recent_child = child
            append(child)
            offset += len(child.key)
            node = child
        if marks:
            self.tick = now = self.tick + 1
            above: Node | None = path[0].parent
            while above is not None:
                above.last_access = now
                above = above.parent
            for part in path:
                part.last_access = now
        return path

    def _new_node(self, parent: Node | None, key: bytes, priority: int = 0) -> Node:
        self._next_id += 1
        node = Node(self._next_id, parent, key, self.tick, self.tick, NO_CHILDREN, priority)
        untrack(node)
        if parent is not None:
            self.node_count += 1
            if self.position_bytes == PAGE_KEY_BYTES:
                node.page_keys = key
        return node

    def _add_child(self, parent: Node, key: bytes, priority: int = 0) -> Node:
        if parent.parent is None and parent.page_keys is not None:
            self._roots[parent.page_keys] = parent
            untrack(self._roots)
        node = self._new_node(parent, key, priority)
        self._file(parent, node)
        return node

    def _add_runs(
        self, parent: Node, key: RadixKey, start_page: int, end_page: int, uses: UseHistory, priority: int = 0
    ) -> Iterator[tuple[Node, int, int]]:
        """Add the pages of `key` from `start_page` to `end_page` as a chain below `parent`. Yield each new node with
        its first and end page; the node is not on any tier yet."""
        while start_page < end_page:
            hits, end = uses.of_run(start_page, min(start_page + self.run_pages_max, end_page))
            parent = self._add_child(parent, key.tokens[start_page * self.page_bytes : end * self.page_bytes], priority)
            parent.hit_count = hits
            yield parent, start_page, end
            start_page = end

    def _file(self, parent: Node, child: Node) -> None:
        """Add `child` to the children of `parent`, replacing a node with the same first page."""
        if parent.children is NO_CHILDREN:
            parent.children = {}
        parent.children[child.key[: self.page_bytes]] = child
        parent.recent_child = child
        untrack(parent.children)  # after each entry, which makes a dictionary tracked

    def split(self, tail: Node, pages: int) -> Node:
        """Move the first `pages` pages of `tail` into a new node, the new parent of `tail`, and return that node.

        Tokens, page ids and page keys are divided; locks, holds, pins and operations in flight apply to both nodes.
        REQUIRES: 0 < pages < pages of `tail`.
        """
        parent = tail.parent
        if parent is None:
            raise InvariantError("split: a root has no pages")
        head = self._new_node(parent, tail.key[: pages * self.page_bytes], tail.priority)
        # Assigning to an existing entry keeps its old key object. Delete the entry first, so that a head of one page
        # and its dictionary key are one object.
        del parent.children[tail.key[: self.page_bytes]]
        tail.move_head(head, pages)
        if tail.chain is not None:
            # The chain may begin above `head`, in a previous head of the same run.
            head.chain = tail.chain.head(tail.chain.pages - self.pages(tail))
        self._file(parent, head)
        self._file(head, tail)
        return head

    def _detach(self, node: Node) -> Node:
        """Remove `node` from the tree and return its parent. REQUIRES: `node` has no children."""
        parent = node.parent
        if parent is None or node.children:
            raise InvariantError(f"cannot remove {node!r}: it is a root or has children")
        del parent.children[node.key[: self.page_bytes]]
        if parent.recent_child is node:
            parent.recent_child = None
        if not parent.children:
            parent.children = NO_CHILDREN
            if parent.parent is None and parent.page_keys is not None:
                self._roots.pop(parent.page_keys, None)
        node.hint = None
        self.node_count -= 1
        return parent


class TreeObserver(Protocol):
    """Observes nodes that appear on a medium or leave it. Called on the scheduler thread; must not change the tree.

    A split is not reported, because no page moves.
    """

    def stored(self, medium: Medium, tree: PrefixTree, node: Node) -> None:
        """`node` has just appeared on `medium`. Its parent is in the tree, and on L1 if `medium` is L1."""

    def grown(self, tree: PrefixTree, node: Node, pages: int, prior: bytes | PageChain) -> None:
        """The last `pages` pages of `node` have just appeared on L1, where the node already was. Their page keys are
        chained from `prior`."""

    def removed(self, medium: Medium, tree: PrefixTree, node: Node) -> None:
        """`node` is about to leave `medium`, or storage has lost it. Children leave L1 before their parent."""

    def lost(self, keys: list[bytes]) -> None:
        """Storage lacks the pages `keys`. Each has left the tree or is not the last page of its run."""

    def storage_replaced(self) -> None:
        """All pages stored before are out of reach, including pages that have left the tree."""

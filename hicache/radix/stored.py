"""Track which runs of a tree are in storage, as far as is known.

A run becomes `stored` when its store ends or when it is read from storage. It stops being `stored` when storage is
known to lack one of its pages: the page was evicted, or a read or touch did not find it. Then the whole run counts as
not stored, and the runs below it too, because lookups no longer reach them. The write policy stores such a run again at
its next use.

Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import InvariantError
from ..events.types import Medium
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES, PageChain
from ..lazy import untrack
from .node import Node
from .prefixes import PrefixTree


class StoredPrefixes:
    """The stored runs of `tree`, which owns this index. Tells the tree's observer which pages storage gains and loses.

    Invariant: `_ends` maps last page keys to the stored runs whose page keys were known when they became stored. The
    last page is used because stores evict the tail of a chain first.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._ends: dict[bytes, Node] = {}

    def begin(self, node: Node) -> PageChain:
        """Record that the pages of `node` are being stored. Return their keys, which the storage worker hashes."""
        parent, tree = node.parent, self._tree
        if parent is None:
            raise InvariantError("store: a root has no pages")
        known = None if node.page_keys is None else tree.page_keys(node)
        chain = node.chain  # of an event, which may begin above the node
        if chain is None or known is not None or chain.pages != tree.pages(node):
            chain = node.chain = PageChain(node.key, tree.page_bytes // TOKEN_BYTES, tree.prior(parent), known)
        node.store_pending = True
        return chain

    def end(self, node: Node, chain: PageChain, *, stored: bool) -> None:
        """Record that the store of the run that ends at `node` has ended, and its keys if they are hashed."""
        keys, end = chain.hashed, chain.pages
        for part in self._tree.span(node, chain.pages):
            begin = end - self._tree.pages(part)
            part.store_pending, part.chain = False, None
            if keys is not None and part.page_keys is None:
                part.page_keys = b"".join(keys[begin:end])
            if stored:
                self.add(part)
            end = begin

    def add(self, node: Node) -> None:
        """Record that storage has the pages of `node`."""
        self.mark(node)
        if self._tree.observer is not None:
            self._tree.observer.stored(Medium.STORAGE, self._tree, node)

    def forget(self, keys: Iterable[bytes]) -> int:
        """Record that storage lacks the pages `keys`. Return how many pages count as not stored from now on.

        A run is found by its last page only. Visits only the found runs and the stored runs below them.
        """
        pages, unknown = 0, list[bytes]()
        for key in keys:
            found = self._ends.get(key)
            if found is None:
                unknown.append(key)
                continue
            lost = [found]
            for node in lost:  # parents first
                lost += [child for child in node.children.values() if child.stored]
            for node in reversed(lost):
                pages += self._tree.pages(node)
                node.lost_access, node.loss = node.last_access, "lost"
                self._remove(node)
        if unknown and self._tree.observer is not None:
            self._tree.observer.lost(unknown)
        return pages

    def forget_all(self) -> None:
        """Record that storage has no page of the tree, because another store replaces it. Visits every node."""
        for node in reversed(list(self._tree.nodes())):
            if node.stored:
                self._remove(node)
        if self._tree.observer is not None:
            self._tree.observer.storage_replaced()

    def _remove(self, node: Node) -> None:
        self.unmark(node)
        if self._tree.observer is not None:
            self._tree.observer.removed(Medium.STORAGE, self._tree, node)

    # For the tree, which notifies the observer itself

    def mark(self, node: Node) -> None:
        """Mark `node` as stored and index it, also after a split that has moved its end."""
        node.stored, node.loss = True, ""
        if node.page_keys is not None:
            self._ends[node.page_keys[-PAGE_KEY_BYTES:]] = node
            untrack(self._ends)

    def unmark(self, node: Node) -> None:
        """Mark `node` as not stored, if it was, and remove it from the index."""
        if node.stored and node.page_keys is not None:
            self._ends.pop(node.page_keys[-PAGE_KEY_BYTES:], None)
        node.stored = False

    def ends(self) -> dict[bytes, Node]:
        """Return the runs that `forget` can find, by their last page key; for checks."""
        return dict(self._ends)

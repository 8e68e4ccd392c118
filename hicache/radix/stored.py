"""Track which runs of the tree are in storage, as far as is known.

A run becomes `stored` when its store ends or when it is read from storage. It stops being `stored` when storage is
known to lack one of its pages: the page was evicted, or a read or touch did not find it. Then the whole run counts as
not stored, and the runs below it too, because lookups no longer reach them. The write policy stores such a run again at
its next use.

Invariant: `_stored_ends` maps last page keys to the stored runs whose page keys were known when they became stored.
The last page is used because stores evict the tail of a chain first.

Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from ..errors import InvariantError
from ..events.types import Medium
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES, PageChain
from .node import Node
from .prefixes import PrefixTree
from .results import TreeObserver

if TYPE_CHECKING:
    from .tree import RadixTree


class StoredPrefixes(PrefixTree):
    """See the module's docstring. `observer` is notified of pages that storage gains and loses."""

    def __init__(self, page_size: int, position_bytes: int, run_pages_max: int) -> None:
        super().__init__(page_size, position_bytes, run_pages_max)
        self.observer: TreeObserver | None = None
        self._stored_ends: dict[bytes, Node] = {}

    def begin_store(self, node: Node) -> PageChain:
        """Record that the pages of `node` are being stored. Return their keys, which the storage worker hashes."""
        parent = node.parent
        if parent is None:
            raise InvariantError("store: a root has no pages")
        known = None if node.page_keys is None else self.page_keys(node)
        chain = node.chain  # of an event, which may begin above the node
        if chain is None or known is not None or chain.pages != self.pages(node):
            chain = node.chain = PageChain(node.key, self.page_bytes // TOKEN_BYTES, self.prior(parent), known)
        node.store_pending = True
        return chain

    def end_store(self, node: Node, chain: PageChain, *, stored: bool) -> None:
        """Record that the store of the run that ends at `node` has ended. Its keys are kept if they were hashed."""
        keys, end = chain.hashed, chain.pages
        for part in self.span(node, chain.pages):
            begin = end - self.pages(part)
            part.store_pending, part.chain = False, None
            if keys is not None and part.page_keys is None:
                part.page_keys = b"".join(keys[begin:end])
            if stored:
                self.set_stored(part)
            end = begin

    def set_stored(self, node: Node) -> None:
        """Record that storage has the pages of `node`."""
        self._mark_stored(node)
        if self.observer is not None:
            self.observer.stored(Medium.STORAGE, cast("RadixTree", self), node)

    def forget_stored(self) -> None:
        """Record that storage has no page of the tree, because another store replaces it. Visits every node."""
        for node in reversed(list(self.nodes())):
            if node.stored:
                self._forget(node)
        if self.observer is not None:
            self.observer.storage_replaced()

    def forget_pages(self, keys: Iterable[bytes]) -> int:
        """Record that storage lacks the pages `keys`. Return how many pages count as not stored from now on.

        A run is found by its last page only. Visits only the found runs and the stored runs below them.
        """
        pages, unknown = 0, list[bytes]()
        for key in keys:
            found = self._stored_ends.get(key)
            if found is None:
                unknown.append(key)
                continue
            lost = [found]
            for node in lost:  # parents first
                lost += [child for child in node.children.values() if child.stored]
            for node in reversed(lost):
                pages += self.pages(node)
                self._forget(node)
        if unknown and self.observer is not None:
            self.observer.lost(unknown)
        return pages

    def split(self, tail: Node, pages: int) -> Node:
        """Split as in `PrefixTree`."""
        head = super().split(tail, pages)
        head.touched_s = tail.touched_s
        if head.stored:
            self._mark_stored(head)
        return head

    def _mark_stored(self, node: Node) -> None:
        node.stored = True
        if node.page_keys is not None:
            self._stored_ends[node.page_keys[-PAGE_KEY_BYTES:]] = node

    def _forget(self, node: Node) -> None:
        self._unmark_stored(node)
        if self.observer is not None:
            self.observer.removed(Medium.STORAGE, cast("RadixTree", self), node)

    def _unmark_stored(self, node: Node) -> None:
        if node.stored and node.page_keys is not None:
            self._stored_ends.pop(node.page_keys[-PAGE_KEY_BYTES:], None)
        node.stored = False

    def _detach(self, node: Node) -> Node:
        if node.stored:
            self._unmark_stored(node)
        return super()._detach(node)

    def stored_ends(self) -> dict[bytes, Node]:
        """Return the stored runs that `forget_pages` can find, by their last page key; for checks."""
        return dict(self._stored_ends)

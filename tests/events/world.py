"""A radix tree under random operations whose observer is a recorder, and what an index must then hold."""

from __future__ import annotations

import random

from hicache.cache.recorder import EventRecorder
from hicache.events import EventStream, Medium, PrefixIndex
from hicache.keys import page_keys
from hicache.radix import Node, RadixTree
from hicache.radix.policies import LRUPolicy
from hicache.tiers import PageAllocator
from tests.radix.oracle import Oracle
from tests.radix.test_tree_oracle import Machine

# For each page on a medium, by its key: the key of the page before it, the seed, the tokens.
Pages = dict[bytes, tuple[bytes | None, bytes, bytes]]


class RecordedMachine(Machine):
    """The operations of the tree's oracle test, on a tree that records its events."""

    def __init__(self, page_size: int, random_numbers: random.Random, stream: EventStream) -> None:
        super().__init__(page_size, random_numbers)
        self.recorder = EventRecorder(stream)
        self.tree = RadixTree(page_size, LRUPolicy(), observer=self.recorder)

    def prefetch(self) -> None:
        """Pages from storage arrive behind what is on L2, under their true keys."""
        key = self.prompt()
        found = self.tree.match(key)
        pages = self.pages_of(key)
        missing = len(pages) - found.pages
        ids = self.host.alloc(missing) if missing and found.host_node is found.node else None
        if ids is None:
            return
        keys = page_keys(key.tokens, self.page_size, key.seed)
        assert len(self.tree.insert_host(key, found.pages, ids, keys[found.pages :]).unused) == 0
        for offset, page in enumerate(ids.tolist()):
            self.oracle.host[(key.seed, pages[: found.pages + offset + 1])] = page

    def acknowledge_store(self) -> None:
        """Storage has acknowledged a node on L2."""
        node = self.tree.match(self.prompt()).node
        if node.host is not None and not node.stored:
            node.stored = True
            self.recorder.stored(Medium.STORAGE, self.tree, node)

    def lose_store(self) -> None:
        """Storage turns out not to have a node."""
        node = self.tree.match(self.prompt()).node
        if node.stored:
            self.recorder.removed(Medium.STORAGE, self.tree, node)
            node.stored = False

    def reset(self) -> None:
        """The tree is emptied at once, as for an update of the weights. Rare."""
        if self.random.random() < 0.9:
            return
        self.locks.clear()
        self.oracle = Oracle()
        self.device, self.host = PageAllocator(96, first=1), PageAllocator(160)
        self.tree = RadixTree(self.page_size, LRUPolicy(), observer=self.recorder)
        self.recorder.cleared(self.tree)

    def step(self) -> None:
        """One random operation."""
        operations = [
            self.match, self.insert, self.insert, self.backup, self.load_back, self.prefetch, self.lock, self.unlock,
            self.evict_device, self.evict_host, self.acknowledge_store, self.lose_store, self.reset,
        ]  # fmt: skip
        self.random.choice(operations)()
        self.check()


def pages_of_tree(tree: RadixTree) -> dict[Medium, Pages]:
    """What is where, straight from the nodes, with keys hashed anew."""
    found: dict[Medium, Pages] = {medium: {} for medium in Medium}
    for root in tree.roots():
        assert root.page_keys is not None
        _add_pages_below(root, None, root.page_keys, tree.page_size, found)
    return found


def _add_pages_below(node: Node, parent: bytes | None, seed: bytes, page_size: int, found: dict[Medium, Pages]) -> None:
    for child in node.children.values():
        keys = page_keys(child.key, page_size, seed if parent is None else parent)
        page_bytes = len(child.key) // len(keys)
        before = parent
        for number, key in enumerate(keys):
            tokens = child.key[number * page_bytes : (number + 1) * page_bytes]
            page = (before, seed if before is None else b"", tokens)
            for medium, is_there in (
                (Medium.DEVICE, child.device is not None),
                (Medium.HOST, child.host is not None),
                (Medium.STORAGE, child.stored),
            ):
                if is_there:
                    found[medium][key] = page
            before = key
        _add_pages_below(child, keys[-1], seed, page_size, found)


def pages_of_index(index: PrefixIndex) -> dict[Medium, Pages]:
    """The same, from an index."""
    return {
        medium: {key: (index.parent(key), index.seed(key), index.tokens(key)) for key in index.keys(medium)}
        for medium in Medium
    }

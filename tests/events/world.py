"""A radix tree under random operations that records its events, and the expected contents of an index."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

from hicache.cache.recorder import EventRecorder
from hicache.errors import InvariantError
from hicache.events import Event, EventStream, Medium, PrefixIndex, Stored
from hicache.keys import TOKEN_BYTES, page_keys
from hicache.radix import Node, RadixTree
from tests.radix.machine import Machine

# For each page on a medium, by its key: the key of the page before it, the seed, the tokens.
Pages = dict[bytes, tuple[bytes | None, bytes, bytes]]


class DescribedIndex(PrefixIndex):
    """An index that also keeps what the events say of each page, and checks it: the parent of a page on the device is
    there, of one on the host there or on the device, and a key is the hash of its parent's (or the seed) and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.described: Pages = {}

    def apply(self, events: Iterable[Event]) -> None:
        """Do as the base class, and remember the pages."""
        events = tuple(events)
        for event in events:
            for number in range(len(event.keys) if isinstance(event, Stored) else 0):
                assert isinstance(event, Stored)
                page = event.part(number, number + 1)
                self.described.setdefault(page.keys[0], (page.parent, page.seed, page.tokens))
        super().apply(events)

    def check(self) -> None:
        """Do as the base class, and check the pages."""
        super().check()
        device, host = self.keys(Medium.DEVICE), self.keys(Medium.HOST)
        either = device | host
        for key in either | self.keys(Medium.STORAGE):
            parent, seed, tokens = self.described[key]
            near = device if key in device else either if key in host else None
            if parent is not None and near is not None and parent not in near:
                raise InvariantError("described index: a page is on a medium but its parent is not")
            if tokens and hashlib.sha256((seed if parent is None else parent) + tokens).digest() != key:
                raise InvariantError("described index: a key is not the hash of its tokens")


class Recorder(EventRecorder):
    """A recorder that remembers lost pages, also those that the tree did not mark as stored."""

    def __init__(self, stream: EventStream, **options: float) -> None:
        super().__init__(stream, **options)
        self.gone: set[bytes] = set()

    def lost(self, keys: list[bytes]) -> None:
        """Remember the keys, then record the loss."""
        self.gone.update(keys)
        super().lost(keys)


class RecordedMachine(Machine):
    """The operations of the tree's oracle test, on a tree that records its events."""

    def __init__(self, page_size: int, random_numbers: random.Random, stream: EventStream, **options: float) -> None:
        self.recorder = Recorder(stream, **options)
        self.storage: Pages = {}  # pages reported as stored and not reported as lost
        super().__init__(page_size, random_numbers, scale=4, observer=self.recorder, position_bytes=TOKEN_BYTES)

    def acknowledge_store(self) -> None:
        """Do as the base class, but always hash the keys, so that the loss of a page is a loss of the run."""
        node = self.tree.match(self.prompt()).node
        if node.host is not None and not node.stored:
            self.tree.page_keys(node)
            self.tree.stored.add(node)
            self.set_stored(node, True)

    def lose_page(self) -> None:
        """Do as the base class, or lose a page that has left the tree."""
        before = pages_of_tree(self.tree)[Medium.STORAGE]
        outside = sorted(self.storage.keys() - before.keys())
        if outside and self.random.random() < 0.3:
            self.tree.stored.forget([self.random.choice(outside)])
        else:
            super().lose_page()
        for key in {*self.recorder.gone, *before.keys() - pages_of_tree(self.tree)[Medium.STORAGE].keys()}:
            self.storage.pop(key, None)
        self.recorder.gone.clear()

    def reset(self) -> None:
        """Empty the tree at once, as an update of the weights does. Does nothing in most calls."""
        if self.random.random() < 0.9:
            return
        self.restart()
        self.recorder.cleared()
        self.storage.clear()

    def step(self) -> None:
        """Run one random operation and the checks."""
        operations = [
            self.match, self.insert, self.insert, self.backup, self.finish_copy, self.load_back, self.prefetch,
            self.finish_prefetch, self.lock, self.unlock, self.evict_device, self.evict_host, self.acknowledge_store,
            self.lose_page, self.reset,
        ]
        self.random.choice(operations)()
        self.check()
        self.storage |= pages_of_tree(self.tree)[Medium.STORAGE]

    def told(self) -> dict[Medium, Pages]:
        """Return the expected contents of an index that has missed no event."""
        return pages_of_tree(self.tree) | {Medium.STORAGE: self.storage}

    def is_known(self, index: PrefixIndex) -> bool:
        """True if an index that began with a snapshot is correct. It may lack pages that are only on storage."""
        assert isinstance(index, DescribedIndex)
        found, tree = pages_of_index(index), pages_of_tree(self.tree)
        stored = found.pop(Medium.STORAGE).items()
        return tree.pop(Medium.STORAGE).items() <= stored <= self.storage.items() and found == tree


def pages_of_tree(tree: RadixTree) -> dict[Medium, Pages]:
    """Return the pages on each medium, from the nodes of the tree, with newly hashed keys."""
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


def pages_of_index(index: DescribedIndex) -> dict[Medium, Pages]:
    """Return the pages on each medium, from an index."""
    return {medium: {key: index.described[key] for key in index.keys(medium)} for medium in Medium}

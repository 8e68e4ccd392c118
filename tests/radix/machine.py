"""Random operations on a tree and on the oracle, compared after each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hicache.keys import BIGRAM_BYTES, PAGE_KEY_BYTES, TOKEN_BYTES, RadixKey, page_keys, token_bytes
from hicache.radix import (
    CUT_PAGES_MIN,
    POLICIES,
    RUN_PAGES_MAX,
    EvictionChoice,
    Node,
    RadixTree,
    TreeObserver,
    check_tree,
    make_policy,
    may_leave_device,
)
from hicache.tiers import PageAllocator
from hicache.types import PageIds
from tests.radix.oracle import Oracle, Page, Pages

SEEDS_OF_KEYS = (b"", bytes(31) + b"\x01")
# A victim is split unless a piece would be too small, so an eviction frees at most this many pages more than needed.
EXCESS_PAGES_MAX = 2 * CUT_PAGES_MIN - 1


class Reference(NamedTuple):
    """A user of `node`, and so of all pages of its path."""

    node: Node
    path: list[Page]


@dataclass(eq=False)
class Copy:
    """A copy to L2 in flight; `pages` are those of the path that belong to the node."""

    of: Reference
    pages: list[Page]
    host_pages: PageIds
    evicts: bool


@dataclass(eq=False)
class Arrival:
    """Pages in flight from storage, after `anchor`."""

    key: RadixKey
    start: int
    host_pages: PageIds
    anchor: Reference


@dataclass
class Requests:
    """The users of nodes, so that each use can be undone."""

    locks: list[Reference] = field(default_factory=list)
    holds: list[Reference] = field(default_factory=list)
    pins: list[Reference] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)


def image(tree: RadixTree) -> list[object]:
    """Return the whole state of each node, to compare trees before and after a call."""
    fields = sorted(set(Node.__slots__) - {"children", "parent", "recent_child", "device_entry", "host_entry"})
    values = ([node.parent and node.parent.id, *(getattr(node, name) for name in fields)] for node in tree.nodes())
    return [[part.tolist() if isinstance(part, np.ndarray) else part for part in node] for node in values]


class Machine:
    """See the module's docstring. Policy, form of keys and length of runs are random, unless they are given.

    `scale` multiplies the size of pools and prompts; small ones are the fastest to check.
    """

    def __init__(
        self,
        page_size: int,
        numbers: random.Random,
        *,
        scale: int = 1,
        observer: TreeObserver | None = None,
        position_bytes: int | None = None,
    ) -> None:
        self.random = numbers
        self.page_size = page_size
        self.scale = scale
        self.observer = observer
        self.grown = 0  # nodes to which an insertion appended pages
        self.position_bytes = position_bytes or numbers.choice([TOKEN_BYTES, BIGRAM_BYTES, PAGE_KEY_BYTES])
        self.long = numbers.random() < 0.1  # runs that eviction splits
        self.policy = numbers.choice(list(POLICIES))
        self.run_pages_max = RUN_PAGES_MAX if self.long else numbers.choice([4, RUN_PAGES_MAX])
        self.page_tokens = page_tokens = page_size * (2 if self.position_bytes == BIGRAM_BYTES else 1)
        self.contents = [token_bytes([7 * page + i % 2 for i in range(page_tokens)]) for page in range(3)]
        self.restart()

    def restart(self) -> None:
        """Start with an empty tree, empty pools and no users."""
        scale = 6 if self.long else self.scale
        self.tree = RadixTree(
            self.page_size, make_policy(self.policy), run_pages_max=self.run_pages_max,
            position_bytes=self.position_bytes, observer=self.observer,
        )
        self.oracle = Oracle()
        self.device = PageAllocator(24 * scale, first=1)
        self.host = PageAllocator(36 * scale)
        self.who = Requests()

    def prompt(self) -> RadixKey:
        """Return a prompt of few different pages, so that prefixes collide; sometimes with a partial page at the end.
        """
        pages = self.random.choices(range(3), (6, 3, 1), k=self.random.randint(1, 10 * self.scale))
        if self.long and self.random.random() < 0.8:
            pages = pages[:1] * 40 + pages[:5]
        tokens = b"".join(self.contents[page] for page in pages)
        seed = self.random.choice(SEEDS_OF_KEYS)
        if self.position_bytes == PAGE_KEY_BYTES:
            return RadixKey.of_hashes(page_keys(tokens, self.page_tokens, seed))
        tail = self.contents[0][: self.random.randrange(self.page_size) * self.position_bytes]
        return RadixKey(tokens + tail, seed, self.position_bytes)

    def pages_of(self, key: RadixKey) -> Pages:
        size = self.tree.page_bytes
        return tuple(key.tokens[i : i + size] for i in range(0, len(key.tokens) - size + 1, size))

    def keys_of(self, key: RadixKey) -> list[bytes]:
        if key.is_given:
            return list(self.pages_of(key))
        return page_keys(key.tokens, self.page_tokens, key.seed)

    def path_of(self, node: Node) -> list[Page]:
        """Return the oracle's pages from the start of the prompt to the end of `node`."""
        runs: list[bytes] = []
        while node.parent is not None:
            runs.append(node.key)
            node = node.parent
        key = RadixKey(b"".join(reversed(runs)), node.page_keys or b"", self.position_bytes)
        return self.oracle.path(key.seed, self.pages_of(key))

    # Lookups

    def match(self) -> None:
        key = self.prompt()
        path = self.oracle.path(key.seed, self.pages_of(key))
        found = self.tree.match(key)
        device = [page.device for page in path if page.device is not None]
        assert found.device_pages.tolist() == device
        assert (found.host_hit_pages, found.pages) == (len(path) - len(device), len(path))

    def peek(self) -> None:
        """Check that `peek` returns what a match would find, and changes nothing."""
        key = self.prompt()
        before = image(self.tree)
        seen = self.tree.peek(key)
        assert image(self.tree) == before
        found = self.tree.match(key)
        assert seen == (len(found.device_pages), found.host_hit_pages)

    def hash_pages(self) -> None:
        key = self.prompt()
        found = self.tree.match(key)
        keys = self.keys_of(key)[: found.pages]
        own = self.tree.page_keys(found.node) if found.pages else []
        assert own == keys[len(keys) - len(own) :]

    def use(self) -> None:
        node, priority = self.tree.match(self.prompt()).node, self.random.randrange(3)
        self.tree.use(node, priority)
        for page in self.path_of(node):
            page.hits += 1
            page.priority = max(page.priority, priority)

    # Pages

    def insert(self) -> None:
        key = self.prompt()
        pages = self.pages_of(key)
        self.evict_device(max(0, len(pages) - self.device.free_pages))
        if self.random.random() < 0.5:
            ids, priority = self.device.alloc(len(pages)), self.random.randrange(3)
            if ids is not None:
                inserted = self.tree.insert(key, ids, priority=priority)
                assert inserted.present_pages == self.oracle.insert(key.seed, pages, ids.tolist(), priority, 0)
                self.device.free(ids[: inserted.present_pages])
            return
        # As a request that shares its pages in parts: it has locked the earlier pages.
        found = self.tree.match(key)
        start, reference = len(found.device_pages), self._lock(found.device_node)
        if self.device.free_pages >= len(pages) - start:
            positions = self.tree.page_bytes // self.position_bytes
            for end in (self.random.randint(start, len(pages)), len(pages)):
                reference, start = self._insert(key.head(end * positions), reference, start), end
        self.who.locks.append(reference)
        if self.random.random() < 0.5:
            self.unlock()

    def _insert(self, key: RadixKey, below: Reference, start: int) -> Reference:
        """Insert the pages after `below`, and move its lock to their end."""
        pages = self.pages_of(key)
        ids = self.device.alloc(len(pages) - start)
        assert ids is not None
        priority = self.random.choice([0, 0, 1])
        inserted = self.tree.insert(key, ids, priority=priority, below=below.node, start_page=start)
        assert inserted.present_pages == self.oracle.insert(key.seed, pages, ids.tolist(), priority, start)
        self.device.free(ids[: inserted.present_pages])
        self.grown += inserted.node is below.node and len(pages) > start
        self.tree.move_lock(below.node, inserted.node)
        reference = Reference(inserted.node, self.path_of(inserted.node))
        for page in reference.path[len(below.path) :]:
            page.locks += 1
        return reference

    def load_back(self) -> None:
        found = self.tree.match(self.prompt())
        ids = self.device.alloc(found.host_hit_pages) if found.host_hit_pages else None
        if ids is None:
            return
        done = 0
        for node in reversed(list(self.tree.span(found.node, found.host_hit_pages))):
            run = self.tree.pages(node)
            self.tree.set_device(node, ids[done : done + run].copy())
            done += run
        for page, number in zip(self.path_of(found.node)[len(found.device_pages) :], ids.tolist(), strict=True):
            page.device = number

    def backup(self) -> None:
        """Start copying the pages of a path that are not on L2."""
        self.start_copies(self.tree.match(self.prompt()).device_node, evicts=False)

    def start_copies(self, node: Node, *, evicts: bool) -> bool:
        """Start copies, root first, sometimes without the ancestors; all or none. Return False if L2 has no room."""
        path: list[Node] = []
        part, alone = node, self.random.random() < 0.3
        while part.parent is not None and not (alone and path):
            if part.host is None and not part.backup_pending:
                path.append(part)
            part = part.parent
        ids = self.host.alloc(sum(map(self.tree.pages, path)))
        if ids is None:
            return False
        done = 0
        for part in reversed(path):
            count = self.tree.pages(part)
            reference = self._lock(part)
            own = reference.path[-count:]
            self.who.copies.append(Copy(reference, own, ids[done : done + count], evicts and part is node))
            part.backup_pending = True
            for page in own:
                page.copying = True
            done += count
        return True

    def finish_copy(self) -> None:
        """End a copy, not always in order. A victim that waited for it leaves L1, unless it is in use again."""
        copies = self.who.copies
        if not copies:
            return
        copy = copies.pop(0 if self.random.random() < 0.7 else self.random.randrange(len(copies)))
        unused = self.tree.accept_backup(copy.of.node, copy.host_pages)
        assert unused.tolist() == self.oracle.accept(copy.pages, copy.host_pages.tolist())
        self.host.free(unused)
        self._unlock(copy.of)
        for part in list(self.tree.span(copy.of.node, len(copy.host_pages))) if copy.evicts else []:
            if may_leave_device(part) and part.host is not None:
                self._left_device(self.tree.leave_device(part))

    def prefetch(self) -> None:
        """Start reading the pages of a prompt that are not on L2; the anchor is held."""
        key = self.prompt()
        found = self.tree.match(key)
        missing = len(self.pages_of(key)) - found.pages
        ids = self.host.alloc(missing) if missing else None
        if ids is not None:
            self.who.arrivals.append(Arrival(key, found.pages, ids, self._hold(found.node)))

    def finish_prefetch(self) -> None:
        """All or some of the pages have arrived."""
        if not self.who.arrivals:
            return
        arrival = self.who.arrivals.pop(self.random.randrange(len(self.who.arrivals)))
        key, start, ids = arrival.key, arrival.start, arrival.host_pages
        count = self.random.choice([len(ids), self.random.randint(0, len(ids))])
        keys = self.keys_of(key)[start : start + count]
        below = self.random.choice([None, arrival.anchor.node])
        unused = self.tree.insert_host(key, start, ids[:count], keys, below=below)[1]
        pages = self.pages_of(key)[: start + count]
        assert unused.tolist() == self.oracle.insert_host(key.seed, pages, start, ids[:count].tolist())
        self.host.free(unused)
        self.host.free(ids[count:])
        self._release(arrival.anchor)

    def acknowledge_store(self) -> None:
        """Storage has acknowledged a node on L2."""
        node = self.tree.match(self.prompt()).node
        if node.host is not None and not node.stored:
            if self.random.random() < 0.8:  # else another rank has hashed them
                self.tree.page_keys(node)
            self.tree.stored.add(node)
            self.set_stored(node, True)

    def lose_page(self) -> None:
        """Report that storage lacks the last page of a node, so the runs below it are lost too."""
        node = self.tree.match(self.prompt()).node
        key = self.tree.last_key(node)
        if not node.stored or key not in self.tree.stored.ends():
            assert node.parent is None or self.tree.stored.forget([key]) == 0
            return
        lost = [node]
        for one in lost:
            lost += [child for child in one.children.values() if child.stored]
        assert self.tree.stored.forget([key, key]) == sum(map(self.tree.pages, lost))
        for one in lost:
            assert not one.stored
            self.set_stored(one, False)

    def set_stored(self, node: Node, stored: bool) -> None:
        """Tell the oracle."""
        for page in self.path_of(node)[-self.tree.pages(node) :]:
            page.stored = stored

    # Users

    def lock(self) -> None:
        self.who.locks.append(self._lock(self.tree.match(self.prompt()).node))

    def unlock(self) -> None:
        if self.who.locks:
            self._unlock(self._any(self.who.locks))

    def hold(self) -> None:
        self.who.holds.append(self._hold(self.tree.match(self.prompt()).node))

    def release(self) -> None:
        if self.who.holds:
            self._release(self._any(self.who.holds))

    def pin(self) -> None:
        node = self.tree.match(self.prompt()).node
        self.tree.pin(node)
        self.who.pins.append(Reference(node, self.path_of(node)))
        for page in self.who.pins[-1].path:
            page.pins += 1
            page.holds += 1

    def unpin(self) -> None:
        if self.who.pins:
            reference = self._any(self.who.pins)
            self.tree.unpin(reference.node)
            for page in reference.path:
                page.pins -= 1
                page.holds -= 1

    def _any(self, references: list[Reference]) -> Reference:
        return references.pop(self.random.randrange(len(references)))

    def _lock(self, node: Node) -> Reference:
        self.tree.lock(node)
        reference = Reference(node, self.path_of(node))
        for page in reference.path:
            page.locks += 1
        return reference

    def _unlock(self, reference: Reference) -> None:
        self.tree.unlock(reference.node)
        for page in reference.path:
            page.locks -= 1

    def _hold(self, node: Node) -> Reference:
        self.tree.hold_host(node)
        reference = Reference(node, self.path_of(node))
        for page in reference.path:
            page.holds += 1
        return reference

    def _release(self, reference: Reference) -> None:
        self.tree.release_host(reference.node)
        for page in reference.path:
            page.holds -= 1

    # Eviction

    def evict_device(self, pages: int | None = None) -> None:
        wanted = self.random.randint(1, 20) if pages is None else pages
        evictable, copies = self.tree.device_evictable_pages, len(self.who.copies)
        saves = self.random.random() < 0.5
        evicted = self.tree.evict_device(wanted, self.write_back if saves else None)
        saving = sum(len(copy.host_pages) for copy in self.who.copies[copies:] if copy.evicts)
        assert evicted.writeback_pages == saving
        gone = len(evicted.pages) + saving
        assert gone <= wanted + EXCESS_PAGES_MAX
        holders = self.who.pins or self.who.holds or self.who.arrivals
        assert saves or holders or gone >= min(wanted, evictable)
        self._left_host(evicted.host_pages)
        self._left_device(evicted.pages)

    def write_back(self, victim: Node) -> EvictionChoice:
        """Return any possible choice for a victim without a copy on L2."""
        assert victim.host is None and victim.lock_ref == 0
        choice = self.random.choice(list(EvictionChoice))
        if choice is EvictionChoice.WRITING_BACK and self.start_copies(victim, evicts=True):
            return EvictionChoice.WRITING_BACK
        return EvictionChoice.DROP if choice is EvictionChoice.WRITING_BACK else choice

    def _left_device(self, freed: PageIds) -> None:
        self.device.free(freed)
        left = self.oracle.leave_device(set(freed.tolist()))
        assert len(left) == len(freed)
        assert not any(page.locks for page in left)

    def evict_host(self, pages: int | None = None) -> None:
        wanted = self.random.randint(1, 20) if pages is None else pages
        evictable = self.tree.host_evictable_pages
        copies, copies_max = self.tree.host_copy_pages, self.random.choice([0, self.host.capacity // 2])
        freed = self.tree.evict_host(wanted, copy_pages_max=copies_max)
        assert min(wanted, evictable) <= len(freed) <= wanted + EXCESS_PAGES_MAX
        left = self._left_host(freed)
        gone = sum(page.device is not None for page in left)
        assert gone == copies - self.tree.host_copy_pages
        if not (self.who.holds or self.who.pins or self.who.arrivals) and copies > copies_max:
            assert gone >= min(wanted, copies - copies_max), "others left although there were too many copies"

    def _left_host(self, freed: PageIds) -> list[Page]:
        self.host.free(freed)
        left = self.oracle.leave_host(set(freed.tolist()))
        assert len(left) == len(freed)
        assert not any(page.holds or (page.locks and page.device is None) for page in left)
        return left

    # Comparing

    def check(self) -> None:
        """Check the tree's invariants, then each page against the oracle, then the pools."""
        check_tree(self.tree)
        self.device.check()
        self.host.check()
        stack = [(child, self.oracle.roots[root.page_keys or b""]) for root in self.tree.roots()
                 for child in root.children.values()]
        compared = 0
        size = self.tree.page_bytes
        while stack:
            node, page = stack.pop()
            state = (node.hit_count, node.priority, node.backup_pending, node.stored)
            count = self.tree.pages(node)
            nowhere = [None] * count
            device = nowhere if node.device is None else node.device.tolist()
            host = nowhere if node.host is None else node.host.tolist()
            for number in range(count):
                page = page.children[node.key[number * size : (number + 1) * size]]
                assert (page.device, page.host) == (device[number], host[number])
                assert page.state() == state
            assert page.counts() == (node.lock_ref, node.host_ref, node.pin_ref)
            compared += count
            stack += [(child, page) for child in node.children.values()]
        assert compared == sum(1 for _ in self.oracle.all())
        lent = sum(len(copy.host_pages) for copy in self.who.copies)
        lent += sum(len(arrival.host_pages) for arrival in self.who.arrivals)
        assert self.tree.device_pages_total == self.device.used_pages
        assert self.tree.host_pages + lent == self.host.used_pages

    def empty(self) -> None:
        """Undo all uses and end all operations; then all pages can be evicted."""
        while self.who.copies:
            self.finish_copy()
        while self.who.arrivals:
            self.finish_prefetch()
        for references, undo in (
            (self.who.locks, self.unlock), (self.who.holds, self.release), (self.who.pins, self.unpin),
        ):
            while references:
                undo()
        self.check()
        self.evict_host(self.host.capacity)
        self._left_device(self.tree.evict_device(self.device.capacity).pages)
        self.check()
        assert self.tree.node_count == 0
        assert self.tree.roots() == []

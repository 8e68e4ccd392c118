"""Checks beyond `HiRadixCache.check()`: the bytes of the pages in the tree, and the counters at the end of a run."""

from __future__ import annotations

import numpy as np

from hicache.cache import HiRadixCache, Pin
from hicache.events import EventReader, Medium, Removed, Stored
from hicache.keys import TOKEN_BYTES, RadixKey, page_keys
from hicache.radix import Node, RadixTree
from tests.events.world import DescribedIndex
from tests.simulation.memory import Finding, SimulatedDevicePool, SimulatedHostPool, SimulatedSlots
from tests.stamps import Stamps

# A small number, so that a read usually ends in the middle of a step.
EVENTS_PER_READ = 1000


class Auditor:
    """Compares the pages that the trees name with their bytes in memory. Changes only its own records."""

    def __init__(
        self, cache: HiRadixCache, device: SimulatedDevicePool, host: SimulatedHostPool, slots: list[SimulatedSlots],
        stamps: Stamps,
    ) -> None:
        self.pins: list[tuple[Pin, RadixKey]] = []
        self._slots = slots
        self._cache, self._device, self._host, self._stamps = cache, device, host, stamps
        self._keys: dict[tuple[bytes, bytes], list[bytes]] = {}
        self._epochs: dict[RadixTree, int] = {}

    def memory(self) -> None:
        """Check, after any step, that free pages hold poison and that a page on L2 in a tree is complete and correct.

        Includes retired trees: pages that are being stored under their epoch must not change.
        """
        self._device.guard.require_poison()
        self._host.guard.require_poison()
        for slots in self._slots:
            slots.guard.require_poison()
        for tree in self._cache._trees.all():
            # This check runs after the step that creates a tree, so before the next epoch.
            epoch = self._epochs.setdefault(tree, self._cache.weights_epoch)
            pages: list[int] = []
            keys: list[bytes] = []
            for node, node_keys in self._nodes(tree):
                if node.host is not None:
                    pages += node.host.tolist()
                    keys += node_keys
            self._compare("L2", self._host.blocks, pages, keys, epoch)

    def pinned(self) -> None:
        """Check that pinned pages are in the tree."""
        for pin, key in self.pins:
            if pin.active and sum(self._cache.tree.peek(key)) < pin.pages:
                raise Finding("pin", f"{pin.pages} pages are pinned, but the tree has {self._cache.tree.peek(key)}")

    def device(self) -> None:
        """Check the bytes of the pages on L1. REQUIRES: no load is in flight, and the device has not failed."""
        pages: list[int] = []
        keys: list[bytes] = []
        for node, node_keys in self._nodes(self._cache.tree):
            if node.device is not None:
                pages += node.device.tolist()
                keys += node_keys
        self._compare("L1", self._device.memory, pages, keys, self._cache.weights_epoch)
        for index, memory in enumerate(slots.memory for slots in self._slots):
            slots = self._cache._trailing.pools[index].slots(np.array(pages, np.int32))
            with_slot = [key for key, slot in zip(keys, slots.tolist(), strict=True) if slot]
            layer, epoch = len(self._device.memory) + index, self._cache.weights_epoch
            self._compare(f"pool {index}", memory, slots[slots > 0].tolist(), with_slot, epoch, layer)

    def at_rest(self) -> None:
        """Check that nothing is reserved, locked or held. REQUIRES: no requests, no pins, no operations in flight."""
        cache = self._cache
        if len(cache._trees.all()) > 1:
            raise Finding("left behind", "an old tree is kept, but nothing refers to it")
        for node in cache.tree.nodes():
            if node.lock_ref or node.host_ref or node.pin_ref or node.backup_pending or node.store_pending:
                raise Finding("left behind", f"{node!r} is locked, held or waits for a copy, but nothing is in flight")
        queues = cache.statistics().controller.queues
        reserved = queues.device_pages_reserved or queues.host_pages_reserved
        if reserved or queues.prefetch or queues.reads or queues.backup:
            raise Finding("left behind", f"queues or reservations are not empty: {queues}")
        if cache.writeback_pages or cache.tree.device_protected_pages:
            raise Finding("left behind", f"{cache.writeback_pages} pages are being written back, but nothing runs")
        tiers = (
            (cache.device.allocator, cache.tree.device_evictable_pages),
            (cache.host.allocator, cache.tree.host_pages),
        )
        for allocator, pages in tiers:
            if allocator.used_pages != pages:
                raise Finding("left behind", f"{allocator.used_pages} pages are in use, but the tree has {pages}")

    def stored(self, known: set[bytes]) -> None:
        """Check that the tree marks only pages in `known` as stored: all pages that the attached store has ever had."""
        for node, keys in self._nodes(self._cache.tree):
            if node.stored and not known.issuperset(keys):
                raise Finding("stale mark", f"{node!r} was never in the attached store")

    def emptied(self) -> None:
        """Evict all pages, and check that every page is free. REQUIRES: as `at_rest`."""
        cache = self._cache
        evicted = cache.tree.evict_device(cache.device.pages)
        cache.device.allocator.free(evicted.pages)
        cache.host.free(evicted.host_pages)
        cache.host.free(cache.tree.evict_host(cache.host.pages))
        cache.check()
        slots_used = any(slots.allocator.used_pages for slots in self._slots)
        if cache.tree.node_count or cache.device.allocator.used_pages or cache.host.allocator.used_pages or slots_used:
            raise Finding("left behind", f"{cache.tree.node_count} nodes cannot be evicted")

    def _nodes(self, tree: RadixTree) -> list[tuple[Node, list[bytes]]]:
        """Return all nodes except the roots, with page keys computed independently of the tree."""
        found: list[tuple[Node, list[bytes]]] = []
        page_tokens = tree.page_bytes // TOKEN_BYTES
        stack = [(child, root.page_keys or b"") for root in tree.roots() for child in root.children.values()]
        while stack:
            node, prior = stack.pop()
            keys = self._keys.get((prior, node.key))
            if keys is None:
                keys = self._keys[prior, node.key] = page_keys(node.key, page_tokens, prior)
            found.append((node, keys))
            stack += [(child, keys[-1]) for child in node.children.values()]
        return found

    def _compare(
        self, tier: str, blocks: np.ndarray, pages: list[int], keys: list[bytes], epoch: int, first_layer: int = 0
    ) -> None:
        if not pages:
            return
        rows = self._stamps.rows(keys, epoch)
        table = self._stamps.table[first_layer : first_layer + len(blocks)]
        wrong = (blocks[:, :, pages] != table[:, :, rows]).any(axis=(0, 1, 3))
        if wrong.any():
            raise Finding(
                "wrong bytes",
                f"{tier} pages {np.array(pages)[wrong].tolist()} differ from the tree of epoch {epoch}",
            )


class Follower:
    """A second index of the tree, built from KV events only."""

    def __init__(self, cache: HiRadixCache, reader: EventReader) -> None:
        self._cache = cache
        self._reader = reader
        self._index = DescribedIndex()
        # The tree marks a run that storage has lost at its last page only; events name each page.
        self._lost: set[bytes] = set()

    def compare(self) -> bool:
        """Read all events and compare the index with the tree. Return False if it waits for a snapshot after a gap."""
        while events := self._reader.drain(EVENTS_PER_READ):
            self._index.apply(events)
            for event in events:
                if isinstance(event, Removed) and event.medium is Medium.STORAGE:
                    self._lost.update(event.keys)
                elif isinstance(event, Stored) and event.medium is Medium.STORAGE:
                    self._lost.difference_update(event.keys)
        if not self._reader.in_sync:
            return False
        self._index.check()
        tree = self._cache.tree
        for medium in Medium:
            known = self._index.keys(medium)
            there = {key for node in tree.nodes() if _is_on(node, medium) for key in tree.page_keys(node)}
            # Storage keeps pages that have left the tree.
            if medium is Medium.STORAGE:
                there -= self._lost
            if not there <= known or (known != there and medium is not Medium.STORAGE):
                raise Finding(
                    "events", f"{medium}: the index has {len(known - there)} extra pages and lacks {len(there - known)}"
                )
        return True


def _is_on(node: Node, medium: Medium) -> bool:
    if medium is Medium.STORAGE:
        return node.stored
    return (node.device if medium is Medium.DEVICE else node.host) is not None

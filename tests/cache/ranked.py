"""Ranks that differ in all that may differ between ranks: content of storage, failures, and delays."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Sequence

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.calls import Call
from hicache.backends.memory import MemoryDriver
from hicache.cache import RequestKV
from hicache.frame import PageBuffer
from hicache.radix import Node
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import Indices
from tests.cache.world import LastingBackend, World, codec

CAPACITY_PAGES = 100
# Timeouts of prefetches: with the first they often expire, with the second never.
SHORT_S = 0.05
LONG_S = 30.0
# The largest delay, in hashed kilobytes: a few milliseconds.
WORK_MAX = 1500
_KILOBYTE = bytes(1024)


def work(numbers: random.Random) -> None:
    """Work for a random time, which is mostly short."""
    for _ in range(int(WORK_MAX * numbers.random() ** 8)):
        hashlib.sha256(_KILOBYTE).digest()


class UnreliableBackend(LastingBackend):
    """Storage of random speed. It misses or loses pages in a share `misses` of its calls, and fails in `failures`."""

    def __init__(
        self, seed: int, *, misses: float = 0.2, failures: float = 0.01, shared: MemoryDriver | None = None
    ) -> None:
        super().__init__(codec(), shared or MemoryDriver(CAPACITY_PAGES * codec().frame_bytes))
        self._numbers = random.Random(seed)
        self.misses = misses
        self.failures = failures
        self.set_pages = 0

    def _happens(self, share: float) -> bool:
        return self._numbers.random() < share

    def _delay(self) -> None:
        work(self._numbers)
        if self._happens(self.failures):
            raise RuntimeError("driver bug")

    def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
        self._delay()
        found = super()._exists(call, keys)
        return self._numbers.randint(0, found) if self._happens(self.misses) else found

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        self._delay()
        if self._happens(self.misses):
            self.delete([self._numbers.choice(list(keys))], deadline=call.deadline)
        return super()._get(call, keys, pages)

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        self._delay()
        self.set_pages += len(keys)
        if self._happens(self.failures):
            return [SetOutcome.ERROR] * len(keys)
        return super()._set(call, keys, pages, parent)


class UnevenCopies(CpuCopyEngine):
    """A copy engine that takes a random time per layer."""

    numbers = random.Random(0)

    def _backup_layer(self, layer: int, blocks: Indices, host_blocks: Indices) -> None:
        work(self.numbers)
        super()._backup_layer(layer, blocks, host_blocks)

    def _load_layer(self, layer: int, host_blocks: Indices, blocks: Indices) -> None:
        work(self.numbers)
        super()._load_layer(layer, host_blocks, blocks)


def decisions(world: World, requests: Sequence[RequestKV]) -> str:
    """Return a digest of all decisions so far: tree, pools, and the pages and hits of the running requests."""
    parts: list[object] = [world.host.allocator.free_pages, world.device.allocator.free_pages]
    for node in _nodes(world):
        pages = [None if run is None else run.tolist() for run in (node.device, node.host)]
        parts += [node.key, pages, node.lock_ref, node.host_ref, node.stored, node.backup_pending, node.last_access]
    for request in requests:
        hits = (request.device_hit_tokens, request.host_hit_tokens, request.storage_hit_tokens)
        parts += [request.rid, request.pages.tolist(), hits]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _nodes(world: World) -> Iterator[Node]:
    """Yield all nodes in an order that depends only on their tokens."""
    waiting = deque(root for _, root in sorted(world.cache.tree._roots.items()))
    while waiting:
        node = waiting.popleft()
        yield node
        waiting.extend(child for _, child in sorted(node.children.items()))

"""Trailing pools: device memory of which a prefix needs only the last pages.

A layer with a sliding window reads the KV of the last tokens, a recurrent layer one state. The pool of such layers is
beside L1, the KV pool of the layers with full attention, and much smaller:

    pages of a prefix   0  1  2  3  4  5  6  7
    L1                  x  x  x  x  x  x  x  x
    trailing pool       .  .  x  .  .  .  x  x     a request that continues after page 7 needs 6 and 7

The page stays the unit of everything else: it has one key, one place in the tree and one lock, and its frame on L2 and
in storage has the pieces of all pools. Only on L1 may it lack a part: a page there has a *slot* of a trailing pool, or
not. A slot is a block of the pool; for a recurrent layer it holds the state after the last token of the page.

Slots are taken for pages that a forward will write or read, and *held* as long as it may. A slot that is not held stays
with its page until another page needs it: first those whose pages have a copy on L2, from which they can be filled
again, least recently used first.

`PooledCopies` copies the pieces of all pools as one copy engine. Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..arguments import encoded, instance, whole
from ..errors import CapacityError, InvariantError
from ..geometry import Piece
from ..types import PageIds
from .copy import CopyEngine, Fence, JoinedTransfer, Transfer
from .device import BlockPool

# An eviction frees at least this share of the slots that are not held, because finding the oldest visits all of them.
_EVICTED_SHARE = 1 / 64


class TrailingPool:
    """The memory of layers that need only the last `trailing_tokens` tokens of a prefix, and the slots of its pages.

    `trailing_tokens` is `window - 1` for layers in which a query sees `window` keys, including its own, and 1 for a
    recurrent state. `name` names its pieces in a page. A page is a block of `pool`: an `MHATokenToKVPool` of the
    window's layers, or a `BlockPool` over the engine's tensor of states `[slots + 1, ...]`. The pool may be much
    smaller than L1, but a running request needs its trailing pages and those of its next chunk.

    Invariant, verified by `check()`: a used slot has one page, and a page has at most one slot; the others are free in
    `pool.allocator`. Only used slots are held.
    """

    def __init__(self, name: str, pool: BlockPool, trailing_tokens: int) -> None:
        encoded("trailing pool: name", name)
        self.name = name
        self.pool = instance("trailing pool: pool", pool, BlockPool)
        self.trailing_tokens = whole("trailing pool: trailing_tokens", trailing_tokens, 1)
        self.trailing_pages = 0
        self.pieces = tuple(Piece(f"{name}.{layer}", size) for layer, size in enumerate(pool.blocks.layer_bytes))

    def attach(self, page_size: int, pages_end: int, first_layer: int) -> None:
        """Forget all slots, for a cache whose L1 has the page ids below `pages_end`. `first_layer` is the number of
        this pool's layer 0 among those of all pools. Raises CapacityError if the slots do not suffice for one request.
        """
        self.trailing_pages = -(-self.trailing_tokens // page_size)
        self.pool.first_layer = first_layer
        slots = self.pool.allocator
        if slots.capacity <= self.trailing_pages:
            raise CapacityError(
                f"trailing pool {self.name}: {slots.capacity} slots, but a request needs {self.trailing_pages} and "
                "those of the pages that it computes at once; give it more"
            )
        # Slot 0 stands for none: block 0 is padding.
        self._slot_of = np.zeros(pages_end, np.int32)
        end = slots.first + slots.capacity
        self._page_of = np.zeros(end, np.int32)
        self._holds = np.zeros(end, np.int32)
        self._used = np.zeros(end, np.int64)  # number of the last use, counted over all pages
        self._on_host = np.zeros(end, np.bool_)  # the page was copied to L2
        self._awaited = np.zeros(end, np.bool_)  # the copy from L2 that fills the slot has not begun
        self._uses = 0

    def slots(self, pages: PageIds) -> PageIds:
        """Return the slots of `pages`, int32; 0 for a page without one. Slot 0 is padding."""
        slots: PageIds = self._slot_of[pages]
        return slots

    @property
    def holds(self) -> int:
        """The number of holds of all slots."""
        return int(self._holds.sum())

    def hold(self, pages: PageIds, *, from_host: bool = False) -> bool:
        """Give `pages`, which are distinct, the slots that they lack, and keep all of them until `release`. Return
        False and change nothing if there is no room. `from_host`: a copy from L2 will fill the new ones."""
        present = self._slot_of[pages]
        self._hold(present, +1)
        lacking = pages[present == 0]
        slots = self._alloc(len(lacking)) if len(lacking) else lacking
        if slots is None:
            self._hold(present, -1)
            return False
        self._slot_of[lacking], self._page_of[slots] = slots, lacking
        self._on_host[slots] = self._awaited[slots] = from_host
        self._hold(slots, +1)
        self._used[self._slot_of[pages]] = np.arange(self._uses, self._uses + len(pages))  # the last page is the newest
        self._uses += len(pages)
        return True

    def release(self, pages: PageIds, *, on_host: bool = False) -> None:
        """Undo one `hold`. `on_host`: the pages now have a copy on L2."""
        slots = self._slot_of[pages]
        self._hold(slots, -1)
        if on_host:
            self._on_host[slots] = True

    def replace(self, pages: PageIds, others: PageIds) -> None:
        """Move the slots and holds of `pages` to `others`, pages with the same content, pairwise. Where both have a
        slot, only the holds move."""
        slots, present = self._slot_of[pages], self._slot_of[others]
        moved = (slots > 0) & (present == 0)
        self._slot_of[others[moved]], self._slot_of[pages[moved]] = slots[moved], 0
        self._page_of[slots[moved]] = others[moved]
        both = (slots > 0) & (present > 0)
        self._holds[present[both]] += self._holds[slots[both]]
        self._holds[slots[both]] = 0

    def drop(self, pages: PageIds) -> None:
        """Free the slots of pages that L1 has freed. Raises InvariantError if one is held."""
        slots = self._slot_of[pages]
        slots = slots[slots > 0]
        if self._holds[slots].any():
            raise InvariantError(f"trailing pool {self.name}: a page is freed, but a request or a copy needs its slot")
        self._slot_of[self._page_of[slots]] = 0
        self._page_of[slots] = 0
        self.pool.allocator.free(slots)

    def take_awaited(self, pages: PageIds) -> npt.NDArray[np.bool_]:
        """Return which of `pages` have a slot whose copy from L2 begins now."""
        slots = self._slot_of[pages]
        awaited: npt.NDArray[np.bool_] = self._awaited[slots]
        self._awaited[slots] = False
        return awaited

    def check(self) -> None:
        """Raises InvariantError if the invariant does not hold."""
        self.pool.allocator.check()
        pages, slots = np.flatnonzero(self._slot_of), np.flatnonzero(self._page_of)
        if len(slots) != self.pool.allocator.used_pages or not np.array_equal(np.sort(self._slot_of[pages]), slots):
            raise InvariantError(f"trailing pool {self.name}: slots and pages do not match")
        if (self._page_of[self._slot_of[pages]] != pages).any() or self._holds[self._page_of == 0].any():
            raise InvariantError(f"trailing pool {self.name}: a slot has another page, or is held without a page")
        if (self._holds < 0).any():
            raise InvariantError(f"trailing pool {self.name}: a slot was released more often than held")

    def _hold(self, slots: PageIds, change: int) -> None:
        self._holds[slots] += change
        self._holds[0] = 0

    def _alloc(self, count: int) -> PageIds | None:
        slots = self.pool.allocator
        missing = count - slots.free_pages
        if missing > 0:
            idle = np.flatnonzero((self._page_of > 0) & (self._holds == 0))
            if len(idle) < missing:
                return None
            oldest = np.lexsort((self._used[idle], ~self._on_host[idle]))
            self.drop(self._page_of[idle[oldest[: max(missing, int(_EVICTED_SHARE * len(idle)))]]])
        return slots.alloc(count)


class PooledTransfer(JoinedTransfer):
    """The copies of several pools as one. Layers are numbered through all pools; a layer without a copy is ready."""

    def __init__(self, parts: Sequence[tuple[range, Transfer]]) -> None:
        super().__init__([transfer for _, transfer in parts])
        self._by_layer = parts

    @property
    def seconds(self) -> float | None:
        """The duration of the longest part: they run side by side."""
        times = [part.seconds for part in self._parts]
        return max((time or 0.0 for time in times), default=0.0) if None not in times else None

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        whole("layer", layer)
        for layers, transfer in self._by_layer:
            if layer in layers:
                transfer.wait_layer(layer - layers.start, stream)


class PooledCopies(CopyEngine):
    """The copy engines of L1 and its trailing pools as one.

    A backup copies all pieces of a page, each from its pool. REQUIRES: the page has a slot in all pools. A load of page
    `p` copies the pieces of L1; a load of `-p` those of the trailing pools whose slots await it (`from_host`).
    """

    def __init__(self, device: CopyEngine, trailing: Sequence[tuple[TrailingPool, CopyEngine]]) -> None:
        # Not those of the base: the parts check blocks and windows.
        self.blocks, self.window = device.blocks, device.window
        self._device = device
        self._trailing = trailing

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        parts = [(_layers(0, self._device), self._device.backup(blocks, host_blocks, after=after))]
        for pool, copies in self._trailing:
            transfer = copies.backup(pool.slots(blocks), host_blocks, after=after)
            parts.append((_layers(pool.pool.first_layer, copies), transfer))
        return PooledTransfer(parts)

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        parts = []
        whole_pages, others = blocks > 0, np.flatnonzero(blocks < 0)
        if whole_pages.any():
            transfer = self._device.load(host_blocks[whole_pages], blocks[whole_pages], after=after)
            parts.append((_layers(0, self._device), transfer))
        for pool, copies in self._trailing:
            pages = others[pool.take_awaited(-blocks[others])]
            if len(pages):
                transfer = copies.load(host_blocks[pages], pool.slots(-blocks[pages]), after=after)
                parts.append((_layers(pool.pool.first_layer, copies), transfer))
        return PooledTransfer(parts)

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        engines = [self._device, *(copies for _, copies in self._trailing)]
        return all([engine.close(max(0.0, deadline - time.monotonic())) for engine in engines])

    def require_fence(self, fence: Fence) -> None:
        self._device.require_fence(fence)


def _layers(first: int, copies: CopyEngine) -> range:
    return range(first, first + len(copies.blocks.layers))

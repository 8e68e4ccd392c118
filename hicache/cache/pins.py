"""Pins: prefixes that stay in the cache for a time, as handles.

A pinned prefix leaves L1 only for L2 and L2 not at all, so a request that needs it never computes it again. The time
starts again whenever a request uses the whole pinned prefix. How much of L2 pins may take is bounded.

Invariant, verified by `check()`: each node has as many pins of its own in the tree as there are handles here that are
not released and end on it.
Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from ..errors import InvariantError
from ..radix import Match, Node, RadixTree

# Pins that ended early stay in the expiry heap until they are half of it, or this many.
EXPIRY_SLACK = 64


@dataclass(slots=True)
class _Prefix:
    """The pinned path to one node: when a request last used all of it, and how many pins are on it."""

    used_s: float = -math.inf
    pins: int = 0


@dataclass(slots=True, eq=False, repr=False)
class Pin:
    """A handle, and a context manager that releases it. The cache knows this object: a copy of it is not a pin."""

    ttl_s: float
    _pages: int
    _pins: Pins
    _tree: RadixTree
    _node: Node
    _prefix: _Prefix
    _made_s: float

    def __repr__(self) -> str:
        return f"Pin({self._pages} pages, {'active' if self.active else 'ended'})"

    @property
    def expires_at(self) -> float:
        """When it ends by itself, by the clock of the cache, unless a request uses the whole prefix before."""
        return max(self._made_s, self._prefix.used_s) + self.ttl_s

    @property
    def pages(self) -> int:
        """Pages of the prefix, 0 once the pin has ended."""
        return self._pages if self.active else 0

    @property
    def active(self) -> bool:
        """Whether the prefix is still pinned."""
        return self in self._pins.active

    def release(self) -> None:
        """End the pin now. Does nothing if it has ended."""
        self._pins.release(self)

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Pins:
    """All pins of one cache, over at most `pages_max` pages of a tree. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float], pages_max: int) -> None:
        self._clock = clock
        self._pages_max = pages_max
        self._prefixes: dict[int, _Prefix] = {}  # by the id of their deepest node, an object that splits keep
        self.active: set[Pin] = set()
        # Lazy: a pin that was refreshed is put back with its new time when its old one comes up.
        self._expiry: list[tuple[float, int, Pin]] = []
        self._made = 0

    def add(self, tree: RadixTree, match: Match, ttl_s: float) -> Pin | None:
        """Pin what was matched for `ttl_s` seconds; None if that would be too many pages.

        For no page the pin has ended already. REQUIRES: the time is positive and finite.
        """
        node, part, fresh_pages = match.node, match.node, 0
        while part.parent is not None:
            fresh_pages += 0 if part.pin_ref else tree.pages(part)
            part = part.parent
        if tree.pinned_pages + fresh_pages > self._pages_max:
            return None
        prefix = self._prefixes.get(node.id) or _Prefix()
        pin = Pin(ttl_s, match.pages, self, tree, node, prefix, self._clock())
        if match.pages:
            tree.pin(node)
            self._prefixes[node.id] = prefix
            prefix.pins += 1
            self.active.add(pin)
            self._made += 1
            heapq.heappush(self._expiry, (pin.expires_at, self._made, pin))
        return pin

    def used(self, node: Node) -> None:
        """A request has used the path to `node`: the time of pins that end on it starts again."""
        if not self._prefixes:
            return
        now_s = self._clock()
        while node.parent is not None:
            if node.pin_ref and (prefix := self._prefixes.get(node.id)) is not None:
                prefix.used_s = now_s
            node = node.parent

    def expire(self) -> None:
        """End the pins whose time is over."""
        heap = self._expiry
        while heap and heap[0][0] <= self._clock():
            expires_s, number, pin = heap[0]
            if pin.active and pin.expires_at > expires_s:
                heapq.heapreplace(heap, (pin.expires_at, number, pin))
                continue
            heapq.heappop(heap)
            pin.release()

    def clear(self) -> None:
        """End all pins."""
        for _, _, pin in self._expiry.copy():
            self.release(pin)

    def release(self, pin: Pin) -> None:
        """End one pin. Does nothing if it has ended."""
        if pin not in self.active:
            return
        self.active.remove(pin)
        pin._prefix.pins -= 1
        if not pin._prefix.pins:
            del self._prefixes[pin._node.id]
        pin._tree.unpin(pin._node)
        if len(self._expiry) > 2 * len(self.active) + EXPIRY_SLACK:
            self._expiry = [entry for entry in self._expiry if entry[2].active]
            heapq.heapify(self._expiry)

    def check(self, tree: RadixTree) -> None:
        """Raises InvariantError if the invariant does not hold in `tree`, the tree in use."""
        own = Counter(pin._node for pin in self.active)
        pages = 0
        for node in tree.nodes():
            pages += tree.pages(node) if node.pin_ref else 0
            if node.pin_ref != own[node] + sum(child.pin_ref > 0 for child in node.children.values()):
                raise InvariantError("pins: a node has more or fewer pins in the tree than handles")
        if pages != tree.pinned_pages:
            raise InvariantError(f"pins: {pages} pages are pinned, {tree.pinned_pages} are counted")

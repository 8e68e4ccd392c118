"""Pins: handles that keep prefixes in the cache for a time.

A pinned prefix may be evicted from L1 to L2 but not from L2, so requests do not compute it again. Its time restarts
whenever a request uses the whole prefix. Pins may use a limited share of L2.

Invariant, verified by `check()`: the number of pins of a node in the tree is the number of active handles that end
there. Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InvariantError
from ..radix import Match, Node, RadixTree
from .timers import Timers


@dataclass(slots=True)
class _Prefix:
    """The pinned path to one node: the time of its last complete use, and the number of its pins."""

    used_s: float = -math.inf
    pins: int = 0


@dataclass(slots=True, eq=False, repr=False)
class Pin:
    """A handle, and a context manager that releases it. The cache identifies the object: a copy is not a pin."""

    ttl_s: float
    _pages: int
    _pins: Pins
    _tree: RadixTree
    node: Node
    _prefix: _Prefix
    _made_s: float

    def __repr__(self) -> str:
        return f"Pin({self._pages} pages, {'active' if self.active else 'ended'})"

    @property
    def expires_at(self) -> float:
        """The time of its expiry, by the clock of the cache, unless a request uses the whole prefix before."""
        return max(self._made_s, self._prefix.used_s) + self.ttl_s

    @property
    def pages(self) -> int:
        """Pages of the prefix, 0 once the pin has ended."""
        return self._pages if self.active else 0

    @property
    def active(self) -> bool:
        """True if the prefix is still pinned."""
        return self in self._pins.active

    def release(self) -> None:
        """End the pin now. Does nothing if it has ended."""
        self._pins.release(self)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Pins:
    """All pins of one cache, over at most `pages_max` pages of a tree. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float], pages_max: int) -> None:
        self._clock = clock
        self._pages_max = pages_max
        self._prefixes: dict[int, _Prefix] = {}  # by the id of the deepest node, which splits do not change
        self.active: dict[Pin, int] = {}  # with the numbers of their timers
        self._timers = Timers()

    def add(self, tree: RadixTree, match: Match, ttl_s: float) -> Pin | None:
        """Pin the matched pages for `ttl_s` seconds; return None if they are too many.

        A pin of zero pages has already ended. REQUIRES: the time is positive and finite.
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
            self._watch(pin)
        return pin

    def _watch(self, pin: Pin) -> None:
        """End a pin when its time is over; if it was used by then, at its new time."""

        def due() -> None:
            if pin.expires_at > self._clock():
                self._watch(pin)
            else:
                self.release(pin)

        self.active[pin] = self._timers.at(pin.expires_at, due)

    def used(self, node: Node) -> None:
        """Restart the time of the pins that end on the path to `node`, which a request has used."""
        if not self._prefixes:
            return
        now_s = self._clock()
        while node.parent is not None:
            if node.pin_ref and (prefix := self._prefixes.get(node.id)) is not None:
                prefix.used_s = now_s
            node = node.parent

    def expire(self) -> None:
        """End the expired pins."""
        self._timers.advance(self._clock())

    def clear(self) -> None:
        """End all pins."""
        for pin in list(self.active):
            self.release(pin)

    def release(self, pin: Pin) -> None:
        """End one pin. Idempotent."""
        if pin not in self.active:
            return
        self._timers.cancel(self.active.pop(pin))
        pin._prefix.pins -= 1
        if not pin._prefix.pins:
            del self._prefixes[pin.node.id]
        pin._tree.unpin(pin.node)

    def check(self, tree: RadixTree) -> None:
        """Raises InvariantError if the invariant does not hold in `tree`, the current tree."""
        own = Counter(pin.node for pin in self.active)
        pages = 0
        for node in tree.nodes():
            pages += tree.pages(node) if node.pin_ref else 0
            if node.pin_ref != own[node] + sum(child.pin_ref > 0 for child in node.children.values()):
                raise InvariantError("pins: a node has more or fewer pins in the tree than handles")
        if pages != tree.pinned_pages:
            raise InvariantError(f"pins: {pages} pages are pinned, {tree.pinned_pages} are counted")

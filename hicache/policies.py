"""Eviction policies: which candidate leaves a full tier first. The same ones serve L1 and L2.

A policy maps a node to a rank; the smallest rank leaves first, and among equal ranks the node that became a candidate
first. Ranks are computed from what the tree keeps per node: `last_access` and `created` (ticks of its clock),
`hit_count` and `priority`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any, Protocol, cast

from .errors import InvalidInput

# Requests that must have used a run before `slru` protects it from runs that were used once.
SLRU_PROTECTED_HITS = 2

# No clock of a tree gets as far. Two criteria in one int compare in half the time of a tuple of two.
TICK_BITS = 64


class Ranked(Protocol):
    """What a policy may read of a node (`hicache.radix.Node`)."""

    last_access: int
    created: int
    hit_count: int
    priority: int


class EvictionPolicy(Protocol):
    """`falls_on_use` says whether using a node may lower its rank. Only then is a queued node entered again per use."""

    falls_on_use: bool

    def rank(self, node: Any) -> Any:
        """Anything that compares with the policy's other ranks, best an int. Reads the node, changes nothing."""


class LRUPolicy:
    """Least recently used first."""

    falls_on_use = False

    def rank(self, node: Ranked) -> int:
        return node.last_access


class LFUPolicy:
    """Used by the fewest requests first, then least recently used."""

    falls_on_use = False

    def rank(self, node: Ranked) -> int:
        return (node.hit_count << TICK_BITS) + node.last_access


class FIFOPolicy:
    """Oldest first."""

    falls_on_use = False

    def rank(self, node: Ranked) -> int:
        return node.created


class FILOPolicy:
    """Newest first."""

    falls_on_use = False

    def rank(self, node: Ranked) -> int:
        return -node.created


class MRUPolicy:
    """Most recently used first: for scans over more than fits, where the oldest is needed next."""

    falls_on_use = True

    def rank(self, node: Ranked) -> int:
        return -node.last_access


class PriorityPolicy:
    """Lowest request priority first, then least recently used."""

    falls_on_use = False

    def rank(self, node: Ranked) -> int:
        return (node.priority << TICK_BITS) + node.last_access


class SLRUPolicy:
    """Segmented LRU: what fewer than `protected_hits` requests used goes first, then least recently used.

    Source: R. Karedla, J. S. Love, B. G. Wherry, "Caching strategies to improve disk system performance", 1994.
    """

    falls_on_use = False

    def __init__(self, protected_hits: int = SLRU_PROTECTED_HITS) -> None:
        if protected_hits < 1:
            raise InvalidInput(f"slru: protected_hits must be at least 1, got {protected_hits}")
        self._protected_hits = protected_hits

    def rank(self, node: Ranked) -> int:
        return ((node.hit_count >= self._protected_hits) << TICK_BITS) + node.last_access


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LRUPolicy,
    "lfu": LFUPolicy,
    "fifo": FIFOPolicy,
    "mru": MRUPolicy,
    "filo": FILOPolicy,
    "priority": PriorityPolicy,
    "slru": SLRUPolicy,
}


def register_policy(name: str, factory: Callable[[], EvictionPolicy]) -> None:
    """Make a policy of one's own known under `name`. Raises InvalidInput for a name that is taken."""
    if name in POLICIES:
        raise InvalidInput(f"eviction policy {name!r} exists already; choose another name")
    POLICIES[name] = factory


def require_policy(name: str) -> str:
    """Return `name`. Raises InvalidInput if it is neither the name of a policy nor written as `module:Class`."""
    if name not in POLICIES and ":" not in name:
        near = difflib.get_close_matches(name, POLICIES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(POLICIES)}, or module:Class"
        raise InvalidInput(f"no eviction policy is called {name!r}; {hint}")
    return name


def make_policy(name: str, *, slru_protected_hits: int = SLRU_PROTECTED_HITS) -> EvictionPolicy:
    """The policy called `name`, or made by `module:Class`.

    Raises InvalidInput for an unknown name, and for what cannot be imported or is no policy.
    """
    require_policy(name)
    if name == "slru":
        return SLRUPolicy(slru_protected_hits)
    if name in POLICIES:
        return POLICIES[name]()
    module, _, attribute = name.partition(":")
    try:
        policy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidInput(f"eviction policy {name!r} cannot be made: {error}") from error
    if not callable(getattr(policy, "rank", None)) or not isinstance(getattr(policy, "falls_on_use", None), bool):
        raise InvalidInput(f"eviction policy {name!r} has no method rank(node), or no boolean falls_on_use")
    return cast(EvictionPolicy, policy)

"""Eviction policies: the order in which candidates are evicted from a full tier. L1 and L2 use the same policies.

A policy maps a node to a rank. The node with the smallest rank is evicted first; among equal ranks, the node that
became a candidate first. Ranks are computed from fields of the node: `last_access` and `created` (ticks of the tree's
clock), `hit_count` and `priority`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from .errors import InvalidInput

# The number of requests that must use a run before `slru` protects it.
_PROTECTED_HITS = 2

# Above any tick of a tree's clock. Two criteria in one int compare in half the time of a tuple of two.
TICK_BITS = 64


class EvictionPolicy(Protocol):
    """`falls_on_use`: True if using a node may lower its rank. Only then is a queued node queued again at each use."""

    @property
    def falls_on_use(self) -> bool: ...

    @property
    def rank(self) -> Callable[[Any], Any]:
        """Return a function from a node (`hicache.radix.Node`) to its rank: any value that compares with the policy's
        other ranks, preferably an int. The function must not change the node."""


@dataclass(frozen=True, slots=True)
class RankPolicy:
    """A policy that is a function of the node."""

    rank: Callable[[Any], int]
    falls_on_use: bool = False


POLICIES: dict[str, EvictionPolicy] = {
    # Least recently used first.
    "lru": RankPolicy(lambda node: node.last_access),
    # Used by the fewest requests first, then least recently used.
    "lfu": RankPolicy(lambda node: (node.hit_count << TICK_BITS) + node.last_access),
    # Oldest first.
    "fifo": RankPolicy(lambda node: node.created),
    # Most recently used first: for scans that exceed the tier, where the oldest run is needed next.
    "mru": RankPolicy(lambda node: -node.last_access, falls_on_use=True),
    # Newest first.
    "filo": RankPolicy(lambda node: -node.created),
    # Lowest request priority first, then least recently used.
    "priority": RankPolicy(lambda node: (node.priority << TICK_BITS) + node.last_access),
    # Least recently used first, but the tree passes over what a tournament of caches keeps: see `hicache.tournament`.
    "adaptive": RankPolicy(lambda node: max(node.last_access, node.kept_at)),
    # Segmented LRU: runs that fewer requests used first, then least recently used. Source: R. Karedla, J. S. Love,
    # B. G. Wherry, "Caching strategies to improve disk system performance", 1994.
    "slru": RankPolicy(lambda node: ((node.hit_count >= _PROTECTED_HITS) << TICK_BITS) + node.last_access),
}


def require_policy(name: str) -> str:
    """Return `name`. Raises InvalidInput if it is neither the name of a policy nor written as `module:Class`."""
    if name not in POLICIES and ":" not in name:
        near = difflib.get_close_matches(name, POLICIES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(POLICIES)}, or module:Class"
        raise InvalidInput(f"{name!r} is not an eviction policy; {hint}")
    return name


def make_policy(name: str) -> EvictionPolicy:
    """Return the policy called `name`, or an instance of `module:Class`.

    Raises InvalidInput for an unknown name, and for a class that cannot be imported or is not a policy.
    """
    require_policy(name)
    if name in POLICIES:
        return POLICIES[name]
    module, _, attribute = name.partition(":")
    try:
        policy = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidInput(f"eviction policy {name!r} cannot be made: {error}") from error
    if not callable(getattr(policy, "rank", None)) or not isinstance(getattr(policy, "falls_on_use", None), bool):
        raise InvalidInput(f"eviction policy {name!r} has no method rank(node), or no boolean falls_on_use")
    return cast(EvictionPolicy, policy)

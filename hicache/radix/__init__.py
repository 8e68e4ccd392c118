"""The radix tree: nodes, matching, splitting, locks and eviction. It decides; `hicache.cache` executes."""

from .eviction import POLICIES, EvictionPolicy
from .node import Node
from .tree import Inserted, Match, RadixTree

__all__ = ["POLICIES", "EvictionPolicy", "Inserted", "Match", "Node", "RadixTree"]

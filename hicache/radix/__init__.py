"""The radix tree: nodes, matching, splitting, locks and eviction. It decides; `hicache.cache` executes."""

from .check import check_tree
from .eviction import POLICIES, EvictionPolicy
from .node import Node
from .tree import RUN_PAGES_MAX, Inserted, Match, RadixTree

__all__ = ["POLICIES", "RUN_PAGES_MAX", "EvictionPolicy", "Inserted", "Match", "Node", "RadixTree", "check_tree"]

"""The radix tree: nodes, matching, splitting, locks and eviction. It decides; `hicache.cache` executes."""

from ..policies import POLICIES, EvictionPolicy, make_policy
from .check import check_tree, pretty_print
from .node import Node, may_leave_device
from .prefixes import Peek
from .tree import CUT_PAGES_MIN, RUN_PAGES_MAX, Evicted, Fate, Inserted, Match, RadixTree, TreeObserver

__all__ = [
    "CUT_PAGES_MIN",
    "POLICIES",
    "RUN_PAGES_MAX",
    "Evicted",
    "EvictionPolicy",
    "Fate",
    "Inserted",
    "Match",
    "Node",
    "Peek",
    "RadixTree",
    "TreeObserver",
    "check_tree",
    "make_policy",
    "may_leave_device",
    "pretty_print",
]

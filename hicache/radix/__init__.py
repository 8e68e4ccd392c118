"""The radix tree: nodes, matching, splitting, locks and eviction. The tree decides; `hicache.cache` executes."""

from ..policies import POLICIES, make_policy
from .adaptive import AdaptiveEviction
from .check import check_tree, pretty_print
from .node import NO_HISTORY, Node, UseHistory, may_leave_device, may_leave_host, may_lose_copy
from .prefixes import PrefixTree, TreeObserver
from .results import EvictionChoice, Inserted, Match, Peek
from .tree import CUT_PAGES_MIN, RUN_PAGES_MAX, RadixTree

__all__ = [
    "CUT_PAGES_MIN",
    "NO_HISTORY",
    "POLICIES",
    "RUN_PAGES_MAX",
    "AdaptiveEviction",
    "EvictionChoice",
    "Inserted",
    "Match",
    "Node",
    "Peek",
    "PrefixTree",
    "RadixTree",
    "TreeObserver",
    "UseHistory",
    "check_tree",
    "make_policy",
    "may_leave_device",
    "may_leave_host",
    "may_lose_copy",
    "pretty_print",
]

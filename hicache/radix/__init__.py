"""The radix tree: nodes, matching, splitting, locks and eviction. The tree decides; `hicache.cache` executes."""

from ..policies import POLICIES, make_policy
from .adaptive import AdaptiveEviction
from .check import check_tree, pretty_print
from .hinted import HintedOrder
from .node import NO_HISTORY, RELEASED, Node, NodeHint, UseHistory, may_leave_device, may_leave_host, may_lose_copy
from .prefixes import PrefixTree, TreeObserver
from .results import EvictionChoice, Inserted, Match, Peek
from .tree import CUT_PAGES_MIN, RUN_PAGES_MAX, RadixTree

__all__ = [
    "CUT_PAGES_MIN",
    "NO_HISTORY",
    "POLICIES",
    "RELEASED",
    "RUN_PAGES_MAX",
    "AdaptiveEviction",
    "EvictionChoice",
    "HintedOrder",
    "Inserted",
    "Match",
    "Node",
    "NodeHint",
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

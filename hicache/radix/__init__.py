"""The radix tree: nodes, matching, splitting, locks and eviction. It decides; `hicache.cache` executes."""

from ..policies import POLICIES, make_policy
from .check import check_tree, pretty_print
from .node import Node, may_leave_device
from .prefixes import Peek
from .tree import CUT_PAGES_MIN, RUN_PAGES_MAX, Fate, Inserted, Match, RadixTree

__all__ = [
    "CUT_PAGES_MIN",
    "POLICIES",
    "RUN_PAGES_MAX",
    "Fate",
    "Inserted",
    "Match",
    "Node",
    "Peek",
    "RadixTree",
    "check_tree",
    "make_policy",
    "may_leave_device",
    "pretty_print",
]

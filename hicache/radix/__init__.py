"""The radix tree: nodes, matching, splitting, locks and eviction. It decides; `hicache.cache` executes."""

from ..policies import POLICIES, EvictionPolicy, make_policy, register_policy
from .check import check_tree
from .dump import dump_tree, pretty_print
from .node import Node, may_leave_device
from .observer import TreeObserver
from .residency import CUT_PAGES_MIN, Evicted, Fate, Residency
from .tree import RUN_PAGES_MAX, Inserted, Match, Peek, RadixTree

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
    "Residency",
    "TreeObserver",
    "check_tree",
    "dump_tree",
    "make_policy",
    "may_leave_device",
    "pretty_print",
    "register_policy",
]

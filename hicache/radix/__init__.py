"""The radix tree: nodes, matching, splitting, locks and eviction. It decides; `hicache.cache` executes."""

from .check import check_tree
from .dump import dump_tree, pretty_print
from .node import Node, may_leave_device
from .observer import TreeObserver
from .policies import POLICIES, SLRU_PROTECTED_HITS, EvictionPolicy, make_policy, register_policy
from .residency import CUT_PAGES_MIN, Evicted, Fate, Residency
from .tree import RUN_PAGES_MAX, Inserted, Match, Peek, RadixTree

__all__ = [
    "CUT_PAGES_MIN",
    "POLICIES",
    "RUN_PAGES_MAX",
    "SLRU_PROTECTED_HITS",
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

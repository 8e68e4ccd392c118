"""The node of the radix tree: a run of pages below its parent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..keys import PageChain
from ..types import PageIds


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of consecutive pages, where each tier holds them, and who needs them there.

    `key` is the run's part of a `RadixKey` (whole pages), the empty bytes for a root. `device` and `host` are the
    page ids in L1 and L2, one per page of the run, or None. The combinations are the states of DESIGN.md:

        device  host   state
        yes     no     on L1 only
        yes     yes    on both: L2 has a copy
        no      yes    host-only (tombstone)

    Splitting makes a new node for the head of the run and keeps this object for its tail, so whoever holds a node and a
    page count finds the whole run again by walking up (`RadixTree.span`).
    """

    id: int
    parent: Node | None
    key: bytes
    created: int  # tick of the tree's clock
    last_access: int
    children: dict[bytes, Node]  # by the bytes of the child's first page
    priority: int = 0  # the highest of the requests that used it
    recent_child: Node | None = None  # the one that was looked for last, where a lookup tries first
    device: PageIds | None = None
    host: PageIds | None = None
    page_keys: bytes | None = None  # 32 bytes a page, once something has needed them; the seed of a root
    chain: PageChain | None = None  # ends with the keys of this run, for a store or an event; it may begin above
    hit_count: int = 1  # requests that computed or reused this run
    # Each counts those who need this run, and the children that have any.
    lock_ref: int = 0  # requests and copies: it stays where it is
    host_ref: int = 0  # operations and pins: its host pages stay
    pin_ref: int = 0  # pins; they count in host_ref too
    device_children: int = 0  # children that are on L1
    load_pending: bool = False  # a copy from L2 is in flight: the L1 pages are not filled yet
    backup_pending: bool = False  # a copy to L2 is in flight
    copied: bool = False  # it has been copied to L2 since it was computed, and may have left there
    copy_listed: bool = False  # it has a valid entry in the stack of copies
    store_pending: bool = False  # a store to L3 is in flight
    stored: bool = False  # L3 had it when this was last known
    touched_s: float = -math.inf  # when L3 was last told that this run was used
    proved_until_s: float = 0.0  # until when a load may rely on a verification of the host pages
    device_entry: int = 0  # which entry of the L1 eviction queue is this node's; 0 for none
    host_entry: int = 0  # the same for L2, of a node that is on no other tier
    told: int = 0  # the last snapshot of events that has this node

    def __repr__(self) -> str:
        tiers = "".join(("D" if self.device is not None else "", "H" if self.host is not None else "")) or "-"
        return f"Node({self.id}, {len(self.key)} key bytes, {tiers}, lock {self.lock_ref}, host_ref {self.host_ref})"


# Shared by all leaves, since an empty dictionary of their own costs 64 bytes each. Never written to.
NO_CHILDREN: dict[bytes, Node] = {}


def may_leave_device(node: Node) -> bool:
    """Whether eviction may take `node` off L1: on it, not locked, no child there."""
    return node.device is not None and node.lock_ref == 0 and node.device_children == 0


def may_leave_host(node: Node) -> bool:
    """Whether eviction may take `node`, which is on no other tier, off L2: neither locked nor held, no child."""
    return (
        node.device is None
        and node.host is not None
        and node.lock_ref == 0
        and node.host_ref == 0
        and not node.children
        and node.parent is not None
    )


def may_lose_copy(node: Node) -> bool:
    """Whether eviction may take the copy on L2 of `node`, which is on L1: it is not held."""
    return node.device is not None and node.host is not None and node.host_ref == 0


def may_grow(node: Node) -> bool:
    """Whether what follows `node` may become part of it: it is on L1 alone, was copied nowhere yet, and only the
    holder of its one lock needs it.
    """
    in_use = node.lock_ref != 1 or node.host_ref or node.children or node.backup_pending
    return not (in_use or node.host is not None or node.copied or node.stored)

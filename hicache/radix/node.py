"""The node of the radix tree: a run of pages below its parent, and the number of its uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

from ..keys import PAGE_KEY_BYTES, PageChain
from ..types import PageIds

RELEASED = -1.0  # the value of a `NodeHint`


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of consecutive pages: their location on each tier, and the locks, holds and pins that keep them there.

    `key` is the run's part of a `RadixKey` (whole pages); a root has empty bytes. `device` and `host` are the page ids
    in L1 and L2, one per page of the run, or None. The combinations are the states of DESIGN.md:

        device  host   state
        yes     no     on L1 only
        yes     yes    on both: L2 has a copy
        no      yes    host-only (tombstone)

    A split makes a new node for the head of the run and keeps this object for the tail. So the holder of a node and a
    page count finds the whole run again by walking up (`RadixTree.span`).
    """

    id: int
    parent: Node | None
    key: bytes
    created: int  # tick of the tree's clock
    last_access: int
    children: dict[bytes, Node]  # by the bytes of the child's first page
    priority: int = 0  # the highest priority of the requests that used it
    recent_child: Node | None = None  # the child that was looked up last; the next lookup tries it first
    device: PageIds | None = None
    host: PageIds | None = None
    last_id: int | None = None  # identity of its last page for `ghosts`, None until first needed
    page_keys: bytes | None = None  # 32 bytes a page, None until first needed; for a root: its seed
    chain: PageChain | None = None  # ends with the keys of this run, for a store or an event; may begin at an ancestor
    hit_count: int = 1  # requests that computed or reused this run
    # Each of the next three counts the users of this run, plus each child whose own count is not 0.
    lock_ref: int = 0  # requests and copies: the node stays on its tiers
    host_ref: int = 0  # operations and pins: its host pages stay
    pin_ref: int = 0  # pins, which also count in host_ref
    device_children: int = 0  # children that are on L1
    load_pending: bool = False  # a copy from L2 is in flight: the L1 pages are not filled yet
    backup_pending: bool = False  # a copy to L2 is in flight
    copied: bool = False  # it was copied to L2 after it was computed; L2 may have evicted it since
    copy_listed: bool = False  # it has a valid entry in the stack of copies
    store_pending: bool = False  # a store to L3 is in flight
    stored: bool = False  # L3 has it, as far as is known
    loss: str = ""  # why L3 did not get it, or `lost`, or `damaged`; a detail of `ghosts.Reason.NOT_STORED`
    lost_access: int = -1  # `last_access` when L3 lost it: while they are equal, no request has used it since
    sealed: bool = False  # the frames of its host pages were sealed with their page keys
    touched_s: float = -math.inf  # time of the last notice to L3 that this run was used
    proved_until_s: float = -math.inf  # until this time a load may trust the last verification of the host pages
    device_entry: int = 0  # number of this node's entry in the L1 eviction queue; 0 for none
    host_entry: int = 0  # the same in the L2 eviction queue, for a node on L2 only
    kept_at: int = 0  # tick of the tree's clock when an adaptive eviction last passed over this node
    block: tuple[int, int, bool] | None = None  # see `AdaptiveEviction._block_of`; None until first needed
    hint: NodeHint | None = None  # what a session said about it, for its order of eviction
    visited: int = 0  # number of the last snapshot of events that contains this node; 0 before its first event

    def move_head(self, head: Node, pages: int) -> None:
        """Move the first `pages` pages of the run to `head`, a new node with their key, which becomes the parent.

        Page ids and page keys are divided; locks, holds, pins, uses and operations in flight apply to both nodes.
        """
        head.created, head.last_access, head.hit_count = self.created, self.last_access, self.hit_count
        # All users of the run hold the tail; for the head that counts as one child.
        head.lock_ref, head.host_ref, head.pin_ref = map(int, (self.lock_ref > 0, self.host_ref > 0, self.pin_ref > 0))
        head.load_pending, head.backup_pending, head.copied = self.load_pending, self.backup_pending, self.copied
        head.store_pending, head.stored, head.visited = self.store_pending, self.stored, self.visited
        head.lost_access, head.hint, head.loss = self.lost_access, self.hint, self.loss
        head.sealed, head.proved_until_s, head.touched_s = self.sealed, self.proved_until_s, self.touched_s
        if self.device is not None:
            head.device, self.device = self.device[:pages].copy(), self.device[pages:].copy()
            head.device_children = 1
        if self.host is not None:
            head.host, self.host = self.host[:pages].copy(), self.host[pages:].copy()
        if self.page_keys is not None:
            key_cut = pages * PAGE_KEY_BYTES
            head.page_keys, self.page_keys = self.page_keys[:key_cut], self.page_keys[key_cut:]
        self.key = self.key[len(head.key) :]
        if self.hint is not None:
            self.hint.nodes.append(head)
        self.parent, self.block = head, None

    def __repr__(self) -> str:
        tiers = "".join(("D" if self.device is not None else "", "H" if self.host is not None else "")) or "-"
        return f"Node({self.id}, {len(self.key)} key bytes, {tiers}, lock {self.lock_ref}, host_ref {self.host_ref})"


@dataclass(slots=True, eq=False)
class NodeHint:
    """What the session `owner` said at `made_s`, at tick `access` of the tree's clock, about `nodes`. `value` is
    `RELEASED`, 0, or that of retained pages; `hinted` has the order that follows."""

    access: int
    made_s: float
    owner: ref[Any]  # weak, because sessions have pins, which refer to their tree
    value: float = 0.0
    return_s: float = math.inf
    trust: float = 0.0
    nodes: list[Node] = field(default_factory=list)

    def speaks_for(self, node: Node) -> bool:
        """True if no other request has used `node` since."""
        return node.last_access <= self.access

    def decides(self, node: Node) -> bool:
        """True if the order of `node` is not that of its last use."""
        return self.value > 0 or (self.speaks_for(node) and (self.value < 0 or self.trust > 0))


# Shared by all leaves and never written to, because an empty dictionary per leaf costs 64 bytes.
NO_CHILDREN: dict[bytes, Node] = {}


def may_leave_device(node: Node) -> bool:
    """True if `node` may be evicted from L1: it is on L1 and not locked, and has no child on L1."""
    return node.device is not None and node.lock_ref == 0 and node.device_children == 0


def may_leave_host(node: Node) -> bool:
    """True if `node` is on L2 only and may be evicted: it is neither locked nor held, and has no child."""
    return (
        node.device is None
        and node.host is not None
        and node.lock_ref == 0
        and node.host_ref == 0
        and not node.children
        and node.parent is not None
    )


def may_lose_copy(node: Node) -> bool:
    """True if `node` is on L1 and its copy on L2 may be evicted: it is not held."""
    return node.device is not None and node.host is not None and node.host_ref == 0


def may_grow(node: Node) -> bool:
    """True if later pages may be appended to `node`: it is on L1 only, was never copied or stored, is not retained, has
    no children and exactly one lock.
    """
    in_use = node.lock_ref != 1 or node.host_ref or node.children or node.backup_pending
    is_retained = node.hint is not None and node.hint.value > 0
    return not (in_use or is_retained or node.host is not None or node.copied or node.stored)


class UseHistory(NamedTuple):
    """How many requests have used the pages of a prompt, on any tier, also before their last eviction.

    The inserting request already counts for the first `known_pages` pages and is not counted there again. `steps` are
    pairs (end page, uses) with ascending ends and descending uses.
    """

    known_pages: int = 0
    steps: tuple[tuple[int, int], ...] = ()

    def of_run(self, start_page: int, end_page: int) -> tuple[int, int]:
        """Return the uses of page `start_page`, and the end of the pages with the same number of uses, at most
        `end_page`. Pages after the last step have one use.
        """
        for end, count in self.steps:
            if start_page < end:
                return count, min(end, end_page)
        return 1, end_page


# For a caller that counts no uses outside the tree: a new page has been used once.
NO_HISTORY = UseHistory()

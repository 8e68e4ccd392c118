"""The node of the radix tree: a run of pages below its parent."""

from __future__ import annotations

from ..types import PageIds


class Node:
    """A run of consecutive pages, and where each tier holds them.

    `key` is the run's tokens (uint32 little endian, whole pages), the empty bytes for a root. `device` and `host` are
    the page ids in L1 and L2, one per page of the run, or None. The combinations are the states of DESIGN.md:

        device  host   state
        yes     no     on L1 only
        yes     yes    on both
        no      yes    host-only (tombstone)

    Splitting makes a new node for the head of the run and keeps this object for its tail, so whoever holds a node and a
    page count finds the whole run again by walking up (`RadixTree.span`).
    """

    __slots__ = (
        "backup_pending",
        "children",
        "device",
        "device_children",
        "host",
        "host_ref",
        "id",
        "in_device_queue",
        "in_host_queue",
        "key",
        "last_access",
        "lock_ref",
        "page_keys",
        "parent",
        "stored",
    )

    def __init__(self, node_id: int, parent: Node | None, key: bytes, last_access: int) -> None:
        self.id = node_id
        self.parent = parent
        self.key = key
        self.children: dict[bytes, Node] = {}  # by the bytes of the child's first page
        self.device: PageIds | None = None
        self.host: PageIds | None = None
        self.page_keys: bytes | None = None  # 32 bytes a page, made when storage first needs them
        self.last_access = last_access  # tick of the tree's clock
        self.lock_ref = 0  # requests and copies that need this run where it is
        self.host_ref = 0  # storage operations that read the host pages or build upon them
        self.device_children = 0  # children that are on L1
        self.backup_pending = False  # a copy to L2 is under way
        self.stored = False  # handed to L3 (a hint: L3 may have dropped it since)
        self.in_device_queue = False  # has an entry in the L1 eviction queue
        self.in_host_queue = False  # has an entry in the L2 eviction queue

    def __repr__(self) -> str:
        tiers = "".join(("D" if self.device is not None else "", "H" if self.host is not None else "")) or "-"
        return f"Node({self.id}, {len(self.key)} key bytes, {tiers}, lock {self.lock_ref}, host_ref {self.host_ref})"


def may_leave_device(node: Node) -> bool:
    """Whether eviction may take `node` off L1: on it, not locked, no child there."""
    return node.device is not None and node.lock_ref == 0 and node.device_children == 0


def may_leave_host(node: Node) -> bool:
    """Whether eviction may take `node` off L2: on no other tier, neither locked nor held, no child."""
    return (
        node.device is None
        and node.host is not None
        and node.lock_ref == 0
        and node.host_ref == 0
        and not node.children
        and node.parent is not None
    )

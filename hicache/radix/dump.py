"""A tree for people: as text, and as data for JSON. Neither shows tokens unless asked to: tokens are prompts."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..keys import PAGE_KEY_BYTES
from .node import Node
from .tree import RadixTree

# Text is for reading: a tree of a hundred thousand nodes is better dumped as data.
PRETTY_NODES_MAX = 1000


def dump_tree(tree: RadixTree, *, tokens: bool = False) -> dict[str, Any]:
    """The counts of `tree` and its nodes as a flat list, parents first, ready for `json.dumps`.

    Each node names its parent; a root's children have none. With `tokens`, the token ids of each run are added (for
    bigram keys both of each pair), unless the engine gives page keys in place of tokens. Changes nothing.
    """
    return {
        "page_size": tree.page_size,
        "node_count": tree.node_count,
        "device_evictable_pages": tree.device_evictable_pages,
        "device_protected_pages": tree.device_protected_pages,
        "host_evictable_pages": tree.host_evictable_pages,
        "host_protected_pages": tree.host_protected_pages,
        "pinned_pages": tree.pinned_pages,
        "nodes": [_fields(tree, node, tokens) for node in tree.nodes()],
    }


def pretty_print(tree: RadixTree, *, tokens: bool = False) -> str:
    """`tree` as indented text, a line per node, at most `PRETTY_NODES_MAX` of them. Changes nothing."""
    lines = [
        f"{tree.node_count} nodes, pages of {tree.page_size}; "
        f"L1 {tree.device_evictable_pages} evictable + {tree.device_protected_pages} protected, "
        f"L2 {tree.host_evictable_pages} + {tree.host_protected_pages}, {tree.pinned_pages} pinned"
    ]
    stack = [(child, 1) for root in reversed(tree.roots()) for child in root.children.values()]
    while stack and len(lines) <= PRETTY_NODES_MAX:
        node, depth = stack.pop()
        lines.append("  " * depth + _line(tree, node, tokens))
        stack.extend((child, depth + 1) for child in node.children.values())
    if stack:
        lines.append(f"  ... and {tree.node_count - PRETTY_NODES_MAX} nodes more")
    return "\n".join(lines)


def _fields(tree: RadixTree, node: Node, tokens: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": node.id,
        "parent": node.parent.id if node.parent is not None and node.parent.parent is not None else None,
        "pages": tree.pages(node),
        "device_pages": None if node.device is None else node.device.tolist(),
        "host_pages": None if node.host is None else node.host.tolist(),
        "hit_count": node.hit_count,
        "priority": node.priority,
        "created": node.created,
        "last_access": node.last_access,
        "lock_ref": node.lock_ref,
        "host_ref": node.host_ref,
        "pin_ref": node.pin_ref,
        "backup_pending": node.backup_pending,
        "stored": node.stored,
    }
    if tokens and tree.position_bytes != PAGE_KEY_BYTES:
        fields["tokens"] = np.frombuffer(node.key, dtype="<u4").tolist()
    return fields


def _line(tree: RadixTree, node: Node, tokens: bool) -> str:
    tiers = "+".join(name for name, held in (("L1", node.device), ("L2", node.host)) if held is not None)
    marks = [
        f"#{node.id}",
        f"{tree.pages(node)} pages",
        tiers,
        f"used by {node.hit_count}, last at {node.last_access}",
        *(f"{name} {count}" for name, count in (
            ("priority", node.priority), ("locks", node.lock_ref), ("holds", node.host_ref), ("pins", node.pin_ref)
        ) if count),
        *(["copy under way"] if node.backup_pending else []),
        *(["stored"] if node.stored else []),
    ]  # fmt: skip
    if tokens and tree.position_bytes != PAGE_KEY_BYTES:
        first = np.frombuffer(node.key, dtype="<u4", count=min(8, len(node.key) // 4)).tolist()
        marks.append(f"tokens {' '.join(map(str, first))} ...")
    return ", ".join(marks)

"""Check a whole radix tree, for tests and idle engines, and print it as text."""

from __future__ import annotations

import numpy as np

from ..errors import InvariantError
from ..keys import PAGE_KEY_BYTES
from ..types import NO_PAGES
from .node import NO_CHILDREN, Node, may_leave_device, may_leave_host, may_lose_copy
from .tree import RadixTree

# The text is for people, so only the first nodes of a larger tree are shown.
PRETTY_NODES_MAX = 1000


def check_tree(tree: RadixTree) -> None:
    """Check all invariants of `RadixTree` and `PrefixTree`. Raises InvariantError if one does not hold."""
    entries = (tree.queues.device.nodes(), tree.queues.host.nodes(), tree.queues.copies.nodes())
    queues = [[node.id for node in queue] for queue in entries]
    queued = [set(ids) for ids in queues]
    _require(list(map(len, queues)) == list(map(len, queued)), "a node has two valid entries in one eviction queue")
    _require(not NO_CHILDREN, "the shared empty children dictionary has entries")
    nodes = list(tree.nodes())
    for node in (*tree.roots(), *nodes):
        _check_children(tree, node)
    for node in nodes:
        _check_node(tree, node)
        _check_queues(node, *queued)
    for key, node in tree.stored.ends().items():
        indexed = node.stored and node.page_keys is not None and node.page_keys.endswith(key)
        _require(indexed, "{!r} is indexed as stored under a key that is not its last", node)
        there = node.parent is not None and node.parent.children.get(node.key[: tree.page_bytes]) is node
        _require(there, "{!r} is indexed as stored but is not in the tree", node)
    _require(len(nodes) == tree.node_count, "{} nodes, but {} are counted", len(nodes), tree.node_count)
    device = [node for node in nodes if node.device is not None]
    host = [node for node in nodes if node.host is not None]
    copies = [node for node in host if node.device is not None]
    totals = {
        "device_evictable_pages": [node for node in device if not node.lock_ref],
        "device_protected_pages": [node for node in device if node.lock_ref],
        "pinned_pages": [node for node in nodes if node.pin_ref],
        "host_evictable_pages": [n for n in host if not n.host_ref and (n.device is not None or not n.lock_ref)],
        "host_copy_pages": copies,
        "host_pages": host,
    }
    for name, counted in totals.items():
        _require(sum(map(tree.pages, counted)) == getattr(tree, name), "{} is not the sum over the nodes", name)
    for runs, tier in (([node.device for node in device], "L1"), ([node.host for node in host], "L2")):
        ids = np.concatenate([NO_PAGES, *(run for run in runs if run is not None)])
        _require(len(np.unique(ids)) == len(ids), "two nodes hold the same {} page", tier)


def _require(holds: bool, message: str, *parts: object) -> None:
    """Raise InvariantError unless `holds`. The message is formatted only then, because nearly all checks pass."""
    if not holds:
        raise InvariantError(f"radix tree: {message.format(*parts)}")


def _check_children(tree: RadixTree, node: Node) -> None:
    page_bytes = tree.page_bytes
    for first_page, child in node.children.items():
        _require(child.parent is node, "{!r} does not point back to its parent", child)
        _require(first_page == child.key[:page_bytes], "{!r} is filed under another page", child)
    if node.parent is not None:
        for name in ("lock_ref", "host_ref", "pin_ref"):
            needed = sum(getattr(child, name) > 0 for child in node.children.values())
            _require(getattr(node, name) >= needed, "{!r}: {} of its children count in {}", node, needed, name)
    recent = node.recent_child
    _require(recent is None or recent in node.children.values(), "{!r}: recent_child is not one of its children", node)
    on_device = sum(child.device is not None for child in node.children.values())
    _require(node.device_children == on_device, "{!r} counts {} children on L1", node, node.device_children)


def _check_node(tree: RadixTree, node: Node) -> None:
    page_bytes = tree.page_bytes
    pages = len(node.key) // page_bytes
    _require(pages > 0 and len(node.key) % page_bytes == 0, "{!r} is not whole pages", node)
    _require(pages <= tree.run_pages_max, "{!r} has more than {} pages", node, tree.run_pages_max)
    _require(node.device is not None or node.host is not None, "{!r} is on no tier", node)
    parent = node.parent
    assert parent is not None
    for name, own in (("L1", node.device), ("L2", node.host)):
        if own is not None:
            _require(len(own) == pages, "{!r} has {} {} pages for {} pages of tokens", node, len(own), name, pages)
    closed = node.device is None or parent.parent is None or parent.device is not None
    _require(closed, "{!r} is on L1 but its parent is not", node)
    _require(node.page_keys is None or len(node.page_keys) == pages * PAGE_KEY_BYTES, "{!r}: wrong page keys", node)
    hashed = tree.position_bytes != PAGE_KEY_BYTES
    _require(hashed or node.page_keys == node.key, "{!r}: its page keys differ from those of the engine", node)
    _require(node.lock_ref >= 0 and node.host_ref >= node.pin_ref >= 0, "{!r}: impossible reference counts", node)
    _require(node.created <= node.last_access, "{!r} was used before it was made", node)


def _check_queues(node: Node, device_queue: set[int], host_queue: set[int], copies: set[int]) -> None:
    _require(bool(node.device_entry) == (node.id in device_queue), "{!r}: L1 queue mark is wrong", node)
    _require(bool(node.host_entry) == (node.id in host_queue), "{!r}: L2 queue mark is wrong", node)
    _require(node.copy_listed == (node.id in copies), "{!r}: its mark as a copy is wrong", node)
    _require(not may_leave_device(node) or node.id in device_queue, "{!r} may leave L1 but is not queued", node)
    _require(not may_leave_host(node) or node.id in host_queue, "{!r} may leave L2 but is not queued", node)
    _require(not may_lose_copy(node) or node.id in copies, "{!r} may lose its copy but is not listed", node)


def pretty_print(tree: RadixTree) -> str:
    """Return `tree` as indented text, one line per node, for at most `PRETTY_NODES_MAX` nodes. Does not mutate.

    The text contains no tokens, because tokens are prompts.
    """
    lines = [
        f"{tree.node_count} nodes, pages of {tree.page_size}; "
        f"L1 {tree.device_evictable_pages} evictable + {tree.device_protected_pages} protected, "
        f"L2 {tree.host_evictable_pages} + {tree.host_pages - tree.host_evictable_pages}, {tree.pinned_pages} pinned"
    ]
    stack = [(child, 1) for root in reversed(tree.roots()) for child in root.children.values()]
    while stack and len(lines) <= PRETTY_NODES_MAX:
        node, depth = stack.pop()
        lines.append("  " * depth + _line(tree, node))
        stack.extend((child, depth + 1) for child in node.children.values())
    if stack:
        lines.append(f"  ... and {tree.node_count - PRETTY_NODES_MAX} nodes more")
    return "\n".join(lines)


def _line(tree: RadixTree, node: Node) -> str:
    counts = {"priority": node.priority, "locks": node.lock_ref, "holds": node.host_ref, "pins": node.pin_ref}
    states = {"backup in flight": node.backup_pending, "stored": node.stored}
    marks = [
        f"#{node.id}",
        f"{tree.pages(node)} pages",
        "+".join(name for name, held in (("L1", node.device), ("L2", node.host)) if held is not None),
        f"used by {node.hit_count}, last at {node.last_access}",
        *(f"{name} {count}" for name, count in counts.items() if count),
        *(state for state, holds in states.items() if holds),
    ]
    return ", ".join(marks)

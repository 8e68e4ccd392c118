"""What happens in the tree, as events in a stream, and the whole tree as a snapshot of events.

Storage is an attribute of pages in the tree: a page is reported as stored there when a store was acknowledged or when
it came from there, and as removed when it leaves its last tier, whatever storage still has of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..events import Cleared, EventStream, Medium, Removed, Stored
from ..keys import PAGE_KEY_BYTES
from ..radix import Node, RadixTree


class EventRecorder:
    """The observer of a tree that writes events into `stream`. Scheduler thread; never blocks."""

    def __init__(self, stream: EventStream) -> None:
        self.stream = stream

    def stored(self, medium: Medium, tree: RadixTree, node: Node) -> None:
        """`node` has just appeared on `medium`. One that comes to the host from storage is reported on both."""
        event = stored_event(medium, tree, node)
        self.stream.put(event)
        if node.stored and medium is Medium.HOST:
            self.stream.put(event._replace(medium=Medium.STORAGE))

    def removed(self, medium: Medium, tree: RadixTree, node: Node) -> None:
        """`node` is about to leave `medium`. With its last tier it leaves the tree, so storage as well."""
        keys = tuple(tree.page_keys(node))
        self.stream.put(Removed(medium, keys))
        if node.stored and (node.device is None or node.host is None):
            self.stream.put(Removed(Medium.STORAGE, keys))

    def cleared(self) -> None:
        """All nodes of the tree are gone at once."""
        self.stream.put(Cleared())

    def poll(self, tree: RadixTree) -> None:
        """Provide a snapshot of `tree` if a reader waits for one, which costs a walk over all nodes. Once per step."""
        if self.stream.snapshot_wanted:
            self.stream.put_snapshot(snapshot(tree))


def stored_event(medium: Medium, tree: RadixTree, node: Node) -> Stored:
    """The event that `node` is on `medium`. Hashes its tokens unless they are hashed; where page keys are given, the
    tokens are not known and the event has none."""
    parent = node.parent
    prior = tree.last_key(parent)
    keys = tuple(tree.page_keys(node))
    tokens = b"" if tree.position_bytes == PAGE_KEY_BYTES else node.key
    if parent is None or parent.parent is None:
        return Stored(medium, keys, None, prior, tokens, tree.page_size)
    return Stored(medium, keys, prior, b"", tokens, tree.page_size)


def snapshot(tree: RadixTree) -> Iterator[Stored]:
    """The events that make an empty index equal to `tree`, parents before children. Scheduler thread."""
    for node in tree.nodes():
        event = stored_event(Medium.DEVICE, tree, node)
        if node.device is not None:
            yield event
        if node.host is not None:
            yield event._replace(medium=Medium.HOST)
        if node.stored:
            yield event._replace(medium=Medium.STORAGE)

"""Records the changes of the tree as events in a stream, and the whole tree as a snapshot of events.

The scheduler does not hash page keys here: an event has the chain of its keys, and the reading thread hashes them.
Storage outlives the tree: a page is reported as stored there when a store was acknowledged or when it was read from
there, and as removed when storage has lost it, not when it leaves the tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..arguments import instance, whole
from ..events import Cleared, EventStream, Medium, Origin, Recorded, Removed, RemovedRun, Snapshot, StoredRun
from ..events.types import NO_ORIGIN, PageBlocks
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES, PageChain, RadixKey, namespace_seed, split_keys
from ..radix import Node, PrefixTree

# The time of a snapshot within one step of the scheduler: a tree of 100,000 nodes takes about 300 steps.
SLICE_S = 0.0005
# Nodes that a snapshot lists at once.
BLOCK_NODES = 256
# Adapters and tenants whose names are stored; the oldest is forgotten first.
ORIGINS_MAX = 65_536
# Pages that were described and are not in the tree; the oldest is forgotten first. Some are being read from storage or
# written to L2, so this is more than the requests in flight have, and with pages of 64 tokens about 50 MB.
AWAITED_MAX = 65_536


class EventRecorder:
    """The observer of a tree that writes events into `stream`. Scheduler thread; never blocks.

    `session_id` is that of the turn whose pages are being inserted; the caller sets it around the insertion. `slice_s`
    limits the time of a snapshot within one step.

    Invariant: `_blocks` has each leaf of the tree, by its id, in blocks of neighbouring ids. It has all nodes from
    their first event to their end, except heads that were split off and still have children. So a snapshot finds all
    nodes, a few hundred at a time, even if one node has 100,000 children, which could only be listed at once.

    Invariant: `_described` has the engine's blocks of pages that are in the tree, by page key, and `_awaited` those of
    pages that are not there: they have not entered it yet, or have left it and may come back, because a request in
    flight may read them again. Both are empty unless the engine describes its pages.
    """

    def __init__(self, stream: EventStream, *, slice_s: float = SLICE_S) -> None:
        self.stream = stream
        self._slice_s = slice_s
        self.session_id: str | None = None
        self._origins: dict[bytes, Origin] = {}
        self._blocks: dict[int, dict[int, Node]] = {}
        self._walk: SnapshotWalk | None = None
        self._walks = 1
        self._described: dict[bytes, PageBlocks] = {}
        self._awaited: dict[bytes, PageBlocks] = {}

    def describe(
        self, extra_key: str | None, cache_salt: str | None, lora_id: int | None, lora_name: str | None
    ) -> None:
        """Set the origin of prompts with (`extra_key`, `cache_salt`) for events from now on."""
        if lora_id is not None:
            whole("lora_id", lora_id)
        if lora_name is not None:
            instance("lora_name", lora_name, str)
        seed = namespace_seed(extra_key, cache_salt)
        self._origins.pop(seed, None)
        while len(self._origins) >= ORIGINS_MAX:
            del self._origins[next(iter(self._origins))]
        self._origins[seed] = Origin(lora_id, lora_name, cache_salt, extra_key=extra_key)

    def describe_blocks(self, key: RadixKey, start_page: int, blocks_of: Callable[[int], PageBlocks]) -> None:
        """Set the engine's blocks of the pages of `key` from `start_page` on, for events from now on. `blocks_of` is
        called with the number of each page whose blocks are unknown."""
        awaited = self._awaited
        for number, page in enumerate(split_keys(key.tokens)[start_page:], start_page):
            if page not in self._described:
                blocks = awaited.pop(page) if page in awaited else blocks_of(number)
                awaited[page] = blocks  # as the newest
        self._limit_awaited()

    def _limit_awaited(self) -> None:
        while len(self._awaited) > AWAITED_MAX:
            del self._awaited[next(iter(self._awaited))]

    def stored(self, medium: Medium, tree: PrefixTree, node: Node) -> None:
        """Record that `node` was just added to `medium`. A node read from storage to the host is reported on both."""
        if not node.visited:
            node.visited = 1
            self._enter(node)
        event = self.stored_run(medium, tree, node, self.session_id)
        self._added(event, tree, node)
        if node.stored and medium is Medium.HOST:
            self._added(event._replace(medium=Medium.STORAGE), tree, node)

    def _added(self, event: StoredRun, tree: PrefixTree, node: Node) -> None:
        self.stream.put(event)
        if self._walk is not None:
            self._walk.added(event, tree, node)

    def grown(self, tree: PrefixTree, node: Node, pages: int, prior: bytes | PageChain) -> None:
        """See `TreeObserver`."""
        part = node.key[-pages * tree.page_bytes :]
        given = tree.position_bytes == PAGE_KEY_BYTES
        keys = part if given else PageChain(part, tree.page_bytes // TOKEN_BYTES, prior)
        self._added(StoredRun(
            Medium.DEVICE, pages, keys, prior if given else b"", False, b"" if given else part, tree.page_size,
            self._origin(node, self.session_id),
        ), tree, node)

    def removed(self, medium: Medium, tree: PrefixTree, node: Node) -> None:
        """Record that `node` is about to leave `medium`, or was lost by storage."""
        keys = node.page_keys or node.chain or tree.run_keys(node)
        event = RemovedRun(medium, len(node.key) // tree.page_bytes, keys)
        self.stream.put(event)
        if self._walk is not None:
            self._walk.removed(event, node)
        if (node.device is None or node.host is None) and medium is not Medium.STORAGE:  # its last tier
            self._leave(tree, node)

    def _enter(self, node: Node) -> None:
        self._blocks.setdefault(node.id // BLOCK_NODES, {})[node.id] = node

    def _leave(self, tree: PrefixTree, node: Node) -> None:
        """Handle that `node` is about to leave the tree, so its parent may become a leaf."""
        block = self._blocks[node.id // BLOCK_NODES]
        del block[node.id]
        if not block:
            del self._blocks[node.id // BLOCK_NODES]
        if self._described:
            for page in split_keys(node.key):
                if (blocks := self._described.pop(page, None)) is not None:
                    self._awaited[page] = blocks
            self._limit_awaited()
        parent = node.parent
        if parent is not None and parent.parent is not None and len(parent.children) == 1:
            self._enter(parent)
            if self._walk is not None:  # it may have passed the position of the new leaf
                self._walk.visit(tree, parent)

    def lost(self, keys: list[bytes]) -> None:
        """Record that storage lacks the pages `keys`, which need not be in the tree."""
        event = Removed(Medium.STORAGE, tuple(keys))
        self.stream.put(event)
        if self._walk is not None:
            self._walk.snapshot.put(event)

    def storage_replaced(self) -> None:
        """Request a snapshot: pages that were reported as stored are no longer reachable, in the tree or not."""
        self.stream.request_snapshot()

    def cleared(self) -> None:
        """Record that the tree was replaced by an empty one."""
        self._blocks = {}
        self._described.clear()
        self.stream.put(Cleared())
        if self._walk is not None:
            self._walk.snapshot.put(Cleared())
            self._walk.snapshot.end()
            self._walk = None

    def poll(self, tree: PrefixTree) -> None:
        """Work for about `slice_s` on a snapshot of `tree` if a reader waits for one. Once per step."""
        if self._walk is None and self.stream.snapshot_wanted:
            self._walks += 1
            self._walk = SnapshotWalk(self._blocks, self.stream.begin_snapshot(), self._walks, self)
        if self._walk is not None and self._walk.advance(tree, self._slice_s):
            self._walk = None

    def stored_run(self, medium: Medium, tree: PrefixTree, node: Node, session_id: str | None = None) -> StoredRun:
        """Return the event that `node` is on `medium`. Hashes nothing. If the engine supplies page keys, the event has
        the blocks of described pages instead of tokens."""
        parent = node.parent
        begins = parent is None or parent.parent is None
        keys = tree.run_keys(node)
        prior = tree.prior_of(node) if isinstance(keys, bytes) else b""
        given = tree.position_bytes == PAGE_KEY_BYTES
        tokens, blocks = (b"", self._blocks_of(node)) if given else (node.key, ())
        origin = self._origin(node, session_id)
        return StoredRun(medium, tree.pages(node), keys, prior, begins, tokens, tree.page_size, origin, blocks)

    def _blocks_of(self, node: Node) -> tuple[PageBlocks | None, ...]:
        """Return the blocks of each page of `node`, which is in the tree; empty if no page of it was described."""
        if not (self._described or self._awaited):
            return ()
        pages = split_keys(node.key)
        if self._awaited:
            self._described.update((page, self._awaited.pop(page)) for page in pages if page in self._awaited)
        blocks = tuple(map(self._described.get, pages))
        return blocks if any(blocks) else ()

    def _origin(self, node: Node, session_id: str | None) -> Origin:
        origin = NO_ORIGIN
        if self._origins:
            root = node
            while root.parent is not None:
                root = root.parent
            origin = self._origins.get(root.page_keys or b"", NO_ORIGIN)
        return origin if session_id is None else origin._replace(session_id=session_id)


@dataclass(eq=False, repr=False)
class SnapshotWalk:
    """A snapshot of a tree that is made in slices, while the tree changes between them.

    Invariant: the events in the snapshot so far, applied in order, give the media that the visited nodes are on now.
    `Node.visited` of a visited node is `_mark`. The ancestors of a visited node are visited.

    A visit puts the node's current media into the snapshot, after those of its ancestors. From then on, each event of
    the node is put there at once. While a node is not visited, an event that removes its pages is skipped: a later
    visit finds the media of that time, or the node has left the tree. An event that adds pages visits the node, because
    the walk may have passed its position. A split copies the mark to the new node, and does not move pages.

    At the end all nodes of the tree are visited. A leaf that existed at the start is in a block that was listed then,
    unless it has left the tree. A new leaf was visited when it was added to a medium. A node that became a leaf was
    visited when its last child left. The ancestors of a leaf are visited with it. So at its end the snapshot equals the
    tree, and continues with the stream.
    """

    _blocks: dict[int, dict[int, Node]]
    snapshot: Snapshot
    _mark: int
    _recorder: EventRecorder

    def __post_init__(self) -> None:
        self._numbers = list(self._blocks)
        self._nodes: list[Node] = []

    def advance(self, tree: PrefixTree, seconds: float) -> bool:
        """Visit more nodes, for about `seconds`. Return True at the end of the snapshot."""
        end_s = time.perf_counter() + seconds
        while self._numbers or self._nodes:
            if not self._nodes:
                self._nodes += self._blocks.get(self._numbers.pop(), {}).values()
            while self._nodes:
                node = self._nodes.pop()
                if node.device is not None or node.host is not None:  # otherwise it has left the tree
                    self.visit(tree, node)
                if (self._nodes or self._numbers) and time.perf_counter() >= end_s:
                    return False
        self.snapshot.end()
        return True

    def added(self, event: Recorded, tree: PrefixTree, node: Node) -> None:
        """Record `event`: `node` was just added to a medium, or, on L1, just got more pages."""
        if node.visited == self._mark:
            self.snapshot.put(event)
        else:
            self.visit(tree, node)

    def removed(self, event: Recorded, node: Node) -> None:
        """Record `event`: `node` is about to leave a medium."""
        if node.visited == self._mark:
            self.snapshot.put(event)

    def visit(self, tree: PrefixTree, node: Node) -> None:
        """Put `node` into the snapshot, after those of its ancestors that are not visited yet."""
        path: list[Node] = []
        part: Node | None = node
        while part is not None and part.parent is not None and part.visited != self._mark:
            path.append(part)
            part = part.parent
        for part in reversed(path):
            part.visited = self._mark
            event = self._recorder.stored_run(Medium.DEVICE, tree, part)
            if part.device is not None:
                self.snapshot.put(event)
            if part.host is not None:
                self.snapshot.put(event._replace(medium=Medium.HOST))
            if part.stored:
                self.snapshot.put(event._replace(medium=Medium.STORAGE))

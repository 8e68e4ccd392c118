"""Verification of L2: sealed frames are verified again before they are loaded to L1 (`integrity.verify: load`), and by
a scrub of L2 while the engine is idle (`integrity.scrub_rate`).

Pages are verified when they are read from storage, and sealed when they are stored. Memory can be damaged later. With
`verify: load` a worker computes the tag of each frame again before its load is submitted, so damaged frames are not
copied. A request waits for that as for its prefetch. A damaged page and its descendants are evicted from L2, and the
request computes them.

A page gets a tag on L2 when it is stored or read, also if storage has it already or compresses it. The tree records
that (`Node.sealed`), so a frame whose header was overwritten is damaged too. A page that is not stored has no tag: it
is loaded without verification, and counted. A page that storage has lost is verified before it is stored again.

The scrub verifies one node at a time, at its rate, and stops within a node for a request. A node that was not
completely verified, or arrived behind the scrub's position, is verified in the next round.

Locking design: the scheduler thread makes every call except `_prove` and owns all fields, so no lock is needed; the
worker reads `_closed` and the length of `_running`. It writes `sound_pages`, `untagged_pages` and `damage` of its
proof; they are final once the proof is in `_finished`. `hold_host` keeps its frames on L2 until it has ended.
"""

from __future__ import annotations

import itertools
import math
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..controller import HiCacheController
from ..frame import Damage, FrameCodec
from ..keys import RadixKey
from ..radix import Match, Node, RadixTree
from ..supervised import Beat, SupervisedPool
from .host_tier import HostTier
from .statistics import CacheCounters
from .trees import Trees

# How long a proof is valid. A request is scheduled in the step after its proof, or some steps later if it waits for
# room on L1. A later load verifies the frames again.
PROOF_S = 10.0
# Nodes that one step of the scrub visits: those that are only on L1 are skipped.
SCRUB_NODES_MAX = 64
# A frame of any size is hashed within a second; a worker that needs longer hangs.
_PATIENCE_S = 60.0


@dataclass(slots=True, eq=False)
class Proof:
    """A verification of the frames of the nodes that end at `node`, in order."""

    tree: RadixTree = field(repr=False)
    node: Node
    codec: FrameCodec = field(repr=False)
    pages: list[tuple[int, bytes | None]] = field(repr=False)  # page of L2, and its key if it is sealed
    until_s: float | None = None  # scheduler: the time until which its result is valid; None while it runs
    sound_pages: int = 0  # worker: leading pages without damage
    untagged_pages: int = 0  # worker: how many of them have no tag
    damage: Damage | None = None  # worker: the damage of the next page
    scrubs: bool = False  # started by the scrub, not for a request


@dataclass(slots=True, eq=False)
class _Request:
    """A request that has not begun: its key, and the last proof that it waited for."""

    key: RadixKey
    proof: Proof | None = None


@dataclass(eq=False, repr=False)
class LoadVerifier:
    """See the module's docstring. `controller.host_codec` is the codec of frames in the current tree. `scrub_rate` is
    in bytes per second, None without a scrub.

    Invariant: `_running` are the proofs that `poll` has not handled; the pages of each are held. A node may be loaded
    until its `proved_until_s`, which has passed for pages that were not verified since they arrived on L2.
    """

    _trees: Trees
    _host: HostTier
    _counters: CacheCounters
    _controller: HiCacheController
    _scrub_rate: int | None

    def __post_init__(self) -> None:
        self._clock = self._controller.clock
        self._round: tuple[RadixTree, Iterator[Node]] | None = None  # the scrub's position
        self._scrub_at = -math.inf
        self._closed = False
        self._requests: dict[str, _Request] = {}
        self._running: dict[Proof, None] = {}
        self._finished: queue.SimpleQueue[Proof] = queue.SimpleQueue()
        self._worker: SupervisedPool[Proof] = SupervisedPool(
            "verify", 1, handle=self._prove, acknowledge=self._finished.put, patience_s=_PATIENCE_S, clock=self._clock
        )

    # Requests

    def ask(self, rid: str, key: RadixKey) -> None:
        """Register the key of a request for `ready`."""
        self._requests[rid] = _Request(key)

    def ready(self, rid: str) -> bool:
        """Return False while frames that a request would load are being verified. Starts that; does not block."""
        request = self._requests.get(rid)
        if request is None:
            return True
        if request.proof is not None and request.proof.until_s is None:
            return False  # without a lookup in the tree in each step
        match = self._trees.current.match(request.key)
        return self.prove(rid, request.key, match, match.host_hit_pages)

    def prove(self, rid: str, key: RadixKey, match: Match, pages: int) -> bool:
        """Return True if the last `pages` pages of `match` are verified, or were just found damaged.

        Otherwise start a proof, and return False until it has ended.
        """
        nodes = self._run(match.node, pages)
        if all(map(self.may_load, nodes)):
            return True
        request = self._requests.setdefault(rid, _Request(key))
        proof = request.proof
        if proof is None or (proof.until_s is not None and not (
            # If it has found damage, its request computes. Otherwise pages that are not verified have come since.
            proof.damage is not None and proof.tree is self._tree and self._clock() < proof.until_s
        )):
            pages = sum(map(self._tree.pages, nodes))
            waited_for = (one for one in self._running if not one.scrubs)
            same = (one for one in waited_for if one.node is nodes[-1] and len(one.pages) >= pages)
            proof = request.proof = next(same, None) or self._start(nodes)
        return proof.until_s is not None

    def may_load(self, node: Node) -> bool:
        """Return True if the frames of `node` were verified recently enough."""
        return self._clock() < node.proved_until_s

    def loadable(self, node: Node, pages: int) -> int:
        """Return how many of the last `pages` pages up to `node` may be loaded: those before the first that may not."""
        nodes = self._run(node, pages)
        before = sum(map(self._tree.pages, nodes)) - pages  # the first node may begin earlier
        sound = sum(map(self._tree.pages, itertools.takewhile(self.may_load, nodes)))
        return max(0, sound - before)

    def forget(self, rid: str) -> None:
        """Forget a request that has begun or will not begin."""
        self._requests.pop(rid, None)

    # Each step

    @property
    def idle(self) -> bool:
        """True if requests do not wait for a proof."""
        return all(proof.scrubs for proof in self._running)

    def poll(self, *, scrubs: bool = False) -> bool:
        """Handle the proofs that have ended; return True if there are any. Once per step; does not block. `scrubs`: the
        engine is idle, so the scrub may continue."""
        self._worker.supervise()
        ended = [self._finished.get_nowait() for _ in range(self._finished.qsize())]
        for proof in ended:
            self._take(proof)
        if scrubs and self._scrub_rate is not None and not self._running and self._clock() >= self._scrub_at:
            self._scrub(self._scrub_rate)
        return bool(ended)

    def close(self, timeout_s: float) -> bool:
        """End the worker. Blocks. Return False if it did not end in time."""
        self._closed = True
        return self._worker.close(timeout_s)

    @property
    def _tree(self) -> RadixTree:
        return self._trees.current

    def _run(self, node: Node, pages: int) -> list[Node]:
        """Return the nodes of the last `pages` pages up to `node`, root first; the first one may begin earlier."""
        nodes: list[Node] = []
        while pages > 0 and node.parent is not None:
            nodes.append(node)
            pages -= self._tree.pages(node)
            node = node.parent
        return nodes[::-1]

    def _scrub(self, rate: int) -> None:
        """Start a proof of the next node of the round."""
        tree = self._tree
        if self._round is None or self._round[0] is not tree:
            self._round = tree, tree.nodes()
        for node in itertools.islice(self._round[1], SCRUB_NODES_MAX):
            if node.host is not None:  # it is None if the node has left the tree since
                self._scrub_at = self._clock() + len(node.host) * self._host.host.frame_bytes / rate
                self._start([node], scrubs=True)
                return
        self._round = None

    def _start(self, nodes: list[Node], *, scrubs: bool = False) -> Proof:
        tree = self._tree
        pages: list[tuple[int, bytes | None]] = []
        for node in nodes:
            if node.host is None:
                continue
            sealed = node.sealed and not node.store_pending  # a running store may be sealing the frame
            keys = tree.page_keys(node) if sealed else [None] * len(node.host)
            pages += zip(node.host.tolist(), keys, strict=True)
        codec = self._controller.host_codec
        assert codec is not None  # the cache sets it before it makes this object
        proof = Proof(tree, nodes[-1], codec, pages, scrubs=scrubs)
        self._running[proof] = None
        tree.hold_host(proof.node)
        self._worker.submit(proof)
        return proof

    def _prove(self, proof: Proof, beat: Beat) -> None:
        """Worker: compute the tags again, up to the first page that is damaged."""
        for page, key in proof.pages:
            beat()
            if self._closed or (proof.scrubs and len(self._running) > 1):
                return
            frame = self._host.host.frame(page)
            if key is None:
                proof.untagged_pages += 1
            else:
                proof.damage = proof.codec.check(key, frame)
                if proof.damage is not None:
                    return
            proof.sound_pages += 1

    def _take(self, proof: Proof) -> None:
        """Record which nodes may be loaded; evict a damaged page and its descendants from L2."""
        del self._running[proof]
        tree = proof.tree
        proof.until_s = until_s = self._clock() + PROOF_S
        counted = self._counters.verified_pages
        counted["untagged"] += proof.untagged_pages
        counted["sound"] += proof.sound_pages - proof.untagged_pages
        done, damaged = 0, None
        for node in reversed(list(tree.span(proof.node, len(proof.pages)))):
            sound = min(proof.sound_pages - done, tree.pages(node))
            done += tree.pages(node)
            if node.host is not None and sound == tree.pages(node):
                node.proved_until_s = until_s
                continue
            if proof.damage is not None:
                if sound:
                    tree.split(node, sound).proved_until_s = until_s
                damaged = node
            break
        tree.release_host(proof.node)
        if damaged is not None and proof.damage is not None:
            key = proof.pages[proof.sound_pages][1] or b""
            self._host.drop_damaged(tree, damaged, key, proof.damage, proof.codec.label)

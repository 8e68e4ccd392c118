"""Load back: from L2 to L1, when a request begins.

What fits and pays is loaded, all loads of a step in one copy. Its pages count as being on L1 from the moment the load
is submitted, so that requests of the same step share them; whoever computes with them waits for the copy, layer by
layer. A request that ends before the copy was started takes its load back.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..controller import HiCacheController, Load
from ..errors import InvariantError
from ..radix import CUT_PAGES_MIN, Match, Node, RadixTree
from ..types import NO_PAGES, PageIds
from .books import Books, DeviceLedger
from .payoff import Payoff, Route


class Loaded(NamedTuple):
    """The last node that is on L1 now, the new L1 pages in order, and the load, None if there are none."""

    node: Node
    pages: PageIds
    load: Load | None


class Loader:
    """See the module's docstring.

    Invariant: `_runs` has the loads that are not acknowledged, each with the last node of its run, into however many
    nodes the run was split since.
    """

    def __init__(
        self,
        ledger: DeviceLedger,
        controller: HiCacheController,
        books: Books,
        payoff: Payoff,
    ) -> None:
        self._runs: dict[Load, tuple[RadixTree, Node]] = {}
        self._ledger = ledger
        self._controller = controller
        self._threshold_tokens = controller.config.load_back_threshold_tokens
        self._books = books
        self._payoff = payoff

    def load_back(self, tree: RadixTree, match: Match, quota_pages: int | None) -> Loaded:
        """Load the L2 part of `match`, as much as fits, at most `quota_pages` pages.

        REQUIRES: `match.node` is locked by the caller, who has made room for all of it.
        """
        none = Loaded(match.device_node, NO_PAGES, None)
        if match.host_hit_pages == 0:
            return none
        if match.host_hit_pages * tree.page_size < self._threshold_tokens:
            self._books.skipped["load_too_short"] += 1
            return none
        nodes, cut, rest = self._fitting(tree, match, quota_pages)
        count = sum(map(tree.pages, nodes)) + rest
        if count == 0 or count * tree.page_size < self._threshold_tokens:
            return none
        if not self._payoff.decide(Route.LOAD, count * tree.page_size, count).go:
            self._books.skipped["load_does_not_pay"] += 1
            return none
        if cut is not None:
            nodes.append(tree.split(cut, rest))
        pages = self._ledger.allocator.alloc(count)
        if pages is None:
            raise InvariantError("L1: room was made for a load, but there is none")
        done = 0
        for node in nodes:
            run = tree.pages(node)
            tree.set_device(node, pages[done : done + run].copy())
            node.load_pending = True
            done += run
        tree.lock(nodes[-1])
        host_pages = np.concatenate([node.host for node in nodes if node.host is not None])
        load = self._controller.submit_load(host_pages, pages)
        self._runs[load] = tree, nodes[-1]
        return Loaded(nodes[-1], pages, load)

    def ended(self, load: Load) -> None:
        """A load has ended, well or not."""
        tree, node = self._runs.pop(load)
        for part in tree.span(node, len(load.host_pages)):
            part.load_pending = False
        tree.unlock(node)

    def cancel(self, load: Load) -> None:
        """Take a load back if it was not started and nobody else counts on it.

        Its pages are off L1 again and free then. REQUIRES: the caller's own lock is released.
        """
        if load not in self._runs:
            return
        tree, node = self._runs[load]
        parts = list(tree.span(node, len(load.host_pages)))
        alone = all(part.lock_ref == 1 and part.device_children == (part is not parts[0]) for part in parts)
        if not (alone and self._controller.cancel_load(load)):
            return
        del self._runs[load]
        tree.unlock(node)
        for part in parts:
            part.load_pending = False
            self._ledger.allocator.free(tree.leave_device(part))

    def _fitting(self, tree: RadixTree, match: Match, quota_pages: int | None) -> tuple[list[Node], Node | None, int]:
        """The leading nodes on L2 that there is room for; the next one if a part of it fits, and how much."""
        quota = match.host_hit_pages if quota_pages is None else quota_pages
        room = min(self._controller.load_room, self._ledger.allocator.free_pages, quota)
        if room < min(quota, match.host_hit_pages):
            self._controller.refuse_load()
        nodes: list[Node] = []
        for node in reversed(list(tree.span(match.node, match.host_hit_pages))):
            if tree.pages(node) > room:
                return (nodes, node, room) if room >= CUT_PAGES_MIN else (nodes, None, 0)
            nodes.append(node)
            room -= tree.pages(node)
        return nodes, None, 0

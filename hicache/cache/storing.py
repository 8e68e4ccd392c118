"""Storing: from L2 to storage.

It goes root first, because a page in storage is of use only if its whole prefix is there. A node that is being stored
has its host pages held. A run that could not be stored is tried again by a later request that passes by.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from ..controller import HiCacheController, Store, StoreEnded
from ..radix import Node, RadixTree
from .books import Books
from .pause import Pause
from .trees import Trees


class Storing:
    """See the module's docstring.

    Invariant: `_runs` has the stores that are not acknowledged, each with the last node of its run, into however many
    nodes the run was split since.
    """

    def __init__(self, trees: Trees, controller: HiCacheController, books: Books, pause: Pause) -> None:
        self._trees = trees
        self._controller = controller
        self._books = books
        self._pause = pause
        self._runs: dict[Store, tuple[RadixTree, Node]] = {}

    def store_path(self, node: Node, hits_min: int = 0) -> None:
        """Store what storage lacks of the path to `node`, root first: the runs on L2 that at least `hits_min` requests
        have used, and their prefix.
        """
        if not self._controller.has_storage:
            return
        lacking: list[Node] = []
        while node.parent is not None:
            missing = node.host is not None and not (node.stored or node.store_pending)
            if missing and (lacking or node.hit_count >= hits_min):
                lacking.append(node)
            node = node.parent
        for part in reversed(lacking):
            if not self.store(part):
                break  # its descendants would be out of reach without it

    def store(self, node: Node) -> bool:
        """Whether the pages of `node` are in storage or on their way there, now or since before."""
        if not self._controller.has_storage or node.host is None or node.parent is None:
            return False
        if node.stored or node.store_pending:
            return True
        root = node.parent.parent is None
        if not (root or node.parent.stored or node.parent.store_pending):
            return False
        if not self._controller.may_store:
            self._books.skipped["store_paused"] += 1
            return False
        if not self._controller.takes_store(len(node.host)):
            return False
        tree = self._trees.current
        store = self._controller.submit_store(tree.begin_store(node), node.host, begins_prompt=root)
        self._runs[store] = tree, node
        tree.hold_host(node)
        return True

    def ended(self, ended: StoreEnded) -> None:
        """A store has ended. If a page is missing, a later request that passes by tries again."""
        tree, node = self._runs.pop(ended.store)
        tree.end_store(node, ended.store.chain, stored=ended.stored)
        if tree is self._trees.current:
            self._books.skipped["store_incomplete"] += not ended.stored
            # By what this rank saw of the store; whether all ranks may store is agreed from that.
            if ended.complete:
                self._pause.succeeded()
            elif self._controller.stores_pages:
                self._pause.failed()
        tree.release_host(node)

    @property
    def paused(self) -> bool:
        """Whether this rank would leave storage alone now."""
        return self._pause.active

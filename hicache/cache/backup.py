"""Backup: from L1 to L2, as the write policy says.

It goes root first, because a page is of use on a tier only if its whole prefix is there. A node that is being copied to
L2 is locked.

    write_through            a run is copied to L2 as soon as it is computed
    write_through_selective  as soon as `selective_hits` requests have used it
    write_back               when L1 evicts it, in two phases: the copy is started, and when it has arrived the run
                             leaves L1; its ancestors are copied with it, since L2 needs the whole prefix

Under each policy a pinned run is copied at once, and what is on L2 goes on to storage (`hicache.cache.storing`).

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from typing import NamedTuple

from ..controller import Backup, HiCacheController
from ..errors import InvariantError
from ..radix import Fate, Node, RadixTree, may_leave_device
from ..types import PageIds
from .books import Books, HostLedger
from .storing import Storing
from .trees import Trees


class _Run(NamedTuple):
    """What a backup is for: the run that ends at `node`, into however many nodes it was split since."""

    tree: RadixTree
    node: Node
    evicts: bool  # the run leaves L1 when the copy has arrived


class Backups:
    """See the module's docstring. `selective_hits` is for write_through_selective alone.

    Invariant: `_runs` has the backups that are not acknowledged.
    """

    def __init__(
        self,
        trees: Trees,
        ledger: HostLedger,
        controller: HiCacheController,
        books: Books,
        *,
        storing: Storing,
    ) -> None:
        self._runs: dict[Backup, _Run] = {}
        self._saving_pages = 0
        self._trees = trees
        self._ledger = ledger
        self._controller = controller
        self._books = books
        self._policy = controller.config.write_policy
        self._selective_hits = controller.config.selective_hits
        self._halted = False
        self._storing = storing

    def used(self, node: Node) -> None:
        """A request has computed or reused the path to `node`: start what the policy wants and the path still lacks.

        Copies to L2, and stores of what is on L2 already.
        """
        if self._halted:
            return
        backups: list[Node] = []
        while node.parent is not None and node.host is None:
            if not node.backup_pending and (backups or self._wants(node)):
                backups.append(node)
            node = node.parent
        self._storing.store_path(node)  # what is on L2 has its whole prefix there
        for part in reversed(backups):
            if not self._back_up([part]):
                break  # its descendants could not be on L2 without it

    def save(self, victim: Node) -> Fate:
        """What becomes of an L1 victim that is not on L2: under write_back, or pinned, it is copied there first."""
        if self._halted or not (victim.pin_ref or self._policy == "write_back"):
            return Fate.KEEP if victim.pin_ref else Fate.DROP
        path: list[Node] = []
        node = victim
        while node.parent is not None and node.host is None:
            if not node.backup_pending:
                path.append(node)
            node = node.parent
        if self._back_up(path[::-1], evicts=True):
            return Fate.SAVING
        if victim.pin_ref:
            return Fate.KEEP
        self._books.skipped["write_back_dropped"] += self._trees.current.pages(victim)
        return Fate.DROP

    @property
    def saving_pages(self) -> int:
        """L1 pages on their way to L2 in order to leave L1."""
        return self._saving_pages

    def launch(self) -> None:
        """Have the copies of victims begin now: the sooner they end, the sooner there is room."""
        self._controller.launch_backups()

    def halt(self) -> None:
        """Back up and store nothing any more: what L1 holds cannot be vouched for."""
        self._halted = True

    def written(self, backup: Backup) -> list[PageIds]:
        """A copy to L2 has arrived: show it in the tree and hand it on to storage; the L1 pages that are free now."""
        if self._halted:
            self.failed(backup)
            return []
        tree, node, evicts = self._runs.pop(backup)
        pages = len(backup.host_pages)
        self._ledger.settle(pages, tree.accept_backup(node, backup.host_pages))
        parts = list(tree.span(node, pages))
        for part in reversed(parts):
            if tree is not self._trees.current or not self._storing.store(part):
                break
        tree.unlock(node)
        if not evicts:
            return []
        self._saving_pages -= pages
        # A request may have locked the run since; then it stays where it is.
        return [tree.leave_device(part) for part in parts if may_leave_device(part) and part.host is not None]

    def failed(self, backup: Backup) -> None:
        """A copy to L2 has failed. Its host pages stay lent for good: part of the copy may still be in flight."""
        tree, node, evicts = self._runs.pop(backup)
        for part in tree.span(node, len(backup.host_pages)):
            part.backup_pending = False
        tree.unlock(node)
        if evicts:
            self._saving_pages -= len(backup.host_pages)

    def _wants(self, node: Node) -> bool:
        if self._policy == "write_through" or node.pin_ref:
            return True
        return self._policy == "write_through_selective" and node.hit_count >= self._selective_hits

    def _back_up(self, path: list[Node], *, evicts: bool = False) -> bool:
        """Start copies of adjacent nodes, root first, all or none. `evicts` is for the last of them."""
        tree = self._trees.current
        pages = sum(map(tree.pages, path))
        if not self._controller.takes_backup(pages):
            return False
        host_pages = self._ledger.lend(pages)
        if host_pages is None:
            self._books.skipped["backup_no_host_room"] += 1
            return False
        done = 0
        for node in path:
            if node.device is None:
                raise InvariantError(f"backup of a node that is not on L1: {node!r}")
            count = len(node.device)
            run = _Run(tree, node, evicts and node is path[-1])
            node.backup_pending = True
            tree.lock(node)
            self._runs[self._controller.submit_backup(node.device, host_pages[done : done + count])] = run
            done += count
            if run.evicts:
                self._saving_pages += count
        return True

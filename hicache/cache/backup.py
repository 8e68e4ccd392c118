"""Backup: from L1 to L2 and from L2 to storage, as the write policy says.

Both go root first, because a page is of use on a tier only if its whole prefix is there. A node that is being copied to
L2 is locked; one that is being stored has its host pages held.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from ..controller import BackupOperation, CopyOperation, HiCacheController
from ..errors import InvariantError
from ..radix import Node, RadixTree
from .books import Books, HostLedger
from .pause import Pause


class WriteThrough:
    """Backs pages up to L2 as soon as they are in the tree, and to storage as soon as they are on L2."""

    def __init__(self, tree: RadixTree, ledger: HostLedger, controller: HiCacheController, books: Books) -> None:
        self._tree = tree
        self._ledger = ledger
        self._controller = controller
        self._has_storage = controller.backend is not None
        self._books = books
        self._halted = False
        self._pause = Pause()

    def inserted(self, node: Node) -> None:
        """Start what the path to `node` still lacks: copies to L2, stores of what is on L2 already."""
        if self._halted:
            return
        backups: list[Node] = []
        stores: list[Node] = []
        while node.parent is not None:
            if node.host is not None:
                if not self._has_storage:
                    break  # its ancestors are on L2 too
                if not node.stored:
                    stores.append(node)
            elif not node.backup_pending:
                backups.append(node)
            node = node.parent
        for part in reversed(stores):
            if not self._store(part):
                break  # its descendants would be out of reach without it
        for part in reversed(backups):
            if not self._back_up(part):
                break  # its descendants could not be on L2 without it

    def halt(self) -> None:
        """Back up and store nothing any more: what L1 holds cannot be vouched for."""
        self._halted = True

    def written(self, copy: CopyOperation) -> None:
        """A copy to L2 has arrived: show it in the tree and hand it on to storage."""
        node: Node = copy.tag
        if self._halted:
            self.write_failed(copy)
            return
        pages = len(copy.host_pages)
        self._ledger.settle(pages, self._tree.accept_backup(node, copy.host_pages))
        for part in reversed(list(self._tree.span(node, pages))):
            if not self._store(part):
                break
        self._tree.unlock(node)

    def write_failed(self, copy: CopyOperation) -> None:
        """A copy to L2 has failed. Its host pages stay lent for good: part of the copy may still be under way."""
        for part in self._tree.span(copy.tag, len(copy.host_pages)):
            part.backup_pending = False
        self._tree.unlock(copy.tag)

    def stored(self, backup: BackupOperation) -> None:
        """A store has ended. If a page is missing, a later request that passes by tries again."""
        node, pages = backup.tag
        if len(backup.outcomes) < pages or not all(outcome.is_stored for outcome in backup.outcomes):
            self._books.skipped["store_incomplete"] += 1
            for part in self._tree.span(node, pages):
                part.stored = False
            self._pause.failed()
        else:
            self._pause.succeeded()
        self._tree.release_host(node, pages)

    def _back_up(self, node: Node) -> bool:
        if node.device is None:
            raise InvariantError(f"backup of a node that is not on L1: {node!r}")
        pages = len(node.device)
        if not self._controller.may_write(pages):
            return False
        host_pages = self._ledger.lend(pages)
        if host_pages is None:
            self._books.skipped["backup_no_host_room"] += 1
            return False
        node.backup_pending = True
        self._tree.lock(node)
        self._controller.submit_write(node, node.device, host_pages)
        return True

    def _store(self, node: Node) -> bool:
        """Whether the pages of `node` are in storage or on their way there, now or since before."""
        if not self._has_storage or node.host is None or node.parent is None:
            return False
        if node.stored:
            return True
        root = node.parent.parent is None
        if not root and not node.parent.stored:
            return False
        if self._pause.active:
            self._books.skipped["store_paused"] += 1
            return False
        parent = None if root else self._tree.last_key(node.parent)
        pages = len(node.host)
        if not self._controller.submit_backup((node, pages), self._tree.page_keys(node), node.host, parent):
            return False
        self._tree.hold_host(node, pages)
        node.stored = True
        return True

"""Prefetch: from storage to L2, before a request is scheduled.

A prefetch starts behind the last L2 node of the prompt's prefix, its anchor, which is held so that what arrives can be
attached there. Storage is asked first; only if what it has is long enough are host pages taken and reads started. The
request goes on when the reads have ended or its time is over, with what has arrived by then: a contiguous, verified
prefix. Pages that are still being read stay lent until the read has really ended.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..controller import HiCacheController, PrefetchOperation, PrefetchState
from ..keys import RadixKey
from ..radix import Node, RadixTree
from ..types import NO_PAGES
from .books import Books, HostLedger
from .options import CacheOptions
from .pause import Pause


@dataclass(slots=True, eq=False)
class _Prefetch:
    operation: PrefetchOperation
    anchor: Node
    anchor_pages: int  # of the anchor when it was held; it may be split since
    answered: bool = False  # the request goes on; nothing that arrives later is for it


class Prefetcher:
    """At most one prefetch per request id at a time."""

    def __init__(
        self, tree: RadixTree, ledger: HostLedger, controller: HiCacheController, options: CacheOptions, books: Books
    ) -> None:
        self._tree = tree
        self._ledger = ledger
        self._controller = controller
        self._options = options
        self._books = books
        self._active: dict[str, _Prefetch] = {}
        self._arrived_pages: dict[str, int] = {}
        self._pause = Pause()

    def start(self, rid: str, key: RadixKey) -> bool:
        """Look for what L1 and L2 lack of `key` (whole pages). False if it is not worth it or not possible now."""
        if self._controller.backend is None or rid in self._active:
            return False
        tree, options = self._tree, self._options
        match = tree.match(key)
        missing_tokens = len(key) - match.pages * tree.page_size
        if missing_tokens < options.prefetch_threshold_tokens:
            return self._skip("prefetch_too_short")
        if self._pause.active:
            return self._skip("prefetch_paused")
        if match.host_node is not match.node:
            # Its prefix has no copy on L2 (yet), and a page on L2 must have its parent there.
            return self._skip("prefetch_prefix_not_on_host")
        timeout_s = options.prefetch_timeout_base_s + (
            options.prefetch_timeout_per_1024_tokens_s * missing_tokens / 1024
        )
        operation = self._controller.submit_prefetch(
            rid, key, start_page=match.pages, prior=tree.last_key(match.node), timeout_s=timeout_s
        )
        if operation is None:
            return False
        anchor_pages = 0 if match.node.host is None else len(match.node.host)
        tree.hold_host(match.node, anchor_pages)
        self._active[rid] = _Prefetch(operation, match.node, anchor_pages)
        return True

    def ready(self, rid: str) -> bool:
        """Whether the request need not wait (any more). Ends the wait of one whose time is over."""
        prefetch = self._active.get(rid)
        if prefetch is None or prefetch.answered:
            return True
        if not self._controller.expired(prefetch.operation):
            return False
        self._skip("prefetch_timeout")
        self._answer(prefetch)
        if prefetch.operation.taken_pages == 0:
            self._pause.failed()  # it may hang; let the next requests go on without waiting for it
        return True

    def abort(self, rid: str) -> None:
        """Stop the prefetch of a request that will not run; what has arrived stays."""
        self.conclude(rid)
        self._arrived_pages.pop(rid, None)

    def conclude(self, rid: str) -> None:
        """End the wait of a request that begins: what has not arrived from storage by now is computed."""
        prefetch = self._active.get(rid)
        if prefetch is not None and not prefetch.answered:
            self._answer(prefetch)

    def take_arrived(self, rid: str) -> int:
        """How many pages came from storage for this request; asked once, when it has begun."""
        return self._arrived_pages.pop(rid, 0)

    def found(self, operation: PrefetchOperation) -> None:
        """The lookup has ended: start the reads if they pay and fit, else drop the prefetch."""
        prefetch = self._active[operation.tag]
        page_size, threshold = self._tree.page_size, self._options.prefetch_threshold_tokens
        allowance = int(self._options.prefetch_host_share * self._ledger.host.pages) - self._controller.read_pages
        pages = min(operation.hit_pages, allowance)
        host_pages = None
        if prefetch.answered:
            reason = "prefetch_too_late"
        elif operation.failed:
            reason = "prefetch_failed"
        elif operation.hit_pages * page_size < threshold:
            reason = "prefetch_hit_too_short"
        elif pages * page_size < threshold:
            reason = "prefetch_host_share"
        else:
            reason = "prefetch_no_host_room"
            host_pages = self._ledger.lend(pages)
        if host_pages is not None:
            self._controller.start_reads(operation, host_pages)
            return
        self._skip(reason)
        if operation.failed:
            self._pause.failed()
        elif not prefetch.answered:
            self._pause.succeeded()
        self._controller.drop(operation)
        self._end(prefetch)

    def ended(self, operation: PrefetchOperation) -> None:
        """The reads have ended, well or not: take what is whole, give the rest of the host pages back."""
        prefetch = self._active[operation.tag]
        if not prefetch.answered:
            self._take(prefetch)
        unused = operation.host_pages[operation.taken_pages :]
        self._ledger.settle(len(unused), unused)
        if operation.failed:
            self._skip("prefetch_failed")
            self._pause.failed()
        elif operation.taken_pages:
            self._pause.succeeded()
        self._end(prefetch)

    def _answer(self, prefetch: _Prefetch) -> None:
        prefetch.operation.cancelled = True
        if prefetch.operation.state is PrefetchState.READING:
            self._take(prefetch)
        prefetch.answered = True

    def _take(self, prefetch: _Prefetch) -> None:
        """Put the pages that are read and verified into the tree."""
        operation = prefetch.operation
        arrived = operation.completed_pages
        unused = NO_PAGES
        if arrived:
            unused = self._tree.insert_host(
                operation.key, operation.start_page, operation.host_pages[:arrived], operation.keys[:arrived]
            )
        self._ledger.settle(arrived, unused)
        operation.taken_pages = arrived
        if arrived > len(unused):
            self._arrived_pages[operation.tag] = arrived - len(unused)

    def _end(self, prefetch: _Prefetch) -> None:
        self._tree.release_host(prefetch.anchor, prefetch.anchor_pages)
        del self._active[prefetch.operation.tag]

    def _skip(self, reason: str) -> bool:
        self._books.skipped[reason] += 1
        return False

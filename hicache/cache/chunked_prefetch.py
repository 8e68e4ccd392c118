"""Chunked prefetch: a prompt larger than its share of L2 is loaded to L1 in parts, before its request begins.

When a prefetch has filled its share of L2 and storage has more pages, the pages that have arrived are loaded to L1.
Their frames on L2 are then copies and can be evicted for the next part, which the request looks up like a new one. So a
small L2 does not limit the length of a prefetched prompt.

L1 may evict a part before its request begins; then the next lookup begins before that part. A part waits for room on L1
at most as long as its request waits for storage.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from .. import tracing
from ..controller import Load
from ..radix import Node, RadixTree
from .prefetch_share import PrefetchShare
from .prefetch_states import Prefetch, PrefetchTable, State

# Starts to load those pages of the path to a node that are only on L2; None if L1 has no room for them now. The last
# argument is the parent of the span.
Promote: TypeAlias = Callable[[RadixTree, Node, "tracing.Context | None"], Load | None]


class ChunkedPrefetch:
    """Moves prefetches through AWAITING_L1 and LOADING; `share` holds their pages. `promote` is None if the engine owns
    L1.
    """

    def __init__(self, table: PrefetchTable, share: PrefetchShare) -> None:
        self.promote: Promote | None = None
        self._table = table
        self._share = share

    def advance(self) -> None:
        """Start the waiting loads that have room now, in order. A request whose pages are on L1 because others have
        loaded them waits for its turn. Call it once per step; does nothing if no load waits.
        """
        while self.promote is not None and (prefetch := self._table.first(State.AWAITING_L1)) is not None:
            end = self._share.end_of(prefetch)
            if end is None or end[1].device is not None:
                self._share.take(prefetch)
                self._table.move(prefetch, State.QUEUED)
            elif (load := self.promote(*end, tracing.under(prefetch.span))) is not None:
                prefetch.load = load
                self._table.move(prefetch, State.LOADING)
            else:
                return

    def loaded(self, load: Load) -> None:
        """Handle the end of a load. If it made room on L2 for more pages of a request, the request is queued."""
        for prefetch in self._table.of(State.LOADING):
            if prefetch.load is load:
                self._end_load(prefetch)
                self._table.move(prefetch, State.QUEUED)

    def stop(self, prefetch: Prefetch) -> None:
        """Stop waiting for a load. Pages that are being loaded are not held any more."""
        if prefetch.state is State.LOADING:
            self._end_load(prefetch)
            self._table.move(prefetch, State.ENDED)

    def release_arrived(self) -> bool:
        """Stop holding pages that have arrived, and waiting for their loads. They stay while there is room, and a later
        request finds them on their tier. Return False if there are none."""
        holders = self._share.holders
        for prefetch in holders:
            self.stop(prefetch)
            self._share.release(prefetch)
            if prefetch.state in (State.ARRIVED, State.AWAITING_L1):
                self._table.move(prefetch, State.ENDED)
        return bool(holders)

    def _end_load(self, prefetch: Prefetch) -> None:
        prefetch.load = None
        prefetch.promoted_pages += self._share.take(prefetch)

"""Chunked prefetch: a prompt larger than its share of L2 is loaded to L1 in parts, before its request begins.

When a prefetch has filled its share of L2 and storage has more pages, the pages that have arrived are loaded to L1.
Their frames on L2 are then copies and can be evicted for the next part, which the request looks up like a new one. So a
small L2 does not limit the length of a prefetched prompt.

L1 may evict a part before its request begins; then the next lookup begins before that part. A part waits for room on L1
at most as long as its request waits for storage.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from ..controller import Load
from ..errors import InvariantError
from ..radix import Node, RadixTree
from .prefetch_share import PrefetchShare
from .waiting import PrefetchRequest

# Starts to load those pages of the path to a node that are only on L2; None if L1 has no room for them now.
Promote: TypeAlias = Callable[[RadixTree, Node], Load | None]


class ChunkedPrefetch:
    """Invariant: `_requests` has the requests whose pages are being loaded to L1 or wait for room there, by request id;
    `_loads` has the former by load. `share` holds the pages that have arrived for them. `promote` is None if the engine
    owns L1.
    """

    def __init__(self, share: PrefetchShare) -> None:
        self.promote: Promote | None = None
        self._share = share
        self._requests: dict[str, PrefetchRequest] = {}
        self._loads: dict[Load, str] = {}
        self._waiting: dict[str, None] = {}  # request ids that wait for room on L1, in order
        self._pages: Counter[str] = Counter()  # loaded pages, by request

    def get(self, rid: str) -> PrefetchRequest | None:
        """Return the request of that id if its pages are being loaded or wait for room."""
        return self._requests.get(rid)

    def start(self, request: PrefetchRequest) -> bool:
        """Load the pages that have arrived for `request` to L1 as soon as there is room. Return False if none
        have."""
        if self._share.end_of(request.rid) is None:
            return False
        self._requests[request.rid] = request
        self._waiting[request.rid] = None
        return True

    def advance(self) -> list[PrefetchRequest]:
        """Start the waiting loads that have room now. Call it once per step; does nothing if no load waits.

        Return the requests whose pages are already on L1 because others have loaded them.
        """
        there: list[PrefetchRequest] = []
        while self._waiting and self.promote is not None:
            rid = next(iter(self._waiting))
            end = self._share.end_of(rid)
            if end is None or end[1].device is not None:
                there.append(self._requests.pop(rid))
                self._share.take(rid)
            elif (load := self.promote(*end)) is not None:
                self._loads[load] = rid
            else:
                break
            del self._waiting[rid]
        return there

    def ended(self, load: Load) -> PrefetchRequest | None:
        """Handle the end of a load. Return its request if that still waits."""
        rid = self._loads.get(load)
        request = None if rid is None else self._requests.get(rid)
        if request is not None:
            self.stop(request.rid)
        return request

    def stop(self, rid: str) -> None:
        """Stop waiting for the loads of a request."""
        if self._requests.pop(rid, None) is None:
            return
        if rid in self._waiting:
            del self._waiting[rid]
            return
        self._loads = {load: other for load, other in self._loads.items() if other != rid}
        self._pages[rid] += self._share.take(rid)

    def stop_all(self) -> None:
        """Stop waiting for all loads."""
        for table in (self._requests, self._loads, self._waiting, self._pages):
            table.clear()

    def release_arrived(self) -> bool:
        """Stop holding pages that have arrived, and waiting for their loads. They stay while there is room, and a later
        request finds them on their tier. Return False if there are none."""
        rids = self._share.rids
        for rid in rids:
            self.stop(rid)
            self._share.release(rid)
        return bool(rids)

    def take(self, rid: str) -> int:
        """Return and reset the number of pages loaded for a request; called when it begins or is cancelled."""
        return self._pages.pop(rid, 0)

    def check(self) -> None:
        """Raises InvariantError if the invariant does not hold."""
        rids = sorted([*self._loads.values(), *self._waiting])
        if rids != sorted(self._requests) or not all(map(self._share.end_of, rids)):
            raise InvariantError("prefetch: pages of a request are being loaded to L1, but are not held for it")

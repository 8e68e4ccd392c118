"""Climbs: what storage has for a request, and L2 has no room for at once, goes up to L1 part by part.

When a prefetch has read as much as the share of L2 takes, and storage has more, the part goes up to L1 before its
request begins. Its frames on L2 are copies then, which leave for the next part, and the request looks for the rest as
if it had just come. So a small L2 is a way through for long prompts, and no bound for them.

A part may leave L1 again before its request begins, as anything that nobody uses; then the next look begins before it.
Nothing waits for room on L1 longer than its request waits for storage.

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

# Starts loading what is on L2 only of the path to a node; None if L1 has no room for it now.
Promote: TypeAlias = Callable[[RadixTree, Node], Load | None]


class Climbs:
    """Invariant: `_requests` has those whose pages go up or wait for room on L1, by request id, and `_loads` the former
    by load. What has arrived for them is held in `share`. `promote` is None where L1 is not ours.
    """

    def __init__(self, share: PrefetchShare) -> None:
        self.promote: Promote | None = None
        self._share = share
        self._requests: dict[str, PrefetchRequest] = {}
        self._loads: dict[Load, str] = {}
        self._waiting: dict[str, None] = {}  # for room on L1, in order
        self._pages: Counter[str] = Counter()  # that went up, by request

    def get(self, rid: str) -> PrefetchRequest | None:
        """The request of that id, if its pages are going up, or wait to."""
        return self._requests.get(rid)

    def start(self, request: PrefetchRequest) -> None:
        """Let what has arrived for `request` go up as soon as L1 has room for it."""
        if self.promote is not None and self._share.end_of(request.rid) is not None:
            self._requests[request.rid] = request
            self._waiting[request.rid] = None

    def advance(self) -> list[PrefetchRequest]:
        """Start what waits and has room now. Once per step; costs nothing if nothing waits.

        Return the requests whose pages are on L1 already, because others have loaded them.
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
        """A load has ended. Return the request whose pages it took up, if it still waits."""
        request = self._requests.get(self._loads.get(load, ""))
        if request is not None:
            self.stop(request.rid)
        return request

    def stop(self, rid: str) -> None:
        """The request waits no more for its pages to go up."""
        if self._requests.pop(rid, None) is None:
            return
        if rid in self._waiting:
            del self._waiting[rid]
            return
        self._loads = {load: other for load, other in self._loads.items() if other != rid}
        self._pages[rid] += self._share.take(rid)

    def stop_all(self) -> None:
        """No request waits any more."""
        for table in (self._requests, self._loads, self._waiting):
            table.clear()

    def take(self, rid: str) -> int:
        """How many pages went up for this request; asked once, when it has begun or will not."""
        return self._pages.pop(rid, 0)

    def check(self) -> None:
        """Raises InvariantError if the invariant does not hold."""
        climbing = sorted([*self._loads.values(), *self._waiting])
        if climbing != sorted(self._requests) or not all(map(self._share.end_of, climbing)):
            raise InvariantError("prefetch: pages of a request go up to L1, but are not held for it")

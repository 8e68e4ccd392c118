"""Requests that wait for a prefetch: for their turn to look up storage, or for the prefetch of another request.

A request follows the prefetch (its leader) that fetches the same pages for another request. When the leader ends, its
result applies to a follower if a lookup for the follower would have the same result: then a fruitless lookup also ends
the follower's wait. Every other follower waits for its turn, and then matches, follows or leads by itself. After a
fruitless leader, a request follows only a leader that shares the page where the two prompts diverged, so followers that
differ there look up storage at the same time.

Why waits are not circular and lookups are bounded: a request does not follow and lead at the same time. A leader waits
for workers, or for room that other prefetches hold and free, never for a follower. For each `start` a request leads at
most `LOOKUPS_MAX` times: once, and again only if its prefix was evicted while it waited for room or was loaded in
parts. The count restarts when a part extends the arrived prefix, which is progress. A follow ends when that lead ends,
and a request follows a lead once. So n requests lead and follow a bounded number of times. Each step tries a waiting
request at most once, and a request waits at most until its `until_s`.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from ..controller import Lookup, Read
from ..errors import InvariantError
from ..keys import RadixKey
from ..radix import Match, Node, RadixTree

# If L2 evicts the prefix of a request each time that it waits for room, L2 is too small for the load; if L1 evicts its
# parts, L1 is too small for prompts that are loaded in parts.
LOOKUPS_MAX = 4

_ARRIVAL = attrgetter("arrival")


class FirstPages(NamedTuple):
    """The first pages of a prefetch: their part of the key after a node (0 for the root of a seed) that ends before
    page `start_page`. A node may grow unless two hold locks on it.
    """

    seed: bytes
    node_id: int
    start_page: int
    tokens: bytes

    def __repr__(self) -> str:
        return f"FirstPages(below node {self.node_id}, {len(self.tokens)} bytes)"


class Verdict(NamedTuple):
    """The reason why a prefetch was fruitless, and the first page that storage lacks, or the end of the key."""

    reason: str
    page: int


@dataclass(slots=True, eq=False)
class PrefetchRequest:
    """A request for a prefetch. It waits at most until `until_s`, in `HiCacheController.time_s`.

    Its prompt diverges before `divergence_end_page` from each fruitless leader that it has followed. The pages before
    `reached_page` have arrived at some time; `lookups` counts since then.
    """

    arrival: int
    rid: str
    key: RadixKey
    until_s: float
    leader: Prefetch | None = field(default=None, repr=False)
    divergence_end_page: int = 0
    lookups: int = 0
    reached_page: int = 0

    def note_arrival(self, end_page: int) -> None:
        """Record that a part up to `end_page` has arrived."""
        if end_page > self.reached_page:
            self.reached_page, self.lookups = end_page, 0

    @property
    def may_look_up(self) -> bool:
        """True unless `LOOKUPS_MAX` lookups have not extended the arrived prefix."""
        return self.lookups < LOOKUPS_MAX

    def first_pages(self, tree: RadixTree, match: Match, end_page: int = 0) -> FirstPages:
        """Return the pages after `match`, up to `end_page` and at least one."""
        start, end = match.pages * tree.page_bytes, max(match.pages + 1, end_page) * tree.page_bytes
        node_id = match.node.id if match.pages else 0
        return FirstPages(self.key.seed, node_id, match.pages, self.key.tokens[start:end])


@dataclass(slots=True, eq=False)
class Prefetch:
    """A prefetch, from its lookup until the ack of its last operation. `awaited`: its request waits for it."""

    request: PrefetchRequest
    operation: Lookup | Read  # the read, once the lookup has found enough and there is room
    asked_page: int  # the first page of the lookup in storage
    start_page: int  # the pages before it are cached; increases if some of the awaited pages arrive
    tree: RadixTree
    awaited: bool
    anchor: Node | None = None  # locked; None while the prefetch waits for room on L2, and once it is answered
    first_pages: tuple[FirstPages, ...] = field(default=(), repr=False)  # its entries in `Leaders`
    followers: dict[PrefetchRequest, None] = field(default_factory=dict, repr=False)
    wanted_pages: int = 0  # the pages of the hit, when the read began
    taken_pages: int = 0  # leading pages of the read that were put into the tree
    answered: bool = False  # the request continues; later pages are not for it
    verdict: Verdict | None = None
    lacks: str = ""  # the reason for missing room, while it waits for room

    @property
    def rid(self) -> str:
        """The id of its request."""
        return self.request.rid

    @property
    def key(self) -> RadixKey:
        """The key of its request."""
        return self.request.key

    def judge(self, verdict: Verdict, *, has_ranks: bool) -> None:
        """Record for followers that the ended operation found too little, unless it timed out or failed, which says
        nothing about the content of storage.

        With ranks a failure counts as an empty result, because they agree only on the number of found pages.
        """
        operation = self.operation
        if operation.expired:
            return
        if isinstance(operation, Read):
            was_stopped = operation.seconds == 0.0  # a worker started it too late
        else:  # a stopped lookup has not reached a missing page
            was_stopped = (
                operation.pages == len(operation.keys) and outcome(operation, self.tree.page_size) != "whole"
            )
        if has_ranks or not (operation.failed or was_stopped):
            self.verdict = verdict


class Leaders:
    """The unanswered prefetches by their first pages. One that has followed a fruitless leader has two entries: also
    its first page alone, if no other prefetch leads that.
    """

    def __init__(self) -> None:
        self._prefetches: dict[FirstPages, Prefetch] = {}

    def find(self, request: PrefetchRequest, tree: RadixTree, match: Match) -> Prefetch | None:
        """Return the prefetch of another request that fetches the pages of `request` after `match`."""
        return self._prefetches.get(request.first_pages(tree, match, request.divergence_end_page))

    def add(self, prefetch: Prefetch, match: Match) -> None:
        """Let `prefetch`, which starts after `match`, lead. REQUIRES: `find` returned None."""
        request, tree = prefetch.request, prefetch.tree
        wanted = {request.first_pages(tree, match, request.divergence_end_page), request.first_pages(tree, match)}
        prefetch.first_pages = tuple(pages for pages in wanted if pages not in self._prefetches)
        self._prefetches.update(dict.fromkeys(prefetch.first_pages, prefetch))

    def remove(self, prefetch: Prefetch) -> None:
        """End the lead of `prefetch`."""
        for pages in prefetch.first_pages:
            del self._prefetches[pages]
        prefetch.first_pages = ()


def outcome(found: Lookup, page_size: int) -> str:
    """Return one of `LOOKUP_OUTCOMES`."""
    if found.failed:
        return "failed"
    if not found.pages:
        return "miss"
    return "whole" if found.start_page + found.pages == found.key.pages(page_size) else "part"


class WaitingRequests:
    """Invariant: `_requests` has all waiting requests, by id. Each follows a prefetch, which has it in `followers`, or
    is in `_turns`, in order of arrival.
    """

    def __init__(self) -> None:
        self._requests: dict[str, PrefetchRequest] = {}
        self._turns: list[PrefetchRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, rid: str) -> bool:
        return rid in self._requests

    def get(self, rid: str) -> PrefetchRequest | None:
        """Return the request of that id if it waits."""
        return self._requests.get(rid)

    @property
    def any_turns(self) -> bool:
        """True if a request waits for its turn."""
        return bool(self._turns)

    def wait(self, request: PrefetchRequest, leader: Prefetch | None = None) -> None:
        """Let `request` wait for `leader`; without one, for its turn, after those that arrived before it.

        REQUIRES: it does not wait.
        """
        self._requests[request.rid] = request
        request.leader = leader
        if leader is None:
            insort(self._turns, request, key=_ARRIVAL)
        else:
            leader.followers[request] = None

    def next(self) -> PrefetchRequest:
        """Remove and return the first request in the queue. REQUIRES: `any_turns`."""
        request = self._turns.pop(0)
        del self._requests[request.rid]
        return request

    def remove(self, rid: str) -> PrefetchRequest | None:
        """End the wait of a request and return it; None if it does not wait."""
        request = self._requests.pop(rid, None)
        if request is None:
            return None
        if request.leader is not None:
            del request.leader.followers[request]
            request.leader = None
        else:
            del self._turns[bisect_left(self._turns, request.arrival, key=_ARRIVAL)]
        return request

    def release(self, leader: Prefetch) -> list[Verdict]:
        """Let the followers of `leader`, which has ended, wait for their turn.

        Followers whose prompt is the same in all pages of its lookup share its verdict and stop waiting; return these
        verdicts.
        """
        shared: list[Verdict] = []
        followers, leader.followers = leader.followers, {}
        for request in followers:
            request.leader = None
            if leader.verdict is not None:
                common = _common_pages(leader, request.key, leader.verdict.page + 1)
                if _same_answer(leader, request.key, common):
                    del self._requests[request.rid]
                    shared.append(leader.verdict)
                    continue
                request.divergence_end_page = common + 1
            insort(self._turns, request, key=_ARRIVAL)
        return shared

    def clear(self) -> None:
        """End all waits."""
        for rid in list(self._requests):
            self.remove(rid)

    def check(self) -> None:
        """Raises InvariantError if the invariant does not hold."""
        turns = {request.rid for request in self._turns}
        arrivals = [request.arrival for request in self._turns]
        if arrivals != sorted(arrivals) or len(turns) != len(arrivals):
            raise InvariantError("prefetch: the queue is not in order of arrival, or has a request twice")
        for rid, request in self._requests.items():
            leader = request.leader
            if (leader is None) != (rid in turns) or (leader and (leader.answered or request not in leader.followers)):
                raise InvariantError(f"prefetch: {rid!r} waits neither for its turn nor for an active prefetch")
        if not turns <= self._requests.keys():
            raise InvariantError("prefetch: a request that does not wait is in the queue")


def _same_answer(leader: Prefetch, key: RadixKey, common_pages: int) -> bool:
    """Return True if a lookup for `key` would have the result of `leader`: both keys contain the first page that
    storage lacks, or are equal to the end.
    """
    if leader.verdict is None:
        return False
    page_size = leader.tree.page_size
    longest = max(leader.key.pages(page_size), key.pages(page_size))
    return common_pages >= min(leader.verdict.page + 1, longest)


def _common_pages(leader: Prefetch, key: RadixKey, pages_max: int) -> int:
    """Return how many leading pages the key of `leader` shares with that of a follower, at most `pages_max`.

    REQUIRES: they agree before `leader.asked_page`.
    """
    page_bytes, page_size = leader.tree.page_bytes, leader.tree.page_size
    start = leader.asked_page * page_bytes
    low, high = leader.asked_page, min(pages_max, leader.key.pages(page_size), key.pages(page_size))
    while low < high:
        middle = (low + high + 1) // 2
        if key.tokens.startswith(leader.key.tokens[start : middle * page_bytes], start):
            low = middle
        else:
            high = middle - 1
    return low

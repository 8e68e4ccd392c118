"""Prefetch: from storage to L2, before a request is scheduled.

A prefetch starts behind the last node of the prompt's prefix, its anchor, which is held so that what arrives can be
attached there. Storage is asked first; only if what it has is long enough and pays are host pages taken and reads
started. The request goes on when the policy lets it, with what has arrived by then: a contiguous, verified prefix.
Pages that are still being read stay reserved until the read has really ended.

    best_effort    the request never waits
    wait_complete  it waits for all that storage has, up to `PREFETCH_S_MAX`
    timeout        it waits for a time that grows with the length of what it lacks

A request whose next page is being fetched for another one waits for that instead, and then looks again for what is
still missing: equal prompts that arrive together are read once. If the other one's time ran out, or storage had nothing
for it, the follower goes on without asking again.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..arguments import instance
from ..backends.guard import Direction
from ..controller import PREFETCH_S_MAX, HiCacheController, Lookup, Read
from ..histogram import BOUNDS_S, Histogram
from ..keys import RadixKey
from ..radix import Node, RadixTree
from .break_even import BreakEven, Route
from .host_tier import HostTier
from .statistics import CacheCounters
from .trees import Trees


class FirstPage(NamedTuple):
    """Which page a prefetch starts with: its part of the key below a node, 0 for the root of a seed."""

    seed: bytes
    node_id: int
    tokens: bytes

    def __repr__(self) -> str:
        return f"FirstPage(below node {self.node_id}, {len(self.tokens)} bytes)"


@dataclass(slots=True, eq=False)
class _Prefetch:
    rid: str
    operation: Lookup | Read  # the read, once the lookup has found enough
    key: RadixKey
    start_page: int  # pages before it are on L2 already
    tree: RadixTree
    anchor: Node
    first_page: FirstPage = field(repr=False)
    taken_pages: int = 0  # leading pages of the read that went into the tree
    expired: bool = False  # its time is over, on some rank
    answered: bool = False  # the request goes on; nothing that arrives later is for it
    in_vain: bool = False  # it has ended and brought nothing


class _Arrived(NamedTuple):
    """Pages up to `node` that came for a request that has not begun."""

    tree: RadixTree
    node: Node
    pages: int


@dataclass(slots=True, eq=False)
class _Follower:
    """A request that waits for the prefetch of another one."""

    key: RadixKey
    leader: _Prefetch


class Prefetcher:
    """At most one prefetch per request id at a time.

    Invariant: `_active` and `_operations` have the prefetches whose operation is not acknowledged, by request id and by
    operation; `_leaders` has the unanswered ones of them by the page they start with, one each.
    """

    def __init__(
        self,
        trees: Trees,
        host: HostTier,
        controller: HiCacheController,
        counters: CacheCounters,
        break_even: BreakEven,
    ) -> None:
        self._trees = trees
        self._host = host
        self._controller = controller
        self._gate = controller.gate
        self._config = config = controller.config.prefetch
        self._counters = counters
        self._break_even = break_even
        self._active: dict[str, _Prefetch] = {}
        self._operations: dict[Lookup | Read, _Prefetch] = {}
        self._leaders: dict[FirstPage, _Prefetch] = {}
        self._followers: dict[str, _Follower] = {}
        self._arrived: dict[str, _Arrived] = {}
        self._arrived_pages = 0
        self.wait = Histogram(BOUNDS_S)  # of requests, from `start` until they need not wait any more
        self._asked_s: dict[str, float] = {}  # when each of those that wait began to
        self._pages_max = int(config.host_share * host.host.pages)

    def start(self, rid: str, key: RadixKey) -> bool:
        """Look for what L1 and L2 lack of the whole pages of `key`. False if it is not worth it or not possible now."""
        started = self._start(rid, key)
        if started:
            self._asked_s[rid] = self._controller.clock()
        return started

    def _start(self, rid: str, key: RadixKey) -> bool:
        if not self._gate.attached or rid in self._active or rid in self._followers:
            return False
        if self._pages_max == 0:
            return self._skip("prefetch_host_share")
        tree = self._trees.current
        match = tree.match(key)
        missing_tokens = (key.pages(tree.page_size) - match.pages) * tree.page_size
        if missing_tokens < self._config.threshold_tokens:
            return self._skip("prefetch_too_short")
        if not self._gate.may(Direction.READ):
            return self._skip("prefetch_paused")
        start = match.pages * tree.page_bytes
        above = match.node.id if match.pages else 0
        first_page = FirstPage(key.seed, above, key.tokens[start : start + tree.page_bytes])
        leader = self._leaders.get(first_page)
        if leader is not None:
            self._followers[rid] = _Follower(key, leader)
            return True
        lookup = self._controller.submit_lookup(
            key, start_page=match.pages, prior=tree.prior(match.node), timeout_s=self._timeout_s(missing_tokens)
        )
        if lookup is None:
            return False
        tree.hold_host(match.node)
        prefetch = _Prefetch(rid, lookup, key, match.pages, tree, match.node, first_page)
        self._active[rid] = self._operations[lookup] = self._leaders[first_page] = prefetch
        return True

    def _timeout_s(self, missing_tokens: int) -> float:
        if self._config.policy != "timeout":
            return PREFETCH_S_MAX
        return self._config.timeout_base + self._config.timeout_per_1024_tokens / 1024 * missing_tokens

    def ready(self, rid: str) -> bool:
        """Whether the request need not wait (any more). Ends the wait of one whose time is over."""
        instance("rid", rid, str)
        is_ready = self._ready(rid)
        if is_ready:
            self._note_wait(rid)
        return is_ready

    def _note_wait(self, rid: str) -> None:
        """The request does not wait any more, if it did."""
        asked_s = self._asked_s.pop(rid, None)
        if asked_s is not None:
            self.wait.add(self._controller.clock() - asked_s)

    def _ready(self, rid: str) -> bool:
        if self._config.policy == "best_effort":
            return True
        follower = self._followers.get(rid)
        if follower is not None and not self._lead_again(rid, follower):
            return False
        prefetch = self._active.get(rid)
        if prefetch is None or prefetch.answered:
            return True
        if not prefetch.expired:
            return False
        self._skip("prefetch_timeout")
        self._answer(prefetch)
        if prefetch.taken_pages == 0:
            self._gate.failed(Direction.READ)  # it may hang; let the next requests go on without waiting for it
        return True

    def _lead_again(self, rid: str, follower: _Follower) -> bool:
        """Look again once what a follower waits for has ended; False if it has not, or if there is more to follow."""
        leader = follower.leader
        in_vain = leader.in_vain or leader.expired
        if not leader.answered and not in_vain:
            return False
        del self._followers[rid]
        if in_vain:
            return True
        self._start(rid, follower.key)
        return rid not in self._followers

    def is_active(self, rid: str) -> bool:
        """Whether something is being looked up or read for a request that has not begun."""
        prefetch = self._active.get(rid)
        return prefetch is not None and not prefetch.answered

    def abort(self, rid: str) -> None:
        """Stop the prefetch of a request that will not run; what has arrived stays."""
        self.conclude(instance("rid", rid, str))
        self.take_arrived(rid)

    def conclude(self, rid: str) -> None:
        """End the wait of a request that begins: what has not arrived from storage by now is computed."""
        self._note_wait(rid)
        self._followers.pop(rid, None)
        prefetch = self._active.get(rid)
        if prefetch is not None and not prefetch.answered:
            self._answer(prefetch)

    def cancel_all(self) -> None:
        """Stop all prefetches; nothing that they bring is shown any more."""
        self._asked_s.clear()
        self._followers.clear()
        for rid in list(self._arrived):
            self.take_arrived(rid)
        for prefetch in self._active.values():
            if not prefetch.answered:
                self._cancel(prefetch)

    def take_arrived(self, rid: str) -> int:
        """How many pages came from storage for this request; asked once, when it has begun or will not.

        They were held until now, so that they did not leave before they were used once.
        """
        arrived = self._arrived.pop(rid, None)
        if arrived is None:
            return 0
        self._arrived_pages -= arrived.pages
        arrived.tree.release_host(arrived.node)
        return arrived.pages

    def expired(self, operation: Lookup | Read) -> None:
        """The time of a prefetch is over; `ready` answers its request."""
        self._operations[operation].expired = True

    def found(self, found: Lookup) -> None:
        """The lookup has ended: start the reads if they pay and fit, else drop the prefetch."""
        prefetch = self._operations.pop(found)
        self._counters.lookups[_outcome(found, prefetch)] += 1
        page_size, threshold = prefetch.tree.page_size, self._config.threshold_tokens
        held_pages = self._controller.read_pages + self._arrived_pages
        pages = min(found.pages, self._pages_max - held_pages)
        host_pages = None
        if prefetch.answered:
            reason = "prefetch_too_late"
        elif found.failed:
            reason = "prefetch_failed"
        elif found.pages * page_size < threshold:
            reason = "prefetch_hit_too_short"
        elif pages * page_size < threshold:
            reason = "prefetch_host_share"
        elif not self._break_even.decide(Route.PREFETCH, pages * page_size, pages).go:
            reason = "prefetch_does_not_pay"
        else:
            reason = "prefetch_no_host_room"
            host_pages = self._host.reserve(pages)
        if host_pages is not None:
            prefetch.operation = self._controller.submit_read(found, host_pages)
            self._operations[prefetch.operation] = prefetch
            return
        self._skip(reason)
        prefetch.in_vain = not prefetch.answered
        if found.failed:
            self._gate.failed(Direction.READ)
        elif not prefetch.answered:
            self._gate.succeeded(Direction.READ)
        self._end(prefetch)

    def ended(self, read: Read) -> None:
        """The reads have ended, well or not: take what is whole, give the rest of the host pages back."""
        prefetch = self._operations.pop(read)
        if not prefetch.answered:
            self._take(prefetch, read, read.pages)
            prefetch.in_vain = prefetch.taken_pages == 0
        unused = read.host_pages[prefetch.taken_pages :]
        self._host.release(unused)
        if read.failed:
            self._skip("prefetch_failed")
            self._gate.failed(Direction.READ)
        else:
            self._break_even.observe_transfer(Route.PREFETCH, read.pages_here, read.seconds)
            if prefetch.taken_pages:
                self._gate.succeeded(Direction.READ)
        self._end(prefetch)

    def _answer(self, prefetch: _Prefetch) -> None:
        if isinstance(read := prefetch.operation, Read):
            self._take(prefetch, read, read.pages)
        self._cancel(prefetch)

    def _cancel(self, prefetch: _Prefetch) -> None:
        self._controller.cancel_prefetch(prefetch.operation)
        self._close(prefetch)

    def _close(self, prefetch: _Prefetch) -> None:
        prefetch.answered = True
        del self._leaders[prefetch.first_page]

    def _take(self, prefetch: _Prefetch, read: Read, arrived: int) -> None:
        """Put the leading `arrived` pages, which are read and verified, into the tree."""
        prefetch.taken_pages = arrived
        if arrived == 0:
            return
        node, unused = prefetch.tree.insert_host(
            prefetch.key, prefetch.start_page, read.host_pages[:arrived], keys := list(read.keys[:arrived]),
            stored=self._host.are_in_storage(keys),
        )  # fmt: skip
        self._host.commit(arrived, unused)
        if arrived > len(unused):
            pages = arrived - len(unused) + self.take_arrived(prefetch.rid)
            prefetch.tree.hold_host(node)
            self._arrived[prefetch.rid] = _Arrived(prefetch.tree, node, pages)
            self._arrived_pages += pages

    def _end(self, prefetch: _Prefetch) -> None:
        if not prefetch.answered:
            self._close(prefetch)
        prefetch.tree.release_host(prefetch.anchor)
        del self._active[prefetch.rid]

    def _skip(self, reason: str) -> bool:
        self._counters.skipped[reason] += 1
        return False


def _outcome(found: Lookup, prefetch: _Prefetch) -> str:
    """Return one of `LOOKUP_OUTCOMES`."""
    if found.failed:
        return "failed"
    if not found.pages:
        return "miss"
    return "whole" if found.pages == found.key.pages(prefetch.tree.page_size) - found.start_page else "part"

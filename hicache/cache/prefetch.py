"""Prefetch: reads pages from storage to L2 before a request is scheduled.

A prefetch starts after the last node of the prompt's cached prefix, its anchor, which is locked so that arriving pages
can be attached there. It looks up storage first. Only if the hit is long enough and pays, it reserves host pages and
starts reads. The request continues as the policy says, with the pages that have arrived: a contiguous, verified prefix.
Pages that are still being read stay reserved until the read has really ended.

    best_effort    the request never waits
    wait_complete  it waits for all pages that storage has, up to `PREFETCH_S_MAX`
    timeout        it waits for a time that grows with the number of missing pages

The time starts when the engine first asks (`ready`), and counts in the steps in which it asks and L1 has room: the
request could run then. It bounds the wait and not the prefetch, which continues until the request begins, also while
the device has no room.

A prefetch starts when its request is among the first that wait, or when its turn is near, compared with the time for
fetching: pages that arrive long before their request would only take room on L2. While the first requests wait, they
are looked up again: L1 and L2 may have evicted their pages since, and other requests may have stored more of them.
Nothing waits for such a lookup.

When the time is over, an operation in flight is still awaited until a poll could have seen its end: a late poll costs
no hits.

A prefetch that cannot start waits (`waiting`) in order of arrival, for an operation or while storage is paused. After a
sufficient lookup, it waits while other prefetches hold the L2 room that it needs: they are reading, or their pages have
arrived and their requests have not begun. When no other prefetch holds room, it reads as many pages as fit, so a
prefetch never waits for room that cannot become free. The rest follows once these pages are on L1 (`chunked_prefetch`).
A waiting prefetch holds nothing: a request that starts again and waits releases its pages.

Requests do not wait for paused storage: an outage costs hits and no time. Storage is also paused if the time of a
request is over during a long call of the store, without an arrived page.

`prefetch_states` has the states of a prefetch and the moves between them.

If another request is fetching the next page of a request, it waits for that, and then looks up the still missing pages:
equal prompts that arrive together are read once.

With ranks, all decide identically: by agreed acks, page counts, gate state and time.

Longer than 500 lines because all moves of a prefetch share its table, its operations and its share of L2.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .. import tracing
from ..arguments import instance
from ..backends.base import Direction, GetOutcome
from ..controller import PREFETCH_S_MAX, HiCacheController, LookupOperation, ReadOperation
from ..errors import InvariantError
from ..ghosts import Kind, Reason
from ..histogram import BOUNDS_S, Histogram
from ..keys import RadixKey, common_pages
from ..radix import Match, Node, RadixTree
from ..types import PageIds
from .break_even import Ahead, BreakEven, Decision, Route
from .chunked_prefetch import PrefetchShare
from .compute_queue import ComputeQueue
from .explain import NO_STORAGE, StorageAnswer
from .host_tier import HostTier
from .leaders import Leaders, judge, outcome, shares_verdict
from .prefetch_states import AT_REST, IN_FLIGHT, NOT_AWAITED, WAITING, Fetch, Prefetch, PrefetchTable, State
from .statistics import CacheCounters
from .trees import Trees

# More than the requests that an engine begins while the first of them waits. Each costs an object and no copy.
WAITING_MAX = 4096
# How many waiting requests a step checks: each costs a lookup in the tree, about ten microseconds.
TRIES_PER_STEP = 32
# A prefetch starts when its turn comes in less than this, and the time for fetching its whole prompt twice.
EARLY_S = 2.0
LEAD = 2
# How many of the waiting requests are looked up at once and again, how often at most, and how often they are checked.
FIRST = 8
AGAIN_S = 1.0
CHECK_S = AGAIN_S / FIRST
# Why pages that storage has, or may have, are computed, by the reason of `SKIP_REASONS`.
_UNREAD = {
    "prefetch_does_not_pay": (Reason.NOT_WORTH, ""), "prefetch_failed": (Reason.UNAVAILABLE, ""),
    "prefetch_hit_too_short": (Reason.NOT_WORTH, ""), "prefetch_host_share": (Reason.NO_ROOM, ""),
    "prefetch_no_host_room": (Reason.NO_ROOM, ""), "prefetch_paused": (Reason.UNAVAILABLE, ""),
    "prefetch_queued": (Reason.LATE, "queue"), "prefetch_timeout": (Reason.LATE, "read"),
    "prefetch_unanswered": (Reason.LATE, "lookup"),
}
# Why a read has ended before the last page: such a page, or the store.
_LACKS = {
    GetOutcome.MISS: (Reason.EVICTED, "storage"), GetOutcome.CORRUPT: (Reason.DAMAGED, ""),
    None: (Reason.UNAVAILABLE, ""),
}


@dataclass(eq=False, repr=False)
class Prefetcher:
    """At most one prefetch per request id at a time.

    Invariants: the prefetches in flight, awaiting room or cancelled are at most `operations_max`; `_operations` has
    those in flight or cancelled, by operation. The others are those of `PrefetchTable`.
    """

    _trees: Trees
    _host: HostTier
    _controller: HiCacheController
    _counters: CacheCounters
    _break_even: BreakEven
    _queue: ComputeQueue

    def __post_init__(self) -> None:
        self._gate = self._controller.gate
        self._config = self._controller.config.prefetch
        self._arrivals = 0
        self._checked_s = -math.inf
        self._table = PrefetchTable()
        self._operations: dict[LookupOperation | ReadOperation, Prefetch] = {}
        self._leaders = Leaders()
        self.share = PrefetchShare(self._host, self._controller, self._table)
        self.wait = Histogram(BOUNDS_S)  # of requests, from the first `ready` until they may begin
        # Whether L1 may have room for so many pages; the cache that owns L1 sets it.
        self.may_have_room: Callable[[int], bool] = lambda pages: True
        # The cached prefix of a prompt that a request can use; that cache sets it too.
        self.match: Callable[[RadixTree, RadixKey], Match] = RadixTree.match

    # Requests

    def start(
        self, rid: str, key: RadixKey, context: tracing.Context | None = None, device_pages: int = 0, *,
        at_once: bool = True, is_request: bool = True,
    ) -> bool:
        """Look up the pages of `key` that neither L1 nor L2 holds; queue the lookup if others are first, or without
        `at_once`. Return False if that does not pay or is not possible. `context` is the parent of its span. The first
        `device_pages` pages, which an engine has in a device cache of its own, are read only to reach later ones: L2
        keeps whole prefixes. Without `is_request`, it is for a hint: no request waits for it, nor does it for room."""
        prefetch = self._table.get(rid)
        if not self._gate.attached or (prefetch is not None and prefetch.state not in AT_REST):
            return False
        if self.share.pages_max == 0:
            return self._skip("prefetch_host_share")
        tree = self._trees.current
        if is_request:
            self._queue.arrive(rid, self._left_tokens(key), self._controller.time_s())
        match = self.match(tree, key) if self._is_due(rid, key) else None
        found_pages = sum(tree.peek(key)) if match is None else match.pages
        self._queue.expect(rid, self._left_tokens(key, max(device_pages, found_pages)))
        missing_pages = key.pages(tree.page_size) - found_pages
        is_short = match is not None and missing_pages - max(0, device_pages - found_pages) < self.share.pages_min
        leader = None if match is None else self._leaders.find(key, tree, match)
        may_lead = at_once and leader is None and not self._table.count(State.QUEUED) and self._may_lead()
        if not (may_lead or is_short) and self._table.count(*WAITING) >= WAITING_MAX:
            self._controller.refused["prefetch"] += 1
            return False
        self._arrivals += 1
        limit_s = self._limit_s(missing_pages)
        if prefetch is None:
            self._table.add(prefetch := Prefetch(rid, key, self._arrivals, limit_s, device_pages))
        else:
            prefetch.start_again(key, self._arrivals, limit_s, device_pages)
        prefetch.again_s = self._controller.time_s() + AGAIN_S
        prefetch.is_request = prefetch.waits = is_request
        if is_short:
            prefetch.waits = False
            if prefetch.state is State.NEW:
                self._rest(prefetch)
            prefetch.unread = Reason.NOT_WORTH, ""
            return self._skip("prefetch_too_short")
        prefetch.span, prefetch.arrived_pages = tracing.begin("prefetch", context, pages=missing_pages), 0
        prefetch.outcome = ""
        if match is not None and may_lead:
            self._lead(prefetch, match)
        else:
            self.share.release(prefetch)  # the pages of its previous attempt: earlier requests may need them
            self._table.move(prefetch, State.QUEUED if leader is None else State.FOLLOWING, leader)
        return True

    def _left_tokens(self, key: RadixKey, cached_pages: int = 0) -> int:
        """Return the tokens of a prompt after its cached pages. A key of page keys has only whole pages."""
        page_size = self._trees.current.page_size
        tokens = key.pages(page_size) * page_size if key.is_given else key.prompt_tokens
        return tokens - cached_pages * page_size

    def _limit_s(self, missing_pages: int) -> float:
        if self._config.policy != "timeout":
            return PREFETCH_S_MAX
        tokens = missing_pages * self._trees.current.page_size
        return self._config.timeout_base + self._config.timeout_per_1024_tokens / 1024 * tokens

    def ready(self, rid: str, device_pages: int = 0) -> bool:
        """Return True if the request, which has `device_pages` by now, need not wait. It can become False again."""
        prefetch = self._table.get(instance("rid", rid, str))
        if prefetch is None:
            return True
        prefetch.device_pages = device_pages
        if self._config.policy != "best_effort":
            if prefetch.state in NOT_AWAITED or self._has_room(prefetch):
                prefetch.count_time(self._controller)
            if self._is_awaited(prefetch):
                return False
            if prefetch.waits and self._hangs(prefetch):
                self._gate.failed(Direction.READ)  # the next requests should not wait for it
        self._note_wait(prefetch)
        return True

    def _note_wait(self, prefetch: Prefetch) -> None:
        """Record the wait of the request, if it was waiting."""
        if prefetch.waits:
            self.wait.add(prefetch.waited_s)
            prefetch.waits = False

    def _is_awaited(self, prefetch: Prefetch) -> bool:
        """Return True if the request waits for pages that are, or can be, in flight."""
        missing_pages = prefetch.end_page(self._trees.current.page_size) - prefetch.device_pages
        if prefetch.state in NOT_AWAITED or missing_pages < self.share.pages_min:
            return False
        if prefetch.looks_again and (prefetch.state is State.LOOKING_UP or not self._has_room(prefetch)):
            return False
        leader = prefetch if prefetch.leader is None else prefetch.leader
        if prefetch.waited_s >= prefetch.limit_s:
            return leader.state in IN_FLIGHT and not self._controller.had_time(leader.current.polls)
        return leader.state in (*IN_FLIGHT, State.AWAITING_L1, State.LOADING) or self._gate.may(Direction.READ)

    def _hangs(self, prefetch: Prefetch) -> bool:
        """Return True if nothing has arrived for a request whose time is over, and a call of the store, its own or one
        that its operation waits for, has taken most of that time."""
        is_over = prefetch.waited_s >= prefetch.limit_s  # otherwise the device has its pages
        if not is_over or prefetch.state not in IN_FLIGHT or prefetch.current.operation.pages:
            return False
        called_s = (one.called_s for one in self._operations if one.storage is self._gate.storage)
        return self._controller.clock() - min(called_s, default=math.inf) > prefetch.limit_s / 2

    def is_active(self, rid: str) -> bool:
        """Return True if a request that has not begun has a prefetch that may still bring pages."""
        prefetch = self._table.get(rid)
        return prefetch is not None and prefetch.state not in NOT_AWAITED

    def abort(self, rid: str) -> None:
        """Stop the prefetch of a request that will not run; pages that have arrived stay."""
        prefetch = self._table.get(instance("rid", rid, str))
        self._queue.leave(rid)
        if prefetch is not None:
            self._stop(prefetch)
            self.take_arrived(rid)

    def conclude(self, rid: str) -> None:
        """End the wait of a request that begins: pages that have not arrived from storage are computed."""
        prefetch = self._table.get(rid)
        if prefetch is not None:
            prefetch.unread = self._why_unread(prefetch)
            if (reason := self._reason_to_begin(prefetch)) is not None:
                self._skip(reason, prefetch)
            self._stop(prefetch)

    def knows(self, rid: str) -> bool:
        """Return True if a request that has not begun has had a prefetch."""
        return self._table.get(rid) is not None

    def answer(self, rid: str) -> StorageAnswer:
        """Return what a request that begins knows of its pages in storage. REQUIRES: not yet `take_arrived`."""
        prefetch = self._table.get(rid)
        if prefetch is not None:
            return StorageAnswer(prefetch.found_page, prefetch.is_answered, self._why_unread(prefetch))
        why = "prefetch_queued" if self._gate.may(Direction.READ) else "prefetch_paused"
        return StorageAnswer(0, False, _UNREAD[why]) if self._gate.attached else NO_STORAGE

    def _why_unread(self, prefetch: Prefetch) -> Kind:
        """Return why a request that begins now lacks pages that storage has, or may have."""
        if (reason := self._reason_to_begin(prefetch)) is not None:
            return _UNREAD[reason]
        is_late = prefetch.state not in (*NOT_AWAITED, State.LOOKING_UP)
        return (Reason.LATE, "read") if is_late else prefetch.unread

    def _reason_to_begin(self, prefetch: Prefetch) -> str | None:
        """Return the reason why a request that begins lacks pages of its prefetch; None if it does not."""
        if prefetch.state in WAITING:
            return "prefetch_queued" if self._gate.may(Direction.READ) else "prefetch_paused"
        if prefetch.state is State.AWAITING_ROOM:
            return prefetch.current.lacks
        if prefetch.state is State.LOOKING_UP:
            return None if prefetch.looks_again else "prefetch_unanswered"
        is_cut = prefetch.state is State.READING and self._config.policy != "best_effort"
        return "prefetch_timeout" if is_cut else None

    def _stop(self, prefetch: Prefetch) -> None:
        """Stop a prefetch. Pages that have arrived enter the tree."""
        self._note_wait(prefetch)
        if prefetch.state in (*WAITING, State.AWAITING_L1):
            self._rest(prefetch)
        elif prefetch.state is State.AWAITING_ROOM:
            self._end(prefetch)
        elif prefetch.state is State.LOADING:
            self.share.stop(prefetch)
        elif prefetch.state in IN_FLIGHT:
            self.take_so_far(prefetch.rid)
            self._cancel(prefetch)

    def take_so_far(self, rid: str) -> int:
        """Put the pages that have arrived into the tree, before their read has ended; the prefetch goes on. Return how
        many have arrived so far."""
        prefetch = self._table.get(rid)
        if prefetch is not None and prefetch.state is State.READING:
            self._take(prefetch)
        return 0 if prefetch is None else prefetch.arrived_pages

    def give_way(self) -> bool:
        """Stop the prefetches that alone lock pages on L1. Return False if there are none."""
        by_end: dict[Node, list[Prefetch]] = {}
        for prefetch in self._table.all():
            if prefetch.fetch is not None and prefetch.fetch.anchor is not None:
                by_end.setdefault(prefetch.fetch.anchor, []).append(prefetch)
        stopped = False
        for node, prefetches in by_end.items():
            alone, part = node.lock_ref == len(prefetches), node
            while alone and part.device is None and part.parent is not None:
                part = part.parent
                alone = part.lock_ref == 1
            if alone and part.parent is not None:
                for prefetch in prefetches:
                    self._stop(prefetch)
                stopped |= node.lock_ref == 0
        return stopped

    def cancel_all(self) -> None:
        """Stop all prefetches; their pages no longer enter the tree."""
        for prefetch in self._table.of(State.FOLLOWING):  # first, so that no leader releases them
            self._rest(prefetch)
        for prefetch in self._table.all():
            prefetch.waits = False
            if prefetch.state in IN_FLIGHT:
                self._cancel(prefetch)
            else:
                self._stop(prefetch)
            self.share.take(prefetch)
            self._table.remove(prefetch)

    def take_arrived(self, rid: str) -> tuple[int, int]:
        """Forget the prefetch of a request that begins, or will not. Return how many of its pages came from storage: to
        L2, and on to L1. They were held until now, so that they were not evicted before their first use. Does nothing
        while more may arrive. REQUIRES: `conclude`, if the request begins.
        """
        prefetch = self._table.get(rid)
        if prefetch is None or self.is_active(rid):
            return 0, 0
        pages = self.share.take(prefetch)
        self._table.remove(prefetch)
        return pages, prefetch.promoted_pages

    # Each step

    def found(self, found: LookupOperation) -> None:
        """Handle the end of a lookup: start the reads if they pay and fit, let them wait for room, or drop it."""
        prefetch = self._operations.pop(found)
        fetch = prefetch.current
        prefetch.again_s = self._controller.time_s() + AGAIN_S
        self._counters.lookups[result := outcome(found, fetch.tree.page_size)] += 1
        is_answered = result in {"whole", "part", "miss"}
        if is_answered or not prefetch.is_answered:  # a second look that fails does not change the first answer
            prefetch.found_page, prefetch.is_answered = found.start_page + found.pages, is_answered
        if prefetch.state is State.CANCELLED:
            if found.failed:
                self._note_store(found, works=False)
            self._end(prefetch)
        elif (reason := self._reason_against(prefetch, found)) is not None:
            self._drop(prefetch, found, reason)
        elif self._table.count(State.AWAITING_ROOM):
            self._wait_for_room(prefetch, "prefetch_host_share")
        else:
            self._read_or_drop(prefetch)

    def ended(self, read: ReadOperation) -> None:
        """Handle the end of the reads: put the complete pages into the tree, free the other host pages."""
        prefetch = self._operations.pop(read)
        fetch = prefetch.current
        if prefetch.state is State.READING:
            self._take(prefetch)
            if fetch.taken_pages == 0:  # the lookup may have found more
                judge(fetch, "prefetch_hit_too_short", fetch.start_page, has_ranks=self._controller.has_ranks)
        self._host.release(read.host_pages[fetch.taken_pages :])
        if read.lacks is not None or (prefetch.state is State.READING and read.pages < len(read.host_pages)):
            prefetch.unread = _LACKS[read.lacks]
        if read.failed:
            self._skip("prefetch_failed", prefetch)
            self._note_store(read, works=False)
        else:
            self._break_even.observe_transfer(Route.PREFETCH, read.pages_here, read.seconds, read.charged_s)
            if fetch.taken_pages:
                self._note_store(read, works=True)
        if not self._may_continue(prefetch, read):
            self._end(prefetch)
            return
        self._close(prefetch)
        prefetch.fetch = None
        # Nothing is loaded if other requests have computed these pages.
        self._table.move(prefetch, State.AWAITING_L1 if prefetch in self.share.arrived else State.QUEUED)

    def _may_continue(self, prefetch: Prefetch, read: ReadOperation) -> bool:
        """Return True if the rest of a prompt may be fetched after the part that has arrived."""
        fetch = prefetch.current
        rest_pages = fetch.wanted_pages - fetch.taken_pages
        is_whole = fetch.taken_pages == len(read.host_pages) and prefetch.state is State.READING
        may_load = self.share.promote is not None and prefetch.is_request
        if not may_load or not is_whole or rest_pages < self.share.pages_min:
            return False
        if (end_page := fetch.start_page + fetch.taken_pages) > prefetch.reached_page:
            prefetch.reached_page, prefetch.lookups = end_page, 0
        return prefetch.may_look_up or self._skip("prefetch_host_share", prefetch)

    def start_waiting(self) -> None:
        """Start waiting work that may start now: copies to L1, reads in the order of their lookups, then lookups in
        order of arrival. Call it last in a step, when it is known whether storage may be used.
        """
        if not (table := self._table):
            return
        if not table.waits:
            self._look_again()
            return
        self.share.advance()
        while (prefetch := table.first(State.AWAITING_ROOM)) is not None and self._gate.may(Direction.READ):
            self._read_or_drop(prefetch)
            if prefetch.state is State.AWAITING_ROOM:
                break
        for _ in range(TRIES_PER_STEP):
            if (prefetch := table.first(State.QUEUED)) is None or not self._may_lead():
                break
            could_run = prefetch.asked_polls >= 0 and self._has_room(prefetch)
            if not (could_run or self._is_due(prefetch.rid, prefetch.key)):
                break
            self._try(prefetch)
        self._look_again()

    def _look_again(self) -> None:
        """Look up those of the first waiting requests again that were not looked up for a while."""
        now_s, tree = self._controller.time_s(), self._trees.current
        if now_s < self._checked_s + CHECK_S:
            return
        self._checked_s = now_s
        for rid in self._queue.first(FIRST):
            prefetch = self._table.get(rid)
            if prefetch is None or prefetch.state not in AT_REST or now_s < prefetch.again_s or not self._may_lead():
                continue
            prefetch.again_s, prefetch.lookups = now_s + AGAIN_S, 0
            match = self.match(tree, prefetch.key)
            is_short = self._lacks(prefetch, match) < self.share.pages_min
            if not is_short and self._leaders.find(prefetch.key, tree, match) is None:
                prefetch.looks_again = True
                self._lead(prefetch, match)

    @property
    def waiting(self) -> int:
        """Requests whose prefetch waits: for its turn, for another request's prefetch, or for room on L2."""
        return self._table.count(*WAITING, State.AWAITING_ROOM)

    def check(self) -> None:
        """Raises InvariantError if an invariant does not hold."""
        self._table.check(set(self.share.arrived))
        in_flight = [prefetch for state in (*IN_FLIGHT, State.CANCELLED) for prefetch in self._table.of(state)]
        if {prefetch.current.operation for prefetch in in_flight} != self._operations.keys():
            raise InvariantError(f"prefetch: {len(self._operations)} operations, {len(in_flight)} in flight")
        if len(in_flight) + self._table.count(State.AWAITING_ROOM) > self._config.operations_max:
            raise InvariantError(f"prefetch: {len(in_flight)} in flight exceed prefetch.operations_max")

    # Leading

    def _may_lead(self) -> bool:
        """Return True if a lookup may start now. Prefetches that wait for room count, so that their reads do not also
        wait for an operation.
        """
        operations = self._table.count(*IN_FLIGHT, State.AWAITING_ROOM, State.CANCELLED)
        return self._gate.may(Direction.READ) and operations < self._config.operations_max

    def _try(self, prefetch: Prefetch) -> None:
        """Prefetch the pages that a waiting request still lacks: none, pages in flight for another request, or more."""
        tree = self._trees.current
        match = self.match(tree, prefetch.key)
        if self._lacks(prefetch, match) < self.share.pages_min:
            prefetch.unread = Reason.NOT_WORTH, ""
            self._rest(prefetch)
            return
        leader = self._leaders.find(prefetch.key, tree, match, prefetch.divergence_end_page)
        if leader is None:
            self._lead(prefetch, match)
        else:
            self._table.move(prefetch, State.FOLLOWING, leader)

    def _lacks(self, prefetch: Prefetch, match: Match) -> int:
        """Return how many pages neither the cache nor the engine has for a request."""
        return prefetch.key.pages(self._trees.current.page_size) - max(match.pages, prefetch.device_pages)

    def _is_due(self, rid: str, key: RadixKey) -> bool:
        """Return True if a prefetch should start now, see the module's docstring; also while speeds are unknown, and
        for a hint, so that requests behind it do not wait for its turn."""
        fetch_s = self._break_even.fetch_s(key.pages(self._trees.current.page_size))
        if fetch_s is None or rid not in self._queue or self._queue.is_first(rid, FIRST):
            return True
        lead_s = LEAD * fetch_s + EARLY_S
        return self._wait_s(rid, lead_s) <= lead_s

    def _wait_s(self, rid: str, most_s: float = math.inf) -> float:
        return self._queue.wait_s(rid, self._break_even.prefill_tokens_per_s, self._controller.time_s(), most_s)

    def _has_room(self, prefetch: Prefetch) -> bool:
        """Return True if L1 may have room for a request, apart from the pages that it had when they were looked up."""
        pages = -(-self._left_tokens(prefetch.key) // self._trees.current.page_size)
        return self.may_have_room(pages - (0 if prefetch.fetch is None else prefetch.fetch.start_page))

    def _lead(self, prefetch: Prefetch, match: Match) -> None:
        tree = self._trees.current
        prefetch.lookups += 1
        prefetch.promoted_pages = min(prefetch.promoted_pages, match.pages)  # L1 has evicted the others since
        lookup = self._controller.submit_lookup(
            prefetch.key, start_page=match.pages, prior=tree.prior(match.node), call_s=prefetch.limit_s,
            context=tracing.under(prefetch.span),
        )
        prefetch.fetch = fetch = Fetch(lookup, match.pages, match.pages, tree, self._controller.polls)
        fetch.hold_end(match)
        self._operations[lookup] = prefetch
        self._leaders.add(prefetch, match)
        self._table.move(prefetch, State.LOOKING_UP)

    # Reading

    def _reason_against(self, prefetch: Prefetch, found: LookupOperation) -> str | None:
        """Return the reason not to read the found pages; None if they are read as soon as there is room."""
        fetch, pages = prefetch.current, min(found.pages, self.share.pages_max)
        pages_min = self.share.pages_min + (device_pages := prefetch.device_pages_from(found.start_page))
        if found.failed:
            return "prefetch_failed"
        if found.pages < pages_min:
            is_cut = outcome(found, fetch.tree.page_size) == "unanswered"
            return "prefetch_unanswered" if is_cut else "prefetch_hit_too_short"
        if pages < pages_min:
            return "prefetch_host_share"
        tokens, ahead = (pages - device_pages) * fetch.tree.page_size, self._ahead(prefetch)
        part_pages = math.inf if device_pages else pages_min  # a part would pay only beyond the device's pages
        # A second look was counted at the first one, and is not probed more often.
        judge_by = self._break_even.would if prefetch.looks_again else self._break_even.decide
        decision = judge_by(Route.PREFETCH, tokens, pages, ahead, part_pages)
        if prefetch.looks_again and decision is Decision.PROBE:
            return "prefetch_does_not_pay"
        fetch.paying_pages = found.pages
        if decision is Decision.PARTLY:
            fetch.paying_pages = self._break_even.paying_pages(tokens, pages, ahead)
        return None if decision.go else "prefetch_does_not_pay"

    def _ahead(self, prefetch: Prefetch) -> Ahead:
        """Return what is ahead of the pages that were found for a request: its own wait, and other reads."""
        reading = (one for one in self._operations if isinstance(one, ReadOperation))
        pages = sum(len(read.host_pages) - read.pages for read in reading)
        pages += sum(min(one.current.paying_pages, self.share.pages_max) for one in self._table.of(State.AWAITING_ROOM))
        arrivals_per_s = self._queue.arrivals_per_s(self._controller.time_s())
        return Ahead(self._wait_s(prefetch.rid), pages, arrivals_per_s)

    def _read_or_drop(self, prefetch: Prefetch) -> None:
        """Read as many of the found pages as fit, drop the prefetch if too few fit, or let it wait for room that other
        prefetches hold.
        """
        fetch, share = prefetch.current, self.share
        found = fetch.operation
        if not isinstance(found, LookupOperation):
            raise InvariantError(f"prefetch: {prefetch.rid!r} waits for room but has no lookup")
        may_wait = share.others_hold(prefetch)
        if may_wait and min(fetch.paying_pages, share.pages_max) > share.free_pages:
            self._wait_for_room(prefetch, "prefetch_host_share")
            return
        has_waited = fetch.anchor is None
        if has_waited:
            fetch.hold_end(self.match(fetch.tree, prefetch.key))
        skip_pages = fetch.start_page - fetch.asked_page
        rest_pages = fetch.paying_pages - skip_pages
        pages_min = share.pages_min + prefetch.device_pages_from(fetch.start_page)
        if skip_pages < 0 and prefetch.may_look_up:
            self._close(prefetch)  # its prefix was evicted, so it is also looked up in storage
            prefetch.fetch = None
            self._try(prefetch)
        elif skip_pages < 0:
            self._drop(prefetch, found, "prefetch_no_host_room")
        elif rest_pages < pages_min:
            self._end(prefetch)  # other requests have fetched the rest
        elif (pages := min(rest_pages, share.free_pages)) < pages_min:
            self._drop(prefetch, found, "prefetch_host_share")
        elif (host_pages := share.reserve(pages, pages_min, all_of_them=may_wait, again=has_waited)) is not None:
            fetch.wanted_pages = rest_pages
            end_page = max(fetch.start_page + len(host_pages), prefetch.device_pages)
            self._queue.expect(prefetch.rid, self._left_tokens(prefetch.key, end_page))
            self._read(prefetch, found, host_pages)
        elif may_wait or not self._controller.idle:  # operations in flight also hold room on L2
            self._wait_for_room(prefetch, "prefetch_no_host_room")
        else:
            self._drop(prefetch, found, "prefetch_no_host_room")

    def _wait_for_room(self, prefetch: Prefetch, lacks: str) -> None:
        if not prefetch.is_request:  # requests would wait behind it
            self._skip(lacks, prefetch)
            self._end(prefetch)
            return
        prefetch.current.lacks = lacks
        self.share.release(prefetch)  # the pages of its previous attempt: the first in line may need them
        prefetch.current.release()
        if prefetch.state is not State.AWAITING_ROOM:
            self._table.move(prefetch, State.AWAITING_ROOM)

    def _read(self, prefetch: Prefetch, found: LookupOperation, host_pages: PageIds) -> None:
        fetch = prefetch.current
        skip_pages = fetch.start_page - fetch.asked_page
        fetch.operation = read = self._controller.submit_read(found, host_pages, skip_pages=skip_pages)
        fetch.polls = self._controller.polls
        self._operations[read] = prefetch
        self._table.move(prefetch, State.READING)

    # Ending

    def _drop(self, prefetch: Prefetch, found: LookupOperation, reason: str) -> None:
        """End a prefetch without reads."""
        prefetch.unread = _UNREAD[reason]
        if not prefetch.looks_again:
            self._skip(reason, prefetch)
        judge(prefetch.current, reason, found.start_page + found.pages, has_ranks=self._controller.has_ranks)
        self._note_store(found, works=not found.failed)
        self._end(prefetch)

    def _note_store(self, operation: LookupOperation | ReadOperation, *, works: bool) -> None:
        """Notify the gate of the result of an operation, unless its store has been replaced since."""
        if operation.storage is self._gate.storage:
            (self._gate.succeeded if works else self._gate.failed)(Direction.READ)

    def _cancel(self, prefetch: Prefetch) -> None:
        prefetch.current.operation.cancelled = True
        self._close(prefetch)
        self._table.move(prefetch, State.CANCELLED)

    def _close(self, prefetch: Prefetch) -> None:
        """End the lead of a prefetch: its followers share its verdict, or wait for their turn."""
        fetch = prefetch.current
        fetch.release()  # at once: a store that hangs must not keep pages on L1
        self._leaders.remove(fetch)
        for follower in list(fetch.followers):
            if fetch.verdict is not None and shares_verdict(follower, prefetch):
                self._skip(fetch.verdict.reason, follower)
                common = common_pages(prefetch.key.tokens, follower.key.tokens, 0, fetch.tree.page_bytes)
                follower.found_page, follower.is_answered = min(prefetch.found_page, common), True
                follower.unread = prefetch.unread
                self._rest(follower)
            else:
                self._table.move(follower, State.QUEUED)

    def _take(self, prefetch: Prefetch) -> None:
        """Put the pages that have been read and verified since the last call into the tree, and hold their end."""
        fetch = prefetch.current
        read, taken = fetch.operation, fetch.taken_pages
        if not isinstance(read, ReadOperation) or (arrived := read.pages - taken) == 0:
            return
        fetch.taken_pages = read.pages
        prefetch.arrived_pages += arrived
        node, unused = fetch.tree.insert_host(
            prefetch.key, fetch.start_page + taken, read.host_pages[taken : read.pages],
            keys := list(read.keys[taken : read.pages]), stored=self._host.are_in_storage(keys), below=fetch.anchor,
        )
        self._host.commit(arrived, unused)
        if arrived > len(unused):
            self.share.arrive(prefetch, fetch.tree, node, arrived - len(unused))
        fetch.hold(node)

    def _end(self, prefetch: Prefetch) -> None:
        """End a prefetch whose operation has returned, and its lead."""
        if prefetch.state is not State.CANCELLED:
            self._close(prefetch)
        self._rest(prefetch)

    def _rest(self, prefetch: Prefetch) -> None:
        self._table.rest(prefetch, holds=prefetch in self.share.arrived)

    def _skip(self, reason: str, prefetch: Prefetch | None = None) -> bool:
        self._counters.skipped[reason] += 1
        if prefetch is not None:
            prefetch.outcome, prefetch.unread = reason, _UNREAD[reason]
        return False

"""Prefetch: reads pages from storage to L2 before a request is scheduled.

A prefetch starts after the last node of the prompt's cached prefix, its anchor, which is locked so that arriving pages
can be attached there. It looks up storage first. Only if the hit is long enough and pays, it reserves host pages and
starts reads. The request continues as the policy says, with the pages that have arrived: a contiguous, verified prefix.
Pages that are still being read stay reserved until the read has really ended.

    best_effort    the request never waits
    wait_complete  it waits for all pages that storage has, up to `PREFETCH_S_MAX`
    timeout        it waits for a time that grows with the number of missing pages

The time starts with `start`. A prefetch that cannot start waits (`waiting`) in order of arrival, for an operation or
while storage is paused. After a sufficient lookup, it waits while other prefetches hold the L2 room that it needs: they
are reading, or their pages have arrived and their requests have not begun. When no other prefetch holds room, it reads
as many pages as fit, so a prefetch never waits for room that cannot become free. The rest follows once these pages are
on L1 (`chunked_prefetch`). A waiting prefetch holds nothing: a request that starts again and waits releases its pages.

A waiting prefetch is cancelled and counted when its request begins. It is not cancelled when its request's time is
over: the request no longer waits, but until it is scheduled, pages may still arrive. Requests do not wait for paused
storage: an outage costs hits and no time.

If another request is fetching the next page of a request, it waits for that, and then looks up the still missing pages:
equal prompts that arrive together are read once.

With ranks, all decide identically: by agreed acks, page counts, gate state and time.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from ..arguments import instance
from ..backends.base import Direction
from ..controller import PREFETCH_S_MAX, HiCacheController, Load, Lookup, Read
from ..errors import InvariantError
from ..histogram import BOUNDS_S, Histogram
from ..keys import RadixKey
from ..radix import Match
from ..types import PageIds
from .break_even import BreakEven, Route
from .chunked_prefetch import ChunkedPrefetch, Promote
from .host_tier import HostTier
from .prefetch_share import PrefetchShare
from .statistics import CacheCounters
from .trees import Trees
from .waiting import Leaders, Prefetch, PrefetchRequest, Verdict, WaitingRequests, outcome

# More than the requests that an engine begins while the first of them waits. Each costs an object and no copy.
WAITING_MAX = 4096
# How many waiting requests a step checks: each costs a lookup in the tree, about ten microseconds.
TRIES_PER_STEP = 32


class Prefetcher:
    """At most one prefetch per request id at a time.

    Invariants: `_active` has the prefetches whose operation is not acknowledged, and those that wait for room, at most
    `operations_max` in all. `_for_room` has the latter too, in the order of their lookups, and `_operations` the former
    by operation. A request in `_waiting` does not have a prefetch; `_share` has no pages for it, or for `_for_room`.
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
        self._config = controller.config.prefetch
        self._counters = counters
        self._break_even = break_even
        self._arrivals = 0
        self._waiting = WaitingRequests()
        self._active: dict[str, Prefetch] = {}
        self._operations: dict[Lookup | Read, Prefetch] = {}
        self._for_room: dict[Prefetch, None] = {}
        self._leaders = Leaders()
        self._share = PrefetchShare(host, controller)
        self._chunked = ChunkedPrefetch(self._share)
        self.wait = Histogram(BOUNDS_S)  # of requests, from `start` until they may begin
        self._asked_s: dict[str, float] = {}  # the start times of the waiting requests

    # Requests

    def start(self, rid: str, key: RadixKey) -> bool:
        """Look up the pages of `key` that neither L1 nor L2 holds; queue the lookup if others are first. Return False
        if that does not pay or is not possible.
        """
        if not self._gate.attached or rid in self._active or rid in self._waiting or self._chunked.get(rid):
            return False
        if self._share.pages_max == 0:
            return self._skip("prefetch_host_share")
        match = self._trees.current.match(key)
        missing_pages = key.pages(self._trees.current.page_size) - match.pages
        if missing_pages < self._share.pages_min:
            return self._skip("prefetch_too_short")
        self._arrivals += 1
        until_s = self._controller.time_s() + self._timeout_s(missing_pages)
        request = PrefetchRequest(self._arrivals, rid, key, until_s)
        leader = self._leaders.find(request, self._trees.current, match)
        if leader is None and not self._waiting.any_turns and self._may_lead():
            self._lead(request, match)
        elif len(self._waiting) >= WAITING_MAX:
            self._controller.refused["prefetch"] += 1
            return False
        else:
            self._share.release(rid)  # the pages of its previous attempt: earlier requests may need them
            self._waiting.wait(request, leader)
        self._asked_s[rid] = self._controller.clock()
        return True

    def _timeout_s(self, missing_pages: int) -> float:
        if self._config.policy != "timeout":
            return PREFETCH_S_MAX
        tokens = missing_pages * self._trees.current.page_size
        return self._config.timeout_base + self._config.timeout_per_1024_tokens / 1024 * tokens

    def ready(self, rid: str) -> bool:
        """Return True if the request need not wait. It can become False again when storage works again."""
        instance("rid", rid, str)
        is_ready = self._ready(rid)
        if is_ready:
            self._note_wait(rid)
        return is_ready

    def _note_wait(self, rid: str) -> None:
        """Record the wait of the request, if it was waiting."""
        asked_s = self._asked_s.pop(rid, None)
        if asked_s is not None:
            self.wait.add(self._controller.clock() - asked_s)

    def _ready(self, rid: str) -> bool:
        if self._config.policy == "best_effort":
            return True
        request, prefetch = self._waiting.get(rid), self._active.get(rid)
        if request is not None:
            in_flight = request.leader is not None and request.leader not in self._for_room
            return not self._waits(request, in_flight)
        if (loading := self._chunked.get(rid)) is not None:
            return not self._waits(loading, in_flight=True)
        if prefetch is None or prefetch.answered:
            return True
        if prefetch in self._for_room:
            return not self._waits(prefetch.request, in_flight=False)
        return not prefetch.awaited

    def _waits(self, request: PrefetchRequest, in_flight: bool) -> bool:
        """Return True if a request waits for pages that are, or can be, in flight."""
        return self._controller.time_s() < request.until_s and (in_flight or self._gate.may(Direction.READ))

    def is_active(self, rid: str) -> bool:
        """Return True if a request that has not begun has a prefetch, or waits for its turn."""
        prefetch = self._active.get(rid)
        waits = rid in self._waiting or self._chunked.get(rid) is not None
        return waits or (prefetch is not None and not prefetch.answered)

    def abort(self, rid: str) -> None:
        """Stop the prefetch of a request that will not run; pages that have arrived stay."""
        self._stop(instance("rid", rid, str))
        self.take_arrived(rid)
        self.take_promoted(rid)

    def conclude(self, rid: str) -> None:
        """End the wait of a request that begins: pages that have not arrived from storage are computed."""
        reason = self._stop(rid)
        if reason is not None:
            self._skip(reason)

    def _stop(self, rid: str) -> str | None:
        """Stop the prefetch of a request. Return the reason of its wait, or None."""
        self._note_wait(rid)
        self._chunked.stop(rid)
        if self._waiting.remove(rid) is not None:
            return "prefetch_queued" if self._gate.may(Direction.READ) else "prefetch_paused"
        prefetch = self._active.get(rid)
        if prefetch is None or prefetch.answered:
            return None
        if prefetch in self._for_room:
            del self._for_room[prefetch]
            self._end(prefetch)
            return prefetch.lacks
        self._answer(prefetch)
        return None

    def cancel_all(self) -> None:
        """Stop all prefetches; their pages no longer enter the tree."""
        self._asked_s.clear()
        self._waiting.clear()
        self._chunked.stop_all()
        self._share.take_all()
        for prefetch in self._for_room:
            self._end(prefetch)
        self._for_room.clear()
        for prefetch in self._active.values():
            if not prefetch.answered:
                self._cancel(prefetch)

    def take_arrived(self, rid: str) -> int:
        """Return how many pages came from storage for this request, and release them. Call it once, when the request
        has begun or will not.

        They were held until now, so that they were not evicted before their first use.
        """
        return self._share.take(rid)

    def promote_with(self, promote: Promote | None) -> None:
        """Use `promote` to load arrived pages to L1 if storage has more pages than fit on L2."""
        self._chunked.promote = promote

    def release_arrived(self) -> bool:
        """See `ChunkedPrefetch.release_arrived`."""
        return self._chunked.release_arrived()

    def take_promoted(self, rid: str) -> int:
        """As `take_arrived`, for the pages that were loaded to L1 before the request began."""
        return self._chunked.take(rid)

    # Each step

    def found(self, found: Lookup) -> None:
        """Handle the end of a lookup: start the reads if they pay and fit, let them wait for room, or drop the
        prefetch.
        """
        prefetch = self._operations.pop(found)
        self._counters.lookups[outcome(found, prefetch.tree.page_size)] += 1
        reason = self._reason_against(prefetch, found)
        if reason is not None:
            self._drop(prefetch, found, reason)
            return
        self._for_room[prefetch] = None
        if len(self._for_room) == 1 and self._read_or_drop(prefetch):
            del self._for_room[prefetch]
        else:
            self._wait_for_room(prefetch, prefetch.lacks or "prefetch_host_share")

    def ended(self, read: Read) -> None:
        """Handle the end of the reads: put the complete pages into the tree, free the other host pages."""
        prefetch = self._operations.pop(read)
        if not prefetch.answered:
            self._take(prefetch, read, read.pages)
            if prefetch.taken_pages == 0:  # the lookup may have found more
                verdict = Verdict("prefetch_hit_too_short", prefetch.start_page)
                prefetch.judge(verdict, has_ranks=self._controller.has_ranks)
        unused = read.host_pages[prefetch.taken_pages :]
        self._host.release(unused)
        if read.failed:
            self._skip("prefetch_failed")
            self._note_store(read, works=False)
        else:
            self._break_even.observe_transfer(Route.PREFETCH, read.pages_here, read.seconds)
            if prefetch.taken_pages:
                self._note_store(read, works=True)
        looks_again = self._may_continue(prefetch, read) and not self._chunked.start(prefetch.request)
        self._end(prefetch)
        if looks_again:  # other requests have computed these pages, so nothing is loaded
            self._waiting.wait(prefetch.request)

    def _may_continue(self, prefetch: Prefetch, read: Read) -> bool:
        """Return True if the rest of a prompt may be fetched after the part that has arrived."""
        rest_pages = prefetch.wanted_pages - prefetch.taken_pages
        is_whole = prefetch.taken_pages == len(read.host_pages) and not prefetch.answered
        if self._chunked.promote is None or not is_whole or rest_pages < self._share.pages_min:
            return False
        prefetch.request.note_arrival(prefetch.start_page + prefetch.taken_pages)
        return prefetch.request.may_look_up or self._skip("prefetch_host_share")

    def loaded(self, load: Load) -> None:
        """Handle the end of a load. If it made room on L2 for the remaining pages of a request, look them up."""
        request = self._chunked.ended(load)
        if request is not None:
            self._waiting.wait(request)

    def expired(self, operation: Lookup | Read) -> None:
        """Handle the timeout of a prefetch: end the wait of its request. Call it after `found` and `ended`."""
        prefetch = self._operations.get(operation)
        if prefetch is None or prefetch.answered or not prefetch.awaited:
            return
        self._skip("prefetch_timeout")
        self._answer(prefetch)
        if prefetch.taken_pages == 0:
            self._note_store(operation, works=False)  # it may hang; the next requests should not wait for it

    def start_waiting(self) -> None:
        """Start waiting work that may start now: copies to L1, reads in the order of their lookups, then lookups in
        order of arrival. Call it last in a step, when it is known whether storage may be used. Does nothing if nothing
        waits.
        """
        for request in self._chunked.advance():
            self._waiting.wait(request)
        while self._for_room and self._gate.may(Direction.READ):
            prefetch = next(iter(self._for_room))
            if not self._read_or_drop(prefetch):
                break
            del self._for_room[prefetch]
        for _ in range(TRIES_PER_STEP):
            if not (self._waiting.any_turns and self._may_lead()):
                return
            self._try(self._waiting.next())

    @property
    def waiting(self) -> int:
        """Requests whose prefetch waits: for its turn, for another request's prefetch, or for room on L2."""
        return len(self._waiting) + len(self._for_room)

    def check(self) -> None:
        """Raises InvariantError if an invariant does not hold."""
        self._waiting.check()
        self._chunked.check()
        in_flight = len(self._active) - len(self._for_room)
        holding = sum(prefetch.anchor is not None or prefetch.answered for prefetch in self._active.values())
        if not len(self._operations) == in_flight == holding or len(self._active) > self._config.operations_max:
            raise InvariantError(
                f"prefetch: {len(self._operations)} operations for {in_flight} prefetches in flight, {holding} anchors"
            )
        has_both = any(rid in self._waiting for rid in (*self._active, *self._share.rids))
        if has_both or any(self._share.end_of(prefetch.rid) for prefetch in self._for_room):
            raise InvariantError("prefetch: a request that waits has a prefetch, or pages that have arrived")

    # Leading

    def _may_lead(self) -> bool:
        """Return True if a lookup may start now. Prefetches that wait for room count, so that their reads do not also
        wait for an operation.
        """
        return self._gate.may(Direction.READ) and len(self._active) < self._config.operations_max

    def _try(self, request: PrefetchRequest) -> None:
        """Prefetch the pages that a waiting request still lacks: none, pages in flight for another request, or more."""
        tree = self._trees.current
        match = tree.match(request.key)
        if request.key.pages(tree.page_size) - match.pages < self._share.pages_min:
            return
        leader = self._leaders.find(request, tree, match)
        if leader is None:
            self._lead(request, match)
        else:
            self._waiting.wait(request, leader)

    def _lead(self, request: PrefetchRequest, match: Match) -> None:
        tree = self._trees.current
        request.lookups += 1
        timeout_s, awaited = self._time_left(request, request.key.pages(tree.page_size) - match.pages)
        lookup = self._controller.submit_lookup(
            request.key, start_page=match.pages, prior=tree.prior(match.node), timeout_s=timeout_s
        )
        prefetch = Prefetch(request, lookup, match.pages, match.pages, tree, awaited)
        self._hold(prefetch, match)
        self._active[request.rid] = self._operations[lookup] = prefetch
        self._leaders.add(prefetch, match)

    def _time_left(self, request: PrefetchRequest, missing_pages: int) -> tuple[float, bool]:
        """Return how long an operation may take, and whether the request waits for it. If the request does not wait,
        the time is that of a new request.
        """
        left_s = request.until_s - self._controller.time_s()
        if self._config.policy == "best_effort" or left_s <= 0:
            return self._timeout_s(missing_pages), False
        return left_s, True

    # Reading

    def _reason_against(self, prefetch: Prefetch, found: Lookup) -> str | None:
        """Return the reason not to read the found pages; None if they are read as soon as there is room."""
        pages = min(found.pages, self._share.pages_max)
        if prefetch.answered:
            return "prefetch_too_late"
        if found.failed:
            return "prefetch_failed"
        if found.expired and prefetch.awaited:
            return "prefetch_timeout"
        if found.pages < self._share.pages_min:
            return "prefetch_hit_too_short"
        if pages < self._share.pages_min:
            return "prefetch_host_share"
        pays = self._break_even.decide(Route.PREFETCH, pages * prefetch.tree.page_size, pages).go
        return None if pays else "prefetch_does_not_pay"

    def _read_or_drop(self, prefetch: Prefetch) -> bool:
        """Read as many of the found pages as fit, or drop the prefetch if too few fit. Return False, holding nothing,
        if it must wait for room that other prefetches hold.
        """
        found = prefetch.operation
        if not isinstance(found, Lookup):
            raise InvariantError(f"prefetch: {prefetch.rid!r} waits for room but has no lookup")
        share = self._share
        may_wait = share.others_hold(prefetch.rid)
        if may_wait and min(found.pages, share.pages_max) > share.free_pages:
            return self._wait_for_room(prefetch, "prefetch_host_share")
        has_waited = prefetch.anchor is None
        if has_waited:
            self._hold(prefetch, prefetch.tree.match(prefetch.key))
        skip_pages = prefetch.start_page - prefetch.asked_page
        rest_pages = found.pages - skip_pages
        if skip_pages < 0 and prefetch.request.may_look_up:
            self._end(prefetch)  # its prefix was evicted, so it is also looked up in storage
            self._try(prefetch.request)
        elif skip_pages < 0:
            self._drop(prefetch, found, "prefetch_no_host_room")
        elif rest_pages < share.pages_min:
            self._end(prefetch)  # other requests have fetched the rest
        elif (pages := min(rest_pages, share.free_pages)) < share.pages_min:
            self._drop(prefetch, found, "prefetch_host_share")
        elif (host_pages := share.reserve(pages, all_of_them=may_wait, again=has_waited)) is not None:
            prefetch.wanted_pages = rest_pages
            self._read(prefetch, found, host_pages, has_waited=has_waited)
        elif may_wait or not self._controller.idle:  # operations in flight also hold room on L2
            return self._wait_for_room(prefetch, "prefetch_no_host_room")
        else:
            self._drop(prefetch, found, "prefetch_no_host_room")
        return True

    def _wait_for_room(self, prefetch: Prefetch, lacks: str) -> bool:
        prefetch.lacks = lacks
        self._share.release(prefetch.rid)  # the pages of its previous attempt: the first in line may need them
        self._release(prefetch)
        return False

    def _read(self, prefetch: Prefetch, found: Lookup, host_pages: PageIds, *, has_waited: bool) -> None:
        timeout_s = None
        if has_waited:
            timeout_s, prefetch.awaited = self._time_left(prefetch.request, len(host_pages))
        skip_pages = prefetch.start_page - prefetch.asked_page
        read = self._controller.submit_read(found, host_pages, skip_pages=skip_pages, timeout_s=timeout_s)
        prefetch.operation = read
        self._operations[read] = prefetch

    # Ending

    def _drop(self, prefetch: Prefetch, found: Lookup, reason: str) -> None:
        """End a prefetch without reads."""
        self._skip(reason)
        prefetch.judge(Verdict(reason, found.start_page + found.pages), has_ranks=self._controller.has_ranks)
        if found.failed or reason == "prefetch_timeout":
            self._note_store(found, works=False)
        elif not prefetch.answered:
            self._note_store(found, works=True)
        self._end(prefetch)

    def _note_store(self, operation: Lookup | Read, *, works: bool) -> None:
        """Notify the gate of the result of an operation, unless its store has been replaced since."""
        if operation.storage is self._gate.storage:
            (self._gate.succeeded if works else self._gate.failed)(Direction.READ)

    def _answer(self, prefetch: Prefetch) -> None:
        if isinstance(read := prefetch.operation, Read):
            self._take(prefetch, read, read.pages)
        self._cancel(prefetch)

    def _cancel(self, prefetch: Prefetch) -> None:
        self._controller.cancel_prefetch(prefetch.operation)
        self._close(prefetch)

    def _close(self, prefetch: Prefetch) -> None:
        prefetch.answered = True
        self._release(prefetch)  # at once: a store that hangs must not keep pages on L1
        self._leaders.remove(prefetch)
        for verdict in self._waiting.release(prefetch):
            self._skip(verdict.reason)

    def _take(self, prefetch: Prefetch, read: Read, arrived: int) -> None:
        """Put the first `arrived` pages, which are read and verified, into the tree."""
        prefetch.taken_pages = arrived
        if arrived == 0:
            return
        node, unused = prefetch.tree.insert_host(
            prefetch.key, prefetch.start_page, read.host_pages[:arrived], keys := list(read.keys[:arrived]),
            stored=self._host.are_in_storage(keys), below=prefetch.anchor,
        )  # fmt: skip
        self._host.commit(arrived, unused)
        if arrived > len(unused):
            self._share.arrive(prefetch.rid, prefetch.tree, node, arrived - len(unused))

    def _end(self, prefetch: Prefetch) -> None:
        if not prefetch.answered:
            self._close(prefetch)
        del self._active[prefetch.rid]

    def _hold(self, prefetch: Prefetch, match: Match) -> None:
        """Hold the end of the prefix, after which the prefetch starts or continues. Copies on L2 of pages on L1 are not
        held: for a prompt that is loaded in parts, they make room for the next part.
        """
        prefetch.anchor, prefetch.start_page = match.node, match.pages
        prefetch.tree.lock(match.node)

    def _release(self, prefetch: Prefetch) -> None:
        if prefetch.anchor is not None:
            prefetch.tree.unlock(prefetch.anchor)
            prefetch.anchor = None

    def _skip(self, reason: str) -> bool:
        self._counters.skipped[reason] += 1
        return False

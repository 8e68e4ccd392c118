"""The states of a request's prefetch, and the moves between them.

A prefetch has one state, from `start` until its request begins or is aborted. `RULES` is the table of the states: each
move goes through `PrefetchTable.move`, which raises InvariantError for one that the table does not have, and `check`
compares each prefetch with its row.

    start -> QUEUED <-> FOLLOWING        waits for its turn, or for the prefetch of another request
             LOOKING_UP                  its lookup in storage is in flight
             AWAITING_ROOM               has found enough pages, and waits for room on L2
             READING                     the pages are being read to L2
             AWAITING_L1, LOADING        the first part of a long prompt is loaded to L1 (see `chunked_prefetch`)
             ARRIVED, ENDED              at rest: the request may begin
             CANCELLED                   the request may begin, but an operation has not returned

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Final, NamedTuple

from .. import tracing
from ..controller import HiCacheController, Load, LookupOperation, ReadOperation
from ..errors import InvariantError
from ..ghosts import Kind, Reason
from ..keys import RadixKey
from ..radix import Match, Node, RadixTree

# If L2 evicts the prefix of a request each time that it waits for room, L2 is too small for the load; if L1 evicts its
# parts, L1 is too small for prompts that are loaded in parts.
LOOKUPS_MAX = 4

_ARRIVAL = attrgetter("arrival")


class State(Enum):
    """See the module's docstring."""

    __hash__ = object.__hash__  # that of Enum is a Python function, and each step looks up some states

    NEW = "new"
    QUEUED = "queued"
    FOLLOWING = "following"
    LOOKING_UP = "looking up"
    AWAITING_ROOM = "awaiting room"
    READING = "reading"
    AWAITING_L1 = "awaiting L1"
    LOADING = "loading"
    CANCELLED = "cancelled"
    ARRIVED = "arrived"
    ENDED = "ended"


WAITING: Final = (State.QUEUED, State.FOLLOWING)
IN_FLIGHT: Final = (State.LOOKING_UP, State.READING)  # and its request may wait for it
AT_REST: Final = (State.ARRIVED, State.ENDED)
NOT_AWAITED: Final = (*AT_REST, State.CANCELLED)


class Rule(NamedTuple):
    """A row of `RULES`: the next states, whether a prefetch in this state has a `fetch`, and whether pages are held on
    L2 for its request (None: they may be, if its request was started again or some pages arrived before the others).
    """

    next: frozenset[State]
    fetches: bool
    holds: bool | None


def _rule(next_states: str, *, fetches: bool, holds: bool | None) -> Rule:
    return Rule(frozenset(State[name] for name in next_states.split()), fetches, holds)


# From a state at rest, a request is started again with a longer prompt.
RULES: Final[dict[State, Rule]] = {
    State.NEW: _rule("QUEUED FOLLOWING LOOKING_UP ENDED", fetches=False, holds=False),
    State.QUEUED: _rule("FOLLOWING LOOKING_UP ENDED", fetches=False, holds=False),
    State.FOLLOWING: _rule("QUEUED ENDED", fetches=False, holds=False),
    State.LOOKING_UP: _rule("AWAITING_ROOM READING CANCELLED ARRIVED ENDED", fetches=True, holds=None),
    State.AWAITING_ROOM: _rule("LOOKING_UP FOLLOWING READING ENDED", fetches=True, holds=False),
    State.READING: _rule("QUEUED AWAITING_L1 CANCELLED ARRIVED ENDED", fetches=True, holds=None),
    State.AWAITING_L1: _rule("LOADING QUEUED ARRIVED ENDED", fetches=False, holds=True),
    State.LOADING: _rule("QUEUED ENDED", fetches=False, holds=True),
    State.CANCELLED: _rule("ARRIVED ENDED", fetches=True, holds=None),
    State.ARRIVED: _rule("QUEUED FOLLOWING LOOKING_UP ENDED", fetches=False, holds=True),
    State.ENDED: _rule("QUEUED FOLLOWING LOOKING_UP", fetches=False, holds=False),
}


class FirstPages(NamedTuple):
    """The first pages of a fetch: their part of the key after a node (0 for the root of a seed) that ends before page
    `start_page`. A node may grow unless two hold locks on it.
    """

    seed: bytes
    node_id: int
    start_page: int
    tokens: bytes

    def __repr__(self) -> str:
        return f"FirstPages(below node {self.node_id}, {len(self.tokens)} bytes)"


class Verdict(NamedTuple):
    """The reason why a fetch was fruitless, and the first page that storage lacks, or the end of the key."""

    reason: str
    page: int


@dataclass(slots=True, eq=False)
class Fetch:
    """A lookup in storage and the read of the found pages, until the ack of the last operation, which was submitted
    after `polls` polls.
    """

    operation: LookupOperation | ReadOperation  # the read, once the lookup has found enough and there is room
    asked_page: int  # the first page of the lookup in storage
    start_page: int  # the pages before it are cached; increases if some of the awaited pages arrive
    tree: RadixTree
    polls: int
    anchor: Node | None = None  # locked while the prefetch is LOOKING_UP or READING
    first_pages: tuple[FirstPages, ...] = field(default=(), repr=False)  # its entries in `Leaders`
    followers: dict[Prefetch, None] = field(default_factory=dict, repr=False)
    paying_pages: int = 0  # how many of the found pages it pays to read
    wanted_pages: int = 0  # the pages of the hit that are to be read, when the read began
    taken_pages: int = 0  # leading pages of the read that were put into the tree
    verdict: Verdict | None = None
    lacks: str = ""  # the reason for missing room, while it waits for room

    def hold_end(self, match: Match) -> None:
        """Hold the end of the prefix, after which the fetch starts or continues. Copies on L2 of pages on L1 are not
        held: for a prompt that is loaded in parts, they make room for the next part.
        """
        self.start_page = match.pages
        self.hold(match.node)

    def hold(self, node: Node) -> None:
        """Hold `node`, and end the earlier hold, if any."""
        self.tree.lock(node)
        self.release()
        self.anchor = node

    def release(self) -> None:
        """End the hold, if any."""
        if self.anchor is not None:
            self.tree.unlock(self.anchor)
            self.anchor = None


@dataclass(slots=True, eq=False)
class Prefetch:
    """The prefetch of a request, which waits for at most `limit_s` and has waited for `waited_s`; `waits` is False once
    that is recorded. `asked_s` and `asked_polls` are the time and the number of polls when the engine last asked.

    Its prompt diverges before `divergence_end_page` from each fruitless leader that it has followed. The pages before
    `reached_page` have arrived at some time; `lookups` counts since then. From `again_s` on it may look up again while
    its request waits; then it `looks_again`, and its request does not wait for the lookup. `released_pages` have
    arrived and are not held any more; `promoted_pages` were loaded to L1. An engine with a device cache of its own has
    the first `device_pages` there.

    `span` lasts from `start` until the prefetch is at rest or CANCELLED; `arrived_pages` and `outcome`, the last
    reason why pages were not read, are for it.

    The last lookup has found the pages before `found_page`; if it `is_answered`, storage lacks the next one. Pages that
    were found and are missing are so because of `unread`: by default, L2 had no room to keep them.
    """

    rid: str
    key: RadixKey
    arrival: int
    limit_s: float
    device_pages: int = 0
    waited_s: float = 0.0
    waits: bool = True
    is_request: bool = True  # False: a hint asks for it
    asked_s: float = math.inf
    asked_polls: int = -1
    again_s: float = math.inf
    looks_again: bool = False
    state: State = State.NEW
    fetch: Fetch | None = field(default=None, repr=False)
    leader: Prefetch | None = field(default=None, repr=False)  # while FOLLOWING
    load: Load | None = field(default=None, repr=False)  # while LOADING
    divergence_end_page: int = 0
    lookups: int = 0
    reached_page: int = 0
    released_pages: int = 0
    promoted_pages: int = 0
    span: tracing.Span | None = field(default=None, repr=False)
    arrived_pages: int = 0
    outcome: str = ""
    found_page: int = 0
    is_answered: bool = False
    unread: Kind = (Reason.NO_ROOM, "")

    def start_again(self, key: RadixKey, arrival: int, limit_s: float, device_pages: int) -> None:
        """Start a prefetch at rest again for `key`, usually a longer prompt. Pages that have arrived stay its own."""
        self.key, self.arrival, self.limit_s, self.device_pages = key, arrival, limit_s, device_pages
        self.waited_s, self.waits, self.asked_s, self.asked_polls = 0.0, True, math.inf, -1
        self.again_s, self.looks_again = math.inf, False
        self.divergence_end_page = self.lookups = self.reached_page = self.found_page = 0
        self.is_answered, self.unread = False, (Reason.NO_ROOM, "")

    def count_time(self, now: HiCacheController) -> None:
        """Count the time from the last ask, or from the poll before it, to the last poll. Of several steps one counts:
        in the others, the engine did not ask, because the request could not run.
        """
        if steps := now.polls - self.asked_polls:
            self.waited_s += max(0.0, now.polled_s - self.asked_s) / steps
            # From poll to poll, so that it does not matter where in a step the engine asks. Before the first ask, the
            # engine may not have polled for long.
            self.asked_s = now.time_s() if self.asked_polls < 0 else now.polled_s
            self.asked_polls = now.polls

    def end_page(self, page_size: int) -> int:
        """Return the end of the pages that it may bring."""
        if self.state is State.READING and isinstance(self.current.operation, ReadOperation):
            return self.current.start_page + len(self.current.operation.host_pages)
        return self.key.pages(page_size)

    def device_pages_from(self, start_page: int) -> int:
        """Return how many pages after the first `start_page` the engine has: reading them pays only for later ones."""
        return max(0, self.device_pages - start_page)

    @property
    def may_look_up(self) -> bool:
        """True unless `LOOKUPS_MAX` lookups have not extended the arrived prefix."""
        return self.lookups < LOOKUPS_MAX

    @property
    def current(self) -> Fetch:
        """Its `fetch`. REQUIRES: a state that has one, see `RULES`."""
        if self.fetch is None:
            raise InvariantError(f"prefetch: {self.rid!r}, {self.state.value}, has no operation")
        return self.fetch


class PrefetchTable:
    """The prefetches by request id and by state. Invariant: each is in the set of its state, and obeys its row of
    `RULES`; it is in `_queue`, in order of arrival, if it is QUEUED. Sets are in the order of the moves.
    """

    def __init__(self) -> None:
        self._by_rid: dict[str, Prefetch] = {}
        self._by_state: dict[State, dict[Prefetch, None]] = {state: {} for state in State}
        self._queue: list[Prefetch] = []
        self._for_room, self._for_l1 = self._by_state[State.AWAITING_ROOM], self._by_state[State.AWAITING_L1]

    def get(self, rid: str) -> Prefetch | None:
        """Return the prefetch of a request that has not begun."""
        return self._by_rid.get(rid)

    def __len__(self) -> int:
        return len(self._by_rid)

    def all(self) -> list[Prefetch]:
        """Return the prefetches of requests that have not begun."""
        return list(self._by_rid.values())

    @property
    def waits(self) -> bool:
        """True if a prefetch is QUEUED, AWAITING_ROOM or AWAITING_L1. Called in each step: counts nothing."""
        return bool(self._queue or self._for_room or self._for_l1)

    def count(self, *states: State) -> int:
        """Return how many prefetches are in one of the states."""
        return sum(len(self._by_state[state]) for state in states)

    def of(self, state: State) -> list[Prefetch]:
        """Return the prefetches in a state, in order: QUEUED by arrival, others by their moves."""
        return list(self._queue if state is State.QUEUED else self._by_state[state])

    def first(self, state: State) -> Prefetch | None:
        """Return the first prefetch of `of(state)`."""
        return next(iter(self._queue if state is State.QUEUED else self._by_state[state]), None)

    def add(self, prefetch: Prefetch) -> None:
        """Add a NEW prefetch. REQUIRES: its request does not have one."""
        self._by_rid[prefetch.rid] = prefetch
        self._by_state[prefetch.state][prefetch] = None

    def move(self, prefetch: Prefetch, state: State, leader: Prefetch | None = None) -> None:
        """Change the state; FOLLOWING needs a leader. Raises InvariantError if `RULES` does not allow the move."""
        was = prefetch.state
        if state not in RULES[was].next:
            raise InvariantError(f"prefetch: {prefetch.rid!r} is {was.value}, and cannot become {state.value}")
        if was is State.QUEUED:
            del self._queue[bisect_left(self._queue, prefetch.arrival, key=_ARRIVAL)]
        elif prefetch.leader is not None:
            prefetch.leader.current.followers.pop(prefetch, None)
        if state is State.QUEUED:
            insort(self._queue, prefetch, key=_ARRIVAL)
        elif leader is not None:
            leader.current.followers[prefetch] = None
        prefetch.leader = leader
        del self._by_state[was][prefetch]
        prefetch.state = state
        self._by_state[state][prefetch] = None
        if prefetch.span is not None and state in NOT_AWAITED:
            tracing.end(prefetch.span, hit_pages=prefetch.arrived_pages, outcome=prefetch.outcome or state.value)
            prefetch.span = None

    def remove(self, prefetch: Prefetch) -> None:
        """Forget the prefetch of a request that begins or is aborted. REQUIRES: it is at rest or CANCELLED; a CANCELLED
        one counts until `rest`.
        """
        del self._by_rid[prefetch.rid]
        if prefetch.state is not State.CANCELLED:
            del self._by_state[prefetch.state][prefetch]

    def rest(self, prefetch: Prefetch, holds: bool) -> None:
        """Let a prefetch rest: ARRIVED if pages are held for its request, else ENDED. Forget a CANCELLED one whose
        request has begun.
        """
        prefetch.fetch = None
        if self._by_rid.get(prefetch.rid) is prefetch:
            self.move(prefetch, State.ARRIVED if holds else State.ENDED)
        else:
            del self._by_state[State.CANCELLED][prefetch]

    def check(self, holding: set[Prefetch]) -> None:
        """Raises InvariantError if the invariant does not hold. Pages are held on L2 for those in `holding`."""
        if self._queue != sorted(self._by_state[State.QUEUED], key=_ARRIVAL):
            raise InvariantError("prefetch: the queue is not in order of arrival, or lacks a request")
        counted = {prefetch for members in self._by_state.values() for prefetch in members}
        known = set(self._by_rid.values())
        if not known <= counted or any(prefetch.state is not State.CANCELLED for prefetch in counted - known):
            raise InvariantError("prefetch: the requests differ from those of all states")
        for state, members in self._by_state.items():
            for prefetch in members:
                self._check_row(prefetch, state, prefetch in holding)

    def _check_row(self, prefetch: Prefetch, state: State, holds: bool) -> None:
        rule, fetch, leader = RULES[state], prefetch.fetch, prefetch.leader
        fits = (
            prefetch.state is state is not State.NEW
            and (fetch is not None) == rule.fetches
            and rule.holds in (None, holds)
            and (prefetch.load is not None) == (state is State.LOADING)
            and (leader is not None) == (state is State.FOLLOWING)
        )
        if fetch is not None:
            fits = fits and (fetch.anchor is not None) == (state in IN_FLIGHT)
            reads = isinstance(fetch.operation, ReadOperation)
            fits = fits and (state is State.CANCELLED or reads == (state is State.READING))
        if leader is not None:
            fits = fits and leader.state in (*IN_FLIGHT, State.AWAITING_ROOM) and prefetch in leader.current.followers
        if not fits:
            raise InvariantError(f"prefetch: {prefetch!r} does not fit its state; pages are held: {holds}")

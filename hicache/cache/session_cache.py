"""SessionCache: a HiRadixCache whose conversations keep all their KV on L1 between turns.

A request that has joined a session is a *turn* of it. When a turn ends, its whole pages are shared with the tree as
for any request, but the session keeps them locked. It also keeps the partial last page, which the tree cannot hold. If
the prompt of the next turn continues the last one, the turn also gets that page, so it computes only its new tokens:

    tokens of the session   0 ............ whole pages ............ n
                            | locked in the tree, shared with all | own page |
    the next turn           | a hit as for any other request      | moved to it, cached up to n | computed

Only the tree knows the whole pages: a turn begins like any other request, and this class adds only the partial page. So
a session that loses its KV costs at most the tokens of that page, as long as the rest is cached:

- A turn whose prompt does not continue the last one, but the one before it, as after a turn that was preempted and
  aborted: it gets that turn's tokens of the partial page, if it is still the same page.
- A turn whose prompt continues neither: the session releases its KV, the turn starts from the tree, and the session
  keeps the KV of the turn.
- An aborted turn leaves the session unchanged, with two exceptions. If the turn has completed and shared the partial
  page, the session ends at the whole page before it. If the session has released its KV, it stays empty.
- Memory pressure: if L1 has no room for a request, sessions without a running turn release their KV, least recently
  used first, until there is room. They stay open.
- Clearing the cache and new weights: all sessions release their KV and stay open; the KV of running turns is freed at
  their end.
- Closing a session, and `ttl_s` seconds without a turn, release its KV and forget it. `poll` checks the time. A turn
  that runs when its session is closed continues as an ordinary request.

With bigram keys, read positions for tokens: for n tokens a session keeps their n - 1 pairs, and nothing for the last
token, which does not begin a pair yet.

Called by the scheduler thread only; no lock. Only `drain` and `close` block.

Invariants, verified by `check()` together with those of HiRadixCache: only nodes, running requests and sessions use
pages of L1 (so `page_source` is not for this cache). A session holds exactly the pages of its tokens, and the whole
ones are on L1 in its tree. A session whose partial page was moved to its turn ends at a whole page.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from typing import Unpack

import numpy as np

from ..arguments import instance, number
from ..controller import HiCacheController
from ..errors import CapacityError, InvalidInput, InvariantError, SessionBusy, UnknownSession
from ..keys import RadixKey
from ..tiers import HostPool, KVPool
from .radix_cache import HiRadixCache
from .requests import RequestKV, computed_pages, missing_pages, require_beginning
from .statistics import CacheStatistics, SessionStatistics
from .tiered import TieredOptions


@dataclass(slots=True, eq=False)
class _Session:
    session_id: str
    ttl_s: float
    used_s: float  # when it was opened, or its last turn joined or ended
    held: RequestKV | None = None  # the held pages; its key has the tokens of their KV
    turn: str | None = None  # the request that has joined and not ended
    request: RequestKV | None = None  # KV of the turn while it runs
    lent: RadixKey | None = None  # key of `held` before its partial page was moved to the turn
    last_turn: str | None = None  # the last request whose KV was kept; a preempted one joins again
    before: RadixKey | None = None  # key of `held` before `last_turn` began

    @property
    def idle(self) -> bool:
        """True if no turn runs; one may have joined."""
        return self.request is None


class SessionCache(HiRadixCache):
    """See the module's docstring. Its options are the section `sessions` of the controller's configuration."""

    def __init__(
        self, device: KVPool, host: HostPool, controller: HiCacheController, **options: Unpack[TieredOptions]
    ) -> None:
        super().__init__(device, host, controller, **options)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # least recently used first
        self._turns: dict[str, _Session] = {}  # by request id
        self._expiry_s = math.inf  # the earliest expiry of a session
        self._counts: Counter[str] = Counter()
        self._released: Counter[str] = Counter()

    # Sessions

    def open_session(self, session_id: str, *, ttl_s: float | None = None) -> None:
        """Open a session. It is forgotten after `ttl_s` (None: as configured) without a turn.

        Raises InvalidInput if it is already open or the time is not positive, CapacityError if too many sessions are
        open. Other sessions are not closed for it, because their owners would notice only by an error.
        """
        instance("session_id", session_id, str)
        ttl_s = self.config.sessions.ttl if ttl_s is None else number("ttl_s", ttl_s, most=math.inf, positive=True)
        self._expire()
        if session_id in self._sessions:
            raise InvalidInput(f"session {session_id!r} is already open; close it or choose another name")
        if len(self._sessions) >= self.config.sessions.sessions_max:
            raise CapacityError(f"session {session_id!r}: {len(self._sessions)} are open; close one or try again later")
        self._sessions[session_id] = session = _Session(session_id, ttl_s, 0.0)
        self._touch(session)

    def join_session(self, rid: str, session_id: str) -> None:
        """Make the request `rid`, which has not begun, the next turn of a session.

        It stays the turn until `cache_finished_req`, or `abort_prefetch` if it does not begin; a request that begins
        again after that must join again. Raises UnknownSession, SessionBusy if the session has a turn, InvalidInput if
        the request is already a turn.
        """
        instance("rid", rid, str)
        instance("session_id", session_id, str)
        self._expire()
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSession(f"session {session_id!r} is not open; open it and send the turn again")
        if session.turn is not None:
            raise SessionBusy(f"session {session_id!r} already has a turn; wait for its end")
        if rid in self._turns:
            raise InvalidInput(f"request {rid!r} is a turn of another session")
        session.turn = rid
        self._turns[rid] = session
        self._touch(session)

    def close_session(self, session_id: str) -> bool:
        """Release a session's KV and forget it. Return False if it is not open."""
        session = self._sessions.get(instance("session_id", session_id, str))
        if session is None:
            return False
        self._close(session, "closed")
        return True

    def drop_all(self) -> None:
        """Make every session release its KV, as for new weights. They stay open.

        Sessions do not keep the KV of turns that run now.
        """
        for session in list(self._sessions.values()):
            self._release(session, "dropped")
            if not session.idle:
                self._end_turn(session)

    # Requests

    def abort_prefetch(self, rid: str) -> None:
        """Forget a request that will not begin; it is no longer a turn."""
        session = self._turns.get(instance("rid", rid, str))
        if session is not None and session.idle:
            self._end_turn(session)
        super().abort_prefetch(rid)

    def begin_request(self, rid: str, key: RadixKey, *, priority: int = 0) -> RequestKV | None:
        """Give a request its KV. A turn that continues its session also gets the session's partial page.

        `device_hit_tokens` includes the tokens of that page. Return None if L1 has no room, even after all idle
        sessions have released their KV.
        """
        pages, priority = require_beginning(rid, key, priority, self.device)
        self.tree.require_fitting(key)
        self.caller.require()
        self.running.require_new(rid)
        session = self._turns.get(rid)
        if session is not None and not session.idle:
            raise InvalidInput(f"request {rid!r} has already begun")
        if session is not None and session.held is not None and not _continues(session.held.key, key):
            self._diverge(session, session.held, key)
        while (request := super().begin_request(rid, key, priority=priority)) is None:
            if not self._release_idle(pages - self.peek(key).device_pages, pages, session):
                return None
        return request

    def _continue_turn(self, request: RequestKV) -> int:
        """As in `HiRadixCache`: the partial page of its session, if it is a turn."""
        session = self._turns.get(request.rid)
        if session is None:
            return 0
        session.request = request
        self._counts["turns"] += 1
        return 0 if session.held is None else self._continue(session, session.held, request)

    def extend(self, request: RequestKV, total_tokens: int) -> bool:
        """Make room for KV of `total_tokens` tokens, if necessary from idle sessions. Return False if L1 stays full."""
        while not super().extend(request, total_tokens):
            missing = missing_pages(request, total_tokens, self.device)
            if not self._release_idle(missing, missing, None):
                return False
        return True

    def cache_unfinished_req(self, request: RequestKV, key: RadixKey) -> None:
        """As in `HiRadixCache`; events of pages that a turn has computed name its session."""
        self.running.require(request)
        session = self._turns.get(request.rid)
        if session is None or self._events is None:
            super().cache_unfinished_req(request, key)
            return
        self._events.session_id = session.session_id
        try:
            super().cache_unfinished_req(request, key)
        finally:
            self._events.session_id = None

    def cache_finished_req(self, request: RequestKV, key: RadixKey | None) -> None:
        """End a request. A session keeps the KV of its turn for `key`, or after an abort that from before the turn."""
        self.running.require(request)
        session = self._turns.get(request.rid)
        if session is None or session.request is not request:
            super().cache_finished_req(request, key)
        elif key is None:
            self._roll_back(session, request)
            self._end_turn(session)
        else:
            self._keep(session, request, key)
            self._end_turn(session)

    # Emptying

    def clear(self) -> None:
        """As in `HiRadixCache`, and `drop_all`."""
        super().clear()
        self.drop_all()

    # Each step

    def poll(self) -> bool:
        """As in `HiRadixCache`; closes the sessions whose time is over."""
        ended = super().poll()
        self._expire()
        return ended

    def close(self, timeout_s: float | None = None) -> bool:
        """Close all sessions and the cache."""
        if timeout_s is not None:
            number("timeout_s", timeout_s)
        for session in list(self._sessions.values()):
            self._close(session, "closed")
        return super().close(timeout_s)

    def _continue(self, session: _Session, held: RequestKV, request: RequestKV) -> int:
        """Move the partial page of a session to its turn, and free the turn's own page for those tokens. Return their
        number."""
        self._counts["continued"] += 1
        whole, key = held.shared_pages, held.key
        tail_tokens = len(key) - whole * self.page_size
        if tail_tokens == 0:
            return 0
        tail, held.pages = held.pages[whole:], held.pages[:whole]
        held.key = key.head(whole * self.page_size)
        if request.shared_pages > whole:  # the tree already has that page, from another request with these tokens
            self._l1.free(tail)
            return 0
        spare = request.pages[whole : whole + 1]
        request.pages = np.concatenate((request.pages[:whole], tail, request.pages[whole + 1 :]))
        self._l1.free(spare)
        session.lent = key
        self._counts["tail_tokens"] += tail_tokens
        return tail_tokens

    def _diverge(self, session: _Session, held: RequestKV, key: RadixKey) -> None:
        """Shorten the partial page of a session to the tokens of the turn before, if `key` continues that; else release
        the session's KV."""
        before = session.before
        if before is None or len(before) <= held.shared_pages * self.page_size or not _continues(before, key):
            self._release(session, "diverged")
        else:
            held.key = before

    def _keep(self, session: _Session, request: RequestKV, key: RadixKey) -> None:
        """Share the whole pages of a turn that has ended, and move all its KV to the session."""
        computed_pages(request, key, self.page_size)
        pages = -(-len(key) // self.page_size)
        if pages > len(request.pages):
            raise InvalidInput(f"request {request.rid!r}: {len(request.pages)} pages cannot hold {len(key)} tokens")
        self.cache_unfinished_req(request, key)
        if request.shared_pages != len(key) // self.page_size:  # the tree does not accept pages now
            self._release(session, "not_shared")
            super().cache_finished_req(request, None)
            return
        self._l1.free(request.pages[pages:])
        if session.last_turn != request.rid:
            session.last_turn, session.before = request.rid, session.lent
        before = session.held
        session.held = self.running.hand_over(request, key=key, pages=request.pages[:pages])
        self._hints.note(request.rid, key)
        self._hints.ends(request.rid)
        if before is not None:
            super().cache_finished_req(before, None)

    def _roll_back(self, session: _Session, request: RequestKV) -> None:
        """End an aborted turn. It has only written after the session's tokens, so the partial page is still valid."""
        held = session.held
        if held is not None and session.lent is not None and request.shared_pages == held.shared_pages:
            whole = held.shared_pages
            held.pages, held.key = request.pages[: whole + 1].copy(), session.lent
            request.pages = np.delete(request.pages, whole)
        super().cache_finished_req(request, None)

    def _end_turn(self, session: _Session) -> None:
        if session.turn is not None:
            del self._turns[session.turn]
        session.turn = session.request = session.lent = None
        self._touch(session)

    def _release_idle(self, least_pages: int, enough_pages: int, own: _Session | None) -> bool:
        """Release the KV of idle sessions, at least of one, until there may be room for `least_pages`: least recently
        used first, and last `own`, whose turn needs the room.

        Return False and change nothing if pending write-backs free enough pages (`enough_pages`), or all idle sessions
        together hold too few. Without pending write-backs, evicting the evictable pages has already failed: they are
        pinned, and L2 has no room for them.
        """
        room = self._l1.free_pages + self.writeback_pages
        holding = [session for session in self._sessions.values() if session.held is not None and session.idle]
        held_pages = sum(len(session.held.pages) for session in holding if session.held is not None)
        if not holding or (room >= enough_pages and self.writeback_pages) or room + held_pages < least_pages:
            return False
        for session in sorted(holding, key=lambda session: session is own):
            self._release(session, "pressure")
            if self._l1.may_have_room(least_pages):
                break
        return True

    def _release(self, session: _Session, reason: str) -> None:
        if session.held is not None:
            super().cache_finished_req(session.held, None)
            self._released[reason] += 1
        session.held = session.lent = session.before = None

    def _close(self, session: _Session, reason: str) -> None:
        self._release(session, reason)
        self._end_turn(session)
        del self._sessions[session.session_id]

    def _touch(self, session: _Session) -> None:
        session.used_s = self.controller.time_s()
        self._sessions.move_to_end(session.session_id)
        self._expiry_s = min(self._expiry_s, session.used_s + session.ttl_s)

    def _expire(self) -> None:
        """Close the expired sessions. Visits them only if one may have expired."""
        now_s = self.controller.time_s()
        if now_s < self._expiry_s:
            return
        for session in list(self._sessions.values()):
            if session.turn is None and now_s >= session.used_s + session.ttl_s:
                self._close(session, "expired")
        # A session with a turn is checked again after the turn.
        waiting = (session for session in self._sessions.values() if session.turn is None)
        self._expiry_s = min((session.used_s + session.ttl_s for session in waiting), default=math.inf)

    def _may_have_room(self, pages: int) -> bool:
        """As in `HiRadixCache`; idle sessions make room."""
        sessions = self._sessions.values()
        return super()._may_have_room(pages) or any(session.idle and session.held is not None for session in sessions)

    # State

    def statistics(self) -> CacheStatistics:
        """Return a snapshot of all tiers and the sessions. Any thread may call it; it may query the store's usage."""
        return replace(super().statistics(), sessions=self.session_statistics())

    def session_statistics(self) -> SessionStatistics:
        """Return a snapshot of the sessions. Any thread may call it."""
        sessions = list(self._sessions.values())  # one operation in CPython
        held = [kv for session in sessions if (kv := session.held) is not None]
        return SessionStatistics(
            open=len(sessions),
            holding=len(held),
            running=sum(not session.idle for session in sessions),
            held_pages=sum(len(kv.pages) for kv in held),
            own_pages=sum(len(kv.pages) - kv.shared_pages for kv in held),
            turns=self._counts["turns"],
            continued_turns=self._counts["continued"],
            tail_tokens=self._counts["tail_tokens"],
            released=dict(self._released),
        )

    def check(self) -> None:
        """Raises InvariantError if an invariant of HiRadixCache or of this class does not hold."""
        super().check()
        turns = {session.turn: session for session in self._sessions.values() if session.turn is not None}
        if turns != self._turns:
            raise InvariantError("sessions: the index of turns does not match the sessions")
        for session in self._sessions.values():
            if session.held is not None:
                self._check_held(session, session.held)
        own = self.running.check()  # includes the pages of sessions
        if self.request_pages != own:
            raise InvariantError(
                f"L1: {self.request_pages} pages are not the tree's, {own} held by requests and sessions"
            )

    def _check_held(self, session: _Session, held: RequestKV) -> None:
        name, tokens, pages = f"session {session.session_id!r}", len(held.key), len(held.pages)
        if pages != -(-tokens // self.page_size) or held.shared_pages != tokens // self.page_size:
            raise InvariantError(f"{name}: {pages} pages, {held.shared_pages} of them shared, for {tokens} tokens")
        if session.lent is not None and (session.idle or tokens % self.page_size):
            raise InvariantError(f"{name}: its partial page is in two places, or was moved without a turn")
        if held.tree.peek(held.key).device_pages != held.shared_pages:
            raise InvariantError(f"{name}: its whole pages are not in the tree")


def _continues(held: RadixKey, key: RadixKey) -> bool:
    """Return True if `key` continues `held` by at least one token. Otherwise the partial page would be overwritten."""
    return key.prompt_tokens > len(held) and key.seed == held.seed and key.tokens.startswith(held.tokens)

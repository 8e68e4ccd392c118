"""HintExecutor: carries out the hints of agents and routers (`hicache.hints`) with the machines that a cache has.

    kv.retain      the order of eviction of L2 (`radix.hinted`)
    kv.pin         `Pins`
    kv.prefetch    `Prefetcher`, without a request; then a load to L1
    kv.demote      eviction from L1; from L2, of what storage has
    kv.release     the order of eviction of both tiers; pins and retained pages of the session end
    session.wait   the order of eviction of both tiers, as far as the source of the time can be trusted (`WaitRecord`)

A hint never blocks and never fails a request. Of a request's own hints the target is its prefix when it ends. Bounds:
pages are pinned or retained for at most `hints.ttl_max`. A session pins and retains at most `hints.session_share` of
L2, and so do all requests of a tenant together that name no session; all pins and retained pages are at most
`pin_host_share`. A wait and a release apply only to pages that no other session has used, until a request uses them.

The last prompt of a session is remembered, so that `session_id` finds its pages. Sessions of different `extra_key` or
`cache_salt` are different. The least recently used are forgotten.

Called by the scheduler thread alone; no lock. Ranks that get equal hints in equal steps decide identically.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import ref

from .. import tracing
from ..controller import HiCacheController
from ..errors import InvalidInput, InvariantError
from ..hints import (
    ACTIONS_MAX,
    KINDS,
    Demote,
    Hint,
    HintAction,
    Outcome,
    OutcomeStatus,
    Prefetch,
    Release,
    Retain,
    Turn,
    Wait,
    WaitRecord,
    envelope_of,
    hint_of,
)
from ..hints import Pin as PinHint
from ..keys import BIGRAM_BYTES, RadixKey, namespace_seed
from ..radix import RELEASED, HintedOrder, Match, Node, NodeHint, may_leave_host
from .device_tier import DeviceTier
from .hint_fetches import HintFetches, granted, outcome
from .host_tier import HostTier
from .pins import Pin, Pins
from .prefetch import Prefetcher
from .statistics import CacheCounters
from .timers import TIMERS_MAX, Timers
from .trees import Trees

SESSIONS_MAX = 1024
# Of the remembered prompts; at least one is remembered.
KEY_BYTES_MAX = 64 << 20
# Requests whose hints wait for their end, and sources of waits.
REQUESTS_MAX, SOURCES_MAX = 8192, 64
# Prompts that a session retains at a time.
RETAINED_MAX = 64
# A session that has not returned after so many times the announced wait, and this, counts as returning then.
GIVEN_UP, GIVEN_UP_MIN_S = 10.0, 10.0


@dataclass(slots=True, eq=False)
class _Retained:
    """Retained pages of a session: the last node, and the number of the timer that ends it."""

    hint: NodeHint
    node: Node
    pages: int
    timer: int = 0


class _Wait(NamedTuple):
    """A wait that has not ended, and the number of the timer that gives it up."""

    at_s: float
    announced_s: float
    source: str
    timer: int


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Session:
    """A session: its name, empty for the requests that name none, its last prompt, and how many of its requests have
    ended. `wait` lasts until its next request."""

    name: str = ""
    key: RadixKey | None = None
    turns: int = 0
    wait: _Wait | None = None
    hint: NodeHint | None = None  # of the wait, or the release
    retained: list[_Retained] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)


@dataclass(slots=True)
class _Request:
    """The hints of a request that has not ended, its last envelope, tenant and session, and its prompt so far.
    `context` is the parent of their spans."""

    context: tracing.Context | None
    tenant: bytes = b""
    envelope: object = None
    actions: list[tuple[HintAction, Hint]] = field(default_factory=list)
    session_id: str | None = None
    key: RadixKey | None = None


class HintExecutor:
    """See the module's docstring. `device` is L1, None if the engine owns it.

    Invariant, verified by `check()`: `_retained_pages` are those that were granted, and so at least those of the nodes
    that are retained; `_key_bytes` are those of the prompts of sessions.
    """

    def __init__(
        self, trees: Trees, host: HostTier, controller: HiCacheController, counters: CacheCounters, pins: Pins,
        prefetcher: Prefetcher,
    ) -> None:
        self.device: DeviceTier | None = None
        self._trees = trees
        self._host = host
        self._now_s = controller.time_s
        self._counters = counters
        self._pins = pins
        config = controller.config
        self._config = config.hints
        self._session_pages = int(config.hints.session_share * host.host.pages)
        self._pages_max = int(config.pin_host_share * host.host.pages)
        self._knows_times = config.eviction_policy in ("lru", "adaptive")
        self._sessions: OrderedDict[tuple[bytes, str], _Session] = OrderedDict()
        self._key_bytes = self._retained_pages = 0
        self._requests: dict[str, _Request] = {}
        self._records: OrderedDict[str, WaitRecord] = OrderedDict()
        self._timers = Timers()
        self._fetches = HintFetches(trees, host, controller, prefetcher, self._timers)

    # Hints

    def take(self, envelope: object) -> list[Outcome]:
        """Carry out the actions of an envelope, in order. Return an outcome for each. Raises InvalidInput for another
        form of envelope."""
        return [self._answer(action) for action in envelope_of(envelope).actions]

    def take_from(
        self, rid: str, envelope: object, cache_salt: str | None, context: tracing.Context | None
    ) -> list[Outcome]:
        """As `take`, for the envelope of a request, whose actions wait for its end. Returns nothing for the same object
        again, and rejects another form of envelope."""
        request = self._requests.get(rid)
        if request is None:
            request = self._requests[rid] = _Request(context)
            if len(self._requests) > REQUESTS_MAX:
                del self._requests[next(iter(self._requests))]
        elif request.envelope is envelope:
            return []
        request.envelope = envelope
        try:
            request.tenant, actions = namespace_seed(None, cache_salt), envelope_of(envelope).actions
        except InvalidInput as error:
            unknown = HintAction(action_id="-", action_type="-")
            return [self._told(unknown, outcome(OutcomeStatus.REJECTED, str(error)), request)]
        return [self._answer(action, request) for action in actions]

    def _answer(self, action: HintAction, request: _Request | None = None) -> Outcome:
        if request is not None and "tokens" in action.payload:  # of which a request may send too many for a step
            return self._told(action, outcome(OutcomeStatus.REJECTED, "tokens: send them without a request"), request)
        try:
            hint = hint_of(action)
            if request is not None and not hint.is_explicit:
                return self._told(action, self._note(request, action, hint), request)
            key, session = self._target(hint)
        except InvalidInput as error:
            return self._told(action, outcome(OutcomeStatus.REJECTED, str(error)), request)
        if key is None:
            found = outcome(OutcomeStatus.MISSING, "this session is not known here")
        else:
            found = self._apply(hint, key, session)
        return self._told(action, found, request)

    def _told(self, action: HintAction, found: Outcome, request: _Request | None) -> Outcome:
        """Count an outcome, with a span, and return it with the names of its action."""
        kind, status = action.action_type if action.action_type in KINDS else "unknown", found.status.value
        self._counters.hints[kind, status] += 1
        context = None if request is None else request.context
        with tracing.span("hint", context, action=kind, outcome=status, pages=found.pages):
            return replace(found, action_id=action.action_id, action_type=action.action_type)

    def _note(self, request: _Request, action: HintAction, hint: Hint) -> Outcome:
        if isinstance(hint, Prefetch):
            return outcome(OutcomeStatus.REJECTED, "a request fetches its own pages; name other ones")
        if len(request.actions) >= ACTIONS_MAX:
            return outcome(OutcomeStatus.REJECTED, f"the request has {ACTIONS_MAX} hints")
        request.actions.append((action, hint))
        request.session_id = hint.session_id or request.session_id
        return outcome(OutcomeStatus.DEFERRED, "until the request ends")

    def _target(self, hint: Hint) -> tuple[RadixKey | None, _Session]:
        """Return the prompt that a hint names, and its session. Raises InvalidInput for a prompt of another kind."""
        tree, salt = self._trees.current, None if hint.cache_salt is None else hint.cache_salt.get_secret_value()
        if hint.page_keys is not None:  # which cover the tenant
            key = RadixKey.of_hashes([bytes.fromhex(one) for one in hint.page_keys])
        elif hint.tokens is not None:
            bigram = tree.position_bytes == BIGRAM_BYTES
            key = RadixKey.of(hint.tokens, extra_key=hint.extra_key, cache_salt=salt, bigram=bigram)
        else:
            name = namespace_seed(hint.extra_key, salt), hint.session_id or ""
            session = self._sessions.get(name)
            return (None, _Session()) if session is None else (session.key, session)
        tree.require_fitting(key)
        return key, self._session(key.seed or namespace_seed(hint.extra_key, salt), hint.session_id)

    # Requests

    @property
    def is_used(self) -> bool:
        """True if a request may have hints, or a session waits."""
        return bool(self._requests or self._sessions)

    def begins(self, rid: str, key: RadixKey, node: Node) -> None:
        """Note that the request of `key` begins with the path to `node`: its session has returned. If it names none, it
        is that of the last node that has one."""
        request = self._requests.get(rid)
        if request is None or request.session_id is None:
            self._returned(_owner(node))
        else:
            self._returned(self._sessions.get((key.seed or request.tenant, request.session_id)))

    def trace(self, rid: str, context: tracing.Context) -> None:
        """Note the parent of the spans of a request's hints."""
        if (request := self._requests.get(rid)) is not None:
            request.context = context

    def note(self, rid: str, key: RadixKey) -> None:
        """Note the prompt of a request so far."""
        if (request := self._requests.get(rid)) is not None:
            request.key = key

    def ends(self, rid: str, *, completed: bool = True) -> None:
        """Carry out the hints of a request that has ended; drop them if it was not `completed`."""
        request = self._requests.pop(rid, None)
        if request is None or request.key is None or not completed:
            return
        session = self._session(request.key.seed or request.tenant, request.session_id)
        if request.session_id is not None:
            self._key_bytes += len(request.key.tokens) - (0 if session.key is None else len(session.key.tokens))
            session.key, session.turns = request.key, session.turns + 1
        for action, hint in request.actions:
            self._told(action, self._apply(hint, request.key, session), request)
        self._forget_oldest()

    def _session(self, seed: bytes, name: str | None) -> _Session:
        """Return a session. The one without a name stands for all requests of a tenant that name none."""
        session = self._sessions.setdefault((seed, name or ""), _Session(name or ""))
        self._sessions.move_to_end((seed, name or ""))
        self._forget_oldest()
        return session

    def _forget_oldest(self) -> None:
        """Forget the least recently used sessions. Their pins and retained pages end at their times."""
        while len(self._sessions) > 1 and (len(self._sessions) > SESSIONS_MAX or self._key_bytes > KEY_BYTES_MAX):
            _, oldest = self._sessions.popitem(last=False)
            self._key_bytes -= 0 if oldest.key is None else len(oldest.key.tokens)
            if oldest.wait is not None:
                self._timers.cancel(oldest.wait.timer)
                oldest.wait = None

    # Actions

    def _apply(self, hint: Hint, key: RadixKey, session: _Session) -> Outcome:
        if isinstance(hint, Prefetch):
            return self._fetches.plan(hint, key, self.device)
        match = self._trees.current.match(key, marks=False)  # a hint is not a use
        if not match.pages:
            return outcome(OutcomeStatus.MISSING, "no page of it is on L1 or L2")
        if isinstance(hint, Retain):
            return self._retain(hint, key, match, session)
        if isinstance(hint, PinHint):
            return self._pin(hint, key, match, session)
        if isinstance(hint, Demote):
            return self._demote(hint, match, session)
        if isinstance(hint, Turn):
            return granted(match.pages)
        return self._release(match, session) if isinstance(hint, Release) else self._wait(hint, match, session)

    def _retain(self, hint: Retain, key: RadixKey, match: Match, session: _Session) -> Outcome:
        tree, path = self._trees.current, _path(match.node)
        now_s, ttl_s = self._now_s(), min(hint.ttl_s, self._config.ttl_max)
        kept = NodeHint(tree.tick, now_s, ref(session), value=hint.value, return_s=now_s + ttl_s)
        for old in list(session.retained):  # of an earlier turn, or evicted
            if old.node.device is old.node.host is None or (old.node in path and _replaces(kept, old.hint, session)):
                self._end_retained(session, old)
        match, why = self._within_shares(key, match, session)
        if not match.pages:
            return outcome(OutcomeStatus.REJECTED, f"nothing is left of {why}")
        if len(session.retained) >= RETAINED_MAX or self._timers.is_full:
            return outcome(OutcomeStatus.REJECTED, "too many retained prompts; release some")
        # Pages that others retain for longer stay theirs.
        self._order.give(kept, [one for one in _path(match.node) if _until(one.hint) <= _until(kept)])
        session.retained.append(retained := _Retained(kept, match.node, match.pages))
        self._retained_pages += match.pages
        retained.timer = self._timers.at(now_s + ttl_s, lambda: self._end_retained(session, retained))
        return self._kept(match, why, ttl_s, hint.ttl_s)

    def _end_retained(self, session: _Session, retained: _Retained) -> None:
        session.retained.remove(retained)
        self._timers.cancel(retained.timer)
        self._retained_pages -= retained.pages
        self._order.end(retained.hint)

    def _pin(self, hint: PinHint, key: RadixKey, match: Match, session: _Session) -> Outcome:
        path, now_s, ttl_s = _path(match.node), self._now_s(), min(hint.ttl_s, self._config.ttl_max)
        for old in session.pins:  # of an earlier turn
            if old.active and old.node in path and (session.name or old.expires_at <= now_s + ttl_s):
                old.release()
        session.pins = [pin for pin in session.pins if pin.active]
        match, why = self._within_shares(key, match, session)
        pin = self._pins.add(self._trees.current, match, ttl_s) if match.pages else None
        if pin is None:
            return outcome(OutcomeStatus.REJECTED, f"nothing is left of {why}")
        session.pins.append(pin)
        return self._kept(match, why, ttl_s, hint.ttl_s)

    def _within_shares(self, key: RadixKey, match: Match, session: _Session) -> tuple[Match, str]:
        """Return the first pages of a match that the session may still keep on L2, and which share limits them."""
        tree = self._trees.current
        own = self._session_pages - sum(one.pages for one in session.retained) - sum(pin.pages for pin in session.pins)
        left = self._pages_max - tree.pinned_pages - self._retained_pages
        why = "pin_host_share" if left < own else "hints.session_share"
        if (pages := max(0, min(own, left))) < match.pages:
            return tree.match(tree.head(key, pages), marks=False), why
        return match, ""

    def _kept(self, match: Match, why: str, ttl_s: float, asked_s: float) -> Outcome:
        """Return the outcome for pages that are kept: storage learns of the use, and L2 gets those of L1."""
        self._host.reused(match.node)
        if self.device is not None:
            self.device.used(match.node)
        return granted(match.pages, why and f"the limit is {why}", ttl_s, asked_s)

    def _own(self, match: Match, session: _Session) -> list[Node]:
        """Return the nodes of a path, deepest first, that no other session has used and none retains."""
        return [one for one in _path(match.node) if one.hit_count <= max(1, session.turns) and _until(one.hint)[0] <= 0]

    def _release(self, match: Match, session: _Session) -> Outcome:
        path = None if session.name else _path(match.node)  # without a name, other requests have the other ones
        for pin in session.pins:
            if path is None or pin.node in path:
                pin.release()
        for kept in list(session.retained):
            if path is None or kept.node in path:
                self._end_retained(session, kept)
        if session.wait is not None:
            self._timers.cancel(session.wait.timer)
            session.wait = None
        tree = self._trees.current
        pages = self._give(match, session, NodeHint(tree.tick, self._now_s(), ref(session), value=RELEASED))
        return granted(pages, "" if pages == match.pages else "other sessions have used or retain the rest")

    def _wait(self, hint: Wait, match: Match, session: _Session) -> Outcome:
        if not self._knows_times:
            return outcome(OutcomeStatus.REJECTED, "eviction_policy: only lru and adaptive use times")
        if self._timers.is_full:
            return outcome(OutcomeStatus.REJECTED, f"{TIMERS_MAX} hints have not ended")
        owner = _owner(match.node)
        if owner is not None and not owner.name:
            self._returned(owner)
        if not session.name:  # the pages stand for the session
            session = _Session()
        self._returned(session)  # a second wait: the announced time was wrong
        now_s, announced_s, source = self._now_s(), hint.expected_s, hint.source or ""
        expected_s, trust = self._record(source).expected(announced_s)
        told = NodeHint(self._trees.current.tick, now_s, ref(session), return_s=now_s + expected_s, trust=trust)
        pages = self._give(match, session, told)
        given_up_s = max(GIVEN_UP_MIN_S, GIVEN_UP * min(announced_s, self._config.ttl_max))
        timer = self._timers.at(now_s + given_up_s, lambda: self._returned(session))
        session.wait = _Wait(now_s, announced_s, source, timer)
        why = "" if trust else "the times of this source were not better than chance"
        return granted(pages, why)

    def _give(self, match: Match, session: _Session, hint: NodeHint) -> int:
        """Let a hint speak for the session's own nodes of a path, instead of its last one. Return their pages."""
        tree, own = self._trees.current, self._own(match, session)
        if session.name:
            if session.hint is not None:
                self._order.end(session.hint)
            session.hint = hint
        self._order.give(hint, own)
        return sum(map(tree.pages, own))

    @property
    def _order(self) -> HintedOrder:
        return self._trees.current.hinted(self._now_s)

    def _record(self, source: str) -> WaitRecord:
        record = self._records.setdefault(source, WaitRecord())
        self._records.move_to_end(source)
        if len(self._records) > SOURCES_MAX:
            self._records.popitem(last=False)
        return record

    def _returned(self, session: _Session | None) -> None:
        if session is not None and session.wait is not None:
            (at_s, announced_s, source, timer), session.wait = session.wait, None
            self._timers.cancel(timer)
            self._record(source).add(announced_s, self._now_s() - at_s)

    # Movements

    def _demote(self, hint: Demote, match: Match, session: _Session) -> Outcome:
        tree, own, left, coming = self._trees.current, self._own(match, session), 0, 0
        if self.device is not None:
            left, coming = self.device.demote(own)
        elif hint.destination == "host":
            return outcome(OutcomeStatus.REJECTED, "the engine owns its device pages")
        if hint.destination == "storage" and not coming:
            left = 0
            for node in own:
                if not (node.stored and may_leave_host(node)):
                    self._host.store_path(node)
                    break
                left += tree.pages(node)
                self._host.drop(tree, node)
        if coming:
            return outcome(OutcomeStatus.DEFERRED, "pages are copied to L2 first", left + coming)
        return granted(left, "" if left == match.pages else "the rest is in use, shared, or not stored yet")

    # Each step

    @property
    def is_busy(self) -> bool:
        """True if `advance` has something to do, now or later."""
        return bool(self._timers) or bool(self._fetches)

    def advance(self) -> None:
        """Do what is due. Call it once per step while `is_busy`."""
        self._timers.advance(self._now_s())
        self._fetches.advance(self.device)

    def clear(self) -> None:
        """Forget all hints and sessions: their tree is replaced. Sources keep their records."""
        self._sessions.clear()
        self._requests.clear()
        self._timers.clear()
        self._fetches.clear()
        self._key_bytes = self._retained_pages = 0

    def check(self) -> None:
        """Raises InvariantError if the invariant does not hold. Visits every node."""
        tree = self._trees.current
        pages = sum(tree.pages(node) for node in tree.nodes() if _until(node.hint)[0] > 0)
        if not pages <= self._retained_pages <= self._pages_max:
            raise InvariantError(f"hints: {pages} pages are retained, {self._retained_pages} are counted")
        if self._key_bytes != sum(len(one.key.tokens) for one in self._sessions.values() if one.key is not None):
            raise InvariantError(f"hints: {self._key_bytes} bytes of prompts are counted, sessions have others")


def _path(node: Node) -> list[Node]:
    """Return the nodes from `node` up to the first of its prompt."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path


def _owner(node: Node) -> _Session | None:
    """Return the session that has spoken for the last node of a path that has a hint."""
    owner = next((one.hint.owner() for one in _path(node) if one.hint is not None), None)
    return owner if isinstance(owner, _Session) else None


def _until(hint: NodeHint | None) -> tuple[float, float]:
    """Return the value and the end of retained pages, for comparisons; other hints have a smaller value."""
    return (0.0, 0.0) if hint is None or hint.value <= 0 else (hint.value, hint.return_s)


def _replaces(new: NodeHint, old: NodeHint, session: _Session) -> bool:
    """True if a hint ends the earlier one. Without a name, another request may have sent it, so it is not shortened."""
    return bool(session.name) or _until(old) <= _until(new)

"""An oracle of the accounts of prompts: it remembers all pages beside a cache, and predicts the accounts of requests.

It observes the tree, the results of operations and the counters of skipped work. It does not use the explainer, the
marks that it reads (`Node.loss`), or the answer of the prefetcher. Its rules are those of the docstrings
of `ghosts` and `explain`, page by page:

    on L1, L2, or brought from storage for this request     the tier
    in memory, but not loaded                               why the load left it there
    found in storage, but not read                          the last event of its prefetch
    known before                                            how it left (`Left`)
    never seen                                              new, or late or unavailable if storage may have it
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hicache.backends.base import Direction, GetOutcome
from hicache.cache import HostLoad, HostMatch, RequestKV
from hicache.cache.engine_cache import Found
from hicache.cache.explain import _NEIGHBOURS, PromptTokens
from hicache.cache.prefetch_states import AT_REST, WAITING, Prefetch, State
from hicache.cache.tiered import TieredCache
from hicache.controller import LookupOperation, ReadOperation, StoreOperation
from hicache.events.types import Medium
from hicache.ghosts import Kind, Reason
from hicache.keys import PageChain, RadixKey, common_pages
from hicache.radix import Node, RadixTree
from hicache.radix.prefixes import PrefixTree, TreeObserver

Prefix = tuple[bytes, bytes]  # the seed, and all key bytes up to the end of a page

AGE_S = 0.01  # the two read the clock one after the other
NO_ROOM: Kind = (Reason.NO_ROOM, "")
NOT_WORTH: Kind = (Reason.NOT_WORTH, "")
UNAVAILABLE: Kind = (Reason.UNAVAILABLE, "")
NEW: Kind = (Reason.NEW, "")
IN_QUEUE: Kind = (Reason.LATE, "queue")
# Why found pages were not read, by the counter of `CacheStatistics.skipped` that has risen.
_SKIPPED: dict[str, Kind] = {
    "prefetch_does_not_pay": NOT_WORTH, "prefetch_hit_too_short": NOT_WORTH, "prefetch_failed": UNAVAILABLE,
    "prefetch_host_share": NO_ROOM, "prefetch_no_host_room": NO_ROOM, "prefetch_unanswered": (Reason.LATE, "lookup"),
    "load_too_short": NOT_WORTH, "load_does_not_pay": NOT_WORTH, "load_not_verified": (Reason.LATE, "verification"),
}


class Left(NamedTuple):
    """How a page left memory. `stored`: storage had it then, as far as the process knew."""

    kind: Kind
    time_s: float
    epoch: int
    stored: bool


@dataclass(eq=False)
class Fact:
    """All that is known of a page. `bringer` is the prefetch that has brought it to memory from storage."""

    media: set[Medium] = field(default_factory=set)
    stored: bool = False
    loss: str = ""  # why storage lacks it
    left: Left | None = None
    bringer: Prefetch | None = None
    is_promoted: bool = False  # by that prefetch


@dataclass(eq=False)
class Answers:
    """What a prefetch has learned: pages before `end` are in storage, and if `is_whole`, the next one is not. Without
    storage, no page that was never seen `may_be_there`."""

    end: int = 0
    is_whole: bool = False
    why: Kind = NO_ROOM
    may_be_there: bool = True


class Expected(NamedTuple):
    """A predicted account: tokens by source in the order of the prompt, and the values that belong to it."""

    hits: tuple[int, int, int]
    computed: list[tuple[Kind, int]]
    diverged_at: int | None
    age_s: float | None


class Shadow:
    """See the module's docstring. It is attached to an empty cache; `compare` is called after a request has begun.

    `kinds` counts the tokens of all compared accounts, so that a test can require that each kind occurred.
    """

    def __init__(self, cache: TieredCache, now_s: Callable[[], float] = time.monotonic) -> None:
        self.facts: dict[Prefix, Fact] = {}
        self.kinds: Counter[Kind] = Counter()
        self.hits: Counter[str] = Counter()
        self.compared = 0
        self._cache = cache
        self._now_s = now_s
        self._answers: dict[Prefetch, Answers] = {}
        self._bringing: Prefetch | None = None
        self._replacing = False
        self._begun: dict[str, Prefetch | None] = {}
        self._own_tokens = 0
        self._unloaded: dict[str, Kind] = {}  # by request: why the last look or load has left pages on L2
        self._known: dict[str, Answers] = {}  # when a request began
        self._looked: dict[str, int] = {}  # pages in memory at the last look of a request
        self._failed: set[str] = set()  # requests of which a load has failed
        self._is_begun = False
        # Pages of these have arrived, and were not held until the request began: the cache counts, and others may have
        # evicted and computed some of them.
        self._moved: set[Prefetch] = set()
        self._left_now: set[Prefix] = set()  # in the call that `beginning` surrounds
        self._observe_tree()
        self._observe_stores()
        self._observe_prefetches()
        self._wrap(cache, "clear", before=self._clears)

    # The tree

    def _observe_tree(self) -> None:
        trees = self._cache._trees
        make = trees._make

        def observed() -> RadixTree:
            tree = make()
            self._watch(tree)
            return tree

        trees._make = observed
        self._watch(trees.current)
        self._wrap(self._cache, "record_events", after=lambda *_: self._watch(trees.current))

    def _watch(self, tree: RadixTree) -> None:
        tree.observer = _Tee(self, tree.observer)
        forget_all = tree.stored.forget_all

        def replaced() -> None:
            self._replacing = True
            forget_all()
            self._replacing = False

        tree.stored.forget_all = replaced  # type: ignore[method-assign]

    def fact(self, prefix: Prefix) -> Fact:
        """Return the fact of a page, a new one if it was never seen."""
        return self.facts.setdefault(prefix, Fact())

    def appeared(self, medium: Medium, tree: PrefixTree, node: Node, last_pages: int | None = None) -> None:
        """Note that pages have appeared on a medium."""
        for fact in self._facts_of(tree, node, last_pages):
            if medium is Medium.STORAGE:
                fact.stored, fact.loss = True, ""
                continue
            if not fact.media:
                fact.stored, fact.loss, fact.bringer, fact.is_promoted = False, "", None, False
            if medium is Medium.HOST:  # from now on, the reason is that of a store
                fact.loss = ""
            fact.media.add(medium)
            if medium is Medium.HOST and node.stored and self._bringing is not None:
                fact.bringer, fact.is_promoted = self._bringing, False
                if Medium.DEVICE in fact.media:
                    self._moved.add(self._bringing)
            if medium is Medium.HOST and node.stored:
                fact.stored, fact.loss = True, ""

    def removed(self, medium: Medium, tree: PrefixTree, node: Node) -> None:
        """Note that pages leave a medium."""
        for prefix in prefixes_of(tree, node):
            fact = self.facts[prefix]
            if medium is Medium.STORAGE:
                fact.stored = False
                fact.loss = fact.loss if self._replacing else "lost"
                continue
            fact.media.remove(medium)
            if not fact.media:
                self._left_now.add(prefix)
                fact.left = self._departure(fact, medium)

    def _departure(self, fact: Fact, medium: Medium) -> Left:
        has_storage = self._cache.controller.gate.attached
        stored = fact.stored and has_storage
        kind: Kind = Reason.EVICTED, medium.value
        if fact.loss == "damaged" and not stored:
            kind = Reason.DAMAGED, ""
        elif fact.loss == "lost" and has_storage and not stored:
            kind = Reason.EVICTED, "storage"
        elif has_storage and not stored:
            kind = Reason.NOT_STORED, fact.loss or "policy"
        return Left(kind, self._now_s(), self._cache.weights_epoch, stored)

    def _clears(self, *_: Any, **__: Any) -> None:
        """Note that the cache is emptied. `update_weights` has set the new epoch already."""
        tree = self._cache.tree
        for fact in self.facts.values():
            if fact.media:
                fact.media.clear()
                fact.left = Left((Reason.EVICTED, "cleared"), self._now_s(), tree.epoch, False)

    def _facts_of(self, tree: PrefixTree, node: Node, last_pages: int | None = None) -> list[Fact]:
        prefixes = list(prefixes_of(tree, node))
        return [self.fact(prefix) for prefix in prefixes[-(last_pages or len(prefixes)) :]]

    # Copies and stores

    def _observe_stores(self) -> None:
        cache, host = self._cache, self._cache._l2
        self._wrap(host, "store", around=self._storing)
        self._wrap(host, "store_path", around=self._storing_path)
        self._wrap(host, "stored", before=self._store_ends)
        self._wrap(host, "drop_damaged", before=lambda tree, node, *_, **__: self._lose(tree, [node], "damaged"))
        self._wrap(cache.controller, "cancel_store", around=self._cancelling)
        if (device := getattr(cache, "_l1", None)) is not None:
            self._wrap(device, "_back_up", around=self._backing_up)
            self._wrap(device, "used", around=self._using)

    def _lose(self, tree: RadixTree, nodes: list[Node], loss: str) -> None:
        if tree is self._cache.tree:
            for node in nodes:
                for fact in self._facts_of(tree, node):
                    fact.loss = loss

    def _storing(self, call: Callable[..., bool], node: Node) -> bool:
        tree, parent, seen = self._cache.tree, node.parent, self._counts()
        done = call(node)
        if done or node.host is None or parent is None or not self._cache.controller.gate.attached:
            return done
        risen = self._counts() - seen
        if risen["store_paused"]:
            loss = "paused"
        elif risen["store_does_not_pay"]:
            loss = "not_worth"
        elif risen["backup"]:
            loss = "queue"
        else:  # storage lacks the prefix
            loss = self._facts_of(tree, parent)[-1].loss
        self._lose(tree, [node], loss)
        return done

    def _storing_path(self, call: Callable[..., None], node: Node, hits_min: int = 0) -> None:
        """After a run that cannot be stored, the wanted runs below it are not stored for the same reason."""
        wanted: list[Node] = []
        for part in path_to(node):
            if part.host is not None and not (part.stored or part.store_pending):
                wanted += [part] if wanted or part.hit_count >= hits_min else []
        call(node, hits_min)
        if self._cache.controller.gate.attached:
            self._inherit(wanted[::-1])

    def _inherit(self, wanted: list[Node]) -> None:
        failed: str | None = None
        for part in wanted:
            if part.stored or part.store_pending:
                continue
            if failed is None:
                failed = self._facts_of(self._cache.tree, part)[-1].loss
            else:
                self._lose(self._cache.tree, [part], failed)

    def _store_ends(self, store: StoreOperation) -> None:
        tree, node = self._cache._l2._stores[store]
        if not store.stored:
            self._lose(tree, list(tree.span(node, store.chain.pages)), "full" if store.rejected else "failed")

    def _cancelling(self, call: Callable[..., bool], store: StoreOperation) -> bool:
        tree, node = self._cache._l2._stores[store]
        nodes = list(tree.span(node, store.chain.pages))
        if done := call(store):
            self._lose(tree, nodes, "no_room")
        return done

    def _backing_up(self, call: Callable[..., bool], path: list[Node], *, evicts: bool = False) -> bool:
        seen = self._counts()
        done = call(path, evicts=evicts)
        risen = self._counts() - seen
        for counter, loss in (("write", "queue"), ("backup_no_host_room", "no_room")):
            if not done and risen[counter]:
                self._lose(self._cache.tree, path, loss)
        return done

    def _using(self, call: Callable[..., None], node: Node) -> None:
        """As `_storing_path`, for copies to L2."""
        device: Any = self._cache._l1  # type: ignore[attr-defined]
        wanted = [
            part for part in path_to(node)
            if part.host is None and not part.backup_pending and device._wants(part)
            and (not (part.copied and not part.pin_ref) or self._cache._l2.may_store(part))
        ]
        tried: list[Node] = []
        back_up = device._back_up

        def trying(path: list[Node], **rest: Any) -> bool:
            tried.extend(path)
            return bool(back_up(path, **rest))

        device._back_up = trying
        try:
            call(node)
        finally:
            device._back_up = back_up
        untried = [part for part in wanted if part not in tried]
        if tried and untried:
            self._lose(self._cache.tree, untried, self._facts_of(self._cache.tree, tried[-1])[-1].loss)

    def _counts(self) -> Counter[str]:
        return Counter({**self._cache._counters.skipped, **self._cache.controller.refused})

    # Prefetches

    def _observe_prefetches(self) -> None:
        prefetcher = self._cache._prefetcher
        self._wrap(prefetcher, "start", around=self._starting)
        self._wrap(prefetcher, "found", around=self._finding)
        self._wrap(prefetcher, "ended", around=self._reading)
        self._wrap(prefetcher, "_take", around=self._taking)
        self._wrap(prefetcher, "_drop", before=self._drops)
        self._wrap(prefetcher, "_close", around=self._closing)
        self._wrap(prefetcher, "_try", around=self._trying)
        self._wrap(prefetcher.share, "_end_load", before=self._promotes)
        self._wrap(prefetcher.share, "release", before=self._releases)
        self._wrap(prefetcher, "take_arrived", around=self._taking_arrived)
        self._wrap(prefetcher, "conclude", before=self._concludes)

    def _of(self, prefetch: Prefetch) -> Answers:
        return self._answers.setdefault(prefetch, Answers())

    def _starting(self, call: Callable[..., bool], rid: str, key: RadixKey, *rest: Any, **more: Any) -> bool:
        seen, before = self._counts(), self._cache._prefetcher._table.get(rid)
        was_active = self._cache._prefetcher.is_active(rid)
        started = call(rid, key, *rest, **more)
        prefetch = self._cache._prefetcher._table.get(rid)
        is_short = (self._counts() - seen)["prefetch_too_short"] > 0
        if prefetch is not None and (started or is_short) and not was_active:
            assert before is None or before is prefetch
            self._answers[prefetch] = Answers(why=NOT_WORTH if is_short else NO_ROOM)
        return started

    def _trying(self, call: Callable[..., None], prefetch: Prefetch) -> None:
        """A prefetch whose turn has come ends without a lookup if too little is missing."""
        call(prefetch)
        if prefetch.state in (State.ENDED, State.ARRIVED):
            self._of(prefetch).why = NOT_WORTH

    def _finding(self, call: Callable[..., None], found: LookupOperation) -> None:
        prefetch = self._cache._prefetcher._operations[found]
        answers = self._of(prefetch)
        is_missing = found.pages < len(found.keys)
        is_end = found.start_page + found.pages == found.key.pages(self._cache.page_size)
        is_whole = not found.failed and (is_missing or is_end)
        if is_whole or not answers.is_whole:
            answers.end, answers.is_whole = found.start_page + found.pages, is_whole
        call(found)

    def _drops(self, prefetch: Prefetch, found: LookupOperation, reason: str) -> None:
        self._of(prefetch).why = _SKIPPED[reason]

    def _reading(self, call: Callable[..., None], read: ReadOperation) -> None:
        answers = self._of(self._cache._prefetcher._operations[read])
        is_whole = read.pages == len(read.host_pages)
        if read.failed or (read.lacks is None and not is_whole and not read.cancelled):
            answers.why = UNAVAILABLE
        elif read.lacks is not None:
            is_miss = read.lacks is GetOutcome.MISS
            answers.why = (Reason.EVICTED, "storage") if is_miss else (Reason.DAMAGED, "")
        call(read)

    def _closing(self, call: Callable[..., None], prefetch: Prefetch) -> None:
        """A request that follows a prefetch knows what that knows, if the result is its own too."""
        followers = list(prefetch.current.followers)
        call(prefetch)
        for follower in followers:
            if follower.state in AT_REST:
                known = self._of(prefetch)
                common = common_pages(prefetch.key.tokens, follower.key.tokens, 0, self._cache.tree.page_bytes)
                self._answers[follower] = replace(known, end=min(known.end, common))

    def _taking(self, call: Callable[..., None], prefetch: Prefetch) -> None:
        self._bringing = prefetch
        try:
            call(prefetch)
        finally:
            self._bringing = None

    def _releases(self, prefetch: Prefetch) -> None:
        if prefetch in self._cache._prefetcher.share.arrived and not self._is_begun:
            self._moved.add(prefetch)

    def _taking_arrived(self, call: Callable[..., tuple[int, int]], rid: str) -> tuple[int, int]:
        self._is_begun = True
        if (prefetch := self._cache._prefetcher._table.get(rid)) is not None and prefetch.state in AT_REST:
            self._known[rid] = replace(self._answer_of(prefetch))
        try:
            return call(rid)
        finally:
            self._is_begun = False

    def _promotes(self, prefetch: Prefetch) -> None:
        """The pages that have arrived for a request are on L1 because of it."""
        for fact in self.facts.values():
            fact.is_promoted |= fact.bringer is prefetch and Medium.DEVICE in fact.media

    def _concludes(self, rid: str) -> None:
        self._begun[rid] = prefetch = self._cache._prefetcher._table.get(rid)
        if prefetch is not None:
            self._begin_without(prefetch)
        if prefetch is not None or rid not in self._known:
            self._known[rid] = replace(self._answer_of(prefetch))

    def _begin_without(self, prefetch: Prefetch) -> None:
        """A request begins: what its prefetch has not done by now is late."""
        may_read = self._cache.controller.gate.may(Direction.READ)
        answers, state = self._of(prefetch), prefetch.state
        if state in WAITING:
            answers.why = IN_QUEUE if may_read else UNAVAILABLE
        elif state is State.AWAITING_ROOM:
            answers.why = NO_ROOM
        elif state is State.LOOKING_UP and not prefetch.looks_again:
            answers.why = Reason.LATE, "lookup"
        elif state in (State.READING, State.AWAITING_L1, State.LOADING):
            answers.why = Reason.LATE, "read"

    # Requests

    def watch_requests(self) -> None:
        """Compare the account of each request that begins. For caches that manage their requests."""
        cache: Any = self._cache
        self._wrap(cache, "begin_request", around=self._beginning)
        self._wrap(cache, "_continue_turn", around=self._continuing)

    def _continuing(self, call: Callable[..., int], request: RequestKV) -> int:
        self._own_tokens = call(request)
        return self._own_tokens

    def _beginning(
        self, call: Callable[..., RequestKV | None], rid: str, key: RadixKey, **more: Any
    ) -> RequestKV | None:
        size, seen = self._cache.page_size, self._counts()
        whole_pages = (key.prompt_tokens - 1) // size
        prefixes = [self.prefix(key, page) for page in range(whole_pages)]
        on_device = self._leading(prefixes, lambda prefix: Medium.DEVICE in self.fact(prefix).media)
        self._left_now.clear()
        self._own_tokens = 0
        request = call(rid, key, **more)
        if request is None:
            return None
        risen = self._counts() - seen
        unloaded = next((_SKIPPED[name] for name in _SKIPPED if name.startswith("load") and risen[name]), NO_ROOM)
        pages = request.shared_pages
        device = min(pages, on_device)
        prefetch = self._begun.pop(rid)
        facts = [self.fact(prefix) for prefix in prefixes[:pages]]
        brought = [
            prefetch is not None and fact.bringer is prefetch and (page >= device or fact.is_promoted)
            for page, fact in enumerate(facts)
        ]
        hits = device - sum(brought[:device]), pages - device - sum(brought[device:]), sum(brought)
        there = lambda prefix: bool(self.fact(prefix).media) or prefix in self._left_now  # noqa: E731
        memory_end = self._leading(prefixes, there)
        account = request.account
        assert account is not None and account.rid == rid
        self.compare(account, key, whole_pages, hits, [unloaded] * (memory_end - pages),
                     self._answer_of(prefetch), is_moved=prefetch in self._moved)
        return request

    def watch_engine(self) -> None:
        """As `watch_requests`, for an EngineCache."""
        self._wrap(self._cache, "load", around=self._loading)
        self._wrap(self._cache, "begin", around=self._beginning_in_engine)

    def _loading(self, call: Callable[..., int | None], rid: str, found: Found) -> int | None:
        seen = self._counts()
        pages = call(rid, found)
        self._unloaded[rid] = NOT_WORTH if (self._counts() - seen)["load_does_not_pay"] else NO_ROOM
        return pages

    def _beginning_in_engine(
        self, call: Callable[..., PromptTokens], rid: str, key: RadixKey, found: Found, **more: Any
    ) -> PromptTokens:
        prefixes = [self.prefix(key, page) for page in range(key.pages(self._cache.page_size))]
        memory_end = self._leading(prefixes, lambda prefix: bool(self.fact(prefix).media))
        left_pages = memory_end - self._leading(prefixes, lambda prefix: Medium.DEVICE in self.fact(prefix).media)
        is_short = left_pages * self._cache.page_size < self._cache.config.load_back_threshold_tokens
        unloaded = self._unloaded.pop(rid, NOT_WORTH if is_short else NO_ROOM)
        account = call(rid, key, found, **more)
        prefetch, pages = self._begun.pop(rid), found.device_pages + found.host_pages
        facts = [self.fact(prefix) for prefix in prefixes[found.device_pages : pages]]
        brought = sum(prefetch is not None and fact.bringer is prefetch for fact in facts)
        hits = found.device_pages, found.host_pages - brought, brought
        self.compare(account, key, len(prefixes), hits, [unloaded] * (memory_end - pages),
                     self._answer_of(prefetch), is_moved=prefetch in self._moved)
        return account

    def watch_host(self) -> None:
        """As `watch_requests`, for a HostCache."""
        self._wrap(self._cache, "lookup", around=self._looking_up)
        self._wrap(self._cache, "abort", after=self._aborts)
        self._wrap(self._cache, "end_load", before=self._load_ends)
        self._wrap(self._cache, "_count", around=self._counting)

    def _looking_up(
        self, call: Callable[..., HostMatch], rid: str, key: RadixKey, start_page: int = 0, **more: Any
    ) -> HostMatch:
        seen = self._counts()
        found = call(rid, key, start_page, **more)
        risen = self._counts() - seen
        prefixes = [self.prefix(key, page) for page in range(key.pages(self._cache.page_size))]
        self._looked[rid] = self._leading(prefixes, lambda prefix: bool(self.fact(prefix).media))
        if risen["load_too_short"] or risen["load_does_not_pay"]:
            self._unloaded[rid] = NOT_WORTH
        elif found.pages and not found.loading:
            self._unloaded[rid] = NO_ROOM
        return found

    def _aborts(self, rid: str) -> None:
        for known in (self._looked, self._unloaded, self._begun, self._known):
            known.pop(rid, None)
        self._failed.discard(rid)

    def _load_ends(self, load: HostLoad, seconds: float | None) -> None:
        if seconds is None:
            self._failed.add(load.rid)

    def _counting(self, call: Callable[..., None], rid: str, request: Any, load: HostLoad | None = None) -> None:
        counted = self._cache._counters.requests
        if (answers := self._known.get(rid)) is None:  # its prefetch goes on
            prefetch = self._cache._prefetcher._table.get(rid)
            before = None if prefetch is None else replace(self._of(prefetch))
            if prefetch is not None:
                self._begin_without(prefetch)
            answers = replace(self._answer_of(prefetch))
            if prefetch is not None and before is not None:
                self._answers[prefetch] = before
        call(rid, request, load)
        if self._cache._counters.requests == counted or request.tree is not self._cache.tree:
            return
        size, device = self._cache.page_size, request.start_page if load is None else load.start_page
        loaded, bringer = 0 if load is None else len(load.host_pages), self._begun.get(rid)
        prefixes = [self.prefix(request.key, page) for page in range(device, device + loaded)]
        brought = sum(bringer is not None and self.fact(prefix).bringer is bringer for prefix in prefixes)
        hits = device, loaded - brought, brought
        whole_pages = max(request.key.pages(size), sum(hits))
        unloaded = UNAVAILABLE if rid in self._failed else self._unloaded.get(rid, NO_ROOM)
        left = self._looked.get(rid, 0) - sum(hits)
        if request.unshared:
            unloaded, left = (Reason.UNSHARED, ""), whole_pages - sum(hits)
        account = self._cache.explainer.recent[rid]
        # Which of the loaded pages came from storage for this request is only counted there.
        self.compare(account, request.key, whole_pages, hits, [unloaded] * left, answers, is_moved=True)

    def compare(
        self, account: PromptTokens, key: RadixKey, whole_pages: int, hits: tuple[int, int, int],
        unloaded: list[Kind], answers: Answers, *, is_moved: bool = False,
    ) -> None:
        """Compare the account of a request with the prediction. `unloaded` are the reasons of the pages in memory that
        were not used. If pages that had arrived `is_moved`, the tiers of its hits are not compared."""
        size, computed = self._cache.page_size, list[tuple[Kind, int]]()
        page = sum(hits)
        for kind in unloaded:
            computed.append((kind, size))
            page += 1
        memory_end = page
        for _ in range(page, min(answers.end, whole_pages)):
            computed.append((answers.why, size))
            page += 1
        age_s = diverged_at = None
        if page < whole_pages and (left := self.fact(self.prefix(key, page)).left) is not None:
            age_s = account.time_s - left.time_s
        while page < whole_pages and (left := self.fact(self.prefix(key, page)).left) is not None:
            computed.append((self._kind_of(left, answers), size))
            page += 1
        if page < whole_pages:
            may_be_there = answers.may_be_there and not answers.is_whole
            kind = answers.why if may_be_there and answers.why[0] in (Reason.LATE, Reason.UNAVAILABLE) else NEW
            computed.append((kind, (whole_pages - page) * size))
            if kind is NEW:
                common = self._common(key, page) if page == memory_end else []
                diverged_at = page * size + max(common, default=0)
                if len(common) > _NEIGHBOURS and (diverged := account.diverged_at) is not None:  # it compares a few
                    diverged_at = diverged if page * size <= diverged <= diverged_at else diverged_at
        computed.append(((Reason.TAIL, ""), account.tokens - whole_pages * size))
        own = self._own_tokens
        if diverged_at is not None:
            diverged_at = max(diverged_at, sum(hits) * size + own)
        expected = Expected((hits[0] * size + own, hits[1] * size, hits[2] * size), _without(computed, own),
                            diverged_at, age_s)
        found = Expected(
            (account.device, account.host, account.storage),
            [(kind, tokens) for kind, tokens in account.computed.items() if tokens], account.diverged_at, account.age_s,
        )
        assert account.tokens == account.cached + sum(account.computed.values())
        if is_moved:
            found = found._replace(hits=(sum(found.hits), 0, 0))
            expected = expected._replace(hits=(sum(expected.hits), 0, 0))
        is_close = (age_s is None) == (account.age_s is None) and (
            age_s is None or math.isclose(age_s, account.age_s or 0.0, abs_tol=AGE_S)
        )
        assert is_close and found[:3] == expected[:3], (
            f"{account.rid}: the account is\n{found}\nand the oracle expects\n{expected}"
        )
        self.compared += 1
        self.kinds.update(dict(expected.computed))
        self.hits.update(dict(zip(("device", "host", "storage"), expected.hits, strict=True)))

    def _answer_of(self, prefetch: Prefetch | None) -> Answers:
        gate = self._cache.controller.gate
        if not gate.attached:
            return Answers(0, is_whole=False, why=UNAVAILABLE, may_be_there=False)
        if prefetch is None:
            return Answers(0, is_whole=False, why=IN_QUEUE if gate.may(Direction.READ) else UNAVAILABLE)
        return self._of(prefetch)

    def _kind_of(self, left: Left, answers: Answers) -> Kind:
        if left.epoch != self._cache.weights_epoch:
            return Reason.OTHER_WEIGHTS, ""
        if not left.stored:
            return left.kind
        return (Reason.EVICTED, "storage") if answers.is_whole else answers.why

    def _common(self, key: RadixKey, page: int) -> list[int]:
        """Return how many tokens of a page equal those of each other page in memory with the same pages before it."""
        if key.is_given:
            return []
        seed, end = self.prefix(key, page)
        before, common, width = end[: page * self._cache.tree.page_bytes], list[int](), key.position_bytes
        for (other_seed, other), fact in self.facts.items():
            if other_seed == seed and len(other) == len(end) and fact.media and other.startswith(before):
                equal = 0  # all, if another request has added the page since this one was looked up
                while equal < self._cache.page_size and other.startswith(end[: len(before) + (equal + 1) * width]):
                    equal += 1
                common.append(equal)
        return common

    def prefix(self, key: RadixKey, page: int) -> Prefix:
        """Return the prefix of a prompt up to the end of a page."""
        return key.seed, key.tokens[: (page + 1) * self._cache.tree.page_bytes]

    @staticmethod
    def _leading(prefixes: list[Prefix], holds: Callable[[Prefix], bool]) -> int:
        return next((page for page, prefix in enumerate(prefixes) if not holds(prefix)), len(prefixes))

    @staticmethod
    def _wrap(
        owner: Any, name: str, *, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None,
        around: Callable[..., Any] | None = None,
    ) -> None:
        """Replace a method of one object by one that also tells the shadow."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if before is not None:
                before(*arguments, **named)
            result = method(*arguments, **named) if around is None else around(method, *arguments, **named)
            if after is not None:
                after(*arguments, **named)
            return result

        setattr(owner, name, wrapped)


class _Tee(TreeObserver):
    """Tells the shadow, and then the observer that the cache has set."""

    def __init__(self, shadow: Shadow, inner: TreeObserver | None) -> None:
        self._shadow, self._inner = shadow, inner

    def stored(self, medium: Medium, tree: PrefixTree, node: Node) -> None:
        self._shadow.appeared(medium, tree, node)
        if self._inner is not None:
            self._inner.stored(medium, tree, node)

    def grown(self, tree: PrefixTree, node: Node, pages: int, prior: bytes | PageChain) -> None:
        self._shadow.appeared(Medium.DEVICE, tree, node, pages)
        if self._inner is not None:
            self._inner.grown(tree, node, pages, prior)

    def removed(self, medium: Medium, tree: PrefixTree, node: Node) -> None:
        self._shadow.removed(medium, tree, node)
        if self._inner is not None:
            self._inner.removed(medium, tree, node)

    def lost(self, keys: list[bytes]) -> None:
        if self._inner is not None:
            self._inner.lost(keys)

    def storage_replaced(self) -> None:
        if self._inner is not None:
            self._inner.storage_replaced()


def prefixes_of(tree: PrefixTree, node: Node) -> Iterator[Prefix]:
    """Yield the prefix of each page of a node."""
    parts, above = list[bytes](), node.parent
    while above is not None and above.parent is not None:
        parts.append(above.key)
        above = above.parent
    seed, begin = (above.page_keys if above is not None else None) or b"", b"".join(reversed(parts))
    for end in range(tree.page_bytes, len(node.key) + 1, tree.page_bytes):
        yield seed, begin + node.key[:end]


def path_to(node: Node) -> Iterator[Node]:
    """Yield the nodes of a path, deepest first, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _without(computed: list[tuple[Kind, int]], own: int) -> list[tuple[Kind, int]]:
    """Return tokens by kind, in the order in which the kinds begin, without the first `own` tokens."""
    found: dict[Kind, int] = {}
    for kind, tokens in computed:
        used = min(own, tokens)
        own -= used
        found[kind] = found.get(kind, 0) + tokens - used
    return [(kind, tokens) for kind, tokens in found.items() if tokens]

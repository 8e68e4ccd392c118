"""Accounts of prompts: where each token came from, and why the others were computed.

The account of a request is made once, when it begins. Its computed pages are explained in the order of the prompt:

    [cached, matched)      on L2, but not loaded: the reason of the load
    [matched, found)       in storage, but not read: the reason of the prefetch
    the rest               the departure of each page (`ghosts`), as far as known; then `new`
    the end                `tail`

A page that storage had when it left memory is lost there too if a lookup has ended without it. If no lookup has ended,
unknown pages may be in storage: they count as `late`, or as `unavailable` while storage is paused.

Owned by the scheduler thread; no lock.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from .. import tracing
from ..events.types import Medium
from ..ghosts import Departure, GhostIndex, Kind, Reason, key_ids, last_page_id, page_ids
from ..keys import PAGE_KEY_BYTES, TOKEN_BYTES, RadixKey, common_pages
from ..radix import Node, RadixTree
from .statistics import CacheCounters

# Accounts that are kept: an hour of a request per 4 s. About 500 bytes each.
RECENT_MAX = 1024
# Pages of one prompt whose departures are looked up, 0.4 us each; the rest counts as the last of them.
LOOKUPS_MAX = 16_384
# Other prompts with which a page that differs is compared, the newest first.
_NEIGHBOURS = 3
_HISTORY_S = 60.0
_HISTORY_MAX = 61


@dataclass(slots=True, eq=False)
class PromptTokens:
    """The account of one prompt, in tokens. `tokens` = `device` + `host` + `storage` + the sum of `computed`, which is
    by reason and detail, in the order of the prompt.

    `diverged_at`: the prompt equals another one up to this token, which is the first new one; None if no token is new.
    The first page that left did so `age_s` before; None if no page left. `written` tokens entered the cache since.
    """

    rid: str
    time_s: float
    tokens: int
    device: int = 0
    host: int = 0
    storage: int = 0
    computed: dict[Kind, int] = field(default_factory=dict)
    diverged_at: int | None = None
    age_s: float | None = None
    written: int = 0
    span: tracing.Span | None = field(default=None, repr=False)

    @property
    def cached(self) -> int:
        """Tokens whose KV was not computed."""
        return self.device + self.host + self.storage

    def add(self, kind: Kind, tokens: int) -> None:
        """Count `tokens` more that are computed."""
        if tokens > 0:
            self.computed[kind] = self.computed.get(kind, 0) + tokens

    def reuse(self, tokens: int) -> None:
        """Count the first `tokens` computed tokens as tokens from L1 instead."""
        self.device += tokens
        for kind, computed in list(self.computed.items()):
            self.computed[kind] = max(0, computed - tokens)
            tokens = max(0, tokens - computed)
        if self.diverged_at is not None:
            self.diverged_at = max(self.diverged_at, self.cached)


class StorageAnswer(NamedTuple):
    """What a request that begins knows of its pages in storage: those before `end_page` are there. If `is_whole`, the
    next one is not; else it is unknown. `kind`: why pages were not read."""

    end_page: int
    is_whole: bool
    kind: Kind


NO_STORAGE = StorageAnswer(0, is_whole=False, kind=(Reason.UNAVAILABLE, ""))


class Missed(NamedTuple):
    """What the cache had of a prompt and did not use: `pages` of it are in memory, up to `node`, and those that were
    not loaded are so because of `kind`. `answer` is that of storage. `own_tokens` more are on L1, in a page of its
    session."""

    pages: int
    node: Node
    kind: Kind
    answer: StorageAnswer
    own_tokens: int = 0


class Explainer:
    """See the module's docstring. `recent` are the last accounts by request id, the oldest first. `history` has the
    counts of computed tokens and of hits once a minute, for the last hour. `epoch` is that of the weights. Pages older
    than `max_age_s` are not in storage.
    """

    def __init__(self, pages_max: int, counters: CacheCounters, max_age_s: float) -> None:
        self.recent: OrderedDict[str, PromptTokens] = OrderedDict()
        self.history: deque[tuple[float, Counter[Kind], Counter[str]]] = deque(maxlen=_HISTORY_MAX)
        self.epoch = 0
        self._ghosts = GhostIndex(pages_max)
        self._pages_max = pages_max
        self._counters = counters
        self._max_age_s = max_age_s

    # Departures

    def left(self, tree: RadixTree, node: Node, medium: Medium, *, has_storage: bool, now_s: float) -> None:
        """Record that `node` is about to leave `medium`, its last tier, and the tree."""
        stored, detail = node.stored and has_storage, medium.value
        if node.loss == Reason.DAMAGED and not stored:
            reason, detail = Reason.DAMAGED, ""
        elif stored or not has_storage:
            reason = Reason.EVICTED
        elif node.loss == "lost":
            reason, detail = Reason.EVICTED, "storage"
        else:
            reason, detail = Reason.NOT_STORED, node.loss or "policy"
        made_s = math.inf if self._max_age_s == math.inf else tree.times.time_of(node.created)
        self._ghosts.note(_ids_of(tree, node), Departure(reason, detail, now_s, stored, made_s, tree.epoch))

    def cleared(self, tree: RadixTree, now_s: float) -> None:
        """Record that no request will find the pages of `tree` any more. Visits as many nodes as can be remembered."""
        tree.on_left, room = None, self._pages_max
        departure = Departure(Reason.EVICTED, "cleared", now_s, epoch=tree.epoch)
        for node in tree.nodes():
            if (room := room - tree.pages(node)) < 0:
                break
            self._ghosts.note(_ids_of(tree, node), departure)

    # Accounts

    def begin(
        self, account: PromptTokens, key: RadixKey, tree: RadixTree, hits: tuple[int, int, int], whole_pages: int,
        missed: Missed,
    ) -> None:
        """Complete and count the account of a request with `hits` pages from L1, L2 and storage, whose first
        `whole_pages` pages could be cached."""
        self.count(self._complete(account, key, tree, hits, whole_pages, missed))

    def foresee(self, key: RadixKey, tree: RadixTree, answer: StorageAnswer, time_s: float) -> PromptTokens:
        """Return the account of a request that begins now and gets all its pages. Counts nothing, and marks nothing."""
        size = tree.page_size
        # The last token is always computed; page keys are those of the pages before it.
        cut = key if key.is_given else key.head((key.prompt_tokens - 1) // size * size)
        match, pages = tree.match(cut, marks=False), cut.pages(size)
        hits = match.device_count, match.host_hit_pages, max(0, min(answer.end_page, pages) - match.pages)
        account = PromptTokens("", time_s, pages * size if key.is_given else key.prompt_tokens)
        return self._complete(account, key, tree, hits, pages, Missed(match.pages, match.node, answer.kind, answer))

    def last_hour(self, now_s: float) -> PromptTokens:
        """Return the account of all prompts of the last hour; `time_s` is that of the first one."""
        counters, none = self._counters, (now_s, self._counters.computed_tokens, self._counters.hit_tokens)
        time_s, before, hits_before = next((one for one in self.history if one[0] >= now_s - 3600.0), none)
        hits, computed = counters.hit_tokens - hits_before, counters.computed_tokens - before
        tokens = hits.total() + computed.total()
        return PromptTokens("", time_s, tokens, hits["device"], hits["host"], hits["storage"], computed)

    def _complete(
        self, account: PromptTokens, key: RadixKey, tree: RadixTree, hits: tuple[int, int, int], whole_pages: int,
        missed: Missed,
    ) -> PromptTokens:
        size, pages, tokens = tree.page_size, sum(hits), account.tokens
        account.device, account.host, account.storage = (size * pages for pages in hits)
        for end, kind in ((missed.pages, missed.kind), (missed.answer.end_page, missed.answer.kind)):
            if (end := min(end, whole_pages)) > pages:
                is_gone = kind == (Reason.EVICTED, "storage")
                is_old = is_gone and self._max_age_s < math.inf and self._is_old(account, key, tree, pages, missed)
                account.add((Reason.EXPIRED, "") if is_old else kind, (end - pages) * size)
                pages = end
        if pages < whole_pages:
            self._explain(account, key, tree, pages, whole_pages, missed)
        account.add((Reason.TAIL, ""), tokens - max(pages, whole_pages) * size)
        if missed.own_tokens:
            account.reuse(missed.own_tokens)
        return account

    def count(self, account: PromptTokens) -> None:
        """Count an account, and keep it."""
        counters, computed = self._counters, self._counters.computed_tokens
        if not self.history or account.time_s >= self.history[-1][0] + _HISTORY_S:
            self.history.append((account.time_s, computed.copy(), counters.hit_tokens.copy()))
        counters.requests += 1
        counters.prompt_tokens += account.tokens
        hits = counters.hit_tokens
        hits["device"] += account.device
        hits["host"] += account.host
        hits["storage"] += account.storage
        for kind, tokens in account.computed.items():
            computed[kind] += tokens
        self.end(self.recent.pop(account.rid, None))  # an earlier attempt
        self.recent[account.rid] = account
        if len(self.recent) > RECENT_MAX:
            self.end(self.recent.popitem(last=False)[1])

    def wrote(self, account: PromptTokens | None, tokens: int) -> None:
        """Count tokens of a request that have entered the cache."""
        self._counters.written_tokens += tokens
        if account is not None:
            account.written += tokens

    def end(self, account: PromptTokens | None) -> None:
        """End the span of a request that ends. Written tokens beyond the computed ones are those of its output."""
        if account is not None and account.span is not None:
            span, account.span = account.span, None
            computed = Counter[str]()
            for (reason, _), tokens in account.computed.items():
                computed[reason] += tokens
            written = min(account.written, computed.total())
            tracing.end_usage(span, account.tokens, account.cached, written, +computed)

    def _is_old(self, account: PromptTokens, key: RadixKey, tree: RadixTree, page: int, missed: Missed) -> bool:
        """Return True if a page, which storage had at the lookup and not at the read, is known to be too old."""
        prior = 0 if key.is_given else _last_id(tree, missed.node)
        *_, page_id = _ids_from(key, tree.page_bytes, prior, missed.pages, page + 1)
        found = self._ghosts.find(page_id)
        return found is not None and account.time_s - found.made_s >= self._max_age_s

    def _explain(
        self, account: PromptTokens, key: RadixKey, tree: RadixTree, start: int, end: int, missed: Missed
    ) -> None:
        """Explain the pages from `start` up to `end`, which neither memory nor storage has, as far as known."""
        size, answer, page, find = tree.page_size, missed.answer, start, self._ghosts.find
        known: Departure | None = None
        pages = 0  # of `known`
        prior = 0 if key.is_given or not self._pages_max else _last_id(tree, missed.node)
        if start > missed.pages and self._pages_max:  # storage has the pages between
            prior = [prior, *_ids_from(key, tree.page_bytes, prior, missed.pages, start)][-1]
        until = min(end, start + LOOKUPS_MAX) if self._pages_max else start
        for page_id in _ids_from(key, tree.page_bytes, prior, start, until):
            found = find(page_id)
            if found is not known:
                if known is not None:
                    self._add(account, known, pages * size, answer)
                elif found is not None:
                    account.age_s = account.time_s - found.time_s
                known, pages = found, 0
            if found is None:
                break
            page += 1
            pages += 1
        if known is not None:
            self._add(account, known, (end - page + pages) * size, answer)
        elif page < end:
            may_be_stored = not answer.is_whole and answer is not NO_STORAGE
            if may_be_stored and answer.kind[0] in {Reason.LATE, Reason.UNAVAILABLE}:
                account.add(answer.kind, (end - page) * size)
                return
            account.add((Reason.NEW, ""), (end - page) * size)
            is_near = page == missed.pages
            account.diverged_at = page * size + (_common_tokens(key, tree, missed.node, page) if is_near else 0)

    def _add(self, account: PromptTokens, departure: Departure, tokens: int, answer: StorageAnswer) -> None:
        kind = departure.reason, departure.detail
        if departure.epoch != self.epoch:
            kind = Reason.OTHER_WEIGHTS, ""
        elif departure.stored and answer.is_whole:
            is_old = account.time_s - departure.made_s >= self._max_age_s
            kind = (Reason.EXPIRED, "") if is_old else (Reason.EVICTED, "storage")
        elif departure.stored:
            kind = answer.kind
        account.add(kind, tokens)


def _ids_of(tree: RadixTree, node: Node) -> list[int]:
    """Return the identities of the pages of a node."""
    if tree.position_bytes == PAGE_KEY_BYTES:
        return key_ids(node.key)
    return page_ids(_last_id(tree, node.parent), node.key, tree.page_bytes)


def _last_id(tree: RadixTree, node: Node | None) -> int:
    """Return the identity of the last page of a node. The first call hashes it, and its ancestors."""
    unknown = list[Node]()
    while node is not None and node.last_id is None:
        unknown.append(node)
        node = node.parent
    last_id = 0 if node is None or node.last_id is None else node.last_id
    for part in reversed(unknown):
        seed = part.page_keys if not part.key else b""
        part.last_id = last_id = key_ids(seed)[0] if seed else last_page_id(last_id, part.key, tree.page_bytes)
    return last_id


def _ids_from(key: RadixKey, size: int, prior: int, start: int, end: int) -> Iterator[int]:
    """Yield the identities of the pages of `size` key bytes of a prompt from `start` up to `end`, after the page with
    the identity `prior`. Hashes a few at first: most prompts are new there."""
    count = 2
    while start < end:
        run = key.tokens[start * size : min(start + count, end) * size]
        yield from (ids := key_ids(run) if key.is_given else page_ids(prior, run, size))
        start, prior, count = start + count, ids[-1], 16 * count


def _common_tokens(key: RadixKey, tree: RadixTree, node: Node, page: int) -> int:
    """Return how many tokens of page `page`, which follows `node`, equal those of another prompt."""
    if key.is_given:
        return 0
    begin, common = page * tree.page_bytes, 0
    for first in islice(reversed(node.children), _NEIGHBOURS):
        if first.startswith(key.tokens[begin : begin + TOKEN_BYTES]):
            common = max(common, common_pages(first, key.tokens, begin, key.position_bytes))
    return common

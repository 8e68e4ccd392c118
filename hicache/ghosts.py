"""Why prompt tokens are computed: the reasons, and a memory of the pages that have left.

    prompt tokens = tokens from L1 + from L2 + from storage + computed, by `Reason`

A cache counts tokens and a daemon counts pages by these words. docs/explain.md has an example of each.
"""

from __future__ import annotations

import copy
import enum
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from xxhash import xxh64_intdigest

from .clock import SYSTEM_CLOCK, Clock
from .lazy import native, untrack


class Reason(enum.StrEnum):
    """The reason why a token was computed, or a page was not served."""

    NEW = "new"  # this process has not seen the prompt up to here, or has forgotten it
    EVICTED = "evicted"  # it was here; `DETAILS` has the tier that had it last
    NOT_STORED = "not_stored"  # it left memory, and storage did not get it
    LATE = "late"  # its lookup, read or verification had not ended in time
    NOT_WORTH = "not_worth"  # fetching it would have taken longer than computing it
    NO_ROOM = "no_room"  # the tier above had no room for it
    UNAVAILABLE = "unavailable"  # storage or a copy failed, or storage was paused
    DAMAGED = "damaged"  # it failed verification
    EXPIRED = "expired"  # storage has removed it after `max_age`
    OTHER_WEIGHTS = "other_weights"  # it was computed with other weights
    UNSHARED = "unshared"  # the engine did not want cached pages
    TAIL = "tail"  # the last token, and the end of the prompt that does not fill a page


# What a reason is divided into; the others have one empty detail. Of `late`: what had not ended; the turn of its
# prefetch had not come (`queue`). Of `not_stored`: the write policy did not want the
# page yet, break-even, a full queue, no room on L2, a full store, a store that was paused, a store that failed.
DETAILS: Mapping[Reason, tuple[str, ...]] = {
    Reason.EVICTED: ("device", "host", "storage", "cleared"),
    Reason.LATE: ("queue", "lookup", "read", "verification"),
    Reason.NOT_STORED: ("policy", "not_worth", "queue", "no_room", "full", "paused", "failed"),
}
Kind: TypeAlias = tuple[Reason, str]
KINDS: list[Kind] = [(reason, detail) for reason in Reason for detail in DETAILS.get(reason, ("",))]
# The optional native helper.
native_page_ids: Callable[[int, bytes | memoryview, int], list[int]] | None = native("page_ids")
native_last_page_id: Callable[[int, bytes | memoryview, int], int] | None = native("last_page_id")
# Pages of one turn with the lock of `PageAccounts`: about 0.3 ms.
_TURN_PAGES = 256
# An index forgets its oldest pages this share at a time.
_GENERATIONS = 8


class Departure(NamedTuple):
    """The end of a page in memory, at `time_s`. `stored`: storage had it then. It was made at `made_s`, with the
    weights of `epoch`."""

    reason: Reason
    detail: str
    time_s: float
    stored: bool = False
    made_s: float = math.inf
    epoch: int = 0


class GhostIndex:
    """The departures of about the last `pages_max` pages that left, 80 bytes each. No lock.

    Invariant: `_generations` are the newest first, each with `pages_max / 8` pages or one run more.
    """

    def __init__(self, pages_max: int) -> None:
        self._each = pages_max // _GENERATIONS
        self._generations: deque[dict[int, Departure]] = deque([{}], maxlen=_GENERATIONS)

    def note(self, pages: Iterable[int], departure: Departure) -> None:
        """Record that a run has left. `pages` are the identities of its pages."""
        newest = self._generations[0]
        if len(newest) >= self._each:
            if not self._each:
                return
            self._generations.appendleft(newest := {})
        newest.update(dict.fromkeys(pages, departure))
        untrack(departure)
        untrack(newest)

    def find(self, page: int) -> Departure | None:
        """Return the last departure of a page; None if it is not known."""
        for generation in self._generations:
            if (found := generation.get(page)) is not None:
                return found
        return None

    def __len__(self) -> int:
        return sum(map(len, self._generations))


def page_ids(prior: int, run: bytes | memoryview, page_bytes: int) -> list[int]:
    """Return the identity of each page of `run`, key bytes after the page with the identity `prior`: the XXH64 hash of
    the page, with the identity of the page before as the seed. Takes 0.07 us per page of 64 tokens, and 0.3 us without
    the native helper."""
    if native_page_ids is not None:
        return native_page_ids(prior, run, page_bytes)
    starts = range(0, len(run), page_bytes)
    return [prior := xxh64_intdigest(run[start : start + page_bytes], prior) for start in starts]


def last_page_id(prior: int, run: bytes | memoryview, page_bytes: int) -> int:
    """Return the last of `page_ids`, in 9 ns per page of one token; `prior` if there are none."""
    if native_last_page_id is not None:
        return native_last_page_id(prior, run, page_bytes)
    return [prior, *page_ids(prior, run, page_bytes)][-1]


def key_ids(page_keys: bytes) -> list[int]:
    """Return the identities of pages by their page keys, 32 bytes each."""
    found: list[int] = np.frombuffer(page_keys, "<u8")[::4].tolist()
    return found


class PageAccounts:
    """Counts the pages that callers of a store did not find, by kind; pages are known by their keys. Thread-safe.

    Remembers about `pages_max` pages that are not in memory. Those in storage are among them: if storage answers
    without one, it was evicted there, or is older than `max_age_s`.

    Locking design: `_lock` guards all fields, for a few hundred pages at a time, and no other lock is taken then.
    """

    def __init__(self, pages_max: int, max_age_s: float = math.inf, clock: Clock = SYSTEM_CLOCK) -> None:
        self._lock = threading.Lock()
        self._ghosts = GhostIndex(pages_max)
        self._max_age_s, self._clock = max_age_s, clock
        self._salt, self._cleared_s = 0, -math.inf
        self._missed: Counter[Kind] = Counter()

    def part(self, namespace: bytes) -> PageAccounts:
        """Return the counts of a namespace, which shares the memory of these."""
        made = copy.copy(self)
        made._salt, made._missed = key_ids(namespace)[0], Counter()
        return made

    def left(self, keys: Sequence[bytes], kind: Kind | None) -> None:
        """Record pages that are not in memory, and why they will be missed; None: storage has them."""
        departure = Departure(*(kind or (Reason.EVICTED, "storage")), self._clock(), stored=kind is None)
        for _, pages in self._turns(keys):
            self._ghosts.note(pages, departure)

    def evicted(self, keys: Sequence[bytes]) -> None:
        """Record pages that storage has removed, for `watch_evictions`."""
        now = Departure(Reason.EVICTED, "storage", self._clock(), stored=True)
        for _, pages in self._turns(keys):
            for page in pages:
                kind = self._kind(found if (found := self._ghosts.find(page)) and found.stored else now, None)
                self._ghosts.note([page], Departure(*kind, now.time_s))

    def cleared(self) -> None:
        """Record that storage was cleared."""
        self._cleared_s = self._clock()

    def missing(self, keys: Sequence[bytes], answer: Kind | None = None, run: Container[bytes] | None = None) -> None:
        """Count pages that were not found. `answer`: why storage did not answer; None: it does not have them. With
        `run`, the pages follow each other; those in it or in storage are there, and count as the page before them."""
        kind: Kind = (Reason.NEW, "")
        for turn, pages in self._turns(keys):
            for key, page in zip(turn, pages, strict=True):
                found = self._ghosts.find(page)
                if run is None or key is keys[0] or not (key in run or (found and found.stored)):
                    kind = self._kind(found, answer)
                self._missed[kind] += 1

    def counts(self) -> dict[Kind, int]:
        """Return the counts so far."""
        with self._lock:
            return dict(self._missed)

    def _kind(self, found: Departure | None, answer: Kind | None) -> Kind:
        if found and not found.stored:
            return found.reason, found.detail
        if answer or not found:
            return answer or (Reason.NEW, "")
        if found.time_s <= self._cleared_s:
            return Reason.EVICTED, "cleared"
        return (Reason.EXPIRED, "") if self._clock() - found.time_s >= self._max_age_s else (found.reason, found.detail)

    def _turns(self, keys: Sequence[bytes]) -> Iterator[tuple[Sequence[bytes], list[int]]]:
        """Yield pages and their identities, under the lock."""
        for start in range(0, len(keys), _TURN_PAGES):
            turn = keys[start : start + _TURN_PAGES]
            with self._lock:
                yield turn, [page ^ self._salt for page in key_ids(b"".join(turn))]

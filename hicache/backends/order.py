"""The order in which pages of chains are evicted: least recently used first, tails before heads.

With adaptive eviction, the pages that the store's tournament keeps are last.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, KeysView, Sequence
from dataclasses import dataclass

from ..errors import InvariantError
from ..tournament import PASSED_MAX, Tournament

# Visited in about 50 microseconds.
PAGES_AT_ONCE = 256
# Keys in each shadow: about 20 MB for all shadows.
SAMPLE_MAX = 1 << 15
# Requests that may have further batches: at least as many as use a store at the same time.
OPEN_MAX = 16
# A longer chain counts as several requests, for a bounded memory.
_CHAIN_MAX = 1 << 12


class AdaptivePages:
    """The tournament of a store for at most `pages` pages.

    The shadows of a store of more than `SAMPLE_MAX` pages have a sample: pages are chosen by their keys, and the
    capacity is as many times smaller (SHARDS: Waldspurger, Park, Garthwaite, Ahmad, FAST 2015). Each other page is
    kept with the nearest page of the sample before it in its chain. REQUIRES: the same lock for all calls.

    A request reads and writes its chain in batches. The shadows see them as one use when `OPEN_MAX` other requests have
    begun: otherwise they would evict the head of a chain before its tail, and count hits behind a hole.
    """

    def __init__(self, pages: int) -> None:
        bits = max(0, (pages - 1).bit_length() - (SAMPLE_MAX - 1).bit_length())
        self._others = (1 << bits) - 1
        self._tournament = Tournament(pages >> bits)
        self._salt = 0
        self.pages = pages
        # The uses of the latest requests, by their last page.
        self._open: dict[int, list[int]] = {}

    def of(self, namespace: bytes) -> AdaptivePages:
        """Return this tournament for the pages of one of several namespaces, where the same key is another page."""
        own = copy.copy(self)
        own._salt = self._number(namespace)
        return own

    def use(self, keys: Sequence[bytes], parent: bytes | None = None) -> None:
        """Record that a request reads, writes or touches these pages of one chain, head first, after `parent`. Pages
        that a read misses do not count: the request writes them later."""
        if not keys:
            return
        numbers = [] if parent is None else self._open.pop(self._number(parent), [])
        numbers += self._sample(keys)
        last = self._number(keys[-1])
        if last in self._open or len(self._open) >= OPEN_MAX:
            self._end(last if last in self._open else next(iter(self._open)))
        self._open[last] = numbers
        if len(numbers) >= _CHAIN_MAX:
            self._end(last)

    def use_prompt(self, keys: Sequence[bytes]) -> None:
        """As `use`, for all pages of a request at once."""
        if numbers := self._sample(keys):
            self._tournament.use(numbers)

    def _sample(self, keys: Sequence[bytes]) -> list[int]:
        return [number for key in keys if not (number := self._number(key)) & self._others]

    def _number(self, key: bytes) -> int:
        # The end of a page key is as random as a hash, and the same in each process.
        return int.from_bytes(key[-8:], "little") ^ self._salt

    def _end(self, last: int) -> None:
        if numbers := self._open.pop(last):
            self._tournament.use(numbers)

    def keeps(self, key: bytes, parent_of: Callable[[bytes], bytes | None]) -> bool:
        """Return True if the store should evict another page first. `parent_of` returns the key of the page before a
        page, or None."""
        if self._tournament.is_lru:
            return False
        page: bytes | None = key
        for _ in range(8 * (self._others + 1)):  # ends in a cycle, too, and rarely without a page of the sample
            if page is None:
                return False
            if not (number := self._number(page)) & self._others:
                return self._tournament.keeps(number)
            page = parent_of(page)
        return False


@dataclass(slots=True)
class _Link:
    parent: bytes | None
    used: int


class EvictionOrder:
    """Pages by their keys, the next victim first. Each operation on a page is O(1); a use also visits the ancestors of
    the pages. For one thread at a time.

    A use of a page is also a slightly later use of its ancestors. So the oldest page never has children, and the
    children of a page need not be known.

    Invariant, verified by `check`: after `use`, a page is older than its parent. Pages in a cycle, which engines do not
    make, are in any order and are evicted like others.

    `clock` counts uses; orders that share one can be compared. `adaptive` is for `victim`; the owner of this order
    tells it of uses, and may replace it.
    """

    def __init__(self, clock: Iterator[int] | None = None, adaptive: AdaptivePages | None = None) -> None:
        self._clock = itertools.count() if clock is None else clock
        self.adaptive = adaptive
        self._links: OrderedDict[bytes, _Link] = OrderedDict()
        # Pages that `victim` passed over in the newest batch, with their last uses.
        self._passed: dict[bytes, int] = {}
        self._batch = 0.0

    def now(self) -> int:
        """Return a time of the clock before all later uses."""
        return next(self._clock)

    def add(self, key: bytes, parent: bytes | None) -> None:
        """Add a page as the last victim. REQUIRES: it is new, and `use` follows after its whole batch was added."""
        self._links[key] = _Link(parent, next(self._clock))

    def use(self, keys: Sequence[bytes]) -> None:
        """Move these pages, head first, and their ancestors to the end of the order. Unknown keys are skipped."""
        for _ in self.uses(keys):
            pass

    def uses(self, keys: Sequence[bytes]) -> Iterator[None]:
        """As `use`, in parts of about `PAGES_AT_ONCE` pages. Between them other operations may run; then a page may
        come before its child until the end."""
        visited = itertools.count(1)
        seen: set[bytes] = set()
        walks: list[list[bytes]] = []
        for tail in reversed(keys):
            walk: list[bytes] = []
            key: bytes | None = tail
            while key is not None and key not in seen and (link := self._links.get(key)) is not None:
                seen.add(key)
                walk.append(key)
                key = link.parent
                if not next(visited) % PAGES_AT_ONCE:
                    yield
            walks.append(walk)
        # A walk ends at a page without a parent, or at a page that a previous walk has visited.
        for walk in reversed(walks):
            for key in walk:
                if key in self._links:  # not discarded in between
                    self._links[key].used = next(self._clock)
                    self._links.move_to_end(key)
                    self._passed.pop(key, None)
                if not next(visited) % PAGES_AT_ONCE:
                    yield

    def oldest(self) -> tuple[bytes, int] | None:
        """Return the key of the next victim and its last use; None without pages."""
        for key, link in self._links.items():
            return key, link.used
        return None

    def victim(self, before: float) -> bytes | None:
        """Return the next victim that was last used before `before`, the start of a batch; None without one. Pages that
        `adaptive` keeps move to the end of the order; they are victims if the batch has no others."""
        if before > self._batch:
            self._batch = before
            self._passed.clear()
        for passed in itertools.count():
            oldest = self.oldest()
            if oldest is None or oldest[1] >= before:
                break
            key = oldest[0]
            if self.adaptive is None or passed == PASSED_MAX or not self.adaptive.keeps(key, self.parent_of):
                return key
            self._pass_over(key)
        return next((key for key, used in self._passed.items() if used < before), None)

    def _pass_over(self, tail: bytes) -> None:
        """Move a page and its ancestors to the end, as if they were used."""
        walk: dict[bytes, None] = {}
        key: bytes | None = tail
        while key is not None and key not in walk and key in self._links:
            walk[key] = None
            key = self._links[key].parent
        for key in walk:
            link = self._links[key]
            self._passed[key] = self._passed.pop(key, link.used)  # the order of `_passed` is that of `_links`
            link.used = next(self._clock)
            self._links.move_to_end(key)

    def parent_of(self, key: bytes) -> bytes | None:
        """Return the page before a page; None without one, and for an unknown page."""
        link = self._links.get(key)
        return None if link is None else link.parent

    def keys(self) -> KeysView[bytes]:
        """Return the pages, the next victim first."""
        return self._links.keys()

    def discard(self, key: bytes) -> None:
        """Forget a page, if it is known."""
        self._links.pop(key, None)
        self._passed.pop(key, None)

    def check(self) -> None:
        """Raise InvariantError if a page is out of order. REQUIRES: `use` has followed each `add`."""
        uses = [link.used for link in self._links.values()]
        if uses != sorted(set(uses)):
            raise InvariantError("eviction order: the uses do not ascend")
        for key, link in self._links.items():
            above = None if link.parent is None else self._links.get(link.parent)
            if above is not None and above.used < link.used and not self._is_in_cycle(key):
                raise InvariantError("eviction order: a page comes before its child")

    def _is_in_cycle(self, key: bytes) -> bool:
        seen: set[bytes] = set()
        at: bytes | None = key
        while at is not None and at in self._links and at not in seen:
            seen.add(at)
            at = self._links[at].parent
        return at is not None and at in seen

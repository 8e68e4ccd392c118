"""Adaptive eviction from a store: which pages its tournament keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from ..tournament import Tournament

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

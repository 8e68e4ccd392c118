"""Adaptive eviction from a store: which pages its tournament keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from ..tournament import Tournament

# Keys in each shadow: about 20 MB for all shadows.
SAMPLE_MAX = 1 << 15


class AdaptivePages:
    """The tournament of a store for at most `pages` pages.

    The shadows of a store of more than `SAMPLE_MAX` pages have a sample: pages are chosen by their keys, and the
    capacity is as many times smaller (SHARDS: Waldspurger, Park, Garthwaite, Ahmad, FAST 2015). Each other page is
    kept with the nearest page of the sample before it in its chain. REQUIRES: the same lock for all calls.
    """

    def __init__(self, pages: int) -> None:
        bits = max(0, (pages - 1).bit_length() - (SAMPLE_MAX - 1).bit_length())
        self._others = (1 << bits) - 1
        self._tournament = Tournament(pages >> bits, uses_per_request=2)  # it reads, then writes
        self._salt = 0
        self.pages = pages

    def of(self, namespace: bytes) -> AdaptivePages:
        """Return this tournament for the pages of one of several namespaces, where the same key is another page."""
        own = copy.copy(self)
        own._salt = hash(namespace)
        return own

    def use(self, keys: Sequence[bytes]) -> None:
        """Record that a request reads, writes or touches these pages of one chain, head first; once per request. Pages
        that a read misses do not count: the request writes them later."""
        numbers = [number for key in keys if not (number := hash(key) ^ self._salt) & self._others]
        if numbers:
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
            if not (number := hash(page) ^ self._salt) & self._others:
                return self._tournament.keeps(number)
            page = parent_of(page)
        return False

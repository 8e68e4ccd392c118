"""UseMemory: counts how many requests have used a page, even after the page was evicted.

The tree counts the uses of its pages. Under `write_through_selective`, most pages are evicted from L1 before their
second use, and would never be copied and stored. So this memory keeps a few bytes for each page that a request computed
or reused, as an admission filter for storage (Einziger, Friedman, Manes: TinyLFU, 2017). A page that is computed again
starts with its earlier uses.

A use is a request. A request that is preempted and runs again, begins twice, or shares its pages in parts counts once
for each page: the memory keeps the last requests, with the number of their counted pages.

A page is identified by a hash of all tokens up to its end (a multilinear one, as in Lemire and Kaser: Strongly
universal string hashing is fast, 2014), so equal pages after different prefixes are different. It has 44 bits; a
collision costs one needless copy. It is the same in every process, so ranks decide identically.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ..keys import RadixKey
from ..radix import UseHistory

_Words: TypeAlias = npt.NDArray[np.uint64]

# 4 bytes per page: 4 MiB. A page is forgotten when another one takes its slot, so half of the pages are known after
# 700,000 other pages (45 million tokens in pages of 64). A forgotten page still counts if pages after it are known.
SLOTS_LOG2 = 20
# Requests that are recognised if they begin again: more than an engine has running and waiting.
REQUESTS_MAX = 8192
# A slot is 24 bits of the page's hash and 8 bits of count.
_COUNT_MAX = 255
_TAG = np.uint32(0xFFFFFF00)


@dataclass(slots=True)
class _Request:
    """A request: its key when it began, the number of its counted pages, and, after its first new page, whether its
    pages are stored at once.
    """

    key_bytes: int
    digest: int
    seed: bytes
    pages: int = 0
    at_once: bool | None = None

    def continues(self, key: RadixKey) -> bool:
        """Return True if `key` is the key of this request, with or without generated tokens."""
        head = key.tokens[: self.key_bytes]
        return key.seed == self.seed and len(head) == self.key_bytes and xxh3_64_intdigest(head) == self.digest


class UseMemory:
    """See the module's docstring. `page_bytes` are the key bytes of a page; the caller ignores counts above `uses_max`.
    New pages of the share `first_share` of requests count `uses_max` at once; the hash of the first of them decides.
    """

    def __init__(self, page_bytes: int, uses_max: int, first_share: float = 0.0) -> None:
        self._words = page_bytes // 4
        self._uses_max = min(uses_max, _COUNT_MAX)
        self._first_below = int(first_share * 2**64)
        # Odd numbers that look random and are the same in every process (SplitMix64).
        self._word_factors = _mixed(np.arange(1, self._words + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)
        self._slots = np.zeros(1 << SLOTS_LOG2, np.uint32)
        self._requests: dict[str, _Request] = {}  # by request id, the oldest first

    def note(self, rid: str | None, key: RadixKey, pages: int, *, begins: bool = False) -> UseHistory:
        """Count request `rid` as a user of those of the first `pages` pages of `key` for which it is not counted yet.

        None is a new request each time. So is a request that `begins` with the id of another and a key that does not
        continue the other's. Takes about 1 ns per token and 50 ns per page.
        """
        request = None if rid is None else self._requests.pop(rid, None)
        if request is None or (begins and not request.continues(key)):
            request = _Request(len(key.tokens), xxh3_64_intdigest(key.tokens), key.seed)
        if rid is not None:
            self._requests[rid] = request
            if len(self._requests) > REQUESTS_MAX:
                del self._requests[next(iter(self._requests))]
        known, hashes = request.pages, self._hashes(key, pages)
        request.pages = max(known, len(hashes))
        if not len(hashes):
            return UseHistory(known)
        counts = self._count(hashes, known)
        if request.at_once is None and counts[-1] == 1:
            request.at_once = int(hashes[np.argmax(counts == 1)]) < self._first_below
        return UseHistory(known, ((len(hashes), self._uses_max),) if request.at_once else _steps(counts))

    def clear(self) -> None:
        """Forget everything."""
        self._slots.fill(0)
        self._requests.clear()

    def _hashes(self, key: RadixKey, pages: int) -> _Words:
        """Return for each of the first `pages` pages of `key` a hash of all tokens up to its end."""
        words = np.frombuffer(key.tokens, "<u4", min(pages, len(key.tokens) // (4 * self._words)) * self._words)
        of_page = np.einsum("ij,j->i", words.reshape(-1, self._words), self._word_factors)
        of_page += _GOLDEN  # so that a page of zeros also changes the hash
        # Each page has its own factor, so that the order of pages matters.
        of_page *= np.full(len(of_page), _GOLDEN, np.uint64).cumprod(dtype=np.uint64)
        if key.seed:
            of_page[:1] += np.frombuffer(key.seed, "<u8", 1)
        return _mixed(of_page.cumsum(dtype=np.uint64))

    def _count(self, hashes: _Words, known_pages: int) -> npt.NDArray[np.uint32]:
        """Return the uses of each page, after one more for those after the first `known_pages`."""
        places = (hashes >> np.uint64(64 - SLOTS_LOG2)).astype(np.intp)
        tags = hashes.astype(np.uint32) & _TAG
        found = self._slots[places]
        counts = np.where((found ^ tags) <= _COUNT_MAX, found & np.uint32(_COUNT_MAX), np.uint32(0))
        counts[known_pages:] += np.uint32(1)
        # A request that used a page used all pages before it, even if their slots were taken since.
        counts = np.maximum.accumulate(counts[::-1])[::-1]
        counts = np.clip(counts, 1, self._uses_max)
        self._slots[places] = tags | counts
        return counts


def _steps(counts: npt.NDArray[np.uint32]) -> tuple[tuple[int, int], ...]:
    ends = [*(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(counts)]
    return tuple((end, int(counts[end - 1])) for end in ends)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: _Words) -> _Words:
    """Spread each value over all its bits (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

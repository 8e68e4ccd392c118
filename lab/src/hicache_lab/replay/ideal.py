"""The hits of two ideal caches of the same total size, to compare a replay with.

Both hold as many pages as L1, L2 and storage together, in one tier. They begin empty, serve one request after the other
in the order of arrival, and no operation takes time. They reuse the pages that the cache can reuse: whole pages of a
prompt without its last token, including pages that were computed as an output. Several processes on one store count as
one cache with the pages of all of them.

Both are computed from page keys without page bytes, in about a microsecond per page.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from hicache.keys import page_keys

from ..traces.tokens import TokenSource
from .job import ReplayJob
from .result import Ideal, ReplayResult
from .stand_in import Seeds, page_seeds


@dataclass(frozen=True, slots=True)
class Uses:
    """All pages of one request, root first, by their seeds; equal seeds mean equal pages. The first `reusable` pages
    are hits if they are cached; the other pages are always computed."""

    pages: Seeds
    reusable: int


def uses_of(job: ReplayJob, page_size: int, context_tokens: int) -> Iterator[Uses]:
    """Yield the pages of each request of the job's trace, of all its processes, in the order of arrival. Skips requests
    that do not fit into L1 (`context_tokens`). Raises InvalidInput as `read_trace` does."""
    source, copies = TokenSource(), job.processes if job.whole_trace_each else 1
    for request in job.requests_of_trace():
        taken = source.take(request)
        if request.kv_tokens > context_tokens:
            continue
        uses = Uses(page_seeds(page_keys(taken.kv_tokens, page_size)), (request.input_length - 1) // page_size)
        yield from itertools.repeat(uses, copies)


def lru_hits(requests: Sequence[Uses], pages: int | None) -> list[int]:
    """Return the hits of each request, in pages, of an LRU cache of `pages` pages (None: unlimited). The head of a
    prompt is always younger than its tail, so tails are evicted first and the cached pages of a prompt are a prefix of
    it."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = []
    for uses in requests:
        numbers = uses.pages.tolist()
        hits.append(sum(1 for _ in itertools.takewhile(cached.__contains__, numbers[: uses.reusable])))
        for page in reversed(numbers):
            cached[page] = None
            cached.move_to_end(page)
        while pages is not None and len(cached) > pages:
            cached.popitem(last=False)
    return hits


def optimal_hits(requests: Sequence[Uses], pages: int | None) -> list[int]:
    """Return the hits of each request, in pages, of a cache of `pages` pages that knows the future. It evicts the page
    with the furthest next use, which may be a new page (MIN: Belady, IBM Systems Journal 5(2), 1966).

    Keeping a page from one use to the next is an interval worth one hit, and up to `pages` intervals may overlap.
    Removing the longest interval of each excess leaves the most (Carlisle and Lloyd, Discrete Applied Mathematics 59,
    1995). It is an upper bound for a prefix tree. A tree reaches it, because a page is never used later than the pages
    below it, so the longest interval is that of a leaf. There is one exception: the last page of a prompt is always
    computed; a tree must keep it while it keeps pages below it, and this cache does not have to.
    """
    counts = [0] * len(requests)  # of the intervals in the cache, by the request that ends them
    total, latest = 0, list[int]()  # the ends of these, the furthest first, as a heap of negative numbers
    hits = []
    for number, uses in enumerate(_next_uses(requests)):
        hits.append(counts[number])
        total, counts[number] = total - counts[number], 0
        for end, count in uses:
            if counts[end] == 0:
                heappush(latest, -end)
            counts[end] += count
            total += count
        while pages is not None and total > pages:
            end = -latest[0]
            dropped = min(counts[end], total - pages)
            counts[end] -= dropped
            total -= dropped
            if counts[end] == 0:
                heappop(latest)
    return hits


def _next_uses(requests: Sequence[Uses]) -> Iterator[list[tuple[int, int]]]:
    """Yield for each request the later requests that use its pages next as hits, with the numbers of pages."""
    if not requests:
        return
    numbers = np.concatenate([uses.pages for uses in requests])
    lengths = [len(uses.pages) for uses in requests]
    user = np.repeat(np.arange(len(requests)), lengths)
    reusable = np.concatenate([np.arange(len(uses.pages)) < uses.reusable for uses in requests])
    # Sorted so that uses of the same page are adjacent, in the order of the requests.
    order = np.argsort(numbers, kind="stable")
    use, following = order[:-1], order[1:]
    again = (numbers[use] == numbers[following]) & reusable[following]
    end = np.full(len(numbers), -1)
    end[use[again]] = user[following[again]]
    for ends in np.split(end, np.cumsum(lengths)[:-1]):
        distinct, counts = np.unique(ends[ends >= 0], return_counts=True)
        yield list(zip(distinct.tolist(), counts.tolist(), strict=True))


def ideal_of(job: ReplayJob, result: ReplayResult) -> Ideal | None:
    """Return the ideal hits for a replay, or None if it was interrupted. Reads the trace again, which takes some
    seconds for ten thousand requests. Raises InvalidInput as `read_trace` does."""
    if not result.complete:
        return None
    setup = result.setup
    tier_pages = setup.processes * (setup.device_pages + setup.host_pages)
    unlimited = setup.storage is not None and setup.storage_pages is None
    pages = None if unlimited else tier_pages + (setup.storage_pages or 0)
    requests = list(uses_of(job, setup.page_size, setup.device_pages * setup.page_size))
    lru, optimum = (setup.page_size * sum(find(requests, pages)) for find in (lru_hits, optimal_hits))
    ours = sum(result.tokens.hits.values())
    return Ideal(
        pages=pages,
        lru_tokens=lru,
        optimum_tokens=optimum,
        share_of_lru=ours / lru if lru else None,
        share_of_optimum=ours / optimum if optimum else None,
    )

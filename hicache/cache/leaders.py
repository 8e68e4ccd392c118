"""Requests that follow the prefetch of another request, so that equal prompts that arrive together are read once.

A request follows the prefetch (its leader) that fetches the same pages for another request. When the fetch ends, its
result applies to a follower if a lookup for the follower would have the same result: then a fruitless lookup also ends
the follower's wait. Every other follower waits for its turn, and then matches, follows or leads by itself. After a
fruitless leader, a request follows only a leader that shares the page where the two prompts diverged, so followers that
differ there look up storage at the same time.

Why waits are not circular and lookups are bounded: a request does not follow and lead at the same time. A leader waits
for workers, or for room that other prefetches hold and free, never for a follower. For each `start` a request leads at
most `LOOKUPS_MAX` times: once, and again only if its prefix was evicted while it waited for room or was loaded in
parts. The count restarts when a part extends the arrived prefix, which is progress. A follow ends when that lead ends,
and a request follows a lead once. So n requests lead and follow a bounded number of times. Each step tries a waiting
request at most once, and a request waits at most for its `limit_s`.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from ..controller import LookupOperation, ReadOperation
from ..keys import RadixKey, common_pages
from ..radix import Match, RadixTree
from .prefetch_states import Fetch, FirstPages, Prefetch, Verdict


class Leaders:
    """The prefetches that may be followed, by their first pages. One that has followed a fruitless leader has two
    entries: also its first page alone, if no other prefetch leads that.
    """

    def __init__(self) -> None:
        self._prefetches: dict[FirstPages, Prefetch] = {}

    def find(self, key: RadixKey, tree: RadixTree, match: Match, divergence_end_page: int = 0) -> Prefetch | None:
        """Return the prefetch of another request that fetches the pages of `key` after `match`."""
        return self._prefetches.get(first_pages(key, tree, match, divergence_end_page))

    def add(self, prefetch: Prefetch, match: Match) -> None:
        """Let `prefetch`, which starts after `match`, lead. REQUIRES: `find` returned None."""
        key, fetch = prefetch.key, prefetch.current
        ends = (prefetch.divergence_end_page, 0)
        wanted = {first_pages(key, fetch.tree, match, end_page) for end_page in ends}
        fetch.first_pages = tuple(pages for pages in wanted if pages not in self._prefetches)
        self._prefetches.update(dict.fromkeys(fetch.first_pages, prefetch))

    def remove(self, fetch: Fetch) -> None:
        """End the lead of the prefetch with this fetch."""
        for pages in fetch.first_pages:
            del self._prefetches[pages]
        fetch.first_pages = ()


def first_pages(key: RadixKey, tree: RadixTree, match: Match, end_page: int) -> FirstPages:
    """Return the pages of `key` after `match`, up to `end_page` and at least one."""
    start, end = match.pages * tree.page_bytes, max(match.pages + 1, end_page) * tree.page_bytes
    return FirstPages(key.seed, match.node.id if match.pages else 0, match.pages, key.tokens[start:end])


def outcome(found: LookupOperation, page_size: int) -> str:
    """Return one of `LOOKUP_OUTCOMES`."""
    if found.failed:
        return "failed"
    if found.start_page + found.pages == found.key.pages(page_size):
        return "whole"
    if found.pages == len(found.keys):  # it was stopped before it reached a missing page
        return "unanswered"
    return "part" if found.pages else "miss"


def judge(fetch: Fetch, reason: str, page: int, *, has_ranks: bool) -> None:
    """Record a verdict for followers: the ended operation found too little. Not if it was stopped or failed, so that it
    says nothing about the content of storage.

    With ranks a failure counts as an empty result, because they agree only on the number of found pages.
    """
    operation = fetch.operation
    if isinstance(operation, ReadOperation):
        was_stopped = operation.seconds == 0.0  # a worker started it too late
    else:
        was_stopped = outcome(operation, fetch.tree.page_size) == "unanswered"
    if has_ranks or not (operation.failed or was_stopped):
        fetch.verdict = Verdict(reason, page)


def shares_verdict(follower: Prefetch, leader: Prefetch) -> bool:
    """Return True if a lookup for `follower` would have the result of the fruitless fetch of `leader`: both keys
    contain the first page that storage lacks, or are equal to the end. Otherwise record where the prompts diverge.
    A verdict on the pages behind those on the device is not shared with a request that has fewer there.
    """
    fetch = leader.current
    if fetch.verdict is None or follower.device_pages < leader.device_pages:
        return False
    page_size, end_page = fetch.tree.page_size, fetch.verdict.page + 1
    page_bytes, asked_page = fetch.tree.page_bytes, fetch.asked_page  # both keys agree before the lookup of the leader
    start = asked_page * page_bytes
    asked = leader.key.tokens[start : end_page * page_bytes]
    common = asked_page + common_pages(asked, follower.key.tokens, start, page_bytes)
    if common >= min(end_page, max(leader.key.pages(page_size), follower.key.pages(page_size))):
        return True
    follower.divergence_end_page = common + 1
    return False

"""HintFetches: prefetches that hints ask for, towards L2 or L1, now or shortly before the pages are needed.

No request waits for them, and they are not in the queue of requests. Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from ..controller import HiCacheController
from ..hints import Outcome, OutcomeStatus, Prefetch
from ..keys import RadixKey
from .device_tier import DeviceTier
from .host_tier import HostTier
from .prefetch import Prefetcher
from .timers import Timers
from .trees import Trees

# In flight at a time.
FETCHES_MAX = 16
# A prefetch starts when twice the time for fetching, and this, are left.
EARLY_S = 1.0


class HintFetches:
    """`_fetches` are those in flight by their id, with the key if the pages go on to L1."""

    def __init__(
        self, trees: Trees, host: HostTier, controller: HiCacheController, prefetcher: Prefetcher, timers: Timers
    ) -> None:
        self._trees = trees
        self._host = host
        self._now_s = controller.time_s
        self._config = controller.config.hints
        self._prefetcher = prefetcher
        self._timers = timers
        self._fetches: dict[str, RadixKey | None] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._fetches)

    def plan(self, hint: Prefetch, key: RadixKey, device: DeviceTier | None) -> Outcome:
        """Fetch the pages of `key`, now or later; `device` is L1, None if the engine owns it."""
        tree, device = self._trees.current, device if hint.destination == "device" else None
        found, pages = tree.peek(key), key.pages(tree.page_size)
        if (sum(found) if device is None else found.device_pages) == pages:
            return granted(pages)
        if hint.needed_in_s > self._config.ttl_max or self._timers.is_full:
            return outcome(OutcomeStatus.REJECTED, "needed_in_s is above hints.ttl_max, or too many hints wait")
        early_s = hint.needed_in_s - EARLY_S - 2 * self._host.fetch_s(pages)
        if early_s > 0:
            self._timers.at(self._now_s() + early_s, lambda: self._start(key, device))
            return outcome(OutcomeStatus.DEFERRED, "until shortly before the pages are needed", pages)
        return self._start(key, device)

    def _start(self, key: RadixKey, device: DeviceTier | None) -> Outcome:
        if len(self._fetches) >= FETCHES_MAX:
            return outcome(OutcomeStatus.REJECTED, f"{FETCHES_MAX} prefetches of hints are in flight")
        self._made += 1
        rid, tree, why = f"hint {self._made}", self._trees.current, ""
        pages, here = key.pages(tree.page_size), sum(tree.peek(key))
        if here < pages and not self._prefetcher.start(rid, key, is_request=False):
            self._prefetcher.abort(rid)
            why, pages = "storage is off, has too little, or reading it does not pay", here
            if device is None or not here:
                return outcome(OutcomeStatus.REJECTED, why)
        if device is not None and pages > (share := int(self._config.session_share * device.capacity)):
            key, pages, why = tree.head(key, share), share, "the limit is hints.session_share"
        self._fetches[rid] = None if device is None else key
        return granted(pages, why)

    def advance(self, device: DeviceTier | None) -> None:
        """Load what has arrived for L1, and forget what has ended."""
        for rid in [rid for rid in self._fetches if not self._prefetcher.is_active(rid)]:
            key = self._fetches.pop(rid)
            self._prefetcher.abort(rid)
            if key is not None and device is not None:
                tree = self._trees.current
                match = tree.match(key)
                tree.hold_host(match.node)
                device.promote(tree, match.node)
                tree.release_host(match.node)

    def clear(self) -> None:
        """Forget all: the prefetcher cancels them."""
        self._fetches.clear()


def outcome(status: OutcomeStatus, detail: str = "", pages: int = 0) -> Outcome:
    """Return an outcome without the names of its action."""
    return Outcome("", "", status, detail, pages)


def granted(pages: int, why: str = "", ttl_s: float | None = None, asked_s: float | None = None) -> Outcome:
    """Return the outcome for granted pages: clipped if there is a reason why not all, or if the time is shorter."""
    if not why and ttl_s is not None and asked_s is not None and ttl_s < asked_s:
        why = "the limit is hints.ttl_max"
    return Outcome("", "", OutcomeStatus.CLIPPED if why else OutcomeStatus.ACCEPTED, why, pages, ttl_s)

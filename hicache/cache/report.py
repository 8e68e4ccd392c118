"""The log lines of a cache: at its start and end, after work was dropped, and for new weights.

Locking design: a `DropLog` compares counts on its own thread. The scheduler thread only counts.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..backends.base import Direction, SetOutcome
from ..backends.compose import CopyStatistics
from ..backends.guard import Refusal
from ..backends.storage import StoreStatistics
from ..background import BackgroundTask
from ..backoff import Backoff
from ..clock import SYSTEM_CLOCK, Clock
from ..config import HiCacheConfig
from ..config.storage import AnyStorage, parts_of
from ..keys import Namespace
from ..units import format_size
from .statistics import CacheStatistics

logger = logging.getLogger(__name__)

# The time between two comparisons, each of at most one line. While work is dropped each time, it doubles up to the
# second value: an overload of an hour makes about 15 lines.
PERIOD_S = 10.0
PERIOD_S_MAX = 300.0
# The counters of work that a limit has dropped (not work that would not have paid), in words, with the limit's entry in
# the configuration.
LIMITS: Mapping[str, str] = {
    "backup_no_host_room": "backups found no room on the host (host.size)",
    "backup_without_slots": "backups found pages without slots (larger trailing pools, or share pages sooner)",
    "pin_share": "pins were refused (pin_host_share)",
    "prefetch_host_share": "prefetches found their share of the host full (prefetch.host_share)",
    "prefetch_no_host_room": "prefetches found no room on the host (host.size)",
    "prefetch_queued": "prefetches were still waiting when their requests began (a slow store)",
    "prefetch_timeout": "prefetches took too long (prefetch.timeout_base, or a slow store)",
    "prefetch_unanswered": "lookups took too long (transfer.lookup_workers, prefetch.timeout_base, or a slow store)",
    "store_gave_way": "stores were dropped to free host memory (host.size, or a slow store)",
    "store_incomplete": "stores were incomplete (the store is full, slow or down)",
    "write_back_dropped": "pages were dropped before they could be written back (host.size)",
    "queue backup": "stores: backup queue full (transfer.store_host_share, or a slow store)",
    "queue load": "loads: load queue full (a slow bus)",
    "queue prefetch": "prefetches: too many were waiting (a slow store)",
    "queue write": "backups: write queue full (a slow bus)",
}


def stores_of(storage: AnyStorage | None) -> str:
    """Return the stores of a configuration as text, such as `levels (file 10 GiB, s3)`."""
    if storage is None:
        return "none"
    parts = parts_of(storage.options)
    if parts:
        inner = ", ".join(f"{part.name + '=' if part.name else ''}{stores_of(part.storage)}" for part in parts)
        return f"{storage.type} ({inner})"
    options: object = storage.options
    limit = options.get("capacity_bytes") if isinstance(options, Mapping) else getattr(options, "capacity", None)
    return f"{storage.type} {format_size(limit)}" if isinstance(limit, int) else storage.type


def log_end(took_s: float, unsaved_pages: int, *, everything_ended: bool, is_abandoned: bool) -> None:
    """Log that a cache was closed; `is_abandoned`: not by its engine."""
    if is_abandoned:
        logger.warning("cache was not closed by its engine; closed at its end, after %.1f s: %d pages are lost. Call "
                       "close(), or use the cache in a with statement", took_s, unsaved_pages)
    elif everything_ended and unsaved_pages:
        logger.warning("cache closed after %.1f s; %d pages are lost, storage did not take them (transfer."
                       "shutdown_deadline, host.size, or a full, slow or dead store)",
                       took_s, unsaved_pages)
    elif everything_ended:
        logger.info("cache closed after %.1f s; all queued work has ended", took_s)
    else:
        logger.warning("cache closed after %.1f s with unfinished operations: %d pages were not stored, or a call "
                       "hangs (transfer.shutdown_deadline)", took_s, unsaved_pages)


def dropped(state: CacheStatistics) -> Counter[str]:
    """Return how often each limit, in words, has dropped work since the start."""
    counts = {**state.skipped, **{f"queue {queue}": count for queue, count in state.controller.refused.items()}}
    found = Counter({reason: counts.get(reason, 0) for reason in LIMITS})
    found.update(dropped_by_stores(state.controller.backends, state.controller.copies))
    if state.publisher is not None:
        found["times KV events were dropped (events.buffer)"] += state.publisher.gaps
    return found


def dropped_by_stores(stores: Iterable[StoreStatistics], copies: Mapping[str, CopyStatistics]) -> Counter[str]:
    """Return how often limits of single stores and of their copies have dropped work."""
    found: Counter[str] = Counter()
    for part, of_part in copies.items():
        found[f"pages were not copied to {part} (cascade_bytes_max, or a slow store)"] += of_part.dropped
    for store in stores:
        rejected = store.statistics.sets.get(SetOutcome.REJECTED, 0)
        found[f"pages were rejected by {store.name}, which had no room for them (its line says why)"] += rejected
        if store.guard is not None:
            busy = sum(store.guard.refused.get((way, Refusal.BUSY), 0) for way in Direction)
            found[f"calls to {store.name} found no room in flight (storage.guard.in_flight, or a slow store)"] += busy
    return found


@dataclass(eq=False, repr=False)
class DropLog:
    """Logs a warning if limits have dropped work since the last comparison, with `counts` and `words` by limit."""

    counts: Callable[[], Counter[str]]
    words: Mapping[str, str] = field(default_factory=lambda: LIMITS)
    period_s: float = PERIOD_S
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.period_s, PERIOD_S_MAX)
        self._seen: Counter[str] = Counter()
        self._looked_s = self.clock()
        self._task = BackgroundTask("drop-log", self._look, clock=self.clock)
        self._task.wake(self._looked_s + self.period_s)

    def _look(self) -> float:
        found, time_s = self.counts(), self.clock()
        new, since_s = found - self._seen, time_s - self._looked_s
        self._seen, self._looked_s = found, time_s
        if not new:
            self._backoff.reset()
            return time_s + self.period_s
        drops = "; ".join(f"{count:,} {self.words.get(reason, reason)}" for reason, count in new.most_common())
        logger.warning("dropped in the last %.0f s: %s", since_s, drops)
        return time_s + self._backoff.next_s()

    def close(self) -> None:
        """End the thread, after a last comparison."""
        if self._task.close(1.0):
            self._look()


class CacheLog(DropLog):
    """The log of one cache, whose bound method is `statistics`. Its thread does not keep the cache alive."""

    def __init__(
        self, config: HiCacheConfig, namespace: Namespace, statistics: Callable[[], CacheStatistics], clock: Clock
    ) -> None:
        self._state = state = statistics()
        tiers = [
            f"{name} {tier.capacity_pages:,} pages ({format_size(tier.capacity_pages * tier.page_bytes)})"
            for name, tier in (("L1", state.device), ("L2", state.host))
            if tier.capacity_pages
        ]
        logger.info(
            "cache started: %s of %d tokens, storage %s, %s; namespace %s, %r, weights epoch %d", ", ".join(tiers),
            config.page_size, stores_of(config.storage), config.write_policy, namespace.digest.hex()[:8],
            namespace.name, state.weights_epoch,
        )
        self._statistics = weakref.WeakMethod(statistics)
        super().__init__(lambda: dropped(self._state), clock=clock)

    def _look(self) -> float:
        if (statistics := self._statistics()) is not None:
            before, self._state = self._state, statistics()
            if self._state.weights_epoch != before.weights_epoch:
                logger.info("new weights: epoch %d replaces %d; the cache starts empty, and storage is reopened",
                            self._state.weights_epoch, before.weights_epoch)
        return super()._look()

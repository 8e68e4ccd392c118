"""What a cache tells its log: a line at the start, and a line when limits have dropped work.

Locking design: the line about dropped work is written on a thread of its own, which compares snapshots of
`statistics()`. The scheduler thread only counts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from ..background import BackgroundTask
from ..config import HiCacheConfig
from ..config.storage import AnyStorage, parts_of
from ..keys import Namespace
from ..units import format_size
from .statistics import CacheStatistics

logger = logging.getLogger(__name__)

# How often the counts are compared: one line each time at most.
PERIOD_S = 10.0
# Reasons of `CacheStatistics.skipped` that say that a limit has dropped work, and not that it would not have paid.
LIMITS = (
    "backup_no_host_room", "no_device_room", "pin_share", "prefetch_host_share", "prefetch_no_host_room",
    "prefetch_timeout", "store_gave_way", "store_incomplete", "write_back_dropped",
)  # fmt: skip


def stores_of(storage: AnyStorage | None) -> str:
    """Return the stores of a configuration in words, such as `levels (file, s3)`."""
    if storage is None:
        return "none"
    parts = parts_of(storage.options)
    inner = ", ".join(part.name or stores_of(part.storage) for part in parts)
    return f"{storage.type} ({inner})" if parts else storage.type


def log_start(config: HiCacheConfig, namespace: Namespace, state: CacheStatistics) -> None:
    """Write what the cache is made of: tiers with their sizes, namespace, storage."""
    tiers = [
        f"{name} {tier.capacity_pages:,} pages ({format_size(tier.capacity_pages * tier.page_bytes)})"
        for name, tier in (("L1", state.device), ("L2", state.host))
        if tier.capacity_pages
    ]
    logger.info(
        "cache started: %s of %d tokens, storage %s, %s; namespace %s, %r, weights epoch %d", ", ".join(tiers),
        config.page_size, stores_of(config.storage), config.write_policy, namespace.digest.hex()[:8],
        namespace.label or "no label", state.weights_epoch,
    )  # fmt: skip


def dropped(state: CacheStatistics) -> Counter[str]:
    """Return how often each limit has dropped work since the start."""
    found = Counter({reason: state.skipped[reason] for reason in LIMITS})
    found.update({f"queue {queue}": count for queue, count in state.controller.refused.items()})
    return found


class DropLog:
    """Writes a warning when limits have dropped work since the last look, with counts by reason."""

    def __init__(self, statistics: Callable[[], CacheStatistics], period_s: float = PERIOD_S) -> None:
        self._statistics = statistics
        self._period_s = period_s
        self._seen: Counter[str] = Counter()
        self._task = BackgroundTask("drop-log", self._look)
        self._task.wake(time.monotonic() + period_s)

    def _look(self) -> float:
        found = dropped(self._statistics())
        new = found - self._seen
        self._seen = found
        if new:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in new.most_common())
            logger.warning("limits dropped work in the last %.0f s, requests are slower for it: %s", self._period_s,
                           reasons)  # fmt: skip
        return time.monotonic() + self._period_s

    def close(self) -> None:
        """End the thread."""
        self._task.close(1.0)

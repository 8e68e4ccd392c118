"""The counters of a cache, totals since the start, and their snapshots for the exporter, the command line and tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..errors import InvariantError
from ..ghosts import Kind

# Readers of snapshots, such as the exporter, do not need PyTorch.
if TYPE_CHECKING:
    from ..controller import ControllerStatistics
    from ..events import PublisherStatistics, StreamStatistics
    from ..histogram import HistogramStatistics
    from ..tiers import PagePool
    from .break_even import BreakEvenStatistics

# The reasons for skipped work, with what happened; each is an entry of `CacheCounters.skipped`.
SKIP_REASONS: Mapping[str, str] = {
    "backup_failed": "a backup to L2 failed",
    "backup_no_host_room": "no backup to L2: no room",
    "backup_prefix_not_on_host": "no backup to L2: the prefix is not there",
    "backup_without_slots": "no backup to L2: pages had lost their slot of a trailing pool",
    "load_does_not_pay": "no load from L2: computing was faster",
    "load_failed": "a load from L2 failed",
    "load_not_verified": "no load from L2: the frames were not verified (`integrity.verify: load`)",
    "load_too_short": "no load from L2: too short to pay",
    "no_device_room": "a request waited: no room on L1",
    "no_slots": "a request or its next chunk waited: the slots of a trailing pool were in use",
    "pin_gave_way": "a pin ended: L1 had no other room for a request of the engine",
    "pin_share": "a pin was refused: pins already use their share of L2",
    "prefetch_does_not_pay": "nothing read: computing was faster, or had to be measured",
    "prefetch_failed": "a prefetch failed",
    "prefetch_hit_too_short": "nothing read: storage had too little",
    "prefetch_host_share": "nothing read: other prefetches used their whole share of L2",
    "prefetch_no_host_room": "nothing read: no room on L2",
    "prefetch_paused": "no storage lookup: storage was failing when the request began",
    "prefetch_queued": "no storage lookup: the request began before its turn",
    "prefetch_timeout": "the request began before all found pages had been read",
    "prefetch_too_short": "no storage lookup: too little is missing",
    "prefetch_unanswered": "the request began before storage had answered the lookup",
    "store_does_not_pay": "not stored: reading it back would not pay",
    "store_gave_way": "not stored: the page was waiting when L2 had no other room",
    "store_incomplete": "storage did not take all pages",
    "store_paused": "nothing stored: storage has just failed",
    "touch_dropped": "storage not notified of a use: too many notifications were waiting",
    "write_back_dropped": "pages dropped: no room on L2 to write them back",
}

# The outcomes of lookups in storage; each is an entry of `CacheCounters.lookups`.
LOOKUP_OUTCOMES = ("whole", "part", "miss", "unanswered", "failed")
# The reasons for which a session released its KV: the keys of `SessionStatistics.released`.
RELEASE_REASONS = ("closed", "diverged", "dropped", "expired", "not_shared", "pressure")


@dataclass(slots=True, eq=False)
class CacheCounters:
    """Counters of one cache; see `CacheStatistics`. Owned by the scheduler thread; no lock."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    computed_tokens: Counter[Kind] = field(default_factory=Counter)  # by reason and detail
    written_tokens: int = 0
    evicted_pages: Counter[str] = field(default_factory=Counter)
    verified_pages: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SKIP_REASONS, 0))
    lookups: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOOKUP_OUTCOMES, 0))
    hints: Counter[tuple[str, str]] = field(default_factory=Counter)  # by action and outcome
    lost_pages: int = 0

    def check(self) -> None:
        """Raises InvariantError unless each prompt token has one source."""
        if self.prompt_tokens != self.hit_tokens.total() + self.computed_tokens.total():
            raise InvariantError(f"tokens: {self.prompt_tokens} of prompts, {self.hit_tokens}, {self.computed_tokens}")

    def totals(self) -> dict[str, Any]:
        """Return a copy of all counters, by their names in `CacheStatistics`."""
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values}


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Memory of L1 or L2 now, in pages. `cached_pages` are held by nodes, and `evictable_pages` of them can be evicted
    now. The other used pages are reserved or belong to requests.
    """

    capacity_pages: int
    free_pages: int
    cached_pages: int
    evictable_pages: int
    page_bytes: int

    @classmethod
    def of(cls, pool: PagePool, cached_pages: int, evictable_pages: int, page_bytes: int) -> TierStatistics:
        """The statistics of a tier whose pages are those of `pool`."""
        return cls(pool.capacity, pool.free_pages, cached_pages, evictable_pages, page_bytes)


# The statistics of a tier that a cache does not have.
NO_TIER = TierStatistics(capacity_pages=0, free_pages=0, cached_pages=0, evictable_pages=0, page_bytes=0)


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """`prompt_tokens` is the sum of `hit_tokens` by tier (device, host, storage) and `computed_tokens` by reason and
    detail (`ghosts.KINDS`). `written_tokens` entered the cache, those of outputs included. `evicted_pages` are by tier
    (device, host). `device` or `host` is `NO_TIER` if the cache does not have that tier.

    `skipped` counts, by reason, work that the cache decided not to do or could not do: a slower request, never an
    error. `events` and `publisher` are None if events are not recorded, or not published.

    `lookups` counts lookups in storage by outcome. `verified_pages` counts the pages that were verified on L2, by
    outcome (sound, damaged, untagged). `prefetch_wait` has the waiting times of requests for their prefetch, `step` the
    times of `poll`; None for a cache that has neither. `prefetches_waiting` wait now: for their turn, for the prefetch
    of another request, or for room on L2. `sessions` is None for a cache without sessions. `lost_pages` counted as
    stored and turned out to be missing. `unsaved_pages` are those that `close` was to store and could not, 0 before it.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: Mapping[str, int]
    computed_tokens: Mapping[Kind, int]
    written_tokens: int
    evicted_pages: Mapping[str, int]
    skipped: Mapping[str, int]
    nodes: int
    pinned_pages: int
    weights_epoch: int
    device: TierStatistics
    host: TierStatistics
    break_even: BreakEvenStatistics
    controller: ControllerStatistics
    events: StreamStatistics | None
    publisher: PublisherStatistics | None = None
    lookups: Mapping[str, int] = field(default_factory=dict)
    verified_pages: Mapping[str, int] = field(default_factory=dict)
    prefetch_wait: HistogramStatistics | None = None
    prefetches_waiting: int = 0
    step: HistogramStatistics | None = None
    sessions: SessionStatistics | None = None
    lost_pages: int = 0
    unsaved_pages: int = 0
    hints: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """Current sessions and pages; the other fields are totals since the start.

    `held_pages` are held between turns, including those shared with the tree; `own_pages` are the partial ones among
    them. `continued_turns` continued the previous turn, and `tail_tokens` are the tokens that this saved in addition to
    the tree. `released` counts by reason how often KV was released.
    """

    open: int
    holding: int
    running: int
    held_pages: int
    own_pages: int
    turns: int
    continued_turns: int
    tail_tokens: int
    released: Mapping[str, int]

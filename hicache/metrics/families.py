"""The metrics of a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client.registry import Collector

from .. import ghosts
from ..cache.statistics import LOOKUP_OUTCOMES, RELEASE_REASONS, CacheStatistics, TierStatistics
from ..hints import KINDS, OutcomeStatus
from .spec import MetricSpec, SnapshotCollector, Table, Values
from .stores import copy_metrics, store_table

# Of any other action, the type is `unknown`.
HINT_OUTCOMES = [(kind, outcome.value) for kind in (*KINDS, "unknown") for outcome in OutcomeStatus]
_TIERS = ("device", "host", "storage")
# The queues with limits, and the pools of workers, of a controller. It is not imported, because it needs PyTorch, which
# a daemon does not have.
_BOUNDED_QUEUES = ("write", "load", "prefetch", "backup")
_WORKERS = ("prefetch", "io", "backup")


def _known(**rates: int) -> Values:
    """Return rates by tier without the unknown ones, which are 0."""
    return {tier: rate for tier, rate in rates.items() if rate}


def _tiers(pages: Callable[[TierStatistics], int]) -> Callable[[CacheStatistics], Values]:
    """Return bytes by tier for a number of pages."""
    return lambda s: {"device": pages(s.device) * s.device.page_bytes, "host": pages(s.host) * s.host.page_bytes}


def _worker_errors(errors: Mapping[str, int]) -> Values:
    """Return exceptions by pool of workers; the log has their classes."""
    found = dict.fromkeys(_WORKERS, 0)
    for name, count in errors.items():
        found[name.partition(":")[0]] += count
    return found


def _sources(s: CacheStatistics) -> Values:
    """Return prompt tokens by source, reason and detail."""
    hits = {(tier, "", ""): s.hit_tokens.get(tier, 0) for tier in _TIERS}
    return hits | {("computed", *kind): s.computed_tokens.get(kind, 0) for kind in ghosts.KINDS}


_COPIES: tuple[MetricSpec[CacheStatistics], ...] = copy_metrics(
    lambda s: s.controller.copies,
    "dropped: storage.options.cascade_bytes_max was full. failed: see backend_errors_total of that part and of the "
    "part above, which may also have evicted the pages.",
    "Stays high: the level below is slower than the writes.",
)

CACHE_METRICS: tuple[MetricSpec[CacheStatistics], ...] = (
    MetricSpec("requests_total", "Requests that have begun.", (), lambda s: s.requests,
               "Compare replicas behind one router."),
    MetricSpec("prompt_tokens_total", "Prompt tokens of those requests, by source; computed ones also by reason and "
               "detail.", ("source", "reason", "detail"), _sources,
               "The sum over all labels is the denominator of each hit rate. docs/explain.md has the reasons, and what "
               "to do about each."),
    MetricSpec("written_tokens_total", "Tokens whose KV entered the cache, those of outputs included.", (),
               lambda s: s.written_tokens,
               "A bill has tokens read (hit_tokens_total) and tokens written."),
    MetricSpec("hit_tokens_total", "Prompt tokens whose KV was reused, by source tier.", ("tier",),
               lambda s: {tier: s.hit_tokens.get(tier, 0) for tier in _TIERS},
               "Divided by prompt_tokens_total it is the hit rate by tier. Many from storage and few from the host: "
               "L2 is too small. A fall after a deployment: the namespace has changed."),
    MetricSpec("evicted_pages_total", "Pages evicted from a tier.", ("tier",),
               lambda s: {tier: s.evicted_pages.get(tier, 0) for tier in ("device", "host")},
               "Normal for a full tier. Rises while the hit rate falls: the tier is too small."),
    MetricSpec("verified_pages_total", "Pages verified on L2, by outcome.", ("outcome",),
               lambda s: {outcome: s.verified_pages.get(outcome, 0) for outcome in ("sound", "damaged", "untagged")},
               "Only with integrity.verify: load or scrub_rate. damaged: host memory is faulty, or a program "
               "overwrites it. untagged: pages not sealed yet, which are loaded unverified."),
    MetricSpec("touched_pages_total", "Stored pages reported to storage as used, after hits on L1 or L2.", (),
               lambda s: s.controller.touched_pages,
               "0 while prompts hit: storage evicts hot pages."),
    MetricSpec("lost_pages_total", "Pages on L1 or L2 that storage has lost.", (),
               lambda s: s.lost_pages,
               "Rises steadily: storage is smaller than the working set."),
    MetricSpec("skipped_total", "Work that the cache skipped, by reason; each makes a request slower.", ("reason",),
               lambda s: s.skipped,
               "The reasons are below. ..._no_host_room, prefetch_host_share: host.size is too small. ..._paused: "
               "storage fails. prefetch_timeout, prefetch_unanswered, prefetch_queued: storage is slow."),
    MetricSpec("break_even_decisions_total", "Decisions to fetch or store (or not: too_slow, calibration), by reason.",
               ("route", "reason"), lambda s: s.break_even.decisions,
               "Many too_slow: computing is faster than fetching from the tier, even if waiting for the device counts. "
               "partly: only the first pages are fetched, because more would make the request later."),
    MetricSpec("break_even_prefill_tokens_per_second", "Prefill speed used in decisions; absent if unknown.", (),
               lambda s: s.break_even.rates.prefill_tokens_per_s or None,
               "Until the engine reports forwards, every hit is fetched."),
    MetricSpec("break_even_bandwidth_bytes_per_second", "Read speed of a tier used in decisions; absent if unknown.",
               ("tier",), lambda s: _known(host=s.break_even.rates.host_bytes_per_s,
                                           storage=s.break_even.rates.storage_bytes_per_s),
               "Compare it with the bandwidth of the link or disk."),
    MetricSpec("break_even_operations_per_second", "Inverse of the fixed time of a copy from a tier.", ("tier",),
               lambda s: _known(host=s.break_even.rates.host_operations_per_s,
                                storage=s.break_even.rates.storage_operations_per_s),
               "Low: each fetch has a long fixed time, so only long hits are fetched."),
    MetricSpec("tier_capacity_bytes", "Memory of a tier.", ("tier",), _tiers(lambda tier: tier.capacity_pages),
               "The result of device.size and host.size."),
    MetricSpec("tier_free_bytes", "Free memory of a tier.", ("tier",),
               _tiers(lambda tier: tier.free_pages),
               "0 is normal for a warm cache."),
    MetricSpec("tier_cached_bytes", "Memory of a tier used by cached pages.", ("tier",),
               _tiers(lambda tier: tier.cached_pages),
               "Falls under load: running requests use the tier."),
    MetricSpec("tier_evictable_bytes", "Memory of a tier whose pages can be evicted now.", ("tier",),
               _tiers(lambda tier: tier.evictable_pages),
               "Near 0 with free at 0: requests wait for room. Run fewer requests, or enlarge the tier."),
    MetricSpec("pinned_bytes", "Host memory reserved for pinned prefixes.", (),
               lambda s: s.pinned_pages * s.host.page_bytes,
               "At pin_host_share further pins are rejected."),
    MetricSpec("nodes", "Nodes of the radix tree.", (), lambda s: s.nodes,
               "Many short nodes: page_size may be too small."),
    MetricSpec("weights_epoch", "Epoch of the weights whose pages are served.", (), lambda s: s.weights_epoch,
               "Differs between replicas only during a rollout."),
    MetricSpec("refused_operations_total", "Operations rejected by a limit, by queue.", ("queue",),
               lambda s: {queue: s.controller.refused.get(queue, 0) for queue in _BOUNDED_QUEUES},
               "The tier behind it is too slow, or for `backup` transfer.store_host_share too small."),
    MetricSpec("moved_pages_total", "Pages moved between tiers.", ("direction",),
               lambda s: {"device_to_host": s.controller.written_pages, "host_to_device": s.controller.loaded_pages,
                          "storage_to_host": s.controller.prefetched_pages,
                          "host_to_storage": s.controller.stored_pages},
               "Multiplied by the page size it is the traffic between tiers."),
    MetricSpec("queued_operations", "Operations queued or in flight.", ("queue",),
               lambda s: {queue: getattr(s.controller.queues, queue)
                          for queue in ("write", "load", "prefetch", "reads", "backup")},
               "Stays high: the tier behind it is the bottleneck."),
    MetricSpec("worker_errors_total", "Exceptions in worker threads.", ("worker",),
               lambda s: _worker_errors(s.controller.worker_errors),
               "Should stay at 0: a bug of HiCache or your backend. The log has the traceback."),
    MetricSpec("worker_restarts_total", "Workers that died and were replaced.", (),
               lambda s: s.controller.worker_restarts,
               "Should stay at 0. The log has the reason."),
    MetricSpec("storage_open_failures_total", "Failed attempts to open storage.", (),
               lambda s: s.controller.open_failures,
               "At the start or for new weights. The log has the error."),
    MetricSpec("workers_alive", "Workers that run and are not stuck.", (), lambda s: s.controller.workers_alive,
               "Lower than at the start: threads died or hang."),
    MetricSpec("events_total", "KV events recorded.", (), lambda s: None if s.events is None else s.events.events,
               "The rate is the load of routers."),
    MetricSpec("event_snapshots_total", "Snapshots of the tree made for readers that missed events.", (),
               lambda s: None if s.events is None else s.events.snapshots,
               "Frequent: subscribers lose events; see event_slow_batches_total."),
    MetricSpec("event_publisher_alive", "1 while the publisher of KV events runs.", (),
               lambda s: None if s.publisher is None else s.publisher.alive,
               "0: routers do not see this cache; the log has the reason."),
    MetricSpec("event_slow_batches_total", "Batches missed by a subscriber that reads too slowly.", (),
               lambda s: None if s.publisher is None else s.publisher.slow,
               "A subscriber does not keep up."),
    MetricSpec("event_gaps_total", "Times when events were dropped before they were published.", (),
               lambda s: None if s.publisher is None else s.publisher.gaps,
               "The publisher has too little processor time, or pages are small."),
    MetricSpec("event_refused_total", "Connections with unlisted keys, and invalid requests.", (),
               lambda s: None if s.publisher is None else s.publisher.refused,
               "A client connects without a listed key, or a subscriber has an old key."),
    MetricSpec("event_publisher_errors_total", "Unexpected errors of the publisher.", (),
               lambda s: None if s.publisher is None else sum(s.publisher.errors.values()),
               "Should stay at 0; the log has the traceback."),
    *_COPIES,
    MetricSpec("scheduler_step_seconds", "Time of `poll` on the engine's scheduler, in each step.", (),
               lambda s: s.step,
               "Microseconds, more when many operations end at once. With ranks it includes the wait for the slowest.",
               True),
    MetricSpec("prefetch_wait_seconds", "Time that requests which could run have waited for their prefetch.", (),
               lambda s: s.prefetch_wait,
               "Near prefetch.timeout_base: storage is slow; a lower limit, or policy best_effort, trades hits for "
               "time.", True),
    MetricSpec("waiting_prefetches",
               "Prefetches waiting for their turn, for another request's prefetch, or for room.", (),
               lambda s: s.prefetches_waiting,
               "Normal in a burst. Stays high: storage is slower than the arrival of requests, or prefetch.host_share "
               "or host.size is too small."),
    MetricSpec("lookups_total", "Lookups in storage, by how many of the missing pages they found.",
               ("outcome",), lambda s: {found: s.lookups.get(found, 0) for found in LOOKUP_OUTCOMES},
               "failed: see worker_errors_total and backend_errors_total. unanswered: the request began first; more "
               "transfer.lookup_workers help."),
    MetricSpec("hints_total", "Actions of hints, by what became of them; those of a request also when it ends.",
               ("action", "outcome"), lambda s: {one: s.hints.get(one, 0) for one in HINT_OUTCOMES},
               "rejected, clipped: a harness asks for more than hints.session_share, pin_host_share or hints.ttl_max "
               "allow, or for unknown actions."),
    MetricSpec("copy_seconds", "Time of merged copies between device and host.", ("direction",),
               lambda s: {way: copies.seconds for way, copies in s.controller.l1_copies.items()},
               "With copy_bytes it gives the bandwidth of the bus. Absent if the engine copies.", True),
    MetricSpec("copy_bytes", "Bytes of a merged copy between device and host.", ("direction",),
               lambda s: {way: copies.bytes for way, copies in s.controller.l1_copies.items()},
               "Small: the prompts are short, or page_size is small.", True),
    MetricSpec("worker_stuck_total", "Workers that hung in a call past its deadline and were replaced.", (),
               lambda s: s.controller.workers_stuck,
               "Should stay at 0; see backend_overdue_calls."),
    MetricSpec("sessions", "Sessions: open, holding KV on the device, with a running turn. Absent without sessions.",
               ("state",), lambda s: {} if s.sessions is None else {
                   "open": s.sessions.open, "holding": s.sessions.holding, "running": s.sessions.running},
               "Open ones without KV start their next turn from the tree."),
    MetricSpec("session_held_bytes", "Device memory that sessions keep between turns.", (),
               lambda s: None if s.sessions is None else s.sessions.held_pages * s.device.page_bytes,
               "Released when requests need room, or after sessions.ttl."),
    MetricSpec("session_turns_total", "Turns of sessions.", (),
               lambda s: None if s.sessions is None else s.sessions.turns, "The load of conversations."),
    MetricSpec("session_continued_turns_total", "Turns that continued the previous turn exactly.", (),
               lambda s: None if s.sessions is None else s.sessions.continued_turns,
               "Low compared with session_turns_total: clients change the history."),
    MetricSpec("session_tail_tokens_total", "Tokens that sessions saved in addition to the tree.", (),
               lambda s: None if s.sessions is None else s.sessions.tail_tokens, "What sessions gain."),
    MetricSpec("session_released_total", "Times when a session released its KV, by reason.", ("reason",),
               lambda s: {} if s.sessions is None else
               {why: s.sessions.released.get(why, 0) for why in RELEASE_REASONS},
               "pressure: the device is too small for the open sessions. diverged: clients change the history."),
    MetricSpec("ranks", "Number of ranks. Absent without ranks.", (),
               lambda s: None if s.controller.ranks is None else s.controller.ranks.size,
               "Each rank exports its own metrics; see Several processes."),
    MetricSpec("rank_lost", "1 if a rank is lost, or the ranks decided differently.", (),
               lambda s: None if s.controller.ranks is None else s.controller.ranks.is_lost,
               "Restart all ranks."),
    MetricSpec("rank_wait_seconds", "Waiting time of this rank for the slowest, in each step.", (),
               lambda s: None if s.controller.ranks is None else s.controller.ranks.wait,
               "The rank that waits least is the slow one.", True),
)


def cache_collector(statistics: Callable[[], CacheStatistics | None]) -> Collector:
    """Return the collector of a cache; while `statistics` returns None, it yields only the build's sample."""
    return SnapshotCollector(
        statistics, Table(CACHE_METRICS, lambda s: [((), s)]), store_table(lambda s: s.controller.backends)
    )

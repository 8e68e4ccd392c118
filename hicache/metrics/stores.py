"""The metrics of stores and of their guards.

Every series exists from the start, because Prometheus' `increase()` misses the first event of a new series. So each
label with a reason has a fixed set of values; other reasons count as `other`, and the log has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..backends.base import Direction, GetOutcome, SetOutcome
from ..backends.compose import CopyStatistics
from ..backends.errors import ErrorKind
from ..backends.guard import CallResult, GuardStatistics, HealthState, Override, Refusal, Verb
from ..backends.storage import StoreStatistics
from ..frame import Damage
from .spec import MetricSpec, S, Table, Values

# The most frequent errors of a file store, in addition to the kinds of all stores.
_ERRNOS = ("EACCES", "EDQUOT", "EIO", "EMFILE", "ENOSPC", "EROFS")
_ERRORS = (
    *ErrorKind, *(f"guard_{refusal}" for refusal in Refusal), *_ERRNOS, Damage.NO_ZSTD, "injected", "other", "raised",
    "sqlite",
)
# In addition to the codec's reasons: `type` and `checksum` come from servers, `daemon` from a HiCache daemon.
_DAMAGE = (
    *(damage for damage in Damage if not damage.is_unsupported), "checksum", "daemon", "injected", "other", "type",
)
_FAILURES = (CallResult.ERROR, CallResult.LOOKUP, CallResult.RAISED, CallResult.OVERDUE)


def with_zeros(known: Iterable[str], counts: Mapping[Any, int]) -> Values:
    """Return counts for the `known` values, zero if missing; all others are added to `other`, if that is known."""
    found = {str(name): 0 for name in known}
    for name, count in counts.items():
        kind = name if name in found else "other"
        if kind in found:
            found[kind] += count
    return found


def _errors(counts: Mapping[str, int]) -> Values:
    """Return errors by kind; the classes of exceptions and of SQLite's errors are one kind each."""
    found: Counter[str] = Counter()
    for name, count in counts.items():
        found["raised" if name.startswith("raised_") else "sqlite" if name.startswith("SQLITE_") else name] += count
    return with_zeros(_ERRORS, found)


def _by_direction(reasons: Iterable[str], counts: Mapping[tuple[Direction, Any], int]) -> Values:
    return {(way, str(reason)): counts.get((way, reason), 0) for way in Direction for reason in reasons}


def _guarded(pick: Callable[[GuardStatistics], Values]) -> Callable[[StoreStatistics], Values]:
    """Return a function for values of a store's guard; empty without a guard."""
    return lambda store: {} if store.guard is None else pick(store.guard)


def copy_metrics(
    copies: Callable[[S], Mapping[str, CopyStatistics]], act: str = "", waiting_act: str = ""
) -> tuple[MetricSpec[S], ...]:
    """Return the metrics of the copies to the parts of compositions."""
    kinds = ("copied", "present", "failed", "dropped")
    return (
        MetricSpec(
            "backend_copies_total", "Pages to be copied to a part of a composition in the background, by outcome.",
            ("backend", "outcome"),
            lambda s: {(part, kind): getattr(found, kind) for part, found in copies(s).items() for kind in kinds}, act,
        ),
        MetricSpec("backend_waiting_copies", "Pages waiting to be copied to a part.", ("backend",),
                   lambda s: {part: found.waiting for part, found in copies(s).items()}, waiting_act),
    )


def store_table(stores: Callable[[S], Iterable[StoreStatistics]]) -> Table[S]:
    """Return the table of stores and of their guards; the name of each store is a label."""
    return Table(STORE_METRICS, lambda s: [((store.name,), store) for store in stores(s)], ("backend",))


# The label `backend` comes first.
STORE_METRICS: tuple[MetricSpec[StoreStatistics], ...] = (
    MetricSpec("backend_get_pages_total", "Pages requested from the backend, by outcome.", ("outcome",),
               lambda b: with_zeros(GetOutcome, b.statistics.gets),
               "hit divided by all is the store's hit rate. Many misses after successful lookups: the store evicts "
               "pages before they are read."),
    MetricSpec("backend_set_pages_total", "Pages to be stored, by outcome.", ("outcome",),
               lambda b: with_zeros(SetOutcome, b.statistics.sets),
               "rejected: no room; the log says why. present: already stored."),
    MetricSpec("backend_corrupt_pages_total", "Stored pages rejected as damaged, by reason.",
               ("reason",), lambda b: with_zeros(_DAMAGE, b.statistics.corrupt),
               "Should stay at 0. tag and size: damage by disk, memory or network. mac_key and encryption_key: a "
               "writer has another key. namespace and page_key: another program wrote to the store. Such pages are "
               "never served."),
    MetricSpec("backend_errors_total", "Failures of the backend, by kind; guard_...: calls that the guard rejected.",
               ("reason",), lambda b: _errors(b.statistics.errors),
               "docs/backends explains the kinds of each store. raised: an exception of the backend; the log has its "
               "class."),
    MetricSpec("backend_transferred_bytes_total", "Bytes of whole frames read and written.", ("direction",),
               lambda b: {"read": b.statistics.read_bytes, "write": b.statistics.written_bytes},
               "The rate is the used bandwidth."),
    MetricSpec("backend_evicted_pages_total", "Pages removed to make room.", (), lambda b: b.statistics.evicted_pages,
               "Normal for a full store. The hit rate falls while this rises: the store is too small."),
    MetricSpec("backend_expired_pages_total", "Pages removed because they were older than `max_age`.", (),
               lambda b: b.statistics.expired_pages,
               "Normal with `max_age`. Redis removes such pages itself, and they are not counted."),
    MetricSpec("backend_stored_pages", "Pages stored now, by all processes that share the store.", (),
               lambda b: None if b.usage is None else b.usage.pages,
               "A sample, minutes old for a store that counts slowly."),
    MetricSpec("backend_stored_bytes", "Bytes stored now, by all processes that share the store.", (),
               lambda b: None if b.usage is None else b.usage.bytes,
               "Compare it with backend_capacity_bytes, or with the limit of the server."),
    MetricSpec("backend_capacity_bytes", "Limit of the store's bytes; absent if the server sets the limit.", (),
               lambda b: None if b.usage is None else b.usage.capacity_bytes,
               "The entry `capacity` of the store."),
    MetricSpec("backend_keeps_nothing", "1 while a store keeps nothing.", (),
               lambda b: b.health.state is HealthState.KEEPS_NOTHING,
               "docs/monitoring.md explains it. The value stays while there are no new pages."),
    MetricSpec("backend_breaker_state", "0: closed, calls are made; 1: the next call decides; 2: open, no calls.",
               ("direction",), _guarded(lambda g: {way: b.state for way, b in g.breakers.items()}),
               "2 for minutes: an outage; the log has the reason."),
    MetricSpec("backend_override", "1 if an operator has forced a direction on or off.", ("direction",),
               _guarded(lambda g: {way: b.override is not Override.AUTO for way, b in g.breakers.items()}),
               "After maintenance, return the direction to its breaker with `hicache ctl`."),
    MetricSpec("backend_breaker_opens_total", "Times when the breaker opened.", ("direction",),
               _guarded(lambda g: {way: b.opens for way, b in g.breakers.items()}),
               "More than a few per hour: the store fails under load."),
    MetricSpec("backend_probes_total", "Probes of the store, by outcome.", ("direction", "outcome"),
               _guarded(lambda g: {(way, outcome): count for way, b in g.breakers.items()
                                   for outcome, count in (("good", b.good_probes), ("failed", b.failed_probes))}),
               "failed with a closed breaker: single failures. good with an open breaker: calls fail but probes do "
               "not."),
    MetricSpec("backend_refused_calls_total", "Calls that the guard rejected, by reason.", ("direction", "reason"),
               _guarded(lambda g: _by_direction(Refusal, g.refused)),
               "open: the breaker. busy: storage.guard.in_flight was full until the deadline."),
    MetricSpec("backend_failed_calls_total", "Calls that count as failed, by reason.", ("direction", "reason"),
               _guarded(lambda g: _by_direction(_FAILURES, g.failures)),
               "error: at least half of the pages failed. lookup: an error in a lookup. raised: an exception. overdue: "
               "the call hangs past its deadline."),
    MetricSpec("backend_retried_calls_total", "Calls that were retried.", ("direction",),
               _guarded(lambda g: {way: g.retried_calls.get(way, 0) for way in g.breakers}),
               "Steadily near a tenth of all calls: the store loses requests."),
    MetricSpec("backend_in_flight_bytes", "Bytes of frames being read or written.", (),
               _guarded(lambda g: g.in_flight_bytes),
               "At storage.guard.in_flight calls wait for each other."),
    MetricSpec("backend_in_flight_calls", "Calls in flight.", (), _guarded(lambda g: g.in_flight_calls),
               "Equal to the number of workers: more transfer.io_workers may help."),
    MetricSpec("backend_overdue_calls", "Calls that hang past their deadline.", (),
               _guarded(lambda g: g.overdue_calls),
               "Should be 0. Each holds a thread and its frames. Check server and network."),
    MetricSpec("backend_call_seconds", "Time of calls; a call is a batch of pages.", ("verb",),
               _guarded(lambda g: {verb: g.latency[verb] for verb in Verb}),
               "Compare with prefetch.timeout_base.", True),
    MetricSpec("backend_call_bytes", "Bytes of the frames of a call.", ("verb",), _guarded(lambda g: g.call_bytes),
               "Small: the prompts are short, or transfer.storage_batch_pages is small.",
               True),
)

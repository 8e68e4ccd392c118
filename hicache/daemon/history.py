"""The last hour of a daemon, for its page: a sample every few seconds, and the faults between samples.

The daemon calls `record` with a snapshot every `SAMPLE_S` seconds, and `note` when an engine has died. Everything else
is the difference between two snapshots, so code that serves requests does not use this module. A total that falls
belongs to a store or a namespace that was opened again: its new value counts in full.

`HistoryFile` keeps the history across restarts. So times are those of the wall clock, and the time that a daemon does
not run is a gap between two samples. The seconds of a sample come from the uptime, because the wall clock can be set.

Invariant: samples are in order of time, at most an hour older than the newest one.

Locking design: one lock guards all fields, held for the arithmetic of one snapshot or for a copy of the rows.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..backends.base import SetOutcome
from ..clock import SYSTEM_CLOCK, Clock
from .statistics import NamespaceStatistics, NodeStatistics

# Seconds between two samples: a short outage shows, and an hour needs about 90 KB.
SAMPLE_S = 5.0
KEPT_S = 3600.0
SAMPLES_MAX = int(KEPT_S / SAMPLE_S)
# As many as fit on a screen. Equal consecutive faults within this time are one entry with a count.
FAULTS_MAX = 100
FAULT_GAP_S = 300.0
# Older faults of a previous run are not restored: the page shows the time of day.
RESTORED_FAULT_S = 24 * 3600.0


class FaultKind(enum.StrEnum):
    DAMAGE = "damage"  # pages that were read and rejected; the detail is the reason
    BREAKER = "breaker_opened"  # the detail is the direction and the reason
    FAILED_CALLS = "failed_calls"  # calls to a store; the detail is the direction and the reason
    REJECTED = "rejected"  # pages that a store has no room for
    LIMIT = "limit"  # requests rejected; the detail is the limit
    CLIENT = "client_lost"  # an engine died; the detail is the name of its memory


class Sample(NamedTuple):
    """The counts of the `seconds` before `time` (wall clock), and the state at its end.

    It counts pages by their source, and bytes between daemon and engines, then between daemon and stores. `missed` are
    the missed pages by reason, with the detail after a slash.
    """

    time: float
    seconds: float
    pool_pages: int
    shared_pages: int
    store_pages: int
    missed_pages: int
    sent_bytes: int
    received_bytes: int
    store_read_bytes: int
    store_written_bytes: int
    pool_used_bytes: int
    requests_in_flight: int
    missed: dict[str, int]


@dataclass(slots=True, eq=False)
class Fault:
    """Equal consecutive faults; the times of the first and the last."""

    kind: FaultKind
    namespace: str  # its label; empty for the daemon as a whole
    store: str
    detail: str
    count: int
    first: float
    last: float

    @property
    def place(self) -> tuple[str, ...]:
        return (self.kind, self.namespace, self.store, self.detail)


# A total of a snapshot, by its meaning.
_Totals = Counter[tuple[str, ...]]


class History:
    """See the module's docstring. Times are `clock.wall_s`."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._uptime_s = 0.0  # of the last snapshot
        self._totals: _Totals = Counter()
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._faults: deque[Fault] = deque(maxlen=FAULTS_MAX)  # the latest last

    def record(self, statistics: NodeStatistics) -> None:
        """Add a sample, and the faults since the sample before. Does not block."""
        totals = _totals(statistics)
        with self._lock:
            time_s = self._clock.wall_s()
            gained = _gained(self._totals, totals)
            seconds = statistics.uptime_s - self._uptime_s
            self._keep([*self._samples, _sample(statistics, gained, time_s, seconds)], time_s)
            for (kind, *place), count in gained.items():
                if isinstance(kind, FaultKind):
                    label, store, detail = place
                    if kind is FaultKind.BREAKER:
                        detail = f"{detail}: {_reason(statistics, label, store, detail)}"
                    self._note(kind, (label, store, detail), count, time_s)
            self._totals, self._uptime_s = totals, statistics.uptime_s

    def note(self, kind: FaultKind, detail: str) -> None:
        """Add a fault of the whole daemon that snapshots do not show. Does not block."""
        with self._lock:
            self._note(kind, ("", "", detail), 1, self._clock.wall_s())

    def restore(self, samples: Iterable[Sample], faults: Iterable[Fault]) -> None:
        """Continue the history of a previous run. Ignores samples older than an hour and faults older than a day, and
        times in the future: the clock was set back. REQUIRES: nothing is recorded yet."""
        with self._lock:
            time_s = self._clock.wall_s()
            self._keep(sorted(samples, key=lambda sample: sample.time), time_s)
            recent = (fault for fault in faults if time_s - RESTORED_FAULT_S <= fault.last <= time_s)
            self._faults.extend(sorted(recent, key=lambda fault: fault.last))

    def as_json(self, since: float = 0.0) -> dict[str, Any]:
        """Return the samples after the time `since`, oldest first, as rows under `columns`, and all faults, latest
        first."""
        with self._lock:
            rows = [list(sample) for sample in self._samples if sample.time > since]
            faults = [asdict(fault) for fault in reversed(self._faults)]
        return {"sample_s": SAMPLE_S, "columns": list(Sample._fields), "rows": rows, "faults": faults}

    def _keep(self, samples: Iterable[Sample], time_s: float) -> None:
        self._samples = deque((one for one in samples if time_s - KEPT_S < one.time <= time_s), SAMPLES_MAX)

    def _note(self, kind: FaultKind, place: tuple[str, str, str], count: int, time_s: float) -> None:
        fault = Fault(kind, *place, count, time_s, time_s)
        for known in self._faults:
            if known.place == fault.place and time_s - known.last <= FAULT_GAP_S:
                fault.count, fault.first = known.count + count, known.first
                self._faults.remove(known)
                break
        self._faults.append(fault)


def _totals(statistics: NodeStatistics) -> _Totals:
    totals: _Totals = Counter()
    for namespace in statistics.namespaces:
        for place, value in _of_namespace(namespace):
            totals[place] += value
    for limit, count in statistics.refused.items():
        totals[FaultKind.LIMIT, "", "", limit] += count
    return totals


def _of_namespace(namespace: NamespaceStatistics) -> Iterator[tuple[tuple[str, ...], int]]:
    name, sharing, label = namespace.namespace, namespace.sharing, namespace.label
    yield ("pool", name), sharing.pool_hits
    yield ("shared", name), sharing.shared_reads
    yield ("store", name), sharing.store_hits
    for kind, pages in sharing.missed.items():
        yield ("missed", name, "/".join(filter(None, kind))), pages
    yield ("sent", name), namespace.backend.read_bytes
    yield ("received", name), namespace.backend.written_bytes
    for store in namespace.stores:
        yield ("read", name, store.name), store.statistics.read_bytes
        yield ("written", name, store.name), store.statistics.written_bytes
        yield (FaultKind.REJECTED, label, store.name, "no room"), store.statistics.sets.get(SetOutcome.REJECTED, 0)
        for reason, pages in store.statistics.corrupt.items():
            yield (FaultKind.DAMAGE, label, store.name, reason), pages
        if store.guard is not None:
            for (direction, reason), calls in store.guard.failures.items():
                yield (FaultKind.FAILED_CALLS, label, store.name, f"{direction}: {reason}"), calls
            for direction, breaker in store.guard.breakers.items():
                yield (FaultKind.BREAKER, label, store.name, direction), breaker.opens


def _reason(statistics: NodeStatistics, label: str, name: str, direction: str) -> str:
    """Return the reason why the breaker of a store opened last."""
    reasons = (
        breaker.reason
        for namespace in statistics.namespaces if namespace.label == label
        for store in namespace.stores if store.name == name and store.guard is not None
        for way, breaker in store.guard.breakers.items() if way == direction and breaker.reason
    )
    return next(reasons, "unknown")


def _gained(before: _Totals, after: _Totals) -> _Totals:
    changed = {place: value for place, value in after.items() if value != before[place]}
    return Counter({place: value - (before[place] if value > before[place] else 0) for place, value in changed.items()})


def _sample(statistics: NodeStatistics, gained: _Totals, time_s: float, seconds: float) -> Sample:
    sums, missed = Counter[str](), Counter[str]()
    for (name, *place), value in gained.items():
        sums[name] += value
        if name == "missed":
            missed[place[1]] += value
    return Sample(
        time_s, seconds, sums["pool"], sums["shared"], sums["store"], sums["missed"], sums["sent"], sums["received"],
        sums["read"], sums["written"], statistics.pool.used_bytes, statistics.in_flight_requests, dict(missed),
    )

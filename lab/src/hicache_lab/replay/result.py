"""The result of a replay: one frozen value. It is the JSON report, and engine processes send it to their parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from pydantic import TypeAdapter

from ..speeds import Speeds
from ..tier_names import TIERS
from ..traces.routing import Routing
from .timing import Latency, SchedulerTimes, merged_latency

# The sources of wrong bytes: pages from a tier, or a request's own pages when it ends.
SOURCES = (*TIERS, "own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The state at one moment. Counts are totals since the start; tokens of prompts count when a request begins.

    `hit_tokens` is by tier. `moved_bytes` is by direction: device_to_host, host_to_device, host_to_storage,
    storage_to_host. `computed_tokens` is by reason; see `TokenCounts`.
    """

    elapsed_s: float
    requests: int
    waiting: int
    running: int
    prompt_tokens: int
    hit_tokens: Mapping[str, int]
    device_pages: int
    host_pages: int
    storage_bytes: int
    moved_bytes: Mapping[str, int]
    wrong_bytes: int
    computed_tokens: Mapping[str, int] = field(default_factory=dict)  # reports of earlier versions do not have it


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The trace and the configuration of a replay. Pages and bytes are those of one engine process. `storage_pages` is
    the capacity of storage in pages, None without a limit (`storage_capacity_bytes` None) or without storage. `virtual`
    are the speeds of a replay in virtual time, None for one in real time. `hints` is the kind of errors of hints, None
    without hints."""

    trace: str
    model: str
    page_size: int
    kv_bytes_per_token: int
    device_pages: int
    device_page_bytes: int
    host_pages: int
    host_page_bytes: int
    storage: str | None
    storage_capacity_bytes: int | None
    storage_pages: int | None
    processes: int
    routing: Routing
    whole_trace_each: bool
    speed_up: float | None
    running_max: int
    waiting_max: int
    prefill_tokens_max: int
    prefill_tokens_per_s: float | None
    virtual: Speeds | None = None
    hints: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Requests by their result. `too_long` requests do not fit into L1 and were skipped. `preempted` counts how often a
    request was preempted for an older one. `late_s` is the longest delay of an arrival behind its time in the trace.
    `last_end_s` is the time from the start to the end of the last request; storing goes on after it."""

    ended: int
    too_long: int
    unfinished: int
    preempted: int
    late_s: float
    last_end_s: float = 0.0  # reports of earlier versions do not have it


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """`prompt` and `output` tokens of requests that began, with the whole output even of requests that did not end.
    `seen` prompt tokens had occurred before in the trace: an unlimited cache could have had them. `hits` is by tier,
    `computed` is the rest. `recomputed` tokens were computed again after preemptions. `reasons` are those of both, by
    reason and detail, such as `evicted.host`; reports of earlier versions do not have them."""

    prompt: int
    output: int
    seen: int
    hits: Mapping[str, int]
    computed: int
    recomputed: int
    reasons: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """The hit tokens of ideal caches: an LRU, and the optimum that knows the future; see `ideal`. Both have `pages`
    pages, as many as all tiers together (None: unlimited). The shares are the replay's hits divided by theirs, None if
    theirs are 0."""

    pages: int | None
    lru_tokens: int
    optimum_tokens: int
    share_of_lru: float | None
    share_of_optimum: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """See the module's docstring. `complete` is False for an interrupted replay. `ideal` is None for an interrupted
    replay, and until `ideal_of` has computed it.

    `checked_bytes` were compared, `wrong_bytes` of them differed, by source. `evicted_pages` is by tier. `skipped`
    counts work that the cache decided to skip, `refused` work that a bounded queue rejected, by reason. `damaged`
    counts stored pages that were damaged and not served, `storage_errors` failures of the backend and of the workers,
    by kind. `first_token` are the times from arrival to the first token. `scheduler` is None in virtual time, which
    does not measure the cost of the cache itself. `hints` are the outcomes of hints, by action and outcome, None
    without hints; an action that waits for the end of its request has two.
    """

    setup: Setup
    complete: bool
    elapsed_s: float
    requests: Requests
    tokens: TokenCounts
    checked_bytes: int
    wrong_bytes: int
    wrong_bytes_by_source: Mapping[str, int]
    moved_bytes: Mapping[str, int]
    evicted_pages: Mapping[str, int]
    skipped: Mapping[str, int]
    refused: Mapping[str, int]
    damaged: Mapping[str, int]
    storage_errors: Mapping[str, int]
    first_token: Latency
    scheduler: SchedulerTimes | None
    ideal: Ideal | None
    samples: tuple[Sample, ...]
    hints: Mapping[str, Mapping[str, int]] | None = None

    def to_json(self) -> str:
        """Return the report as JSON. The names of fields include their units. Without hints it does not name them."""
        unused: Any = {"hints": True, "setup": {"hints"}} if self.hints is None else None
        return _RESULT.dump_json(self, indent=2, exclude=unused).decode() + "\n"

    @staticmethod
    def from_json(text: bytes) -> ReplayResult:
        """Return the result of a report. Raises ValueError for other text."""
        return _RESULT.validate_json(text)


_RESULT = TypeAdapter(ReplayResult)
_SAMPLE = TypeAdapter(Sample)
# Fields of which the largest value counts: several engines share a store and run at the same time.
_LARGEST = frozenset(
    {(ReplayResult, "elapsed_s"), (Sample, "elapsed_s"), (Sample, "storage_bytes"), (Requests, "late_s"),
     (Requests, "last_end_s")}
)


def samples_csv(result: ReplayResult) -> str:
    """Return the samples as CSV: a row for each, and a column for each field or entry, such as `hit_tokens.host`."""
    rows = [flat(_SAMPLE.dump_python(sample)) for sample in result.samples]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(columns), *(",".join(str(row.get(name, "")) for name in columns) for row in rows)]
    return "\n".join(lines) + "\n"


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with the entries of nested ones as `name.entry`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = flat(value) if isinstance(value, dict) else None
        found |= {name: value} if inner is None else {f"{name}.{entry}": one for entry, one in inner.items()}
    return found


def merged(parts: Sequence[Any]) -> Any:
    """Merge values of the same type from engines that ran at the same time. REQUIRES: at least one value.

    Counts add up. Of the fields in `_LARGEST`, the largest value is taken. Distributions and series are joined. The
    setup is that of the first value, and None stays None. Each process counts its own evictions in a shared store.
    """
    first = parts[0]
    if first is None or isinstance(first, Setup):
        return first
    if isinstance(first, Latency):
        return merged_latency(parts)
    if isinstance(first, bool):
        return all(parts)
    if isinstance(first, tuple):
        return merged_samples(parts)
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: merged([part[name] for part in parts if name in part]) for name in names}
    if not is_dataclass(first):
        return sum(parts)
    kind: Any = type(first)
    values = {each.name: [getattr(part, each.name) for part in parts] for each in fields(first)}
    return kind(**{name: max(of) if (kind, name) in _LARGEST else merged(of) for name, of in values.items()})


def merged_samples(series: Sequence[Sequence[Sample]]) -> tuple[Sample, ...]:
    """Merge several series: for each time in any of them, merge the latest sample of each."""
    latest: dict[int, Sample] = {}
    together = []
    moments = [(sample.elapsed_s, i, sample) for i, samples in enumerate(series) for sample in samples]
    moments.sort(key=lambda moment: moment[:2])  # in virtual time several samples may have the same time
    for _, i, sample in moments:
        latest[i] = sample
        if len(latest) == len([samples for samples in series if samples]):
            together.append(merged(list(latest.values())))
    return tuple(together)


class Series:
    """Samples of a run of unknown length: at most `SAMPLES_MAX`, evenly spread. At that number every second sample is
    dropped, and the rate of new ones is halved."""

    SAMPLES_MAX = 256

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._every = 1
        self._seen = 0

    def add(self, sample: Sample) -> None:
        """Add a sample, or skip it."""
        if self._seen % self._every == 0:
            self.samples.append(sample)
        self._seen += 1
        if len(self.samples) == self.SAMPLES_MAX:
            del self.samples[1::2]
            self._every *= 2

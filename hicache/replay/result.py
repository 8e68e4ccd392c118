"""What a replay came to: one frozen value, which is the JSON report, and what engine processes send to their parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from pydantic import TypeAdapter

from .timing import Latency, SchedulerTimes, merged_latency

# What people read for a tier.
TIER_NAMES: Mapping[str, str] = {"device": "L1 device", "host": "L2 host", "storage": "L3 storage"}
TIERS = tuple(TIER_NAMES)
# Where bytes may be found wrong: in what a tier gave, or in a request's own pages when it ends.
SOURCES = (*TIERS, "own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The state at one moment. Counts are totals since the start; tokens of prompts count when a request begins.

    `hit_tokens` is by tier. `moved_bytes` is by way: device_to_host, host_to_device, host_to_storage, storage_to_host.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What was replayed, and on what. Pages and bytes are those of one engine process. `storage_pages` is how many
    pages storage has room for, None if it has no limit of its own (`storage_capacity_bytes` None) or there is none."""

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
    whole_trace_each: bool
    speed_up: float | None
    running_max: int
    waiting_max: int
    prefill_tokens_max: int
    prefill_tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Requests by what became of them. `too_long` never fit into L1 and were left out; `preempted` counts how often a
    request had to make room for an older one; `late_s` is the longest that one entered behind its time in the trace."""

    ended: int
    too_long: int
    unfinished: int
    preempted: int
    late_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """`prompt` and `output` tokens of requests that began, the whole output also of those that did not end; `seen` of
    the prompt tokens had occurred before in the trace, which is what a cache without limits could have had; `hits` by
    tier; `computed` is the rest, `recomputed` what preemptions cost."""

    prompt: int
    output: int
    seen: int
    hits: Mapping[str, int]
    computed: int
    recomputed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """Hit tokens that ideal caches would have had: an LRU, and the optimum that knows the future; see `ideal`. Both
    have `pages` pages, as many as all tiers together, or no limit (None). The shares are the replay's hits divided by
    theirs, None if they have none."""

    pages: int | None
    lru_tokens: int
    optimum_tokens: int
    share_of_lru: float | None
    share_of_optimum: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """See the module's docstring. `complete` is False for a replay that was interrupted; `ideal` is then None, and
    until `ideal_of` has computed it.

    `checked_bytes` were compared, `wrong_bytes` of them differed, by source. `evicted_pages` is by tier, `skipped` what
    the cache decided not to do and `refused` what a bounded queue turned away, by reason; `damaged` are stored pages
    that were found damaged and not served, `storage_errors` failures of the backend and of the workers, by kind.
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
    scheduler: SchedulerTimes
    ideal: Ideal | None
    samples: tuple[Sample, ...]

    def to_json(self) -> str:
        """The report as JSON, in the units that the names say."""
        return _RESULT.dump_json(self, indent=2).decode() + "\n"


_RESULT = TypeAdapter(ReplayResult)
# Several engines share a store and run at the same time.
_LARGEST = frozenset(
    {(ReplayResult, "elapsed_s"), (Sample, "elapsed_s"), (Requests, "late_s"), (Sample, "storage_bytes")}
)


def merged(parts: Sequence[Any]) -> Any:
    """Values of the same type from engines that ran at the same time, as one. REQUIRES: at least one.

    Counts add up, of the fields in `_LARGEST` the largest stands for all, distributions and series are joined, the
    setup is that of the first, and None stays None. Eviction in a shared store is counted by whoever evicts.
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
    """One series out of several: at each moment of any, the latest sample of each, merged."""
    latest: dict[int, Sample] = {}
    together = []
    moments = sorted((sample.elapsed_s, i, sample) for i, samples in enumerate(series) for sample in samples)
    for _, i, sample in moments:
        latest[i] = sample
        if len(latest) == len([samples for samples in series if samples]):
            together.append(merged(list(latest.values())))
    return tuple(together)


class Series:
    """Samples of a run of unknown length: at most `SAMPLES_MAX`, evenly spread. When they are that many, every second
    one is dropped, and from then on half as many are taken."""

    SAMPLES_MAX = 256

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._every = 1
        self._seen = 0

    def add(self, sample: Sample) -> None:
        """Take a sample, or let it go by."""
        if self._seen % self._every == 0:
            self.samples.append(sample)
        self._seen += 1
        if len(self.samples) == self.SAMPLES_MAX:
            del self.samples[1::2]
            self._every *= 2

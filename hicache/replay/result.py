"""What a replay came to: one frozen value, which is the JSON report, and what engine processes send to their parent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from .timing import Latency, merged_latency

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
    """What was replayed, and on what. Pages and bytes are those of one engine process."""

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
class CallTotal:
    """All calls of one kind."""

    calls: int
    cpu_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerTimes:
    """What the cache cost the scheduler's thread; see `hicache.replay.timing`. `steps` had something to compute."""

    steps: int
    idle_steps: int
    step_cpu: Latency
    step_elapsed: Latency
    request_cpu: Latency
    request_elapsed: Latency
    calls: Mapping[str, CallTotal]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """See the module's docstring. `complete` is False for a replay that was interrupted.

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
    samples: tuple[Sample, ...]

    def to_json(self) -> str:
        """The report as JSON, in the units that the names say."""
        return _RESULT.dump_json(self, indent=2).decode() + "\n"


_RESULT = TypeAdapter(ReplayResult)


def merged(results: Sequence[ReplayResult]) -> ReplayResult:
    """The results of engines that ran at the same time, as one. REQUIRES: at least one.

    Eviction in a shared store is counted by whoever evicts, so all counts add up.
    """
    first = results[0]

    def counts(pick: Callable[[ReplayResult], Mapping[str, int]]) -> dict[str, int]:
        return summed(pick(result) for result in results)

    return replace(
        first,
        complete=all(result.complete for result in results),
        elapsed_s=max(result.elapsed_s for result in results),
        requests=_sum_requests([result.requests for result in results]),
        tokens=_sum_tokens([result.tokens for result in results]),
        checked_bytes=sum(result.checked_bytes for result in results),
        wrong_bytes=sum(result.wrong_bytes for result in results),
        wrong_bytes_by_source=counts(lambda result: result.wrong_bytes_by_source),
        moved_bytes=counts(lambda result: result.moved_bytes),
        evicted_pages=counts(lambda result: result.evicted_pages),
        skipped=counts(lambda result: result.skipped),
        refused=counts(lambda result: result.refused),
        damaged=counts(lambda result: result.damaged),
        storage_errors=counts(lambda result: result.storage_errors),
        scheduler=_merged_times([result.scheduler for result in results]),
        samples=merged_samples([result.samples for result in results]),
    )


def summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts added up by name."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def _sum_requests(parts: Sequence[Requests]) -> Requests:
    return Requests(
        ended=sum(part.ended for part in parts),
        too_long=sum(part.too_long for part in parts),
        unfinished=sum(part.unfinished for part in parts),
        preempted=sum(part.preempted for part in parts),
        late_s=max(part.late_s for part in parts),
    )


def _sum_tokens(parts: Sequence[TokenCounts]) -> TokenCounts:
    return TokenCounts(
        prompt=sum(part.prompt for part in parts),
        output=sum(part.output for part in parts),
        seen=sum(part.seen for part in parts),
        hits=summed(part.hits for part in parts),
        computed=sum(part.computed for part in parts),
        recomputed=sum(part.recomputed for part in parts),
    )


def _merged_times(parts: Sequence[SchedulerTimes]) -> SchedulerTimes:
    def latency(pick: Callable[[SchedulerTimes], Latency]) -> Latency:
        return merged_latency(pick(part) for part in parts)

    calls = {}
    for name in parts[0].calls:
        same = [part.calls[name] for part in parts]
        calls[name] = CallTotal(
            calls=sum(call.calls for call in same),
            cpu_s=sum(call.cpu_s for call in same),
            elapsed_s=sum(call.elapsed_s for call in same),
        )
    return SchedulerTimes(
        steps=sum(part.steps for part in parts),
        idle_steps=sum(part.idle_steps for part in parts),
        step_cpu=latency(lambda part: part.step_cpu),
        step_elapsed=latency(lambda part: part.step_elapsed),
        request_cpu=latency(lambda part: part.request_cpu),
        request_elapsed=latency(lambda part: part.request_elapsed),
        calls=calls,
    )


def merged_samples(series: Sequence[Sequence[Sample]]) -> tuple[Sample, ...]:
    """One series out of several: at each moment of any, the latest sample of each, added up."""
    latest: dict[int, Sample] = {}
    merged_series = []
    moments = sorted((sample.elapsed_s, i, sample) for i, samples in enumerate(series) for sample in samples)
    for _, i, sample in moments:
        latest[i] = sample
        if len(latest) == len([samples for samples in series if samples]):
            merged_series.append(summed_sample(list(latest.values())))
    return tuple(merged_series)


def summed_sample(samples: Sequence[Sample]) -> Sample:
    """The state of several engines as one; a store that they share is as full as the fullest view of it."""
    return Sample(
        elapsed_s=max(sample.elapsed_s for sample in samples),
        requests=sum(sample.requests for sample in samples),
        waiting=sum(sample.waiting for sample in samples),
        running=sum(sample.running for sample in samples),
        prompt_tokens=sum(sample.prompt_tokens for sample in samples),
        hit_tokens=summed(sample.hit_tokens for sample in samples),
        device_pages=sum(sample.device_pages for sample in samples),
        host_pages=sum(sample.host_pages for sample in samples),
        storage_bytes=max(sample.storage_bytes for sample in samples),
        moved_bytes=summed(sample.moved_bytes for sample in samples),
        wrong_bytes=sum(sample.wrong_bytes for sample in samples),
    )


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

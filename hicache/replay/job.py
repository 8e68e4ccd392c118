"""One engine process's part of a replay: what it is told, and how it becomes a result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..backends.base import BackendStatistics
from ..cache import CacheStatistics, create_cache
from ..config import HiCacheConfig
from ..errors import ConfigError, InvalidInput
from .presets import PRESETS
from .result import CallTotal, ReplayResult, Requests, SchedulerTimes, Setup, TokenCounts, summed
from .runner import Replay, ReplayOptions, moved_bytes
from .synthetic import synthetic_trace
from .trace import TraceRequest, read_trace

# A synthetic trace of this many requests fills and spills all three default tiers within a minute.
SYNTHETIC_REQUESTS = 1000
# Those whose copies the cache knows how to make; torch knows more.
_DEVICES = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """What to replay. `trace` None: a synthetic one from `seed`, of `requests` requests (None: a default number).

    `processes` and `whole_trace_each` say what the others do, for the report; this one's part is in `options`.

    Raises ConfigError for an unknown device, and for a configuration without the prefix cache or with bigram keys.
    """

    config: HiCacheConfig
    trace: Path | None = None
    seed: int = 0
    requests: int | None = None
    preset: str = "tiny"
    device: str = "cpu"
    processes: int = 1
    whole_trace_each: bool = False
    options: ReplayOptions = field(default_factory=ReplayOptions)

    def __post_init__(self) -> None:
        if not _DEVICES.fullmatch(self.device):
            raise ConfigError(f"replay: unknown device {self.device[:40]!r}; known: cpu, cuda, cuda:1, ...")
        if not self.config.prefix_cache:
            raise ConfigError("prefix_cache: false reuses no page, so a replay would have none to compare; leave it on")
        if self.config.bigram_keys:
            raise ConfigError("bigram_keys: a replay keys pages by single tokens; leave it out")

    @property
    def request_count(self) -> int | None:
        """How many requests the trace has at most, None if that is not known before its end."""
        return (self.requests or SYNTHETIC_REQUESTS) if self.trace is None else self.requests

    def requests_of_trace(self) -> Iterator[TraceRequest]:
        """The trace. Raises InvalidInput as `read_trace` does, while it is read."""
        if self.trace is None:
            return synthetic_trace(self.requests or SYNTHETIC_REQUESTS, self.seed)
        return read_trace(self.trace, self.requests)


def start(job: ReplayJob) -> Replay:
    """Open the trace and build the cache; the replay, ready to `run`.

    Raises InvalidInput, ConfigError, CapacityError and BackendError with what to change; nothing is left running then.
    """
    if job.preset not in PRESETS:
        raise InvalidInput(f"replay: unknown model {job.preset!r}; known: {', '.join(PRESETS)}")
    namespace = PRESETS[job.preset].namespace(job.preset, job.config.page_size)
    cache = create_cache(job.config, namespace, device=torch.device(job.device))
    try:
        return Replay(cache, job.requests_of_trace(), job.options)
    except BaseException:
        cache.close()
        raise


def result_of(job: ReplayJob, replay: Replay) -> ReplayResult:
    """What it came to. REQUIRES: before `close`, which ends the storage that is asked for its counts."""
    state, counts = replay.cache.statistics(), replay.counts
    controller, backend = state.controller, state.controller.backend
    evicted = {tier: state.evicted_pages.get(tier, 0) for tier in ("device", "host")}
    return ReplayResult(
        setup=_setup(job, replay, state),
        complete=replay.complete,
        elapsed_s=replay.elapsed_s,
        requests=Requests(
            ended=counts.ended,
            too_long=counts.too_long,
            unfinished=replay.unfinished,
            preempted=counts.preempted,
            late_s=counts.late_s,
        ),
        tokens=TokenCounts(
            prompt=counts.prompt_tokens,
            output=counts.output_tokens,
            seen=counts.seen_tokens,
            hits=dict(counts.hits),
            computed=counts.computed_tokens,
            recomputed=counts.recomputed_tokens,
        ),
        checked_bytes=counts.checked_bytes,
        wrong_bytes=counts.wrong.total(),
        wrong_bytes_by_source=dict(counts.wrong),
        moved_bytes=moved_bytes(state),
        evicted_pages={**evicted, "storage": 0 if backend is None else backend.evicted_pages},
        skipped=dict(state.skipped),
        refused=dict(controller.refused),
        damaged={} if backend is None else dict(backend.corrupt),
        storage_errors=summed([controller.worker_errors, _backend_errors(backend)]),
        scheduler=_times(replay),
        samples=tuple(replay.series.samples),
    )


def _backend_errors(backend: BackendStatistics | None) -> dict[str, int]:
    return {} if backend is None else {f"storage:{kind}": count for kind, count in backend.errors.items()}


def _setup(job: ReplayJob, replay: Replay, state: CacheStatistics) -> Setup:
    cache, storage = replay.cache, job.config.storage
    usage = state.controller.usage
    return Setup(
        trace=f"synthetic, seed {job.seed}" if job.trace is None else job.trace.name,
        model=job.preset,
        page_size=cache.page_size,
        kv_bytes_per_token=cache.device.geometry.token_bytes,
        device_pages=cache.device.pages,
        device_page_bytes=cache.device.geometry.payload_bytes,
        host_pages=state.host.capacity_pages,
        host_page_bytes=state.host.page_bytes,
        storage=None if storage is None else storage.type,
        storage_capacity_bytes=None if usage is None else usage.capacity_bytes,
        processes=job.processes,
        whole_trace_each=job.whole_trace_each,
        speed_up=job.options.speed_up,
        running_max=job.options.running_max,
        waiting_max=job.options.waiting_max,
        prefill_tokens_max=job.options.prefill_tokens_max,
        prefill_tokens_per_s=job.options.prefill_tokens_per_s,
    )


def _times(replay: Replay) -> SchedulerTimes:
    times = replay.times
    step_cpu = times.step_cpu.latency()
    return SchedulerTimes(
        steps=step_cpu.count,
        idle_steps=replay.counts.idle_steps,
        step_cpu=step_cpu,
        step_elapsed=times.step_elapsed.latency(),
        request_cpu=times.request_cpu.latency(),
        request_elapsed=times.request_elapsed.latency(),
        calls={
            call.value: CallTotal(
                calls=entry.calls, cpu_s=entry.cost.cpu_ns / 1e9, elapsed_s=entry.cost.elapsed_ns / 1e9
            )
            for call, entry in times.calls.items()
        },
    )

"""Replay: runs a trace through a real cache, with the reference scheduler and a model that stamps and compares pages.

The scheduler of `lab/engine` does admission, preemption, the order of the queue, storage and copies. This module has
the arrivals of the trace, and the counts.

Locking design: all calls are made on one thread, which owns all fields, so no lock is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import replace

import torch

from hicache.backends.base import Usage
from hicache.cache import CacheStatistics, TreeCache, create_cache
from hicache.cli.model_shapes import PRESETS
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.errors import InvalidInput
from hicache.geometry import KVLayout
from hicache.ghosts import DETAILS, KINDS, Reason
from hicache.keys import Namespace

from ..engine import Engine, EngineOptions
from ..traces.request import TraceRequest
from ..traces.routing import Router
from ..traces.tokens import TokenSource
from .hints import HintMaker
from .job import ReplayJob
from .result import ReplayResult, Requests, Sample, Series, Setup
from .stand_in import StandIn, never
from .timing import Histogram, SchedulerClock

# The interval of samples. A sample queries the usage of storage, which is I/O, so it is not taken in every step.
SAMPLE_EVERY_S = 0.1
# The time that stores may take at the end of a replay before they are abandoned.
SETTLE_S_MAX = 60.0


class Replay:
    """See the module's docstring. Owns `cache`: `close` closes it. `is_stopped` is asked in every step, and while a
    forward takes its time; once it is True, `run` ends. Raises InvalidInput for a bad trace.
    """

    def __init__(
        self, cache: TreeCache, job: ReplayJob, *, clock: Clock = SYSTEM_CLOCK,
        is_stopped: Callable[[], bool] = never,
    ) -> None:
        self.job = job
        self.cache = cache
        self.complete = False  # `run` has reached its end
        self.ended = self.too_long = self.idle_steps = 0
        self.late_s = self.last_end_s = 0.0
        self.times = SchedulerClock()
        self.first_token = Histogram()
        self.series = Series()
        self.model = StandIn(cache.device, job.speeds.compute, decode_step_s=job.decode_step_s,
                             has_bytes=not job.virtual, clock=clock, is_stopped=is_stopped)
        bounds = EngineOptions(
            running_max=job.running_max, waiting_max=job.waiting_max, prefill_tokens_max=job.prefill_tokens_max,
        )
        self.engine = Engine(self.model, cache if job.virtual else self.times.watch(cache), bounds, clock=clock)
        self._trace = job.requests_of_trace()
        self._next = next(self._trace, None)
        self._source = TokenSource()
        self._router = Router(job.routing, job.processes)
        self._clock = clock
        self._is_stopped = is_stopped
        self._start_s = self._end_s = clock()
        self._hints: HintMaker | None = None
        self._traced: dict[str, TraceRequest] = {}  # by the id of a request that has not ended
        if job.hints is not None:
            router = Router(job.routing, job.processes)
            # A session that another engine serves next does not return to this one.
            own = (one for one in job.requests_of_trace() if self._is_mine(one, router))
            self._hints = HintMaker(cache, job.hints, own, job.seed, self._due_s, clock)

    def run(self) -> Generator[Sample, None, None]:
        """Replay the trace. Yield a sample every `SAMPLE_EVERY_S`, the last one when all pages are stored.

        The caller may stop between samples; then `close` cancels the work in flight, as after `is_stopped`. Raises
        InvalidInput for a bad line of the trace, TransferError if a copy fails.
        """
        self._start_s = sample_s = self._clock()
        while not self.finished and not self._is_stopped():
            self.step()
            now_s = self._clock()
            if now_s >= sample_s:
                sample_s = now_s + SAMPLE_EVERY_S
                yield self.sample()
            self.rest()
        deadline_s = self._clock() + SETTLE_S_MAX
        while not self._is_stopped() and not self.cache.drain(SAMPLE_EVERY_S) and self._clock() < deadline_s:
            yield self.sample()
        self.complete = not self._is_stopped()
        yield self.sample()

    def step(self) -> None:
        """Submit the requests that are due, and run one step of the scheduler."""
        self._arrive()
        records = [update.record for update in self.engine.step() if update.record is not None]
        if not self.job.virtual:
            self.times.end_step(self.unfinished + len(records), worked=self.engine.worked)
        self.idle_steps += not self.engine.worked
        for record in records:
            if not self.job.virtual:
                self.times.ended(record.rid)
            if record.error is not None:
                raise record.error
            if self._hints is not None:
                self._hints.ended(self._traced.pop(record.rid))
            if record.time_to_first_token_s is not None:
                self.first_token.add(1e9 * record.time_to_first_token_s)
        self.ended += len(records)
        if records:
            self.last_end_s = self._clock() - self._start_s

    def rest(self) -> None:
        """Let the workers run, and wait if the last step had nothing to compute."""
        self.engine.rest()

    @property
    def next_arrival_s(self) -> float:
        """The time of the clock at which the next request arrives; infinity if that depends on the queue."""
        due_s = math.inf if self._next is None else self._due_s(self._next)
        return math.inf if due_s <= self._clock() else due_s

    def _arrive(self) -> None:
        """Submit the requests that are due while the queue has room."""
        while self._next is not None and self.engine.waiting < self.job.waiting_max:
            due_s = self._due_s(self._next)
            late_s = self._clock() - due_s
            if late_s < 0:
                break
            self.late_s = max(self.late_s, late_s)
            self._submit(self._next)
            self._next = next(self._trace, None)

    def _due_s(self, request: TraceRequest) -> float:
        """Return the time of the clock at which the request is due: now if it only waits for the queue.

        The time is the same at each call. A remaining time would have another rounding error at each call, and a
        virtual clock that is one error too early would never reach it.
        """
        if self.job.speed_up is None:
            return self._clock()
        return self._start_s + request.timestamp_ms / 1000 / self.job.speed_up

    def _submit(self, traced: TraceRequest) -> None:
        prompt = self._source.take(traced)
        if not self._is_mine(traced, self._router):
            return
        if traced.kv_tokens > self.model.context_tokens:
            self.too_long += 1
            return
        rid = self.engine.submit(prompt.prompt, traced.new_tokens)
        self.model.expect(rid, prompt)
        if self._hints is not None:
            self._traced[rid] = traced
            self._hints.submitted(rid, traced)

    def _is_mine(self, traced: TraceRequest, router: Router) -> bool:
        """True if this engine serves a request. REQUIRES: `router` sees all requests in order."""
        return router.route(traced) == self.job.process or self.job.whole_trace_each

    @property
    def elapsed_s(self) -> float:
        """The time from the start of `run` to the last sample."""
        return self._end_s - self._start_s

    @property
    def finished(self) -> bool:
        """True if all requests of the trace have ended. Stores may still be in flight."""
        return self._next is None and not self.unfinished

    @property
    def unfinished(self) -> int:
        """The number of requests that wait or run now."""
        return self.engine.waiting + self.engine.running

    def sample(self) -> Sample:
        """Return the current state and add it to `series`. Queries the usage of storage, so do not call it in every
        step.
        """
        self._end_s = self._clock()
        state, counts = self.cache.statistics(), self.model.counts
        usage = state.controller.usage
        sample = Sample(
            elapsed_s=self.elapsed_s,
            requests=self.ended,
            waiting=self.engine.waiting,
            running=self.engine.running,
            prompt_tokens=counts.prompt_tokens,
            hit_tokens=dict(counts.hits),
            device_pages=state.device.capacity_pages - state.device.free_pages,
            host_pages=state.host.capacity_pages - state.host.free_pages,
            storage_bytes=0 if usage is None else usage.bytes,
            moved_bytes=moved_bytes(state),
            wrong_bytes=counts.wrong.total(),
            computed_tokens={reason.value: sum(state.computed_tokens.get((reason, detail), 0)
                                               for detail in DETAILS.get(reason, ("",))) for reason in Reason},
        )
        self.series.add(sample)
        return sample

    def result(self) -> ReplayResult:
        """Return the result. Raises InvariantError if an invariant is broken. REQUIRES: `close` has not been called,
        because it ends the storage whose counts are read."""
        self.engine.check()
        state, counts = self.cache.statistics(), self.model.counts
        controller, backend = state.controller, state.controller.backend
        evicted = {tier: state.evicted_pages.get(tier, 0) for tier in ("device", "host")}
        storage_errors = {} if backend is None else {f"storage:{kind}": count for kind, count in backend.errors.items()}
        return ReplayResult(
            setup=_setup(self.job, self.cache, state),
            complete=self.complete,
            elapsed_s=self.elapsed_s,
            requests=Requests(
                ended=self.ended,
                too_long=self.too_long,
                unfinished=self.unfinished,
                preempted=self.engine.statistics().preemptions,
                late_s=self.late_s,
                last_end_s=self.last_end_s,
            ),
            tokens=counts.tokens(_reasons(state)),
            checked_bytes=counts.checked_bytes,
            wrong_bytes=counts.wrong.total(),
            wrong_bytes_by_source=dict(counts.wrong),
            moved_bytes=moved_bytes(state),
            evicted_pages={**evicted, "storage": 0 if backend is None else backend.evicted_pages},
            skipped=dict(state.skipped),
            refused=dict(controller.refused),
            damaged={} if backend is None else dict(backend.corrupt),
            storage_errors={**controller.worker_errors, **storage_errors},
            first_token=self.first_token.latency(),
            scheduler=None if self.job.virtual else self.times.times(self.idle_steps),
            ideal=None,
            samples=tuple(self.series.samples),
            hints=None if self.job.hints is None else _outcomes(state),
        )

    def close(self) -> None:
        """Cancel the work in flight and close the cache. Blocks as `TreeCache.close` does. Idempotent."""
        self.model.forget()
        self.engine.close()


def moved_bytes(state: CacheStatistics) -> dict[str, int]:
    """Return the bytes moved between tiers since start, by direction."""
    controller, backend = state.controller, state.controller.backend
    return {
        "device_to_host": controller.written_pages * state.device.page_bytes,
        "host_to_device": controller.loaded_pages * state.device.page_bytes,
        "host_to_storage": 0 if backend is None else backend.written_bytes,
        "storage_to_host": 0 if backend is None else backend.read_bytes,
    }


def _reasons(state: CacheStatistics) -> dict[str, int]:
    """Return the computed tokens by reason and detail, such as `evicted.host`, without zeros."""
    counts = {".".join(filter(None, kind)): state.computed_tokens.get(kind, 0) for kind in KINDS}
    return {name: count for name, count in counts.items() if count}


def _outcomes(state: CacheStatistics) -> dict[str, dict[str, int]]:
    outcomes: dict[str, dict[str, int]] = {}
    for (action, outcome), count in sorted(state.hints.items()):
        outcomes.setdefault(action, {})[outcome] = count
    return outcomes


def start(job: ReplayJob, is_stopped: Callable[[], bool] = never) -> Replay:
    """Open the trace, build the cache, and return the replay, ready to `run`. `is_stopped`: see `Replay`.

    Raises InvalidInput, ConfigError, CapacityError and BackendError with the necessary change. After an error no thread
    is left running.
    """
    if job.preset not in PRESETS:
        raise InvalidInput(f"replay: unknown model {job.preset!r}; known: {', '.join(PRESETS)}")
    cache = create_cache(job.config, namespace_of(job.preset, job.config.page_size), device=torch.device(job.device))
    with ExitStack() as undo:
        undo.callback(cache.close)
        replay = Replay(cache, job, is_stopped=is_stopped)
        undo.pop_all()
    return replay


def namespace_of(model: str, page_size: int) -> Namespace:
    """Return the namespace of replays of a model of `PRESETS`. It differs from those of real engines, because replayed
    pages do not contain KV."""
    preset = PRESETS[model]
    return Namespace(
        f"hicache replay of {model}",
        replace(preset, page_size=page_size),
        tp_size=int(model.partition("-tp")[2] or 1),
        ranks_share_pages=preset.layout is KVLayout.MLA,  # each rank has the whole latent
    )


def _pages_in(usage: Usage, frame_bytes: int) -> int | None:
    """Return the capacity of a store in pages, from the average size of its pages; None without a limit."""
    page_bytes = usage.bytes / usage.pages if usage.pages else frame_bytes
    return None if usage.capacity_bytes is None else int(usage.capacity_bytes / page_bytes)


def _setup(job: ReplayJob, cache: TreeCache, state: CacheStatistics) -> Setup:
    storage, usage = job.config.storage, state.controller.usage
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
        storage_pages=None if usage is None else _pages_in(usage, state.host.page_bytes),
        processes=job.processes,
        routing=job.routing,
        whole_trace_each=job.whole_trace_each,
        speed_up=job.speed_up,
        running_max=job.running_max,
        waiting_max=job.waiting_max,
        prefill_tokens_max=job.prefill_tokens_max,
        prefill_tokens_per_s=job.speeds.compute.tokens_per_s,
        virtual=job.speeds if job.virtual else None,
        hints=None if job.hints is None else str(job.hints),
    )

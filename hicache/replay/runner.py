"""Replay: a trace through a real cache, by an engine that computes nothing but writes and compares every byte.

One step, as in `hicache.engine`:

    poll -> arrivals -> continue and admit prefills -> start_loading -> compare the shared prefix, layer by layer
         -> write the computed pages, cache_unfinished_req -> extend, or preempt the youngest -> cache_finished_req

Where a model would compute KV, the pages are filled with bytes derived from their keys; where it would read KV, they
are compared: the shared prefix when a request begins, as its layers arrive, and all of its pages when it ends. Prompts
and output lengths are the trace's. A partial last page has no key, is never shared, and is not filled.

Locking design: all calls on one thread, which owns every field here; so there is no lock.

Invariant: a request that waits holds no KV; one that runs holds KV for its `kv_tokens`, of which the first
`filled_pages` pages are written.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import numpy as np

from ..cache import CacheStatistics, RequestKV, TreeCache
from ..errors import InvalidInput, InvariantError
from ..keys import TOKEN_BYTES, RadixKey, page_keys
from ..tiers import Transfer
from ..types import PageIds
from .pages import PageBytes, Seeds, page_seeds
from .result import SOURCES, TIERS, Sample, Series
from .timing import Call, Cost, SchedulerClock
from .tokens import TokenSource
from .trace import TraceRequest

# As in `Engine.rest`: shorter burns the core that storage workers need.
IDLE_WAIT_S = 0.0005
# How often the state is looked at. It asks storage for its usage, which is I/O, so not with every step.
SAMPLE_EVERY_S = 0.1
# How long stores may take at the end of a replay before it goes on without them.
SETTLE_S_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Bounds of the replayed engine. More `running_max` and `waiting_max` mix more of the trace at once; what storage
    reads for requests that wait takes room on L2 until they run, so a long queue before a small L2 loses it again.

    `prefill_tokens_per_s` is how fast the engine pretends to compute: it sleeps as long as a forward would take,
    which is when copies and storage do their work; None: computing takes no time, so storage hardly keeps up.

    `speed_up` is how many times faster than its timestamps the trace arrives; None: as fast as the queue of
    `waiting_max` requests takes it. A full queue delays arrivals either way. Every `share_of`-th request is replayed,
    from number `share` on; the others are only taken note of.
    """

    running_max: int = 32
    waiting_max: int = 8
    prefill_tokens_max: int = 8192
    prefill_tokens_per_s: float | None = None
    speed_up: float | None = None
    share: int = 0
    share_of: int = 1

    def __post_init__(self) -> None:
        for name in ("running_max", "waiting_max", "prefill_tokens_max", "share_of"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"replay: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("prefill_tokens_per_s", "speed_up"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidInput(f"replay: {name} must be more than 0, got {value}")


@dataclass(slots=True, eq=False)
class _Request:
    rid: str
    sequence: int
    tokens: bytes = field(repr=False)  # of the prompt and the output, uint32 little endian
    prompt_tokens: int
    seen_tokens: int
    end_tokens: int  # with KV when it ends: all but the last token of the output
    seeds: Seeds = field(repr=False)  # of all its whole pages
    account: Cost
    prefill_end: int
    kv: RequestKV | None = None
    kv_tokens: int = 0
    filled_pages: int = 0
    preemptions: int = 0

    def key(self, tokens: int) -> RadixKey:
        """The cache key of the first `tokens` tokens."""
        return RadixKey(self.tokens[: tokens * TOKEN_BYTES])

    def held_kv(self) -> RequestKV:
        """`kv` of a request that runs."""
        if self.kv is None:
            raise InvariantError(f"replay: {self.rid} runs without KV")
        return self.kv

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES - self.prompt_tokens

    @property
    def prefilling(self) -> bool:
        return self.kv_tokens < self.prefill_end


@dataclass(slots=True)
class Counts:
    """Totals since start; see `result` for what they mean."""

    ended: int = 0
    too_long: int = 0
    preempted: int = 0
    late_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seen_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    checked_bytes: int = 0
    idle_steps: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)


class Replay:
    """See the module's docstring. Takes over `cache`: `close` closes it. Raises InvalidInput as `trace` does."""

    def __init__(
        self,
        cache: TreeCache,
        trace: Iterator[TraceRequest],
        options: ReplayOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options or ReplayOptions()
        self.cache = cache
        self.complete = False  # `run` went to its end
        self.times = SchedulerClock()
        self.counts = Counts(hits=Counter(dict.fromkeys(TIERS, 0)), wrong=Counter(dict.fromkeys(SOURCES, 0)))
        self.series = Series()
        self._bytes = PageBytes(cache.device)
        self._trace = trace
        self._next = next(trace, None)
        self._source = TokenSource()
        self._clock = clock
        self._start_s = self._end_s = self._forward_end_s = clock()
        self._waiting: list[_Request] = []  # by sequence
        self._running: dict[str, _Request] = {}  # in order of admission
        self._leaving: list[_Request] = []  # ended in this step
        self._full = False  # L1 had no room; nobody is admitted until a request has ended
        self._worked = False  # this step has computed something

    def run(self) -> Generator[Sample, None, None]:
        """Replay the trace; a sample every `SAMPLE_EVERY_S`, the last one when everything is stored.

        May be left between samples; then `close` gives up what is under way. Raises InvalidInput for a bad line of the
        trace, TransferError if a copy fails.
        """
        self._start_s = sample_s = self._clock()
        while not self.finished:
            self.step()
            now_s = self._clock()
            if now_s >= sample_s:
                sample_s = now_s + SAMPLE_EVERY_S
                yield self.sample()
            self._rest()
        deadline_s = self._clock() + SETTLE_S_MAX
        while not self.cache.drain(SAMPLE_EVERY_S) and self._clock() < deadline_s:
            yield self.sample()
        yield self.sample()
        self.complete = True

    def step(self) -> None:
        """Everything that an engine does between two forwards, and what stands for the forward."""
        self._worked = False
        self.times.timed(Call.POLL, None, self.cache.poll)
        self._arrive()
        budget = self.options.prefill_tokens_max
        chunks: list[tuple[_Request, int]] = []
        for request in self._running.values():
            if request.prefilling:
                budget -= self._chunk(request, budget, chunks)
        admitted = self._admit(budget, chunks)
        transfer = self.times.timed(Call.START_LOADING, None, self.cache.start_loading)
        rate = self.options.prefill_tokens_per_s
        self._forward_end_s = self._clock() + (sum(count for _, count in chunks) / rate if rate else 0.0)
        self._read_prefixes(admitted, transfer)
        self._prefill(chunks)
        self._decode()
        in_play = len(self._waiting) + len(self._running) + len(self._leaving)
        self.times.end_step(in_play, worked=self._worked)
        for request in self._leaving:
            self.times.ended(request.account)
        self._leaving.clear()
        self.counts.idle_steps += not self._worked

    def _rest(self) -> None:
        """Sleep until the forward of this step would have ended; for a moment if there was nothing to compute."""
        rest_s = self._forward_end_s - self._clock() if self._worked else IDLE_WAIT_S
        if rest_s > 0:
            time.sleep(rest_s)

    # Arrival

    def _arrive(self) -> None:
        """Queue the requests of the trace whose time has come, as far as the queue has room."""
        while self._next is not None and len(self._waiting) < self.options.waiting_max:
            late_s = self._late_s(self._next)
            if late_s < 0:
                break
            self.counts.late_s = max(self.counts.late_s, late_s)
            self._queue(self._next)
            self._next = next(self._trace, None)

    def _late_s(self, request: TraceRequest) -> float:
        """How long ago the trace has it arrive; negative if it is not yet time."""
        if self.options.speed_up is None:
            return 0.0
        return self._clock() - self._start_s - request.timestamp_ms / 1000 / self.options.speed_up

    def _queue(self, traced: TraceRequest) -> None:
        tokens = self._source.take(traced)
        if traced.index % self.options.share_of != self.options.share:
            return
        page_size = self.cache.page_size
        end_tokens = traced.input_length + max(0, traced.output_length - 1)
        if -(-end_tokens // page_size) > self.cache.device.pages:
            self.counts.too_long += 1
            return
        data = np.concatenate((tokens.prompt, tokens.output)).astype("<u4", copy=False).tobytes()
        keys = page_keys(data[: end_tokens * TOKEN_BYTES], page_size)
        request = _Request(
            f"request-{traced.index}", traced.index, data, traced.input_length, tokens.seen_tokens, end_tokens,
            page_seeds(keys), self.times.arrived(), prefill_end=traced.input_length,
        )  # fmt: skip
        self._waiting.append(request)
        self._prefetch(request)

    def _prefetch(self, request: _Request) -> None:
        key = request.key(request.prefill_end)
        self.times.timed(Call.PREFETCH, request.account, self.cache.prefetch_from_storage, request.rid, key)

    # Admission

    def _chunk(self, request: _Request, budget: int, chunks: list[tuple[_Request, int]]) -> int:
        """Plan the next tokens of a prefill; how many they are."""
        count = max(0, min(budget, request.prefill_end - request.kv_tokens))
        if count:
            chunks.append((request, count))
        return count

    def _admit(self, budget: int, chunks: list[tuple[_Request, int]]) -> list[_Request]:
        """Begin waiting requests while budget and L1 permit; one that waits for storage is overtaken."""
        admitted: list[_Request] = []
        if self._full and self._running:
            return admitted
        self._full = False
        for request in self._waiting.copy():
            if len(self._running) >= self.options.running_max or budget <= 0:
                break
            if not self.times.timed(Call.PROGRESS, request.account, self.cache.check_prefetch_progress, request.rid):
                continue
            key = request.key(request.prefill_end)
            kv = self.times.timed(Call.BEGIN, request.account, self.cache.begin_request, request.rid, key)
            if kv is None:
                self._full = True
                break
            self._begin(request, kv)
            admitted.append(request)
            budget -= self._chunk(request, budget, chunks)
        return admitted

    def _begin(self, request: _Request, kv: RequestKV) -> None:
        request.kv, request.kv_tokens, request.filled_pages = kv, kv.cached_tokens, kv.shared_pages
        computed = request.prefill_end - kv.cached_tokens
        if request.preemptions == 0:
            self.counts.prompt_tokens += request.prompt_tokens
            self.counts.output_tokens += request.output_tokens
            self.counts.seen_tokens += request.seen_tokens
            self.counts.computed_tokens += computed
            hits = (kv.device_hit_tokens, kv.host_hit_tokens, kv.storage_hit_tokens)
            self.counts.hits.update(dict(zip(TIERS, hits, strict=True)))
        else:
            self.counts.recomputed_tokens += computed
        self._waiting.remove(request)
        self._running[request.rid] = request

    # What stands for the forward

    def _read_prefixes(self, admitted: list[_Request], transfer: Transfer | None) -> None:
        """Compare what the cache has given to those admitted, each layer as soon as it is there."""
        pages: PageIds = np.concatenate([r.held_kv().pages[: r.held_kv().shared_pages] for r in admitted] or [_NONE])
        seeds = np.concatenate([r.seeds[: r.held_kv().shared_pages] for r in admitted] or [_NO_SEEDS])
        wrong = np.zeros(len(pages), np.int64)
        expected = self._bytes.expected(pages, seeds)
        for layer in range(self._bytes.layers):
            if transfer is not None:
                transfer.wait_layer(layer)
            wrong += self._bytes.wrong_bytes(layer, expected)
        self.counts.checked_bytes += len(pages) * self._bytes.page_bytes
        if not wrong.any():
            return
        first = 0
        for request in admitted:
            kv = request.held_kv()
            for tier, tokens in zip(TIERS, (kv.device_hit_tokens, kv.host_hit_tokens, kv.storage_hit_tokens),
                                    strict=True):  # fmt: skip
                last = first + tokens // self.cache.page_size
                self.counts.wrong[tier] += int(wrong[first:last].sum())
                first = last

    def _prefill(self, chunks: list[tuple[_Request, int]]) -> None:
        rate = self.options.prefill_tokens_per_s
        if chunks and rate:
            tokens = sum(count for _, count in chunks)
            self.cache.record_prefill(tokens, tokens / rate)
        for request, count in chunks:
            self._worked = True
            request.kv_tokens += count
            self._fill(request)
            key = request.key(request.kv_tokens)
            self.times.timed(Call.SHARE, request.account, self.cache.cache_unfinished_req, request.held_kv(), key)
            if request.kv_tokens == request.end_tokens:
                self._end(request)

    def _decode(self) -> None:
        """One token for each request that is past its prefill."""
        batch = [request for request in self._running.values() if not request.prefilling]
        if not batch:
            return
        at_border = [request for request in batch if not self._has_room(request)]
        starved = self.times.timed(Call.EXTEND, None, self._extend, at_border) if at_border else []
        self._worked |= len(starved) < len(batch)
        for request in batch:
            if request not in starved:
                request.kv_tokens += 1
                if request.kv_tokens == request.end_tokens:
                    self._end(request)
        # Whoever runs alone waits, and so do all while pages leave L1: what is missing is under copy and comes back.
        if starved and len(self._running) > 1 and not self.cache.writeback_pages:
            self._preempt(max(self._running.values(), key=lambda request: request.sequence))

    def _has_room(self, request: _Request) -> bool:
        """Whether its pages hold the KV of its next token already."""
        return len(request.held_kv().pages) * self.cache.page_size > request.kv_tokens

    def _extend(self, batch: list[_Request]) -> list[_Request]:
        """Give each of them room for its next token; those for which there is none."""
        return [request for request in batch if not self.cache.extend(request.held_kv(), request.kv_tokens + 1)]

    def _fill(self, request: _Request) -> None:
        """Write the whole pages that are computed but not written yet."""
        whole = request.kv_tokens // self.cache.page_size
        missing = slice(request.filled_pages, whole)
        self._bytes.fill(request.held_kv().pages[missing], request.seeds[missing])
        if (fence := self._bytes.fence()) is not None:
            self.cache.record_fence(fence)
        request.filled_pages = max(whole, request.filled_pages)

    # Leaving

    def _end(self, request: _Request) -> None:
        self._release(request)
        self.counts.ended += 1
        self._full = False
        self._leaving.append(request)

    def _preempt(self, request: _Request) -> None:
        """Send a request back to the queue; what it has computed goes to the tree and may be found again."""
        self._release(request)
        self.counts.preempted += 1
        request.preemptions += 1
        request.prefill_end = max(request.prefill_end, request.kv_tokens)
        request.kv_tokens = request.filled_pages = 0
        self._full = True
        self._waiting.append(request)
        self._waiting.sort(key=lambda waiting: waiting.sequence)
        self._prefetch(request)

    def _release(self, request: _Request) -> None:
        """Write what the decode has computed, read everything once more, and hand it to the cache."""
        kv = request.held_kv()
        self._fill(request)
        expected = self._bytes.expected(kv.pages[: request.filled_pages], request.seeds[: request.filled_pages])
        for layer in range(self._bytes.layers):
            self.counts.wrong["own"] += int(self._bytes.wrong_bytes(layer, expected).sum())
        self.counts.checked_bytes += request.filled_pages * self._bytes.page_bytes
        key = request.key(request.kv_tokens)
        self.times.timed(Call.FINISH, request.account, self.cache.cache_finished_req, kv, key)
        request.kv = None
        del self._running[request.rid]

    # State

    @property
    def elapsed_s(self) -> float:
        """Since the start of `run`, up to the last sample."""
        return self._end_s - self._start_s

    @property
    def finished(self) -> bool:
        """Whether nothing of the trace is left; stores may still be under way."""
        return self._next is None and not self._waiting and not self._running

    @property
    def unfinished(self) -> int:
        """Requests that wait or run now."""
        return len(self._waiting) + len(self._running)

    def sample(self) -> Sample:
        """The state now, which also goes to `series`. Asks storage for its usage: not for every step."""
        self._end_s = self._clock()
        state = self.cache.statistics()
        usage = state.controller.usage
        sample = Sample(
            elapsed_s=self.elapsed_s,
            requests=self.counts.ended,
            waiting=len(self._waiting),
            running=len(self._running),
            prompt_tokens=self.counts.prompt_tokens,
            hit_tokens=dict(self.counts.hits),
            device_pages=state.device.capacity_pages - state.device.free_pages,
            host_pages=state.host.capacity_pages - state.host.free_pages,
            storage_bytes=0 if usage is None else usage.bytes,
            moved_bytes=moved_bytes(state),
            wrong_bytes=self.counts.wrong.total(),
        )
        self.series.add(sample)
        return sample

    def check(self) -> None:
        """Raises InvariantError if the cache's books or the invariant of this class are broken. Between steps only."""
        self.cache.check()
        if any(request.kv is not None for request in self._waiting):
            raise InvariantError("replay: a waiting request holds pages")
        for request in self._running.values():
            room = len(request.held_kv().pages) * self.cache.page_size
            if not request.filled_pages * self.cache.page_size <= request.kv_tokens <= room:
                raise InvariantError(f"replay: {request.rid} has {request.kv_tokens} tokens in room for {room}")

    def close(self) -> None:
        """Give up what is in flight and close the cache; blocks as `TreeCache.close` does. May be called twice."""
        for request in self._running.values():
            self.cache.cache_finished_req(request.held_kv(), None)
        for request in self._waiting:
            self.cache.abort_prefetch(request.rid)
        self._running.clear()
        self._waiting.clear()
        self.cache.close()


def moved_bytes(state: CacheStatistics) -> dict[str, int]:
    """Bytes moved between tiers since start, by way."""
    controller, backend = state.controller, state.controller.backend
    return {
        "device_to_host": controller.written_pages * state.device.page_bytes,
        "host_to_device": controller.loaded_pages * state.device.page_bytes,
        "host_to_storage": 0 if backend is None else backend.written_bytes,
        "storage_to_host": 0 if backend is None else backend.read_bytes,
    }


_NONE: PageIds = np.empty(0, np.int32)
_NO_SEEDS: Seeds = np.empty(0, np.int64)

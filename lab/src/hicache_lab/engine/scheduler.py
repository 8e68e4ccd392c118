"""Engine: a plain scheduler with continuous batching that uses the cache like a serving engine.

One step:

    poll -> continue and admit prefills -> start_loading -> forward (waits layer by layer) -> cache_unfinished_req
         -> extend, or preempt the youngest -> forward of one token each -> cache_finished_req of ended requests

If the model has trailing pools, `prepare` precedes each forward. Without room for all tokens of a request there, the
step computes fewer of them, or leaves the request out. A step that can compute nothing preempts the youngest request.

On a stream device, `record_fence` follows each forward. On the CPU a forward has ended when it returns. Requests begin
in order of submission, with two exceptions: other requests overtake one that waits for storage, and a preempted request
keeps its position. Optionally the request with the longest cached prefix begins first. A prefill that exceeds the
step's budget continues in the next step.

Locking design: all calls are made on one thread, which owns all fields, so no lock is needed. No call does storage I/O
or waits for it. The forward runs on this thread too, and only waits for copies from L2.

A `Model` computes: the bundled Llama, or the stand-in of a replay.

Longer than 500 lines because it is one thing: each method is a part of a step, and moves requests between the same two
lists.

Invariant, verified by `check()`: a running request has its own pages after the shared ones, with room for its
`kv_tokens`; a waiting request does not have pages. `check()` also verifies the invariants of the cache and the model.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from hicache.arguments import WHOLE_MAX, instance, number, whole
from hicache.cache import (
    ChunkCache,
    RequestKV,
    SessionCache,
    TreeCache,
)
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.errors import (
    CapacityError,
    HiCacheError,
    InvalidInput,
    InvariantError,
    RankError,
    SessionError,
    TransferError,
)
from hicache.keys import RadixKey, TokenInput
from hicache.tiers import Transfer

from .interface import Batch, Model, Output
from .options import EngineOptions
from .requests import EngineStatistics, FinishReason, Request, RequestRecord, Update, prompt_ids
from .sampling import GREEDY, Sampling
from .schedule import Candidate, order_queue

_log = logging.getLogger(__name__)

# In order of submission.
_SEQUENCE = attrgetter("sequence")
# How often `run_until_done` checks for progress of storage and copies while there is nothing to compute. A shorter time
# takes a core from the storage workers, a longer one increases the time to first token.
IDLE_WAIT_S = 0.0005
# The output of a request is shared each time that this many pages are complete, if the model has trailing pools: pages
# that are not shared keep their slots. Each share starts a copy to L2, so it is not done for each page.
SHARED_PAGES = 4
# A check visits every node, which takes some microseconds each.
CHECK_EVERY_S = 1.0


class _Alone:
    """The context of the work of one request, see `Engine._alone`. A generator would take a microsecond more for each
    token."""

    __slots__ = ("_engine", "_request")

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return error is not None and self._engine._fail(self._request, error)


class Engine:
    """See the module's docstring. Owns `cache` (`close` closes it), whose L1 must be the pool of `model`.

    `clock` provides the times of the records and the pauses. Raises InvalidInput if model and cache do not have the
    same pool, or if the model supports fewer than `running_max` requests.
    """

    def __init__(
        self,
        model: Model,
        cache: TreeCache,
        options: EngineOptions | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.options = options or EngineOptions()
        if model.pool is not cache.device:
            raise InvalidInput("engine: the model writes its KV to another pool than the cache's L1; pass one pool")
        if model.requests_max < self.options.running_max:
            raise InvalidInput(
                f"engine: the model has rows for {model.requests_max} requests, running_max is "
                f"{self.options.running_max}"
            )
        self.model = model
        self.cache = cache
        self._clock = clock
        self._waiting: list[Request] = []  # by sequence
        self._running: dict[str, Request] = {}  # in order of admission
        self._updates: list[Update] = []
        self._crowded = False  # after a preemption, no request is admitted until one has ended
        self._full = False  # L1 had no room for a request, and no request has ended since
        self._preempted = False  # this step has taken L1 from a request
        self._left_out = False  # this step has left out a request, because a trailing pool had no room
        self._worked = False  # the last step computed something
        self._closed = False
        self._next_check_s = -math.inf
        self._submitted = self._steps = 0
        self._finished: Counter[FinishReason] = Counter()
        self._counts: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()

    def submit(
        self,
        prompt_tokens: TokenInput,
        max_new_tokens: int,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        ignore_eos: bool = False,
        sampling: Sampling = GREEDY,
        session_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request, start the prefetch of its prefix, and return the request id. Does not block.

        `priority` is for the eviction policy of that name: pages of requests with a higher priority stay longer. With a
        `session_id`, the request is the next turn of that session of the engine's SessionCache. Raises InvalidInput for
        an argument of another type or range, an empty prompt, a token outside the vocabulary, a session without a
        SessionCache, and after `close`; CapacityError for a prompt that never fits into L1 or the context and for a
        full queue; SessionError as `SessionCache.join_session`. After an error the request is not queued.
        """
        tokens = prompt_ids(prompt_tokens, self.model.vocab_size)
        key = RadixKey.of(prompt_tokens, extra_key=extra_key, cache_salt=cache_salt)
        max_new_tokens = whole("engine: max_new_tokens", max_new_tokens, 1)
        priority = whole("engine: priority", priority, -WHOLE_MAX)
        instance("engine: ignore_eos", ignore_eos, bool)
        instance("engine: sampling", sampling, Sampling)
        if self._closed:
            raise InvalidInput("engine: it is closed; build a new one")
        # The last generated token is not computed, so it does not need a slot.
        positions, context = len(tokens) + max_new_tokens - 1, self.model.context_tokens
        if positions > context:
            raise CapacityError(f"engine: prompt and output need {positions} positions of {context}; use less")
        self._require_fit(len(tokens))
        if len(self._waiting) >= self.options.waiting_max:
            raise CapacityError(f"engine: {len(self._waiting)} requests are waiting; submit again later")
        rid = f"request-{self._submitted}"
        request = Request(
            rid, self._submitted, tokens, len(tokens), max_new_tokens, ignore_eos, key.seed, self._clock(), sampling,
            session_id, priority, _key=key,
        )
        self._join_session(request)
        self._submitted += 1
        self._waiting.append(request)
        self.cache.prefetch_from_storage(rid, key)
        return rid

    def abort(self, rid: str) -> bool:
        """End a request now; the next step returns its record. Return False if the request does not exist or has ended.
        """
        instance("rid", rid, str)
        request = self._running.get(rid) or next((r for r in self._waiting if r.rid == rid), None)
        if request is None:
            return False
        self._end(request, FinishReason.ABORTED)
        return True

    def step(self) -> list[Update]:
        """Compute one chunk of each prefill and one token of each running request, and return the updates.

        Returns at once if all waiting requests wait for storage or room. If the work of one request fails, that
        request ends as FAILED, with the error in its record. Raises only for bugs in the work that all requests share.
        """
        self._steps += 1
        self._worked = self._preempted = self._left_out = False
        if self.cache.poll():
            self._full = False
        continued = [request for request in self._running.values() if request.prefilling]
        budget = self.options.prefill_tokens_max
        chunks: list[tuple[Request, int]] = []
        for request in continued:
            with self._alone(request):
                budget -= self._chunk(request, budget, chunks)
        self._admit(budget, chunks)
        transfer = self.cache.start_loading()
        if chunks:
            self._prefill(chunks, transfer)
        # The KV of decoding requests is on L1 already: a failed load must not fail them.
        self.cache.device.loading = None
        self._decode()
        if self._left_out and not (self._worked or self._preempted) and len(self._running) > 1:
            self._preempt_youngest()
        updates, self._updates = self._updates, []
        return updates

    def run_until_done(self, timeout_s: float = math.inf) -> dict[str, RequestRecord]:
        """Step until all requests have ended or `timeout_s` is over. Return the records of ended requests by request
        id.

        Sleeps `IDLE_WAIT_S` after a step without work.
        """
        deadline = self._clock() + number("timeout_s", timeout_s, most=math.inf)
        records = {}
        while (self._waiting or self._running or self._updates) and self._clock() < deadline:
            updates = self.step()
            records.update({update.rid: update.record for update in updates if update.record is not None})
            self.rest()
        return records

    def rest(self) -> None:
        """Sleep `IDLE_WAIT_S` if the last step had nothing to compute; call it between steps.

        A loop without a pause would keep the interpreter's lock, and the threads that read from storage would wait for
        it. Raises InvariantError if `check_when_idle` finds a broken invariant.
        """
        if self._worked:
            return
        if self.options.check_when_idle and self._clock() >= self._next_check_s:
            self.check()
            self._next_check_s = self._clock() + CHECK_EVERY_S
        self._clock.sleep(IDLE_WAIT_S)

    @property
    def waiting(self) -> int:
        """The number of requests that are not running, including preempted ones."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of requests with KV in L1."""
        return len(self._running)

    @property
    def worked(self) -> bool:
        """True if the last step computed something."""
        return self._worked

    # Inside a step

    def _chunk(self, request: Request, budget: int, chunks: list[tuple[Request, int]]) -> int:
        """Plan the next tokens of a prefill and return their number."""
        count = min(budget, request.prefill_end - request.kv_tokens)
        if count > 0 and (count := self._prepare(request, count)):
            chunks.append((request, count))
        return max(0, count)

    def _prepare(self, request: Request, count: int) -> int:
        """Make room in the trailing pools for the next `count` tokens of a request, or for those of fewer pages. Return
        the number of tokens, 0 without room for the first page."""
        if not self.model.trailing:
            return count
        kv, start, page_size = request.held_kv(), request.kv_tokens, self.cache.page_size
        first, end = start // page_size, start + count
        while not self.cache.prepare(kv, start, end):
            if kv.shared_pages < first:
                self._share(request)  # which releases slots
                if self.cache.prepare(kv, start, end):
                    break
            pages = (-(-end // page_size) - first) // 2
            if pages == 0:
                # No request is admitted that could take the next free slots from this one.
                self._left_out = self._crowded = True
                return 0
            end = (first + pages) * page_size
        return end - start

    def _admit(self, budget: int, chunks: list[tuple[Request, int]]) -> None:
        """Begin waiting requests while rows, budget and L1 permit.

        Each request gets a part of the budget, so a request with a load takes part in the forward that waits for it,
        if the trailing pools have room.
        """
        if self._running and (self._crowded or self._full):
            return
        self._crowded = self._full = False
        if len(self._running) >= self.options.running_max or budget <= 0:
            return
        for request in self._queue():
            if len(self._running) >= self.options.running_max or budget <= 0 or self._left_out:
                break
            with self._alone(request):
                key = request.key(len(request.tokens))
                kv = self.cache.begin_request(request.rid, key, priority=request.priority)
                if kv is None:
                    self._full = True
                    break
                self._start(request, kv)
                budget -= self._chunk(request, budget, chunks)

    def _alone(self, request: Request) -> _Alone:
        """Return the context of the work of one request: if it fails, that request ends as FAILED and all others
        continue. Raises InvariantError and RankError, which concern all requests."""
        return _Alone(self, request)

    def _fail(self, request: Request, error: BaseException) -> bool:
        """End a request for an exception of its work. Return False for an exception that concerns all requests."""
        if isinstance(error, InvariantError | RankError) or not isinstance(error, Exception):
            return False
        if isinstance(error, HiCacheError):
            self._end(request, FinishReason.FAILED, error)
            return True
        # A bug fails one request and not the step; `finished` counts it.
        _log.error("engine: the work of %s failed", request.rid, exc_info=error)
        failure = HiCacheError(f"engine: the work of {request.rid} failed with {type(error).__name__}")
        failure.__cause__ = error.with_traceback(None)  # its frames hold tensors
        self._end(request, FinishReason.FAILED, failure)
        return True

    def _queue(self) -> Iterable[Request]:
        """Return the waiting requests in the order to begin them, without those that should wait for storage or for
        another request."""
        ready = (request for request in self._waiting.copy() if self.cache.check_prefetch_progress(request.rid))
        schedule = self.options.schedule
        if schedule.policy == "fcfs" or (schedule.looks_up and isinstance(self.cache, ChunkCache)):
            return ready
        return order_queue(
            [
                Candidate(one, one.key(len(one.tokens)), one.arrival_s, one.max_new_tokens, one.sequence)
                for one in ready
            ],
            self.cache.peek,
            page_size=self.cache.page_size,
            now_s=self._clock(),
            computing=[request.key(request.prefill_end) for request in self._running.values() if request.prefilling],
            options=schedule,
        ).now

    def _join_session(self, request: Request) -> None:
        if request.session_id is None:
            return
        if not isinstance(self.cache, SessionCache):
            raise InvalidInput("engine: a request of a session needs a SessionCache")
        self.cache.join_session(request.rid, request.session_id)

    def _start(self, request: Request, kv: RequestKV) -> None:
        request.kv = kv
        request.kv_tokens, request.prefill_end = kv.cached_tokens, len(request.tokens)
        hits = {"device": kv.device_hit_tokens, "host": kv.host_hit_tokens, "storage": kv.storage_hit_tokens}
        self._hits.update(hits)
        if request.preemptions == 0:
            request.hits = hits
        self._waiting.remove(request)
        self._running[request.rid] = request
        self.model.begin(request)

    def _prefill(self, chunks: list[tuple[Request, int]], transfer: Transfer | None) -> None:
        try:
            output = self._compute(chunks)
        except TransferError as error:
            # Requests that have computed something did not use the failed load; they compute the same chunk again.
            for request in [one for one in self._running.values() if one.kv_tokens == one.held_kv().cached_tokens]:
                self._end(request, FinishReason.FAILED, error)
            return
        for request, count in chunks:
            request.kv_tokens += count
            self._counts["computed"] += count
            if request.preemptions:
                request.recomputed_tokens += count
            else:
                request.computed_tokens += count
            with self._alone(request):
                self._share(request)
        took_s = output.wait()
        self._sample(chunks, output)
        if transfer is None and took_s is not None:
            self.cache.record_prefill(sum(count for _, count in chunks), took_s)

    def _share(self, request: Request) -> None:
        """Share the computed pages of a running request."""
        kv = request.held_kv()
        pages = kv.pages
        self.cache.cache_unfinished_req(kv, request.key(request.kv_tokens))
        if kv.pages is not pages:
            self.model.place(request)

    def _compute(self, batch: Batch) -> Output:
        """Run the forward. Later copies start after it, also after the layers of a failed forward."""
        try:
            output = self.model.compute(batch)
        finally:
            if (fence := self.model.fence()) is not None:
                self.cache.record_fence(fence)
        self._worked = True
        return output

    def _decode(self) -> None:
        batch: list[tuple[Request, int]] = []
        for request in sorted(self._running.values(), key=_SEQUENCE):
            if request.rid in self._running and not request.prefilling:
                with self._alone(request):
                    if self._make_room(request) and self._prepare(request, 1):
                        batch.append((request, 1))
        if batch:
            output = self._compute(batch)
            for request, _ in batch:
                request.kv_tokens += 1
                if self.model.trailing and request.kv_tokens % (SHARED_PAGES * self.cache.page_size) == 0:
                    with self._alone(request):
                        self._share(request)
            output.wait()
            self._sample(batch, output)

    def _make_room(self, request: Request) -> bool:
        """Make room for the next token's KV, by preempting the youngest request if necessary. Return False if there is
        no room in this step. Raises CapacityError for a request that has outgrown L1.

        At most one request is preempted per step, because its pages may still be in flight to L2. No request is
        preempted while evicted pages are in flight to L2, because they will be free soon. The only running request
        waits, because no other request holds pages for long.
        """
        kv = request.held_kv()
        if len(kv.pages) * self.cache.page_size > request.kv_tokens:
            return True
        while not self.cache.extend(kv, request.kv_tokens + 1):
            if self._preempted or len(self._running) == 1 or self.cache.writeback_pages:
                return False
            if self._preempt_youngest() is request:
                return False
        self.model.place(request)
        return True

    def _preempt_youngest(self) -> Request:
        victim = max(self._running.values(), key=_SEQUENCE)
        with self._alone(victim):
            self._preempt(victim)
        return victim

    def _preempt(self, request: Request) -> None:
        """Return a request to the queue. Its KV is inserted into the tree and reused unless it is evicted."""
        self._release(request, share=True)
        self._counts["preemptions"] += 1
        request.preemptions += 1
        self._preempted = self._crowded = True
        self._waiting.append(request)
        self._waiting.sort(key=lambda waiting: waiting.sequence)
        try:
            self._join_session(request)
        except SessionError:
            request.session_id = None  # the session has been closed; the tokens are the same without it
        self.cache.prefetch_from_storage(request.rid, request.key(len(request.tokens)))

    def _sample(self, batch: Batch, output: Output) -> None:
        """Append the next token to the requests whose prefill is complete, and end those with all their tokens."""
        for index, (request, _) in enumerate(batch):
            if request.rid in self._running and not request.prefilling:
                with self._alone(request):
                    self._append(request, output.token(index))

    def _append(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        self._counts["output"] += 1
        if request.first_token_s is None:
            request.first_token_s = self._clock()
        if token in self.model.eos_tokens and not request.ignore_eos:
            self._end(request, FinishReason.EOS, token=token)
        elif len(request.tokens) - request.prompt_tokens >= request.max_new_tokens:
            self._end(request, FinishReason.LENGTH, token=token)
        else:
            self._updates.append(Update(request.rid, (token,)))

    def _end(
        self, request: Request, reason: FinishReason, error: HiCacheError | None = None, token: int | None = None
    ) -> None:
        if request.rid in self._running:
            self._release(request, share=reason in (FinishReason.EOS, FinishReason.LENGTH))
        else:
            self.cache.abort_prefetch(request.rid)
            if request in self._waiting:
                self._waiting.remove(request)
        self._crowded = self._full = False
        self._finished[reason] += 1
        record = request.record(reason, error, self._clock())
        self._updates.append(Update(request.rid, () if token is None else (token,), record))

    def _release(self, request: Request, *, share: bool) -> None:
        """Release a request's pages on L1. Its shared pages end before the last sampled token, which does not have
        KV."""
        self.model.end(request)
        self.cache.cache_finished_req(request.held_kv(), request.key(request.kv_tokens) if share else None)
        request.kv = None
        request.kv_tokens = request.prefill_end = 0
        del self._running[request.rid]

    def _require_fit(self, tokens: int) -> None:
        pages = -(-tokens // self.cache.page_size)
        if pages > self.cache.device.pages:
            raise CapacityError(
                f"engine: {tokens} tokens need {pages} pages of KV, L1 has {self.cache.device.pages}; "
                "raise device.size or device.tokens"
            )

    # State

    def statistics(self) -> EngineStatistics:
        """Return a snapshot; `cache.statistics()` has the statistics of the tiers."""
        return EngineStatistics(
            waiting=len(self._waiting),
            running=len(self._running),
            steps=self._steps,
            submitted=self._submitted,
            finished=dict(self._finished),
            preemptions=self._counts["preemptions"],
            hit_tokens=dict(self._hits),
            computed_tokens=self._counts["computed"],
            output_tokens=self._counts["output"],
        )

    def check(self) -> None:
        """Raise InvariantError if an invariant of the cache or of this class is broken. Call it between steps."""
        self.cache.check()
        running, own = list(self._running.values()), Counter[int]()
        if any(request.kv is not None for request in self._waiting):
            raise InvariantError("engine: a waiting request holds pages")
        for request in running:
            kv, tokens = request.held_kv(), request.kv_tokens
            if not kv.shared_pages * self.cache.page_size <= tokens <= len(kv.pages) * self.cache.page_size:
                raise InvariantError(f"engine: {request.rid} has KV of {tokens} tokens in {len(kv.pages)} pages")
            if not request.prefilling and tokens != len(request.tokens) - 1:
                raise InvariantError(f"engine: {request.rid} decodes without the KV of all its tokens")
            own.update(kv.pages[kv.shared_pages :].tolist())
        if any(count > 1 for count in own.values()):
            raise InvariantError("engine: two requests own the same page")
        self.model.check(running)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Abort all requests and close the cache. Blocks up to `timeout_s`. Return False if some work did not end in
        time."""
        number("timeout_s", timeout_s)
        self._closed = True
        for request in [*self._running.values(), *self._waiting]:
            self._end(request, FinishReason.ABORTED)
        return self.cache.close(timeout_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

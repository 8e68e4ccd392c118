"""The scheduler of a test engine that manages its own device blocks and uses a `HostCache`, as vLLM does.

A step handles the reports of the workers, admits requests (prefetch, lookup, load), computes one batch, and writes back
the pages of requests that have ended. The scheduler never waits for a worker; each step ends with `HostCache.poll`.
With `keeps_pages` the engine has a prefix cache on the device, and loads the pages behind that prefix from the host.
Without it, all hits come from the host.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from hicache.cache import HostCache, HostLoad, HostWrite
from hicache.keys import RadixKey
from tests.waiting import wait_for
from tests.workers.blocks import BlockPool
from tests.workers.model import ModelShape, next_token
from tests.workers.worker import Computed, Copied, Copy, Forward, Report
from tests.workers.workers import WorkerLost, Workers

_STEP_WAIT_S = 0.001


class State(enum.Enum):
    """The state of a request."""

    WAITING = enum.auto()  # for storage, for another request's load, or for blocks
    LOADING = enum.auto()
    RUNNING = enum.auto()
    WRITING = enum.auto()  # all tokens are computed; a backup reads the blocks
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One prompt. `tokens` are the prompt and the output; the KV of the first `computed` tokens is in `blocks`.

    `device_pages` of the prompt were on the device, and `hit_pages` behind them came from the host.
    """

    rid: str
    prompt: list[int]
    count: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    device_pages: int = 0
    hit_pages: int = 0
    state: State = State.WAITING

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[len(self.prompt) :]

    @property
    def answered(self) -> bool:
        """True once all tokens are computed; the write-back may still be in flight."""
        return len(self.output) == self.count


@dataclass(slots=True, eq=False)
class _Job:
    """A copy that the workers in `ranks` have not reported yet. `end` gets its time, or None if a rank failed."""

    ranks: set[int]
    end: Callable[[float | None], None]
    seconds: float | None = 0.0


class Engine:
    """One scheduler over `cache` and `workers`. It allocates the device blocks."""

    def __init__(
        self, cache: HostCache, workers: Workers, shape: ModelShape, blocks: BlockPool, *, hashed_keys: bool
    ) -> None:
        self.cache = cache
        self.workers = workers
        self.failed_copies = 0
        self.lost_workers = 0
        self.blocks = blocks
        self._shape = shape
        self._hashed_keys = hashed_keys
        self._requests: list[Request] = []
        self._jobs: dict[int, _Job] = {}
        self._job_number = 0
        self._batch: list[Request] = []
        self._parts: list[list[int]] = []

    @property
    def busy(self) -> bool:
        """True while a request has not ended."""
        return bool(self._requests)

    @property
    def copying_ranks(self) -> set[int]:
        """The ranks that have not reported a copy yet."""
        return {rank for job in self._jobs.values() for rank in job.ranks}

    def submit(self, rid: str, prompt: list[int], count: int = 3) -> Request:
        """Add a request and start its prefetch."""
        request = Request(rid, prompt, count, list(prompt))
        self._requests.append(request)
        self.cache.prefetch(rid, self.key(prompt))
        return request

    def key(self, tokens: list[int]) -> RadixKey:
        """Return the key of the whole pages: for each page the chained hash of its last block, or the tokens."""
        if not self._hashed_keys:
            return RadixKey.of(tokens)
        shape, chained, hashes = self._shape, b"", []
        for end in range(shape.block, len(tokens) + 1, shape.block):
            block = np.array(tokens[end - shape.block : end], dtype="<u4").tobytes()
            chained = hashlib.sha256(b"test engine" + chained + block).digest()
            hashes.append(chained)
        last_blocks = hashes[shape.blocks_per_page - 1 :: shape.blocks_per_page]
        return RadixKey.of_hashes(last_blocks)

    def step(self) -> None:
        """Run one step. If a worker died, all copies in flight end as failed; call `replace_workers` next."""
        try:
            self._receive()
            self._admit()
            self._compute()
        except WorkerLost:
            self._lose()
        self.cache.poll()
        self.cache.check()

    def run(self, *requests: Request) -> list[list[int]]:
        """Step until the requests have ended. Return their outputs."""
        wait_for(lambda: all(request.state is State.ENDED for request in requests), self.step)
        return [request.output for request in requests]

    def replace_workers(self, workers: Workers) -> None:
        """Continue with new workers, whose blocks are empty. Running requests begin again."""
        self.workers = workers

    def _receive(self) -> None:
        for rank, report in self.workers.receive(_STEP_WAIT_S):
            self._take(rank, report)

    def _take(self, rank: int, report: Report) -> None:
        match report:
            case Copied(number, seconds):
                job = self._jobs[number]
                job.ranks.remove(rank)
                if seconds is None or job.seconds is None:
                    job.seconds = None
                else:
                    job.seconds = max(job.seconds, seconds)
                if not job.ranks:
                    del self._jobs[number]
                    self._end(job)
            case Computed(parts):
                self._parts.append(parts)
                if len(self._parts) == len(self.workers):
                    self._take_tokens()

    def _end(self, job: _Job) -> None:
        self.failed_copies += job.seconds is None
        job.end(job.seconds)

    def _admit(self) -> None:
        for request in self._in(State.WAITING):
            if not self.cache.check_prefetch(request.rid):
                continue
            key, start_page = self.key(request.prompt), self.blocks.cached_pages(request.prompt)
            found = self.cache.lookup(request.rid, key, start_page)
            if found.loading:
                continue
            blocks = self.blocks.take(request.prompt, len(request.prompt) + request.count)
            if blocks is None:
                continue
            request.blocks, request.device_pages = blocks, start_page
            request.computed = start_page * self._shape.page_tokens
            # The last token is always computed: its logit is needed.
            end_page = min(start_page + found.pages, (len(request.prompt) - 1) // self._shape.page_tokens)
            load = None
            if end_page > start_page:
                load = self.cache.begin_load(request.rid, key, start_page, end_page)
            request.state = State.RUNNING if load is None else State.LOADING
            if load is not None:
                self._load(request, load)

    def _load(self, request: Request, load: HostLoad) -> None:
        pages = len(load.host_pages)

        def end(seconds: float | None) -> None:
            self.cache.end_load(load, seconds)
            request.state = State.RUNNING
            if seconds is not None:
                request.computed, request.hit_pages = (load.start_page + pages) * self._shape.page_tokens, pages

        self._copy(True, request.blocks[load.start_page * self._shape.blocks_per_page :], load.host_pages, end)

    def _copy(self, load: bool, blocks: list[int], pages: Iterable[int], end: Callable[[float | None], None]) -> None:
        """Start a copy between `blocks` and `pages` on all ranks. Uses only as many blocks as the pages have."""
        k = self._shape.blocks_per_page
        host_blocks = [int(page) * k + i for page in pages for i in range(k)]
        self._job_number += 1
        # Add the job first: if `send` finds a dead worker, the job then ends with all others.
        self._jobs[self._job_number] = _Job(set(range(len(self.workers))), end)
        self.workers.send(Copy(self._job_number, load, blocks[: len(host_blocks)], host_blocks))

    def _compute(self) -> None:
        if self._batch:
            return
        self._batch = list(self._in(State.RUNNING))
        if self._batch:
            batch = [(request.tokens[request.computed :], request.computed, request.blocks) for request in self._batch]
            self.workers.send(Forward(batch))

    def _take_tokens(self) -> None:
        batch, parts = self._batch, zip(*self._parts, strict=True)
        self._batch, self._parts = [], []
        for request, of_ranks in zip(batch, parts, strict=True):
            request.computed = len(request.tokens)
            request.tokens.append(next_token(of_ranks))
            if request.answered:
                self._write(request)

    def _write(self, request: Request) -> None:
        write = self.cache.begin_write(request.rid, self.key(request.tokens[: request.computed]))
        if write is None:
            self._finish(request)
            return
        request.state = State.WRITING
        self._write_pages(request, write)

    def _write_pages(self, request: Request, write: HostWrite) -> None:
        def end(seconds: float | None) -> None:
            self.cache.end_write(write, complete=seconds is not None)
            self._finish(request)

        first = write.start_page * self._shape.blocks_per_page
        self._copy(False, request.blocks[first:], write.host_pages, end)

    def _finish(self, request: Request) -> None:
        request.state = State.ENDED
        self.blocks.give_back(request.tokens[: request.computed], request.blocks)
        self._requests.remove(request)
        self.cache.abort(request.rid)

    def _lose(self) -> None:
        """End all copies in flight. Kill the other workers first: they must not write to freed pages."""
        self.lost_workers += 1
        self.workers.kill()
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.seconds = None
            self._end(job)
        self._batch, self._parts = [], []
        for request in self._in(State.RUNNING):  # they begin again, on new workers
            self.blocks.give_back(request.tokens[: request.computed], request.blocks)
            request.tokens, request.computed, request.hit_pages = list(request.prompt), 0, 0
            request.state = State.WAITING
        self.blocks.forget()

    def _in(self, state: State) -> list[Request]:
        return [request for request in self._requests if request.state is state]

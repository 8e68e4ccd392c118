"""StandIn: the model of a replay. It does not compute; it stamps pages and compares every byte that comes back.

A page consists of 8-byte words. Word j of the page with key k is the first 8 bytes of k, xor a constant of j. Keys are
SHA-256 digests and all constants differ. So a word of another page, at another offset, of another layer, or of a
previous use is equal by chance only once in 2**64. A page that is swapped, shifted, stale, torn or partly copied shows
in each of its words, for the cost of one xor per word.

Pages are written where a model would compute KV, and compared where it would read KV: the shared prefix when a request
begins, layer by layer as they arrive, and all pages of the request when it ends. Prompts and outputs are those of the
trace. A partial last page does not have a key, is never shared, and is not stamped.

Locking design: all calls are made on the scheduler's thread, which owns all fields, so no lock is needed.

Invariant, verified by `check()`: all whole pages of the `kv_tokens` of a running request are stamped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.errors import InvalidInput, InvariantError
from hicache.keys import page_keys
from hicache.tiers import Fence, KVPool, TrailingPool
from hicache.tiers.upload import upload
from hicache.types import NO_PAGES, PageIds

from ..engine import Batch, Request
from ..speeds import ComputeSpeed
from ..tier_names import TIERS
from ..traces.tokens import VOCAB_SIZE, Prompt, mixed
from .result import SOURCES, TokenCounts

WORD_BYTES = 8
# One 8-byte seed per page, int64: the start of its key.
Seeds: TypeAlias = npt.NDArray[np.int64]
_NO_SEEDS: Seeds = np.empty(0, np.int64)
_INSTANT = ComputeSpeed()
# How often a forward that takes real time looks whether the replay has been stopped.
_LOOK_S = 0.2


def never() -> bool:
    """Return False: the replay is not stopped."""
    return False


def page_seeds(keys: Sequence[bytes]) -> Seeds:
    """Return the seeds of pages from their keys."""
    return np.frombuffer(b"".join(key[:WORD_BYTES] for key in keys), np.int64)


@dataclass(slots=True)
class Counts:
    """Totals since start; `result` describes them."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    seen_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    checked_bytes: int = 0
    hits: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(TIERS, 0)))
    wrong: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(SOURCES, 0)))

    def tokens(self, reasons: Mapping[str, int]) -> TokenCounts:
        """Return the counts of tokens, as a value. `reasons` are the cache's."""
        return TokenCounts(
            prompt=self.prompt_tokens,
            output=self.output_tokens,
            seen=self.seen_tokens,
            hits=dict(self.hits),
            computed=self.computed_tokens,
            recomputed=self.recomputed_tokens,
            reasons=reasons,
        )


@dataclass(slots=True, eq=False)
class _Known:
    """The trace's data of a request, and the progress of its pages. `seeds` are those of all its whole pages, including
    future ones."""

    prompt: Prompt = field(repr=False)
    seeds: Seeds = field(repr=False)
    stamped_pages: int = 0
    compared: bool = False  # its shared prefix has been compared

    def next_token(self, position: int) -> int:
        """Return the output token at `position`, or an arbitrary one for a request without output in the trace."""
        return int(self.prompt.output[position]) if 0 <= position < len(self.prompt.output) else 0


class _Stamped(NamedTuple):
    """The output of a forward: the trace's tokens, available when a real forward would have ended."""

    next_tokens: list[int]
    end_s: float
    took_s: float | None
    clock: Clock
    is_stopped: Callable[[], bool]
    look_s: float

    def wait(self) -> float | None:
        while self.took_s is not None and (left_s := self.end_s - self.clock()) > 0 and not self.is_stopped():
            self.clock.sleep(min(left_s, self.look_s))
        return self.took_s

    def token(self, index: int) -> int:
        return self.next_tokens[index]


class StandIn:
    """See the module's docstring. A forward takes as long as `compute` says, or `decode_step_s` without prompt tokens,
    while copies and storage work, less if `is_stopped` becomes True. Times are those of `clock`.

    Without `has_bytes` nothing is stamped or compared, for pools without memory; then a forward computes its layers as
    they arrive. REQUIRES: a pool of `hicache.tiers`. Raises InvalidInput for a geometry whose layers are not whole
    words.
    """

    vocab_size = VOCAB_SIZE
    eos_tokens: frozenset[int] = frozenset()
    trailing: Sequence[TrailingPool] = ()
    requests_max = 1 << 30  # a replay never reaches it

    def __init__(
        self,
        pool: KVPool,
        compute: ComputeSpeed = _INSTANT,
        *,
        decode_step_s: float = 0.0,
        has_bytes: bool = True,
        clock: Clock = SYSTEM_CLOCK,
        is_stopped: Callable[[], bool] = never,
    ) -> None:
        self.pool = pool
        self.context_tokens = pool.pages * pool.geometry.page_size
        self.counts = Counts()
        self._bytes = PageBytes(pool) if has_bytes else None
        self._speed = compute
        self._decode_step_s = decode_step_s
        self._clock = clock
        self._is_stopped = is_stopped
        self._known: dict[str, _Known] = {}

    def expect(self, rid: str, prompt: Prompt) -> None:
        """Register the prompt of a submitted request. REQUIRES: called before the step in which it begins."""
        seeds = _NO_SEEDS
        if self._bytes is not None:
            seeds = page_seeds(page_keys(prompt.kv_tokens, self.pool.geometry.page_size))
        self._known[rid] = _Known(prompt, seeds)

    def forget(self) -> None:
        """Remove all requests, so that their pages are no longer compared."""
        self._known.clear()

    # Called by the scheduler; see `Model`

    def begin(self, request: Request) -> None:
        known, counts, kv = self._known[request.rid], self.counts, request.held_kv()
        known.stamped_pages, known.compared = kv.shared_pages, False
        computed = request.prefill_end - kv.cached_tokens
        if request.preemptions:
            counts.recomputed_tokens += computed
            return
        counts.prompt_tokens += request.prompt_tokens
        counts.output_tokens += len(known.prompt.output)
        counts.seen_tokens += known.prompt.seen_tokens
        counts.computed_tokens += computed
        counts.hits.update(request.hits)

    def place(self, request: Request) -> None:
        pass  # each forward reads the pages of requests anyway

    def compute(self, batch: Batch) -> _Stamped:
        is_prefill = any(request.prefilling for request, _ in batch)
        took_s = self._decode_step_s
        if is_prefill:
            took_s = sum(self._speed.prefill_s(request.kv_tokens, count) for request, count in batch)
        if self._bytes is None:
            end_s, next_tokens = self._compute_layers(took_s), self._next_tokens(batch)
        else:
            end_s = self._clock() + took_s
            self._compare_prefixes(self._bytes, [request for request, _ in batch])
            self._stamp(self._bytes, batch)
            next_tokens = self._next_tokens(batch)
        look_s = math.inf if self._bytes is None else _LOOK_S  # virtual time does not take time
        return _Stamped(next_tokens, end_s, took_s or None, self._clock, self._is_stopped, look_s)

    def _next_tokens(self, batch: Batch) -> list[int]:
        return [self._known[request.rid].next_token(request.kv_tokens + count - request.prompt_tokens)
                for request, count in batch]

    def _compute_layers(self, took_s: float) -> float:
        """Wait for the load in flight, and return the time at which a forward of `took_s` ends that computes each layer
        when it has arrived. Layers arrive evenly, so only the first or the last one can decide."""
        layers = self.pool.geometry.layers
        self.pool.wait_layer(0)
        first_s = self._clock()
        self.pool.wait_layer(layers - 1)
        return max(first_s + took_s, self._clock() + took_s / layers)

    def _stamp(self, bytes_: PageBytes, batch: Batch) -> None:
        pages, seeds = [NO_PAGES], [_NO_SEEDS]
        for request, count in batch:
            known, end = self._known[request.rid], request.kv_tokens + count
            missing = slice(known.stamped_pages, end // self.pool.geometry.page_size)
            if missing.start < missing.stop:
                pages.append(request.held_kv().pages[missing])
                seeds.append(known.seeds[missing])
                known.stamped_pages = missing.stop
        bytes_.fill(np.concatenate(pages), np.concatenate(seeds))

    def _compare_prefixes(self, bytes_: PageBytes, requests: Sequence[Request]) -> None:
        """Compare the cached prefixes of beginning requests, each layer as soon as it has arrived."""
        begun = [request for request in requests if not self._known[request.rid].compared]
        if not begun and self.pool.loading is None:
            return
        pages, seeds = [NO_PAGES], [_NO_SEEDS]
        for request in begun:
            kv = request.held_kv()
            pages.append(kv.pages[: kv.shared_pages])
            seeds.append(self._known[request.rid].seeds[: kv.shared_pages])
        expected = bytes_.expected(np.concatenate(pages), np.concatenate(seeds))
        wrong = np.zeros(len(expected.rows), np.int64)
        for layer in range(self.pool.geometry.layers):
            self.pool.wait_layer(layer)
            wrong += bytes_.wrong_bytes(layer, expected)
        self.counts.checked_bytes += len(wrong) * self.pool.geometry.payload_bytes
        first = 0
        for request in begun:
            self._known[request.rid].compared = True
            kv = request.held_kv()
            for tier, tokens in zip(TIERS, (kv.device_hit_tokens, kv.host_hit_tokens, kv.storage_hit_tokens),
                                    strict=True):
                last = first + tokens // self.pool.geometry.page_size
                self.counts.wrong[tier] += int(wrong[first:last].sum())
                first = last

    def fence(self) -> Fence | None:
        return torch.cuda.current_stream(self.pool.device).record_event() if self.pool.device.type == "cuda" else None

    def end(self, request: Request) -> None:
        known = self._known.get(request.rid)
        if known is None:
            return
        if self._bytes is not None:
            if not known.compared:
                return
            self._compare_own(self._bytes, request, known)
            known.compared = False
        if len(request.tokens) - request.prompt_tokens == max(1, len(known.prompt.output)):
            del self._known[request.rid]

    def _compare_own(self, bytes_: PageBytes, request: Request, known: _Known) -> None:
        pages = request.held_kv().pages[: known.stamped_pages]
        expected = bytes_.expected(pages, known.seeds[: len(pages)])
        for layer in range(self.pool.geometry.layers):
            self.counts.wrong["own"] += int(bytes_.wrong_bytes(layer, expected).sum())
        self.counts.checked_bytes += len(pages) * self.pool.geometry.payload_bytes

    def check(self, running: Sequence[Request]) -> None:
        for request in running if self._bytes is not None else ():
            stamped = self._known[request.rid].stamped_pages
            if stamped != request.kv_tokens // self.pool.geometry.page_size:
                raise InvariantError(f"replay: {request.rid} has {request.kv_tokens} tokens, {stamped} pages stamped")


class _Expected(NamedTuple):
    """Pages and their seeds on the pool's device; made by `PageBytes.expected`."""

    rows: torch.Tensor  # int64 [pages]
    words: torch.Tensor  # int64 [pages, 1]


class PageBytes:
    """Fills and compares pages of one L1 pool, on the pool's device. Its state is constant."""

    def __init__(self, pool: KVPool) -> None:
        geometry = pool.geometry
        if geometry.layer_bytes % WORD_BYTES:
            raise InvalidInput(f"replay: layers of {geometry.layer_bytes} bytes are not a multiple of {WORD_BYTES}")
        self._device = pool.device
        # Int64 [pages + 1, words] for each layer: the pools of `hicache.tiers` have one region per layer.
        self._layers = [region.view(torch.int64) for (region,) in pool.blocks.layers]
        numbers = np.arange(1, geometry.payload_bytes // WORD_BYTES + 1, dtype=np.uint64)
        constants = mixed(numbers).view(np.int64).reshape(geometry.layers, -1)
        self._constants = torch.from_numpy(constants).to(self._device)

    def fill(self, pages: PageIds, seeds: Seeds) -> None:
        """Write `pages` as a forward would. On a stream device this queues work on the current stream."""
        if len(pages) == 0:
            return
        rows, words = self.expected(pages, seeds)
        for layer, constants in zip(self._layers, self._constants, strict=True):
            layer.index_copy_(0, rows, words ^ constants)

    def expected(self, pages: PageIds, seeds: Seeds) -> _Expected:
        """Return the expected content for `wrong_bytes`, converted and copied to the device once for all layers."""
        rows = upload(pages.astype(np.int64), self._device)
        return _Expected(rows, upload(seeds.reshape(-1, 1).copy(), self._device))

    def wrong_bytes(self, layer: int, pages: _Expected) -> npt.NDArray[np.int64]:
        """Return the number of bytes of `layer` that differ in each page, int64 `[pages]`. Waits for the device."""
        rows, words = pages
        found, expected = self._layers[layer].index_select(0, rows), words ^ self._constants[layer]
        if torch.equal(found, expected):
            return np.zeros(len(rows), np.int64)
        counts: npt.NDArray[np.int64] = (found.view(torch.uint8) != expected.view(torch.uint8)).sum(dim=1).cpu().numpy()
        return counts

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

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...errors import InvalidInput, InvariantError
from ...keys import page_keys
from ...tiers import Fence, KVPool
from ...tiers.upload import upload
from ...types import NO_PAGES, PageIds
from ..engine import Batch, Request
from ..traces.tokens import VOCAB_SIZE, Prompt, mixed
from .result import SOURCES, TIERS, TokenCounts

WORD_BYTES = 8
# One 8-byte seed per page, int64: the start of its key.
Seeds: TypeAlias = npt.NDArray[np.int64]
_NO_SEEDS: Seeds = np.empty(0, np.int64)


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

    def tokens(self) -> TokenCounts:
        """Return the counts of tokens, as a value."""
        return TokenCounts(
            prompt=self.prompt_tokens,
            output=self.output_tokens,
            seen=self.seen_tokens,
            hits=dict(self.hits),
            computed=self.computed_tokens,
            recomputed=self.recomputed_tokens,
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

    def wait(self) -> float | None:
        if self.took_s is not None:
            time.sleep(max(0.0, self.end_s - time.monotonic()))
        return self.took_s

    def token(self, index: int) -> int:
        return self.next_tokens[index]


class StandIn:
    """See the module's docstring. `prefill_tokens_per_s` is the simulated speed: a forward takes as long as a real one,
    while copies and storage work. With None, a forward takes no time.

    REQUIRES: a pool of `hicache.tiers`. Raises InvalidInput for a geometry whose layers are not whole words.
    """

    vocab_size = VOCAB_SIZE
    eos_tokens: frozenset[int] = frozenset()
    requests_max = 1 << 30  # a replay never reaches it

    def __init__(self, pool: KVPool, prefill_tokens_per_s: float | None = None) -> None:
        self.pool = pool
        self.context_tokens = pool.pages * pool.geometry.page_size
        self.counts = Counts()
        self._bytes = PageBytes(pool)
        self._rate = prefill_tokens_per_s
        self._known: dict[str, _Known] = {}

    def expect(self, rid: str, prompt: Prompt) -> None:
        """Register the prompt of a submitted request. REQUIRES: called before the step in which it begins."""
        keys = page_keys(prompt.kv_tokens, self.pool.geometry.page_size)
        self._known[rid] = _Known(prompt, page_seeds(keys))

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
        prefill_tokens = sum(count for request, count in batch if request.prefilling)
        took_s = prefill_tokens / self._rate if self._rate and prefill_tokens else None
        end_s = time.monotonic() + (took_s or 0.0)
        self._compare_prefixes([request for request, _ in batch])
        pages, seeds, next_tokens = [NO_PAGES], [_NO_SEEDS], []
        for request, count in batch:
            known, end = self._known[request.rid], request.kv_tokens + count
            missing = slice(known.stamped_pages, end // self.pool.geometry.page_size)
            if missing.start < missing.stop:
                pages.append(request.held_kv().pages[missing])
                seeds.append(known.seeds[missing])
                known.stamped_pages = missing.stop
            next_tokens.append(known.next_token(end - request.prompt_tokens))
        self._bytes.fill(np.concatenate(pages), np.concatenate(seeds))
        return _Stamped(next_tokens, end_s, took_s)

    def _compare_prefixes(self, requests: Sequence[Request]) -> None:
        """Compare the cached prefixes of beginning requests, each layer as soon as it has arrived."""
        begun = [request for request in requests if not self._known[request.rid].compared]
        if not begun and self.pool.loading is None:
            return
        pages, seeds = [NO_PAGES], [_NO_SEEDS]
        for request in begun:
            kv = request.held_kv()
            pages.append(kv.pages[: kv.shared_pages])
            seeds.append(self._known[request.rid].seeds[: kv.shared_pages])
        expected = self._bytes.expected(np.concatenate(pages), np.concatenate(seeds))
        wrong = np.zeros(len(expected.rows), np.int64)
        for layer in range(self.pool.geometry.layers):
            self.pool.wait_layer(layer)
            wrong += self._bytes.wrong_bytes(layer, expected)
        self.counts.checked_bytes += len(wrong) * self.pool.geometry.payload_bytes
        first = 0
        for request in begun:
            self._known[request.rid].compared = True
            kv = request.held_kv()
            for tier, tokens in zip(TIERS, (kv.device_hit_tokens, kv.host_hit_tokens, kv.storage_hit_tokens),
                                    strict=True):  # fmt: skip
                last = first + tokens // self.pool.geometry.page_size
                self.counts.wrong[tier] += int(wrong[first:last].sum())
                first = last

    def fence(self) -> Fence | None:
        return torch.cuda.current_stream(self.pool.device).record_event() if self.pool.device.type == "cuda" else None

    def end(self, request: Request) -> None:
        known = self._known.get(request.rid)
        if known is None or not known.compared:
            return
        pages = request.held_kv().pages[: known.stamped_pages]
        expected = self._bytes.expected(pages, known.seeds[: len(pages)])
        for layer in range(self.pool.geometry.layers):
            self.counts.wrong["own"] += int(self._bytes.wrong_bytes(layer, expected).sum())
        self.counts.checked_bytes += len(pages) * self.pool.geometry.payload_bytes
        known.compared = False
        if len(request.tokens) - request.prompt_tokens == max(1, len(known.prompt.output)):
            del self._known[request.rid]

    def check(self, running: Sequence[Request]) -> None:
        for request in running:
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

"""The requests of the demo, each served in turns by an engine without reuse and by one with the cache."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from typing import Any

from hicache.errors import HiCacheError
from hicache.keys import RadixKey

from ..engine import Engine, RequestRecord, Sampling
from .demo_workload import DemoRequest

SETTLE_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request.

    `kv_digest` is the optional SHA-256 of the KV bytes of its prompt's whole pages. `computed_s` is the time to first
    token of the same request without reuse, in the same pair.
    """

    label: str
    document: str | None
    prompt: list[int]
    tokens: list[int]
    hit_tokens: dict[str, int]
    time_to_first_token_s: float
    kv_digest: str | None
    computed_s: float

    @property
    def tier(self) -> str:
        """The source of most of the prompt's prefix; `computed` if almost nothing was reused."""
        tier = max(self.hit_tokens, key=lambda name: self.hit_tokens[name])
        return tier if 2 * sum(self.hit_tokens.values()) >= len(self.prompt) else "computed"

    def as_json(self) -> dict[str, Any]:
        """Return the answer as JSON for the second process."""
        return asdict(self)


class Runner:
    """Serves requests on one engine. Without `reuse` each request gets its own salt, so nothing is reused."""

    def __init__(self, engine: Engine, *, reuse: bool, verify: bool, max_new_tokens: int, sampling: Sampling) -> None:
        self.engine = engine
        self._reuse = reuse
        self._verify = verify
        self._max_new_tokens = max_new_tokens
        self._sampling = sampling
        self._served = 0

    def serve(self, wave: list[DemoRequest]) -> list[Answer]:
        """Serve some requests together. Raises the error of the first that failed."""
        salts = [None if self._reuse else f"alone-{self._served + i}" for i in range(len(wave))]
        self._served += len(wave)
        rids = [
            self.engine.submit(
                request.prompt, self._max_new_tokens, cache_salt=salt, ignore_eos=True, sampling=self._sampling
            )
            for request, salt in zip(wave, salts, strict=True)
        ]
        records: dict[str, RequestRecord] = {}
        while len(records) < len(wave):
            for update in self.engine.step():
                if update.record is not None:
                    records[update.rid] = update.record
            if self._verify:
                self.engine.check()
            self.engine.rest()
        return [self._answer(request, records[rid], salt) for request, rid, salt in zip(wave, rids, salts, strict=True)]

    def _answer(self, request: DemoRequest, record: RequestRecord, salt: str | None) -> Answer:
        if record.error is not None:
            raise record.error
        if record.time_to_first_token_s is None:
            raise HiCacheError(f"demo: {request.label} ended without a token")
        return Answer(
            label=request.label,
            document=request.document,
            prompt=request.prompt,
            tokens=list(record.output_tokens),
            hit_tokens={
                "device": record.device_hit_tokens,
                "host": record.host_hit_tokens,
                "storage": record.storage_hit_tokens,
            },
            time_to_first_token_s=record.time_to_first_token_s,
            computed_s=record.time_to_first_token_s,
            kv_digest=kv_digest(self.engine, RadixKey.of(request.prompt, cache_salt=salt)) if self._verify else None,
        )


class Pair:
    """Two engines that serve the same requests in turns. Which of them is first alternates."""

    def __init__(self, computed: Runner, cached: Runner) -> None:
        self.computed = computed
        self.cached = cached
        self._turn = 0

    def serve(self, wave: list[DemoRequest]) -> list[tuple[Answer, Answer]]:
        """Serve some requests on both engines; conversations grow by the computed answers.

        Return the computed and the cached answer of each. Blocks until the cache has stored all pages, so that its
        background work slows neither engine and a new process finds everything. Raises HiCacheError if that takes too
        long.
        """
        self._turn += 1
        order = (self.computed, self.cached) if self._turn % 2 else (self.cached, self.computed)
        answers: dict[Runner, list[Answer]] = {}
        for runner in order:
            answers[runner] = runner.serve(wave)
            if not runner.engine.cache.drain(SETTLE_TIMEOUT_S):
                raise HiCacheError(f"demo: storing all pages took longer than {SETTLE_TIMEOUT_S} s; use a faster store")
        pairs = []
        for request, computed, cached in zip(wave, answers[self.computed], answers[self.cached], strict=True):
            if request.conversation is not None:
                request.conversation.tokens = request.conversation.tokens + computed.tokens
            pairs.append((computed, replace(cached, computed_s=computed.time_to_first_token_s)))
        return pairs


def kv_digest(engine: Engine, key: RadixKey) -> str:
    """Return the SHA-256 of the KV bytes of the whole pages of `key`. REQUIRES: its request has just ended, so all are
    on L1."""
    cache = engine.cache
    pages = cache.match_prefix(key).device_pages
    if len(pages) != len(key) // cache.page_size:
        raise HiCacheError("demo: the pages of a request that has just ended are not on L1")
    digest = hashlib.sha256()
    for layer in cache.device.blocks.layers:
        for region in layer:
            # A copy of the numbers: those of a match cannot be written, which PyTorch warns of.
            digest.update(region[pages.copy()].cpu().numpy().tobytes())
    return digest.hexdigest()

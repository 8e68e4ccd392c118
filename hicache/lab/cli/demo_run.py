"""One run of the demo's workload on one engine, and its repetition in a second process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import HiCacheError
from ...keys import RadixKey
from ..engine import Engine, RequestRecord, Sampling
from .demo_workload import DemoRequest, Workload


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request. `kv_digest` is the optional SHA-256 of the KV bytes of its prompt's whole pages."""

    label: str
    document: str | None
    prompt: list[int]
    tokens: list[int]
    hit_tokens: dict[str, int]
    time_to_first_token_s: float
    kv_digest: str | None

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
        self._engine = engine
        self._reuse = reuse
        self._verify = verify
        self._max_new_tokens = max_new_tokens
        self._sampling = sampling
        self._served = 0

    def run(self, workload: Workload) -> Iterator[Answer]:
        """Serve the waves of `workload`, one after the other; conversations grow by their answers."""
        for wave in workload.waves():
            for request, answer in zip(wave, self.serve(wave), strict=True):
                if request.conversation is not None:
                    request.conversation.tokens = request.conversation.tokens + answer.tokens
                yield answer

    def serve(self, wave: list[DemoRequest]) -> list[Answer]:
        """Serve some requests together. Raises the error of the first that failed."""
        salts = [None if self._reuse else f"alone-{self._served + i}" for i in range(len(wave))]
        self._served += len(wave)
        rids = [
            self._engine.submit(
                request.prompt, self._max_new_tokens, cache_salt=salt, ignore_eos=True, sampling=self._sampling
            )
            for request, salt in zip(wave, salts, strict=True)
        ]
        records: dict[str, RequestRecord] = {}
        while len(records) < len(wave):
            for update in self._engine.step():
                if update.record is not None:
                    records[update.rid] = update.record
            if self._verify:
                self._engine.check()
            self._engine.rest()
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
            kv_digest=kv_digest(self._engine, RadixKey.of(request.prompt, cache_salt=salt)) if self._verify else None,
        )


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

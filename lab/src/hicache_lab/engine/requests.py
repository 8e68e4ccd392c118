"""Requests of the engine, and their records."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hicache.cache import RequestKV
from hicache.errors import HiCacheError, InvalidInput, InvariantError
from hicache.keys import RadixKey, TokenInput, token_bytes

from .sampling import GREEDY, Sampling


class FinishReason(enum.StrEnum):
    """The reason for the end of a request."""

    LENGTH = "length"  # it has its `max_new_tokens`
    EOS = "eos"  # the model ended the text
    ABORTED = "aborted"
    FAILED = "failed"  # see `RequestRecord.error`


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The result of one request. Times are on the engine's clock, in seconds.

    `output_tokens` includes the end-of-text token, if any. The hit counts are the tokens of the prompt's prefix by tier
    at the first admission, `computed_tokens` the prompt tokens computed then. `recomputed_tokens` counts tokens that
    were computed again after a preemption.
    """

    rid: str
    reason: FinishReason
    error: HiCacheError | None
    prompt_tokens: int
    output_tokens: tuple[int, ...] = field(repr=False)
    arrival_s: float
    first_token_s: float | None  # None if it ended before its first token
    finish_s: float
    device_hit_tokens: int
    host_hit_tokens: int
    storage_hit_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    preemptions: int

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens whose KV came from any tier."""
        return self.device_hit_tokens + self.host_hit_tokens + self.storage_hit_tokens

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first output token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one step for one request: its new tokens, and its record if it ended."""

    rid: str
    tokens: tuple[int, ...] = field(repr=False)
    record: RequestRecord | None = None


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """`waiting` and `running` are current numbers of requests. All other counts are totals since start, counted at
    each admission.

    `finished` is by reason, `hit_tokens` by tier (device, host, storage). `computed_tokens` counts the tokens of
    prefills. Each output token except the last of a request is computed too, and not counted here.
    """

    waiting: int
    running: int
    steps: int
    submitted: int
    finished: Mapping[FinishReason, int]
    preemptions: int
    hit_tokens: Mapping[str, int]
    computed_tokens: int
    output_tokens: int


@dataclass(slots=True, eq=False)
class Request:
    """State of one request, owned by the scheduler.

    `tokens` are the prompt and the output so far. The KV of the first `kv_tokens` tokens is in the pool. A running
    request has `kv`, a waiting one does not. It computes its prefill while `kv_tokens < prefill_end`; after that, all
    tokens except the newest have KV.
    """

    rid: str
    sequence: int  # order of submission, also of a preempted request
    tokens: list[int] = field(repr=False)
    prompt_tokens: int
    max_new_tokens: int
    ignore_eos: bool
    seed: bytes = field(repr=False)  # of `extra_key` and `cache_salt`
    arrival_s: float
    sampling: Sampling = GREEDY
    session_id: str | None = None
    priority: int = 0
    first_token_s: float | None = None
    kv: RequestKV | None = None
    kv_tokens: int = 0
    prefill_end: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    _key: RadixKey | None = field(default=None, repr=False)

    @property
    def prefilling(self) -> bool:
        """True if prompt tokens (after a preemption: any known tokens) are not computed yet."""
        return self.kv_tokens < self.prefill_end

    def held_kv(self) -> RequestKV:
        """Return the `kv` of a running request. Raises InvariantError for a waiting one."""
        if self.kv is None:
            raise InvariantError(f"engine: {self.rid} runs without KV")
        return self.kv

    def key(self, tokens: int) -> RadixKey:
        """Return the cache key of the first `tokens` tokens. The key of all tokens is cached, because every step
        needs it, and only extended by new ones."""
        if self._key is None:
            self._key = RadixKey(token_bytes(self.tokens), self.seed)
        elif new := self.tokens[len(self._key) :]:
            self._key = RadixKey(self._key.tokens + token_bytes(new), self.seed)
        return self._key if tokens == len(self._key) else self._key.head(tokens)

    def record(self, reason: FinishReason, error: HiCacheError | None, finish_s: float) -> RequestRecord:
        """Return the final record."""
        return RequestRecord(
            rid=self.rid,
            reason=reason,
            error=error,
            prompt_tokens=self.prompt_tokens,
            output_tokens=tuple(self.tokens[self.prompt_tokens :]),
            arrival_s=self.arrival_s,
            first_token_s=self.first_token_s,
            finish_s=finish_s,
            device_hit_tokens=self.hits.get("device", 0),
            host_hit_tokens=self.hits.get("host", 0),
            storage_hit_tokens=self.hits.get("storage", 0),
            computed_tokens=self.computed_tokens,
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
        )


def prompt_ids(tokens: TokenInput, vocab_size: int) -> list[int]:
    """Return the token ids of a prompt. Raises InvalidInput as `token_bytes` does, for a bool and for an id outside the
    vocabulary."""
    if isinstance(tokens, (list, tuple)) and bool in map(type, tokens):
        raise InvalidInput("engine: a token of the prompt is a bool; pass token ids")
    ids = np.frombuffer(token_bytes(tokens), dtype="<u4")
    if ids.max() >= vocab_size:
        raise InvalidInput(f"engine: token id {ids.max()} is outside 0 .. {vocab_size - 1}")
    prompt: list[int] = ids.tolist()
    return prompt

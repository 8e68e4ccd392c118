"""A request on its way through the engine, and what is told about it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..cache import RequestKV
from ..errors import HiCacheError, InvalidInput, InvariantError
from ..keys import RadixKey, TokenInput, token_bytes
from .sampling import GREEDY, Sampling


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    LENGTH = "length"  # it has its `max_new_tokens`
    EOS = "eos"  # the model ended the text
    ABORTED = "aborted"
    FAILED = "failed"  # see `RequestRecord.error`


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What became of one request. Times are on the engine's clock, in seconds.

    `output_tokens` includes the end-of-text token if there was one. The hit counts say where the prefix of the prompt
    came from when the request was first admitted; `computed_tokens` counts the prompt tokens it computed then. What was
    computed once more after a preemption is in `recomputed_tokens`.
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
    """What one step did for one request: the tokens it got, and its record if it ended."""

    rid: str
    tokens: tuple[int, ...] = field(repr=False)
    record: RequestRecord | None = None


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """`waiting` and `running` are requests now, the rest totals since start; tokens count at every admission.

    `finished` is by reason, `hit_tokens` by tier (device, host, storage). `computed_tokens` are those of prefills, each
    output token but a request's last costs one more.
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

    `tokens` are the prompt and the output so far. KV of the first `kv_tokens` of them is in the pool. A request that
    runs has `kv`, one that waits has none. It computes its prefill while `kv_tokens < prefill_end`; after that all but
    the newest of its tokens have KV.
    """

    rid: str
    sequence: int  # order of submission; a preempted request keeps its place
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
        """Whether prompt tokens (after a preemption: any known tokens) are still to be computed."""
        return self.kv_tokens < self.prefill_end

    def held_kv(self) -> RequestKV:
        """`kv` of a request that runs. Raises InvariantError for one that does not."""
        if self.kv is None:
            raise InvariantError(f"engine: {self.rid} runs without KV")
        return self.kv

    def key(self, tokens: int) -> RadixKey:
        """The cache key of the first `tokens` tokens. That of all of them is kept: it is asked for in every step."""
        if self._key is None or len(self._key) != len(self.tokens):
            self._key = RadixKey(token_bytes(self.tokens), self.seed)
        return self._key if tokens == len(self._key) else self._key.head(tokens)

    def record(self, reason: FinishReason, error: HiCacheError | None, finish_s: float) -> RequestRecord:
        """The final record."""
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
    """The token ids of a prompt. Raises InvalidInput as `token_bytes`, for a bool and for an id beyond `vocab_size`."""
    if isinstance(tokens, (list, tuple)) and bool in map(type, tokens):
        raise InvalidInput("engine: a token of the prompt is a bool; pass token ids")
    ids = np.frombuffer(token_bytes(tokens), dtype="<u4")
    if ids.max() >= vocab_size:
        raise InvalidInput(f"engine: token id {ids.max()} is outside 0 .. {vocab_size - 1}")
    prompt: list[int] = ids.tolist()
    return prompt

"""One request of a trace, and the limits of its fields."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_TOKENS = 512
# Other sizes of blocks: from those of engines to a page of a long document.
BLOCK_TOKENS_MIN, BLOCK_TOKENS_MAX = 16, 4096
# The largest position of a page key, far above any context.
LENGTH_MAX = 1 << 24
# Thirty thousand years: up to here a time in microseconds is exact.
TIMESTAMP_MS_MAX = 10**15
HASH_ID_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `index` is its index in the trace, from 0; `hash_ids` are `ceil(input_length / block_tokens)` ids.
    Equal ids mean equal blocks after equal prefixes. `session` is equal for the requests of one conversation, if the
    trace names it."""

    index: int
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS
    session: int | None = None

    @property
    def whole_blocks(self) -> int:
        """The number of whole blocks of the prompt."""
        return self.input_length // self.block_tokens

    @property
    def new_tokens(self) -> int:
        """The number of tokens that an engine generates, at least one."""
        return max(1, self.output_length)

    @property
    def kv_tokens(self) -> int:
        """The number of tokens with KV at the end of the request: all except the last one."""
        return self.input_length + self.new_tokens - 1

"""What SGLang passes to its tree and reads from it, translated: keys of prompts, ids of requests, traces, roots, and
figures of L2. Does not import SGLang."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...cache.engine_cache import EngineCache, Prefix
from ...errors import InvalidInput
from ...keys import BIGRAM_BYTES, RadixKey

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle


@dataclass(eq=False)
class HostFigures:
    """The figures of L2 that SGLang's metrics read, in tokens."""

    _cache: EngineCache

    @property
    def logical_size(self) -> int:
        return self._cache.host.pages * self._cache.page_size

    def available_size(self) -> int:
        return self._cache.host.allocator.free_pages * self._cache.page_size


@dataclass(eq=False)
class Roots:
    """The common parent of several roots, for `dfs_weight_order`."""

    children: dict[int, Any]


def root_of(prefix: Prefix) -> Any:
    node = prefix.node
    while node.parent is not None:
        node = node.parent
    return node


def trace_of(request: Any) -> dict[str, str] | None:
    """Return the trace headers of a request that SGLang traces (`--enable-trace`)."""
    context = getattr(request.time_stats.trace_ctx, "root_span_context", None)
    if context is None:
        return None
    from opentelemetry import propagate  # noqa: PLC0415 - only for an engine that traces

    headers: dict[str, str] = {}
    propagate.inject(headers, context)
    return headers


def rid_of(handle: CacheRequestHandle) -> str:
    """Return the id of an attempt: a retracted request begins again under its id."""
    return f"{handle.rid}#{handle.attempt_id}" if handle.attempt_id else handle.rid


def prompt_key(
    tokens: array[int], extra_key: str | None, cache_salt: str | None, *, page_size: int, bigram: bool, wide_ids: bool
) -> RadixKey | None:
    """Return the key of `tokens`; None if they are fewer than a page, or not token ids. Does not raise: such a prompt
    is computed without the cache.

    `bigram`: a position is a token and its successor. `wide_ids`: a position is one id of 64 bits, as SGLang names
    images by ids of 62 bits; then `bigram` has no effect, so a draft model may accept less after a hit.
    """
    if len(tokens) < page_size:
        return None
    try:
        if not wide_ids:
            return RadixKey.of(tokens, extra_key=extra_key, cache_salt=cache_salt or None, bigram=bigram)
        seed = RadixKey.of((0,), extra_key=extra_key, cache_salt=cache_salt or None).seed
        return RadixKey(array("q", tokens).tobytes(), seed, BIGRAM_BYTES)
    except InvalidInput:
        return None

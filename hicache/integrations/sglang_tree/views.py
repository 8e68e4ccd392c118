"""What SGLang passes to its tree and reads from it, translated: ids of requests, traces, roots, and figures of L2."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from ...cache.engine_cache import EngineCache, Prefix


class HostFigures:
    """The figures of L2 that SGLang's metrics read, in tokens."""

    def __init__(self, cache: EngineCache) -> None:
        self._cache = cache

    @property
    def logical_size(self) -> int:
        return self._cache.host.pages * self._cache.page_size

    def available_size(self) -> int:
        return self._cache.host.allocator.free_pages * self._cache.page_size


class Roots:
    """The common parent of several roots, for `dfs_weight_order`."""

    def __init__(self, roots: dict[int, Any]) -> None:
        self.children = roots


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
    return handle.rid if not handle.attempt_id else f"{handle.rid}#{handle.attempt_id}"

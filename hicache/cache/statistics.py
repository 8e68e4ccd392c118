"""Snapshots of a cache, for the exporter, the command line and tests. All counts are totals since start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..controller import ControllerStatistics
from ..events import PublisherStatistics, StreamStatistics
from ..radix import RadixTree
from ..tiers import HostPool, KVPool
from .payoff import PayoffStatistics


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Memory of L1 or L2 now, in pages. `cached_pages` are held by nodes, `evictable_pages` of them may leave now; the
    others in use are lent or a request's own.
    """

    capacity_pages: int
    free_pages: int
    cached_pages: int
    evictable_pages: int
    page_bytes: int


# Of a tier that a cache does not have.
NO_TIER = TierStatistics(capacity_pages=0, free_pages=0, cached_pages=0, evictable_pages=0, page_bytes=0)


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """`hit_tokens` by tier (device, host, storage), `evicted_pages` by tier (device, host). `device` or `host` is
    `NO_TIER` where the cache does not have that tier.

    `skipped` counts by reason what the cache decided not to do or could not do: a slower request, never an error.
    `events` and `publisher` are None where events are not recorded, or not published.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: Mapping[str, int]
    evicted_pages: Mapping[str, int]
    skipped: Mapping[str, int]
    nodes: int
    pinned_pages: int
    weights_epoch: int
    device: TierStatistics
    host: TierStatistics
    payoff: PayoffStatistics
    controller: ControllerStatistics
    events: StreamStatistics | None
    publisher: PublisherStatistics | None = None


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """Sessions and pages now, the rest totals since start.

    `held_pages` are kept between turns, those shared with the tree included; `own_pages` are the partial ones among
    them. `continued_turns` went on where the turn before had ended and `tail_tokens` are what that saved over the tree.
    `released` counts by reason (pressure, diverged, expired, closed, dropped, not_shared) how often KV was given up.
    """

    open: int
    holding: int
    running: int
    held_pages: int
    own_pages: int
    turns: int
    continued_turns: int
    tail_tokens: int
    released: Mapping[str, int]


def device_statistics(pool: KVPool, tree: RadixTree) -> TierStatistics:
    """L1 now."""
    return TierStatistics(
        capacity_pages=pool.pages,
        free_pages=pool.allocator.free_pages,
        cached_pages=tree.device_pages_total,
        evictable_pages=tree.device_evictable_pages,
        page_bytes=pool.geometry.payload_bytes,
    )


def host_statistics(pool: HostPool, tree: RadixTree) -> TierStatistics:
    """L2 now."""
    return TierStatistics(
        capacity_pages=pool.pages,
        free_pages=pool.allocator.free_pages,
        cached_pages=tree.host_pages,
        evictable_pages=tree.host_evictable_pages,
        page_bytes=pool.frame_bytes,
    )

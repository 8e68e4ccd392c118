"""What a simulation is set up with, and what its engine keeps of a request."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hicache.cache import CacheOptions, HiRadixCache, PayoffOptions, PrefetchPolicy, RequestKV, WritePolicy
from hicache.controller import ControllerOptions, HiCacheController
from hicache.geometry import KVGeometry
from hicache.keys import RadixKey
from hicache.radix import POLICIES
from hicache.types import PageIds
from tests.simulation.device import SimulatedCopyEngine
from tests.simulation.workers import SimulatedWorkers


@dataclass(frozen=True, slots=True)
class Setting:
    """What differs between seeds. `storage_pages` is None for a cache without L3."""

    geometry: KVGeometry
    bigram: bool
    device_pages: int
    host_pages: int
    storage_pages: int | None
    prompt_tokens_max: int
    fault_rate: float  # of storage and workers
    device_fail_rate: float  # per piece of a copy
    events_bytes: int | None  # capacity of the stream of KV events, None for no stream
    cache: CacheOptions
    controller: ControllerOptions

    @classmethod
    def draw(cls, numbers: random.Random) -> Setting:
        """Mostly pools that are far too small; now and then prompts so long that nodes are cut by eviction."""
        long = numbers.random() < 0.1
        scale = 5 if long else 1
        page_size = numbers.choice([1, 2, 4])
        geometry = KVGeometry(layers=3, heads=1, head_dim=8 // page_size, page_size=page_size, dtype="uint8")
        return cls(
            geometry=geometry,
            bigram=numbers.random() < 0.15,
            device_pages=scale * numbers.randint(10, 24),
            host_pages=scale * numbers.choice([numbers.randint(6, 18), numbers.randint(18, 40)]),
            storage_pages=None if numbers.random() < 0.06 else scale * numbers.choice([20, 60, 200]),
            prompt_tokens_max=scale * page_size * numbers.randint(4, 9),
            fault_rate=numbers.choice([0.0, 0.0, 0.02, 0.1]),
            device_fail_rate=0.02 if numbers.random() < 0.1 else 0.0,
            events_bytes=numbers.choice([None, None, 4_000, 1_000_000]),
            cache=_draw_cache(numbers, page_size),
            controller=_draw_controller(numbers),
        )


def _draw_cache(numbers: random.Random, page_size: int) -> CacheOptions:
    return CacheOptions(
        eviction_policy=numbers.choice(["lru", *POLICIES]),
        write_policy=numbers.choice(["write_through", *(policy.value for policy in WritePolicy)]),
        prefetch_policy=numbers.choice(["timeout", *(policy.value for policy in PrefetchPolicy)]),
        prefetch_threshold_tokens=page_size * numbers.choice([1, 1, 3]),
        load_back_threshold_tokens=page_size * numbers.choice([1, 1, 1, 3]),
        prefetch_timeout_base_s=0.2,
        prefetch_host_share=numbers.choice([0.5, 0.9]),
        pin_host_share=numbers.choice([0.3, 0.7]),
        payoff=numbers.choice(
            [
                PayoffOptions(always=True),
                PayoffOptions(always=True),
                PayoffOptions(),
                # A page takes as long to compute as it takes to load, so what is measured decides.
                PayoffOptions(prefill_tokens_per_s=20_000, host_bytes_per_s=500_000, probe_every=4),
                PayoffOptions(prefill_tokens_per_s=20_000, host_bytes_per_s=100_000, probe_every=4),
            ]
        ),
    )


def _draw_controller(numbers: random.Random) -> ControllerOptions:
    pages = numbers.choice([6, 12, 40])
    return ControllerOptions(
        storage_batch_pages=numbers.choice([1, 2, 4]), write_pages_max=pages, load_pages_max=pages,
        prefetch_operations_max=4, store_host_share=numbers.choice([0.5, 1.0]),
        storage_deadline_s=1.0, backup_workers=numbers.choice([1, 2]),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parts:
    """What a simulation is built from; a planted race replaces one of them, or changes the cache once it is built."""

    copies: type[SimulatedCopyEngine] = SimulatedCopyEngine
    workers: type[SimulatedWorkers[Any]] = SimulatedWorkers
    controller: type[HiCacheController] = HiCacheController
    waits_for_layers: bool = True
    after: Callable[[HiRadixCache], None] = lambda cache: None


@dataclass(slots=True, eq=False)
class Running:
    """A request with KV in L1. Positions are tokens, or pairs of them for bigrams."""

    request: RequestKV
    tokens: list[int]
    seed: bytes
    epoch: int  # of the weights when it began
    computed: int  # leading positions whose KV is in L1
    rows: PageIds  # stamps of the whole pages of `tokens`
    fresh: bool = True  # no forward has passed over it since it was admitted
    chunk: int = 0  # positions that the forward under way computes


class Span(NamedTuple):
    """What a forward does for one request: it reads the first `first` whole pages, and writes those up to `end`."""

    rid: str
    pages: PageIds
    rows: PageIds  # stamps of the pages
    first: int
    end: int
    writes_half: bool  # and a part of the page behind them


class Waiting(NamedTuple):
    """A request that has not begun, or that begins again."""

    rid: str
    tokens: list[int]
    seed: bytes


def prompt_key(tokens: list[int], seed: bytes, bigram: bool) -> RadixKey:
    """The key of a prompt under a seed."""
    key = RadixKey.of(tokens, bigram=bigram)
    return RadixKey(key.tokens, seed, key.position_bytes)

"""The settings of a simulation, and the records of its engine for each request."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

from hicache.cache import HiRadixCache, RequestKV
from hicache.cache.break_even import PROBE_EVERY, Rates
from hicache.config import BreakEvenConfig, HiCacheConfig, PrefetchConfig, Section, TransferConfig
from hicache.controller import HiCacheController
from hicache.geometry import KVGeometry
from hicache.keys import RadixKey
from hicache.radix import POLICIES
from hicache.types import PageIds
from tests.simulation.device import SimulatedCopyEngine
from tests.simulation.streams import StreamedCopyEngine
from tests.simulation.workers import SimulatedWorkers
from tests.tuned import tuned


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that differ between seeds. `storage_pages` is None for a cache without L3."""

    geometry: KVGeometry
    bigram: bool
    device_pages: int
    host_pages: int
    storage_pages: int | None
    prompt_tokens_max: int
    fault_rate: float  # of storage and workers
    device_fail_rate: float  # per piece of a copy
    events_bytes: int | None  # capacity of the stream of KV events, None for no stream
    config: HiCacheConfig
    given: Rates  # speeds that are not measured
    trailing: tuple[tuple[int, int], ...] = ()  # tokens that a trailing pool needs of a prefix, and its slots

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.geometry.page_size

    @property
    def all_layers(self) -> KVGeometry:
        """The geometry of a page with the layers of all pools, one for each trailing pool."""
        return replace(self.geometry, layers=self.geometry.layers + len(self.trailing))

    @property
    def probe_every(self) -> int:
        """A short interval where rates are given, so that measured rates change decisions."""
        return 4 if self.given.host_bytes_per_s else PROBE_EVERY

    @classmethod
    def draw(cls, numbers: random.Random) -> Setting:
        """Draw a setting. Most pools are far too small; sometimes prompts are so long that eviction cuts nodes."""
        long = numbers.random() < 0.1
        scale = 5 if long else 1
        page_size = numbers.choice([1, 2, 4])
        # Computing a page takes about as long as loading it, so the measured rates decide.
        bandwidth = numbers.choice([0, 0, 0, 100_000, 500_000])
        given = Rates(prefill_tokens_per_s=20_000, host_bytes_per_s=bandwidth) if bandwidth else Rates()
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
            config=_draw_config(numbers, page_size),
            given=given,
        )

    @classmethod
    def draw_long(cls, numbers: random.Random) -> Setting:
        """Draw a setting whose prompts are longer than the share of L2 that prefetches may hold, but fit on L1."""
        drawn = cls.draw(numbers)
        prompt_pages, host_pages = numbers.randint(8, 20), numbers.randint(6, 12)
        prefetch = drawn.config.prefetch.model_copy(
            update={
                "policy": numbers.choice(["wait_complete", "wait_complete", "timeout"]),
                "threshold_tokens": drawn.page_size,
                "timeout_base": 2.0,
                "host_share": numbers.choice([0.25, 0.5, 0.8]),
            }
        )
        always = drawn.config.break_even.model_copy(update={"mode": "always"})
        return replace(
            drawn,
            device_pages=prompt_pages + numbers.choice([2, prompt_pages]),
            host_pages=host_pages,
            storage_pages=200,
            prompt_tokens_max=drawn.page_size * prompt_pages,
            config=drawn.config.model_copy(update={"prefetch": prefetch, "break_even": always}),
        )


    @classmethod
    def draw_pooled(cls, numbers: random.Random) -> Setting:
        """Draw a setting with one or two trailing pools: a window of some pages, and a state. Few slots are free."""
        drawn = cls.draw(numbers)
        window = drawn.page_size * numbers.randint(1, 3) + numbers.choice([0, 1])
        pages = -(-window // drawn.page_size)
        spare = [(1 + drawn.prompt_tokens_max // drawn.page_size // 16) * numbers.choice([2, 5, 12, 40]) for _ in "ab"]
        pools = [(window, pages + spare[0]), (1, 1 + spare[1])]
        write_policy = numbers.choice(["write_through", "write_through", drawn.config.write_policy])
        return replace(
            drawn,
            trailing=tuple(numbers.choice([pools, pools, pools[:1], pools[1:]])),
            config=drawn.config.model_copy(update={"write_policy": write_policy}),
        )


def _draw_config(numbers: random.Random, page_size: int) -> HiCacheConfig:
    eviction_policy = numbers.choice(["lru", *POLICIES])
    write_policy = numbers.choice(["write_through", *_choices(HiCacheConfig, "write_policy")])
    prefetch_policy = numbers.choice(["timeout", *_choices(PrefetchConfig, "policy")])
    threshold_tokens = page_size * numbers.choice([1, 1, 3])
    load_back_threshold_tokens = page_size * numbers.choice([1, 1, 1, 3])
    host_share = numbers.choice([0.5, 0.9])
    pin_host_share = numbers.choice([0.3, 0.7])
    break_even = numbers.choice(
        [
            BreakEvenConfig(mode="always"),
            BreakEvenConfig(mode="always"),
            BreakEvenConfig(),
            BreakEvenConfig(),
            BreakEvenConfig(),
        ]
    )
    pages = numbers.choice([6, 12, 40])
    return tuned(
        HiCacheConfig,
        adaptive_block_tokens=page_size * numbers.choice([1, 2]),
        eviction_policy=eviction_policy,
        write_policy=write_policy,
        load_back_threshold_tokens=load_back_threshold_tokens,
        pin_host_share=pin_host_share,
        break_even=break_even,
        prefetch=tuned(
            PrefetchConfig,
            policy=prefetch_policy,
            threshold_tokens=threshold_tokens,
            timeout_base=0.2,
            host_share=host_share,
            operations_max=4,
        ),
        transfer=tuned(
            TransferConfig,
            storage_batch_pages=numbers.choice([1, 2, 4]),
            write_pages_max=pages,
            load_pages_max=pages,
            store_host_share=numbers.choice([0.5, 1.0]),
            storage_deadline=1.0,
            backup_workers=numbers.choice([1, 2]),
        ),
    )


def _choices(section: type[Section], entry: str) -> tuple[str, ...]:
    return get_args(section.model_fields[entry].annotation)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a simulation. A planted race replaces one of them, or changes the finished cache with `after`. With
    `hints`, requests and others send hints; the other actions of a seed are drawn as without."""

    draw: Callable[[random.Random], Setting] = Setting.draw
    copies: type[SimulatedCopyEngine | StreamedCopyEngine] = SimulatedCopyEngine
    workers: type[SimulatedWorkers[Any]] = SimulatedWorkers
    controller: type[HiCacheController] = HiCacheController
    waits_for_layers: bool = True
    hints: bool = False
    after: Callable[[HiRadixCache], None] = lambda cache: None


@dataclass(slots=True, eq=False)
class Running:
    """A request with KV in L1. Positions are tokens, or pairs of them for bigrams."""

    request: RequestKV
    tokens: list[int]
    seed: bytes
    epoch: int  # of the weights at its start
    computed: int  # leading positions whose KV is in L1
    rows: PageIds  # stamps of the whole pages of `tokens`
    fresh: bool = True  # no forward has read its cached pages yet
    chunk: int = 0  # positions that the next forward computes


class Span(NamedTuple):
    """The work of a forward for one request: it reads the pages before `first` and writes `first ... end - 1`.

    Of a trailing pool it reads the last `reads` pages before `first`. `slots` are those of `pages` in each such pool.
    """

    rid: str
    pages: PageIds
    rows: PageIds  # stamps of the pages
    first: int
    end: int
    writes_partial: bool  # also writes a part of page `end`
    slots: list[PageIds]
    reads: list[int]


class Waiting(NamedTuple):
    """A request that has not begun, or was preempted."""

    rid: str
    tokens: list[int]
    seed: bytes


def prompt_key(tokens: list[int], seed: bytes, bigram: bool) -> RadixKey:
    """Return the key of a prompt under a seed."""
    key = RadixKey.of(tokens, bigram=bigram)
    return RadixKey(key.tokens, seed, key.position_bytes)

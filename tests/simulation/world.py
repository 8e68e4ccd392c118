"""The parts of one simulation: its own memory, devices, workers, storage and time, and the cache over them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

from hicache.cache import HiRadixCache
from hicache.cache.break_even import BreakEven, Rates
from hicache.cache.prefetch_states import Prefetch, PrefetchTable, State
from hicache.clock import Clock
from hicache.events import EventStream
from hicache.keys import BIGRAM_BYTES, TOKEN_BYTES, Namespace, RadixKey
from hicache.keys import page_keys as chained_keys
from hicache.tiers import TrailingPool
from tests.simulation.audit import Auditor, Follower
from tests.simulation.device import SimulatedCopyEngine, SimulatedPooledCopies
from tests.simulation.memory import SimulatedDevicePool, SimulatedHostPool, SimulatedSlots
from tests.simulation.setting import Parts, prompt_key
from tests.simulation.storage import Stores
from tests.simulation.stream import Stream
from tests.simulation.streams import StreamedCopyEngine
from tests.simulation.workers import Died, SimulatedWorkers
from tests.stamps import Stamps


class _CountedTable(PrefetchTable):
    """Counts the moves of all prefetches."""

    moves: ClassVar[Counter[tuple[State, State]]]

    def move(self, prefetch: Prefetch, state: State, leader: Prefetch | None = None) -> None:
        self.moves[prefetch.state, state] += 1
        super().move(prefetch, state, leader)


class SimulatedClock(Clock):
    """Simulated monotonic seconds. Each reading advances them a little, and a pause by its length."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def __call__(self) -> float:
        self.time_s += 1e-5
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds


class World(ABC):
    """See the module's docstring. Everything depends only on the seed."""

    def __init__(self, seed: int, parts: Parts) -> None:
        self.random = random.Random(seed)
        self.clock = SimulatedClock()
        self.alone = False  # the scheduler is inside a call: only devices and workers may run
        self.epoch = 0
        self.setting = setting = parts.draw(self.random)
        self.parts = parts
        self.fault_rate = setting.fault_rate
        self.workers: list[SimulatedWorkers[Any]] = []
        self.stamps = Stamps(setting.all_layers)
        self.device = SimulatedDevicePool(setting.geometry, setting.device_pages, Stream())
        self.host = SimulatedHostPool(setting.all_layers, setting.host_pages)
        self.slots = [
            SimulatedSlots(replace(setting.geometry, layers=1), slots, self.device.stream)
            for _, slots in setting.trailing
        ]
        self.trailing = [
            TrailingPool(f"pool {index}", pool, tokens)
            for index, (pool, (tokens, _)) in enumerate(zip(self.slots, setting.trailing, strict=True))
        ]
        self.copies = self._make_copies()
        namespace = Namespace(model="simulation", geometry=setting.all_layers)
        self.servers = [Stores(namespace, setting.storage_pages or 1, self) for _ in range(2)]
        self.stores = self.servers[0]  # the stores that were attached last
        self.stores.attached = has_storage = setting.storage_pages is not None
        self.controller = parts.controller(
            self.host, self.copies, self.stores.open_now(0) if has_storage else None, setting.config,
            rates=len(Rates()), workers=self._make_workers, clock=self.clock,
        )
        self.cache = HiRadixCache(
            self.device, self.host, self.controller,
            position_bytes=BIGRAM_BYTES if setting.bigram else TOKEN_BYTES,
            open_storage=self.stores.open if has_storage else None,
            break_even=BreakEven(
                setting.config.break_even, self.host.payload_bytes, given=setting.given,
                probe_every=setting.probe_every,
            ),
            trailing=self.trailing,
        )
        self.auditor = Auditor(self.cache, self.device, self.host, self.slots, self.stamps)
        self.follower: Follower | None = None
        if setting.events_bytes is not None:
            stream = EventStream(setting.events_bytes)
            self.cache.record_events(stream)
            self.follower = Follower(self.cache, stream.subscribe())
        self.moves: Counter[tuple[State, State]] = Counter()  # between the states of prefetches
        self.cache._prefetcher._table.__class__ = type("", (_CountedTable,), {"moves": self.moves})
        parts.after(self.cache)

    def _make_copies(self) -> SimulatedCopyEngine | StreamedCopyEngine | SimulatedPooledCopies:
        kind, more = self.parts.copies, (self.host, self.random, self.setting.device_fail_rate, self.clock)
        if not self.trailing:
            return kind(self.device, *more)
        assert issubclass(kind, SimulatedCopyEngine), "trailing pools are simulated with this engine only"
        layers = self.setting.geometry.layers
        engines = [kind(pool, *more, layers + index) for index, pool in enumerate(self.slots)]
        return SimulatedPooledCopies(kind(self.device, *more), list(zip(self.trailing, engines, strict=True)))

    def _make_workers(self, name: str, count: int, **arguments: Any) -> SimulatedWorkers[Any]:
        group = self.parts.workers(name, count, schedule=self, **arguments)
        self.workers.append(group)
        return group

    def key(self, tokens: list[int], seed: bytes) -> RadixKey:
        """Return the key of a prompt, as the engine of this cache computes it."""
        return prompt_key(tokens, seed, self.setting.bigram)

    def page_keys(self, key: RadixKey) -> list[bytes]:
        """Return the page keys of a key, computed independently of the cache."""
        return chained_keys(key.tokens, self.cache.tree.page_bytes // TOKEN_BYTES, key.seed) if key.tokens else []

    # For workers and storage

    def mishap(self) -> BaseException | None:
        """Return an exception that a worker raises now; usually None."""
        if self.random.random() >= self.setting.fault_rate / 2:
            return None
        return self.random.choice([Died(), ValueError("a bug in a driver")])

    @abstractmethod
    def elsewhere(self) -> None:
        """Run other actions in the middle of a worker's job."""

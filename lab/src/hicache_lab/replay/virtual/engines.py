"""Engines of a replay in virtual time: all of them on this thread, over one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from hicache.backends.store import Store
from hicache.cache import HiRadixCache
from hicache.cache.break_even import BreakEven, Rates
from hicache.cli.stores import parts_of_storage
from hicache.controller import HiCacheController
from hicache.errors import ConfigError, InvalidInput
from hicache.geometry import KVGeometry
from hicache.keys import Namespace
from hicache.tiers import HostWindow
from hicache.tiers.memory import DeviceMemory, device_pages, host_pages
from hicache.units import SIZE_MAX_BYTES

from ..job import ReplayJob
from ..result import ReplayResult, Sample, merged
from ..runner import Replay, namespace_of
from ..stand_in import never
from .clock import VirtualClock
from .machine import UntouchedHostPool, VirtualCopyEngine, VirtualWorkers, untouched_device_pool
from .store import FileTable, Table, TableDriver, UnverifiedCodec

# Samples of the state, in virtual seconds.
SAMPLE_EVERY_S = 1.0
# A scheduler without work looks this often whether a deadline of the cache has passed.
_IDLE_S = 0.01
# Stores that reach their limit by sweeps, see `Table`.
_SWEEPING = frozenset({"s3", "redis", "shared_files"})
_ENOUGH = DeviceMemory(SIZE_MAX_BYTES, SIZE_MAX_BYTES)


class VirtualReplay(Replay):
    """A replay whose scheduler waits for the next event instead of a fixed time."""

    def __init__(
        self, cache: HiRadixCache, job: ReplayJob, clock: VirtualClock, is_stopped: Callable[[], bool]
    ) -> None:
        super().__init__(cache, job, clock=clock, is_stopped=is_stopped)
        self._events = clock

    def rest(self) -> None:
        if self.engine.worked:
            self._events.sleep(0.0)
        elif self.unfinished:
            self._events.sleep_until_event(min(self._events() + _IDLE_S, self.next_arrival_s))
        else:
            self._events.sleep_until_event(self.next_arrival_s)


class VirtualEngines:
    """The engines of a job, with the methods of `InProcess`. Raises ConfigError for a configuration that cannot run
    without moving bytes, and InvalidInput as `start`."""

    def __init__(self, job: ReplayJob, is_stopped: Callable[[], bool] = never) -> None:
        self._clock = VirtualClock()
        table = _table(job, self._clock)
        jobs = [replace(job, process=process) for process in range(job.processes)]
        self._replays = [
            VirtualReplay(_cache(one, self._clock, table), one, self._clock, is_stopped) for one in jobs
        ]
        self._latest: dict[int, Sample] = {}
        self._running = 0
        self._is_stopped = False

    def run(self) -> Iterator[Sample]:
        """See InProcess."""
        for number, one in enumerate(self._replays):
            self._running += 1
            self._clock.start(partial(self._run, number, one))
        while self._running:
            self._clock.sleep(SAMPLE_EVERY_S)
            if self._latest:
                yield merged(list(self._latest.values()))

    def _run(self, number: int, replay: VirtualReplay) -> None:
        for sample in replay.run():
            self._latest[number] = sample
            if self._is_stopped:
                break
        self._running -= 1

    def result(self) -> ReplayResult:
        """See InProcess. Ends the steps in progress first: in the middle of one, the counts do not add up."""
        self._is_stopped = True
        while self._running:
            self._clock.sleep(SAMPLE_EVERY_S)
        result: ReplayResult = merged([one.result() for one in self._replays])
        return result

    def close(self) -> None:
        """Do nothing: there are neither threads nor files, and pages that are not stored would be lost anyway."""


def _table(job: ReplayJob, clock: VirtualClock) -> Table | None:
    storage = job.config.storage
    if storage is None:
        return None
    part, *others = parts_of_storage(storage)
    if others:
        raise ConfigError(
            f"replay --virtual: storage.type: {storage.type} joins several stores; use one store with the speed and "
            "the capacity of the whole"
        )
    geometry = namespace_of(job.preset, job.config.page_size).shape
    codec = UnverifiedCodec(bytes(32), geometry.payload_bytes)
    # A section or, for the type `memory`, a dictionary; the others have no policy.
    options = storage.model_dump(include={"options": {"eviction_policy"}})["options"]
    is_adaptive = options.get("eviction_policy") == "adaptive"
    if storage.type == "file" and part.capacity_bytes is not None:
        return FileTable(clock, job.speeds.storage, codec.frame_bytes, part.capacity_bytes, adaptive=is_adaptive)
    return Table(
        clock, job.speeds.storage, codec.frame_bytes, part.capacity_bytes, sweeps=storage.type in _SWEEPING,
        adaptive=is_adaptive,
    )


def _cache(job: ReplayJob, clock: VirtualClock, table: Table | None) -> HiRadixCache:
    """Return a cache as `create_cache` makes it, over parts in virtual time."""
    config, namespace = job.config, namespace_of(job.preset, job.config.page_size)
    if config.integrity.verifies_host:
        raise ConfigError("replay --virtual: integrity.verify and scrub_rate verify bytes; remove them")
    geometry = namespace.geometry
    if not isinstance(geometry, KVGeometry):
        raise InvalidInput(f"replay: {job.preset} has no geometry of attention")
    pages = device_pages(config.device, geometry, torch.device("cpu"), _ENOUGH)
    device = untouched_device_pool(geometry, pages)
    l2_pages = host_pages(config.host, geometry, device.pages)
    if callable(l2_pages):
        raise ConfigError("replay --virtual: host.size: this machine is not the one that serves; write a size: 64GiB")
    host = UntouchedHostPool(geometry, l2_pages)
    speeds = job.speeds
    copies = VirtualCopyEngine(
        device.blocks, HostWindow(host), clock, speeds.host_bytes_per_s, speeds.host_fixed_s
    )
    controller = HiCacheController(
        host, copies, _storage(job, namespace, clock, table), config, rates=len(Rates()), workers=VirtualWorkers,
        clock=clock,
    )
    return HiRadixCache(
        device, host, controller, break_even=BreakEven(config.break_even, geometry.payload_bytes)
    )


def _storage(job: ReplayJob, namespace: Namespace, clock: VirtualClock, table: Table | None) -> Store | None:
    if table is None or job.config.storage is None:
        return None
    codec = UnverifiedCodec(namespace.digest, namespace.shape.payload_bytes)
    return Store(
        TableDriver(table), codec, job.config.storage.guard, name=job.config.storage.type, clock=clock,
        workers=VirtualWorkers,
    )

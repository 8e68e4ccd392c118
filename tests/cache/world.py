"""A small cache, and an engine without a model.

The engine fills pages with bytes derived from their page keys, and compares all pages from the cache with them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.calls import Call
from hicache.backends.kept import KeptFrames
from hicache.backends.memory import MemoryDriver
from hicache.backends.storage import Storage
from hicache.cache import HiRadixCache, RequestKV
from hicache.cache.break_even import BreakEven, Rates
from hicache.cache.prefetch_states import Prefetch
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config import BreakEvenConfig, HiCacheConfig, PrefetchConfig, TransferConfig
from hicache.controller import HiCacheController
from hicache.controller.ranks import RankGroup
from hicache.frame import FrameCodec, PageBuffer
from hicache.geometry import KVGeometry
from hicache.keys import TOKEN_BYTES, Namespace, RadixKey
from hicache.tiers import (
    CopyEngine,
    EngineBlocks,
    HostPool,
    HostWindow,
    KVPool,
    create_copy_engine,
    create_device_pool,
)
from hicache.types import PageIds
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import bare
from tests.passing import Passing
from tests.tuned import tuned
from tests.waiting import wait_for

GEOMETRY = KVGeometry(layers=2, heads=1, head_dim=4, page_size=4, dtype="float32")
NAMESPACE = Namespace(model="test", geometry=GEOMETRY)
WAIT_S = 20.0


def codec(epoch: int = 0) -> FrameCodec:
    return FrameCodec(dataclasses.replace(NAMESPACE, weights_epoch=epoch).digest, GEOMETRY.payload_bytes)


class ShiftedClock(Clock):
    """The clock of the system, `shift_s` seconds ahead."""

    shift_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.shift_s


class StepClock(ManualClock):
    """A ManualClock for a test on one thread: a pause lets other threads run, and moves the time itself."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self.advance(seconds)


class LastingDriver(MemoryDriver):
    """A driver whose pages stay when its store is closed, as on a server."""

    def close(self) -> None:
        """Keep the pages for the next store."""


class LastingBackend(Passing):
    """A store in memory that stays open after its engine closes it, like a server."""

    def __init__(self, codec_: FrameCodec, driver: MemoryDriver | None = None) -> None:
        self.driver = driver or MemoryDriver()
        super().__init__(bare(self.driver, codec_))

    def close(self) -> None:
        """Stay open for the next engine."""


class GatedBackend(LastingBackend):
    """A store that counts its reads. Reads wait while `reads` is not set, writes while `writes` is not set."""

    def __init__(self, codec_: FrameCodec | None = None) -> None:
        super().__init__(codec_ or codec())
        self.reads, self.writes, self.entered = threading.Event(), threading.Event(), threading.Event()
        self.reads.set()
        self.writes.set()
        self.lookups = self.pages_read = 0

    def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
        self.lookups += 1
        return super()._exists(call, keys)

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        self.entered.set()
        assert self.reads.wait(30)
        self.pages_read += len(keys)
        return self.inner.batch_get(keys, pages, deadline=call.deadline + 100)

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        self.entered.set()
        assert self.writes.wait(30)
        return self.inner.batch_set(keys, pages, parent=parent, deadline=call.deadline + 100)


class AutoClosed:
    """An object that the fixture `close_worlds` closes after the test, unless the test has closed it."""

    alive: ClassVar[list[AutoClosed]] = []

    def __init__(self) -> None:
        self.alive.append(self)

    def leave(self) -> None:
        """Do not close this object after the test: it is closed, broken on purpose, or a part of another object."""
        if self in self.alive:
            self.alive.remove(self)

    def close(self) -> None:
        raise NotImplementedError



class Stepped(AutoClosed):
    """An engine that steps its cache."""

    cache: Any

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until `condition` holds."""
        wait_for(condition, self.step, timeout_s=WAIT_S, pause_s=0)

    def step(self) -> None:
        """Run one scheduler step."""
        if not self.cache.poll():
            time.sleep(0.0005)  # lets the workers run; the deadline is in `until`
        self.cache.check()

    @property
    def skipped(self) -> dict[str, int]:
        """The counts of work that was skipped, by reason."""
        return {reason: count for reason, count in self.cache.statistics().skipped.items() if count}


class World(Stepped):
    """A cache of `device_pages` and `host_pages` over `backend`, with an engine that calls it.

    `shard` makes the bytes of a page differ between ranks.
    """

    shard = b""
    cache: HiRadixCache

    def __init__(  # noqa: PLR0913 - the parts that tests replace
        self,
        *,
        device_pages: int = 16,
        host_pages: int = 32,
        host: HostPool | None = None,
        backend: Storage | None = None,
        config: HiCacheConfig | None = None,
        transfer: TransferConfig | None = None,
        copies: Callable[[EngineBlocks, HostWindow], CopyEngine] = create_copy_engine,
        position_bytes: int = TOKEN_BYTES,
        open_storage: Callable[[int], Storage] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        break_even: BreakEven | None = None,
        host_codec: Callable[[int], FrameCodec] | None = None,
        kept: KeptFrames | None = None,
        kind: type[HiRadixCache] = HiRadixCache,
        ranks: RankGroup | None = None,
        stores_pages: bool = True,
    ) -> None:
        self.geometry = GEOMETRY
        self.device: KVPool = create_device_pool(GEOMETRY, device_pages)
        self.host = HostPool(GEOMETRY, host_pages) if host is None else host
        self.controller = HiCacheController(
            self.host, copies(self.device.blocks, HostWindow(self.host)), backend, configured(config, transfer),
            ranks=ranks, stores_pages=stores_pages, rates=len(Rates()), clock=clock,
        )
        self.cache = kind(
            self.device,
            self.host,
            self.controller,
            position_bytes=position_bytes,
            open_storage=open_storage,
            break_even=break_even,
            host_codec=host_codec,
            kept=kept,
        )
        self.wrong_pages = 0
        self.compared_pages = 0
        super().__init__()

    def fill(self, key: RadixKey, pages: PageIds, first: int) -> None:
        """Write the bytes of the pages of `key` from `first` on into L1, as a forward does."""
        for number, page in list(zip(range(len(pages)), pages.tolist(), strict=True))[first:]:
            expected = self.expected(key, number)
            if expected is None:
                break
            for (region,), content in zip(self.device.blocks.layers, expected, strict=True):
                region.numpy()[page] = content

    def compare(self, key: RadixKey, pages: PageIds) -> None:
        """Compare pages of L1 with the expected bytes of `key`; count differences in `wrong_pages`."""
        for number, page in enumerate(pages.tolist()):
            expected = self.expected(key, number)
            assert expected is not None
            self.compared_pages += 1
            for (region,), content in zip(self.device.blocks.layers, expected, strict=True):
                if not np.array_equal(region.numpy()[page], content):
                    self.wrong_pages += 1

    def expected(self, key: RadixKey, number: int) -> npt.NDArray[np.uint8] | None:
        """Return the bytes of a page, uint8 `[layers, layer_bytes]`; None for a partial page."""
        shape = self.geometry
        keys = key.page_keys(shape.page_size, key.seed, 0, key.pages(shape.page_size))
        if number >= len(keys):
            return None
        stream = hashlib.shake_128(self.shard + keys[number]).digest(shape.payload_bytes)
        return np.frombuffer(stream, dtype=np.uint8).reshape(shape.layers, shape.layer_bytes)

    def admit(self, rid: str, key: RadixKey) -> RequestKV:
        """Admit a request without starting its loads. REQUIRES: there is room."""
        request = self.cache.begin_request(rid, key)
        assert request is not None, "no room"
        return request

    def begin(self, rid: str, key: RadixKey) -> RequestKV:
        """As `try_begin`. REQUIRES: there is room."""
        request = self.try_begin(rid, key)
        assert request is not None, "no room"
        return request

    def try_begin(self, rid: str, key: RadixKey) -> RequestKV | None:
        """Admit a request, wait for its loads, compare its cached pages, compute the others. None without room."""
        request = self.cache.begin_request(rid, key)
        transfer = self.cache.start_loading()
        if request is None:
            return None
        if transfer is not None:
            for layer in range(self.geometry.layers):
                transfer.wait_layer(layer)
        shared = request.shared_pages
        self.compare(key, request.pages[:shared])
        self.fill(key, request.pages, shared)
        return request

    def serve(self, rid: str, key: RadixKey) -> RequestKV:
        """Run a whole request with its prefetch. The returned object keeps its hit counts."""
        self.cache.prefetch_from_storage(rid, key)
        self.arrive(rid)
        request = self.begin(rid, key)
        self.cache.cache_finished_req(request, key)
        return request

    def arrive(self, *rids: str) -> None:
        """Step until requests need not wait for their prefetches."""
        for rid in rids:
            self.until(partial(self.cache.check_prefetch_progress, rid))

    def prefetch(self, rid: str, key: RadixKey) -> None:
        """Start a prefetch, and step until its request need not wait."""
        assert self.cache.prefetch_from_storage(rid, key)
        self.arrive(rid)

    def attempt(self, rid: str, key: RadixKey) -> RequestKV:
        """Begin a request and abort it. The returned object keeps its hit counts."""
        request = self.begin(rid, key)
        self.cache.cache_finished_req(request, None)
        return request

    def prefetch_of(self, rid: str) -> Prefetch:
        """Return the prefetch of a request that has not begun."""
        prefetch = self.cache._prefetcher._table.get(rid)
        assert prefetch is not None
        return prefetch

    def settle(self) -> None:
        """Step until no operation is in flight."""
        self.until(lambda: self.controller.idle)

    def leave_l1(self) -> None:
        """Step until no operation is in flight, and evict all pages from L1."""
        self.settle()
        self.cache.evict(self.device.pages)

    def forget(self) -> None:
        """Evict all pages from L1 and L2. Stored pages stay in storage."""
        self.leave_l1()
        while len(freed := self.cache.tree.evict_host(self.host.pages)):
            self.host.free(freed)

    def close(self) -> None:
        """Wait for all operations, close the cache, and assert that no page was wrong."""
        self.leave()
        self.settle()
        assert self.cache.close()
        self.cache.check()
        assert self.wrong_pages == 0


def configured(config: HiCacheConfig | None, transfer: TransferConfig | None) -> HiCacheConfig:
    """Return `config`, by default `every_hit()`, with `transfer` as its section `transfer`."""
    config = config or every_hit()
    return config if transfer is None else config.model_copy(update={"transfer": transfer})


def every_hit(**entries: Any) -> HiCacheConfig:
    """Return a configuration, with further `entries`, that fetches every hit, even if it is short or slow."""
    usual = {"load_back_threshold_tokens": 4, "break_even": BreakEvenConfig(mode="always"), "prefetch": prefetch()}
    return HiCacheConfig(**{**usual, **entries})


def prefetch(**entries: Any) -> PrefetchConfig:
    """Return options, with further `entries`, that let a request wait for prefetches of any length."""
    return tuned(PrefetchConfig, **{"threshold_tokens": 4, "timeout_base": WAIT_S, **entries})


AnyBackend = TypeVar("AnyBackend", bound=Storage)


def filled(backend: AnyBackend, *keys: RadixKey) -> AnyBackend:
    """Store the pages of `keys` in `backend` with an engine, and return it."""
    world = World(device_pages=1000, host_pages=1000, backend=backend)
    for number, key in enumerate(keys):
        world.serve(f"store {number}", key)
        world.settle()
    world.close()
    if isinstance(backend, GatedBackend):
        backend.lookups = backend.pages_read = 0
        backend.entered.clear()
    return backend


def memory_backend(capacity_bytes: int | None = None, epoch: int = 0) -> LastingBackend:
    return LastingBackend(codec(epoch), MemoryDriver(capacity_bytes))


def prompt(*pages: int, tail: int = 1, salt: str | None = None) -> RadixKey:
    """Return a prompt of whole pages, each filled with one number, and `tail` more tokens."""
    tokens = [page for page in pages for _ in range(GEOMETRY.page_size)] + [999] * tail
    return RadixKey.of(tokens, cache_salt=salt)

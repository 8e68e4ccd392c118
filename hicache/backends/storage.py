"""The storage contract: the operations of every L3 backend on batches of pages.

A batch is a run of consecutive pages of one chain, head first. Keys are 32 raw bytes. A page is a frame, a writable
memoryview of exactly `codec.frame_bytes` bytes of host memory, or a `PageView` of memory that the caller owns; tensors
are not passed. A backend belongs to one namespace and cannot access another. Backends seal pages before they store them
and verify pages that they read, page by page through their codec while the bytes are in the processor's cache, and
remove pages that fail.

Deadlines are times of the stores' clock. After its deadline a verb does not start another page, and reports the
remaining pages as ERROR (a lookup: as not stored). A failure of the store is an outcome, not an exception, and is
counted in `BackendStatistics.errors`, also for lookups. Only InvalidInput is raised, for arguments that break this
contract, and BackendError by `close`.

A `Store` is the shell around a driver; `compose` and the daemon's pool put several stores behind the same verbs. One
process may open a store several times. Damage that `is_unsupported`, such as a compressed page without zstd, is a MISS
and an error of that class: the page stays for other readers.

Locking design: any threads may call all verbs at the same time, which may block up to the deadline; an engine's
scheduler thread does not call them. `close` waits for the calls in flight; later verbs report ERROR.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from ..frame import FrameCodec, PageBuffer
from .base import BackendStatistics, Direction, EvictionListener, GetOutcome, SetOutcome, Usage
from .guard.admission import GuardStatistics
from .guard.health import IDLE, NOT_OPEN, HealthState, StoreHealth, problem
from .store import Store

T = TypeVar("T")

@runtime_checkable
class Storage(Protocol):
    """Pages of one namespace: a store, or several behind one face. See the module's docstring for the rules of every
    verb. `hicache.open_storage` returns one:

        >>> from hicache import HiCacheConfig, KVGeometry, Namespace, open_storage
        >>> namespace = Namespace("weights", KVGeometry(layers=2, heads=1, head_dim=8, page_size=16))
        >>> config = HiCacheConfig.model_validate({"page_size": 16, "storage": {"type": "memory"}})
        >>> store, key, deadline = open_storage(config, namespace), bytes(32), float("inf")
        >>> page = memoryview(bytearray(store.codec.frame_bytes))
        >>> [outcome.name for outcome in store.batch_set([key], [page], parent=None, deadline=deadline)]
        ['STORED']
        >>> store.batch_exists([key, bytes(31) + b"2"], deadline=deadline)
        1
        >>> store.close()
    """

    codec: FrameCodec

    @property
    @abstractmethod
    def stores(self) -> tuple[Store, ...]:
        """The stores behind it, in the order in which they are read. Does not block."""

    @abstractmethod
    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """Return the length of the longest prefix of `keys` that is stored, up to the first hole.

        A hint: a page may be evicted before `batch_get` reads it. Does not refresh recency.
        """

    @abstractmethod
    def batch_has(self, keys: Sequence[bytes], *, deadline: float) -> list[bool]:
        """Return for each of `keys` whether it is stored, for engines that look up single pages. Otherwise as
        `batch_exists`.
        """

    @abstractmethod
    def batch_get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float
    ) -> list[GetOutcome]:
        """Read pages directly into `pages`, one outcome per key. Refreshes the recency of hits.

        REQUIRES: `len(keys) == len(pages)`; others do not access the pages until the call returns.
        """

    @abstractmethod
    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """Store pages, one outcome per key. Idempotent; each page becomes visible as a whole or not at all.

        `parent` is the key of the page before `keys[0]`, None at the start of a chain, so that a backend can evict
        tails before heads. Seals the pages. A key that occurs twice is stored once, with the page before its first
        occurrence as its parent.
        REQUIRES: as `batch_get`, complete payloads, and `parent` is not one of `keys`.
        """

    @abstractmethod
    def batch_touch(self, keys: Sequence[bytes], *, deadline: float) -> list[bytes]:
        """Count each of `keys` as used now, and return those that are known to be missing, in any order.

        `keys` are pages of any chains, the head of each before its tail. A hint: failures are counted and not retried,
        and their keys are not returned. A store whose eviction does not consider uses returns nothing.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """Remove pages; return how many were stored. Missing pages are not an error."""

    @abstractmethod
    def clear(self, *, deadline: float) -> int:
        """Remove all pages of this namespace; return how many were stored. Blocks: a server lists them first.

        Pages stored at the same time may stay. If pages remain at the deadline, that counts as one error.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """Return the pages stored by all processes that share the store. May block: a server counts by listing.

        If the store fails, return the last known usage and count an error.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for the calls in flight, then release files, sockets and threads. Idempotent."""

    def statistics(self) -> BackendStatistics:
        """Return the totals of all stores since they were opened. A page that two stores looked up counts twice. Does
        not block."""
        found = [store.statistics() for store in self.stores]
        return BackendStatistics(
            gets=_sum(one.gets for one in found),
            sets=_sum(one.sets for one in found),
            corrupt=_sum(one.corrupt for one in found),
            errors=_sum(one.errors for one in found),
            evicted_pages=sum(one.evicted_pages for one in found),
            read_bytes=sum(one.read_bytes for one in found),
            written_bytes=sum(one.written_bytes for one in found),
            expired_pages=sum(one.expired_pages for one in found),
        )

    def may_pass(self, direction: Direction) -> bool:
        """True if at least one store would be called now. Does not block; a scheduler calls it each step."""
        return any(store.may_pass(direction) for store in self.stores)

    def register_memory(self, memory: memoryview) -> None:
        """Register `memory`, which contains the frames, with stores that transfer such memory faster. Called before the
        first verb; may block. Other frames also work, with an additional copy.

        REQUIRES: `memory` stays until the storage is closed. A failure is counted and logged. Raises InvalidInput
        for memory that cannot be registered at all.
        """
        for store in self.stores:
            store.register_memory(memory)

    def watch_evictions(self, listener: EvictionListener) -> None:
        """Call `listener` with the keys of this namespace's pages after a store has evicted them in this process. One
        listener at a time. Does not block."""
        for store in self.stores:
            store.watch_evictions(listener)


def _sum(counts: Iterable[Mapping[T, int]]) -> dict[T, int]:
    total: Counter[T] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Statistics of one store. `name` is unique in its storage. `usage` is None until it is known; `guard` is None for
    storage that is not open."""

    name: str
    statistics: BackendStatistics
    usage: Usage | None
    guard: GuardStatistics | None
    health: StoreHealth = IDLE


def unopened(name: str, since_s: float, detail: str) -> StoreStatistics:
    """Return the statistics of storage that is wanted and not open since `since_s` (wall clock), with the reason."""
    health = problem(HealthState.KEEPS_NOTHING, since_s, NOT_OPEN, detail=detail)
    return StoreStatistics(name, BackendStatistics({}, {}, {}, {}, 0, 0, 0), None, None, health)


def store_statistics(storage: Storage) -> tuple[StoreStatistics, ...]:
    """Return the statistics of each store, in the order in which they are read, named as by `named_stores`. Does not
    block."""
    return tuple(
        StoreStatistics(name, store.statistics(), store.usage_sample(), store.guard_statistics(), store.health())
        for name, store in named_stores(storage)
    )


def named_stores(storage: Storage) -> list[tuple[str, Store]]:
    """Return the stores with their names, in the order in which they are read. The second store of a name is called
    `name-2`."""
    return list(zip(unique_names([store.name for store in storage.stores]), storage.stores, strict=True))


def unique_names(names: Sequence[str]) -> list[str]:
    """Return `names` made unique: the second occurrence of a name gets the suffix `-2`."""
    found: dict[str, None] = {}
    seen: Counter[str] = Counter()
    for name in names:
        unique = name
        while unique in found:
            seen[name] += 1
            unique = f"{name}-{seen[name] + 1}"
        found[unique] = None
    return list(found)

"""The storage contract: what every L3 backend does, on batches of pages.

A batch is a run of consecutive pages of one chain, head first. Keys are 32 raw bytes. A page is a frame, a writable
memoryview of exactly `codec.frame_bytes` bytes of host memory, or a `PageView` of memory that others own; no tensor
crosses this line. A backend lives in one namespace: it
sees no page of another one. Backends seal what they store and check what they read, page by page through their codec
while the bytes are warm, and remove what fails the check.

Deadlines are points on `time.monotonic()`. A verb starts no new page after its deadline and reports what it did not do
as ERROR (a lookup: as not stored). A failure of the store is an outcome, never an exception, and each one is counted in
`BackendStatistics.errors`, lookups' too: a guard tells a store that has nothing from one that is down by these counts.
What may be raised is InvalidInput for arguments that break this contract and BackendError from a constructor or from
`close`. A backend tries each request once (replacing a stale pooled connection does not count):
repeating is the guard's business, which has one budget for it.

A store derives from `PageStore` (see `store`), which makes the verbs out of a few functions that move bytes, and proves
each page; one made of others from `Compound` or `Wrapper` (see `envelope`). One process may open a store several times.
Damage that `is_unsupported`, such as a compressed page where zstd is missing, is a MISS and an error of that class: the
page stays for others.

Locking design: all verbs may be called from any threads at once and may block up to the deadline; none is called on an
engine's scheduler thread. `close` waits for the calls in flight; verbs after it report ERROR.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from ..frame import FrameCodec, PageBuffer

# Is told the keys of pages that a store has evicted. Called on any thread; must not block, nor call the store.
EvictionListener: TypeAlias = Callable[[Sequence[bytes]], object]


class GetOutcome(enum.StrEnum):
    """What became of one page of a `batch_get`. Only after HIT do the page's bytes mean anything."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"  # stored, but not provably the page asked for; it was removed
    ERROR = "error"  # could not be read in time


class SetOutcome(enum.StrEnum):
    """What became of one page of a `batch_set`."""

    STORED = "stored"
    PRESENT = "present"  # was there already, nothing written
    REJECTED = "rejected"  # no room, and none could be made
    ERROR = "error"  # could not be written in time; nothing of it is visible

    @property
    def is_stored(self) -> bool:
        """Whether the page can be read back."""
        return self in (SetOutcome.STORED, SetOutcome.PRESENT)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a backend holds in its namespace's store. `capacity_bytes` None means that the server sets the limit."""

    pages: int
    bytes: int
    capacity_bytes: int | None

    @classmethod
    def total(cls, found: Sequence[Usage]) -> Usage:
        """Return the sum over stores that share no page, with a capacity if each of them has one."""
        limits = [usage.capacity_bytes for usage in found if usage.capacity_bytes is not None]
        capacity = sum(limits) if len(limits) == len(found) else None
        return cls(sum(usage.pages for usage in found), sum(usage.bytes for usage in found), capacity)


@dataclass(frozen=True, slots=True)
class BackendStatistics:
    """Totals since the backend was opened. `corrupt` counts by reason, `errors` by class of error."""

    gets: Mapping[GetOutcome, int]
    sets: Mapping[SetOutcome, int]
    corrupt: Mapping[str, int]
    errors: Mapping[str, int]
    evicted_pages: int
    read_bytes: int
    written_bytes: int


class StorageBackend(ABC):
    """One L3 store, seen from one namespace. See the module's docstring for what holds for every verb."""

    def __init__(self, codec: FrameCodec) -> None:
        self.codec = codec

    @abstractmethod
    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """Length of the longest prefix of `keys` that is stored, stopping at the first hole.

        A hint: a page may be evicted before it is read, `batch_get` tells the truth. Does not refresh recency.
        """

    @abstractmethod
    def batch_has(self, keys: Sequence[bytes], *, deadline: float) -> list[bool]:
        """Whether each of `keys` is stored, on its own: for engines that ask for single pages. Else as `batch_exists`.
        """

    @abstractmethod
    def batch_get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float
    ) -> list[GetOutcome]:
        """Read pages straight into `pages`, one outcome per key. Refreshes the recency of what it hits.

        REQUIRES: `len(keys) == len(pages)`; the pages stay untouched by others until the call returns.
        """

    @abstractmethod
    def batch_set(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """Store pages, one outcome per key. Idempotent; each page appears whole or not at all.

        `parent` is the key of the page before `keys[0]`, None at the start of a chain: with it a backend that evicts
        can drop tails before heads. Seals the pages. A key that comes twice is stored once, and its parent is the page
        before its first place.
        REQUIRES: as `batch_get`, complete payloads, and `parent` is not one of `keys`.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """Remove pages; how many were there. Missing ones are no error."""

    @abstractmethod
    def clear(self, *, deadline: float) -> int:
        """Remove all pages of this namespace; how many were there. Blocks: a server lists them first.

        A page that is stored at the same time may stay. Pages that are not removed by the deadline stay; that counts as
        one error.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """What is stored now, by all processes that share the store. May block: a server counts by listing.

        If the store fails: the last known usage, and a counted error.
        """

    @abstractmethod
    def statistics(self) -> BackendStatistics:
        """Totals since this backend was opened. Cheap and non-blocking."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the calls in flight, then release files, sockets and threads. May be called twice."""


@runtime_checkable
class MemoryRegistration(Protocol):
    """A backend that moves registered memory faster (RDMA), or one that hands memory on to such. See
    `register_memory`."""

    def register_memory(self, memory: memoryview) -> None:
        """Make `memory`, from which frames will come, known to the network. Called before the first verb; may block.

        Other frames still work, at the price of a copy. Raises BackendError.
        """


@runtime_checkable
class Recency(Protocol):
    """A backend whose choice of what to evict follows uses that it has not seen, or one that passes them on. See
    `touch`."""

    def batch_touch(self, keys: Sequence[bytes], *, deadline: float) -> list[bytes]:
        """Count each of `keys` as used now, and return those that are known not to be stored, in any order.

        `keys` are pages of any chains, the head of each before its tail. A hint: what fails is counted, is not tried
        again, and is not among what is returned.
        """


@runtime_checkable
class EvictionNotices(Protocol):
    """A backend that tells which pages it evicts in this process, or one that passes that on. See `watch_evictions`."""

    def watch_evictions(self, listener: EvictionListener) -> None:
        """Call `listener` with the keys of this namespace's pages after they were evicted, as far as this backend has
        evicted them itself. One listener at a time. Does not block."""


@runtime_checkable
class Composite(Protocol):
    """A backend that passes its verbs on to others."""

    @property
    def parts(self) -> Sequence[StorageBackend]:
        """The backends behind it, in the order in which they are read."""


def leaves(backend: StorageBackend) -> Iterator[StorageBackend]:
    """The backends at the bottom of `backend`: itself, unless it is a Composite."""
    if isinstance(backend, Composite):
        for part in backend.parts:
            yield from leaves(part)
    else:
        yield backend


def register_memory(backend: StorageBackend, memory: memoryview) -> None:
    """Make `memory` known to all in `backend` that move registered memory faster. Before the first verb; may block.

    REQUIRES: `memory` stays until the backend is closed. Raises BackendError where no guard counts it instead.
    """
    if isinstance(backend, MemoryRegistration):
        backend.register_memory(memory)
    elif isinstance(backend, Composite):
        for part in backend.parts:
            register_memory(part, memory)


def touch(backend: StorageBackend, keys: Sequence[bytes], *, deadline: float) -> list[bytes]:
    """As `Recency.batch_touch`, of all in `backend` that have it; does nothing for others.

    A page that one of several stores may have is not missing.
    """
    if isinstance(backend, Recency):
        return backend.batch_touch(keys, deadline=deadline)
    missing: list[set[bytes]] = []
    if isinstance(backend, Composite):
        missing = [set(touch(part, keys, deadline=deadline)) for part in backend.parts]
    return list(set.intersection(*missing)) if missing else []


def watch_evictions(backend: StorageBackend, listener: EvictionListener) -> None:
    """As `EvictionNotices.watch_evictions`, of all in `backend` that have it; does nothing for others."""
    if isinstance(backend, EvictionNotices):
        backend.watch_evictions(listener)
    elif isinstance(backend, Composite):
        for part in backend.parts:
            watch_evictions(part, listener)

"""The storage contract: the operations of every L3 backend on batches of pages.

A batch is a run of consecutive pages of one chain, head first. Keys are 32 raw bytes. A page is a frame, a writable
memoryview of exactly `codec.frame_bytes` bytes of host memory, or a `PageView` of memory that others own; tensors are
not passed. A backend belongs to one namespace and has no access to others. Backends seal pages before they store them
and verify pages that they read, page by page through their codec while the bytes are in the processor's cache, and
remove pages that fail.

Deadlines are points on `time.monotonic()`. After its deadline a verb does not start another page, and reports the
remaining pages as ERROR (a lookup: as not stored). A failure of the store is an outcome, not an exception, and is
counted in `BackendStatistics.errors`, also for lookups: by these counts a guard distinguishes an empty store from one
that is down. Only InvalidInput is raised, for arguments that break this contract, and BackendError by a constructor or
`close`. A backend tries each request once (replacing a stale pooled connection does not count): the guard retries, with
one budget for all.

A store derives from `PageStore` (see `store`), which implements the verbs with a few functions that move bytes, and
verifies each page; a backend made of others derives from `Compound` or `Wrapper` (see `envelope`). One process may open
a store several times. Damage that `is_unsupported`, such as a compressed page without zstd, is a MISS and an error of
that class: the page stays for other readers.

Locking design: any threads may call all verbs at the same time, which may block up to the deadline; an engine's
scheduler thread does not call them. `close` waits for the calls in flight; later verbs report ERROR.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from ..frame import FrameCodec, PageBuffer

# Called with the keys of pages that a store has evicted, on any thread. Must not block or call the store.
EvictionListener: TypeAlias = Callable[[Sequence[bytes]], object]


class GetOutcome(enum.StrEnum):
    """The outcome of one page of a `batch_get`. The page's bytes are valid only after HIT."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"  # stored, but failed verification; it was removed
    ERROR = "error"  # could not be read in time


class SetOutcome(enum.StrEnum):
    """The outcome of one page of a `batch_set`."""

    STORED = "stored"
    PRESENT = "present"  # already stored, nothing written
    REJECTED = "rejected"  # the store is full and could not evict
    ERROR = "error"  # could not be written in time; no part of it is visible

    @property
    def is_stored(self) -> bool:
        """True if the page can be read back."""
        return self in (SetOutcome.STORED, SetOutcome.PRESENT)


@dataclass(frozen=True, slots=True)
class Usage:
    """The stored pages of a backend. `capacity_bytes` is None if the server sets the limit."""

    pages: int
    bytes: int
    capacity_bytes: int | None

    @classmethod
    def total(cls, found: Sequence[Usage]) -> Usage:
        """Return the sum over stores that do not share pages, with a capacity if each of them has one."""
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
    """One L3 store, seen from one namespace. See the module's docstring for the rules of every verb."""

    def __init__(self, codec: FrameCodec) -> None:
        self.codec = codec

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
    def statistics(self) -> BackendStatistics:
        """Return totals since this backend was opened. Cheap and non-blocking."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the calls in flight, then release files, sockets and threads. Idempotent."""


@runtime_checkable
class MemoryRegistration(Protocol):
    """A backend that transfers registered memory faster (RDMA), or passes memory on to such a backend. See
    `register_memory`."""

    def register_memory(self, memory: memoryview) -> None:
        """Register `memory`, which contains the frames, with the network. Called before the first verb; may block.

        Other frames also work, with an additional copy. Raises BackendError.
        """


@runtime_checkable
class Recency(Protocol):
    """A backend whose eviction considers uses outside it, or passes them on to such a backend. See `touch`."""

    def batch_touch(self, keys: Sequence[bytes], *, deadline: float) -> list[bytes]:
        """Count each of `keys` as used now, and return those that are known to be missing, in any order.

        `keys` are pages of any chains, the head of each before its tail. A hint: failures are counted and not retried,
        and their keys are not returned.
        """


@runtime_checkable
class EvictionNotices(Protocol):
    """A backend that reports the pages that it evicts in this process, or passes reports on. See `watch_evictions`."""

    def watch_evictions(self, listener: EvictionListener) -> None:
        """Call `listener` with the keys of this namespace's pages after this backend has evicted them. One listener at
        a time. Does not block."""


@runtime_checkable
class Rejecting(Protocol):
    """A store that says why it has no room."""

    @property
    def rejection(self) -> str | None:
        """Return why the last `batch_set` with new pages rejected some of them, with numbers, and after `; ` what to
        do; None if it did not. Any thread; does not block."""


@runtime_checkable
class Composite(Protocol):
    """A backend that passes its verbs on to other backends."""

    @property
    def parts(self) -> Sequence[StorageBackend]:
        """Return the backends behind it, in the order of reads."""


def leaves(backend: StorageBackend) -> Iterator[StorageBackend]:
    """Yield the backends at the bottom of `backend`: itself, unless it is a Composite."""
    if isinstance(backend, Composite):
        for part in backend.parts:
            yield from leaves(part)
    else:
        yield backend


def register_memory(backend: StorageBackend, memory: memoryview) -> None:
    """Register `memory` with all parts of `backend` that have MemoryRegistration. Before the first verb; may block.

    REQUIRES: `memory` stays until the backend is closed. Raises BackendError, unless a guard counts it instead.
    """
    if isinstance(backend, MemoryRegistration):
        backend.register_memory(memory)
    elif isinstance(backend, Composite):
        for part in backend.parts:
            register_memory(part, memory)


def touch(backend: StorageBackend, keys: Sequence[bytes], *, deadline: float) -> list[bytes]:
    """Call `batch_touch` of all parts of `backend` that have Recency.

    A page counts as missing only if no store may have it.
    """
    if isinstance(backend, Recency):
        return backend.batch_touch(keys, deadline=deadline)
    missing: list[set[bytes]] = []
    if isinstance(backend, Composite):
        missing = [set(touch(part, keys, deadline=deadline)) for part in backend.parts]
    return list(set.intersection(*missing)) if missing else []


def watch_evictions(backend: StorageBackend, listener: EvictionListener) -> None:
    """Call `watch_evictions` of all parts of `backend` that have EvictionNotices."""
    if isinstance(backend, EvictionNotices):
        backend.watch_evictions(listener)
    elif isinstance(backend, Composite):
        for part in backend.parts:
            watch_evictions(part, listener)


def rejection_of(backend: StorageBackend) -> str | None:
    """Return the `rejection` of the first part of `backend` that has one; None if there is none."""
    if isinstance(backend, Rejecting) and backend.rejection is not None:
        return backend.rejection
    parts = backend.parts if isinstance(backend, Composite) else ()
    return next(filter(None, map(rejection_of, parts)), None)

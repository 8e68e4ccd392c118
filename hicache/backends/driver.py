"""The protocol of a driver: seven functions that move the bytes of pages between a store and buffers.

A driver belongs to one `Store`, which checks arguments, verifies pages, counts, limits and retries (see `store`). So a
driver only moves bytes. It is called with at least one key, before the deadline, by several threads at once. It may
block until the deadline, and touches no buffer after it has returned.

A `deadline` is a time of the store's clock (`hicache.clock`). A factory with a parameter of the type `Clock` gets that
clock, for deadlines, back-offs and pauses: a system call may take `deadline - clock()` seconds. Only tests and
simulations have another clock than the system's.

A page is named by its namespace and its key, 32 bytes each; `pages.codec.namespace` is the namespace of a read or
write. A driver serves every namespace, so that operators' tools work on it too (see `stored`). An engine opens it with
its codec; a tool has no pages of its own, opens it with None, and calls only the functions of `Inspects`.

Failures are values: a kind of error (`ErrorKind`, or a text of its own) in place of the answer for one key, or as
reported to `PageReads` and `PageWrites`. A failure that ends the call raises StoreError: the remaining keys fail. Any
other exception is counted as `raised_NAME`, also for the remaining keys. A driver tries each request once (replacing a
stale pooled connection does not count): the store retries, with one budget for all.

What only some stores can do is in the protocols below `Driver`; a driver has it or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from .base import EvictionListener, StoredPage, Usage
from .pages import PageReads, PageWrites

# The value by which a store distinguishes a stored object from every other one.
Found = TypeVar("Found")
_Found_contra = TypeVar("_Found_contra", contravariant=True)
# For one key: whether its page is stored, or the kind of the failure.
Answer: TypeAlias = bool | str


class _HasPages(Protocol[_Found_contra]):
    """What engines, operators' tools and the sweeps of a limit use."""

    def write(self, pages: PageWrites) -> None:
        """Store the missing pages, each whole or not at all, and report the outcome of each. A page with a `used_s`
        keeps it, if the store records uses."""

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[_Found_contra] | None = None
    ) -> tuple[int, Sequence[str]]:
        """Remove pages; return how many were stored, and the kinds of failures. With `found`, which `read` or `pages`
        has reported, remove only those objects, not their successors. No key occurs twice."""

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """Return every page whose namespace digest starts with `namespace` (lower-case hexadecimal, empty for all), by
        namespace if the store can list in that order. Changes nothing. Pages stored or removed at the same time may or
        may not be listed; pages are removed between two of them."""

    def close(self) -> None:
        """Release files, sockets and threads. Called once, after all calls have ended. Raises BackendError."""


@runtime_checkable
class Driver(_HasPages[Found], Protocol[Found]):
    """One store. See the module's docstring for the rules of every function."""

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> Iterable[Answer]:
        """Return for each key whether its page is stored. May be a generator: for a prefix, it is read up to the first
        hole. Does not refresh recency."""

    def read(self, pages: PageReads[Found]) -> None:
        """Read pages into their buffers and report the outcome of each. Refreshes the recency of hits."""

    def measure(self) -> Usage:
        """Return the usage of the whole store. May block."""


@runtime_checkable
class Inspects(_HasPages[Any], Protocol):
    """A driver whose store operators' tools, and the sweeps of a limit, can work on: see `stored`."""

    def read_start(self, page: StoredPage, bytes_max: int, deadline: float) -> tuple[bytes, Any] | None:
        """Return the first `bytes_max` bytes of a page as stored, unverified, and the `found` of that object for
        `remove`, None if they may not be from a stored object (see PageReads). Return None if the page is missing. An
        object that is not a sequence of bytes has zero bytes. Raises PageUnreadable if only this page cannot be read.
        """


@runtime_checkable
class FindsPrefixes(Protocol):
    """A driver that finds the end of a prefix with less than a lookup of each key."""

    def find_prefix(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> tuple[int, Sequence[str]]:
        """Return how many of `keys` are stored up to the first hole, and the kinds of failed lookups."""


@runtime_checkable
class Touches(Protocol):
    """A driver of a store whose eviction considers uses outside it."""

    def touch(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> Iterable[Answer]:
        """Count each of `keys` as used now; return for each whether it is stored."""


@runtime_checkable
class RemovesListed(Protocol):
    """A driver that removes pages with fewer requests if they are known to be stored."""

    def remove_listed(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> tuple[int, Sequence[str]]:
        """As `remove`, for pages that `pages` has just returned. Counts pages that are missing by now too."""


@runtime_checkable
class Clears(Protocol):
    """A driver that removes a namespace in one request."""

    def clear(self, namespace: bytes, deadline: float) -> tuple[int, Sequence[str]]:
        """Remove all pages of a namespace; return how many were stored, and the kinds of failures."""


@runtime_checkable
class RegistersMemory(Protocol):
    """A driver that transfers registered memory faster (RDMA, shared memory)."""

    def register_memory(self, memory: memoryview) -> None:
        """See `Storage.register_memory`. Raises BackendError."""


@runtime_checkable
class ReportsEvictions(Protocol):
    """A driver of a store that reports the pages that it evicts in this process."""

    def watch_evictions(self, namespace: bytes, listener: EvictionListener) -> None:
        """See `Storage.watch_evictions`, for the pages of that namespace."""


@runtime_checkable
class ExplainsRejections(Protocol):
    """A driver of a store that says why it has no room."""

    @property
    def rejection(self) -> str | None:
        """Return why the last `write` with new pages rejected some of them, with numbers, and after `; ` what to do;
        None if it did not. Any thread; does not block."""


@runtime_checkable
class ExplainsErrors(Protocol):
    """A driver with its own words about errors, where the general ones would be about other stores."""

    def explanation(self, kind: str) -> str:
        """Return what an error of that kind means, and after `; ` what to do, or only the latter; empty if there are no
        own words. Any thread; does not block."""


@dataclass(frozen=True, slots=True)
class Incidents:
    """What happened in a driver outside the pages of its calls, as totals: `errors` by kind, evicted and expired pages.
    `outage` is not None while a part of the store is missing: since when (wall clock, seconds), and why, and after `; `
    what to do. The pages there fail with NODE_DOWN.
    """

    errors: Mapping[str, int] = field(default_factory=dict)
    evicted_pages: int = 0
    expired_pages: int = 0
    outage: tuple[float, str] | None = None


@runtime_checkable
class HasIncidents(Protocol):
    """A driver that evicts, works between its calls, or can lack a part of its store."""

    def incidents(self) -> Incidents:
        """Return the totals so far. Any thread; does not block."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The size of a store after the last complete listing by any engine, and the numbers of the last listing that was
    begun and of that one; 0 for none. `series` names the sequence of these numbers; after a loss another one begins."""

    pages: int
    bytes: int
    begun: int
    ended: int
    series: str = ""


@runtime_checkable
class SharesSweeps(Protocol):
    """A driver of a store in which one engine lists and sweeps for all, on a volume that other programs use too. The
    functions belong to the thread of the sweeps, block, and raise BackendUnavailable."""

    def free_bytes(self) -> int:
        """Return how many bytes the store may still take; negative if it must give some back."""

    @property
    def swept(self) -> Swept:
        """Return the last size known to this engine. Does not block."""

    @property
    def unpublished_bytes(self) -> int:
        """Return the bytes of pages being written, or left by dead writers, in the last listing of all pages."""

    @property
    def sweeps(self) -> bool:
        """Return True while this engine is the one that sweeps for all. Any thread; does not block."""

    def begin_sweep(self, needs_room: bool) -> bool:
        """Learn the size of the store. Return True if this engine must list and sweep now, not another one."""

    def continue_sweep(self) -> None:
        """Show the others that the sweep makes progress. Cheap: call it for every page."""

    def end_sweep(self, pages: int, size_bytes: int) -> None:
        """Tell the others the size after this sweep, and remove what dead writers have left."""

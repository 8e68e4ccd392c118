"""The vocabulary of storage: directions, outcomes, usage and statistics. `storage` has the verbs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

# Called with the keys of pages that a store has evicted, on any thread. Must not block or call the store.
EvictionListener: TypeAlias = Callable[[Sequence[bytes]], object]
# Namespace and key.
PageId: TypeAlias = tuple[bytes, bytes]


class Direction(enum.StrEnum):
    """The direction in which pages move. A lookup counts as a read, a removal as a write."""

    READ = "read"
    WRITE = "write"


class GetOutcome(enum.StrEnum):
    """The outcome of one page of a `batch_get`. The page's bytes are valid only after HIT."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"  # stored, but failed verification; removed if it is still the object that was read
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
class StoredPage:
    """One stored object at a page's location; its content was not checked.

    `namespace` and `key` are 32 raw bytes; a shorter key means an object at the location of all pages whose keys begin
    with it. `used_s` is the Unix time of the last use, or of the write if the store does not record uses, or None.
    `stored_s` is the Unix time when the page was stored, if the listing shows it.
    `identity` distinguishes the object from a later one at its location; None if the store cannot. `damage` is the
    reason why the object cannot be a page, if the listing shows one.
    """

    namespace: bytes
    key: bytes
    bytes: int
    used_s: float | None
    identity: Hashable = None
    damage: str | None = None
    stored_s: float | None = None

    @property
    def id(self) -> PageId:
        """Namespace and key."""
        return self.namespace, self.key


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
    """Totals since the backend was opened. `corrupt` counts by reason, `errors` by class of error. `expired_pages` were
    removed because they were older than the maximum age."""

    gets: Mapping[GetOutcome, int]
    sets: Mapping[SetOutcome, int]
    corrupt: Mapping[str, int]
    errors: Mapping[str, int]
    evicted_pages: int
    read_bytes: int
    written_bytes: int
    expired_pages: int = 0

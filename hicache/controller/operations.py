"""Operations in the controller's queues. Each is submitted, and returns in the acks when it has ended.

An operation contains its pages, but not its purpose. It is compared and hashed by identity, so its submitter can keep
the purpose in a table. Its inputs never change. The results of an operation on storage are written into it.

Locking design: only the thread named at a field writes it. Other threads may read it, because each field is one
reference. Fields written by a worker are final once the operation has returned to the scheduler.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from .. import tracing
from ..backends.base import GetOutcome
from ..errors import TransferError
from ..frame import Damage, FrameCodec
from ..keys import PageChain, RadixKey
from ..tiers import Fence, Transfer
from ..types import PageIds
from .gate import OpenStore

# More than the number of forwards that an engine queues ahead.
FENCES_KEPT = 16


class Fences:
    """The latest fences of the engine, numbered from 1. `latest` is the number of the last fence, 0 without one."""

    def __init__(self) -> None:
        self.latest = 0
        self._kept: deque[tuple[int, Fence]] = deque(maxlen=FENCES_KEPT)

    def add(self, fence: Fence) -> None:
        """Add a fence as the latest."""
        self.latest += 1
        self._kept.append((self.latest, fence))

    def at(self, number: int) -> Fence | None:
        """Return fence `number`, or the oldest stored fence, which is later, if `number` was dropped. So does number 0,
        for pages that no request has used: the engine may have filled them with zeros. None if there is no fence."""
        return next((fence for found, fence in self._kept if found >= number), None)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Copy L2 pages to L1, pairwise. `after` is the number of the fence after the last reader of the L1 pages."""

    host_pages: PageIds
    device_pages: PageIds
    after: int


@dataclass(frozen=True, slots=True, eq=False)
class Backup:
    """Copy L1 pages to L2, pairwise."""

    device_pages: PageIds
    host_pages: PageIds


Copy = TypeVar("Copy", Load, Backup)


class Launch(NamedTuple, Generic[Copy]):
    """Copies of one direction that run as one; `pages` is their total."""

    transfer: Transfer
    operations: list[Copy]
    pages: int


def leading_done(launched: Iterable[Launch[Any]]) -> int:
    """Return how many merged copies have succeeded or failed before the first that still runs."""
    done = 0
    for launch in launched:
        if not launch.transfer.done():
            break
        done += 1
    return done


@dataclass(slots=True, eq=False, kw_only=True)
class _StorageOperation:
    storage: OpenStore  # the store that it uses; it may be replaced before the operation ends
    codec: FrameCodec | None = None  # if L2 is verified: seals frames that storage has left without a tag
    failed: bool = False  # worker: failed on this rank
    ended: bool = False  # scheduler: ended on this rank


@dataclass(slots=True, eq=False, kw_only=True)
class _Prefetch(_StorageOperation):
    deadline: float  # monotonic; no batch starts after it
    call_s: float = math.inf  # a limit of each call of the store, below that of the configuration
    context: tracing.Context | None = None  # the parent of its span
    cancelled: bool = False  # scheduler; the worker stops at the next batch, and it is still acknowledged
    called_s: float = math.inf  # worker: when its call of the store began, infinite while none is in flight
    pages: int = 0  # scheduler: number of pages present on all ranks; never decreases


@dataclass(slots=True, eq=False)
class LookupOperation(_Prefetch):
    """Find the longest stored prefix of `key` after its first `start_page` pages. `pages` is the result."""

    key: RadixKey
    start_page: int
    prior: bytes | PageChain  # page key before `start_page`, or the seed; or a chain that ends with it
    keys: list[bytes] = field(default_factory=list)  # worker: page keys from `start_page` on, at least of `pages`
    hit_pages: int = 0  # worker: how many of these pages storage has

    @property
    def pages_here(self) -> int:
        """Pages found on this rank; 0 before the lookup has ended, or if it failed."""
        return self.hit_pages if self.ended and not self.failed else 0


@dataclass(slots=True, eq=False)
class ReadOperation(_Prefetch):
    """Fill L2 pages from storage, pairwise with `keys`, in order."""

    keys: Sequence[bytes]
    host_pages: PageIds
    pages_here: int = 0  # worker: leading pages that are read and verified; never decreases
    seconds: float = 0.0  # worker: time of the backend's calls, without the wait for a worker
    lacks: GetOutcome | None = None  # worker: MISS or CORRUPT if such a page has ended it
    charged_s: float = 0.0  # worker: its share of that time, which overlapping reads divide among them


@dataclass(slots=True, eq=False)
class StoreOperation(_StorageOperation):
    """Write the L2 pages of `chain` to storage. With `begins_prompt` they are the first pages of a prompt."""

    chain: PageChain  # hashed by the backup worker
    host_pages: PageIds
    begins_prompt: bool
    is_sealed: bool = False  # the frames were sealed before, so they are verified first
    stored_pages: int = 0  # worker: how many pages were not in storage before
    damage: tuple[int, Damage] | None = None  # worker: the first page of `is_sealed` frames that has changed
    rejected: bool = False  # worker: storage had no room for a page
    complete: bool = False  # worker: the store of this operation, in use or retired, has all pages on this rank
    stored: bool = False  # scheduler, at the end: the storage in use has all pages, on all ranks


@dataclass(slots=True, eq=False)
class TouchOperation(_StorageOperation):
    """Notify storage that the pages of `runs` are used: the page keys of each run, ancestors first. It has no ack."""

    runs: Sequence[bytes]
    pages: int = 0  # worker: how many pages were sent to storage


@dataclass(slots=True, eq=False)
class Acks:
    """All operations that ended since the last poll, in order."""

    written: list[Backup] = field(default_factory=list)
    loaded: list[Load] = field(default_factory=list)
    failed_backups: list[Backup] = field(default_factory=list)
    failed_loads: list[Load] = field(default_factory=list)
    found: list[LookupOperation] = field(default_factory=list)
    read: list[ReadOperation] = field(default_factory=list)
    stored: list[StoreOperation] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)  # page keys that storage lacks, by a touch, a read or its notice
    load_times: list[tuple[int, float]] = field(default_factory=list)  # (pages, seconds) of each merged copy
    fault: TransferError | None = None  # a copy failed on some rank: no rank may trust its L1 any more

    @property
    def any(self) -> bool:
        """True if it is not empty."""
        return bool(
            self.written or self.loaded or self.found or self.read or self.stored or self.lost
            or self.failed_backups or self.failed_loads or self.fault
        )

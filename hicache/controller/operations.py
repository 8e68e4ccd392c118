"""What travels through the controller's queues: each operation goes out, and comes back in the acks when it has ended.

An operation says which pages, and neither why nor for whom: it is compared and hashed by identity, so that its
submitter keeps what it is for in a table of its own. What it asks for never changes. What becomes of an operation on
storage is written into it.

Locking design: a field is written by the thread named at it; reading it from another thread is safe, because each is
one reference. What a worker writes is final once the operation has come back to the scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from ..errors import TransferError
from ..keys import PageChain, RadixKey
from ..tiers import Fence, Transfer
from ..types import PageIds
from .gate import OpenStore

# More than the forwards that an engine queues ahead.
FENCES_KEPT = 16


class Fences:
    """The latest points in the engine's work, numbered from 1. `latest` is the number of the last one, 0 without any.
    """

    def __init__(self) -> None:
        self.latest = 0
        self._kept: deque[tuple[int, Fence]] = deque(maxlen=FENCES_KEPT)

    def add(self, fence: Fence) -> None:
        """Take note of a fence."""
        self.latest += 1
        self._kept.append((self.latest, fence))

    def at(self, number: int) -> Fence | None:
        """Return fence `number`, or for one of long ago the oldest that is kept, which comes later. 0, of pages that no
        request has had, is of long ago too: the engine may have filled them with zeros. None if there is no fence."""
        return next((fence for found, fence in self._kept if found >= number), None)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Copy L2 pages to L1, pairwise. `after` is the number of the fence behind the last reader of the L1 pages."""

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
    """Copies of one direction that run as one; `pages` are those of all."""

    transfer: Transfer
    operations: list[Copy]
    pages: int


def leading_done(launched: Iterable[Launch[Any]]) -> int:
    """Return how many merged copies have ended, well or not, before the first that runs."""
    done = 0
    for launch in launched:
        if not launch.transfer.done():
            break
        done += 1
    return done


@dataclass(slots=True, eq=False, kw_only=True)
class _StorageOperation:
    storage: OpenStore  # the store that it uses, which may be replaced before it has ended
    failed: bool = False  # worker: on this rank
    ended: bool = False  # scheduler: on this rank


@dataclass(slots=True, eq=False, kw_only=True)
class _Prefetch(_StorageOperation):
    deadline: float  # monotonic; no batch starts after it
    cancelled: bool = False  # scheduler; the worker stops at the next batch
    expired: bool = False  # scheduler: its time is over, on some rank
    pages: int = 0  # scheduler: how many of them count, because they are there on all ranks; never falls


@dataclass(slots=True, eq=False)
class Lookup(_Prefetch):
    """Ask storage for the longest stored prefix of `key` behind its first `start_page` pages. `pages` is the answer."""

    key: RadixKey
    start_page: int
    prior: bytes | PageChain  # page key before `start_page`, or the seed; or the chain that has it
    keys: list[bytes] = field(default_factory=list)  # worker: page keys from `start_page` on, at least of `pages`
    hit_pages: int = 0  # worker: how many of them storage has

    @property
    def pages_here(self) -> int:
        """What this rank may promise: nothing before the lookup has ended, or if it failed."""
        return self.hit_pages if self.ended and not self.failed else 0


@dataclass(slots=True, eq=False)
class Read(_Prefetch):
    """Fill L2 pages from storage, pairwise with `keys`, in order."""

    keys: Sequence[bytes]
    host_pages: PageIds
    pages_here: int = 0  # worker: leading pages that are read and verified; never falls
    seconds: float = 0.0  # worker: that the backend took for `pages_here`, without waiting for the worker


@dataclass(slots=True, eq=False)
class Store(_StorageOperation):
    """Write the L2 pages of `chain` to storage. With `begins_prompt` there is no page before them."""

    chain: PageChain  # hashed by the backup worker
    host_pages: PageIds
    begins_prompt: bool
    stored_pages: int = 0  # worker: how many pages were not in storage before
    complete: bool = False  # worker: this rank's storage, in use or not, has all pages now
    stored: bool = False  # scheduler, at its end: the storage in use has all pages, on all ranks


@dataclass(slots=True, eq=False)
class Touch(_StorageOperation):
    """Tell storage that the pages of `runs` are used: the page keys of each run, ancestors first. It has no ack."""

    runs: Sequence[bytes]
    pages: int = 0  # worker: how many pages storage was told of


@dataclass(slots=True, eq=False)
class Acks:
    """Everything that ended since the last poll, in order."""

    written: list[Backup] = field(default_factory=list)
    loaded: list[Load] = field(default_factory=list)
    failed_backups: list[Backup] = field(default_factory=list)
    failed_loads: list[Load] = field(default_factory=list)
    expired: list[Lookup | Read] = field(default_factory=list)  # their time is over, on some rank; they still run
    found: list[Lookup] = field(default_factory=list)
    read: list[Read] = field(default_factory=list)
    stored: list[Store] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)  # keys of pages that storage lacks, as a touch, read or notice says
    load_times: list[tuple[int, float]] = field(default_factory=list)  # (pages, seconds) of each merged copy
    fault: TransferError | None = None  # a copy has failed, on some rank: no rank may vouch for its L1 any more

    @property
    def any(self) -> bool:
        """Whether there is anything in it."""
        return bool(
            self.written or self.loaded or self.expired or self.found or self.read or self.stored or self.lost
            or self.failed_backups or self.failed_loads or self.fault
        )  # fmt: skip

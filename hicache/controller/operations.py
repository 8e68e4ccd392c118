"""What travels through the controller's queues: operations going out, acks coming back.

Each operation carries a `tag`, which the controller hands back untouched: the cache finds its node or request by it.
Fields are written by the thread named at them; reading from another thread is safe because each is one reference.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..backends.base import SetOutcome
from ..errors import TransferError
from ..keys import PageChain, RadixKey
from ..tiers import Transfer
from ..types import NO_PAGES, PageIds

if TYPE_CHECKING:
    from .storage import StorageJobs


class PrefetchState(enum.Enum):
    """Where a prefetch is. Only the scheduler changes it."""

    LOOKING_UP = "looking_up"  # a worker hashes the tokens and asks the backend what it has
    READING = "reading"  # host pages are lent to it and an I/O worker fills them
    ENDED = "ended"  # nobody works on it any more


@dataclass(slots=True, eq=False)
class PrefetchOperation:
    """Pages of one prompt on their way from storage to L2."""

    tag: Any
    jobs: StorageJobs
    key: RadixKey
    start_page: int  # pages before it are on L2 already
    prior: bytes | PageChain  # page key before `start_page`, or the seed; or the chain that has it
    deadline: float  # monotonic; the I/O worker starts no batch after it
    state: PrefetchState = PrefetchState.LOOKING_UP  # scheduler
    cancelled: bool = False  # scheduler; workers stop at the next batch
    failed: bool = False  # worker
    phase_ended: bool = False  # scheduler: the lookup, or then the reads, have ended on this rank
    expired: bool = False  # scheduler: its time is over, on some rank
    keys: list[bytes] = field(default_factory=list)  # lookup worker: page keys from start_page on
    hit_pages: int = 0  # lookup worker: how many of them storage has; once found, the least of all ranks
    host_pages: PageIds = field(default_factory=lambda: NO_PAGES)  # scheduler: lent until state is ENDED
    completed_pages: int = 0  # I/O worker: leading pages that are read and verified; never falls
    read_s: float = 0.0  # I/O worker: how long the backend took for them, without waiting for the worker
    arrived_pages: int = 0  # scheduler: how many of them count, because they are there on all ranks; never falls
    taken_pages: int = 0  # scheduler: leading host pages that went into the tree

    @property
    def found_pages(self) -> int:
        """What a lookup that has ended may promise: nothing if it failed."""
        return self.hit_pages if self.phase_ended and not self.failed else 0


@dataclass(slots=True, eq=False)
class BackupOperation:
    """Pages of one node on their way from L2 to storage. The host pages are lent until its ack."""

    tag: Any
    jobs: StorageJobs
    chain: PageChain  # hashed by the backup worker
    host_pages: PageIds
    begins_prompt: bool  # there is no page before them
    outcomes: list[SetOutcome] = field(default_factory=list)  # backup worker: those of the leading pages
    is_complete: bool = False  # backup worker: all pages are in storage now
    stored_pages: int = 0  # backup worker: how many of them were not before
    ended: bool = False  # scheduler: on this rank
    stored: bool = False  # scheduler, at the ack: all pages are stored, on all ranks


@dataclass(slots=True, eq=False)
class CopyOperation:
    """Pages of one node on their way between L1 and L2."""

    tag: Any
    device_pages: PageIds
    host_pages: PageIds


class Launch(NamedTuple):
    """Copies of one direction that run as one; `pages` are those of all."""

    transfer: Transfer
    operations: list[CopyOperation]
    pages: int


@dataclass(slots=True, eq=False)
class Acks:
    """Everything that ended since the last poll, in order."""

    written: list[CopyOperation] = field(default_factory=list)
    loaded: list[CopyOperation] = field(default_factory=list)
    found: list[PrefetchOperation] = field(default_factory=list)  # looked up; decide whether to read
    prefetched: list[PrefetchOperation] = field(default_factory=list)  # ended, well or not
    stored: list[BackupOperation] = field(default_factory=list)
    load_times: list[tuple[int, float]] = field(default_factory=list)  # (pages, seconds) of each merged copy
    failed_copies: list[CopyOperation] = field(default_factory=list)
    fault: TransferError | None = None  # a copy has failed, on some rank: no rank may vouch for its L1 any more

    @property
    def any(self) -> bool:
        """Whether there is anything in it."""
        return bool(
            self.written or self.loaded or self.found or self.prefetched or self.stored or self.failed_copies
            or self.fault
        )  # fmt: skip


def now() -> float:
    """The clock of all deadlines: monotonic seconds."""
    return time.monotonic()

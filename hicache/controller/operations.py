"""What travels through the controller's queues: operations going out, acks coming back.

An operation says what to do and never changes. It is compared and hashed by identity, so that its submitter keeps what
it is for in a table of its own. What becomes of it is in the ack; the controller's own notes are in `jobs`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import TransferError
from ..keys import PageChain, RadixKey
from ..types import PageIds


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Copy L2 pages to L1, pairwise."""

    host_pages: PageIds
    device_pages: PageIds


@dataclass(frozen=True, slots=True, eq=False)
class Backup:
    """Copy L1 pages to L2, pairwise."""

    device_pages: PageIds
    host_pages: PageIds


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """Ask storage for the longest stored prefix of `key` behind its first `start_page` pages."""

    key: RadixKey
    start_page: int
    prior: bytes | PageChain  # page key before `start_page`, or the seed; or the chain that has it
    deadline: float  # monotonic; no batch starts after it


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Fill L2 pages from storage, pairwise with `keys`, in order."""

    keys: Sequence[bytes]
    host_pages: PageIds
    deadline: float  # monotonic; no batch starts after it


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Write the L2 pages of `chain` to storage. With `begins_prompt` there is no page before them."""

    chain: PageChain  # hashed by the backup worker
    host_pages: PageIds
    begins_prompt: bool


class Found(NamedTuple):
    """A lookup that has ended: how many pages storage has, on all ranks. `failed` is about this rank."""

    lookup: Lookup
    pages: int
    keys: Sequence[bytes]  # page keys from `start_page` on, at least of these pages
    failed: bool


class ReadEnded(NamedTuple):
    """A read that has ended: its leading `pages` are read and verified on all ranks. The rest is about this rank."""

    read: Read
    pages: int
    pages_here: int
    seconds: float  # that the backend took for `pages_here`, without waiting for the worker
    failed: bool


class StoreEnded(NamedTuple):
    """A store that has ended. `stored`: the storage in use has all pages, on all ranks. `complete`: this rank's
    storage, in use or not, has them all."""

    store: Store
    stored: bool
    complete: bool


@dataclass(slots=True, eq=False)
class Acks:
    """Everything that ended since the last poll, in order."""

    written: list[Backup] = field(default_factory=list)
    loaded: list[Load] = field(default_factory=list)
    failed_backups: list[Backup] = field(default_factory=list)
    failed_loads: list[Load] = field(default_factory=list)
    expired: list[Lookup | Read] = field(default_factory=list)  # their time is over, on some rank; they still run
    found: list[Found] = field(default_factory=list)
    read: list[ReadEnded] = field(default_factory=list)
    stored: list[StoreEnded] = field(default_factory=list)
    load_times: list[tuple[int, float]] = field(default_factory=list)  # (pages, seconds) of each merged copy
    fault: TransferError | None = None  # a copy has failed, on some rank: no rank may vouch for its L1 any more

    @property
    def any(self) -> bool:
        """Whether there is anything in it."""
        return bool(
            self.written or self.loaded or self.expired or self.found or self.read or self.stored
            or self.failed_backups or self.failed_loads or self.fault
        )  # fmt: skip


def now() -> float:
    """The clock of all deadlines: monotonic seconds."""
    return time.monotonic()

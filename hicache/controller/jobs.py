"""What the controller notes about an operation in flight. No other package sees these.

Locking design: a field is written by the thread named at it; reading it from another thread is safe, because each is
one reference. What a worker writes is final once its job has come back to the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch

from ..backends.base import SetOutcome
from ..errors import TransferError
from ..tiers import Transfer
from .operations import Backup, Load, Lookup, Read, Store

if TYPE_CHECKING:
    from .storage import StorageJobs

Copy = TypeVar("Copy", Load, Backup)
Operation = TypeVar("Operation", Lookup, Read, Store)


class Launch(NamedTuple, Generic[Copy]):
    """Copies of one direction that run as one; `pages` are those of all."""

    transfer: Transfer
    operations: list[Copy]
    pages: int


class LoadsInFlight(Transfer):
    """Several loads as one: the pages that any of them fills may have been handed out, so all have to be right."""

    def __init__(self, launched: Iterable[Launch[Load]]) -> None:
        self._parts = [launch.transfer for launch in launched]

    @property
    def error(self) -> TransferError | None:
        return next((part.error for part in self._parts if part.error is not None), None)

    @property
    def seconds(self) -> None:
        """None: each part has its own, which counts at its ack."""
        return None

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all(part.wait(max(0.0, deadline - time.monotonic())) for part in self._parts)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        for part in self._parts:
            part.wait_layer(layer, stream)


@dataclass(slots=True, eq=False)
class _Job(Generic[Operation]):
    operation: Operation
    storage: StorageJobs  # whose backend it uses
    failed: bool = False  # worker
    ended: bool = False  # scheduler: on this rank


@dataclass(slots=True, eq=False)
class LookupJob(_Job[Lookup]):
    """A lookup in flight."""

    cancelled: bool = False  # scheduler; the worker stops at the next batch
    expired: bool = False  # scheduler: its time is over, on some rank
    keys: list[bytes] = field(default_factory=list)  # worker: page keys from `start_page` on
    hit_pages: int = 0  # worker: how many of them storage has

    @property
    def pages(self) -> int:
        """What it may promise: nothing before it has ended, or if it failed."""
        return self.hit_pages if self.ended and not self.failed else 0


@dataclass(slots=True, eq=False)
class ReadJob(_Job[Read]):
    """A read in flight."""

    cancelled: bool = False  # scheduler; the worker stops at the next batch
    expired: bool = False  # scheduler: its time is over, on some rank
    pages: int = 0  # worker: leading pages that are read and verified; never falls
    seconds: float = 0.0  # worker: how long the backend took for them
    arrived_pages: int = 0  # scheduler: how many of them count, because they are there on all ranks; never falls


@dataclass(slots=True, eq=False)
class StoreJob(_Job[Store]):
    """A store in flight."""

    outcomes: list[SetOutcome] = field(default_factory=list)  # worker: those of the leading pages
    complete: bool = False  # worker: all pages are in storage now
    stored_pages: int = 0  # worker: how many of them were not before

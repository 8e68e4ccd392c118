"""What has ended: on this rank, or on all of them. Read from queues, transfers and clocks by the scheduler thread."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .operations import BackupOperation, Launch, PrefetchOperation, PrefetchState

# Backends start no page after the deadline but finish what they read; without this, a request would go on a moment
# before its last batch of up to a hundred pages arrives.
PREFETCH_GRACE_S = 0.05


class StoreProgress(enum.IntEnum):
    """Where a store is. Ordered, so that the minimum over the ranks is the state of them all."""

    RUNNING = 0
    FAILED = 1
    STORED = 2


class PrefetchProgress(NamedTuple):
    """Where the present phase (lookup or reads) of a prefetch is."""

    operation: PrefetchOperation
    ended: bool
    pages: int  # found by a lookup that has ended, or read so far
    in_time: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What has ended and what is possible: on this rank, or on all of them. `figures` are measurements."""

    healthy: bool = True
    may_prefetch: bool = True
    may_store: bool = True
    opened: int = 0  # the number of the storage backend that is open, see `lifecycle`
    time_ms: int = 0  # since the start
    writes_done: int = 0
    loads_done: int = 0
    figures: tuple[int, ...] = ()
    prefetches: Sequence[PrefetchProgress] = ()
    stores: Sequence[tuple[BackupOperation, StoreProgress]] = ()


def leading_done(launched: Iterable[Launch]) -> int:
    """How many merged copies have ended, well or not, before the first that runs."""
    done = 0
    for launch in launched:
        if not launch.transfer.done():
            break
        done += 1
    return done


def prefetch_progress(prefetches: Sequence[PrefetchOperation], time_s: float) -> list[PrefetchProgress]:
    """Where each prefetch is on this rank. `phase_ended` is read first: after it the pages do not change."""
    return [
        PrefetchProgress(
            job, job.phase_ended, job.completed_pages if job.state is PrefetchState.READING else job.found_pages,
            time_s < job.deadline,
        )
        for job in prefetches
    ]  # fmt: skip


def store_progress(store: BackupOperation, *, elsewhere: bool) -> StoreProgress:
    """Where a store is on this rank; with `elsewhere`, another rank does the work, and this one agrees to its word."""
    if elsewhere:
        return StoreProgress.STORED
    if not store.ended:
        return StoreProgress.RUNNING
    return StoreProgress.STORED if store.is_complete else StoreProgress.FAILED

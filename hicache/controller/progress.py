"""What has ended: on this rank, or on all of them. Read from queues, transfers and clocks by the scheduler thread."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .jobs import Launch, LookupJob, ReadJob, StoreJob

# Backends start no page after the deadline but finish what they read; without this, a request would go on a moment
# before its last batch of up to a hundred pages arrives.
PREFETCH_GRACE_S = 0.05


class StoreProgress(enum.IntEnum):
    """Where a store is. Ordered, so that the minimum over the ranks is the state of them all."""

    RUNNING = 0
    FAILED = 1
    STORED = 2


class Readiness(NamedTuple):
    """Whether storage may be used, on this rank or on all of them; see `gate`."""

    opened: int = 0  # the number of the last store that was opened
    read: bool = True
    write: bool = True


class PrefetchProgress(NamedTuple):
    """Where a lookup or a read is."""

    job: LookupJob | ReadJob
    ended: bool
    pages: int  # found by a lookup that has ended, or read so far
    in_time: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What has ended and what is possible: on this rank, or on all of them. `figures` are measurements."""

    healthy: bool = True
    storage: Readiness = field(default_factory=Readiness)
    time_ms: int = 0  # since the start
    writes_done: int = 0
    loads_done: int = 0
    figures: tuple[int, ...] = ()
    prefetches: Sequence[PrefetchProgress] = ()
    stores: Sequence[tuple[StoreJob, StoreProgress]] = ()


def leading_done(launched: Iterable[Launch[Any]]) -> int:
    """How many merged copies have ended, well or not, before the first that runs."""
    done = 0
    for launch in launched:
        if not launch.transfer.done():
            break
        done += 1
    return done


def prefetch_progress(jobs: Iterable[LookupJob | ReadJob], time_s: float) -> list[PrefetchProgress]:
    """Where each is on this rank at `time_s`. `ended` is read first: after it the pages do not change."""
    late_s = time_s - PREFETCH_GRACE_S
    return [PrefetchProgress(job, job.ended, job.pages, late_s < job.operation.deadline) for job in jobs]


def store_progress(job: StoreJob, *, elsewhere: bool) -> StoreProgress:
    """Where a store is on this rank; with `elsewhere`, another rank does the work, and this one agrees to its word."""
    if elsewhere:
        return StoreProgress.STORED
    if not job.ended:
        return StoreProgress.RUNNING
    return StoreProgress.STORED if job.complete and not job.failed else StoreProgress.FAILED

"""The messages between the scheduler's process and the workers of one vLLM engine in each step. Plain values, which
vLLM serializes; no tensors and no handles.

    scheduler -> workers   `Step`: the copies to start, and the requests whose copies to wait for
    workers -> scheduler   `Report`: the copies that have ended, merged over the ranks
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...types import PageIds
from .forwards import Forward


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One copy of every rank between its blocks of the device and its part of the host frames, pairwise.

    `blocks` and `host_blocks` are int32 arrays of equal length; block i of host page p is host block
    `p * blocks_per_page + i`. A `lost` job is a load whose pages were evicted from the host before it could begin: it
    copies nothing and ends as failed.
    """

    id: int
    rid: str
    blocks: PageIds
    host_blocks: PageIds
    lost: bool = False


@dataclass(slots=True)
class Step:
    """The orders of one engine step. `layerwise`: the forward of this step waits for `loads`, layer by layer.

    `flush` are the requests that lose their blocks in this step: their saves must end before the forward writes.
    `release` are the ended requests whose blocks vLLM keeps until their saves have ended. `measured` has the tokens of
    a forward to measure, which does not wait for loads; None for the others. An `idle` step computes nothing, so it may
    wait for a load.
    """

    loads: list[CopyJob] = field(default_factory=list)
    saves: list[CopyJob] = field(default_factory=list)
    layerwise: bool = False
    flush: list[str] = field(default_factory=list)
    release: list[str] = field(default_factory=list)
    measured: Forward | None = None
    idle: bool = False


@dataclass(slots=True)
class Ended:
    """A job that has ended on `ranks` ranks: the longest copy in seconds, and whether one of them failed."""

    ranks: int = 0
    seconds: float = 0.0
    failed: bool = False

    def merge(self, other: Ended) -> None:
        """Add the ends on other ranks."""
        self.ranks += other.ranks
        self.seconds = max(self.seconds, other.seconds)
        self.failed |= other.failed


@dataclass(slots=True)
class Report:
    """The jobs that have ended since the last report, and the slowest measured forward with its seconds."""

    jobs: dict[int, Ended] = field(default_factory=dict)
    forward: tuple[Forward, float] | None = None

    def merge(self, other: Report) -> Report:
        """Return this report merged with that of another rank, or of a later step."""
        for job, ended in other.jobs.items():
            self.jobs.setdefault(job, Ended()).merge(ended)
        if other.forward is not None and (self.forward is None or other.forward[1] > self.forward[1]):
            self.forward = other.forward
        return self

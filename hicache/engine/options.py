"""The bounds of an engine, and the order in which it begins requests."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ..arguments import instance, whole
from ..cache import ScheduleOptions


class Schedule(enum.StrEnum):
    """Which waiting request begins first."""

    FCFS = "fcfs"
    LONGEST_PREFIX = "longest_prefix"  # see `hicache.cache.schedule`; without a prefix cache it is FCFS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Bounds of the engine. More `running_max` shares each weight load among more requests on a GPU and needs more L1.

    `prefill_tokens_max` bounds the prompt tokens of one step: larger ends prefills sooner, smaller lets running
    requests get their next token sooner. `waiting_max` bounds the queue; beyond it `submit` refuses. `longest_prefix`
    has the bounds of that schedule. `check_when_idle` verifies all invariants after a step that had nothing to compute,
    at most once per `CHECK_EVERY_S`: a walk over the whole tree, for those who would rather stop than serve from broken
    books.
    """

    running_max: int = 8
    prefill_tokens_max: int = 1024
    waiting_max: int = 4096
    schedule: Schedule = Schedule.FCFS
    longest_prefix: ScheduleOptions = field(default_factory=ScheduleOptions)
    check_when_idle: bool = False

    def __post_init__(self) -> None:
        for name in ("running_max", "prefill_tokens_max", "waiting_max"):
            object.__setattr__(self, name, whole(f"engine: {name}", getattr(self, name), 1))
        instance("engine: schedule", self.schedule, Schedule)

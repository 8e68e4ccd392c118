"""The bounds of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments import instance, whole
from ..config import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Bounds of the bundled engine. The configuration has none of them, since it serves engines of all kinds.

    More `running_max` shares each weight load among more requests on a GPU and needs more L1. `prefill_tokens_max`
    bounds the prompt tokens of one step: larger ends prefills sooner, smaller lets running requests get their next
    token sooner. `waiting_max` bounds the queue; beyond it `submit` refuses. `schedule` is the order in which requests
    begin; None takes that of the configuration, or `fcfs` without one. `check_when_idle` verifies all invariants after
    a step that had nothing to compute, at most once per `CHECK_EVERY_S`: a walk over the whole tree, for those who
    would rather stop than serve from broken books.
    """

    running_max: int = 8
    prefill_tokens_max: int = 1024
    waiting_max: int = 4096
    schedule: ScheduleConfig | None = None
    check_when_idle: bool = False

    def __post_init__(self) -> None:
        for name in ("running_max", "prefill_tokens_max", "waiting_max"):
            object.__setattr__(self, name, whole(f"engine: {name}", getattr(self, name), 1))
        if self.schedule is not None:
            instance("engine: schedule", self.schedule, ScheduleConfig)

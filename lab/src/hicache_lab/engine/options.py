"""The bounds of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache.arguments import instance, whole

from .schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Bounds of the reference engine. They are not in the configuration, which serves all kinds of engines.

    A larger `running_max` shares each read of the weights among more requests on a GPU, and needs more L1.
    `prefill_tokens_max` bounds the prompt tokens of one step: with larger values prefills end sooner, with smaller ones
    running requests get their next token sooner. `waiting_max` bounds the queue; `submit` rejects requests above it.
    `schedule` is the order in which requests begin.
    `trailing_slots` is for models with windows or states: the pages that can have a slot in each trailing pool. With
    fewer slots, prefills take more steps, requests wait or are preempted, and more prefixes are filled from L2 again.
    None: the pages of two steps' prefills, and the trailing pages of `running_max` requests and some for their output.
    `check_when_idle` verifies all invariants after a step without work, at most once per `CHECK_EVERY_S`. This walks
    over the whole tree.
    """

    running_max: int = 8
    prefill_tokens_max: int = 1024
    waiting_max: int = 4096
    schedule: Schedule = field(default_factory=Schedule)
    check_when_idle: bool = False
    trailing_slots: int | None = None

    def __post_init__(self) -> None:
        for name in ("running_max", "prefill_tokens_max", "waiting_max"):
            object.__setattr__(self, name, whole(f"engine: {name}", getattr(self, name), 1))
        if self.trailing_slots is not None:
            object.__setattr__(self, "trailing_slots", whole("engine: trailing_slots", self.trailing_slots, 1))
        instance("engine: schedule", self.schedule, Schedule)

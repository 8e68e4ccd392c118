"""The sections `schedule`, `sessions` and `ranks`: how an engine uses its cache."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..units import Count, Duration, PositiveDuration
from .section import Section


class ScheduleConfig(Section):
    """Which waiting request begins first. `longest_prefix_first` and the engine of this package go by it; an engine
    with a scheduler of its own need not."""

    policy: Literal["fcfs", "longest_prefix"] = Field(
        default="fcfs",
        description="`fcfs`: in the order of arrival. `longest_prefix`: the longest cached prefix first, which serves "
        "requests with a common prefix one after the other, before it is evicted, and computes it once.",
    )
    queue_max: Count = Field(
        default=128, ge=0, le=65536,
        description="Requests that one step of `longest_prefix` looks up; a longer queue is served in order of "
        "arrival. More finds more hits in long queues and costs the scheduler a lookup each.",
    )
    age_max: Duration = Field(
        default=5.0,
        description="How long `longest_prefix` may let others overtake a request. Longer gains hits and costs the "
        "worst time to first token.",
    )
    defer_tokens: Count = Field(
        default=64, ge=1, le=1 << 30,
        description="Uncached tokens that two requests must share for one to wait until the other has computed them. "
        "Fewer waits more often for less.",
    )


class SessionsConfig(Section):
    """Conversations that keep all their KV on L1 between turns, to the last token."""

    enabled: bool = Field(
        default=False,
        description="Put a `SessionCache` around the cache. It needs `prefix_cache`. Requests without a session are "
        "served as before; a session saves at most a page of work per turn, and locks its pages on L1 until others "
        "need them.",
    )
    ttl: PositiveDuration = Field(
        default=600.0,
        description="How long a session lives after its last turn. Longer bears with slower readers; shorter frees L1 "
        "sooner.",
    )
    sessions_max: Count = Field(
        default=1024, ge=1, le=1 << 20,
        description="Sessions open at once. It bounds what is remembered of them; L1 bounds the KV they hold.",
    )


class RanksConfig(Section):
    """The ranks of one engine, which decide alike."""

    deadline: PositiveDuration = Field(
        default=30.0,
        description="How long a rank waits for the others in one step. After that the engine ends with an error on all "
        "ranks. Longer than the longest forward and the longest pause of the machine; shorter notices a stuck rank "
        "sooner. A rank that died is noticed at once.",
    )

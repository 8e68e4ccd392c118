"""The section `storage.guard`: the guard between the cache and a storage backend."""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from ..units import GIB, Count, Duration, Number, PositiveDuration, PositiveSize, Size
from .section import Section, yaml_switch


class Override(enum.StrEnum):
    """The operator's setting of one direction."""

    AUTO = "auto"  # the breaker decides
    ON = "on"  # every call passes, even after failures
    OFF = "off"  # calls are rejected


_Switch: TypeAlias = Annotated[Override, BeforeValidator(yaml_switch), WithJsonSchema({"enum": list(Override)})]


class InjectConfig(Section):
    """Injected faults, to try out their effects. Not for production."""

    latency: Duration = Field(default=0.0, description="Time added to each call.")
    jitter: Duration = Field(default=0.0, description="Random time up to this, added to each call.")
    bandwidth: Size = Field(default=0, description="Bytes per second for all calls together; 0: no limit.")
    error_share: Number = Field(default=0.0, ge=0, le=1, description="Share of the calls that fail.")
    damage_share: Number = Field(
        default=0.0, ge=0, le=1, description="Share of the read pages that are damaged in flight, and removed."
    )
    seed: Count = Field(default=0, description="Seed of the random numbers; equal seeds give equal faults.")

    @property
    def is_on(self) -> bool:
        """True if any fault is configured."""
        return any((self.latency, self.jitter, self.bandwidth, self.error_share, self.damage_share))


class GuardConfig(Section):
    """Limits and breaker of one storage backend."""

    in_flight: PositiveSize = Field(
        default=4 * GIB,
        description="Limit of bytes in flight. Further calls wait until their deadline; a larger call runs alone. "
        "Less keeps a small server responsive.",
    )
    failures: Count = Field(
        default=3, ge=1, le=1000,
        description="Failed calls in a row that open the breaker of their direction (docs/reliability.md). Fewer "
        "detects an outage sooner; more tolerates occasional errors.",
    )
    failure_share: Number = Field(
        default=0.5, gt=0, le=1,
        description="Share of failures in the last 20 calls that opens the breaker.",
    )
    backoff_min: PositiveDuration = Field(
        default=0.5,
        description="Back-off before a failed store is probed; each failed probe doubles it. Shorter recovers sooner, "
        "but loads the store more.",
    )
    backoff_max: PositiveDuration = Field(
        default=5.0, description="Longest back-off; a recovered store is used after about this time."
    )
    probe_timeout: PositiveDuration = Field(
        default=2.0,
        description="Time limit of a probe. Use more for slow or distant stores with large pages.",
    )
    grace: PositiveDuration = Field(
        default=0.5, description="Time after its deadline at which a call that has not returned counts as failed."
    )
    damage_pages: Count = Field(
        default=16, ge=1, le=1_000_000,
        description="Consecutive damaged pages that stop all use of the store: the reader then more likely has a "
        "wrong key, and would remove all pages.",
    )
    damage_backoff: PositiveDuration = Field(
        default=30.0, description="Length of that stop. Each further one is four times as long, up to an hour."
    )
    retry_share: Number = Field(
        default=0.1, ge=0, le=1,
        description="Share of calls and pages that may be retried once after an error. More hides more failures, but "
        "loads an overloaded store.",
    )
    read: _Switch = Field(
        default=Override.AUTO,
        description="`off`: never read from this store. `on`: always. `auto`: the breaker decides.",
    )
    write: _Switch = Field(default=Override.AUTO, description="The same for writes to this store.")
    inject: InjectConfig = InjectConfig()

    @model_validator(mode="after")
    def _require_order(self) -> GuardConfig:
        if self.backoff_max < self.backoff_min:
            raise ValueError("backoff_max is below backoff_min")
        return self

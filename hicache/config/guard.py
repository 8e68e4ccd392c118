"""The section `storage.guard`: what stands between the cache and a storage backend."""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from ..units import GIB, Count, Duration, Number, PositiveDuration, PositiveSize, Size
from .section import Section, yaml_switch


class Override(enum.StrEnum):
    """What the operator wants of one direction."""

    AUTO = "auto"  # the breaker decides
    ON = "on"  # every call passes, whatever happened to those before it
    OFF = "off"  # no call passes


_Switch: TypeAlias = Annotated[Override, BeforeValidator(yaml_switch), WithJsonSchema({"enum": list(Override)})]


class InjectConfig(Section):
    """Faults on purpose, for trying out what they cost. Not for production."""

    latency: Duration = Field(default=0.0, description="Time that each call to the store takes longer.")
    jitter: Duration = Field(default=0.0, description="Further time per call, drawn between 0 and this.")
    bandwidth: Size = Field(default=0, description="Bytes per second that all calls share; 0 for no limit.")
    error_share: Number = Field(default=0.0, ge=0, le=1, description="Share of the calls that fail.")
    damage_share: Number = Field(
        default=0.0, ge=0, le=1, description="Share of the pages read that are damaged on the way, and then removed."
    )
    seed: Count = Field(default=0, description="Start of the random numbers; equal seeds draw equal faults.")

    @property
    def is_on(self) -> bool:
        """True if something goes wrong."""
        return any((self.latency, self.jitter, self.bandwidth, self.error_share, self.damage_share))


class GuardConfig(Section):
    """Bounds and breaker of one storage backend."""

    in_flight: PositiveSize = Field(
        default=4 * GIB,
        description="Bytes of pages being read and written at once. A call beyond that waits, at most until its "
        "deadline; one that is larger goes alone. Less keeps a small server responsive, more keeps a fast one busy.",
    )
    failures: Count = Field(
        default=3, ge=1, le=1000,
        description="Failed calls in a row that open the breaker of their direction (read or write). Fewer notice an "
        "outage sooner, more bear with a store that stumbles.",
    )
    failure_share: Number = Field(
        default=0.5, gt=0, le=1,
        description="Share of failures among the last 20 calls that opens the breaker although some succeed.",
    )
    backoff_min: PositiveDuration = Field(
        default=0.5,
        description="Pause before a store that failed is probed. It doubles with each bad probe. Shorter heals sooner "
        "and asks a struggling store more often.",
    )
    backoff_max: PositiveDuration = Field(
        default=5.0, description="Longest such pause; a store that works again is used after about this time."
    )
    probe_timeout: PositiveDuration = Field(
        default=2.0,
        description="Time that a probe may take: a page written, read back and removed. More for slow or distant "
        "stores with large pages.",
    )
    grace: PositiveDuration = Field(
        default=0.5, description="How long after its deadline a call that has not returned counts as failed."
    )
    damage_pages: Count = Field(
        default=16, ge=1, le=1_000_000,
        description="Damaged pages without a sound one among them that stop all use of the store: the reader is then "
        "more likely wrong (another MAC key) than the pages, and would remove them all.",
    )
    damage_backoff: PositiveDuration = Field(
        default=30.0, description="Pause after that; four times as long each further time, up to an hour."
    )
    retry_share: Number = Field(
        default=0.1, ge=0, le=1,
        description="Share of all calls and pages that may be tried a second time after an error; 0 for never. More "
        "hides more lost requests, and burdens a store that is drowning.",
    )
    read: _Switch = Field(
        default=Override.AUTO,
        description="`off` reads nothing from this store, `on` reads whatever happens, `auto` lets the breaker decide.",
    )
    write: _Switch = Field(default=Override.AUTO, description="The same for storing.")
    inject: InjectConfig = InjectConfig()

    @model_validator(mode="after")
    def _require_order(self) -> GuardConfig:
        if self.backoff_max < self.backoff_min:
            raise ValueError("backoff_max is below backoff_min")
        return self

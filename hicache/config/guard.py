"""The section `storage.guard`: the guard between the cache and a storage backend."""

from __future__ import annotations

import enum
from typing import Annotated, ClassVar, TypeAlias

from pydantic import BeforeValidator, WithJsonSchema

from ..units import GIB, PositiveSize
from .section import Section, yaml_switch


class Override(enum.StrEnum):
    """The operator's setting of one direction."""

    AUTO = "auto"  # the breaker decides
    ON = "on"  # every call passes, even after failures
    OFF = "off"  # calls are rejected


_Switch: TypeAlias = Annotated[Override, BeforeValidator(yaml_switch), WithJsonSchema({"enum": list(Override)})]


class GuardConfig(Section):
    """Limits and breaker of one storage backend. Its constants are not entries; see Section."""

    in_flight: PositiveSize = 4 * GIB
    """Limit of bytes in flight. Further calls wait until their deadline; a larger call runs alone. Less keeps a small
    server responsive."""
    read: _Switch = Override.AUTO
    """`off`: never read from this store, to bypass it. `on`: always. `auto`: the breaker decides."""
    write: _Switch = Override.AUTO
    """The same for writes to this store."""

    # Failed calls in a row that open the breaker of their direction: two may be chance, and each costs a request time.
    failures: ClassVar[int] = 3
    # The share of failures in the last calls that also opens it: such a store costs more time than it saves.
    failure_share: ClassVar[float] = 0.5
    # The back-off before a failed store is probed; each failed probe doubles it. A recovered store is used after about
    # the longest one; one probe in that time hardly loads a store.
    backoff_min: ClassVar[float] = 0.5
    backoff_max: ClassVar[float] = 5.0
    # The time limit of a probe: enough for large pages in a distant bucket. Only a store that is off waits for it.
    probe_timeout: ClassVar[float] = 5.0
    # The time after its deadline at which a call that has not returned counts as failed: threads may run late.
    grace: ClassVar[float] = 0.5
    # Consecutive damaged pages that stop all use of the store: the reader then more likely has a wrong key, and would
    # remove all pages. Each further stop is four times as long, up to an hour.
    damage_pages: ClassVar[int] = 16
    damage_backoff: ClassVar[float] = 30.0
    # The share of calls and pages that may be retried once after an error; more would load an overloaded store.
    retry_share: ClassVar[float] = 0.1

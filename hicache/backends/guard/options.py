"""What a guard is set up with."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import InvalidInput


class Direction(enum.StrEnum):
    """Which way pages go. Lookups read, removals write."""

    READ = "read"
    WRITE = "write"


class Override(enum.StrEnum):
    """What the operator wants of one direction."""

    AUTO = "auto"  # the breaker decides
    ON = "on"  # every call passes, whatever happened to those before it
    OFF = "off"  # no call passes


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOptions:
    """Bounds of a guard; the defaults suit a server in the same data centre and any page size.

    Behaviour: `read` and `write` are overrides; `inject` holds options of `FaultOptions`, for trying faults out.

    Breaker: a direction opens after `failures` failed calls in a row, or once `failure_share` of the latest calls have
    failed; it is probed after a jittered pause of `backoff_min_s` doubling up to `backoff_max_s`, each probe taking at
    most `probe_timeout_s`. A shorter back-off heals sooner and asks a store that is down more often. A call that has
    not returned `grace_s` after its deadline counts as failed while it still hangs. `damage_pages` damaged pages
    without a sound one among them open both directions for `damage_backoff_s` and longer: a smaller number saves more
    pages from a reader with the wrong key, a larger one bears with a worse disk.

    Load: frames of at most `in_flight_bytes_max` bytes are under way at once (a larger batch goes alone); failed pages
    are tried again for at most `retry_share` of all calls and pages, 0 for never.

    Raises InvalidInput for values that cannot work.
    """

    in_flight_bytes_max: int = 4 << 30
    failures: int = 3
    failure_share: float = 0.5
    backoff_min_s: float = 0.5
    backoff_max_s: float = 5.0
    probe_timeout_s: float = 2.0
    grace_s: float = 0.5
    damage_pages: int = 16
    damage_backoff_s: float = 30.0
    retry_share: float = 0.1
    read: str = Override.AUTO
    write: str = Override.AUTO
    inject: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        for name in ("in_flight_bytes_max", "failures", "damage_pages"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidInput(f"guard: {name} must be a whole number above 0, got {value!r}")
        for name in ("backoff_min_s", "backoff_max_s", "probe_timeout_s", "grace_s", "damage_backoff_s"):
            _require_number(name, getattr(self, name), above=0.0, most=86400.0)
        _require_number("failure_share", self.failure_share, above=0.0, most=1.0)
        if self.retry_share != 0:
            _require_number("retry_share", self.retry_share, above=0.0, most=1.0)
        if self.backoff_max_s < self.backoff_min_s:
            raise InvalidInput("guard: backoff_max_s is below backoff_min_s")
        for name in ("read", "write"):
            if getattr(self, name) not in tuple(Override):
                raise InvalidInput(f"guard: {name} must be auto, on or off, got {getattr(self, name)!r}")


def _require_number(name: str, value: object, *, above: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= most:
        raise InvalidInput(f"guard: {name} must be a number above {above} and at most {most}, got {value!r}")

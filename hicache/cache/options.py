"""What a cache decides by."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ..errors import InvalidInput
from ..radix import SLRU_PROTECTED_HITS
from .payoff import PayoffOptions


class WritePolicy(enum.Enum):
    """When a run of pages gets its copy on L2; see `hicache.cache.backup`."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class PrefetchPolicy(enum.Enum):
    """How long a request waits for what storage has; see `hicache.cache.prefetch`."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Thresholds in tokens, times in seconds, shares of L2 as fractions; the reasons are in docs/configuration.md."""

    eviction_policy: str = "lru"
    slru_protected_hits: int = SLRU_PROTECTED_HITS
    write_policy: str = "write_through"
    selective_hits: int = 2
    load_back_threshold_tokens: int = 10
    prefetch_policy: str = "timeout"
    prefetch_threshold_tokens: int = 256
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_1024_tokens_s: float = 0.25
    prefetch_host_share: float = 0.5
    pin_host_share: float = 0.5
    shutdown_deadline_s: float = 5.0
    payoff: PayoffOptions = field(default_factory=PayoffOptions)

    def __post_init__(self) -> None:
        for name, kind in (("write_policy", WritePolicy), ("prefetch_policy", PrefetchPolicy)):
            known = [policy.value for policy in kind]
            if getattr(self, name) not in known:
                raise InvalidInput(f"cache: {name} is one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name, least in (("prefetch_threshold_tokens", 1), ("selective_hits", 1), ("load_back_threshold_tokens", 0)):
            if getattr(self, name) < least:
                raise InvalidInput(f"cache: {name} must be at least {least}, got {getattr(self, name)}")
        for name in ("prefetch_host_share", "pin_host_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidInput(f"cache: {name} is a share, from 0 to 1, got {getattr(self, name)}")

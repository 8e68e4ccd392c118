"""The tree cache an engine embeds: `HiRadixCache`, and `create_cache` that builds one from a configuration."""

from .backup import WritePolicy
from .books import Eviction
from .factory import create_cache
from .options import CacheOptions
from .payoff import Decision, Figures, Payoff, PayoffOptions, PayoffStatistics, Route
from .pins import Pin
from .prefetch import PrefetchPolicy
from .radix_cache import HiRadixCache
from .requests import RequestKV
from .statistics import CacheStatistics, TierStatistics

__all__ = [
    "CacheOptions",
    "CacheStatistics",
    "Decision",
    "Eviction",
    "Figures",
    "HiRadixCache",
    "Payoff",
    "PayoffOptions",
    "PayoffStatistics",
    "Pin",
    "PrefetchPolicy",
    "RequestKV",
    "Route",
    "TierStatistics",
    "WritePolicy",
    "create_cache",
]

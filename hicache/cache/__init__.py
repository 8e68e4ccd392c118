"""The tree cache an engine embeds: `HiRadixCache`, and `create_cache` that builds one from a configuration."""

from .backup import WritePolicy
from .books import Eviction
from .factory import create_cache
from .options import CacheOptions
from .pins import Pin
from .prefetch import PrefetchPolicy
from .radix_cache import HiRadixCache
from .requests import RequestKV
from .statistics import CacheStatistics, TierStatistics

__all__ = [
    "CacheOptions",
    "CacheStatistics",
    "Eviction",
    "HiRadixCache",
    "Pin",
    "PrefetchPolicy",
    "RequestKV",
    "TierStatistics",
    "WritePolicy",
    "create_cache",
]

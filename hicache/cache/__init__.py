"""The tree cache an engine embeds: `HiRadixCache`, and `create_cache` that builds one from a configuration."""

from .factory import create_cache
from .options import CacheOptions
from .radix_cache import HiRadixCache, RequestKV
from .statistics import CacheStatistics, TierStatistics

__all__ = ["CacheOptions", "CacheStatistics", "HiRadixCache", "RequestKV", "TierStatistics", "create_cache"]

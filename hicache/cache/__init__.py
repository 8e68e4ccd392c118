"""What an engine embeds: the interface `TreeCache`, its three implementations, and `create_cache` that builds one; or,
if the engine keeps its own device cache, `HostCache` and `create_host_cache`.
"""

from .chunk_cache import ChunkCache
from .device_tier import Eviction
from .factory import create_cache, create_host_cache, open_storage
from .host_cache import HostCache, HostLoad, HostMatch, HostWrite
from .interface import TreeCache
from .pins import Pin
from .radix_cache import HiRadixCache
from .requests import RequestKV
from .schedule import Candidate, Order, longest_prefix_first
from .session_cache import SessionCache
from .statistics import CacheStatistics, SessionStatistics, TierStatistics

__all__ = [
    "CacheStatistics",
    "Candidate",
    "ChunkCache",
    "Eviction",
    "HiRadixCache",
    "HostCache",
    "HostLoad",
    "HostMatch",
    "HostWrite",
    "Order",
    "Pin",
    "RequestKV",
    "SessionCache",
    "SessionStatistics",
    "TierStatistics",
    "TreeCache",
    "create_cache",
    "create_host_cache",
    "longest_prefix_first",
    "open_storage",
]

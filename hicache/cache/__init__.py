"""The caches that an engine embeds: the interface `TreeCache`, its three implementations, and `create_cache`, which
builds one; for an engine with its own device cache, `HostCache` and `create_host_cache`.

Names are imported at their first use: most of them need PyTorch, statistics do not.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .chunk_cache import ChunkCache
    from .device_tier import Eviction
    from .engine_cache import EngineCache
    from .factory import create_cache, create_host_cache, open_storage
    from .host_cache import HostCache, HostLoad, HostMatch, HostWrite
    from .interface import TreeCache
    from .pins import Pin
    from .radix_cache import HiRadixCache
    from .requests import RequestKV
    from .session_cache import SessionCache
    from .statistics import CacheStatistics, SessionStatistics, TierStatistics

__all__ = [
    "CacheStatistics",
    "ChunkCache",
    "EngineCache",
    "Eviction",
    "HiRadixCache",
    "HostCache",
    "HostLoad",
    "HostMatch",
    "HostWrite",
    "Pin",
    "RequestKV",
    "SessionCache",
    "SessionStatistics",
    "TierStatistics",
    "TreeCache",
    "create_cache",
    "create_host_cache",
    "open_storage",
]

if not TYPE_CHECKING:  # type checkers have the names from above, and would accept any name with this
    __getattr__ = lazy_names(
        __name__,
        {
            "chunk_cache": "ChunkCache",
            "device_tier": "Eviction",
            "engine_cache": "EngineCache",
            "factory": "create_cache create_host_cache open_storage",
            "host_cache": "HostCache HostLoad HostMatch HostWrite",
            "interface": "TreeCache",
            "pins": "Pin",
            "radix_cache": "HiRadixCache",
            "requests": "RequestKV",
            "session_cache": "SessionCache",
            "statistics": "CacheStatistics SessionStatistics TierStatistics",
        },
    )

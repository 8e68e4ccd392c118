"""The caches that an engine embeds: the interface `TreeCache`, its three implementations, and `create_cache`, which
builds one; for an engine with its own device cache, `HostCache` and `create_host_cache`.

Names are imported at their first use: most of them need PyTorch, statistics do not.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

_MODULES = {
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
}
__all__ = [*" ".join(_MODULES.values()).split()]  # noqa: PLE0604

if TYPE_CHECKING:
    from .chunk_cache import ChunkCache as ChunkCache
    from .device_tier import Eviction as Eviction
    from .engine_cache import EngineCache as EngineCache
    from .factory import create_cache as create_cache
    from .factory import create_host_cache as create_host_cache
    from .factory import open_storage as open_storage
    from .host_cache import HostCache as HostCache
    from .host_cache import HostLoad as HostLoad
    from .host_cache import HostMatch as HostMatch
    from .host_cache import HostWrite as HostWrite
    from .interface import TreeCache as TreeCache
    from .pins import Pin as Pin
    from .radix_cache import HiRadixCache as HiRadixCache
    from .requests import RequestKV as RequestKV
    from .session_cache import SessionCache as SessionCache
    from .statistics import CacheStatistics as CacheStatistics
    from .statistics import SessionStatistics as SessionStatistics
    from .statistics import TierStatistics as TierStatistics
else:  # type checkers have the names from above, and would accept any name with this
    __getattr__ = lazy_names(__name__, _MODULES)

"""Configuration: one schema for all uses, read from a YAML file, `HICACHE_*` variables and flags.

`schema` defines the entries, `loading` merges the sources and reports all errors at once, `secret` reads keys.
"""

from .loading import ENVIRON_PREFIX, FILE_VARIABLE, entry_of_variable, load_config, read_tree
from .mooncake_storage import MooncakeStorageOptions
from .publishing import EventsConfig
from .schema import (
    BreakEvenConfig,
    DeviceConfig,
    HiCacheConfig,
    HostConfig,
    PrefetchConfig,
    RanksConfig,
    TransferConfig,
)
from .secret import read_key_file, read_keys
from .section import Section
from .storage import FileStorageOptions

__all__ = [
    "ENVIRON_PREFIX", "FILE_VARIABLE", "BreakEvenConfig", "DeviceConfig", "EventsConfig", "FileStorageOptions",
    "HiCacheConfig", "HostConfig", "MooncakeStorageOptions", "PrefetchConfig", "RanksConfig", "Section",
    "TransferConfig", "entry_of_variable", "load_config", "read_key_file", "read_keys", "read_tree",
]

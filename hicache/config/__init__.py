"""Configuration: one schema for every use, read from a YAML file, `HICACHE_*` variables and flags.

`schema` says what there is, `loading` brings the sources together and reports everything that is wrong with them at
once, `secret` reads keys.
"""

from .integrity import IntegrityConfig, StorageFormatConfig
from .loading import ENVIRON_PREFIX, entry_of_variable, load_config, read_tree
from .mooncake_storage import MooncakeStorage, MooncakeStorageOptions
from .publishing import EventsConfig, MetricsConfig
from .redis_storage import RedisStorageOptions
from .s3_storage import S3StorageOptions
from .schema import (
    BreakEvenConfig,
    DeviceConfig,
    HiCacheConfig,
    HostConfig,
    PrefetchConfig,
    RanksConfig,
    ScheduleConfig,
    SessionsConfig,
    TransferConfig,
)
from .secret import read_key, read_key_file
from .section import Section
from .storage import FileStorage, FileStorageOptions, PluginStorage, StorageConfig

__all__ = [
    "ENVIRON_PREFIX",
    "BreakEvenConfig",
    "DeviceConfig",
    "EventsConfig",
    "FileStorage",
    "FileStorageOptions",
    "HiCacheConfig",
    "HostConfig",
    "IntegrityConfig",
    "MetricsConfig",
    "MooncakeStorage",
    "MooncakeStorageOptions",
    "PluginStorage",
    "PrefetchConfig",
    "RanksConfig",
    "RedisStorageOptions",
    "S3StorageOptions",
    "ScheduleConfig",
    "Section",
    "SessionsConfig",
    "StorageConfig",
    "StorageFormatConfig",
    "TransferConfig",
    "entry_of_variable",
    "load_config",
    "read_key",
    "read_key_file",
    "read_tree",
]

"""The Redis backend: pages as strings on Redis or Valkey servers, alone, behind sentinels, or in a cluster."""

from .backend import RedisBackend
from .opening import open_redis_backend
from .options import Address, RedisOptions

__all__ = ["Address", "RedisBackend", "RedisOptions", "open_redis_backend"]

"""The Redis backend: pages as strings on Redis or Valkey servers, alone, behind sentinels, or in a cluster."""

from .backend import RedisBackend

__all__ = ["RedisBackend"]

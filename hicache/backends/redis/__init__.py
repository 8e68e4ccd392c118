"""The Redis backend: pages as strings on a single Redis or Valkey server, behind sentinels, or in a cluster."""

from .backend import RedisBackend

__all__ = ["RedisBackend"]

"""The Redis store: pages as strings on a single Redis or Valkey server, behind sentinels, or in a cluster."""

from ...errors import MissingPackage, install_hint

try:
    import redis as _redis  # noqa: F401  the modules of this package import it
except ModuleNotFoundError as error:
    raise MissingPackage(f"the redis backend needs redis-py; {install_hint('redis')}") from error

from .driver import RedisDriver

__all__ = ["RedisDriver"]

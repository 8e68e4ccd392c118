"""Real storage servers on loopback ports, for trials and tests; not for production.

Each is a context manager: it starts the server, waits until it answers requests, and removes everything at the end.
`storage()` returns the section `storage` of a configuration that uses it. The programs come from the extra
`dev-servers`.
"""

from __future__ import annotations

from pathlib import Path

from hicache.errors import ConfigError

from .base import DevServer, DevService, Storage
from .mooncake import MooncakeClientDaemon, MooncakeMaster, MooncakeStore
from .redis import RedisServer, ValkeyServer
from .redis_groups import RedisCluster, RedisSentinel
from .seaweed import SeaweedServer

__all__ = [
    "KINDS",
    "DevServer",
    "DevService",
    "MooncakeClientDaemon",
    "MooncakeMaster",
    "MooncakeStore",
    "RedisCluster",
    "RedisSentinel",
    "RedisServer",
    "SeaweedServer",
    "Storage",
    "ValkeyServer",
    "make_service",
]

# The services that the command line can start.
KINDS = ("redis", "valkey", "s3", "mooncake")


def make_service(kind: str, *, port: int | None = None, data: Path | None = None) -> DevService:
    """Return a service of one of the `KINDS`, not started, on `port` and with permanent files in `data`, if any.

    Raises ConfigError for an unknown kind, and for `data` if the service does not use a disk.
    """
    if kind == "mooncake" and data is not None:
        raise ConfigError("mooncake: it keeps pages only in memory; leave out --data")
    match kind:
        case "redis":
            return RedisServer(port=port, data=data)
        case "valkey":
            return ValkeyServer(port=port, data=data)
        case "s3":
            return SeaweedServer(port=port, data=data)
        case "mooncake":
            return MooncakeStore(port=port)
    raise ConfigError(f"{kind!r} is not a server; use one of {', '.join(KINDS)}")

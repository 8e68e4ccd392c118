"""Real storage servers on loopback ports, for trying HiCache out and for its tests; never for production.

Each is a context manager: started inside, answering real requests, and gone without leftovers after. `storage()` gives
what a configuration's section `storage` needs to use it. The programs come from the extra `dev-servers`.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
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

# The services that have a name on the command line.
KINDS = ("redis", "valkey", "s3", "mooncake")


def make_service(kind: str, *, port: int | None = None, data: Path | None = None) -> DevService:
    """A service of one of the `KINDS`, not started yet, on a fixed `port` and with files that stay in `data` if given.

    Raises ConfigError for another kind, and for `data` where nothing is kept on disk.
    """
    if kind == "mooncake" and data is not None:
        raise ConfigError("mooncake: keeps pages in memory alone; leave the data directory out")
    match kind:
        case "redis":
            return RedisServer(port=port, data=data)
        case "valkey":
            return ValkeyServer(port=port, data=data)
        case "s3":
            return SeaweedServer(port=port, data=data)
        case "mooncake":
            return MooncakeStore(port=port)
    raise ConfigError(f"there is no server {kind!r}; there are {', '.join(KINDS)}")

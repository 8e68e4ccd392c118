"""The services that have a name on the command line."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from .base import DevService
from .mooncake import MooncakeStore
from .redis import RedisServer, ValkeyServer
from .seaweed import SeaweedServer

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

"""Real storage servers on loopback ports, for trying HiCache out and for its tests; never for production.

Each is a context manager: started inside, answering real requests, and gone without leftovers after. `storage()` gives
what a configuration's section `storage` needs to use it. The programs come from the extra `dev-servers`.
"""

from .base import DevServer, DevService, Storage
from .kinds import KINDS, make_service
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

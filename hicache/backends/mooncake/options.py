"""Where a Mooncake store is, and how this process takes part in it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ...config import addresses
from ...errors import InvalidInput

MIB = 1 << 20
TIMEOUT_S_MAX = 60.0
# Keys are lines of the master's list, and parts of URLs.
_PREFIX = re.compile(r"[A-Za-z0-9._:/-]{0,128}")


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """The addresses are `host:port`.

    Behaviour: `master`, which knows where each page is; `daemon`, a `mooncake_client` on this machine that holds
    segments and moves pages for this process, None to do both in this process; `segment_bytes` of this process's
    memory that it gives to the store (0 for none; not with a daemon); `prefix` of all keys; `admin`, the master's HTTP
    address, which counts and lists pages, None for port 9003 (Mooncake's default) of the master.

    Transport: `host`, under which other nodes reach this process; `metadata`, the server through which nodes find each
    other ("P2PHANDSHAKE" needs none); `protocol` ("tcp", "rdma"); `devices`, names of RDMA devices with commas between
    them, "" for all.

    Performance: `staging_bytes` through which frames go that are not registered; `timeout_s` without progress after
    which the library gives a request up, rounded up to whole seconds for transfers. The library reads its time limits
    once in a process, so the first backend in it sets them.

    Raises InvalidInput for values that cannot work.
    """

    master: str = "127.0.0.1:50051"
    daemon: str | None = None
    segment_bytes: int = 1024 * MIB
    prefix: str = "hicache/"
    admin: str | None = None
    host: str = "127.0.0.1"
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    staging_bytes: int = 64 * MIB
    timeout_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("master", "daemon", "admin"):
            value = getattr(self, name)
            if value is not None:
                split_address(name, value)
        for name in ("host", "metadata", "protocol"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidInput(f"mooncake store: {name} must be a name, got {value!r}")
        try:
            addresses.check_host(self.host)
        except ValueError as error:
            raise InvalidInput(f"mooncake store: host {self.host[:80]!r}: {error}") from error
        devices: object = self.devices
        if not isinstance(devices, str):
            raise InvalidInput(f"mooncake store: devices must be names with commas between them, got {devices!r}")
        prefix: object = self.prefix
        if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
            raise InvalidInput(
                f"mooncake store: prefix must be up to 128 letters, digits and . _ : / -; got {prefix!r}"
            )
        for name, lowest in (("segment_bytes", 0), ("staging_bytes", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < lowest:
                raise InvalidInput(f"mooncake store: {name} must be a whole number, at least {lowest}; got {value!r}")
        timeout_s: object = self.timeout_s
        if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool) or not 0 < timeout_s <= TIMEOUT_S_MAX:
            raise InvalidInput(
                f"mooncake store: timeout_s must be above 0, at most {TIMEOUT_S_MAX:g} seconds; got {timeout_s!r}"
            )

    @property
    def admin_address(self) -> tuple[str, int]:
        """Host and port of the master's HTTP server."""
        if self.admin is not None:
            return split_address("admin", self.admin)
        return split_address("master", self.master)[0], 9003

    def environment(self) -> dict[str, str]:
        """What the library wants to find in the environment before it is loaded. What is set there already stays."""
        whole_s = math.ceil(self.timeout_s)
        timeout_ms = str(math.ceil(self.timeout_s * 1000))
        return {
            "MC_RPC_TIMEOUT_MS": timeout_ms,
            "MC_RPC_CONNECT_TIMEOUT_MS": timeout_ms,
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(whole_s),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(whole_s),
            # Longer than the two above: the connection of a slow transfer is closed before the transfer is given up,
            # so nothing is written into a frame after that.
            "MC_SLICE_TIMEOUT": str(whole_s + 1),
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
            "MC_LOG_LEVEL": "ERROR",
        }


def split_address(name: str, value: object) -> tuple[str, int]:
    """Host and port of `value`; errors call it `name`. Raises InvalidInput."""
    try:
        return addresses.split_address(value if isinstance(value, str) else "")
    except ValueError as error:
        raise InvalidInput(f"mooncake store: {name} must be host:port, got {value!r}: {error}") from error

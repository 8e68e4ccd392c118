"""The section `storage` for a Mooncake store."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from ..units import GIB, MIB, Duration, PositiveSize, Size
from .addresses import HTTP_PORTS, check_host, checked, split_address, split_url
from .guard import GuardConfig
from .section import Section

_METADATA_PORTS = {**HTTP_PORTS, "etcd": 2379, "redis": 6379}


def _split_metadata(text: str) -> None:
    """Check a metadata URL. It may contain several servers, separated by `;` or `,`."""
    scheme, mark, rest = text.partition("://")
    for server in re.split("[;,]", rest if mark else text):
        if mark:
            split_url(f"{scheme}://{server}", _METADATA_PORTS)
        else:
            split_address(server, _METADATA_PORTS["etcd"])


Address: TypeAlias = Annotated[str, Field(max_length=300), checked(split_address)]


class MooncakeStorageOptions(Section):
    """Options of the `mooncake` backend: pages in the memory of many nodes."""

    master: Address = "127.0.0.1:50051"
    """Address (`host:port`) of the Mooncake master, which knows the location of each page."""
    daemon: Address | None = None
    """Address of a `mooncake_client` daemon on this machine (docs/backends/mooncake.md). Not set: this process provides
    memory and transfers pages."""
    segment: Size = GIB
    """Memory of this process for pages of all nodes; these pages are lost when it ends. More keeps more pages. 0: none.
    Ignored with `daemon`."""
    prefix: str = Field(default="hicache/", pattern=r"^[A-Za-z0-9._:/-]*$", max_length=128)
    """Prefix of all page keys, which separates them from other keys in the store."""
    admin: Address | None = None
    """Address of the master's HTTP server (its `--metrics_host`, `--metrics_port`), which counts and lists pages. Not
    set: port 9003 of the master's host."""
    host: Annotated[str, AfterValidator(check_host)] = "127.0.0.1"
    """Name or IP address by which other nodes reach this process. The library listens on all interfaces without
    authentication: trusted nodes only."""
    metadata: Annotated[str, checked(_split_metadata)] = Field(default="P2PHANDSHAKE", max_length=256)
    """How nodes find each other's addresses: `P2PHANDSHAKE` without a server, or the URL of Mooncake's metadata
    server."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """How pages are transferred. `rdma` is many times faster and needs RDMA devices."""
    devices: str = Field(default="", max_length=1024)
    """Names of the RDMA devices, separated by commas. Empty: all devices."""
    staging: PositiveSize = 64 * MIB
    """Buffer for pages that are not in registered memory. More allows more pages in flight."""
    timeout: Duration = Field(default=2.0, gt=0, le=60)
    """How long the library waits for a reply or for progress of a transfer (there rounded up to seconds). Longer
    tolerates a busy node. The first Mooncake store of a process sets it."""


class MooncakeStorage(Section):
    """Storage in a Mooncake store."""

    type: Literal["mooncake"]
    """As above."""
    options: MooncakeStorageOptions = MooncakeStorageOptions()
    """Options of the backend; all have defaults."""
    guard: GuardConfig = GuardConfig()

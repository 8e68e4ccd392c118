"""The section `storage` for a Mooncake store."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from ..units import GIB, MIB, Duration, PositiveSize, Size
from .addresses import HTTP_PORTS, check_host, split_address, split_url
from .guard import GuardConfig
from .section import Section

_METADATA_PORTS = {**HTTP_PORTS, "etcd": 2379, "redis": 6379}


def _check_address(text: str) -> str:
    split_address(text)
    return text


def _check_metadata(text: str) -> str:
    """Several servers, where there are several, stand in one URL with `;` or `,` between them."""
    scheme, mark, rest = text.partition("://")
    for server in re.split("[;,]", rest if mark else text):
        if mark:
            split_url(f"{scheme}://{server}", _METADATA_PORTS)
        else:
            split_address(server, _METADATA_PORTS["etcd"])
    return text


Address: TypeAlias = Annotated[str, Field(max_length=300), AfterValidator(_check_address)]


class MooncakeStorageOptions(Section):
    """Options of the `mooncake` backend: pages in the memory of many nodes."""

    master: Address = Field(
        default="127.0.0.1:50051",
        description="Address (`host:port`) of the Mooncake master, which knows where each page is.",
    )
    daemon: Address | None = Field(
        default=None,
        description="Address of a `mooncake_client` daemon on this machine that holds memory and moves pages for this "
        "process. With it pages outlive the engine, and each is copied once more; without it this process does both "
        "itself, and pages go from and into the host tier's memory with no copy.",
    )
    segment: Size = Field(
        default=GIB,
        description="Memory of this process that it gives to the store, for all nodes to keep pages in; they are gone "
        "when it ends. `0` to give none. Not used with `daemon`, which has memory of its own.",
    )
    prefix: str = Field(
        default="hicache/", pattern=r"^[A-Za-z0-9._:/-]*$", max_length=128,
        description="What the keys of all pages begin with, to keep them apart from others' in the same store.",
    )
    admin: Address | None = Field(
        default=None,
        description="Address of the master's HTTP server (its `--metrics_host`, `--metrics_port`), which counts and "
        "lists pages. Unset: port 9003 of the master's host.",
    )
    host: Annotated[str, AfterValidator(check_host)] = Field(
        default="127.0.0.1",
        description="Name or IP address under which other nodes reach this process. The library listens on all "
        "interfaces without authentication: let trusted nodes alone reach it.",
    )
    metadata: Annotated[str, AfterValidator(_check_metadata)] = Field(
        default="P2PHANDSHAKE", max_length=256,
        description="Where nodes find each other's addresses. `P2PHANDSHAKE` needs no server; otherwise the URL of "
        "Mooncake's metadata server.",
    )
    protocol: Literal["tcp", "rdma"] = Field(
        default="tcp", description="How pages are moved. `rdma` is many times faster and needs RDMA devices.",
    )
    devices: str = Field(
        default="", max_length=1024,
        description="RDMA devices to use, names with commas between them. Empty: all that are found.",
    )
    staging: PositiveSize = Field(
        default=64 * MIB,
        description="Memory through which pages go that are not in registered memory. More lets more pages be on their "
        "way at once.",
    )
    timeout: Duration = Field(
        default=2.0, gt=0, le=60,
        description="How long the library waits for an answer or for progress of a transfer. Shorter notices a node "
        "that hangs sooner, longer forgives a busy one. Rounded up to seconds for transfers; the first Mooncake store "
        "that a process opens sets it for all.",
    )


class MooncakeStorage(Section):
    """Storage in a Mooncake store."""

    type: Literal["mooncake"] = Field(description="As above.")
    options: MooncakeStorageOptions = Field(
        default=MooncakeStorageOptions(), description="Options of the backend; all have defaults."
    )
    guard: GuardConfig = GuardConfig()

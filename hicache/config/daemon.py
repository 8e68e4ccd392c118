"""The section `daemon`: where `hicache serve` listens, whom it lets in, and how much it takes on."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from ..units import GIB, MIB, Count, PositiveDuration, PositiveSize, Size
from .addresses import Address, is_loopback, split_address
from .section import VARIABLE_PATTERN, FileSystemPath, Section

# The name of a Unix socket, with its closing zero, has 108 bytes on Linux.
_SOCKET_PATH_BYTES_MAX = 107


def _check_listen(text: str) -> str:
    split_address(text, lowest=0)
    return text


class TlsConfig(Section):
    """TLS of the TCP address."""

    certificate: FileSystemPath | None = Field(
        default=None, description="PEM file with the certificate of the daemon and those between it and its authority."
    )
    key: FileSystemPath | None = Field(
        default=None, description="PEM file with its private key, mode 0600. Both are read again on SIGHUP."
    )
    client_ca: FileSystemPath | None = Field(
        default=None,
        description="PEM file with the authorities of clients. With it a client needs a certificate (mutual TLS), "
        "which takes the place of the token where none is configured.",
    )

    @model_validator(mode="after")
    def _check(self) -> TlsConfig:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key: give both or neither")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca: needs certificate and key")
        return self


class DaemonConfig(Section):
    """The storage daemon, `hicache serve`: its addresses, who may use it, and its bounds."""

    alternatives = (("token_file", "token_env"), ("admin_token_file", "admin_token_env"))

    socket: FileSystemPath | None = Field(
        default=None,
        description="Unix socket for engines on this host, in a directory of mode 0700 that HiCache creates. Only "
        "processes of this user are let in. Not set: `$XDG_RUNTIME_DIR/hicache/daemon.sock`, for root "
        "`/run/hicache/daemon.sock`.",
    )
    listen: Annotated[str, Field(max_length=300), AfterValidator(_check_listen)] | None = Field(
        default=None,
        description="TCP address, `host:port`, for engines on other hosts, Prometheus and browsers; port 0 takes a "
        "free one. Beyond loopback it needs a token or `tls`. Not set: none.",
    )
    token_file: FileSystemPath | None = Field(
        default=None,
        description="File whose first line is the token that clients send over TCP (`Authorization: Bearer`), mode "
        "0600. Read again on SIGHUP. The Unix socket needs none.",
    )
    token_env: str | None = Field(
        default=None, pattern=VARIABLE_PATTERN, description="Name of the environment variable that holds the token."
    )
    admin_token_file: FileSystemPath | None = Field(
        default=None,
        description="File with the token of admin calls, another one than that of clients. Without it they are taken "
        "from the Unix socket alone, where the kernel says who asks.",
    )
    admin_token_env: str | None = Field(
        default=None, pattern=VARIABLE_PATTERN, description="Name of the variable that holds the admin token."
    )
    tls: TlsConfig = TlsConfig()
    pool: Size = Field(
        default=GIB,
        description="Bytes of host memory for hot pages of all namespaces, in front of `storage`; taken at start. More "
        "serves more pages without asking the store; engines have memory of their own. 0: none.",
    )
    staging: PositiveSize = Field(
        default=256 * MIB,
        description="Bytes of host memory for pages on their way over a socket; taken at start. More serves more "
        "clients on other hosts at once; a call that finds no room waits. One call takes at most a quarter of it.",
    )
    memory_max: PositiveSize = Field(
        default=1024 * GIB,
        description="Bytes of engines' shared memory that may be mapped at once. It costs the daemon page tables only.",
    )
    memories_max: Count = Field(
        default=64, ge=1, le=4096, description="Shared memories of engines that may be mapped at once."
    )
    namespaces_max: Count = Field(
        default=64, ge=1, le=4096,
        description="Namespaces open at once, each with connections and threads of its own. Beyond that the one unused "
        "for longest is closed; if all are in use, an engine is refused.",
    )
    connections_max: Count = Field(
        default=512, ge=1, le=65536,
        description="Connections at once, of the Unix socket and of the TCP address each. More are hung up on.",
    )
    requests_max: Count = Field(
        default=512, ge=1, le=65536,
        description="Requests in progress at once. More are refused with 503 and a time after which to come again.",
    )
    namespace_requests_max: Count = Field(
        default=128, ge=1, le=65536, description="Requests of one namespace in progress or waiting for a thread."
    )
    threads: Count = Field(
        default=16, ge=1, le=256,
        description="Threads that call the stores of one namespace. A store that hangs takes those of its namespace "
        "alone. More serves more engines at once from a slow store.",
    )
    request_timeout: PositiveDuration = Field(
        default=60.0, description="The longest deadline that a client gets, whatever it asks for."
    )
    head_timeout: PositiveDuration = Field(
        default=10.0, description="Time for the head of a request, from its first byte, or from the connection."
    )
    body_timeout: PositiveDuration = Field(
        default=10.0,
        description="Time for the body of a request, and for a client to take an answer; each 64 MiB add as much.",
    )
    idle_timeout: PositiveDuration = Field(
        default=600.0, description="Time that a connection may stay without a request."
    )
    drain_timeout: PositiveDuration = Field(
        default=10.0, description="Time that requests in progress get after SIGTERM before the daemon ends."
    )

    @property
    def address(self) -> Address | None:
        """The TCP address, None for none."""
        return None if self.listen is None else split_address(self.listen, lowest=0)

    @property
    def has_token(self) -> bool:
        """True if clients over TCP need a token."""
        return self.token_file is not None or self.token_env is not None

    @property
    def has_admin_token(self) -> bool:
        """True if admin calls need a token."""
        return self.admin_token_file is not None or self.admin_token_env is not None

    @model_validator(mode="after")
    def _check(self) -> DaemonConfig:
        if self.socket is not None and len(os.fsencode(self.socket)) > _SOCKET_PATH_BYTES_MAX:
            raise ValueError(f"socket: the path has more than {_SOCKET_PATH_BYTES_MAX} bytes; choose a shorter one")
        address = self.address
        if address is not None and not is_loopback(address.host) and not self.has_token and not self.tls.certificate:
            raise ValueError("listen: beyond loopback the daemon needs token_file, token_env or tls.certificate")
        return self

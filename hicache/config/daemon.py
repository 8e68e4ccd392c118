"""The section `daemon`: addresses, access and limits of `hicache serve`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..units import GIB, MIB, Count, PositiveDuration, PositiveSize, SizeOrShare
from .addresses import SOCKET_PATH_BYTES_MAX, Address, HostNames, checked, is_loopback, split_address
from .section import VARIABLE_PATTERN, FileSystemPath, Section


class TlsConfig(Section):
    """TLS of the TCP address."""

    certificate: FileSystemPath | None = None
    """PEM file with the daemon's certificate and the intermediate ones."""
    key: FileSystemPath | None = None
    """PEM file with the private key, mode 0600."""
    client_ca: FileSystemPath | None = None
    """PEM file with the authorities of clients. Clients then need a certificate (mutual TLS), and a token is
    optional."""

    @model_validator(mode="after")
    def _check(self) -> TlsConfig:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key: set both or neither")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("client_ca: needs certificate and key")
        return self


class DaemonConfig(Section):
    """The storage daemon, `hicache serve`: its addresses, access and limits."""

    alternatives = (("token_file", "token_env"), ("admin_token_file", "admin_token_env"))

    socket: FileSystemPath | None = None
    """Unix socket for engines on this host, in a directory of mode 0700 that HiCache creates. Only this user and root
    have access. Not set: `$XDG_RUNTIME_DIR/hicache/daemon.sock`, for root `/run/hicache/daemon.sock`."""
    listen: Annotated[str, Field(max_length=300), checked(split_address, lowest=0)] | None = None
    """TCP address, `host:port`, for engines on other hosts, Prometheus and browsers; port 0 is a free port. Beyond
    loopback it needs a token or `tls`. Not set: no TCP."""
    hosts: HostNames = Field(default=[])
    """Further names of the TCP address, such as those of a DNS entry or a proxy, for browsers and scrapers without a
    token. Requests to other names get 421 (docs/daemon.md)."""
    token_file: FileSystemPath | None = None
    """File whose first line is the token of TCP clients (`Authorization: Bearer`), mode 0600."""
    token_env: str | None = Field(default=None, pattern=VARIABLE_PATTERN)
    """Name of the variable with the token."""
    admin_token_file: FileSystemPath | None = None
    """File with the token of admin calls, different from the clients'. Without it, admin calls are accepted only over
    the Unix socket."""
    admin_token_env: str | None = Field(default=None, pattern=VARIABLE_PATTERN)
    """Name of the variable with the admin token."""
    tls: TlsConfig = TlsConfig()
    pool: SizeOrShare = GIB
    """Host memory for hot pages of all namespaces, in front of `storage`; allocated at start. More serves more hits
    without the store. `10%`: a share of the memory that is available then. 0: none."""
    eviction_policy: Literal["lru", "adaptive"] = "lru"
    """Pages that a full pool evicts first. `lru`: least recently used. `adaptive`: as `lru`, but keeps what S3-FIFO or
    ARC would keep, if one of them has more hits; takes at most 20 MB, and some microseconds per page."""
    staging: PositiveSize = 256 * MIB
    """Host memory for pages sent over a socket; allocated at start. Calls without room wait. One call uses at most a
    quarter of it. More is for many engines without shared memory."""
    namespaces_max: Count = Field(default=64, ge=1, le=4096)
    """Limit of open namespaces, each with its own connections and threads. Beyond it, the least recently used one
    without calls in flight is closed, first one that no engine uses. More is for nodes with many models or ranks."""
    connections_max: Count = Field(default=512, ge=1, le=65536)
    """Limit of connections, each for the Unix socket and for TCP, and of requests in progress, of which a namespace may
    have a quarter. Further ones get 503 with `Retry-After`. More is for many engines, and needs as many open files."""
    threads: Count = Field(default=16, ge=1, le=256)
    """Threads that call the stores of one namespace; idle ones end. More serves more engines at once from a slow
    store."""
    client_timeout: PositiveDuration = 10.0
    """Time for a client to send the head of a request and each 64 MiB of its body, and to read a part of the answer; an
    idle connection has 60 times as long. Longer is for slow networks; shorter frees the connections and staging memory
    of dead clients sooner."""
    drain_timeout: PositiveDuration = 10.0
    """Time for requests in progress after SIGTERM. What ends the process must wait longer."""

    @property
    def address(self) -> Address | None:
        """The TCP address, or None."""
        return None if self.listen is None else split_address(self.listen, lowest=0)

    @property
    def names(self) -> Iterator[str]:
        """The configured names of the TCP address, for `is_own_host`. Parses the address when it is iterated."""
        yield from self.hosts
        if self.address is not None:
            yield self.address.host

    @property
    def has_token(self) -> bool:
        """True if clients over TCP need a token."""
        return self.token_file is not None or self.token_env is not None

    @model_validator(mode="after")
    def _check(self) -> DaemonConfig:
        if self.socket is not None and len(os.fsencode(self.socket)) > SOCKET_PATH_BYTES_MAX:
            raise ValueError(f"socket: the path has more than {SOCKET_PATH_BYTES_MAX} bytes; choose a shorter one")
        address = self.address
        if address is not None and not is_loopback(address.host) and not self.has_token and not self.tls.certificate:
            raise ValueError("listen: beyond loopback the daemon needs token_file, token_env or tls.certificate")
        return self

"""The section `storage` with `type: remote`: a storage daemon."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ..units import Count, PositiveDuration
from .addresses import HTTP_PORTS, is_loopback, split_url
from .guard import GuardConfig
from .section import VARIABLE_PATTERN, FileSystemPath, Section, ServerOptions


class RemoteStorageOptions(ServerOptions):
    """Options of the `remote` backend: a daemon, started with `hicache serve`, that stores the pages. On this host the
    engine uses its Unix socket, and the daemon reads and writes shared host memory (`host.shared`) itself."""

    alternatives = (("socket", "url"), ("token_file", "token_env"))

    socket: FileSystemPath | None = None
    """Unix socket of a daemon on this host, of the same user. Not set, and no `url`: the default socket of this user's
    daemon."""
    url: str | None = None
    """Daemon on another host, `https://host:port`. Plain `http` beyond loopback lets others on the network read the
    pages; it is rejected with a token."""
    token_file: FileSystemPath | None = None
    """File whose first line is the daemon's token, mode 0600. Not for the Unix socket."""
    token_env: str | None = Field(default=None, pattern=VARIABLE_PATTERN)
    """Name of the variable with the token."""
    ca_file: FileSystemPath | None = None
    """Certificates (PEM) that replace the system's. Certificates are always checked."""
    certificate: FileSystemPath | None = None
    """PEM file with this client's certificate, for a daemon that requests one."""
    key: FileSystemPath | None = None
    """PEM file with its private key, mode 0600."""
    connections: Count = Field(default=4, ge=1, le=64)
    """Connections for the page bodies of one call, each with a thread. More hides network latency. Shared memory needs
    only one."""
    timeout: PositiveDuration = Field(default=10.0, ge=0.01, le=3600)
    """Time without a byte after which a TCP request fails, beyond the daemon's own deadline. Shorter detects a lost
    network sooner."""

    @model_validator(mode="after")
    def _check(self) -> RemoteStorageOptions:
        try:
            url = None if self.url is None else split_url(self.url, HTTP_PORTS)
        except ValueError as error:
            raise ValueError(f"url: {error}") from error
        if url is not None and url.path not in ("", "/"):
            raise ValueError("url: has a path; use only the host and the port")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key: set both or neither")
        if (self.ca_file or self.certificate) and (url is None or url.scheme != "https"):
            raise ValueError("ca_file and certificate: need a url that begins with https://")
        has_token = self.token_file is not None or self.token_env is not None
        if has_token and url is not None and url.scheme == "http" and not is_loopback(url.host):
            raise ValueError("url: http would send the token in clear text over a network; use https")
        return self


class RemoteStorage(Section):
    """Storage in a daemon."""

    type: Literal["remote"]
    """As above."""
    options: RemoteStorageOptions = RemoteStorageOptions()
    """Options of the backend."""
    guard: GuardConfig = GuardConfig()

"""The section `storage` with `type: remote`: pages by way of a storage daemon."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ..units import Count, PositiveDuration
from .addresses import HTTP_PORTS, is_loopback, split_url
from .guard import GuardConfig
from .section import VARIABLE_PATTERN, FileSystemPath, Section


class RemoteStorageOptions(Section):
    """Options of the `remote` backend: a daemon, started with `hicache serve`, that keeps the pages. On this host it is
    reached by its Unix socket, and reads and writes shared host memory (`host.shared`) itself."""

    alternatives = (("socket", "url"), ("token_file", "token_env"))

    socket: FileSystemPath | None = Field(
        default=None,
        description="Unix socket of a daemon on this host, of the same user. Not set, and no `url`: the one where a "
        "daemon of this user listens by default.",
    )
    url: str | None = Field(
        default=None,
        description="Daemon on another host, `https://host:port`. Plain `http` beyond loopback sends pages and the "
        "token that everyone on the way can read: prompts can be computed from pages.",
    )
    token_file: FileSystemPath | None = Field(
        default=None, description="File whose first line is the daemon's token, mode 0600. The Unix socket needs none.",
    )
    token_env: str | None = Field(
        default=None, pattern=VARIABLE_PATTERN, description="Name of the environment variable that holds the token.",
    )
    ca_file: FileSystemPath | None = Field(
        default=None,
        description="Certificates (PEM) that are trusted in place of the system's. Certificates are always checked.",
    )
    certificate: FileSystemPath | None = Field(
        default=None, description="PEM file with this client's certificate, for a daemon that asks for one.",
    )
    key: FileSystemPath | None = Field(default=None, description="PEM file with its private key, mode 0600.")
    connections: Count = Field(
        default=4, ge=1, le=64,
        description="Connections over which the page bodies of one call move at the same time, each with a thread. "
        "More hides the latency of a network. Pages in shared memory need one.",
    )
    timeout: PositiveDuration = Field(
        default=10.0, ge=0.01, le=3600,
        description="Seconds that a request over TCP may go on without a byte, in addition to the time that the daemon "
        "is given for it. Shorter notices a lost network sooner.",
    )
    connect_timeout: PositiveDuration = Field(
        default=2.0, ge=0.01, le=3600, description="Seconds that making a connection may take.",
    )

    @model_validator(mode="after")
    def _check(self) -> RemoteStorageOptions:
        try:
            url = None if self.url is None else split_url(self.url, HTTP_PORTS)
        except ValueError as error:
            raise ValueError(f"url: {error}") from error
        if url is not None and url.path not in ("", "/"):
            raise ValueError("url: has a path; name the host and the port alone")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key: give both or neither")
        if (self.ca_file or self.certificate) and (url is None or url.scheme != "https"):
            raise ValueError("ca_file and certificate: go with a url that begins with https://")
        has_token = self.token_file is not None or self.token_env is not None
        if has_token and url is not None and url.scheme == "http" and not is_loopback(url.host):
            raise ValueError("url: http would send the token in clear text over a network; use https")
        return self


class RemoteStorage(Section):
    """Storage in a daemon."""

    type: Literal["remote"] = Field(description="As above.")
    options: RemoteStorageOptions = Field(default=RemoteStorageOptions(), description="Options of the backend.")
    guard: GuardConfig = GuardConfig()

"""The section `storage` of type `redis`: Redis or Valkey servers."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from ..units import Count, PositiveDuration, TierSize
from .addresses import check_host, split_address, split_url
from .guard import GuardConfig
from .section import VARIABLE_PATTERN, FileSystemPath, Section, ServerOptions

_PLACES = ("url", "unix_socket", "cluster", "sentinels")
PORT = 6379
URL_PORTS = {"redis": PORT, "rediss": PORT}
SENTINEL_PORT = 26379
DB_MAX = 65535
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_Servers = Annotated[list[str], Field(min_length=1, max_length=64)]


class RedisStorageOptions(ServerOptions):
    """Options of the `redis` backend: one string per page on Redis (6.2 or later) or Valkey servers. Set exactly one of
    `url`, `unix_socket`, `cluster` and `sentinels`."""

    url: str | None = None
    """A single server, `redis://host:6379/0`, or `rediss://` for TLS, without credentials."""
    unix_socket: FileSystemPath | None = None
    """Unix socket of a server on this machine; about a third faster than TCP."""
    cluster: _Servers | None = None
    """Some nodes of a cluster, each `host:port`; they report the others."""
    sentinels: _Servers | None = None
    """The sentinels that know the primary, each `host:port`. Needs `service`."""
    service: str | None = Field(default=None, min_length=1, max_length=256)
    """The sentinels' name of the primary."""
    replicas: list[str] = Field(default=[], max_length=64)
    """Replicas of the server in `url`, each `host:port`, for `read_from: replica`. Sentinels and clusters report their
    own."""
    allowed_nodes: _Servers | None = None
    """Nodes that sentinels and cluster nodes may report, compared as reported: networks (`10.0.0.0/8`), IP addresses,
    host names and domains (`.cache.example`). Not set: any node, which gets the password and the pages."""
    db: Count = Field(default=0, ge=0, le=DB_MAX)
    """Number of the database, if not in `url`; a cluster only has 0."""
    username: str | None = Field(default=None, min_length=1, max_length=256)
    """User of the server's ACL; not set: `default`."""
    password_env: str | None = Field(default=None, pattern=VARIABLE_PATTERN)
    """Name of the variable with the password."""
    password_file: FileSystemPath | None = None
    """File whose first line is the password, mode 0600."""
    credential_provider: str | None = Field(default=None, max_length=256, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """Instead of `username` and a password: `package.module:name`, a function or class that makes a
    `redis.CredentialProvider` (docs/backends/redis.md)."""
    sentinel_username: str | None = Field(default=None, min_length=1, max_length=256)
    """As `username`, for the sentinels."""
    sentinel_password_env: str | None = Field(default=None, pattern=VARIABLE_PATTERN)
    """As `password_env`, for the sentinels."""
    sentinel_password_file: FileSystemPath | None = None
    """As `password_file`, for the sentinels."""
    tls: bool = False
    """Use TLS with all servers. Much slower, because openssl copies every byte."""
    tls_ca_file: FileSystemPath | None = None
    """Certificates (PEM) of the trusted authorities; not set: those of the system."""
    tls_cert_file: FileSystemPath | None = None
    """This client's certificate (PEM), if servers request one."""
    tls_key_file: FileSystemPath | None = None
    """The key of `tls_cert_file` (PEM), unless it is in the same file."""
    tls_check_hostname: bool = True
    """Require the host name in certificates. Off, for nodes that report addresses that are not in their certificates:
    any server with a certificate of that authority is trusted."""
    key_prefix: str = Field(default="hicache:", max_length=128, pattern=r"^[A-Za-z0-9_.:/-]*$")
    """Prefix of every key. Two prefixes on one server are two stores."""
    capacity: TierSize | None = None
    """Limit of the bytes of pages under `key_prefix`, without the server's own memory, for a server without maxmemory
    (docs/storage.md). Not set: the server's limit."""
    ttl: PositiveDuration | None = Field(default=None, ge=0.001)
    """Lifetime of a page after its last use. Every read is then also a write (GETEX), which goes to replicas and
    append-only files. Not set: until the server evicts it."""
    max_age: PositiveDuration | None = Field(default=None, ge=60)
    """Pages are removed this long after they were stored, also if they are used; the server does that
    (docs/storage.md). Not set: age does not matter."""
    read_from: Literal["primary", "replica"] = "primary"
    """The servers for lookups and reads. Replicas take load off the primary, but lag, and reads refresh neither `ttl`
    nor the primary's recency."""
    connections: Count = Field(default=2, ge=1, le=64)
    """Connections to each server for one batch. A server uses one core, so two keep it busy; more helps over long
    distances."""
    timeout: PositiveDuration = Field(default=1.0, ge=0.001)
    """Time without a byte after which a server has failed. Longer tolerates pauses, such as a fork for a snapshot."""

    @model_validator(mode="after")
    def _one_place(self) -> RedisStorageOptions:
        given = [name for name in _PLACES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"set exactly one of {', '.join(_PLACES)}, not {' and '.join(given) or 'none'}")
        self._check_addresses()
        if (self.sentinels is None) != (self.service is None):
            raise ValueError("sentinels and service: set both or neither")
        if self.allowed_nodes is not None and self.sentinels is None and self.cluster is None:
            raise ValueError("allowed_nodes: needs sentinels or cluster, whose servers report others")
        if self.ttl is not None and self.max_age is not None:
            raise ValueError("ttl and max_age: the server has one expiry per page; use max_age alone")
        if self.tls and self.unix_socket is not None:
            raise ValueError("tls: is not supported with unix_socket; remove it")
        if (self.read_from == "replica" and self.sentinels is None and self.cluster is None) != bool(self.replicas):
            raise ValueError("replicas and read_from: replica need each other, and a single server")
        is_tls = self.tls or (self.url is not None and self.url.startswith("rediss:"))
        if not is_tls and (self.tls_ca_file or self.tls_cert_file or self.tls_key_file):
            raise ValueError("the TLS files need tls: true, or a url that begins with rediss://")
        if self.credential_provider and (self.username or self.password_env or self.password_file):
            raise ValueError("credential_provider: is used instead of username and password; remove one of them")
        if self.cluster is not None and self.db:
            raise ValueError("db: a cluster only has database 0; remove the entry")
        return self

    def _check_addresses(self) -> None:
        # Checked with the whole section, whose errors do not quote values: an address may contain a password.
        if self.url is not None:
            _check_url(self.url)
        for name, port in (("cluster", PORT), ("sentinels", SENTINEL_PORT), ("replicas", PORT)):
            for address in getattr(self, name) or ():
                try:
                    split_address(address, port)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
        for node in self.allowed_nodes or ():
            allowed_node(node)


def allowed_node(text: str) -> Network | str:
    """Return an entry of `allowed_nodes` in the form for comparisons: a network, or a name in lower case, which begins
    with a dot if it is a domain. Raises ValueError for other text; the message does not quote it.
    """
    if isinstance(text, str):  # the library accepts numbers and bytes as addresses
        with contextlib.suppress(ValueError):
            return ipaddress.ip_network(text)
        with contextlib.suppress(ValueError):
            if ":" not in text:
                check_host(text.removeprefix("."))
                return text.lower().removesuffix(".")
    raise ValueError(
        "an entry is not valid in allowed_nodes; write a network like 10.0.0.0/8, an IP address, a host name, or a "
        "domain like .cache.example"
    )


def _check_url(url: str) -> None:
    try:
        path = split_url(url, URL_PORTS).path.removeprefix("/")
    except ValueError as error:
        what = f"url must look like redis://host:6379/0, or rediss:// for TLS, without credentials; {error}"
        raise ValueError(f"{what}; for credentials, use username with password_env or password_file") from error
    if path and (not path.isdigit() or len(path) > 5 or int(path) > DB_MAX):
        raise ValueError("url must look like redis://host:6379/0: the path is not the number of a database")


class RedisStorage(Section):
    """Storage in Redis or Valkey."""

    type: Literal["redis"]
    """As for `file`."""
    options: RedisStorageOptions
    """Options of the backend; they depend on `type`."""
    guard: GuardConfig = GuardConfig()

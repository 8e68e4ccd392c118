"""Where a Redis store is, how it is entered, and how it is used."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Literal, TypeAlias

from ...errors import InvalidInput

Mode: TypeAlias = Literal["single", "sentinel", "cluster"]
ReadFrom: TypeAlias = Literal["primary", "replica"]

CONNECTIONS_MAX = 64
PORT = 6379
SENTINEL_PORT = 26379
_PORT_MAX = 65535
_DB_MAX = 65535
_URL = re.compile(r"(rediss?)://([^/@?#\s]+)(?:/([0-9]{0,5}))?")
# SCAN patterns and cluster hash tags give other characters a meaning.
_PREFIX = re.compile(r"[A-Za-z0-9_.:/-]{0,128}")


@dataclass(frozen=True, slots=True)
class Address:
    """A server: host and port, or the path of a Unix socket in `host` and port 0."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


@dataclass(frozen=True, slots=True)
class Login:
    """Who we are to a server. `repr` shows no secret."""

    username: str | None = None
    password: str | None = None

    def __repr__(self) -> str:
        return f"Login(username={self.username!r}, password={'set' if self.password else None})"


@dataclass(frozen=True, slots=True)
class Tls:
    """How a server proves itself, and we to it. Paths of PEM files; None takes the system's authorities."""

    ca_file: str | PathLike[str] | None = None
    cert_file: str | PathLike[str] | None = None
    key_file: str | PathLike[str] | None = None
    check_hostname: bool = True


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """A Redis or Valkey store.

    Place: `addresses` of the server, of some nodes of the cluster, or of the sentinels, which know the primary as
    `service`; `replicas` of a single server; database `db`; `tls` None for none.
    Behaviour: `key_prefix` keeps stores on one server apart; pages expire `ttl_s` after their last use, None for never;
    `read_from` "replica" sends reads and lookups to replicas, which may lag behind.
    Performance: `connections` carry the pages of one batch, each with up to `pipeline_bytes` (two pages at least) asked
    for and not yet arrived; a server or network that moves no byte for `timeout_s` has failed.

    Raises InvalidInput for values that cannot work.
    """

    addresses: Sequence[Address]
    mode: Mode = "single"
    service: str | None = None
    replicas: Sequence[Address] = ()
    db: int = 0
    tls: Tls | None = None
    login: Login = Login()
    sentinel_login: Login = Login()
    key_prefix: str = "hicache:"
    ttl_s: float | None = None
    read_from: ReadFrom = "primary"
    connections: int = 2
    pipeline_bytes: int = 512 << 10
    timeout_s: float = 1.0

    def __post_init__(self) -> None:
        if self.read_from not in ("primary", "replica"):
            raise InvalidInput(f"redis: read_from must be primary or replica, got {self.read_from!r}")
        if not self.addresses:
            raise InvalidInput("redis: there is no address in the list")
        if (self.mode == "sentinel") != (self.service is not None):
            raise InvalidInput("redis: `sentinels` know the primary by the name in `service`; give both or none")
        if (self.mode == "single" and self.read_from == "replica") != bool(self.replicas):
            raise InvalidInput("redis: `replicas` go with read_from: replica of a single server, and it needs them")
        if self.mode == "cluster" and self.db:
            raise InvalidInput("redis: a cluster has database 0 alone")
        if not _PREFIX.fullmatch(self.key_prefix):
            raise InvalidInput("redis: key_prefix may hold up to 128 letters, digits and _ . : / -")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name, lowest, highest in (
            ("db", 0, _DB_MAX), ("connections", 1, CONNECTIONS_MAX), ("pipeline_bytes", 1, 1 << 30),
        ):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or not lowest <= value <= highest:
                raise InvalidInput(f"redis: {name} must be a whole number, {lowest} .. {highest}; got {value!r}")
        # A server keeps time in milliseconds.
        for name, least in (("timeout_s", 0.001), ("ttl_s", 0.001)):
            value = getattr(self, name)
            if value is None and name == "ttl_s":
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < 1e9:
                raise InvalidInput(f"redis: {name} must be a number of seconds from {least}; got {value!r}")

    @property
    def where(self) -> str:
        """The place, for messages."""
        return ",".join(str(address) for address in self.addresses)


@dataclass(frozen=True, slots=True)
class Place:
    """What a URL says."""

    address: Address
    db: int
    is_tls: bool


def parse_url(url: str) -> Place:
    """`redis://host:port/db`, or `rediss://` for TLS; port and database may be left out.

    Raises InvalidInput for anything else, and for a URL with a password in it: configurations are read by many.
    """
    if "@" in url:
        raise InvalidInput("redis: the url must hold no credentials; use username with password_env or password_file")
    match = _URL.fullmatch(url)
    if match is None:
        raise InvalidInput("redis: the url must look like redis://host:6379/0, or rediss:// for TLS")
    (address,) = parse_addresses([match[2]])
    return Place(address, int(match[3] or 0), match[1] == "rediss")


def parse_addresses(texts: Sequence[str], default_port: int = PORT) -> tuple[Address, ...]:
    """Each `host`, `host:port` or `[::1]:port`. Raises InvalidInput for anything else."""
    addresses = []
    for text in texts:
        if "@" in text:
            raise InvalidInput("redis: addresses must hold no credentials; use username with password_env")
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?", text)
        port = int(match[3] or default_port) if match else 0
        if match is None or not 1 <= port <= _PORT_MAX:
            raise InvalidInput(f"redis: {text[:80]!r} is no address; write it like host:{default_port}")
        addresses.append(Address(match[1] or match[2], port))
    return tuple(addresses)

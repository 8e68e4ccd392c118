"""Where a Redis store is, how it is entered, and how it is used."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Literal, TypeAlias

from ...config.addresses import check_host, check_port, split_address, split_url
from ...config.redis_storage import Network, allowed_node
from ...errors import InvalidInput

Mode: TypeAlias = Literal["single", "sentinel", "cluster"]
ReadFrom: TypeAlias = Literal["primary", "replica"]

CONNECTIONS_MAX = 64
PORT = 6379
SENTINEL_PORT = 26379
_DB_MAX = 65535
_DB_PATH = re.compile(r"(?:/[0-9]{0,5})?")
_URL_PORTS = {"redis": PORT, "rediss": PORT}
# SCAN patterns and cluster hash tags give other characters a meaning.
_PREFIX = re.compile(r"[A-Za-z0-9_.:/-]{0,128}")
# Surrogates other than those that stand for bytes that are not UTF-8.
_NOT_SENDABLE = re.compile("[\ud800-\udc7f\udd00-\udfff]")


@dataclass(frozen=True, slots=True)
class Address:
    """A server on the network. Raises InvalidInput for a host or port that is not valid."""

    host: str
    port: int

    def __post_init__(self) -> None:
        try:
            check_host(self.host)
            if check_port(self.port) != self.port:
                raise ValueError("the port is not a number")
        except ValueError as error:
            raise InvalidInput(f"redis: {self.host[:80]!r} with port {self.port!r}: {error}") from error

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def named_address(host: bytes, port: object) -> Address | None:
    """The address that a server has named by a host and a port, a number or its digits; None if it is not valid."""
    try:
        # An IPv6 zone names an interface of this machine, which no server knows.
        name = check_host(host.decode("ascii"))
        digits = port.decode("ascii") if isinstance(port, bytes) else port
        return None if "%" in name else Address(name, check_port(digits))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A server on this machine, by the path of its socket. Only a configuration makes one: a server that names nodes
    names an `Address`. Raises InvalidInput for a path that the system cannot take."""

    path: str

    def __post_init__(self) -> None:
        if _NOT_SENDABLE.search(self.path):
            raise InvalidInput(f"redis: {self.path[:80]!a} is not valid as the path of a Unix socket; correct it")

    def __str__(self) -> str:
        return self.path


Endpoint: TypeAlias = Address | UnixSocket


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
    `allowed_nodes` bounds the addresses that servers name (sentinels, nodes of a cluster); None allows all of them.
    Behaviour: `key_prefix` keeps stores on one server apart; pages expire `ttl_s` after their last use, None for never;
    `read_from` "replica" sends reads and lookups to replicas, which may lag behind.
    Performance: `connections` carry the pages of one batch, each with up to `pipeline_bytes` (two pages at least) asked
    for and not yet arrived; a server or network that moves no byte for `timeout_s` has failed.

    Raises InvalidInput for values that cannot work.
    """

    addresses: Sequence[Endpoint]
    mode: Mode = "single"
    service: str | None = None
    replicas: Sequence[Address] = ()
    allowed_nodes: Sequence[Network | str] | None = None
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
        if any(isinstance(address, UnixSocket) for address in self.addresses) and (self.mode != "single" or self.tls):
            raise InvalidInput("redis: a Unix socket leads to a single server and has no TLS")
        if self.allowed_nodes is not None and self.mode == "single":
            raise InvalidInput("redis: allowed_nodes go with sentinels or a cluster; no other server names nodes")
        if (self.mode == "sentinel") != (self.service is not None):
            raise InvalidInput("redis: `sentinels` know the primary by the name in `service`; give both or none")
        if (self.mode == "single" and self.read_from == "replica") != bool(self.replicas):
            raise InvalidInput("redis: `replicas` go with read_from: replica of a single server, and it needs them")
        if self.mode == "cluster" and self.db:
            raise InvalidInput("redis: a cluster has database 0 alone")
        if not _PREFIX.fullmatch(self.key_prefix):
            raise InvalidInput("redis: key_prefix may hold up to 128 letters, digits and _ . : / -")
        self._check_texts()
        self._check_numbers()

    def _check_texts(self) -> None:
        sent = {
            "service": self.service, "username": self.login.username, "the password": self.login.password,
            "sentinel_username": self.sentinel_login.username, "the sentinel password": self.sentinel_login.password,
        }  # fmt: skip
        for name, text in sent.items():
            if text is not None and _NOT_SENDABLE.search(text):
                raise InvalidInput(f"redis: {name} has a character that UTF-8 cannot encode; write another text")

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

    def shown(self, endpoint: Endpoint) -> str:
        """The endpoint, for messages. A host name that a server has chosen is left out: it may repeat a secret."""
        is_ours = endpoint in self.addresses or endpoint in self.replicas
        if is_ours or isinstance(endpoint, UnixSocket) or _ip(endpoint.host):
            return str(endpoint)
        return f"{self.where} (a node that it names, port {endpoint.port})"

    def allows(self, address: Address) -> bool:
        """True if a server may name this address: `allowed_nodes` hold it or are not given, or it is a configured node
        of the cluster."""
        # The addresses of sentinels are not data nodes: a sentinel that names itself would get the data password.
        if self.allowed_nodes is None or (self.mode == "cluster" and address in self.addresses):
            return True
        number = _ip(address.host)
        if number is not None:
            return any(number in entry for entry in self.allowed_nodes if not isinstance(entry, str))
        host = address.host.lower().removesuffix(".")
        names = [entry for entry in self.allowed_nodes if isinstance(entry, str)]
        return any(host == name or (name.startswith(".") and host.endswith(name)) for name in names)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


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
    try:
        scheme, host, port, path = split_url(url, _URL_PORTS)
    except ValueError as error:
        raise InvalidInput(f"redis: the url: {error}") from error
    if not _DB_PATH.fullmatch(path):
        raise InvalidInput("redis: the url must look like redis://host:6379/0, or rediss:// for TLS")
    return Place(Address(host, port), int(path[1:] or 0), scheme == "rediss")


def parse_addresses(texts: Sequence[str], default_port: int = PORT) -> tuple[Address, ...]:
    """Each `host`, `host:port` or `[::1]:port`. Raises InvalidInput for anything else."""
    addresses = []
    for text in texts:
        try:
            addresses.append(Address(*split_address(text, default_port)))
        except ValueError as error:
            shown = "an address" if "@" in text else repr(text[:80])
            raise InvalidInput(f"redis: {shown}: {error}") from error
    return tuple(addresses)


def parse_allowed(texts: Sequence[str]) -> tuple[Network | str, ...]:
    """Each a network (`10.0.0.0/8`), an IP address, a host name, or a domain (`.cache.example`).

    Raises InvalidInput for anything else.
    """
    allowed = []
    for text in texts:
        try:
            allowed.append(allowed_node(text))
        except ValueError as error:
            raise InvalidInput(f"redis: {repr(text)[:80]}: {error}") from error
    return tuple(allowed)

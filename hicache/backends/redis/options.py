"""Addresses and credentials of a Redis store: its configuration section, with the secrets read."""

from __future__ import annotations

import importlib
import ipaddress
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from redis.credentials import CredentialProvider

from ...config.addresses import Address, check_host, check_port, split_address, split_url
from ...config.redis_storage import PORT, SENTINEL_PORT, URL_PORTS, Network, RedisStorageOptions, allowed_node
from ...config.secret import read_secret
from ...errors import ConfigError
from ..errors import ErrorKind, StoreError
from ..rotated import Rotated, client_tls

Mode: TypeAlias = Literal["single", "sentinel", "cluster"]
# A server, or the path of the socket of one on this machine. Only the configuration can name a path: nodes that a
# server names are an `Address`.
Endpoint: TypeAlias = Address | Path


def named_address(host: bytes, port: object) -> Address | None:
    """Return the address for a host and a port (a number or its digits) that a server names; None if not valid."""
    try:
        # An IPv6 zone names an interface of this machine, which a server cannot know.
        name = check_host(host.decode("ascii"))
        digits = port.decode("ascii") if isinstance(port, bytes) else port
        return None if "%" in name else Address(name, check_port(digits))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """The access data that `open_access` derives from `options`. `repr` shows no secret.

    `addresses` are those of the server, of some cluster nodes, or of the sentinels; `replicas` are those of a single
    server. `allowed_nodes` limits the addresses that servers may name; None allows all. `tls` is None for plain
    connections. The logins are None without a password. `tls` and logins follow their files.
    """

    options: RedisStorageOptions
    mode: Mode
    addresses: tuple[Endpoint, ...]
    replicas: tuple[Address, ...]
    allowed_nodes: tuple[Network | str, ...] | None
    db: int
    tls: Rotated[ssl.SSLContext] | None
    login: Rotated[CredentialProvider | None] = field(repr=False)
    sentinel_login: Rotated[CredentialProvider | None] = field(repr=False)

    @property
    def where(self) -> str:
        """All addresses, for messages."""
        return ",".join(str(address) for address in self.addresses)

    def shown(self, endpoint: Endpoint) -> str:
        """Return the endpoint as text for messages, without a name that a server has given: it may be a secret."""
        is_ours = endpoint in self.addresses or endpoint in self.replicas
        if is_ours or isinstance(endpoint, Path) or _ip(endpoint.host):
            return str(endpoint)
        return f"{self.where} (a node that it names, port {endpoint.port})"

    def allows(self, address: Address) -> bool:
        """True if a server may name this address: `allowed_nodes` is None or contains it, or it is a configured node of
        the cluster."""
        # Sentinel addresses are not allowed as data nodes: a sentinel that names itself would get the data password.
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


def open_access(options: RedisStorageOptions) -> RedisAccess:
    """Read the secrets that `options` name. Raises ConfigError for a file or secret that cannot be read."""
    mode: Mode = "single"
    addresses: tuple[Endpoint, ...]
    db, is_tls = options.db, options.tls
    if options.url is not None:
        scheme, host, port, path = split_url(options.url, URL_PORTS)
        addresses = (Address(host, port),)
        db, is_tls = db or int(path[1:] or 0), is_tls or scheme == "rediss"
    elif options.unix_socket is not None:
        addresses = (options.unix_socket,)
    elif options.cluster is not None:
        mode, addresses = "cluster", tuple(split_address(text, PORT) for text in options.cluster)
    else:
        mode, addresses = "sentinel", tuple(split_address(text, SENTINEL_PORT) for text in options.sentinels or ())
    tls_files: dict[str, Path | None] = {
        name: getattr(options, name) for name in ("tls_ca_file", "tls_cert_file", "tls_key_file")
    }
    tls = client_tls("backend redis", tls_files, check_hostname=options.tls_check_hostname) if is_tls else None
    return RedisAccess(
        options,
        mode,
        addresses,
        tuple(split_address(text, PORT) for text in options.replicas),
        None if options.allowed_nodes is None else tuple(allowed_node(text) for text in options.allowed_nodes),
        db,
        tls,
        _named(options.credential_provider)
        if options.credential_provider is not None
        else _login("password", options.username, options.password_env, options.password_file),
        _login(
            "sentinel_password", options.sentinel_username, options.sentinel_password_env,
            options.sentinel_password_file,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Password(CredentialProvider):
    """A password, or a user name and a password, as bytes: they need not be UTF-8."""

    words: tuple[bytes, ...] = field(repr=False)

    def get_credentials(self) -> Any:
        return self.words


@dataclass(frozen=True, slots=True)
class _Provider(CredentialProvider):
    """The provider of `credential_provider`. Its failures become a StoreError without their text."""

    inner: CredentialProvider = field(repr=False)

    def get_credentials(self) -> Any:
        try:
            words: tuple[Any, ...] = self.inner.get_credentials()
            return tuple(word if isinstance(word, bytes) else word.encode() for word in words)
        except Exception as error:
            failed = type(error).__name__
        raise StoreError(ErrorKind.WRONG_CREDENTIALS, f"credential_provider raised {failed}")


def _login(
    what: str, username: str | None, variable: str | None, path: Path | None
) -> Rotated[CredentialProvider | None]:
    def load() -> CredentialProvider | None:
        password = read_secret(f"redis {what}", variable, path, os.environ)
        if username is not None and password is None:
            raise ConfigError(f"backend redis: a user name needs a password; set {what}_env or {what}_file")
        # Restores bytes that are not UTF-8 as they were read.
        words = tuple(word.encode(errors="surrogateescape") for word in (username, password) if word is not None)
        return _Password(words) if words else None

    return Rotated(f"redis {what}", [path], load)


def _named(place: str) -> Rotated[CredentialProvider | None]:
    """Return the provider that `module:factory` makes. redis-py asks it at each new connection."""
    module, _, attribute = place.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # a factory may raise anything, and its text may quote a secret
        raise ConfigError(
            f"backend redis: credential_provider {place!r} cannot be made ({type(error).__name__}); name a function or "
            "class without arguments as package.module:name"
        ) from None
    if not isinstance(made, CredentialProvider):
        raise ConfigError(
            f"backend redis: credential_provider {place!r} is a {type(made).__name__}, not a redis.CredentialProvider"
        )
    provider = _Provider(made)
    return Rotated("redis credential_provider", [], lambda: provider)

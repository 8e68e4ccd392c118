"""Parses hosts, ports, addresses and URLs, for configurations and at run time.

A library that gets an invalid port may use it modulo 65536, and so listen on or connect to a different port. This
module does not resolve names. Messages do not quote values: a URL may contain a password by mistake.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import AfterValidator, Field

PORT_MAX = 65535
# The ports of schemes, for `split_url`.
HTTP_PORTS = {"https": 443, "http": 80}
PROXY_PORTS = {"http": 80}
# RFC 1035, with the underscores that container networks use.
_NAME_MAX = 253
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9_.-]{1,15})?")
_ADDRESS = re.compile(r"(?:\[([^\[\]]*)\]|([^\[\]:]*))(?::([^:\[\]]*))?")
_URL = re.compile(r"([a-z0-9]+)://([^/?#]*)((?:/[!-~]*)?)")
_TCP = "tcp://"
_IPC = "ipc://"
# The name of a Unix socket, with its closing zero, has 108 bytes on Linux.
SOCKET_PATH_BYTES_MAX = 107


class Address(NamedTuple):
    """A host, without the brackets around an IPv6 address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Url(NamedTuple):
    """The parts of a URL. `path` is empty or begins with a slash."""

    scheme: str
    host: str
    port: int
    path: str


def check_host(host: str) -> str:
    """Return `host`, a name or an IP address (IPv6 without brackets). Raises ValueError if it is not valid."""
    if ":" in host:
        is_valid = _IPV6.fullmatch(host) is not None and _is_ip(host)
    else:
        labels = host.removesuffix(".").split(".")
        is_valid = len(host) <= _NAME_MAX and all(map(_LABEL.fullmatch, labels))
        if labels[-1].isdigit():  # not a name: resolvers treat `127.1` and `2130706433` as addresses
            is_valid = is_valid and _is_ip(host)
    if not is_valid:
        raise ValueError("the host is not valid; use a name of ASCII letters, digits, '-' and '.', or an IP address")
    return host


# The entries `hosts` of servers; see `is_own_host`.
HostNames: TypeAlias = Annotated[list[Annotated[str, AfterValidator(check_host)]], Field(max_length=64)]


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_port(port: object, *, lowest: int = 1) -> int:
    """Return `port`, a number or its digits, as a number. Port 0, if `lowest` allows it, requests a free port. Raises
    ValueError if it is not between `lowest` and 65535."""
    number = port
    if isinstance(port, str) and port.isascii() and port.isdigit() and len(port) <= len(str(PORT_MAX)):
        number = int(port)
    if type(number) is not int or not lowest <= number <= PORT_MAX:
        raise ValueError(f"the port is not a number from {lowest} to {PORT_MAX}")
    return number


def checked(check: Callable[..., object], **options: Any) -> AfterValidator:
    """Return the validator of text that `check` splits; the entry stays text."""

    def validate(text: str) -> str:
        check(text, **options)
        return text

    return AfterValidator(validate)


def split_address(text: str, default_port: int | None = None, *, lowest: int = 1) -> Address:
    """Split `host:port` or `[::1]:port`. With a `default_port` the port is optional.

    Raises ValueError if the host or the port is not valid.
    """
    match = _ADDRESS.fullmatch(text)
    if "@" in text:
        raise ValueError("an address must look like host:port, without credentials")
    if match is None or (match[1] is not None and ":" not in match[1]) or (match[3] is None and default_port is None):
        raise ValueError("an address must look like host:port, or [::1]:port")
    port = default_port if match[3] is None else match[3]
    return Address(check_host(match[2] if match[1] is None else match[1]), check_port(port, lowest=lowest))


def split_url(url: str, default_ports: Mapping[str, int]) -> Url:
    """Split `scheme://host`, with an optional `:port` and an optional path; `default_ports` are those of the schemes.

    Raises ValueError if the URL has another scheme, credentials, a query or a fragment, or if a part is not valid.
    """
    match = _URL.fullmatch(url)
    if match is None or match[1] not in default_ports or "@" in url:
        like = " or ".join(f"{scheme}://host:{port}" for scheme, port in default_ports.items())
        raise ValueError(f"a URL must look like {like}, without user, password, query or fragment")
    host, port = split_address(match[2], default_ports[match[1]])
    return Url(match[1], host, port, match[3])


def default_socket(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the default socket of a daemon of this user and its engines; None without a private directory for it."""
    if os.geteuid() == 0:
        return Path("/run/hicache/daemon.sock")
    runtime = (os.environ if environ is None else environ).get("XDG_RUNTIME_DIR")
    return Path(runtime) / "hicache/daemon.sock" if runtime else None


def split_endpoint(endpoint: str, *, listens: bool) -> Address | Path:
    """Split a ZeroMQ endpoint: the address of `tcp://host:port`, or the socket of `ipc:///path`.

    With `listens` the host may be `*`, for all interfaces, and the port `*` or 0, for a free one; both ports become 0.
    Raises ValueError, which does not quote the endpoint, if it is not valid. ZeroMQ would use a port modulo 65536.
    """
    if endpoint.startswith(_IPC):
        path = Path(endpoint.removeprefix(_IPC))
        if not path.is_absolute() or "\0" in str(path) or len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise ValueError(f"ipc:// needs an absolute path of at most {SOCKET_PATH_BYTES_MAX} bytes")
        return path
    if not endpoint.startswith(_TCP):
        raise ValueError("the endpoint is not valid; write tcp://127.0.0.1:5557 or ipc:///run/hicache/kv")
    host, _, port = endpoint.removeprefix(_TCP).rpartition(":")
    if not listens:
        return split_address(f"{host}:{port}")
    if host == "*":
        return Address(host, 0 if port == "*" else check_port(port, lowest=0))
    return split_address(f"{host}:{'0' if port == '*' else port}", lowest=0)


def ranked_endpoint(endpoint: str, rank: int | None) -> str:
    """Return the ZeroMQ endpoint of a data-parallel rank if rank 0 listens at `endpoint`: the rank is added to the
    port, unless that is a free one, and appended to the name of a socket. Raises ValueError if the endpoint is not
    valid, or the port is too large."""
    place = split_endpoint(endpoint, listens=True)
    if not rank or (isinstance(place, Address) and place.port == 0):
        return endpoint
    if isinstance(place, Path):
        ranked = f"{endpoint}_dp{rank}"
        split_endpoint(ranked, listens=True)
        return ranked
    return f"{endpoint.rpartition(':')[0]}:{check_port(place.port + rank)}"


def is_loopback(host: str) -> bool:
    """Return True if `host` is a loopback address or `localhost`. Does not resolve names: others count as remote."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_host(header: str | None, names: Iterable[str]) -> bool:
    """Return True if a request with this header `Host` (None: without one) may be meant for this server: the host is an
    IP address, `localhost`, the name of this machine, or one of `names`. The port is not compared.

    A web page whose name resolves to this server (DNS rebinding) can read the answers, because the browser takes the
    server for the page's own. The browser then sends the name of the page, always; it cannot be an IP address, because
    addresses are not resolved. So each address is safe, also behind a proxy or a port mapping that changes it.
    """
    if not header or header == "localhost":  # the latter from engines, for each of their requests
        return True
    try:
        host = _plain(split_address(header, 0, lowest=0).host)
    except ValueError:
        return False
    return _is_ip(host) or any(host == _plain(name) for name in ("localhost", socket.gethostname(), *names))


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")

"""The causes of failed requests to a daemon, in words: what happened, and what to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import ErrorKind, StoreError
from ..http import Server
from .client import Refused


class Entries(NamedTuple):
    """The names under which a user changes the connection to a daemon."""

    address: str
    url: str
    ca: str
    certificate: str


CONFIGURED = Entries("socket or url", "url", "ca_file", "certificate and key")

_NOT_A_DAEMON = "it is not a HiCache daemon, or one of another version; correct {address}"
_NOT_WORKING = "it, or a proxy before it, does not work; see its log"
_NOT_STARTED = "start the daemon with: hicache serve -c FILE; or correct {address}"
_SILENT = "see its log, and whether a firewall drops packets"
_ANOTHER_USER = "run this process as the user of the daemon"
_BY_KIND: Mapping[str, str] = {
    ErrorKind.CONNECTION_REFUSED: _NOT_STARTED,
    ErrorKind.UNREACHABLE: "check {address} and the network",
    ErrorKind.DNS: "correct the host in {url}",
    ErrorKind.TIMEOUT: _SILENT,
    ErrorKind.DEADLINE: _SILENT,
    ErrorKind.ACCESS_DENIED: _ANOTHER_USER,
    ErrorKind.PROTOCOL: _NOT_A_DAEMON,
    ErrorKind.SERVER_ERROR: _NOT_WORKING,
}
# By OpenSSL's reason; the first match counts.
_OF_TLS: tuple[tuple[str, str], ...] = (
    ("verify failed.*(expired|yet valid)", "renew the certificate of the daemon, or set the clock"),
    ("alert certificate expired", "renew the certificate of this client ({certificate})"),
    ("verify failed", "check {ca}, which must contain the authority of the daemon, and the host in {url}"),
    ("alert certificate required", "the daemon requires a client certificate; set {certificate}"),
    ("alert .*(certificate|unknown ca|decrypt error|handshake failure|access denied)",
     "the daemon does not accept this client's certificate; check {certificate} against its daemon.tls.client_ca"),
    ("wrong version|http request|record layer|packet length",
     "the server does not use TLS at this port; correct {url}, which begins with http:// for a daemon without TLS"),
    ("", "check {ca}, {certificate} and {url}"),
)


def explain(error: StoreError, entries: Entries, server: Server) -> str:
    """Return why a request to `server` failed, in the daemon's own words if it gave any, and what to change."""
    advice = _advice(error, server).format(**entries._asdict())
    return f"{error}; {advice}" if advice else str(error)


def _advice(error: StoreError, server: Server) -> str:
    """Return what to change, with the names of Entries in braces; empty if the error already says it."""
    if isinstance(error, Refused):
        if not error.is_explained:
            return _NOT_WORKING if error.status == 503 else _NOT_A_DAEMON
        return _NOT_A_DAEMON if error.is_unknown else ""
    if error.kind in (ErrorKind.TLS, ErrorKind.CERTIFICATE_EXPIRED):
        return next(advice for reason, advice in _OF_TLS if re.search(reason, error.detail))
    if isinstance(error.__cause__, PermissionError):
        return _ANOTHER_USER
    if isinstance(error.__cause__, FileNotFoundError):
        return _NOT_STARTED  # no such socket
    if error.kind == ErrorKind.CONNECTION_LOST and not server.socket:
        if server.tls is None:
            return "if the daemon uses TLS, {url} must begin with https://; otherwise see its log"
        return "if the daemon requires client certificates, check {certificate}; otherwise see its log"
    return _BY_KIND.get(error.kind, "see its log")

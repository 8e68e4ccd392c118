"""The requests of a `remote` store to a daemon, and their replies; its address and credentials.

`explain` says in words why a request failed, and what to change.

Each request is tried once and ends soon after its deadline. A request without a reply raises StoreError. A request that
the daemon has rejected raises `Refused`: it had no effect, and the daemon does not access its frames.

Locking design: the pool of connections is safe for threads; everything else here is fixed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlencode

from ... import tracing
from ...clock import SYSTEM_CLOCK, Clock
from ...config.addresses import HTTP_PORTS, default_socket, split_url
from ...config.remote_storage import RemoteStorageOptions
from ...config.secret import read_secret
from ...errors import ConfigError
from ...frame import Damage
from ...keys import PAGE_KEY_BYTES
from ..errors import ErrorKind, StoreError
from ..guard.health import SYSTEM_CAUSES
from ..http import Connection, ConnectionPool, Head, Server, read_small, request_head
from ..rotated import Rotated, client_tls

T = TypeVar("T")
# Reads the pages of a reply from a connection; the arguments are their bytes and the deadline.
PageReceiver: TypeAlias = Callable[[Connection, int, float], None]
# The protocol's limits for one request; the daemon may have a lower one.
TIMEOUT_S_MAX = 3600.0
# A daemon replies at the deadline of a request; the reply has this time to arrive.
GRACE_S = 0.25
# Over a Unix socket the kernel reports at once that a daemon has died. For one that hangs, see `frames`.
_NEVER_S = 1e6
_JSON = "application/json"
# Replies are short, except for one word per key.
_ANSWER_BYTES_MAX = 1 << 20
# A daemon's explanations are shorter.
_WORDS_MAX = 400
# Classes under which a daemon's errors are counted here. All others become `server_error`.
_KINDS = frozenset({*ErrorKind, *Damage, *SYSTEM_CAUSES})
# The classes that the guard of a daemon's store counts for rejected calls.
_BY_GUARD = {"guard_open": ErrorKind.UNAVAILABLE, "guard_busy": ErrorKind.BUSY}
_BY_STATUS: Mapping[int, ErrorKind] = {
    400: ErrorKind.BAD_REQUEST,
    401: ErrorKind.WRONG_CREDENTIALS,
    403: ErrorKind.ACCESS_DENIED,
    409: ErrorKind.CONFLICT,
    413: ErrorKind.TOO_LARGE,
    422: ErrorKind.BAD_REQUEST,
    429: ErrorKind.THROTTLED,
    503: ErrorKind.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class Access:
    """`host` and `token` are sent with each request. `lock` is the file that a daemon on this host keeps locked while
    it runs, None for a daemon on another host. `where` is for messages."""

    server: Server
    host: str
    token: Rotated[str | None] = field(repr=False)
    lock: Path | None
    where: str


def open_access(options: RemoteStorageOptions, environ: Mapping[str, str] | None = None) -> Access:
    """Read the secrets of `options`. Raises ConfigError for an unreadable one, and if the address is unknown."""
    environ = os.environ if environ is None else environ
    what = "remote storage: token"
    token = Rotated(
        what, [options.token_file], lambda: read_secret(what, options.token_env, options.token_file, environ)
    )
    if options.url is None:
        path = options.socket or default_socket()
        if path is None:
            raise ConfigError("remote storage: set socket or url; the default needs XDG_RUNTIME_DIR, which is not set")
        server = Server("", 0, None, "", "", options.connect_timeout, _NEVER_S, os.fspath(path))
        return Access(server, "localhost", token, path.parent / "lock", str(path))
    url = split_url(options.url, HTTP_PORTS)
    files = {"ca_file": options.ca_file, "certificate": options.certificate, "key": options.key}
    tls = client_tls("remote storage", files) if url.scheme == "https" else None
    server = Server(url.host, url.port, tls, url.host, "", options.connect_timeout, options.timeout)
    return Access(server, options.url.split("/")[2], token, None, options.url)


class Refused(StoreError):
    """A daemon has rejected a request. `is_unknown`: it does not know the namespace or the memory; register it
    again. `is_explained`: the detail is the daemon's own words, which say what to do."""

    def __init__(self, kind: str, status: int, retry_after_s: float, words: str) -> None:
        super().__init__(kind, words or f"the server answered with status {status}", retry_after_s)
        self.status = status
        self.is_unknown = status == 404
        self.is_explained = bool(words)


class DaemonClient:
    """See the module's docstring."""

    def __init__(self, access: Access, clock: Clock = SYSTEM_CLOCK) -> None:
        self.access = access
        self.clock = clock
        self._pool = ConnectionPool(access.server, clock)

    def call(
        self, method: str, path: str, fields: Mapping[str, object] | None = None, keys: Sequence[bytes] = (), *,
        deadline: float, may_repeat: bool = True,
    ) -> Mapping[str, Any]:
        """Send `fields` and `keys` as JSON, with the remaining time as `timeout_s`, and return the fields of the reply.
        Raises Refused and StoreError."""
        left_s = self._time_left(deadline)
        body = b"" if fields is None else _body(fields, keys, left_s)
        return self._exchange(method, path, _JSON, [memoryview(body)], self._read_fields, left_s, may_repeat=may_repeat)

    def send_pages(
        self, path: str, query: Mapping[str, object], pages: Sequence[memoryview], *, deadline: float
    ) -> Mapping[str, Any]:
        """Send buffers as the body of a request and return the fields of the reply. Raises as `call`."""
        left_s = self._time_left(deadline)
        target = f"{path}?{urlencode({**query, 'timeout_s': left_s})}"
        return self._exchange("POST", target, "application/octet-stream", pages, self._read_fields, left_s)

    def receive_pages(self, path: str, keys: Sequence[bytes], take: PageReceiver, *, deadline: float) -> None:
        """As `call`, for a reply with pages: `take` reads them from the connection. Raises as `call`."""
        left_s = self._time_left(deadline)

        def read(connection: Connection, head: Head, until: float) -> None:
            if head.status != 200 or head.length is None or head.is_chunked:
                self._small(connection, head, until)
                raise StoreError(ErrorKind.PROTOCOL, "the daemon's answer has no length")
            take(connection, head.length, until)
            connection.finish()

        self._exchange("POST", path, _JSON, [memoryview(_body({}, keys, left_s))], read, left_s)

    def close(self) -> None:
        """Close the connections. REQUIRES: no request is in flight."""
        self._pool.close()

    def _time_left(self, deadline: float) -> float:
        """Return the remaining seconds for a request. Raises StoreError after the deadline."""
        left_s = min(deadline - self.clock(), TIMEOUT_S_MAX)
        if left_s <= 0:
            raise StoreError(ErrorKind.DEADLINE)
        return left_s

    def _read_fields(self, connection: Connection, head: Head, until: float) -> Mapping[str, Any]:
        return _fields(self._small(connection, head, until))

    def _small(self, connection: Connection, head: Head, deadline: float) -> bytes:
        """Return the body of a reply. Raises Refused, and StoreError for other failures."""
        body = read_small(connection, head, _ANSWER_BYTES_MAX, deadline)
        if head.status == 200:
            return body
        if head.status >= 500 and head.status != 503:
            raise StoreError(ErrorKind.SERVER_ERROR, f"the server answered with status {head.status}")
        otherwise, words = _BY_STATUS.get(head.status, ErrorKind.SERVER_ERROR), ""
        kind: str = otherwise
        with contextlib.suppress(StoreError):  # from another server: the status is enough
            fields = _fields(body)
            kind, detail, token = _kind(fields.get("error"), otherwise), fields.get("detail"), self.access.token.get()
            if isinstance(detail, str) and isinstance(fields.get("error"), str) and not (token and token in detail):
                words = "".join(one if one.isprintable() else " " for one in detail[:_WORDS_MAX])
        raise Refused(kind, head.status, head.retry_after_s, words)

    def _exchange(
        self, method: str, path: str, content_type: str, body: Sequence[memoryview],
        read: Callable[[Connection, Head, float], T], left_s: float, *, may_repeat: bool = True,
    ) -> T:
        """Send a request with the token, and `read` its reply until `left_s` and a grace are over. Raises as
        ConnectionPool.exchange."""
        until = self.clock() + left_s + GRACE_S
        length = sum(part.nbytes for part in body)
        headers = {"host": self.access.host, "content-type": content_type, "content-length": str(length),
                   **tracing.headers()}

        def send(token: str | None) -> T:
            login = {} if token is None else {"authorization": f"Bearer {token}"}
            head = request_head(method, path, {**headers, **login})
            return self._pool.exchange(
                head, body, lambda connection, reply: read(connection, reply, until), until, may_repeat=may_repeat
            )

        return self.access.token.run(send)


def _body(fields: Mapping[str, object], keys: Sequence[bytes], left_s: float) -> bytes:
    text = json.dumps({**fields, "timeout_s": left_s}, separators=(",", ":"))
    if keys:  # half the time that `json` and a call per key take, which is a tenth of a lookup of 500
        digits, size = b"".join(keys).hex(), 2 * PAGE_KEY_BYTES
        names = '","'.join([digits[start : start + size] for start in range(0, len(digits), size)])
        text = f'{{"keys":["{names}"],{text[1:]}'
    return text.encode("ascii")


def kinds_of(answer: Mapping[str, Any], errors_max: int) -> list[str]:
    """Return the kinds of errors that a reply lists, at most `errors_max`. Raises StoreError."""
    errors = answer.get("errors")
    if not isinstance(errors, list):
        raise StoreError(ErrorKind.PROTOCOL, "the answer lists no errors")
    return [_kind(error, ErrorKind.SERVER_ERROR) for error in errors[:errors_max]]


def number_of(answer: Mapping[str, Any], name: str, most: int | None = None) -> int:
    """Return a count of a reply, at most `most`. Raises StoreError if it is not valid."""
    number = answer.get(name)
    if type(number) is not int or not 0 <= number <= (number if most is None else most):
        raise StoreError(ErrorKind.PROTOCOL, f"the answer has no valid {name}")
    return number


def list_of(answer: Mapping[str, Any], name: str, count: int) -> list[Any]:
    """Return a list of `count` entries of a reply. Raises StoreError if it is not valid."""
    found = answer.get(name)
    if not isinstance(found, list) or len(found) != count:
        raise StoreError(ErrorKind.PROTOCOL, f"the answer does not have {name} for each key")
    return found


def _kind(word: object, otherwise: ErrorKind) -> str:
    if not isinstance(word, str):
        return otherwise
    return word if word in _KINDS else _BY_GUARD.get(word, otherwise)


def _fields(body: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise StoreError(ErrorKind.PROTOCOL, "the answer is not JSON") from error
    if not isinstance(answer, dict):
        raise StoreError(ErrorKind.PROTOCOL, "the answer is not a JSON object")
    return answer


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

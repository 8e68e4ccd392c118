"""The gate of the application: access rights, the limit of requests, and their counts.

    Unix socket    this user's processes, as checked by the connection
    loopback       probes, the page, status, history, metrics and the OpenAPI document; data with a token or a client
                   certificate
    other hosts    probes, and the files of the page, which prompts for the token; all other paths with a token or a
                   client certificate

Engines' memory is available only over the Unix socket: otherwise a token would give another host access to the frames
of every engine.

Everything that needs neither a token nor a client certificate also needs a `Host` of this daemon, because a web page in
a browser on this host can send requests too (`is_own_host`). A browser that forwards a port to the Unix socket
(`ssh -L`) has this user's access, so that socket is no exception.

Calls below /v1/admin pass: their router has its own access rights.

Locking design: runs on the event loop's thread.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import tracing
from ..admin.access import bearer_token, is_token
from ..backends.errors import ErrorKind
from ..config.addresses import is_own_host
from ..logs import request_id
from .connection import Listener
from .node import Node
from .protocol import Refused
from .statistics import NodeState

_PROBES = frozenset({"livez", "readyz"})
_PAGES = frozenset({"statusz", "history", "metrics", "openapi.json", "page"})
_PAGE_FILES = frozenset({"", "page.css", "page.js"})
_VERBS = frozenset({"exists", "has", "get", "set", "read", "write", "delete", "clear", "touch", "usage"})
# The operations that name the memory of an engine on this host.
_OF_MEMORY = frozenset({"attach", "detach", "get", "set"})
_ADMIN = ("/v1/admin/", "/v1/hints", "/v1/explain")
_NO_TOKEN = "token: is missing or wrong; send `Authorization: Bearer TOKEN` (token_file or token_env of an engine)"
_NO_ACCESS = "token: this daemon has none, so pages need its Unix socket; use that, or set daemon.token_file"
_FOREIGN_HOST = (
    "host: the header Host does not name this daemon; use its IP address or localhost, or add the name to daemon.hosts"
)
# A client's name of its request: short, with characters safe in logs and headers. Longer runs of digits may be keys.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,48}")
# Calls with a span; probes, pages and admin calls would only be noise in a trace.
_TRACED = _VERBS | {"open", "close", "attach", "detach"}
# All that `operation_of` returns.
OPERATIONS = _PROBES | _PAGES | _TRACED | {"admin", "other"}


def operation_of(method: str, path: str) -> str:
    """Return the name of a request in counters: one of a few names, for any request."""
    parts = path.strip("/").split("/")
    if parts[0] != "v1":
        first = "page" if path.removeprefix("/") in _PAGE_FILES else parts[0]
        return first if first in _PROBES | _PAGES else "other"
    what = parts[1] if len(parts) > 1 else ""
    if what == "namespaces":
        if len(parts) == 3:
            return "close" if method == "DELETE" else "open"
        return parts[3] if len(parts) == 4 and parts[3] in _VERBS else "other"
    if what == "memory":
        return "detach" if method == "DELETE" else "attach"
    return "admin" if what in {"admin", "hints", "explain"} else "other"


class Gate:
    """See the module's docstring. `token` returns the current token of clients; None: they have none."""

    def __init__(self, app: ASGIApp, node: Node, token: Callable[[], str | None]) -> None:
        self._app = app
        self._node = node
        self._token = token
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        calls, operation = self._node.calls, operation_of(scope["method"], scope["path"])
        began_s, status = self._node.clock(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", identity.encode())]
            await send(message)

        identity = _named(scope) or f"{self._node.instance[:6]}-{next(self._numbers):x}"
        request_id.set(identity)
        calls.in_flight += 1
        try:
            refusal = self._refusal(scope, operation)
            if refusal is None:
                with _span(scope, operation) as span:
                    await self._app(scope, receive, noted)
                    tracing.note(span, status=status)
            else:
                await refusal.answer()(scope, receive, noted)
        finally:
            calls.in_flight -= 1
            calls.answered(operation, status, self._node.clock() - began_s)

    def _refusal(self, scope: Scope, operation: str) -> Refused | None:
        calls, config = self._node.calls, self._node.config.daemon
        if not scope["path"].startswith(_ADMIN) and not self._has_credentials(scope):
            if not _is_open(scope, operation):
                calls.refuse("token")
                return Refused(401, ErrorKind.WRONG_CREDENTIALS, _NO_ACCESS if self._token() is None else _NO_TOKEN)
            if not is_own_host(Headers(scope=scope).get("host"), config.names):
                calls.refuse("host")
                return Refused(421, ErrorKind.ACCESS_DENIED, _FOREIGN_HOST)
        if operation in _PROBES:
            return None
        if operation in _OF_MEMORY and not scope["state"]["listener"].is_unix:
            detail = "memory: is available only over the Unix socket; over TCP use read and write"
            return Refused(403, ErrorKind.ACCESS_DENIED, detail)
        if calls.in_flight > config.connections_max:
            calls.refuse("requests")
            return Refused(503, ErrorKind.BUSY, "daemon: too many requests are in progress; try again", 1)
        if self._node.state is NodeState.DRAINING and operation not in _PAGES:
            calls.refuse("draining")
            return Refused(503, ErrorKind.UNAVAILABLE, "daemon: is ending; try again after its restart", 1)
        return None

    def _has_credentials(self, scope: Scope) -> bool:
        listener: Listener = scope["state"]["listener"]
        token = self._token()
        if listener.is_unix or token is None:
            return listener.verifies_clients
        return is_token(bearer_token(Headers(scope=scope)), token)


def _span(scope: Scope, operation: str) -> AbstractContextManager[tracing.Span | None]:
    """Return the span of a call, as a child of its client's."""
    if operation not in _TRACED:
        return nullcontext()
    return tracing.span("daemon." + operation, tracing.context_of(Headers(scope=scope)))


def _is_open(scope: Scope, operation: str) -> bool:
    """Return True if a request needs no credentials."""
    listener: Listener = scope["state"]["listener"]
    if listener.is_unix or operation == "page" or operation in _PROBES:
        return True
    return listener.is_loopback and operation in _PAGES


def _named(scope: Scope) -> str:
    """Return the client's own name of its request if it is safe in a log; empty otherwise."""
    name = next((value for header, value in scope["headers"] if header == b"x-request-id"), b"")
    return name.decode("ascii") if _REQUEST_ID.fullmatch(name) else ""

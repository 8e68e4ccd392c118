"""Access to the admin surface.

                  with an admin token           without one
    Unix socket   callers with the token        the user of this process and root, as reported by the kernel
    TCP           callers with the token        no access

A token for data gives no access here: only the admin token is compared. Engines run as the user of their daemon, so
only a token prevents them from administering it. Without a token, the header `Host` must be `localhost`, this machine's
name or an IP address: a browser whose user forwards a port to the socket (`ssh -L`) has the user's access too, so a web
page must not reach it under the page's own name.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..backends.http import user_of_peer
from ..config.addresses import is_own_host

# The key of the connection's peer in a request's scope.
PEER = "peer"


class PeerProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which puts the user of the process at the other end of a Unix socket into
    `scope["state"]["peer"]`; None for TCP."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Record the peer. The state is copied into each request's scope."""
        self.access_log = False  # queries have request ids, and the engine's own uvicorn may have turned its log on
        self.app_state = {**self.app_state, PEER: peer_of(transport.get_extra_info("socket"))}
        super().connection_made(transport)


def peer_of(connection: Any) -> int | None:
    """Return the user of the peer of a connected Unix socket; None for any other socket."""
    is_unix = connection is not None and connection.family == socket.AF_UNIX
    return user_of_peer(connection) if is_unix else None


def bearer_token(headers: Mapping[str, str]) -> str | None:
    """Return the token in a request's `Authorization: Bearer ...`; None without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def is_token(given: str | None, expected: str | None) -> bool:
    """Compare in constant time. False if either is missing."""
    if given is None or expected is None:
        return False
    return hmac.compare_digest(given.encode("latin-1", "replace"), expected.encode())  # headers are read as Latin-1


@dataclass(frozen=True, slots=True)
class AdminAccess:
    """See the module's docstring. `token` returns the current admin token; None: there is none."""

    token: Callable[[], str | None]

    @property
    def how(self) -> str:
        """Return what a rejected caller needs."""
        if self.token() is not None:
            return "this needs the admin token, as Authorization: Bearer; with ctl, pass --token-file"
        return (
            "use the Unix socket, as the user who runs this process, with the host `localhost`; for TCP configure an "
            "admin token"
        )

    def who(self, peer: int | None, headers: Mapping[str, str]) -> str | None:
        """Return the caller's name for the audit log: `uid 1000` or `token`; None for a rejected caller."""
        token = self.token()
        if token is not None:
            return "token" if is_token(bearer_token(headers), token) else None
        if peer in (os.geteuid(), 0) and is_own_host(headers.get("host"), ()):
            return f"uid {peer}"
        return None

"""Who may use the admin surface.

                  with an admin token           without one
    Unix socket   who sends it                  the user of this process and root, as the kernel names the peer
    TCP           who sends it                  nobody

A token for data opens nothing here: the only token that is compared is the admin token. Engines have the user of their
daemon, so a token is what keeps them from administering it.

Locking design: a field is one reference, which is replaced as a whole.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_CREDENTIALS = struct.Struct("3i")  # struct ucred, unix(7)
# Where a request's scope has the peer of its connection.
PEER = "peer"


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a Unix socket, as it was when it connected."""

    pid: int
    uid: int


class PeerProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which puts the Peer of a Unix socket into `scope["state"]["peer"]`; None for TCP."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note who has connected. The state is copied into each request's scope."""
        self.app_state = {**self.app_state, PEER: peer_of(transport.get_extra_info("socket"))}
        super().connection_made(transport)


def peer_of(connection: Any) -> Peer | None:
    """Return who is at the other end of a connected Unix socket; None for any other socket."""
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


def bearer_token(headers: Mapping[str, str]) -> str | None:
    """Return the token in a request's `Authorization: Bearer ...`; None without one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def is_token(given: str | None, expected: str | None) -> bool:
    """Compare in constant time. False if either is missing."""
    return given is not None and expected is not None and _same(given, expected)


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("latin-1", "replace"), expected.encode())  # headers are read as Latin-1


@dataclass(slots=True)
class AdminAccess:
    """See the module's docstring. `token` None: there is no admin token. A daemon replaces it when it reloads."""

    token: str | None = field(default=None, repr=False)

    @property
    def how(self) -> str:
        """Say what a refused caller lacks."""
        if self.token is not None:
            return "this needs the admin token, as Authorization: Bearer; ctl takes it from --token-file"
        return "this is for the Unix socket, as the user who runs this; for TCP configure an admin token"

    def who(self, peer: Peer | None, headers: Mapping[str, str]) -> str | None:
        """Return who asks, as the audit log names them: `uid 1000` or `token`; None for a caller who is refused."""
        if self.token is not None:
            return "token" if is_token(bearer_token(headers), self.token) else None
        if peer is not None and peer.uid in (os.geteuid(), 0):
            return f"uid {peer.uid}"
        return None

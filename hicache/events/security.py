"""Who may listen to KV events. Token ids are prompts, so nothing is bound that a stranger could connect to.

Without keys an endpoint is a loopback address, or a socket in a directory that is closed to other users. With CURVE
(the authenticated encryption of ZeroMQ, RFC 26) an endpoint may be anywhere, and a subscriber gets in if its public key
is on the list; without the list anybody who knows the server's public key could.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..config.publishing import is_loopback, split_endpoint
from ..errors import ConfigError

_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # 32 bytes in Z85 (ZeroMQ RFC 32)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The server's secret key and the public keys of who may subscribe, each 40 characters of Z85.

    Raises ConfigError for a malformed key and for an empty list.
    """

    secret: str = field(repr=False)
    clients: frozenset[str]

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.secret):
            raise ConfigError("events: the CURVE secret key is not 40 characters of Z85")
        if not self.clients:
            raise ConfigError("events: the list of CURVE client keys is empty, so nobody could subscribe")
        if not all(_KEY.fullmatch(key) for key in self.clients):
            raise ConfigError("events: a CURVE client key is not 40 characters of Z85")


def require_private(endpoint: str, curve: CurveKeys | None) -> None:
    """Raises ConfigError if `endpoint` could be reached by others than this machine's user and has no keys.

    A loopback address counts as private, though other users of the machine can connect to it; a socket in a directory
    does not have that weakness. Resolves no name.
    """
    try:
        place = split_endpoint(endpoint, listens=True)
    except ValueError as error:
        raise ConfigError(f"events: endpoint {endpoint[:80]!r}: {error}") from error
    if isinstance(place, Path):
        _require_private_directory(place)
    elif curve is None and not is_loopback(place.host):
        raise ConfigError(
            f"events: endpoint {endpoint[:80]!r} is open to others; use 127.0.0.1 or ipc://, or configure CURVE keys"
        )


def _require_private_directory(path: Path) -> None:
    """A socket has no keys of its own worth trusting: whoever may enter its directory may connect."""
    where = f"events: the directory of {str(path)[:80]!r}"
    try:
        state = path.parent.stat()
    except OSError as error:
        raise ConfigError(f"{where} cannot be used: {error.strerror}") from error
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ConfigError(f"{where} must be yours and closed to others: chmod 700")

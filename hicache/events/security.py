"""Access to KV events. Token ids are prompts, so endpoints that unknown users could reach are rejected.

Without keys an endpoint must be a loopback address, or a socket in a directory that is closed to other users. With
CURVE (the authenticated encryption of ZeroMQ, RFC 26) any endpoint is allowed, and only subscribers with a listed
public key are admitted. Without the list, knowing the server's public key would be enough.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..config import EventsConfig
from ..config.addresses import is_loopback, split_endpoint
from ..config.secret import read_private_file
from ..errors import ConfigError

_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # 32 bytes in Z85 (ZeroMQ RFC 32)
# About 1500 keys.
_KEY_FILE_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The server's secret key and the public keys of the subscribers that may connect, each 40 characters of Z85.

    Raises ConfigError for a malformed key and for an empty list.
    """

    secret: str = field(repr=False)
    clients: frozenset[str]

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.secret):
            raise ConfigError("events: the CURVE secret key is not 40 characters of Z85")
        if not self.clients:
            raise ConfigError("events: the list of CURVE client keys is empty, so no subscriber could connect")
        if not all(_KEY.fullmatch(key) for key in self.clients):
            raise ConfigError("events: a CURVE client key is not 40 characters of Z85")


def check_events(section: EventsConfig) -> CurveKeys | None:
    """Return the keys in the configured files, or None without files. Binds nothing; needs no extra.

    Raises ConfigError if a key cannot be read or is malformed, or if others can reach an endpoint without keys.
    """
    curve = None
    if section.curve_secret_key_file is not None and section.curve_client_keys_file is not None:
        secret = _lines(section.curve_secret_key_file, "CURVE secret key file")
        curve = CurveKeys("".join(secret), frozenset(_lines(section.curve_client_keys_file, "CURVE client keys file")))
    require_private(section, curve)
    return curve


def _lines(path: Path, what: str) -> list[str]:
    """Return the lines of a key file that are not empty."""
    text = read_private_file(path, what, _KEY_FILE_BYTES_MAX).decode("ascii", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def require_private(section: EventsConfig, curve: CurveKeys | None) -> None:
    """Raise ConfigError if there are no keys and other machines or users could reach an endpoint.

    A loopback address counts as private, although other users of the machine can connect to it; a socket in a private
    directory is closed to them. Does not resolve names.
    """
    for endpoint in filter(None, (section.endpoint, section.replay_endpoint)):
        place = split_endpoint(endpoint, listens=True)
        if isinstance(place, Path):
            _require_private_directory(place)
        elif curve is None and not is_loopback(place.host):
            raise ConfigError(
                f"events: endpoint {endpoint[:80]!r} can be reached by other users or hosts; use 127.0.0.1 or ipc://, "
                "or configure CURVE keys"
            )


def _require_private_directory(path: Path) -> None:
    """Raise ConfigError for a directory that other users may enter: CURVE does not apply to a socket file."""
    where = f"events: the directory of {str(path)[:80]!r}"
    try:
        state = path.parent.stat()
    except OSError as error:
        raise ConfigError(f"{where} cannot be used: {error.strerror}") from error
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise ConfigError(f"{where} must be yours and closed to other users; run chmod 700, or use a directory in it")

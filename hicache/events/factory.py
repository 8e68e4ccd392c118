"""From a configuration to a stream and its publisher."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..config import HiCacheConfig
from ..config.secret import read_private_file
from ..errors import ConfigError
from .security import CurveKeys, require_private
from .stream import EventStream

if TYPE_CHECKING:
    from .publisher import EventPublisher

# Some 1500 keys.
_KEY_FILE_BYTES_MAX = 1 << 16


def check_events(config: HiCacheConfig) -> CurveKeys | None:
    """Check what the section `events` names outside of itself: the keys it says, None if it says none.

    Reads the key files and binds nothing. Needs no extra. Raises ConfigError if a key cannot be read, or an endpoint is
    none or open to strangers.
    """
    section = config.events
    if section.endpoint is None:
        return None
    curve = _curve_keys(config)
    for endpoint in filter(None, (section.endpoint, section.replay_endpoint)):
        require_private(endpoint, curve)
    return curve


def create_publisher(config: HiCacheConfig, stream: EventStream) -> EventPublisher | None:
    """Publish `stream` as the section `events` says; None if it names no endpoint. Starts a thread.

    Raises ConfigError if the extra `events` is not installed, a key cannot be read, or an endpoint cannot be bound or
    is open to strangers.
    """
    section = config.events
    if section.endpoint is None:
        return None
    curve = check_events(config)
    try:
        from .publisher import EventPublisher  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(f'events need the package {error.name}: pip install "hicache[events]"') from error
    return EventPublisher(stream, section, curve)


def _curve_keys(config: HiCacheConfig) -> CurveKeys | None:
    section = config.events
    if section.curve_secret_key_file is None or section.curve_client_keys_file is None:
        return None
    secret = _lines(section.curve_secret_key_file, "CURVE secret key file")
    clients = _lines(section.curve_client_keys_file, "CURVE client keys file")
    return CurveKeys("".join(secret), frozenset(clients))


def _lines(path: Path, what: str) -> list[str]:
    """The lines of a key file that are not empty."""
    text = read_private_file(path, what, _KEY_FILE_BYTES_MAX).decode("ascii", errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()]

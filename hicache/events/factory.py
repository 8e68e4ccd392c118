"""Builds a publisher from a configuration. A module of its own: `publisher` needs the extra `events` for its import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..clock import SYSTEM_CLOCK, Clock
from ..config import EventsConfig
from ..errors import MissingPackage, install_hint
from .security import check_events
from .stream import EventStream

if TYPE_CHECKING:
    from .publisher import EventPublisher


def create_publisher(
    section: EventsConfig, stream: EventStream, *, given_keys: bool = False, clock: Clock = SYSTEM_CLOCK
) -> EventPublisher | None:
    """Publish `stream` as the section `events` configures it. Return None without an endpoint. Starts a thread.
    `given_keys`: the engine supplies the page keys.

    Raises ConfigError if the extra `events` is not installed, a key cannot be read, or an endpoint cannot be bound or
    is reachable by other users or hosts without keys.
    """
    if section.endpoint is None:
        return None
    curve = check_events(section)
    try:
        from .publisher import EventPublisher  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingPackage(f"events need the package {error.name}; {install_hint('events')}") from error
    return EventPublisher(stream, section, curve, given_keys=given_keys, clock=clock)

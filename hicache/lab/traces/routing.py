"""Which node serves a request. A stand-in of the branch `traces`."""

from __future__ import annotations

import enum

from .trace import TraceRequest


class Routing(enum.StrEnum):
    """How requests are spread over nodes."""

    ROTATE = "rotate"
    RANDOM = "random"
    SESSION = "session"
    PREFIX = "prefix"


class Router:
    """Chooses the node of each request."""

    def __init__(self, routing: Routing, nodes: int) -> None:
        self._routing = routing
        self._nodes = nodes

    def route(self, request: TraceRequest) -> int:
        """Return the node of the next request."""
        if self._routing is Routing.PREFIX:
            return request.hash_ids[0] * 2654435761 % 2**32 * self._nodes >> 32
        if self._routing is Routing.SESSION and request.session is not None:
            return request.session % self._nodes
        return request.index % self._nodes

"""The counters of a daemon's requests.

Locking design: only the event loop's thread counts. Any thread may take a snapshot: copying a dictionary or a list is
one operation in CPython.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..histogram import BOUNDS_S, Histogram, LatencyStatistics

# The limits that reject or end requests and connections, by their names in counters, with words for the log.
LIMITS: Mapping[str, str] = {
    "answer_lost": "connections were lost while they were answered",
    "answer_timeout": "clients did not read their answer in time (daemon.client_timeout)",
    "body_bytes": "bodies were too long",
    "body_lost": "connections were lost before the end of a body",
    "body_timeout": "bodies did not arrive in time (daemon.client_timeout)",
    "connections": "connections were too many (daemon.connections_max)",
    "draining": "requests came while the daemon was ending",
    "head_bytes": "heads of requests were too long",
    "head_timeout": "heads of requests did not arrive in time (daemon.client_timeout)",
    "host": "requests named a host that is not this daemon (daemon.hosts)",
    "idle_timeout": "connections were closed after an early answer (daemon.client_timeout)",
    "peer": "connections came from another user's processes",
    "pipelining": "clients did not wait for their answer",
    "requests": "requests were too many at once (daemon.connections_max)",
    "token": "requests came without the token",
}


class CallCounters:
    """Totals since the start, and the current requests and connections."""

    def __init__(self) -> None:
        self.connections = {"unix": 0, "tcp": 0}
        self.in_flight = 0
        self._requests: Counter[tuple[str, int]] = Counter()
        self._refused: Counter[str] = Counter()
        self._took: dict[str, Histogram] = {}

    def answered(self, operation: str, status: int, took_s: float) -> None:
        """Count an answer. `operation` is one of a few names, never a client's text."""
        self._requests[operation, status] += 1
        if operation not in self._took:
            self._took = {**self._took, operation: Histogram(BOUNDS_S)}
        self._took[operation].add(took_s)

    def refuse(self, limit: str) -> None:
        """Count a request or connection that a limit has rejected."""
        self._refused[limit] += 1

    def requests(self) -> dict[tuple[str, int], int]:
        """Return answers by operation and status."""
        return dict(self._requests)

    def refused(self) -> dict[str, int]:
        """Return refusals by limit."""
        return dict(self._refused)

    def latency(self) -> dict[str, LatencyStatistics]:
        """Return the times of answers, by operation."""
        return {name: histogram.latency() for name, histogram in self._took.items()}

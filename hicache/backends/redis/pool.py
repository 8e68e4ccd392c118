"""Connection pools, one per server and purpose.

Locking design: one condition per pool guards its fields and is held for a few instructions, never while a connection is
opened or closed. `Pools` has a lock for its dictionary.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..errors import ErrorKind, StoreError
from .channel import Channel
from .connect import Connector
from .options import Endpoint

Result = TypeVar("Result")

# The limit of servers with pools that are not in the known routes: targets of redirections, and servers that left.
_STRANGERS_MAX = 8


class Purpose(enum.Enum):
    """The use of a connection. Short requests have separate connections, so that they do not wait behind bodies."""

    BODIES = "bodies"
    KEYS = "keys"
    INSPECTION = "inspection"  # does not refresh recency, on servers that support this (7.2 or later)


class Pool:
    """Up to `limit` connections to one server for one purpose.

    Invariant: `_out` connections are leased or being opened, and the idle ones are reusable. 0 <= _out <= limit; leased
    and idle connections together are at most `limit`.
    """

    def __init__(
        self, connector: Connector, address: Endpoint, limit: int, purpose: Purpose, *, read_only: bool
    ) -> None:
        self._connector = connector
        self._address = address
        self._limit = limit
        self._no_touch = purpose is Purpose.INSPECTION
        self._read_only = read_only
        self._state = threading.Condition()
        self._idle: list[Channel] = []
        self._out = 0
        self._closed = False

    @contextlib.contextmanager
    def lease(self, deadline: float) -> Iterator[Channel]:
        """Lease a connection for the duration of the context. Waits for a free one or opens one. Raises StoreError."""
        left_s = deadline - time.monotonic()
        channel = self._take(deadline, None if left_s > threading.TIMEOUT_MAX else max(left_s, 0.0))
        if channel is None:
            raise StoreError(ErrorKind.DEADLINE)
        try:
            yield channel
        finally:
            self._give(channel)

    @contextlib.contextmanager
    def lease_nowait(self, deadline: float) -> Iterator[Channel | None]:
        """As `lease`, but yields None if all connections are leased."""
        channel = self._take(deadline, 0.0)
        try:
            yield channel
        finally:
            if channel is not None:
                self._give(channel)

    def run(self, work: Callable[[Channel], Result], deadline: float) -> Result:
        """Return the result of `work` on a connection. If that one died while idle, repeat on a second connection; this
        does not count as a retry. Raises StoreError."""
        with self.lease(deadline) as channel:
            try:
                return work(channel)
            except StoreError as failure:
                if failure.kind != ErrorKind.CONNECTION_LOST or channel.answered:
                    raise
        self.close_idle()
        with self.lease(deadline) as channel:
            return work(channel)

    def _take(self, deadline: float, wait_s: float | None) -> Channel | None:
        with self._state:
            if not self._state.wait_for(lambda: self._out < self._limit, wait_s):
                return None
            self._out += 1
        with contextlib.ExitStack() as undo:
            undo.callback(self._free)
            while (channel := self._pop_idle()) is not None and not channel.is_quiet:
                channel.close()  # since its last use, the server has closed it or sent unexpected bytes
            is_fresh = channel is None
            if channel is None:
                channel = self._connector.open(
                    self._address, deadline, read_only=self._read_only, no_touch=self._no_touch
                )
            channel.answered = is_fresh  # a failure on a new connection does not mean that it died while idle
            undo.pop_all()
        return channel

    def _pop_idle(self) -> Channel | None:
        with self._state:
            return self._idle.pop() if self._idle else None

    def _give(self, channel: Channel) -> None:
        with self._state:
            keep = channel.reusable and not self._closed
            if keep:
                self._idle.append(channel)
        if not keep:
            channel.close()
        self._free()

    def _free(self) -> None:
        with self._state:
            self._out -= 1
            self._state.notify()

    def close(self) -> None:
        """Close the idle connections now, and leased ones when they are returned."""
        with self._state:
            self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections. Called after one was found dead, because the others may be dead too."""
        with self._state:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()


class Pools:
    """The pools of one backend, created at first use.

    Invariant: the pools belong to the servers of the last `keep` and to at most _STRANGERS_MAX others.
    """

    def __init__(self, connector: Connector, limit: int) -> None:
        self._connector = connector
        self._limit = limit
        self._lock = threading.Lock()
        self._pools: dict[tuple[Endpoint, Purpose, bool], Pool] = {}
        self._known: set[Endpoint] = set()

    def of(self, address: Endpoint, purpose: Purpose, *, read_only: bool = False) -> Pool:
        """Return the pool of connections to `address`."""
        gone: list[Pool] = []
        with self._lock:
            pool = self._pools.get((address, purpose, read_only))
            if pool is None:
                strangers = dict.fromkeys(key[0] for key in self._pools if key[0] not in self._known)
                if address not in self._known and address not in strangers and len(strangers) >= _STRANGERS_MAX:
                    gone = self._take_out({next(iter(strangers))})
                pool = Pool(self._connector, address, self._limit, purpose, read_only=read_only)
                self._pools[(address, purpose, read_only)] = pool
        for one in gone:
            one.close()
        return pool

    def _take_out(self, addresses: set[Endpoint]) -> list[Pool]:
        return [self._pools.pop(key) for key in list(self._pools) if key[0] in addresses]

    def keep(self, addresses: set[Endpoint]) -> None:
        """Remember `addresses` as the known servers, and close the pools of all others."""
        with self._lock:
            self._known = addresses
            gone = self._take_out({key[0] for key in self._pools} - addresses)
        for pool in gone:
            pool.close()

    def close(self) -> None:
        """Close all pools."""
        self.keep(set())

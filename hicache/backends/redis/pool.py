"""Connection pools, one per server and purpose.

Locking design: `_returned`, a condition, guards the slots of a pool; `_closed` is only set. `Pools` has a lock for its
dictionary. No lock is held while a connection is opened or closed.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from ...clock import SYSTEM_CLOCK, Clock
from ..errors import ErrorKind, StoreError
from .channel import Channel
from .connect import Connector
from .options import Endpoint

Result = TypeVar("Result")

# A NAT, a firewall or a load balancer forgets idle connections without a word (after one minute the strictest, Azure's
# after four, AWS's after six), and the next request on such a connection gets no answer. An older one is closed
# instead. A younger one may be lost too, for example by a failover of the network: after a short gap, the first reply
# gets only this time, and then the request is sent again on a new connection. A server that works replies in less.
_IDLE_S_MAX = 30.0
_GAP_S = 1.0
_FIRST_REPLY_S = 0.25
# The limit of servers with pools that are not in the known routes: targets of redirections, and servers that left.
_STRANGERS_MAX = 8


class Purpose(enum.Enum):
    """The use of a connection. Short requests have separate connections, so that they do not wait behind bodies."""

    BODIES = "bodies"
    KEYS = "keys"
    INSPECTION = "inspection"  # does not refresh recency, on servers that support this (7.2 or later)


class Pool:
    """Up to `limit` connections to one server for one purpose, which `dial` opens.

    Invariant: each of `limit` slots is either leased or in `_slots`, there with an idle, reusable connection or None.
    """

    def __init__(self, dial: Callable[[float], Channel], limit: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._dial = dial
        self._clock = clock
        self._returned = threading.Condition()
        self._slots: list[Channel | None] = [None] * limit  # the last one is leased next
        self._closed = False

    @contextlib.contextmanager
    def lease(self, deadline: float) -> Iterator[Channel]:
        """Lease a connection for the duration of the context. Waits for a free one or opens one. Raises StoreError."""
        with self.lease_until(deadline, deadline) as channel:
            if channel is None:
                raise StoreError(ErrorKind.DEADLINE)
            yield channel

    @contextlib.contextmanager
    def lease_until(self, until: float, deadline: float) -> Iterator[Channel | None]:
        """As `lease`, but yields None if all connections are leased until `until`."""
        with self._returned:
            is_free = self._clock.wait_for(self._returned, lambda: bool(self._slots), until)
            idle = self._slots.pop() if is_free else None
        if not is_free:
            yield None
            return
        channel = None
        try:
            idle_s = 0.0 if idle is None else self._clock() - idle.idle_since_s
            if idle is not None and (idle_s > _IDLE_S_MAX or not idle.is_quiet):
                idle.close()  # since its last use, the server has closed it or sent unexpected bytes
                idle = None
            channel = self._dial(deadline) if idle is None else idle
            channel.answered = idle is None  # a failure on a new connection does not mean that it died while idle
            channel.first_reply_s = _FIRST_REPLY_S if idle_s > _GAP_S else math.inf
            yield channel
        finally:
            if channel is not None:
                channel.idle_since_s = self._clock()
                if not channel.reusable:
                    channel.close()
                    channel = None
            with self._returned:
                self._slots.append(channel)
                self._returned.notify()
            if self._closed:
                self.close_idle()

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

    def close(self) -> None:
        """Close the idle connections now, and leased ones when they are returned."""
        self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections. Called after one was found dead, because the others may be dead too."""
        with self._returned:
            idle, self._slots = self._slots, [None] * len(self._slots)
        for channel in idle:
            if channel is not None:
                channel.close()


class Pools:
    """The pools of one backend, created at first use.

    Invariant: the pools belong to the servers of the last `keep` and to at most _STRANGERS_MAX others.
    """

    def __init__(self, connector: Connector, limit: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
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
                no_touch = purpose is Purpose.INSPECTION
                dial = functools.partial(self._connector.open, address, read_only=read_only, no_touch=no_touch)
                pool = self._pools[(address, purpose, read_only)] = Pool(dial, self._limit, self._clock)
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

"""Routing: which server a page is on. That is one server, the primary that the sentinels name, or a cluster node.

A redirection (MOVED, ASK) comes from a server and is not trusted. It is followed only in a cluster, and only to nodes
that the configuration or CLUSTER SLOTS of a known node names, or that `allowed_nodes` contains.

A replica or a node of a cluster that has failed gets no requests of calls, so that they do not wait for it again: its
pages are errors (NODE_DOWN) while other nodes work. A thread asks it until it answers, and the others for new routes.

Locking design: `_routes` is replaced as a whole, never changed, so it is read without a lock; `_lock` guards `_stale`
and is held for an assignment. The first thread that finds the routes stale requests new ones; the others use the old
ones. Items of `_down` are set and removed one at a time, which is atomic in CPython. The dictionary is replaced
together with the routes; an item set at the same moment is lost, which costs a timeout. `_told` belongs to the thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot

from ...background import BackgroundTask
from ...clock import SYSTEM_CLOCK, Clock
from ...config.addresses import Address
from ..errors import ErrorKind, StoreError
from .channel import Reply
from .connect import NODES_MAX, Connector, named_node
from .errors import ErrorReply
from .options import Endpoint, RedisAccess, named_address
from .pool import Pools, Purpose

logger = logging.getLogger(__name__)

# The positions of redirected pages, by target address and by reply: True for ASK, False for MOVED.
Redirects: TypeAlias = dict[tuple[Address, bool], list[int]]
NO_SHARD = -1
# A failed server is asked this often whether it works again: often enough to notice a failover within seconds.
_ASK_AGAIN_S = 2.0
# How long `close` waits for the thread that asks.
_CLOSE_S = 1.0
# Failed nodes that a message names.
_NAMED_MAX = 3
# After one of these errors a server gets no requests until it answers.
_DOWN = frozenset({
    ErrorKind.TIMEOUT, ErrorKind.CONNECTION_REFUSED, ErrorKind.UNREACHABLE, ErrorKind.DNS, ErrorKind.TLS,
    ErrorKind.CONNECTION_LOST, ErrorKind.TOO_MANY_CONNECTIONS, ErrorKind.LOADING, ErrorKind.BUSY,
    ErrorKind.PRIMARY_DOWN, ErrorKind.CLUSTER_DOWN,
})
# After one of these errors the routes may be out of date.
_STALE = frozenset({
    ErrorKind.TIMEOUT, ErrorKind.CONNECTION_REFUSED, ErrorKind.UNREACHABLE, ErrorKind.DNS, ErrorKind.CONNECTION_LOST,
    ErrorKind.READ_ONLY, ErrorKind.PRIMARY_DOWN, ErrorKind.CLUSTER_DOWN, ErrorKind.MOVED, ErrorKind.NO_PRIMARY,
    ErrorKind.LOADING,
})


@dataclass(frozen=True, slots=True)
class Shard:
    """A primary and its replicas."""

    primary: Endpoint
    replicas: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True)
class Server:
    """The target of a request. `read_only` marks a cluster's replica, which serves only clients that sent READONLY."""

    address: Endpoint
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Routes:
    """The shards, and per hash slot the number of its shard, NO_SHARD for none. Without `slots` one shard has all keys.

    Invariant: no two shards have the same primary.
    """

    shards: tuple[Shard, ...]
    slots: Sequence[int] = field(default=(), repr=False)

    def addresses(self) -> set[Endpoint]:
        """Return the addresses of all servers."""
        return {address for shard in self.shards for address in (shard.primary, *shard.replicas)}


class Router:
    """Finds servers. Thread-safe. Blocks, at most until the deadline, when it must query sentinels or nodes.

    Its methods and the constructor raise StoreError if no server answers.
    """

    def __init__(
        self, access: RedisAccess, connector: Connector, pools: Pools, deadline: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._clock = clock
        self._access = access
        self._connector = connector
        self._pools = pools
        self._lock = threading.Lock()
        self._stale = False
        self._down: dict[Endpoint, tuple[float, str]] = {}  # failed servers: since when (wall clock) and why
        self._told: set[Endpoint] = set()  # those in the log
        self._ask_again = BackgroundTask("redis-nodes", self._look_again, clock=clock)
        self._routes = Routes(())
        self._learn(deadline)

    def note(self, kind: str, server: Server | None) -> str:
        """Record a failure of `server`, or of the search for one. If routes may be out of date, the next call requests
        new ones. Return the kind to count: NODE_DOWN if only a part of a cluster has failed."""
        if kind in _STALE or (kind == ErrorKind.NODE_DOWN and server is not None):
            with self._lock:
                self._stale = True
        if server is None or kind not in _DOWN:
            return kind
        is_cluster, address = self._access.mode == "cluster", server.address
        if is_cluster or any(address in shard.replicas for shard in self._routes.shards):
            self._down.setdefault(address, (self._clock.wall_s(), kind))
            self._ask_again.wake()
        return ErrorKind.NODE_DOWN if is_cluster and self._works_elsewhere() else kind

    def _works_elsewhere(self) -> bool:
        return any(shard.primary not in self._down for shard in self._routes.shards)

    def works(self, address: Endpoint) -> bool:
        """False if the primary `address` has failed and others work: its pages get no requests."""
        return address not in self._down or not self._works_elsewhere()

    @property
    def outage(self) -> tuple[float, str] | None:
        """Return since when (wall clock) and why a part of a cluster is missing, and after `; ` what to do. Return None
        if no part is, or if the whole cluster is."""
        down = self._down
        found = [shard.primary for shard in self._routes.shards if shard.primary in down]
        if not found or not self._works_elsewhere():
            return None
        nodes = ", ".join(f"{self._access.shown(one)} ({down[one][1]})" for one in found[:_NAMED_MAX])
        nodes += f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
        return min(down[one][0] for one in found), (
            f"{len(found)} of {len(self._routes.shards)} nodes of the cluster cannot be used: {nodes}, so hits end at "
            "the pages there; start these nodes, or give them replicas, which take over"
        )

    def _look_again(self) -> float:
        """Ask the failed servers whether they work, and the others for new routes. Write the log. Return when to repeat
        that."""
        with contextlib.suppress(StoreError):
            self._learn(self._clock() + self._access.options.open_timeout)
        for address in list(self._down):
            if self._answers(address):
                self._down.pop(address, None)
        down = dict(self._down)
        for address in down.keys() - self._told:
            logger.warning("redis: server %s failed (%s); it gets no requests until it works again",
                           self._access.shown(address), down[address][1])
        for address in self._told - down.keys():
            logger.info("redis: server %s works again, or another one has replaced it", self._access.shown(address))
        self._told = set(down)
        return self._clock() + _ASK_AGAIN_S if down else math.inf

    def _answers(self, address: Endpoint) -> bool:
        deadline = self._clock() + self._access.options.timeout
        question = (b"EXISTS", self._access.options.key_prefix.encode())  # of the commands that an engine needs anyway
        try:
            pool = self._pools.of(address, Purpose.KEYS)
            reply = pool.run(lambda channel: channel.call(*question, deadline=deadline), deadline)
        except StoreError:
            return False
        return not isinstance(reply, ErrorReply) or reply.kind not in _DOWN

    def close(self) -> None:
        """End the thread that asks. Idempotent."""
        self._ask_again.close(_CLOSE_S)

    def routes(self, deadline: float) -> Routes:
        """Return the current routes; request new ones if they are stale. Raises StoreError."""
        with self._lock:
            ask, self._stale = self._stale, False
        if ask and self._access.mode != "single":
            try:
                self._learn(deadline)
            except StoreError:
                with self._lock:
                    self._stale = True
                raise
        return self._routes

    def _learn(self, deadline: float) -> None:
        """Request new routes, and forget the servers that are not in them."""
        access = self._access
        if access.mode == "cluster":
            self._routes = self._find_cluster(deadline)
        elif access.mode == "single":
            self._routes = Routes((Shard(access.addresses[0], tuple(access.replicas)),))
        else:
            primary = self._connector.find_primary(deadline)
            replicas = self._connector.find_replicas(deadline) if access.options.read_from == "replica" else []
            self._routes = Routes((Shard(primary, tuple(replicas)),))
        known = self._routes.addresses()
        self._pools.keep(known)
        self._down = {address: failure for address, failure in self._down.items() if address in known}

    def redirection(self, error: ErrorReply, server: Server) -> Address | None:
        """Return the address in `MOVED slot host:port` or `ASK slot host:port`. Return None for another error, for an
        invalid address, and outside a cluster, where redirections are ignored."""
        if self._access.mode != "cluster" or error.kind not in (ErrorKind.MOVED, ErrorKind.ASK):
            return None
        return redirect(error, server.address)

    def follow(self, redirects: Redirects, deadline: float) -> tuple[dict[tuple[Server, bool], list[int]], list[int]]:
        """Return the redirected positions by server and by need of ASKING, and the positions whose redirection must not
        be followed. Requests new routes if a target is not in the current ones. REQUIRES: the caller holds no
        connection, because the request needs one."""
        if not self._known().issuperset(target for target, _ in redirects):
            self.note(ErrorKind.MOVED, None)
            with contextlib.suppress(StoreError):  # use the old routes
                self.routes(deadline)
        known, is_bounded = self._known(), self._access.allowed_nodes is not None
        followed: dict[tuple[Server, bool], list[int]] = {}
        refused: list[int] = []
        for (target, asking), positions in redirects.items():
            if target in known or (is_bounded and self._access.allows(target)):
                followed[Server(target), asking] = positions
            else:
                refused += positions
        return followed, refused

    def _known(self) -> set[Endpoint]:
        return self._routes.addresses() | set(self._access.addresses)

    def by_server(
        self, positions: Iterable[int], names: Sequence[bytes], *, to_read: bool, deadline: float
    ) -> dict[Server | None, list[int]]:
        """Return `positions` grouped by the server of `names[position]`, in order; under None those without a server
        that works, in any order.

        With `to_read` a replica may be chosen, if the options allow it. Raises StoreError.
        """
        routes = self.routes(deadline)
        to_replica = to_read and self._access.options.read_from == "replica"
        if not routes.slots:
            return {self._server(routes.shards[0], to_replica): list(positions)}
        by_shard: dict[int, list[int]] = {}
        for position in positions:
            by_shard.setdefault(routes.slots[key_slot(names[position])], []).append(position)
        groups: dict[Server | None, list[int]] = {}
        for number, found in by_shard.items():
            server = None if number == NO_SHARD else self._server(routes.shards[number], to_replica)
            if number == NO_SHARD:
                self.note(ErrorKind.CLUSTER_DOWN, None)
            elif server is not None and not self.works(server.address):
                server = None
            groups.setdefault(server, []).extend(found)
        return groups

    def _server(self, shard: Shard, to_replica: bool) -> Server:
        """Return a random replica that has not failed, else the primary."""
        replicas = [one for one in shard.replicas if one not in self._down] if to_replica else []
        if not replicas:
            return Server(shard.primary)
        return Server(random.choice(replicas), read_only=self._access.mode == "cluster")

    def _find_cluster(self, deadline: float) -> Routes:
        """Request the routes from one node after another: first the known good ones, then those that have failed, then
        the configured ones."""
        known = list(self._routes.addresses())
        random.shuffle(known)
        known.sort(key=self._down.__contains__)
        failure, access = StoreError(ErrorKind.CLUSTER_DOWN), self._access
        for address in dict.fromkeys([*known, *access.addresses]):
            try:
                pool = self._pools.of(address, Purpose.KEYS)
                reply = pool.run(lambda channel: channel.call(b"CLUSTER", b"SLOTS", deadline=deadline), deadline)
                if isinstance(reply, ErrorReply):
                    raise reply.failure
                return parse_slots(reply, address, access)
            except StoreError as error:
                failure = error
        raise failure


def parse_slots(reply: Reply, source: Endpoint, access: RedisAccess) -> Routes:
    """Return the routes in the reply to CLUSTER SLOTS. Raises StoreError if it is malformed, names no node or too many
    nodes, or names a node that is not allowed."""
    slots = [NO_SHARD] * SLOTS
    shards: list[Shard] = []
    numbers: dict[Address, int] = {}
    nodes_seen: set[Address] = set()
    for entry in reply if isinstance(reply, list) else []:
        match entry:
            case [int(first), int(last), *nodes] if nodes and 0 <= first <= last < SLOTS:
                addresses = [_node(node, source, access) for node in nodes]
                # One shard per primary, although its ranges may name the replicas in different orders.
                number = numbers.setdefault(addresses[0], len(shards))
                if number == len(shards):
                    shards.append(Shard(addresses[0], tuple(addresses[1:])))
                    nodes_seen.update(addresses)
                slots[first : last + 1] = [number] * (last + 1 - first)
            case _:
                raise StoreError(ErrorKind.PROTOCOL, "the reply to CLUSTER SLOTS is not valid")
        if len(nodes_seen) > NODES_MAX:
            raise StoreError(ErrorKind.PROTOCOL, f"CLUSTER SLOTS names more than {NODES_MAX} nodes")
    if not shards:
        raise StoreError(ErrorKind.CLUSTER_DOWN, "no slot is assigned")
    return Routes(tuple(shards), slots)


def _node(node: Reply, source: Endpoint, access: RedisAccess) -> Address:
    match node:
        case [bytes(host), int(port), *_] if host not in (b"", b"?"):
            return named_node(access, host, port)
        case [bytes() | None, int(port), *_] if isinstance(source, Address):
            return named_node(access, source.host.encode(), port)  # the node does not know its own address
    raise StoreError(ErrorKind.PROTOCOL, "a node in the reply to CLUSTER SLOTS is not valid")


def redirect(error: ErrorReply, source: Endpoint) -> Address | None:
    """Return the target of `MOVED slot host:port` or `ASK slot host:port`; None if it is not valid."""
    words = error.text.split(b" ")
    host, _, port = words[-1].rpartition(b":")
    if len(words) != 3:
        return None
    if not host and isinstance(source, Address):
        host = source.host.encode()
    return named_address(host.removeprefix(b"[").removesuffix(b"]"), port)

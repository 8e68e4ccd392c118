"""Which server a page is on: one server, the primary that the sentinels name, or the nodes of a cluster.

A redirection (MOVED, ASK) is a server's word, so only those of a cluster are followed, and only to nodes that the
configuration names, that CLUSTER SLOTS of a known node names, or that `allowed_nodes` hold.

Locking design: `_routes` is replaced as a whole, never changed, so it is read without a lock; `_lock` guards `_stale`
and is held for an assignment. Whoever finds the routes stale first asks for new ones, the others use the old ones.
`_avoid` has single items set and read, each atomic in CPython, and is replaced with the routes; an item that is set
just then is lost, which costs a timeout.
"""

from __future__ import annotations

import binascii
import contextlib
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...config.addresses import Address
from ..errors import ErrorKind, StoreError
from .channel import Reply
from .connect import NODES_MAX, Connector, named_node
from .errors import ErrorReply
from .options import Access, Endpoint, named_address
from .pool import Pools, Purpose

# The positions of pages that were redirected: to this address, by ASK or else by MOVED.
Redirects: TypeAlias = dict[tuple[Address, bool], list[int]]
SLOTS = 16384
NOBODY = -1
# A replica that has failed is left alone for so long, and then tried again with a share of the reads; a node of a
# cluster is asked for the way after all others.
_AVOID_S = 5.0
# After one of these the server may not be the right one any more.
_STALE = frozenset({
    ErrorKind.TIMEOUT, ErrorKind.CONNECTION_REFUSED, ErrorKind.UNREACHABLE, ErrorKind.DNS, ErrorKind.CONNECTION_LOST,
    ErrorKind.READ_ONLY, ErrorKind.PRIMARY_DOWN, ErrorKind.CLUSTER_DOWN, ErrorKind.MOVED, ErrorKind.NO_PRIMARY,
    ErrorKind.LOADING,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shard:
    """A primary and its replicas."""

    primary: Endpoint
    replicas: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True)
class Server:
    """Where a request goes. `read_only`: a cluster's replica, which serves only who says that this will do."""

    address: Endpoint
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Routes:
    """The shards, and the number of the one that each hash slot is on, NOBODY for none. Without `slots` there is one
    shard for all.

    Invariant: no two shards have the same primary.
    """

    shards: tuple[Shard, ...]
    slots: Sequence[int] = field(default=(), repr=False)

    def addresses(self) -> set[Endpoint]:
        """All servers."""
        return {address for shard in self.shards for address in (shard.primary, *shard.replicas)}


class Router:
    """Finds servers. Thread-safe; blocks where it has to ask sentinels or nodes, until the deadline at most.

    Raises StoreError if no server answers, from the constructor as well.
    """

    def __init__(self, access: Access, connector: Connector, pools: Pools, deadline: float) -> None:
        self._access = access
        self._connector = connector
        self._pools = pools
        self._lock = threading.Lock()
        self._stale = False
        self._avoid: dict[Endpoint, float] = {}  # until when
        self._routes = Routes(())
        self._learn(deadline)

    def note(self, kind: str, server: Server | None) -> None:
        """Learn that `server`, or the search for one, has failed so: the next call asks for the way again, and reads
        go to other replicas for a while."""
        if kind in _STALE:
            with self._lock:
                self._stale = True
            if server is not None:
                self._avoid[server.address] = time.monotonic() + _AVOID_S

    def routes(self, deadline: float) -> Routes:
        """The way as it is known now; asks if it is in doubt. Raises StoreError."""
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
        """Ask for the way, and forget the servers that are not on it."""
        self._routes = self._find(deadline)
        known = self._routes.addresses()
        self._pools.keep(known)
        self._avoid = {address: until for address, until in self._avoid.items() if address in known}

    def redirection(self, error: ErrorReply, server: Server) -> Address | None:
        """The address in `MOVED slot host:port` or `ASK slot host:port`; None for another error, for an address that is
        not valid, and for servers that are not a cluster, which have nowhere to redirect to."""
        if self._access.mode != "cluster" or error.kind not in (ErrorKind.MOVED, ErrorKind.ASK):
            return None
        return redirect(error, server.address)

    def follow(self, redirects: Redirects, deadline: float) -> tuple[dict[tuple[Server, bool], list[int]], list[int]]:
        """Return the redirected positions by server, with ASKING ahead or not, and those of redirections that may not
        be followed. Asks for the way if a target is not on it.
        REQUIRES: the caller holds no connection, since asking needs one."""
        if not self._known().issuperset(target for target, _ in redirects):
            self.note(ErrorKind.MOVED, None)
            with contextlib.suppress(StoreError):  # then the old way counts
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
        """`positions` by the server that has `names[position]`, each list in their order; None: no server has it.

        `to_read`: replicas will do, if the options say so. Raises StoreError.
        """
        routes = self.routes(deadline)
        to_replica = to_read and self._access.options.read_from == "replica"
        if not routes.slots:
            return {self._server(routes.shards[0], to_replica): list(positions)}
        by_shard: dict[int, list[int]] = {}
        for position in positions:
            by_shard.setdefault(routes.slots[_slot_of(names[position])], []).append(position)
        return {
            None if number == NOBODY else self._server(routes.shards[number], to_replica): found
            for number, found in by_shard.items()
        }

    def _server(self, shard: Shard, to_replica: bool) -> Server:
        """One of the replicas that have not failed lately, or else the primary."""
        now_s = time.monotonic()
        replicas = [one for one in shard.replicas if self._avoid.get(one, 0.0) <= now_s] if to_replica else []
        if not replicas:
            return Server(shard.primary)
        return Server(random.choice(replicas), read_only=self._access.mode == "cluster")

    def _find(self, deadline: float) -> Routes:
        access = self._access
        if access.mode == "cluster":
            return self._find_cluster(deadline)
        if access.mode == "single":
            return Routes((Shard(access.addresses[0], tuple(access.replicas)),))
        primary = self._connector.find_primary(deadline)
        replicas = self._connector.find_replicas(deadline) if access.options.read_from == "replica" else []
        return Routes((Shard(primary, tuple(replicas)),))

    def _find_cluster(self, deadline: float) -> Routes:
        """Ask one node after the other: first those that are known to serve, last those that have failed lately."""
        known = list(self._routes.addresses())
        random.shuffle(known)
        now_s = time.monotonic()
        known.sort(key=lambda address: self._avoid.get(address, 0.0) > now_s)
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


def _slot_of(name: bytes) -> int:
    """The hash slot of a key of ours, which has no braces and so no hash tag."""
    return binascii.crc_hqx(name, 0) % SLOTS


def parse_slots(reply: Reply, asked: Endpoint, access: Access) -> Routes:
    """The routes in the reply to CLUSTER SLOTS. Raises StoreError for one that is malformed, names no node, names more
    than a cluster has, or names one that is not allowed."""
    slots = [NOBODY] * SLOTS
    shards: list[Shard] = []
    numbers: dict[Address, int] = {}
    nodes_seen: set[Address] = set()
    for entry in reply if isinstance(reply, list) else []:
        match entry:
            case [int(first), int(last), *nodes] if nodes and 0 <= first <= last < SLOTS:
                addresses = [_node(node, asked, access) for node in nodes]
                # One shard for each primary, though its ranges may name the replicas in another order.
                number = numbers.setdefault(addresses[0], len(shards))
                if number == len(shards):
                    shards.append(Shard(addresses[0], tuple(addresses[1:])))
                    nodes_seen.update(addresses)
                slots[first : last + 1] = [number] * (last + 1 - first)
            case _:
                raise StoreError(ErrorKind.PROTOCOL, "CLUSTER SLOTS has a reply of another form")
        if len(nodes_seen) > NODES_MAX:
            raise StoreError(ErrorKind.PROTOCOL, f"CLUSTER SLOTS names more than {NODES_MAX} nodes")
    if not shards:
        raise StoreError(ErrorKind.CLUSTER_DOWN, "no slot is assigned")
    return Routes(tuple(shards), slots)


def _node(node: Reply, asked: Endpoint, access: Access) -> Address:
    match node:
        case [bytes(host), int(port), *_] if host not in (b"", b"?"):
            return named_node(access, host, port)
        case [bytes() | None, int(port), *_] if isinstance(asked, Address):
            return named_node(access, asked.host.encode(), port)  # it does not know its own name
    raise StoreError(ErrorKind.PROTOCOL, "CLUSTER SLOTS names a node in another form")


def redirect(error: ErrorReply, asked: Endpoint) -> Address | None:
    """Where `MOVED slot host:port` and `ASK slot host:port` point to; None if they point nowhere."""
    words = error.text.split(b" ")
    host, _, port = words[-1].rpartition(b":")
    if len(words) != 3:
        return None
    if not host and isinstance(asked, Address):
        host = asked.host.encode()
    return named_address(host.removeprefix(b"[").removesuffix(b"]"), port)

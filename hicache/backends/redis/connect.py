"""Connections: TCP, Unix socket, TLS, passwords, and the questions to sentinels.

Resolving a name, a connect and a TLS handshake may each take long and cannot be interrupted. They run in a thread of
their own, which the caller leaves when its time is over; a socket that is still opened then is closed. All replies,
those of sentinels too, are read by a `Channel`, which bounds them.

What a server says about other servers is not trusted: an address that it names is one on the network, never a Unix
socket, is within `allowed_nodes` where these are given, and is spoken to with the TLS of the configuration.

Locking design: `_dials` bounds those threads and decides whether a socket goes to the caller or is closed.
`_first_sentinel` is a hint, which is only assigned. Everything else is set once.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ...config.addresses import Address
from ...errors import ConfigError
from ...supervised import NoThread, SupervisedPool
from ..errors import ErrorKind, StoreError
from .channel import Channel, Reply, command
from .errors import ErrorReply, failure_of
from .options import Access, Endpoint, Mode, UnixSocket, named_address

# Connection attempts of one backend at a time, hanging ones included.
_ATTEMPTS_MAX = 32
# The largest cluster that Redis is made for; a server that names more nodes is not believed.
NODES_MAX = 1000
# Servers that do not know or permit one of these are used all the same.
_OPTIONAL = frozenset({b"HELLO", b"CLIENT"})
_UNABLE = frozenset({ErrorKind.SERVER_ERROR, ErrorKind.ACCESS_DENIED})
_DOWN = frozenset({b"s_down", b"o_down"})
_VERSION_MIN = (6, 2)
_VERSION = re.compile(rb"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])")


class Connector:
    """Opens channels to servers, and asks sentinels. Thread-safe; its methods block until their deadline or until
    `timeout_s` has passed, for each sentinel again."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._dials = SupervisedPool[Any]("redis-connect", _ATTEMPTS_MAX, linger_s=0.0)
        self._first_sentinel = 0  # where to begin: the one that answered last, or the one behind one that did not

    def open(self, endpoint: Endpoint, deadline: float, *, read_only: bool, no_touch: bool) -> Channel:
        """A channel to a server, entered. With `read_only` a cluster's replica serves on it; with `no_touch` nothing
        that is looked at on it counts as used, if the server is one that can do so and lets us. Raises StoreError."""
        orders = _login(self._access.login)
        if self._access.db:
            orders.append((b"SELECT", b"%d" % self._access.db))
        # At least one request: a server that refuses connections says so in place of the first reply.
        orders.append((b"HELLO", b"2"))
        if read_only:
            orders.append((b"READONLY",))
        if no_touch:
            orders.append((b"CLIENT", b"NO-TOUCH", b"ON"))
        return self._enter(endpoint, orders, deadline)[0]

    def find_primary(self, deadline: float) -> Address:
        """The primary, as a sentinel names it. Raises StoreError."""
        found = self._ask_sentinels(b"MASTER", lambda reply: [reply], deadline)
        if not found:
            raise StoreError(ErrorKind.NO_PRIMARY)
        return found[0]

    def find_replicas(self, deadline: float) -> list[Address]:
        """The replicas that a sentinel thinks alive. Raises StoreError."""
        return self._ask_sentinels(b"REPLICAS", lambda reply: reply, deadline)

    def _ask_sentinels(self, what: bytes, entries: Callable[[Reply], Reply], deadline: float) -> list[Address]:
        """What the first one says that knows something: each has its time, so that one that hangs does not take all."""
        sentinels, first = self._access.addresses, self._first_sentinel
        question = (b"SENTINEL", what, (self._access.options.service or "").encode(errors="surrogateescape"))
        failures: list[StoreError] = []
        for number in (*range(first, len(sentinels)), *range(first)):
            try:
                # Sentinels have no databases.
                orders = [*_login(self._access.sentinel_login), question]
                channel, reply = self._enter(sentinels[number], orders, deadline)
                channel.close()
                found = self._alive(entries(reply))
            except StoreError as failure:
                failures.append(failure)
                # Also for the next call, if the time of this one is over.
                self._first_sentinel = (number + 1) % len(sentinels)
                continue
            if found:
                self._first_sentinel = number
                return found
        if len(failures) == len(sentinels):
            raise failures[-1]
        return []

    def _alive(self, entries: Reply) -> list[Address]:
        if not isinstance(entries, list) or len(entries) > NODES_MAX:
            raise StoreError(ErrorKind.PROTOCOL, "SENTINEL has a reply of another form")
        found = [_facts(entry) for entry in entries]
        return [
            named_node(self._access, _bytes(facts, b"ip"), facts.get(b"port"))
            for facts in found
            if _DOWN.isdisjoint(_bytes(facts, b"flags").split(b","))
        ]

    def _enter(self, endpoint: Endpoint, orders: Sequence[Sequence[bytes]], deadline: float) -> tuple[Channel, Reply]:
        """A channel on which a server has taken the orders, and its last reply. All of it takes `timeout_s` at most."""
        timeout_s = self._access.options.timeout
        wait_s = min(deadline - time.monotonic(), timeout_s)
        late = StoreError(ErrorKind.TIMEOUT if wait_s == timeout_s else ErrorKind.DEADLINE)
        by = time.monotonic() + wait_s
        channel = Channel(self._connect(endpoint, by, late), timeout_s)
        reply: Reply = None
        try:
            channel.send([b"".join([command(*order) for order in orders])], len(orders), by)
            for order in orders:
                reply = channel.read_reply(by)
                if isinstance(reply, ErrorReply) and not (order[0] in _OPTIONAL and reply.kind in _UNABLE):
                    # Our own order is not a secret, and it says which option to correct.
                    detail = reply.failure.detail or "an error"
                    raise StoreError(reply.kind, f"{detail} to {order[0].decode()}")
        except StoreError as failure:
            channel.close()
            raise (late if failure.kind == ErrorKind.DEADLINE else failure) from None
        return channel, reply

    def _connect(self, endpoint: Endpoint, by: float, late: StoreError) -> socket.socket:
        """Open a socket in a thread, and raise `late` if that takes until `by`."""
        try:
            sock = self._dials.call(lambda: _dial(endpoint, self._access), by, late=_close)
            if sock is not None:
                return sock
            failure = late
        except OSError as error:
            failure = failure_of(error)
        except NoThread:
            failure = StoreError(ErrorKind.NO_THREAD)
        # Outside the handler, so that no chain of exceptions holds the text of the TLS library, which quotes names.
        raise failure


def _login(words: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Return the order that enters a server."""
    return [(b"AUTH", *words)] if words else []


def _dial(endpoint: Endpoint, access: Access) -> socket.socket:
    """Open a socket, with TLS where `access` says so. Blocks. Raises OSError."""
    timeout_s = access.options.timeout
    if isinstance(endpoint, UnixSocket):
        sock = socket.socket(socket.AF_UNIX)
    else:
        # A host may have two addresses, of which the first leads nowhere.
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout_s / 2)
    with ExitStack() as undo:
        undo.enter_context(sock)
        sock.settimeout(timeout_s)
        if isinstance(endpoint, UnixSocket):
            sock.connect(endpoint.path)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if access.tls:
                # A context for each connection: certificates may be renewed while engines run.
                options = access.options
                context = ssl.create_default_context(cafile=options.tls_ca_file)
                context.check_hostname = options.tls_check_hostname
                if options.tls_cert_file is not None:
                    context.load_cert_chain(options.tls_cert_file, options.tls_key_file)
                sock = context.wrap_socket(sock, server_hostname=endpoint.host)
        undo.pop_all()
    return sock


def _close(sock: socket.socket | None) -> None:
    if sock is not None:
        sock.close()


def named_node(access: Access, host: bytes, port: Reply) -> Address:
    """The address of a node that a server has named so. Raises StoreError for one that is malformed or not allowed."""
    address = named_address(host, port)
    if address is None:
        raise StoreError(ErrorKind.PROTOCOL, "a server names a node whose address is not valid")
    if not access.allows(address):
        raise StoreError(ErrorKind.FOREIGN_ADDRESS)
    return address


def check_server(channel: Channel, mode: Mode, deadline: float) -> None:
    """Raise StoreError unless a server new enough answers, and ConfigError unless it is one for `mode`."""
    reply = channel.call(b"HELLO", b"2", deadline=deadline)
    if isinstance(reply, ErrorReply):
        if reply.kind is ErrorKind.SERVER_ERROR:
            raise StoreError(ErrorKind.SERVER_ERROR, "older than Redis 6.2; use Redis 6.2 or later, or Valkey")
        raise reply.failure
    facts = _facts(reply)
    match = _VERSION.match(_bytes(facts, b"version"))
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < _VERSION_MIN:
        text = "version {}.{}".format(*version) if match else "no version"
        raise StoreError(ErrorKind.SERVER_ERROR, f"{text}; use Redis 6.2 or later, or Valkey")
    found = {b"sentinel": "sentinels", b"cluster": "cluster"}.get(_bytes(facts, b"mode"), "url or unix_socket")
    wanted = "cluster" if mode == "cluster" else "url or unix_socket"
    if found != wanted:
        raise ConfigError(f"backend redis: a server of another kind answers; name it under {found}, not {wanted}")


def _facts(reply: Reply) -> dict[bytes, Reply]:
    """The values of a list of names and values. Raises StoreError for another reply."""
    if not isinstance(reply, list):
        raise StoreError(ErrorKind.PROTOCOL, "a reply has no list of facts")
    pairs = iter(reply)
    return {name: value for name, value in zip(pairs, pairs, strict=False) if isinstance(name, bytes)}


def _bytes(facts: Mapping[bytes, Reply], name: bytes) -> bytes:
    value = facts.get(name)
    return value if isinstance(value, bytes) else b""

"""Connections: redis-py opens them and logs in, each with a `Channel` as its parser. Also the requests to sentinels.

Resolving a name, connecting, a TLS handshake and a provider of credentials may each take long and cannot be
interrupted. They run on a separate thread, which the caller abandons at its deadline; a connection that opens later is
closed. redis-py's pools, `Sentinel` and `RedisCluster` are not used: they open connections on the caller's thread
without a deadline, take no parser, and trust the nodes that a server names. docs/backends/redis.md says more.

A server is not trusted about other servers. An address that it names must be a network address, never a Unix socket,
and within `allowed_nodes` if given. Connections to it use the configured TLS.

Locking design: `_dials` limits those threads and decides whether a connection goes to the caller or is closed.
`_first_sentinel` is a hint, which is only assigned. Everything else is set once.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from redis.connection import Connection, UnixDomainSocketConnection
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError

from ...clock import SYSTEM_CLOCK, Clock
from ...config.addresses import Address
from ...supervised import NoThread, SupervisedPool
from ..errors import ErrorKind, StoreError
from ..rotated import Rotated
from .channel import Channel, Reply, command
from .errors import ErrorReply, failure_of
from .options import Endpoint, Mode, RedisAccess, named_address

# Concurrent connection attempts of one backend, including hanging ones.
_ATTEMPTS_MAX = 32
# The largest cluster that Redis supports. A reply that names more nodes is rejected.
NODES_MAX = 1000
# An error reply to one of these commands does not end the login; that to HELLO is read later.
_OPTIONAL = frozenset({b"HELLO", b"CLIENT"})
_UNABLE = frozenset({ErrorKind.SERVER_ERROR, ErrorKind.ACCESS_DENIED})
_DOWN = frozenset({b"s_down", b"o_down"})
_VERSION_MIN = (6, 2)
_VERSION = re.compile(rb"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])")

_Opened: TypeAlias = tuple[Channel, Reply]
_Login: TypeAlias = Rotated[CredentialProvider | None]


class Connector:
    """Opens channels to servers and queries sentinels. Thread-safe. Its methods block at most until their deadline, and
    for at most `timeout` per server or sentinel."""

    def __init__(self, access: RedisAccess, clock: Clock = SYSTEM_CLOCK) -> None:
        self._access = access
        self._clock = clock
        self._dials = SupervisedPool[Any]("redis-connect", _ATTEMPTS_MAX, linger_s=0.0, clock=clock)
        self._first_sentinel = 0  # the sentinel to query first: the last that answered, or the next after a failed one

    def open(self, endpoint: Endpoint, deadline: float, *, read_only: bool, no_touch: bool) -> Channel:
        """Return a channel to a server, logged in. With `read_only`, a cluster's replica serves reads on it. With
        `no_touch`, its commands do not refresh recency, if the server supports and permits that. Raises StoreError,
        `unsupported` if the server runs in a different mode."""
        orders: list[Sequence[bytes]] = [(b"HELLO", b"2")]
        if self._access.db:
            orders.append((b"SELECT", b"%d" % self._access.db))
        if read_only:
            orders.append((b"READONLY",))
        if no_touch:
            orders.append((b"CLIENT", b"NO-TOUCH", b"ON"))
        channel, reply = self._enter(endpoint, self._access.login, orders, deadline)
        try:
            _check_server(reply, self._access.mode)
        except StoreError:
            channel.close()
            raise
        return channel

    def find_primary(self, deadline: float) -> Address:
        """Return the primary that a sentinel names. Raises StoreError."""
        found = self._ask_sentinels(b"MASTER", lambda reply: [reply], deadline)
        if not found:
            raise StoreError(ErrorKind.NO_PRIMARY)
        return found[0]

    def find_replicas(self, deadline: float) -> list[Address]:
        """Return the replicas that a sentinel considers alive. Raises StoreError."""
        return self._ask_sentinels(b"REPLICAS", lambda reply: reply, deadline)

    def _ask_sentinels(self, what: bytes, entries: Callable[[Reply], Reply], deadline: float) -> list[Address]:
        """Return the answer of the first sentinel that has one. Each has its own time limit, so that a hanging one does
        not use up all the time."""
        sentinels, first = self._access.addresses, self._first_sentinel
        question = (b"SENTINEL", what, (self._access.options.service or "").encode(errors="surrogateescape"))
        failures: list[StoreError] = []
        for number in (*range(first, len(sentinels)), *range(first)):
            try:
                # Sentinels have no databases.
                channel, reply = self._enter(sentinels[number], self._access.sentinel_login, [question], deadline)
                channel.close()
                found = self._alive(entries(reply))
            except StoreError as failure:
                failures.append(failure)
                # The next call skips this sentinel, even if this call has no time for another.
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
            raise StoreError(ErrorKind.PROTOCOL, "the reply to SENTINEL is not valid")
        found = [_facts(entry) for entry in entries]
        return [
            named_node(self._access, _bytes(facts, b"ip"), facts.get(b"port"))
            for facts in found
            if _DOWN.isdisjoint(_bytes(facts, b"flags").split(b","))
        ]

    def _enter(self, endpoint: Endpoint, login: _Login, orders: Sequence[Sequence[bytes]], deadline: float) -> _Opened:
        """Open a channel, log in, send the commands `orders`, and return the channel with the first reply. Takes at
        most `timeout` in total, twice if the server rejects a password that has been replaced."""

        def dial(provider: CredentialProvider | None) -> _Opened:
            by = min(deadline, self._clock() + self._access.options.timeout)
            work = functools.partial(_open, endpoint, self._access, provider, orders, by, self._clock)
            try:
                opened = self._dials.call(work, by, late=_close)
            except NoThread:
                opened = StoreError(ErrorKind.NO_THREAD)
            if isinstance(opened, tuple):
                return opened
            if opened is None or opened.kind == ErrorKind.DEADLINE:
                opened = StoreError(ErrorKind.TIMEOUT if by < deadline else ErrorKind.DEADLINE)
            raise opened

        return login.run(dial)


def _open(
    endpoint: Endpoint, access: RedisAccess, provider: CredentialProvider | None, orders: Sequence[Sequence[bytes]],
    by: float, clock: Clock,
) -> _Opened | StoreError:
    """Open a connection, on a thread of the connector. Blocks. Returns a failure instead of raising it: the chain of
    exceptions must not hold texts of the server, of the TLS library or of a provider, which may quote secrets."""
    timeout_s = access.options.timeout
    channel = Channel(timeout_s, by, None if access.tls is None else access.tls.get(), clock)
    kind: Any
    place: dict[str, object]
    if isinstance(endpoint, Path):
        kind, place = UnixDomainSocketConnection, {"path": os.fspath(endpoint)}
    else:
        # Half of the time: a host may have two addresses, of which the first does not answer.
        kind, place = Connection, {**endpoint._asdict(), "socket_connect_timeout": timeout_s / 2}
    # Without a Retry, redis-py does not retry; without a `driver_info` it does not send CLIENT SETINFO. Health checks
    # are off by default, and maintenance notifications need protocol 3.
    connection = kind(
        parser_class=lambda socket_read_size: channel, protocol=2, driver_info=None, credential_provider=provider,
        socket_timeout=timeout_s, **place,
    )
    try:
        connection.connect()
        channel.send([b"".join([command(*order) for order in orders])], len(orders), by)
        replies: list[Reply] = []
        for order in orders:
            replies.append(reply := channel.read_reply(by))
            if isinstance(reply, ErrorReply) and not (order[0] in _OPTIONAL and reply.kind in _UNABLE):
                raise _rejected(reply, order[0])
        return channel, replies[0]
    except StoreError as error:
        failure = error
    except ErrorReply as error:
        failure = _rejected(error, b"AUTH")
    except (RedisError, OSError) as error:
        # redis-py's errors have the one of the socket as their context, or none after a false reply to AUTH.
        cause = error.__context__ if isinstance(error, RedisError) else error
        failure = failure_of(cause) if isinstance(cause, OSError) else StoreError(ErrorKind.PROTOCOL, "to AUTH")
    connection.disconnect()
    return StoreError(failure.kind, failure.detail)


def _rejected(reply: ErrorReply, verb: bytes) -> StoreError:
    # The name of our command is not secret, and it shows which option to correct.
    return StoreError(reply.kind, f"{reply.failure.detail or 'an error'} to {verb.decode()}")


def _close(opened: _Opened | StoreError | None) -> None:
    if isinstance(opened, tuple):
        opened[0].close()


def named_node(access: RedisAccess, host: bytes, port: Reply) -> Address:
    """Return the address of a node from the host and port that a server names. Raises StoreError if it is malformed or
    not allowed."""
    address = named_address(host, port)
    if address is None:
        raise StoreError(ErrorKind.PROTOCOL, "a server names a node whose address is not valid")
    if not access.allows(address):
        raise StoreError(ErrorKind.FOREIGN_ADDRESS)
    return address


def _check_server(reply: Reply, mode: Mode) -> None:
    """Raise StoreError unless the reply to HELLO is from a server that is new enough and runs in `mode`."""
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
        raise StoreError(
            ErrorKind.UNSUPPORTED, f"the server is of a different kind; name it under {found}, not {wanted}"
        )


def _facts(reply: Reply) -> dict[bytes, Reply]:
    """Return the values by name, from a list of alternating names and values. Raises StoreError for any other reply."""
    if not isinstance(reply, list):
        raise StoreError(ErrorKind.PROTOCOL, "a reply is not a list")
    pairs = iter(reply)
    return {name: value for name, value in zip(pairs, pairs, strict=False) if isinstance(name, bytes)}


def _bytes(facts: Mapping[bytes, Reply], name: bytes) -> bytes:
    value = facts.get(name)
    return value if isinstance(value, bytes) else b""

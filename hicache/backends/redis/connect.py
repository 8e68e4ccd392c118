"""Connections through the `redis` package: TCP, Unix socket, TLS, passwords, sentinels.

Resolving a name, a handshake and a round of sentinels may each take long and cannot be broken off. They run in a thread
of their own, which is left alone when the caller's time is over; what it still brings is closed.

Locking design: `_attempts` bounds those threads. Each job has one lock, held for an assignment, that decides whether
its result goes to the caller or is thrown away. `_first_sentinel` is a hint, which is only assigned. Everything else is
set once.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

from ...errors import ConfigError
from .channel import Channel, OpenConnection, Reply
from .errors import ErrorReply, Fault, Trouble, trouble_of
from .options import Address, Login, Mode, RedisOptions, Tls

# Connection attempts of one backend at a time, hanging ones included.
_ATTEMPTS_MAX = 32
_VERSION_MIN = (6, 2)
_INSTALL = 'the redis package is not installed; pip install "hicache[redis]"'

Result = TypeVar("Result")


class _Job(Generic[Result]):
    """A piece of work in a thread of its own, whose caller may leave it."""

    def __init__(
        self, work: Callable[[], Result], discard: Callable[[Result], None], ended: Callable[[], None]
    ) -> None:
        self._work = work
        self._discard = discard
        self._ended = ended
        self._lock = threading.Lock()
        self._left = False
        self._done = threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            result = self._work()
        except BaseException as error:  # the thread ends here; the caller raises it, or nobody waits any more
            self._error = error
        else:
            with self._lock:
                self._result = result
                late = self._left
            if late:
                self._discard(result)
        finally:
            self._ended()
            self._done.set()

    def result(self, wait_s: float) -> Result:
        """Wait for it. Raises what the work raised, and TimeoutError if that takes too long."""
        if not self._done.wait(wait_s):
            with self._lock:
                self._left = True
                if self._result is None:
                    raise TimeoutError
        if self._error is not None:
            raise self._error
        return cast(Result, self._result)


class Connector:
    """Opens channels to servers, and asks sentinels. Thread-safe; its methods block until their deadline or until
    `timeout_s` has passed, for each sentinel again.

    Raises ConfigError without the `redis` package.
    """

    def __init__(self, options: RedisOptions) -> None:
        try:
            import redis  # noqa: PLC0415 - an optional dependency
            import redis.sentinel  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(f"backend redis: {_INSTALL}") from error
        self._redis: Any = redis
        self._options = options
        self._attempts = threading.BoundedSemaphore(_ATTEMPTS_MAX)
        self._first_sentinel = 0  # where to begin: the one that answered last, or the one behind one that did not

    def open(self, address: Address, deadline: float, *, read_only: bool, no_touch: bool) -> Channel:
        """A channel to a server, entered. With `read_only` a cluster's replica serves on it; with `no_touch` nothing
        that is looked at on it counts as used, if the server is one that can do so and lets us. Raises Trouble."""
        connection = self._connection(address, self._options.login, self._options.db)

        def connect() -> Channel:
            connection.connect()
            return Channel(cast(OpenConnection, connection), self._options.timeout_s)

        channel = self._within(connect, Channel.close, deadline)
        if read_only:
            self._expect_ok(channel, b"READONLY", deadline)
        if no_touch:
            channel.call(b"CLIENT", b"NO-TOUCH", b"ON", deadline=deadline)  # an error is no harm to the work itself
        return channel

    @staticmethod
    def _expect_ok(channel: Channel, name: bytes, deadline: float) -> None:
        reply = channel.call(name, deadline=deadline)
        if isinstance(reply, ErrorReply):
            channel.close()
            raise reply.trouble

    def find_primary(self, deadline: float) -> Address:
        """The primary, as a sentinel names it. Raises Trouble."""
        return self._ask_sentinels(lambda sentinel, service: [sentinel.discover_master(service)], deadline)[0]

    def find_replicas(self, deadline: float) -> list[Address]:
        """The replicas that a sentinel thinks alive. Raises Trouble."""
        return self._ask_sentinels(lambda sentinel, service: sentinel.discover_slaves(service), deadline)

    def _ask_sentinels(self, ask: Callable[[Any, str], Any], deadline: float) -> list[Address]:
        """What the first one says that knows something: each has its time, so that one that hangs does not take all."""
        sentinels, first = self._options.addresses, self._first_sentinel
        troubles: list[Trouble] = []
        for number in (*range(first, len(sentinels)), *range(first)):
            discover = functools.partial(self._discover, sentinels[number], ask)
            try:
                found = self._within(discover, lambda result: None, deadline)
            except Trouble as trouble:
                troubles.append(trouble)
                # Also for the next call, if the time of this one is over.
                self._first_sentinel = (number + 1) % len(sentinels)
                continue
            if found:
                self._first_sentinel = number
                return found
        if len(troubles) == len(sentinels):
            raise troubles[-1]
        return []

    def _discover(self, address: Address, ask: Callable[[Any, str], Any]) -> list[Address]:
        options, redis = self._options, self._redis
        # Sentinels have no databases. Trying again is the guard's business.
        settings = {**self._settings(options.sentinel_login), **_tls_settings(options.tls, for_client=True),
                    "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0)}  # fmt: skip
        sentinel = redis.sentinel.Sentinel([(address.host, address.port)], sentinel_kwargs=settings)
        try:
            return [Address(host, int(port)) for host, port in ask(sentinel, options.service or "")]
        finally:
            for client in sentinel.sentinels:
                client.close()

    def _settings(self, login: Login) -> dict[str, Any]:
        timeout_s = self._options.timeout_s
        return {
            "username": login.username, "password": login.password, "protocol": 2,
            # A host may have two addresses, of which the first leads nowhere.
            "socket_timeout": timeout_s, "socket_connect_timeout": timeout_s / 2,
        }  # fmt: skip

    def _connection(self, address: Address, login: Login, db: int) -> Any:
        settings = {**self._settings(login), "db": db}
        if not address.port:
            return self._redis.UnixDomainSocketConnection(path=address.host, **settings)
        settings |= {"host": address.host, "port": address.port}
        if self._options.tls is None:
            return self._redis.Connection(**settings)
        return self._redis.SSLConnection(**settings, **_tls_settings(self._options.tls, for_client=False))

    def _within(self, work: Callable[[], Result], discard: Callable[[Result], None], deadline: float) -> Result:
        """Do `work` aside and give up waiting for it when time is over."""
        wait_s = min(deadline - time.monotonic(), self._options.timeout_s)
        late = Trouble(Fault.TIMEOUT if wait_s == self._options.timeout_s else Fault.DEADLINE)
        if wait_s <= 0 or not self._attempts.acquire(timeout=wait_s):
            raise late
        job = _Job(work, discard, self._attempts.release)
        threading.Thread(target=job.run, name="hicache-redis-connect", daemon=True).start()
        try:
            return job.result(wait_s)
        except TimeoutError:
            raise late from None
        except (OSError, self._redis.RedisError) as error:
            raise trouble_of(error) from None  # its text may hold the password, which a traceback would show


def _tls_settings(tls: Tls | None, *, for_client: bool) -> dict[str, Any]:
    if tls is None:
        return {}
    settings: dict[str, Any] = {
        "ssl_ca_certs": tls.ca_file, "ssl_certfile": tls.cert_file, "ssl_keyfile": tls.key_file,
        "ssl_check_hostname": tls.check_hostname, "ssl_cert_reqs": "required",
    }  # fmt: skip
    return settings | ({"ssl": True} if for_client else {})


def check_server(channel: Channel, mode: Mode, deadline: float) -> None:
    """Raise Trouble unless a server new enough answers, and ConfigError unless it is one for `mode`."""
    reply = channel.call(b"HELLO", b"2", deadline=deadline)
    if isinstance(reply, ErrorReply):
        if reply.fault is Fault.REPLY:
            raise Trouble(Fault.REPLY, "older than Redis 6.2; use Redis 6.2 or later, or Valkey")
        raise reply.trouble
    if not isinstance(reply, list):
        raise Trouble(Fault.PROTOCOL, "HELLO has no list as its answer")
    pairs = iter(reply)
    facts = {name: value for name, value in zip(pairs, pairs, strict=False) if isinstance(name, bytes)}
    version = _bytes(facts, b"version").decode(errors="replace")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < _VERSION_MIN:
        raise Trouble(Fault.REPLY, f"version {version or 'unknown'}; use Redis 6.2 or later, or Valkey")
    found = {b"sentinel": "sentinels", b"cluster": "cluster"}.get(_bytes(facts, b"mode"), "url or unix_socket")
    wanted = "cluster" if mode == "cluster" else "url or unix_socket"
    if found != wanted:
        raise ConfigError(f"backend redis: a server of another kind answers; name it under {found}, not {wanted}")


def _bytes(facts: Mapping[bytes, Reply], name: bytes) -> bytes:
    value = facts.get(name)
    return value if isinstance(value, bytes) else b""

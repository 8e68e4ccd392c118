"""Short requests about many pages: one send and one wait per server for up to 8,192 keys.

Locking design: a `KeyPipeline` belongs to one call. It leases connections to several servers, in the order of their
addresses, so that two calls cannot deadlock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...clock import Clock
from ...config.redis_storage import RedisStorageOptions
from ...supervised import SupervisedPool
from ..errors import ErrorKind, StoreError
from .channel import Channel, Part, command
from .errors import ErrorReply
from .pool import Pool, Pools, Purpose
from .routing import Redirects, Router, Server

# A server that takes longer than half of the time of a call is down, unless that is shorter than this.
_SHORT_S = 0.1
# Keys in one send: limits what a server must buffer, and is larger than any batch of an engine.
_KEYS_PER_SEND = 8192
ASKING = command(b"ASKING")
# The line that a server sent about a page, or the kind of the error that prevented it.
Answer: TypeAlias = bytes | str
YES, NO = b":1", b":0"

# Removes a value only if it is still the one that was read: not a string, or a string of that length and first bytes.
_REMOVE = b"""\
local key, bytes, head = KEYS[1], tonumber(ARGV[1]), ARGV[2]
if redis.call('TYPE', key).ok == 'string' then
  if redis.call('STRLEN', key) ~= bytes then return 0 end
  if #head > 0 and redis.call('GETRANGE', key, 0, #head - 1) ~= head then return 0 end
end
return redis.call('UNLINK', key)
"""


@dataclass(frozen=True, slots=True)
class StoredValue:
    """The value stored under a page's key: its length, -1 if it is not a string, and its first bytes if they were read.
    """

    length: int
    head: bytes = b""


@dataclass(frozen=True, slots=True)
class RedisContext:
    """The state that all calls of one driver share."""

    options: RedisStorageOptions
    router: Router
    pools: Pools
    workers: SupervisedPool[Any]
    clock: Clock

    def names(self, namespace: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """Return the Redis keys of pages."""
        head = f"{self.options.key_prefix}{namespace.hex()}:".encode()
        return [head + key.hex().encode() for key in keys]


@dataclass(frozen=True, slots=True)
class _Sent:
    server: Server
    pool: Pool
    channel: Channel
    positions: list[int]
    asking: bool


class KeyPipeline:
    """Sends one request per key; each has a one-line reply."""

    def __init__(
        self,
        context: RedisContext,
        names: Sequence[bytes],
        request: Callable[[int], bytes],
        *,
        to_read: bool,
        deadline: float,
    ) -> None:
        self._context = context
        self._names = names
        self._request = request
        self._to_read = to_read
        self._deadline = deadline
        self._again: dict[Server, list[int]] = {}
        self._redirects: Redirects = {}
        self._answers: list[Answer] = [ErrorKind.CONNECTION_LOST] * len(names)

    def ask(self) -> list[Answer]:
        """Send the requests for all names and return an answer for each. Blocks. A failing store raises nothing."""
        positions = range(len(self._names))
        for start in range(0, len(positions), _KEYS_PER_SEND):
            self._ask(positions[start : start + _KEYS_PER_SEND])
        return self._answers

    def _ask(self, positions: Sequence[int]) -> None:
        if self._context.clock() >= self._deadline:
            self._fail(positions, StoreError(ErrorKind.DEADLINE), None)
            return
        try:
            groups = self._context.router.by_server(
                positions, self._names, to_read=self._to_read, deadline=self._deadline
            )
        except StoreError as failure:
            self._fail(positions, failure, None)
            return
        self._round(groups, is_asking=False, is_last=False)
        again, self._again = self._again, {}
        followed, refused = self._context.router.follow(self._redirects, self._deadline)
        self._redirects = {}
        self._fail(refused, StoreError(ErrorKind.FOREIGN_ADDRESS), None)
        asking: dict[Server, list[int]] = {}
        for (server, is_asking), found in followed.items():
            (asking if is_asking else again).setdefault(server, []).extend(found)
        self._round(again, is_asking=False, is_last=True)
        self._round(asking, is_asking=True, is_last=True)

    def _round(self, groups: Mapping[Server, list[int]] | Mapping[Server | None, list[int]], *, is_asking: bool,
               is_last: bool) -> None:
        sent: list[_Sent] = []
        with contextlib.ExitStack() as leases:
            for server, positions in sorted(groups.items(), key=lambda group: str(group[0])):
                if server is None:
                    self._fail(positions, StoreError(ErrorKind.NODE_DOWN), None)
                    continue
                try:
                    pool = self._context.pools.of(server.address, Purpose.KEYS, read_only=server.read_only)
                    channel = leases.enter_context(pool.lease(self._share(groups)))
                except StoreError as failure:
                    self._fail(positions, failure, server)
                    continue
                self._send(_Sent(server, pool, channel, positions, is_asking), sent, is_last)
            for job in sent:
                self._receive(job, is_last, self._share(sent))

    def _share(self, servers: Sized) -> float:
        """Return the time until which one of `servers` may take, so that a hanging one leaves time for the others."""
        now_s = self._context.clock()
        return self._deadline if len(servers) == 1 else now_s + (self._deadline - now_s) / 2

    def _send(self, job: _Sent, sent: list[_Sent], is_last: bool) -> None:
        requests: list[Part] = [self._request(position) for position in job.positions]
        replies = len(requests)
        if job.asking:
            requests = [part for request in requests for part in (ASKING, request)]
        try:
            job.channel.send([b"".join(requests)], replies * (1 + job.asking), self._deadline)
        except StoreError as failure:
            self._lost(job, failure, is_last)
        else:
            sent.append(job)

    def _receive(self, job: _Sent, is_last: bool, until: float) -> None:
        step = 1 + job.asking
        try:
            lines = job.channel.read_lines(len(job.positions) * step, until)
        except StoreError as failure:
            self._lost(job, failure, is_last)
            return
        for position, line in zip(job.positions, lines[step - 1 :: step], strict=True):
            if line.startswith(b"-"):
                self._refused(position, ErrorReply(line[1:]), job.server, is_last)
            elif line.startswith(b":"):
                self._answers[position] = line
            else:
                self._fail([position], StoreError(ErrorKind.PROTOCOL), job.server)

    def _lost(self, job: _Sent, failure: StoreError, is_last: bool) -> None:
        """Handle a failed connection. If it died while idle, the requests are repeated; that does not count as a retry.
        """
        if failure.kind == ErrorKind.CONNECTION_LOST and not job.channel.answered and not is_last:
            job.pool.close_idle()
            self._again.setdefault(job.server, []).extend(job.positions)
        else:
            self._fail(job.positions, failure, job.server)

    def _refused(self, position: int, error: ErrorReply, server: Server, is_last: bool) -> None:
        kind = error.kind
        target = None if is_last else self._context.router.redirection(error, server)
        if target is None:
            self._fail([position], error.failure, server)
            return
        if kind is ErrorKind.MOVED:
            self._context.router.note(kind, server)
        self._redirects.setdefault((target, kind is ErrorKind.ASK), []).append(position)

    def _fail(self, positions: Sequence[int], failure: StoreError, server: Server | None) -> None:
        if not positions:
            return
        kind = failure.kind
        if kind == ErrorKind.DEADLINE and self._deadline - self._context.clock() > _SHORT_S:
            kind = ErrorKind.TIMEOUT  # of this server's share of the time
        kind = self._context.router.note(kind, server)
        for position in positions:
            self._answers[position] = kind


def exists(
    context: RedisContext, names: Sequence[bytes], *, to_read: bool, refresh: bool, deadline: float
) -> list[Answer]:
    """Return YES for each stored name. With `refresh` this counts as a use; a plain lookup does not."""
    ttl_s = context.options.ttl if refresh else None
    if ttl_s is None:
        request = _template(b"TOUCH" if refresh else b"EXISTS", names)
    else:
        request = _template(b"PEXPIRE", names, b"%d" % round(ttl_s * 1000))
    return KeyPipeline(context, names, request, to_read=to_read, deadline=deadline).ask()


def unlink(context: RedisContext, names: Sequence[bytes], deadline: float) -> list[Answer]:
    """Remove the values of `names`. Return YES for each that was stored."""
    return KeyPipeline(context, names, _template(b"UNLINK", names), to_read=False, deadline=deadline).ask()


def unlink_same(
    context: RedisContext, names: Sequence[bytes], found: Sequence[StoredValue], deadline: float
) -> list[Answer]:
    """Remove each value of `names`, unless it has changed since it was `found`. Return YES for each removed one."""

    def request(position: int) -> bytes:
        value = found[position]
        return command(b"EVAL", _REMOVE, b"1", names[position], b"%d" % value.length, value.head)

    return KeyPipeline(context, names, request, to_read=False, deadline=deadline).ask()


def flags(answers: Iterable[Answer]) -> list[bool | str]:
    """Return whether each name is stored, or the kind of the failure."""
    return [answer == YES if isinstance(answer, bytes) else answer for answer in answers]


def failures(answers: Iterable[Answer]) -> list[str]:
    """Return the error kinds among `answers`."""
    return [answer for answer in answers if not isinstance(answer, bytes)]


def _template(verb: bytes, names: Sequence[bytes], *more: bytes) -> Callable[[int], bytes]:
    """Return a function that makes the request `verb name more...` for a position. All names of one backend are equally
    long, so the requests differ only in the name."""
    if not names:
        return lambda position: b""
    before, after = command(verb, names[0], *more).split(names[0], 1)
    return lambda position: before + names[position] + after

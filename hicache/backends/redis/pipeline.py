"""Requests about many names: grouped by server, and made again where a server redirects them or a connection was dead.

`Requests` is that, for bodies (see `batches`) and for keys. `KeyRequests` sends short requests: one send and one wait
per server for up to 8,192 keys.

Locking design: an object of these classes belongs to one call. `_lane` runs on several threads, each with its own
connection. They take positions from a deque, record outcomes as `pages` describes, append to lists and set flags; each
of these is atomic in CPython. Positions that no lane took get their outcome after all lanes have ended.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ...clock import Clock
from ...config.redis_storage import RedisStorageOptions
from ...supervised import SupervisedPool
from ..errors import ErrorKind, StoreError
from .channel import Channel, command
from .errors import ErrorReply
from .pool import Pools, Purpose
from .routing import Redirects, Router, Server

# Requests are made again on another connection or server in three cases: after MOVED or ASK (once), after an oversized
# body closed the connection, and after a pooled connection was found closed. A server that causes more such rounds
# without progress is misbehaving.
_VAIN_ROUNDS_MAX = 4
# Errors that concern a single page. After any other error the call sends no more requests to that server.
_OF_ONE_PAGE = frozenset({ErrorKind.WRONG_TYPE, ErrorKind.MOVED, ErrorKind.ASK, ErrorKind.NODE_DOWN})
# A server that takes longer than half of the time of a call is down, unless that is shorter than this.
_SHORT_S = 0.1
# Keys in one send: limits what a server must buffer, and is larger than any batch of an engine.
_KEYS_PER_SEND = 8192
ASKING = command(b"ASKING")
# The line that a server sent about a page, or the kind of the error that prevented it.
Answer: TypeAlias = bytes | str
YES = b":1"

# Removes a value only if it is still the one that was read: not a string, or a string of that length and first bytes.
_REMOVE = b"""\
local key, bytes, head = KEYS[1], tonumber(ARGV[1]), ARGV[2]
if redis.call('TYPE', key).ok == 'string' then
  if redis.call('STRLEN', key) ~= bytes then return 0 end
  if #head > 0 and redis.call('GETRANGE', key, 0, #head - 1) ~= head then return 0 end
end
return redis.call('UNLINK', key)
"""


class StoredValue(NamedTuple):
    """The value stored under a page's key: its length, -1 if it is not a string, and its first bytes if read."""

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
    has_codec: bool  # False for a driver that moves objects of any length

    def names(self, namespace: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """Return the Redis keys of pages."""
        head = f"{self.options.key_prefix}{namespace.hex()}:".encode()
        return [head + key.hex().encode() for key in keys]


@dataclass(slots=True, eq=False)
class Group:
    """The remaining positions of one server. After `stop` no more are requested; `failure` is the reason."""

    server: Server
    todo: deque[int]
    asking: bool
    stop: bool = False
    failure: StoreError | None = None


class Requests(ABC):
    """The requests of one call, one per name, over up to `width` connections per server, one for each `lane_length`
    requests. Positions from `_end` on are not tried."""

    def __init__(
        self, context: RedisContext, names: Sequence[bytes], deadline: float, *, to_read: bool, purpose: Purpose,
        width: int = 1, lane_length: int = 1,
    ) -> None:
        self._context = context
        self._names = names
        self._deadline = deadline
        self._to_read = to_read
        self._purpose = purpose
        self._width, self._lane_length = width, lane_length
        self._again: list[int] = []
        self._redirects: Redirects = {}
        self._redirected: set[int] = set()
        self._end = len(names)

    @abstractmethod
    def _exchange(self, channel: Channel, group: Group, pending: deque[int], until: float) -> None:
        """Take positions from `group.todo` until it is empty, send their requests and record the outcomes. `pending`
        are the positions in flight. Raises StoreError."""

    @abstractmethod
    def _record(self, position: int, kind: str) -> None:
        """Record the kind of error as the outcome of a position."""

    def _until(self, groups: Sequence[Group]) -> float:
        """Return the time until which the requests to each of `groups` may take."""
        return self._deadline

    def move(self, positions: Sequence[int]) -> None:
        """Make the requests at `positions` and record their outcomes. Blocks. A failing store raises nothing."""
        groups = self._grouped(positions)
        left, vain = len(positions), 0
        while groups and vain < _VAIN_ROUNDS_MAX:
            until = self._until(groups)
            # The first lane of each server comes first, so that a hanging server does not take all threads.
            lanes = [
                (group, lane == 0, until)
                for lane in range(self._width)
                for group in groups if lane * self._lane_length < len(group.todo)
            ]
            self._context.workers.run(len(lanes), functools.partial(self._lane, lanes))
            for group in groups:
                # The positions that no lane has taken are requested again, unless the group has failed.
                remaining = [position for position in group.todo if position < self._end]
                if group.failure is None:
                    self._again += remaining
                else:
                    self._fail(remaining, group.failure, group.server)
            again, self._again = self._again, []
            groups = self._grouped(sorted(again)) if again else []
            followed, refused = self._context.router.follow(self._redirects, self._deadline)
            self._redirects = {}
            self._fail(refused, StoreError(ErrorKind.FOREIGN_ADDRESS))
            groups += [Group(server, deque(sorted(found)), asking) for (server, asking), found in followed.items()]
            before, left = left, sum(len(group.todo) for group in groups)
            vain += left >= before
        for group in groups:
            self._fail(group.todo, StoreError(ErrorKind.CONNECTION_LOST))

    def _grouped(self, positions: Sequence[int]) -> list[Group]:
        try:
            by_server = self._context.router.by_server(
                positions, self._names, to_read=self._to_read, deadline=self._deadline
            )
        except StoreError as failure:
            self._fail(positions, failure)
            return []
        self._fail(by_server.pop(None, []), StoreError(ErrorKind.NODE_DOWN))
        return [Group(server, deque(found), False) for server, found in by_server.items() if server is not None]

    def _lane(self, lanes: Sequence[tuple[Group, bool, float]], number: int) -> None:
        group, is_first, until = lanes[number]
        if group.failure is not None or not group.todo:
            return
        server, pending = group.server, deque[int]()
        try:
            pool = self._context.pools.of(server.address, self._purpose, read_only=server.read_only)
            # Only the first lane waits for a connection if other calls use all of them: one lane is enough.
            with pool.lease(until) if is_first else pool.lease_until(-math.inf, until) as channel:
                if channel is None:
                    return
                try:
                    self._exchange(channel, group, pending, until)
                except StoreError as failure:
                    if failure.kind != ErrorKind.CONNECTION_LOST or channel.answered:
                        self._fail(pending, failure, server)
                        raise
                    # The connection died while it was idle: this does not count as a try.
                    self._again += pending
                    pool.close_idle()
        except StoreError as failure:
            group.failure = failure

    def _refused(self, group: Group, position: int, error: ErrorReply) -> None:
        failure = error.failure
        kind = failure.kind
        target = self._context.router.redirection(error, group.server)
        if target is not None and position not in self._redirected:
            self._redirected.add(position)
            self._context.router.note(kind, group.server)
            self._redirects.setdefault((target, kind == ErrorKind.ASK), []).append(position)
            return
        self._fail([position], failure, group.server)
        if kind not in _OF_ONE_PAGE:
            group.stop, group.failure = True, failure

    def _fail(self, positions: Iterable[int], failure: StoreError, server: Server | None = None) -> None:
        kind = self._context.router.note(failure.kind, server)
        for position in positions:
            self._record(position, kind)


class KeyRequests(Requests):
    """Sends one request per key; each has a one-line reply."""

    def __init__(
        self, context: RedisContext, names: Sequence[bytes], request: Callable[[int], bytes], *, to_read: bool,
        deadline: float,
    ) -> None:
        super().__init__(context, names, deadline, to_read=to_read, purpose=Purpose.KEYS)
        self._request = request
        self._answers: list[Answer] = [ErrorKind.CONNECTION_LOST] * len(names)

    def ask(self) -> list[Answer]:
        """Send the requests for all names and return an answer for each. Blocks. A failing store raises nothing."""
        positions = range(len(self._names))
        for start in range(0, len(positions), _KEYS_PER_SEND):
            some = positions[start : start + _KEYS_PER_SEND]
            if self._context.clock() >= self._deadline:
                self._fail(some, StoreError(ErrorKind.DEADLINE))
            else:
                self.move(some)
        return self._answers

    def _until(self, groups: Sequence[Group]) -> float:
        """See Requests. A server that hangs leaves time to ask the others for its pages."""
        now_s = self._context.clock()
        return self._deadline if len(groups) == 1 else now_s + (self._deadline - now_s) / 2

    def _exchange(self, channel: Channel, group: Group, pending: deque[int], until: float) -> None:
        """See Requests. One send and one wait."""
        pending.extend(group.todo)
        group.todo.clear()
        step, requests = 1 + group.asking, [self._request(position) for position in pending]
        if group.asking:
            requests = [part for request in requests for part in (ASKING, request)]
        channel.send([b"".join(requests)], len(requests), until)
        lines = channel.read_lines(len(requests), until)
        for position, line in zip(pending, lines[step - 1 :: step], strict=True):
            if line.startswith(b"-"):
                self._refused(group, position, ErrorReply(line[1:]))
            elif line.startswith(b":"):
                self._answers[position] = line
            else:
                self._fail([position], StoreError(ErrorKind.PROTOCOL), group.server)

    def _record(self, position: int, kind: str) -> None:
        self._answers[position] = kind

    def _fail(self, positions: Iterable[int], failure: StoreError, server: Server | None = None) -> None:
        if failure.kind == ErrorKind.DEADLINE and self._deadline - self._context.clock() > _SHORT_S:
            failure = StoreError(ErrorKind.TIMEOUT)  # of this server's share of the time
        super()._fail(positions, failure, server)


def exists(
    context: RedisContext, names: Sequence[bytes], *, to_read: bool, refresh: bool, deadline: float
) -> list[Answer]:
    """Return YES for each stored name. With `refresh` this counts as a use; a plain lookup does not."""
    ttl_s = context.options.ttl if refresh else None
    if ttl_s is None:
        request = template(b"TOUCH" if refresh else b"EXISTS", names)
    else:
        request = template(b"PEXPIRE", names, b"%d" % round(ttl_s * 1000))
    return KeyRequests(context, names, request, to_read=to_read, deadline=deadline).ask()


def unlink(context: RedisContext, names: Sequence[bytes], deadline: float) -> list[Answer]:
    """Remove the values of `names`. Return YES for each that was stored."""
    return KeyRequests(context, names, template(b"UNLINK", names), to_read=False, deadline=deadline).ask()


def unlink_same(
    context: RedisContext, names: Sequence[bytes], found: Sequence[StoredValue], deadline: float
) -> list[Answer]:
    """Remove each value of `names`, unless it has changed since it was `found`. Return YES for each removed one."""

    def request(position: int) -> bytes:
        value = found[position]
        return command(b"EVAL", _REMOVE, b"1", names[position], b"%d" % value.length, value.head)

    return KeyRequests(context, names, request, to_read=False, deadline=deadline).ask()


def flags(answers: Iterable[Answer]) -> list[bool | str]:
    """Return whether each name is stored, or the kind of the failure."""
    return [answer == YES if isinstance(answer, bytes) else answer for answer in answers]


def failures(answers: Iterable[Answer]) -> list[str]:
    """Return the error kinds among `answers`."""
    return [answer for answer in answers if not isinstance(answer, bytes)]


def template(verb: bytes, names: Sequence[bytes], *more: bytes) -> Callable[[int], bytes]:
    """Return a function that makes the request `verb name more...` for a position. All names of one backend are equally
    long, so the requests differ only in the name."""
    if not names:
        return lambda position: b""
    before, after = command(verb, names[0], *more).split(names[0], 1)
    return lambda position: before + names[position] + after

"""Moves the bodies of one `batch_get` or `batch_set`: several connections per server, each with a few pages in flight.

Locking design: an object of these classes belongs to one call. `_lane` runs on several threads, each with its own
connection. They take positions from a deque, record outcomes as `pages` describes, append to lists and set flags; each
of these is atomic in CPython. Pages that no lane took get their outcome after all lanes have ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from ...frame import HEADER_BYTES, Damage, stored_time
from ..base import SetOutcome
from ..errors import ErrorKind, StoreError
from ..pages import SETTLE_S, PageReads, PageWrites
from .channel import Channel, Oversize, Part, command
from .errors import ErrorReply
from .pipeline import ASKING, YES, RedisContext, StoredValue, exists, failures, unlink
from .pool import Purpose
from .routing import Redirects, Server

# Pages are requested again on another connection or server in three cases: after MOVED or ASK (once), after an
# oversized body closed the connection, and after a pooled connection was found closed. A server that causes more such
# rounds without progress is misbehaving.
_VAIN_ROUNDS_MAX = 4
# Errors that concern a single page. After any other error the batch sends no more requests to that server.
_OF_ONE_PAGE = frozenset({ErrorKind.WRONG_TYPE, ErrorKind.MOVED, ErrorKind.ASK, ErrorKind.NODE_DOWN})
# One thread moves this many bytes before a second thread would wake up.
_LANE_BYTES = 256 << 10
# Pages in flight on one connection. With the shortest pages, this many fill the default `pipeline`.
_DEPTH_MAX = 128

Pages = TypeVar("Pages", PageReads[StoredValue], PageWrites)


class _Group:
    """The remaining pages of one server. After `stop` no more are requested; `failure` is the reason."""

    def __init__(self, server: Server, positions: Iterable[int], asking: bool) -> None:
        self.server = server
        self.todo = deque(positions)
        self.asking = asking
        self.stop = False
        self.failure: StoreError | None = None


class _Transfer(ABC, Generic[Pages]):
    """Moves the bodies of pages."""

    def __init__(self, context: RedisContext, pages: Pages, *, to_read: bool) -> None:
        self._context = context
        self._pages: Pages = pages
        self._deadline = pages.deadline
        self._to_read = to_read
        self._names = context.names(pages.codec.namespace, pages.keys)
        self._depth = min(_DEPTH_MAX, max(2, context.options.pipeline // pages.codec.frame_bytes))
        self._again: list[int] = []
        self._redirects: Redirects = {}
        self._redirected: set[int] = set()
        self._end = len(pages)  # pages from this position on are not tried

    @abstractmethod
    def _request(self, position: int) -> list[Part]:
        """Return the request for one page."""

    @abstractmethod
    def _receive(self, channel: Channel, position: int) -> ErrorReply | None:
        """Read the reply and record the page's outcome; return None. Return an error reply instead if it leaves the
        outcome open. Raises StoreError, or Oversize after recording the outcome."""

    def move(self, positions: Sequence[int]) -> None:
        """Move the pages and record their outcomes; pages from `_end` on may stay untried. Blocks. A failing store
        raises nothing."""
        groups = self._grouped(positions)
        left, vain = len(positions), 0
        while groups and vain < _VAIN_ROUNDS_MAX:
            self._run(groups)
            for group in groups:
                self._settle(group)
            again, self._again = self._again, []
            groups = self._grouped(sorted(again)) if again else []
            groups += self._redirected_groups()
            before, left = left, sum(len(group.todo) for group in groups)
            vain += left >= before
        for group in groups:
            self._fail(group.todo, StoreError(ErrorKind.CONNECTION_LOST))

    def _grouped(self, positions: Sequence[int]) -> list[_Group]:
        try:
            by_server = self._context.router.by_server(
                positions, self._names, to_read=self._to_read, deadline=self._deadline
            )
        except StoreError as failure:
            self._fail(positions, failure)
            return []
        self._fail(by_server.pop(None, []), StoreError(ErrorKind.NODE_DOWN))
        return [_Group(server, found, False) for server, found in by_server.items() if server is not None]

    def _redirected_groups(self) -> list[_Group]:
        followed, refused = self._context.router.follow(self._redirects, self._deadline)
        self._redirects = {}
        self._fail(refused, StoreError(ErrorKind.FOREIGN_ADDRESS))
        return [_Group(server, sorted(found), asking) for (server, asking), found in followed.items()]

    def _run(self, groups: list[_Group]) -> None:
        width = self._context.options.connections
        pages_per_lane = max(1, _LANE_BYTES // self._pages.codec.frame_bytes)
        # The first lane of each server comes first, so that a hanging server does not take all threads.
        lanes = [
            (group, lane == 0) for lane in range(width) for group in groups if lane * pages_per_lane < len(group.todo)
        ]
        self._context.workers.run(len(lanes), lambda number: self._lane(*lanes[number]))

    def _settle(self, group: _Group) -> None:
        """Handle the pages that no lane has taken: request them again, or fail them if the group has failed."""
        left = [position for position in group.todo if position < self._end]
        if group.failure is None:
            self._again += left
        else:
            self._fail(left, group.failure, group.server)

    def _lane(self, group: _Group, is_first: bool) -> None:
        if group.failure is not None or not group.todo:
            return
        server = group.server
        try:
            # Only the first lane waits for a connection if other calls use all of them: one lane is enough.
            pool = self._context.pools.of(server.address, Purpose.BODIES, read_only=server.read_only)
            with pool.lease(self._deadline) if is_first else pool.lease_nowait(self._deadline) as channel:
                if channel is not None and not self._pump(channel, group):
                    pool.close_idle()
        except StoreError as failure:
            group.failure = failure

    def _pump(self, channel: Channel, group: _Group) -> bool:
        """Keep up to `_depth` pages in flight until none remain. Return False if the idle connection was found dead,
        which does not count as a try. Raises StoreError for other failures.
        """
        pending: deque[int] = deque()
        try:
            while True:
                self._send(channel, group, pending)
                if not pending:
                    return True
                if group.asking:
                    channel.read_lines(1, self._deadline)
                error = self._receive(channel, pending[0])
                position = pending.popleft()
                if error is not None:
                    self._refused(group, position, error)
        except Oversize:
            pending.popleft()
            self._again += pending
            return True
        except StoreError as failure:
            if failure.kind == ErrorKind.CONNECTION_LOST and not channel.answered:
                self._again += pending
                return False
            self._fail(pending, failure, group.server)
            raise

    def _send(self, channel: Channel, group: _Group, pending: deque[int]) -> None:
        parts: list[Part] = []
        count = 0
        while len(pending) < self._depth and (position := self._take(group)) is not None:
            pending.append(position)
            if group.asking:
                parts.append(ASKING)
            parts += self._request(position)
            count += 1
        if count:
            channel.send(parts, count * (1 + group.asking), self._deadline)

    def _take(self, group: _Group) -> int | None:
        if group.stop or not group.todo:
            return None
        if self._pages.is_late:
            group.stop, group.failure = True, StoreError(ErrorKind.DEADLINE)
            return None
        try:
            position = group.todo.popleft()
        except IndexError:
            return None  # another lane took the last position
        if position >= self._end:
            group.todo.appendleft(position)
            return None
        return position

    def _refused(self, group: _Group, position: int, error: ErrorReply) -> None:
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
            self._pages.fail(position, kind)


class Reads(_Transfer[PageReads[StoredValue]]):
    """Reads the pages of one `batch_get`."""

    def __init__(self, context: RedisContext, pages: PageReads[StoredValue]) -> None:
        super().__init__(context, pages, to_read=True)
        ttl_s = context.options.ttl if context.options.read_from == "primary" else None
        self._more = () if ttl_s is None else (b"PX", b"%d" % round(ttl_s * 1000))
        self._verb = b"GET" if ttl_s is None else b"GETEX"

    def _request(self, position: int) -> list[Part]:
        return [command(self._verb, self._names[position], *self._more)]

    def _receive(self, channel: Channel, position: int) -> ErrorReply | None:
        pages = self._pages
        buffers, tag = pages.buffers(position), pages.stream()
        try:
            found = channel.read_page(buffers, pages.fits, tag, self._deadline)
        except Oversize as oversize:
            pages.damage(position, Damage.SIZE, StoredValue(oversize.length))
            raise
        if found is None:
            pages.miss(position)
        elif not isinstance(found, ErrorReply):
            head = bytes(buffers[0][:HEADER_BYTES]) if pages.fits(found) else b""
            pages.accept(position, found, StoredValue(found, head), tag)
        elif found.kind is ErrorKind.WRONG_TYPE:
            pages.damage(position, "type", StoredValue(-1))
        else:
            return found
        return None


class Writes(_Transfer[PageWrites]):
    """Stores the pages of one `batch_set`."""

    def __init__(self, context: RedisContext, pages: PageWrites) -> None:
        super().__init__(context, pages, to_read=False)
        self._lifetime_s = context.options.ttl or context.options.max_age
        self._arguments = 4 if self._lifetime_s is None else 6
        self._is_aged = context.options.max_age is not None

    def run(self) -> None:
        """Store the absent pages. If the server rejects one for lack of memory, reject the pages after it and remove
        those already stored. Blocks. A failing store raises nothing."""
        absent = self._absent()
        self.move(absent)
        behind = [one for one in absent if one > self._end and self._pages.outcome(one) is SetOutcome.STORED]
        for position in behind:
            self._pages.reject(position)
        names, until = [self._names[one] for one in behind], max(self._deadline, self._context.clock() + SETTLE_S)
        self._pages.errors += failures(unlink(self._context, names, until))

    def _absent(self) -> list[int]:
        """Return the positions of pages that must be sent: a lookup is cheaper than a body. Stored pages count as used.
        """
        absent = []
        answers = exists(self._context, self._names, to_read=False, refresh=True, deadline=self._deadline)
        for position, answer in enumerate(answers):
            if answer == YES:
                self._pages.present(position)
            elif isinstance(answer, str):
                self._pages.fail(position, answer)
            else:
                absent.append(position)
        return absent

    def _request(self, position: int) -> list[Part]:
        name, stored = self._names[position], self._pages.sealed(position)
        size = sum([buffer.nbytes for buffer in stored])
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (self._arguments, len(name), name, size)
        return [head, *stored, b"\r\n$2\r\nNX\r\n" + self._expiry(stored[0])]

    def _expiry(self, header: memoryview) -> bytes:
        """Return the arguments for the lifetime of the page with this header, empty without a limit."""
        left_s = self._lifetime_s
        if left_s is None:
            return b""
        if self._is_aged:
            left_s = min(left_s, stored_time(header) + left_s - self._context.clock.wall_s())
        left_ms = b"%d" % max(1, round(left_s * 1000))
        return b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(left_ms), left_ms)

    def _receive(self, channel: Channel, position: int) -> ErrorReply | None:
        (line,) = channel.read_lines(1, self._deadline)
        if line == b"+OK":
            self._pages.stored(position)
        elif line == b"$-1":
            self._pages.present(position)
        else:
            error = ErrorReply(line.removeprefix(b"-"))
            if error.kind is not ErrorKind.NO_SPACE:
                return error
            self._pages.reject(position)
            self._end = min(self._end, position)
        return None

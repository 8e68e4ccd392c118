"""Moves the bodies of one `batch_get` or `batch_set`: several connections per server, each with a few pages in flight.

Locking design: see `pipeline`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Generic, TypeVar

from ...frame import HEADER_BYTES, Damage, stored_time
from ..base import SetOutcome
from ..errors import ErrorKind, StoreError
from ..pages import SETTLE_S, PageReads, PageWrites
from .channel import Channel, Oversize, Part, command
from .errors import ErrorReply
from .pipeline import ASKING, YES, Group, RedisContext, Requests, StoredValue, exists, failures, unlink
from .pool import Purpose

# One thread moves this many bytes before a second thread would wake up.
_LANE_BYTES = 256 << 10
# Bytes requested ahead on each connection, or two pages: more hides a longer round trip, but needs larger output
# buffers of the server, which more `connections` do not. With the shortest pages, _DEPTH_MAX of them fill it.
_AHEAD_BYTES = 512 << 10
_DEPTH_MAX = 128

Pages = TypeVar("Pages", PageReads[StoredValue], PageWrites)


class _RedisBatch(Requests, Generic[Pages]):
    """Moves the bodies of pages."""

    def __init__(self, context: RedisContext, pages: Pages, *, to_read: bool) -> None:
        frame_bytes = pages.codec.frame_bytes
        super().__init__(
            context, context.names(pages.codec.namespace, pages.keys), pages.deadline, to_read=to_read,
            purpose=Purpose.BODIES, width=context.options.connections, lane_length=max(1, _LANE_BYTES // frame_bytes),
        )
        self._pages: Pages = pages
        self._depth = min(_DEPTH_MAX, max(2, _AHEAD_BYTES // frame_bytes))

    @abstractmethod
    def _request(self, position: int) -> list[Part]:
        """Return the request for one page."""

    @abstractmethod
    def _receive(self, channel: Channel, position: int) -> ErrorReply | None:
        """Read the reply and record the page's outcome; return None. Return an error reply instead if it leaves the
        outcome open. Raises StoreError, or Oversize after recording the outcome."""

    def _record(self, position: int, kind: str) -> None:
        self._pages.fail(position, kind)

    def _exchange(self, channel: Channel, group: Group, pending: deque[int], until: float) -> None:
        """See Requests. Keeps up to `_depth` pages in flight until none remain."""
        try:
            while True:
                self._send(channel, group, pending)
                if not pending:
                    return
                if group.asking:
                    channel.read_lines(1, self._deadline)
                error = self._receive(channel, pending[0])
                position = pending.popleft()
                if error is not None:
                    self._refused(group, position, error)
        except Oversize:
            pending.popleft()
            self._again += pending

    def _send(self, channel: Channel, group: Group, pending: deque[int]) -> None:
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

    def _take(self, group: Group) -> int | None:
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


class RedisReads(_RedisBatch[PageReads[StoredValue]]):
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


class RedisWrites(_RedisBatch[PageWrites]):
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
        """Return the positions of the pages to send: a lookup is cheaper than a body. Stored pages count as used."""
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

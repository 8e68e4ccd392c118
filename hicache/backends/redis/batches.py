"""Moves the bodies of one `batch_get` or `batch_set`: several connections per server, each with a few pages in flight.

Locking design: see `pipeline`.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from ...frame import Damage, TagStream, header_of, stored_time
from ..base import SetOutcome
from ..errors import ErrorKind, StoreError
from ..pages import SETTLE_S, PageReads, PageWrites
from .channel import VERIFIED, Batch, Channel, Oversize, Part
from .errors import ErrorReply
from .pipeline import ASKING, YES, Group, RedisContext, Requests, StoredValue, exists, failures, template, unlink
from .pool import Purpose

# One thread moves this many bytes before a second thread would wake up.
_LANE_BYTES = 256 << 10
# Bytes requested ahead on each connection, or two pages: more hides a longer round trip, but needs larger output
# buffers of the server, which more `connections` do not. With the shortest pages, _DEPTH_MAX of them fill it.
_AHEAD_BYTES = 512 << 10
_DEPTH_MAX = 128

Pages = TypeVar("Pages", PageReads[StoredValue], PageWrites)


class _RedisBatch(Requests, Generic[Pages]):
    """Moves the bodies of pages, with the native helper many in one call."""

    def __init__(self, context: RedisContext, pages: Pages, *, to_read: bool) -> None:
        frame_bytes = pages.codec.frame_bytes
        super().__init__(
            context, context.names(pages.codec.namespace, pages.keys), pages.deadline, to_read=to_read,
            purpose=Purpose.BODIES, width=context.options.connections, lane_length=max(1, _LANE_BYTES // frame_bytes),
        )
        self._pages: Pages = pages
        self._depth = min(_DEPTH_MAX, max(2, _AHEAD_BYTES // frame_bytes))

    @abstractmethod
    def _batch(self, asked: Sequence[int], taken: list[int], is_native: bool) -> Batch:
        """Return the requests for the pages `taken`, the last of the pages `asked` for."""

    @abstractmethod
    def _settle(self, position: int, length: int | None, tag: TagStream | None = None) -> None:
        """Record the outcome of a page from its reply, see `Channel.exchange`."""

    @abstractmethod
    def _receive(self, channel: Channel, position: int) -> ErrorReply | None:
        """Read the reply and record the page's outcome; return None. Return an error reply instead if it leaves the
        outcome open. Raises StoreError, or Oversize after recording the outcome."""

    def _record(self, position: int, kind: str) -> None:
        self._pages.fail(position, kind)

    def _exchange(self, channel: Channel, group: Group, pending: deque[int], until: float) -> None:
        """See Requests. Keeps up to `_depth` pages in flight until none remain."""
        is_native = channel.exchanges and self._context.has_codec and not group.asking
        move = self._move if is_native else self._send
        try:
            while True:
                move(channel, group, pending)
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

    def _move(self, channel: Channel, group: Group, pending: deque[int]) -> None:
        """Move pages natively. Then `pending` is empty, or `_receive` reads the next reply."""
        replies: list[int | None] = []
        wanted = 0
        while len(replies) >= wanted and (pending or group.todo):
            # A part of the remaining pages, so that all lanes end together; few if each needs another buffer.
            share = 0 if self._pages.codec.transforms else len(group.todo) // self._width
            taken: list[int] = self._take(group, max(self._depth, share))
            # The server works on some pages between the calls.
            left = min(self._depth // 2, len(taken) - 1) if taken and group.todo else 0
            wanted = len(pending) + len(taken) - left
            batch = self._batch([*pending, *taken], taken, True)
            replies, sent, failure = channel.exchange(batch, len(pending), left, self._depth, self._deadline)
            pending += taken[:sent]
            group.todo.extendleft(reversed(taken[sent:]))
            for length in replies:
                self._settle(pending.popleft(), length)
            if failure is not None:
                raise failure
            if not wanted:
                return

    def _send(self, channel: Channel, group: Group, pending: deque[int]) -> None:
        taken = self._take(group, self._depth - len(pending))
        pending += taken
        heads, pages, tails = self._batch(taken, taken, False)[:3]
        parts: list[Part] = []
        for head, page, tail in zip(heads, pages, tails, strict=True):
            parts += [ASKING, head] if group.asking else [head]
            parts += page
            parts.append(tail)
        if taken:
            channel.send(parts, len(taken) * (1 + group.asking), self._deadline)

    def _take(self, group: Group, most: int) -> list[int]:
        taken: list[int] = []
        if not group.stop and group.todo and self._pages.is_late:
            group.stop, group.failure = True, StoreError(ErrorKind.DEADLINE)
        with contextlib.suppress(IndexError):  # another lane took the last position
            while len(taken) < most and not group.stop:
                position = group.todo.popleft()
                if position >= self._end:
                    group.todo.appendleft(position)
                    break
                taken.append(position)
        return taken


class RedisReads(_RedisBatch[PageReads[StoredValue]]):
    """Reads the pages of one `batch_get`."""

    def __init__(self, context: RedisContext, pages: PageReads[StoredValue]) -> None:
        super().__init__(context, pages, to_read=True)
        ttl_s = context.options.ttl if context.options.read_from == "primary" else None
        more = () if ttl_s is None else (b"PX", b"%d" % round(ttl_s * 1000))
        self._get = template(b"GET" if ttl_s is None else b"GETEX", self._names, *more)

    def _batch(self, asked: Sequence[int], taken: list[int], is_native: bool) -> Batch:
        pages, heads = self._pages, [self._get(one) for one in taken]
        if not is_native:
            return heads, [[] for _ in heads], [b"" for _ in heads], [], None, None
        buffers, keys = [pages.buffers(one) for one in asked], [pages.keys[one] for one in asked]
        return heads, buffers, [], keys, None, pages.codec.fields()

    def _settle(self, position: int, length: int | None, tag: TagStream | None = None) -> None:
        if length is None:
            self._pages.miss(position)
        elif length != VERIFIED or not self._pages.accept_proven(position):
            size = self._pages.codec.frame_bytes if length == VERIFIED else length
            head = bytes(header_of(self._pages.pages[position])) if self._pages.fits(size) else b""
            self._pages.accept(position, size, StoredValue(size, head), tag)

    def _receive(self, channel: Channel, position: int) -> ErrorReply | None:
        tag = self._pages.stream()
        try:
            found = channel.read_page(self._pages.buffers(position), self._pages.fits, tag, self._deadline)
        except Oversize as oversize:
            self._pages.damage(position, Damage.SIZE, StoredValue(oversize.length))
            raise
        if not isinstance(found, ErrorReply):
            self._settle(position, found, tag)
        elif found.kind is ErrorKind.WRONG_TYPE:
            self._pages.damage(position, "type", StoredValue(-1))
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

    def _batch(self, asked: Sequence[int], taken: list[int], is_native: bool) -> Batch:
        pages = self._pages
        if is_native and not self._is_aged:
            stored, keys, parents, fields = pages.sealed_natively(taken)
        else:  # the lifetime in the tail depends on the time in the sealed header
            stored, keys = [pages.sealed(one) for one in taken], [pages.keys[one] for one in taken]
            parents, fields = [None] * len(taken), None
        heads = [self._head(one, page) for one, page in zip(taken, stored, strict=True)]
        return heads, stored, [b"\r\n$2\r\nNX\r\n" + self._expiry(page[0]) for page in stored], keys, parents, fields

    def _head(self, position: int, stored: list[memoryview]) -> bytes:
        name, size = self._names[position], sum([buffer.nbytes for buffer in stored])
        return b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (self._arguments, len(name), name, size)

    def _settle(self, position: int, length: int | None, tag: TagStream | None = None) -> None:
        (self._pages.present if length is None else self._pages.stored)(position)

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
        if line in (b"+OK", b"$-1"):
            self._settle(position, VERIFIED if line == b"+OK" else None)
        else:
            error = ErrorReply(line.removeprefix(b"-"))
            if error.kind is not ErrorKind.NO_SPACE:
                return error
            self._pages.reject(position)
            self._end = min(self._end, position)
        return None

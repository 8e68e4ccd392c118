"""The bodies of one `batch_get` and one `batch_set`: several connections per server, each with a few pages under way.

Locking design: an object of these classes belongs to one call. `_lane` runs in several threads, each with a connection
of its own; they take positions from a deque, write their own slot of the outcome list, append to lists and set flags,
all atomic in CPython. What a lane leaves over is dealt with after all lanes have ended.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

from ...frame import HEADER_BYTES
from ..base import GetOutcome, SetOutcome
from ..calls import parents_of
from .channel import Channel, Oversize, Part, command
from .errors import ErrorReply, Fault, Trouble
from .options import Address
from .pool import Purpose
from .questions import ASKING, YES, Parts, exists, remove_damaged, unlink
from .routing import Server

# Damaged pages are removed even if the deadline has passed: within this time at most.
SETTLE_S = 0.25
# Pages are asked for again on another connection or server: after MOVED or ASK (once), behind a body that was too long
# to be read away, or where a pooled connection turned out to be closed. More rounds than that in which no page was done
# are a server's mischief.
_VAIN_ROUNDS_MAX = 4
# Errors that concern one page; after any other one nothing more is asked of that server.
_OF_ONE_PAGE = frozenset({Fault.WRONG_TYPE, Fault.MOVED, Fault.ASK, Fault.CLUSTER_DOWN})
# A batch of less than this is moved sooner by one thread than another one is woken.
_LANE_BYTES = 256 << 10
# One sendmsg takes 1,024 pieces; a page has three, and ASKING before it.
_DEPTH_MAX = 128


class _Group:
    """Pages of one server that are still to do. `trouble` is why nothing more of them will be done."""

    def __init__(self, server: Server, positions: Iterable[int], asking: bool) -> None:
        self.server = server
        self.todo = deque(positions)
        self.asking = asking
        self.stop = False
        self.trouble: Trouble | None = None


class _Transfer(ABC):
    """Moves the bodies of pages. After `_move`, `errors` (classes) has one entry for each page that failed."""

    def __init__(
        self, parts: Parts, keys: Sequence[bytes], frames: Sequence[memoryview], deadline: float, *, to_read: bool
    ) -> None:
        self._parts = parts
        self._keys = keys
        self._frames = frames
        self._deadline = deadline
        self._to_read = to_read
        self._names = parts.names(keys)
        self._depth = min(_DEPTH_MAX, max(2, parts.options.pipeline_bytes // parts.codec.frame_bytes))
        self._again: list[int] = []
        self._redirects: dict[tuple[Address, bool], list[int]] = {}
        self._redirected: set[int] = set()
        self._end = len(keys)  # pages from here on are not tried any more
        self.errors: list[str] = []

    @abstractmethod
    def _request(self, position: int) -> list[Part]:
        """The request for one page."""

    @abstractmethod
    def _receive(self, channel: Channel, position: int) -> ErrorReply | None:
        """Read the reply to it, and note the outcome; the error if it is one that concerns no outcome. May raise
        Trouble, and Oversize once the outcome is noted."""

    def _move(self, positions: list[int]) -> None:
        """Move the pages; those from `_end` on may stay untried, and are no errors."""
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
            self._fail(group.todo, Trouble(Fault.LOST))

    def _grouped(self, positions: list[int]) -> list[_Group]:
        try:
            by_server = self._parts.router.by_server(
                positions, self._names, to_read=self._to_read, deadline=self._deadline
            )
        except Trouble as trouble:
            self._fail(positions, trouble)
            return []
        self._fail(by_server.pop(None, []), Trouble(Fault.CLUSTER_DOWN))
        return [_Group(server, found, False) for server, found in by_server.items() if server is not None]

    def _redirected_groups(self) -> list[_Group]:
        redirects, self._redirects = self._redirects, {}
        followable = self._parts.router.followable([target for target, _ in redirects], self._deadline)
        groups = []
        for (target, asking), found in redirects.items():
            if target in followable:
                groups.append(_Group(Server(target), sorted(found), asking))
            else:
                self._fail(found, Trouble(Fault.FOREIGN))
        return groups

    def _run(self, groups: list[_Group]) -> None:
        width = self._parts.options.connections
        pages_per_lane = max(1, _LANE_BYTES // self._parts.codec.frame_bytes)
        # First lanes first: a server that hangs must not keep the threads from the others.
        lanes = [
            (group, lane == 0) for lane in range(width) for group in groups if lane * pages_per_lane < len(group.todo)
        ]
        self._parts.workers.run(len(lanes), lambda number: self._lane(*lanes[number]))

    def _settle(self, group: _Group) -> None:
        """What no lane has taken: nobody could, or nobody should."""
        left = [position for position in group.todo if position < self._end]
        if group.trouble is None:
            self._again += left
        else:
            self._fail(left, group.trouble)

    def _lane(self, group: _Group, is_first: bool) -> None:
        if group.trouble is not None or not group.todo:
            return
        server = group.server
        try:
            # The first lane waits for a connection if other calls have them all; for the others there is no need.
            pool = self._parts.pools.of(server.address, Purpose.BODIES, read_only=server.read_only)
            with pool.lease(self._deadline) if is_first else pool.lease_nowait(self._deadline) as channel:
                if channel is not None and not self._pump(channel, group):
                    pool.close_idle()
        except Trouble as trouble:
            self._parts.router.note(trouble.fault, server)
            group.trouble = trouble

    def _pump(self, channel: Channel, group: _Group) -> bool:
        """Keep up to `_depth` pages under way until there are no more. False if the server or the network had given up
        the connection while it was idle, which is no try. Raises Trouble where it fails otherwise.
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
        except Trouble as trouble:
            if trouble.fault is Fault.LOST and not channel.answered:
                self._again += pending
                return False
            self._fail(pending, trouble)
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
        if time.monotonic() >= self._deadline:
            group.stop, group.trouble = True, Trouble(Fault.DEADLINE)
            return None
        try:
            position = group.todo.popleft()
        except IndexError:
            return None  # another lane was faster
        if position >= self._end:
            group.todo.appendleft(position)
            return None
        return position

    def _refused(self, group: _Group, position: int, error: ErrorReply) -> None:
        trouble = error.trouble
        fault = trouble.fault
        self._parts.router.note(fault, group.server)
        target = self._parts.router.redirection(error, group.server)
        if target is not None and position not in self._redirected:
            self._redirected.add(position)
            self._redirects.setdefault((target, fault is Fault.ASK), []).append(position)
            return
        self._fail([position], trouble)
        if fault not in _OF_ONE_PAGE:
            group.stop, group.trouble = True, trouble

    def _fail(self, positions: Iterable[int], trouble: Trouble) -> None:
        self.errors += [trouble.fault for _ in positions]


class Reads(_Transfer):
    """The pages of one `batch_get`. After `run`, `outcomes`, `corrupt` (reasons) and `errors` (classes) are final."""

    def __init__(
        self, parts: Parts, keys: Sequence[bytes], frames: Sequence[memoryview], deadline: float
    ) -> None:
        super().__init__(parts, keys, frames, deadline, to_read=True)
        ttl_s = parts.options.ttl_s if parts.options.read_from == "primary" else None
        self._more = () if ttl_s is None else (b"PX", b"%d" % round(ttl_s * 1000))
        self._verb = b"GET" if ttl_s is None else b"GETEX"
        self._damaged: list[tuple[bytes, int, bytes]] = []
        self.outcomes = [GetOutcome.ERROR] * len(keys)
        self.corrupt: list[str] = []

    def run(self) -> None:
        """Read all pages and remove the damaged ones. Blocks; raises nothing for storage reasons."""
        if time.monotonic() >= self._deadline:
            self._fail(range(len(self._keys)), Trouble(Fault.DEADLINE))
            return
        self._move(list(range(len(self._keys))))
        if self._damaged:
            settled = remove_damaged(self._parts, self._damaged, max(self._deadline, time.monotonic() + SETTLE_S))
            self.errors += settled.errors

    def _request(self, position: int) -> list[Part]:
        return [command(self._verb, self._names[position], *self._more)]

    def _receive(self, channel: Channel, position: int) -> ErrorReply | None:
        frame, codec = self._frames[position], self._parts.codec
        tag = codec.stream()
        try:
            found = channel.read_page(frame, codec.fits, tag, self._deadline)
        except Oversize as oversize:
            self._corrupt(position, "size", oversize.length)
            raise
        if found is None:
            self.outcomes[position] = GetOutcome.MISS
        elif isinstance(found, ErrorReply):
            if found.fault is not Fault.WRONG_TYPE:
                return found
            self._corrupt(position, "type", -1)
        elif not codec.fits(found):
            self._corrupt(position, "size", found)
        else:
            damage = codec.accept(self._keys[position], frame, found, tag)
            if damage is None:
                self.outcomes[position] = GetOutcome.HIT
            elif damage.is_misfit:
                self.outcomes[position] = GetOutcome.MISS  # and it stays, for readers that can use it
                self.errors.append(damage)
            else:
                self._corrupt(position, damage, found, bytes(frame[:HEADER_BYTES]))
        return None

    def _corrupt(self, position: int, reason: str, length: int, head: bytes = b"") -> None:
        self.outcomes[position] = GetOutcome.CORRUPT
        self.corrupt.append(str(reason))
        self._damaged.append((self._names[position], length, head))


class Writes(_Transfer):
    """The pages of one `batch_set`. After `run`, `outcomes` and `errors` (classes) are final."""

    def __init__(
        self,
        parts: Parts,
        keys: Sequence[bytes],
        frames: Sequence[memoryview],
        parent: bytes | None,
        deadline: float,
    ) -> None:
        super().__init__(parts, keys, frames, deadline, to_read=False)
        self._parents = parents_of(keys, parent)
        ttl_s = parts.options.ttl_s
        more = (b"NX",) if ttl_s is None else (b"NX", b"PX", b"%d" % round(ttl_s * 1000))
        self._arguments = 3 + len(more)
        self._tail = b"\r\n" + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in more])
        self.outcomes = [SetOutcome.ERROR] * len(keys)

    def run(self) -> None:
        """Store the pages. Blocks; raises nothing for storage reasons."""
        if time.monotonic() >= self._deadline:
            self._fail(range(len(self._keys)), Trouble(Fault.DEADLINE))
            return
        first_of: dict[bytes, int] = {}
        for position, key in enumerate(self._keys):
            first_of.setdefault(key, position)
        todo = self._absent(list(first_of.values()))
        self._move(todo)
        if self._end < len(self._keys):
            self._reject_behind(todo)
        for position, key in enumerate(self._keys):
            first = first_of[key]
            if first != position:
                stored = self.outcomes[first] is SetOutcome.STORED
                self.outcomes[position] = SetOutcome.PRESENT if stored else self.outcomes[first]

    def _absent(self, positions: list[int]) -> list[int]:
        """Which pages have to be sent: a question is cheaper than a body. Those that are there count as used."""
        asked = exists(
            self._parts, self._names, positions, to_read=False, refresh=True, deadline=self._deadline
        )
        self.errors += asked.errors
        absent = []
        for position in positions:
            answer = asked.answers[position]
            if answer == YES:
                self.outcomes[position] = SetOutcome.PRESENT
            elif answer is not None:
                absent.append(position)
        return absent

    def _request(self, position: int) -> list[Part]:
        name = self._names[position]
        stored = self._parts.codec.seal(self._keys[position], self._frames[position], parent=self._parents[position])
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (self._arguments, len(name), name, len(stored))
        return [head, stored, self._tail]

    def _receive(self, channel: Channel, position: int) -> ErrorReply | None:
        (line,) = channel.read_lines(1, self._deadline)
        if line == b"+OK":
            self.outcomes[position] = SetOutcome.STORED
        elif line == b"$-1":
            self.outcomes[position] = SetOutcome.PRESENT
        else:
            error = ErrorReply(line.removeprefix(b"-"))
            if error.fault is not Fault.OUT_OF_MEMORY:
                return error
            self.outcomes[position] = SetOutcome.REJECTED
            self._end = min(self._end, position)
        return None

    def _reject_behind(self, todo: list[int]) -> None:
        """Behind the first page without room there is nothing to keep: no reader would get there."""
        first = min(position for position in todo if self.outcomes[position] is SetOutcome.REJECTED)
        behind = [position for position in todo if position > first]
        stored = [position for position in behind if self.outcomes[position] is SetOutcome.STORED]
        for position in behind:
            if self.outcomes[position] is not SetOutcome.PRESENT:
                self.outcomes[position] = SetOutcome.REJECTED
        if stored:
            removed = unlink(self._parts, self._names, stored, max(self._deadline, time.monotonic() + SETTLE_S))
            self.errors += removed.errors

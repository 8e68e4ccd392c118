"""Memory for pages that are transferred between a store and a socket, allocated at start.

A call reserves one piece, of whole blocks of 4096 bytes, for all of its pages; calls without room wait in order of
arrival, so small calls cannot starve a large one.

Locking design: everything belongs to the event loop's thread. The bytes of a piece belong to its call, on any threads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from ..backends.errors import ErrorKind
from ..clock import SYSTEM_CLOCK, Clock
from ..errors import InvariantError
from ..frame import FRAME_ALIGN
from ..mapping import zeroed
from .protocol import Refused


class Staging:
    """See the module's docstring. The constructor blocks while the memory is touched.

    Invariant: `_free` lists (start, bytes) in ascending order, never empty, never adjacent; together with the reserved
    pieces they are the whole memory.
    """

    def __init__(self, capacity_bytes: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.capacity_bytes = max(FRAME_ALIGN, capacity_bytes // FRAME_ALIGN * FRAME_ALIGN)
        self._memory = zeroed(self.capacity_bytes)
        self._free = [(0, self.capacity_bytes)]
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()

    def piece_max(self) -> int:
        """Return the bytes of the largest piece that one call may take."""
        return self.capacity_bytes // 4

    @contextlib.asynccontextmanager
    async def piece(self, size_bytes: int, deadline: float) -> AsyncIterator[memoryview]:
        """Reserve `size_bytes`, a multiple of 4096, until the block ends. Waits for room. Raises Refused: 413 for more
        than `piece_max`, 503 if there is no room by the deadline."""
        if size_bytes > self.piece_max():
            raise Refused(413, ErrorKind.NO_BUFFER, "body: has more pages than body_pages_max; send fewer at once")
        start = await self._take(size_bytes, deadline) if size_bytes else 0
        try:
            yield self._memory[start : start + size_bytes]
        finally:
            if size_bytes:
                self._give_back(start, size_bytes)

    async def _take(self, size_bytes: int, deadline: float) -> int:
        start = None if self._waiting else self._cut(size_bytes)
        if start is not None:
            return start
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, granted))
        await asyncio.wait([granted], timeout=max(0.0, deadline - self._clock()))
        if granted.done():
            return granted.result()
        self._waiting.remove((size_bytes, granted))
        self._grant()  # the next calls may have waited only for this one
        raise Refused(503, ErrorKind.NO_BUFFER, "daemon: no memory for page bodies is free; try again", 1)

    def _cut(self, size_bytes: int) -> int | None:
        """Return the first piece that is large enough, or None."""
        for index, (start, free_bytes) in enumerate(self._free):
            if free_bytes >= size_bytes:
                rest = [(start + size_bytes, free_bytes - size_bytes)] if free_bytes > size_bytes else []
                self._free[index : index + 1] = rest
                return start
        return None

    def _give_back(self, start: int, size_bytes: int) -> None:
        joined: list[tuple[int, int]] = []
        for at, free_bytes in sorted([*self._free, (start, size_bytes)]):
            if joined and sum(joined[-1]) == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + free_bytes)
            else:
                joined.append((at, free_bytes))
        self._free = joined
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            size_bytes, granted = self._waiting[0]
            start = self._cut(size_bytes)
            if start is None:
                return
            self._waiting.popleft()
            granted.set_result(start)

    def check(self) -> None:
        """Raise InvariantError unless all memory is free and in one piece. REQUIRES: no piece is reserved."""
        if self._free != [(0, self.capacity_bytes)] or self._waiting:
            raise InvariantError("staging: memory was lost")

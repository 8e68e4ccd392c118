"""The stream of the simulated forward: work is queued at once, and the schedule decides when it is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


class Stream:
    """Work in order. `queued` and `done` count pieces of work since the start."""

    def __init__(self) -> None:
        self.queued = self.done = 0
        self._work: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a piece of work behind all others."""
        self._work.append(work)
        self.queued += 1

    def step(self) -> None:
        """Do the next piece, if there is one."""
        if self._work:
            self._work.popleft()()
            self.done += 1

    def fence(self) -> StreamFence:
        """Return a fence behind all work that is queued now."""
        return StreamFence(self, self.queued)

    def synchronize(self) -> None:
        """Do all work that is queued now."""
        self.fence().synchronize()


@dataclass(frozen=True, slots=True)
class StreamFence:
    """A `Fence` behind the first `end` pieces of work."""

    stream: Stream
    end: int

    def query(self) -> bool:
        return self.stream.done >= self.end

    def synchronize(self) -> None:
        while not self.query():
            self.stream.step()

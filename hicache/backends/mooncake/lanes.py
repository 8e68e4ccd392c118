"""The two ways of some frames to the network and back: as they lie, or through the staging memory.

A lane belongs to one thread and is used once. `run` makes a library call with the addresses of the lane. A call on
registered frames cannot be left: its lane waits for the library, whose own time limits bound it. A call on staging
memory can: its slots come back when it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .runner import Runner
from .staging import Staging


class Lane(ABC):
    """The way of `buffers`, frames or what is stored of them; `addresses` are where the library reads or writes."""

    def __init__(self, buffers: Sequence[memoryview], addresses: list[int]) -> None:
        self.buffers = buffers
        self.addresses = addresses

    @abstractmethod
    def run(self, call: Callable[[], list[int]], deadline: float) -> list[int] | None:
        """The result of a library call, None if it has none in time: then this lane is spent."""

    @abstractmethod
    def load(self) -> None:
        """Have the bytes of the buffers where the library finds them."""

    @abstractmethod
    def fetch(self, index: int, size: int) -> None:
        """Have the first `size` bytes that the library has read for one of the buffers in that buffer."""

    @abstractmethod
    def leave(self) -> None:
        """Give back what the lane holds."""


class DirectLane(Lane):
    """Buffers in registered memory."""

    def run(self, call: Callable[[], list[int]], deadline: float) -> list[int] | None:
        """See Lane. Blocks until the library returns, also past the deadline."""
        return call()

    def load(self) -> None:
        """See Lane. They are there."""

    def fetch(self, index: int, size: int) -> None:
        """See Lane. They are there."""

    def leave(self) -> None:
        """See Lane. It holds nothing."""


class StagedLane(Lane):
    """Buffers anywhere, copied through slots of the staging memory."""

    def __init__(self, buffers: Sequence[memoryview], slots: list[int], staging: Staging, runner: Runner) -> None:
        super().__init__(buffers, [staging.address(slot) for slot in slots])
        self._slots = slots
        self._staging = staging
        self._runner = runner
        self._abandoned = False

    def run(self, call: Callable[[], list[int]], deadline: float) -> list[int] | None:
        """See Lane."""
        result = self._runner.run(call, deadline, late=self._give_back)
        self._abandoned = result is None
        return result

    def load(self) -> None:
        """See Lane."""
        for slot, buffer in zip(self._slots, self.buffers, strict=True):
            self._staging.view(slot)[: buffer.nbytes] = buffer

    def fetch(self, index: int, size: int) -> None:
        """See Lane."""
        self.buffers[index][:size] = self._staging.view(self._slots[index])[:size]

    def leave(self) -> None:
        """See Lane."""
        if not self._abandoned:
            self._give_back()

    def _give_back(self) -> None:
        self._staging.give_back(self._slots)


class Roads:
    """Which lane frames take. `slow` is set from a failure that has cost time, or may cost it next time, until pages
    have been moved again: then registered frames are copied too, so that a verb can leave a call that hangs.

    Locking design: `_registered` only grows, and is replaced as a whole; `slow` is one reference. Both are read
    without a lock.
    """

    def __init__(self, staging: Staging, runner: Runner) -> None:
        self.slow = False
        self._staging = staging
        self._runner = runner
        self._registered: tuple[tuple[int, int], ...] = ()

    @property
    def registered(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each registered memory."""
        return self._registered

    def add(self, start: int, end: int) -> None:
        """Let buffers between these addresses go as they lie."""
        self._registered = (*self._registered, (start, end))

    @contextlib.contextmanager
    def lane(self, buffers: Sequence[memoryview], deadline: float) -> Iterator[Lane | None]:
        """A lane for the first of `buffers`, at least one; None if there is no staging memory in time."""
        addresses = [address_of(buffer) for buffer in buffers]
        lane: Lane
        if not self.slow and all(map(self._is_registered, addresses, buffers)):
            lane = DirectLane(buffers, addresses)
        else:
            slots = self._staging.take(len(buffers), deadline)
            if not slots:
                yield None
                return
            lane = StagedLane(buffers[: len(slots)], slots, self._staging, self._runner)
        try:
            yield lane
        finally:
            lane.leave()

    def _is_registered(self, address: int, buffer: memoryview) -> bool:
        for start, end in self._registered:  # noqa: SIM110  twice as fast as `any`, and once for each page
            if start <= address and address + buffer.nbytes <= end:
                return True
        return False


def address_of(memory: memoryview) -> int:
    """Where `memory` begins."""
    if memory.readonly:
        return int(np.frombuffer(memory, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # a fifth of the time

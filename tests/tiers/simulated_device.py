"""A device whose streams run in seeded, legal interleavings, and threads that take turns by the same seed.

An operation is queued in a stream as steps: each piece of a copy, each row of a kernel. Steps of one stream run in
order; steps of different streams run in any order that their events allow. As on CUDA, a wait for an event that is not
recorded does nothing, and a wait is for the latest record at the time it was queued.

Threads are real, but one runs at a time: at each call of the runtime the seed selects the next thread, and whether the
device does a few steps. So a run depends only on its seed.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from hicache.config import TransferConfig
from hicache.errors import InvalidInput, TransferError
from hicache.tiers import EngineBlocks, Fence, HostWindow
from hicache.tiers.copy_cuda import CudaCopyEngine
from hicache.tiers.copy_thread import CopyTask, CopyThread
from hicache.tiers.runtime import DeviceRuntime, Memory, Rows
from hicache.types import Addresses

BLOCKS_MAX = 1000  # memory that is not written yet holds larger numbers
STUCK_AFTER = 200_000  # turns without progress for a waiting thread


class Finding(BaseException):
    """An error that a simulation has found. Not an Exception: a copy thread must not treat it as a failed copy."""


@dataclass(eq=False)
class SimulatedStream:
    """Steps in order. `name` identifies the owner."""

    name: str
    steps: deque[Callable[[], bool]] = field(default_factory=deque)  # each returns False if it cannot run yet


@dataclass(eq=False)
class SimulatedEvent:
    """`recorded` counts records, `passed` has the numbers of the records that the device has passed. Also a `Fence`."""

    turns: Turns
    stream: SimulatedStream | None = None
    recorded: int = 0
    timed: bool = False
    passed: set[int] = field(default_factory=set)

    def query(self) -> bool:
        return self.recorded in self.passed

    def synchronize(self) -> None:
        self.turns.wait_for(self.query)


class Turns:
    """Selects who runs: the threads of a simulation, one at a time, and the device between them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._chance = self.random.choice([0.05, 0.3, 0.7])  # speed of the device relative to the threads
        self._changes = self.random.choice([0.01, 0.1])  # how often the slow streams change
        self._held: list[SimulatedStream] = []
        self.streams: list[SimulatedStream] = []
        self.error: BaseException | None = None  # raised by a copy thread, or found by the device
        self._ready: list[threading.Semaphore] = []
        self._mine = threading.local()
        self._mine.semaphore = threading.Semaphore(0)

    def step(self) -> bool:
        """Let the device do one step. Return False if no step can run."""
        if self.random.random() < self._changes:
            self._held = self.random.sample(self.streams, self.random.randrange(len(self.streams)))
        self.random.shuffle(self.streams)
        for stream in sorted(self.streams, key=self._held.__contains__):
            try:
                if stream.steps and stream.steps[0]():
                    stream.steps.popleft()
                    return True
            except BaseException as finding:
                self.error = self.error or finding
                raise
        return False

    def pause(self) -> None:
        """Let others run: the device, then perhaps another thread."""
        while self.random.random() < self._chance:
            self.step()
        if self._ready and self.random.random() < 0.5:
            self._ready.append(self._mine.semaphore)
            self._give_up()
            self._mine.semaphore.acquire()
        if self.error is not None:
            raise self.error

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Let others run until `condition` is true."""
        for _ in range(STUCK_AFTER):
            if condition():
                return
            self.pause()
        raise Finding("a wait has no end")

    def start(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Start a thread; its first turn comes later."""
        semaphore = threading.Semaphore(0)

        def body() -> None:
            self._mine.semaphore = semaphore
            semaphore.acquire()
            try:
                run()
            except BaseException as error:
                self.error = self.error or error
            self._give_up()

        self._ready.append(semaphore)
        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """End the remaining threads after an error."""
        self.error = self.error or Finding("the simulation is over")
        while self._ready:
            self._ready.pop().release()

    def _give_up(self) -> None:
        if self._ready:
            self._ready.pop(self.random.randrange(len(self._ready))).release()


class SimulatedThread(CopyThread):
    """A copy thread that takes turns."""

    def __init__(self, turns: Turns, name: str, begin: Callable[[], None]) -> None:
        self.condition = threading.Condition()
        self._begin = begin
        self._turns = turns
        self._queue: deque[CopyTask | None] = deque()
        self._tasks = self  # type: ignore[assignment]  # what the loop takes its tasks from
        self._closed = self._ended = False
        self._thread = turns.start(self._run_to_the_end, name)

    def put(self, task: CopyTask | None) -> None:
        self._queue.append(task)

    def get(self) -> CopyTask | None:
        self._turns.wait_for(lambda: bool(self._queue))
        return self._queue.popleft()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        self._turns.wait_for(condition)
        return True

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        self.put(None)
        self._turns.wait_for(lambda: self._ended)
        return True

    def _run_to_the_end(self) -> None:
        try:
            self._run()
        finally:
            self._ended = True


class SimulatedRuntime(DeviceRuntime):
    """A runtime over host memory. `fail_rate` is the probability that a call that queues copies fails.

    `dropped` names the omitted waits, as (stream that waits, stream that recorded) or, for the host, as ("main" or
    "copy thread", stream that recorded): the tests must detect each omission. `waits` collects the waits that were
    made. Once `started`, no memory may be allocated. `made` counts events, `timed` counts timed events, and
    `longest_call` is the largest number of copies in one call.
    """

    started = False
    made = timed = longest_call = 0

    def __init__(self, turns: Turns, *, fail_rate: float = 0.0, dropped: tuple[str, str] | None = None) -> None:
        self.turns = turns
        self.waits: set[tuple[str, str]] = set()
        self._dropped = dropped
        self._fail_rate = fail_rate
        self._names = iter(["compute", *(f"own {number}" for number in range(1, 9))])
        self._main = threading.get_ident()
        self.registered: Callable[[int], int | None] = lambda address: None  # from an address to its registration
        self._events: list[SimulatedEvent] = []
        self.compute = self.stream()

    def attach(self) -> None:
        self.turns.pause()

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stream(self) -> SimulatedStream:
        stream = SimulatedStream(next(self._names))
        self.turns.streams.append(stream)
        return stream

    def stream_of(self, stream: object) -> SimulatedStream:
        if not isinstance(stream, SimulatedStream):
            raise InvalidInput(f"copy: a {type(stream).__name__} is not a stream")
        return stream

    def require_fence(self, fence: Fence) -> None:
        if not isinstance(fence, SimulatedEvent) or not fence.recorded:
            raise InvalidInput("fence: pass an event of this device that is recorded")

    def wait_fence(self, stream: SimulatedStream, fence: Fence) -> None:
        assert isinstance(fence, SimulatedEvent)
        self.wait(stream, fence)

    def record(self, stream: SimulatedStream, *, timed: bool = False) -> SimulatedEvent:
        self.made += not self._events
        self.timed += timed
        event = self._events.pop() if self._events else SimulatedEvent(self.turns)
        event.timed = timed
        self.record_again(event, stream)
        return event

    def record_again(self, event: SimulatedEvent, stream: SimulatedStream) -> None:
        """Record an event that may be in use, as an engine may do with its own events."""
        self.turns.pause()
        event.recorded += 1
        event.stream, number = stream, event.recorded

        def passes() -> bool:
            event.passed.add(number)
            return True

        stream.steps.append(passes)

    def release(self, event: SimulatedEvent, *, timed: bool = False) -> None:
        if event.timed is not timed:
            raise Finding("an event is given back as one of the other kind")
        self._events.append(event)

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        self.turns.pause()
        number = event.recorded
        if number and not self._is_dropped(stream.name, event):
            stream.steps.append(lambda: number in event.passed)

    def passed(self, event: SimulatedEvent) -> bool:
        self.turns.pause()
        who = "main" if threading.get_ident() == self._main else "copy thread"
        return self._is_dropped(who, event) or event.query()

    def elapsed_s(self, begin: SimulatedEvent, end: SimulatedEvent) -> float:
        if not (begin.query() and end.query()):
            raise TransferError("the simulated device has not passed the events")
        return 1e-9

    def synchronize(self, stream: SimulatedStream) -> None:
        if self._is_dropped("synchronize", SimulatedEvent(self.turns, stream)):
            return
        self.turns.wait_for(lambda: not stream.steps)

    def copy(self, stream: SimulatedStream, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self._maybe_fail()
        self.longest_call = max(self.longest_call, len(sizes))
        if any(len({self.registered(at) for at in side.tolist()} - {None}) > 1 for side in (targets, sources)):
            raise Finding("a call copies from or to two registrations")
        pieces = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self.turns.random.shuffle(pieces)
        for piece in pieces:
            stream.steps.append(partial(_moved, *piece))

    def move(self, stream: SimulatedStream, rows: Rows, programs: int, *, to_blocks: bool) -> None:
        """Queue one step per row. Each reads the ids and the table on the device when it runs."""
        self._maybe_fail()

        def move_row(row: int) -> bool:
            block = int(_int64(rows.blocks, rows.rows)[row])
            if not 0 <= block < BLOCKS_MAX:
                raise Finding("a kernel has begun before its block ids were there")
            for base, stride, column, size in _int64(rows.regions, 4 * (rows.first + rows.count)).reshape(-1, 4)[
                rows.first :
            ]:
                if size > rows.longest or any(number % rows.word for number in (base, stride, column, size)):
                    raise Finding(f"a kernel was told of {rows}, which is not true")
                there, here = base + block * stride, rows.staging + row * rows.row_bytes + column - rows.column
                _moved(*((there, here) if to_blocks else (here, there)), size)
            return True

        for row in range(rows.rows):
            stream.steps.append(partial(move_row, row))

    def device_memory(self, size_bytes: int) -> Memory:
        if self.started:
            raise Finding(f"{size_bytes} bytes are taken after the start")
        memory = np.full(size_bytes + 16, 0xEE, np.uint8)
        memory = memory[-memory.ctypes.data % 16 :][:size_bytes]
        return Memory(memory.ctypes.data, memory)

    pinned_memory = device_memory

    def close(self) -> None:
        if busy := [stream.name for stream in self.turns.streams if stream.steps and stream is not self.compute]:
            raise Finding(f"closed with work on the streams {busy}")

    def _maybe_fail(self) -> None:
        self.turns.pause()
        if self.turns.random.random() < self._fail_rate:
            raise TransferError("the simulated device refuses")

    def _is_dropped(self, who: str, event: SimulatedEvent) -> bool:
        wait = who, "" if event.stream is None else event.stream.name
        self.waits.add(wait)
        return wait == self._dropped


def simulated_copies(
    blocks: EngineBlocks, window: HostWindow, *, path: Literal["direct", "staged"], **rest: Any
) -> CudaCopyEngine:
    """Return the copy engine of CUDA devices over blocks in host memory. `rest` are further arguments of it."""
    runtime = rest.pop("runtime", None) or SimulatedRuntime(Turns(0))
    thread = partial(SimulatedThread, runtime.turns)
    return CudaCopyEngine(blocks, window, TransferConfig(path=path), runtime=runtime, thread=thread, **rest)


def _int64(address: int, count: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


def _moved(target: int, source: int, size: int) -> bool:
    ctypes.memmove(int(target), int(source), int(size))
    return True

"""A copy engine without a thread: the schedule advances its copies block by block."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from hicache.errors import TransferError
from hicache.tiers import CopyEngine, Fence, HostWindow, PooledCopies, TrailingPool, Transfer
from hicache.types import Indices, PageIds
from tests.simulation.memory import JUNK, SimulatedDevicePool, SimulatedHostPool, SimulatedSlots


class SimulatedTransfer(Transfer):
    """A copy of several pieces: for each block of each layer, its pages in one or two pieces."""

    def __init__(
        self, engine: SimulatedCopyEngine, load: bool, source: Indices, target: Indices, after: Fence | None
    ) -> None:
        self.load = load
        self.source, self.target, self.after = source, target, after
        self.layers_done = 0
        self._engine = engine
        self._error: TransferError | None = None
        self._began_s: float | None = None
        self._seconds: float | None = None
        self._pieces = self._plan()

    def _plan(self) -> Iterator[tuple[int, int, slice]]:
        layers, blocks = self._engine.device_blocks.shape[:2]
        for layer in range(layers):
            for block in range(blocks):
                cut = self._engine.random.randint(0, len(self.target))
                if cut:
                    yield layer, block, slice(0, cut)
                if cut < len(self.target):
                    yield layer, block, slice(cut, None)
            self.layers_done = layer + 1

    @property
    def error(self) -> TransferError | None:
        return self._error

    @property
    def seconds(self) -> float | None:
        return self._seconds

    @property
    def ended(self) -> bool:
        """As `done`, but the device does not advance."""
        return self._error is not None or self.layers_done == self._engine.device_blocks.shape[0]

    def done(self) -> bool:
        self._engine.glance()
        return self.ended

    def wait(self, timeout_s: float) -> bool:
        while not self.ended:
            self._engine.advance(self.load)
        return True

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        while self.layers_done <= layer and not self.ended:
            self._engine.advance(self.load)
        if self._error is not None:
            raise self._error

    def advance(self) -> None:
        """Copy the next piece."""
        if self._began_s is None:
            self._began_s = self._engine.clock()
        piece = next(self._pieces, None)
        if piece is not None:
            layer, block, part = piece
            source, target = self._engine.device_blocks, self._engine.host_blocks
            if self.load:
                source, target = target, source
            target[layer, block, self.target[part]] = source[layer, block, self.source[part]]
        if self.ended:
            self._seconds = self._engine.clock() - self._began_s

    def fail(self, error: TransferError) -> None:
        """End the copy halfway, with junk in the layers of the target that were not reported as done."""
        target = self._engine.device_blocks if self.load else self._engine.host_blocks
        target[self.layers_done :, :, self.target[-1]] = JUNK
        self._error = error


class SimulatedCopyEngine(CopyEngine):
    """Runs the copies of each direction in order, each after its fence. `fail_rate` is per piece. `failed` is True once
    a copy has failed: the contents of the device are unknown from then on. `device` has the layers from `first` on.
    """

    def __init__(
        self, device: SimulatedDevicePool | SimulatedSlots, host: SimulatedHostPool, numbers: random.Random,
        fail_rate: float, clock: Callable[[], float], first: int = 0,
    ) -> None:
        layers = len(device.memory)
        super().__init__(device.blocks, HostWindow(host, first, layers))
        self.random = numbers
        self.clock = clock
        self.device_blocks, self.host_blocks = device.memory, host.blocks[first : first + layers]
        self._fail_rate = fail_rate
        self._queues: dict[bool, deque[SimulatedTransfer]] = {False: deque(), True: deque()}
        self.stream = device.stream
        self.failed = False

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> SimulatedTransfer:
        source, target = self._require_pairs(blocks, host_blocks, after)
        return self._submit(False, source, target, after)

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> SimulatedTransfer:
        target, source = self._require_pairs(blocks, host_blocks, after)
        return self._submit(True, source, target, after)

    def _submit(self, load: bool, source: Indices, target: Indices, after: Fence | None) -> SimulatedTransfer:
        if self.random.random() < self._fail_rate:
            self.failed = True
            raise RuntimeError("no memory for staging")
        transfer = SimulatedTransfer(self, load, source, target, after)
        self._queues[load].append(transfer)
        return transfer

    def glance(self) -> None:
        """Advance the device in half of the calls, as time that passes between two queries."""
        if self.random.random() < 0.5:
            self.tick()

    def tick(self) -> None:
        """Do one piece of the device's work: a forward or a copy."""
        if self.random.random() < 0.2:
            self.stream.step()
        else:
            self.advance(self.random.random() < 0.5)

    def advance(self, load: bool) -> None:
        """Copy the next piece of one direction. If the copy waits for its fence, compute instead."""
        queue = self._queues[load]
        if not queue:
            return
        transfer = queue[0]
        if transfer.after is not None and not transfer.after.query():
            self.stream.step()
            return
        if self.random.random() < self._fail_rate:
            self.failed = True
            transfer.fail(TransferError("the simulated device failed"))
        else:
            transfer.advance()
        if transfer.ended:
            queue.popleft()

    @property
    def busy(self) -> bool:
        """True if a copy is in flight."""
        return bool(self._queues[False] or self._queues[True])

    def close(self, timeout_s: float) -> bool:
        while self.busy:
            self.tick()
        return True


class SimulatedPooledCopies(PooledCopies):
    """The copies of L1 and of trailing pools, each with an engine that advances on its own."""

    def __init__(
        self, device: SimulatedCopyEngine, trailing: Sequence[tuple[TrailingPool, SimulatedCopyEngine]]
    ) -> None:
        super().__init__(device, trailing)
        self._engines = [device, *(engine for _, engine in trailing)]

    @property
    def failed(self) -> bool:
        """True once a copy has failed."""
        return any(engine.failed for engine in self._engines)

    def glance(self) -> None:
        """As `SimulatedCopyEngine.glance`, for one of the engines."""
        self._any().glance()

    def tick(self) -> None:
        """As `SimulatedCopyEngine.tick`, for one of the engines."""
        self._any().tick()

    def _any(self) -> SimulatedCopyEngine:
        return self._engines[0].random.choice(self._engines)

"""The real copy engine for CUDA devices below a whole cache, on a simulated device with streams.

Copies are submitted on the caller's thread; `tests/tiers/test_streams.py` tests the copy threads. The schedule decides
when the device does the work of the streams and of the forwards, in any order that events and fences allow.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from hicache.config import TransferConfig
from hicache.errors import TransferError
from hicache.tiers import Fence, HostWindow
from hicache.tiers.copy_cuda import CudaCopyEngine
from hicache.tiers.copy_thread import CopyTask, CopyThread
from tests.simulation.memory import SimulatedDevicePool, SimulatedHostPool
from tests.simulation.stream import Stream, StreamFence
from tests.tiers.simulated_device import SimulatedRuntime, SimulatedStream, Turns

# A staging slot has room for a few pages.
SLOT_BYTES = 96


class _Device(Turns):
    """A device that also computes: the simulation has its own stream for the forwards."""

    def __init__(self, seed: int, forwards: Stream) -> None:
        super().__init__(seed)
        self._forwards = forwards

    def step(self) -> bool:
        done = self._forwards.done
        if self.random.random() < 0.2 or not super().step():
            self._forwards.step()
        return self._forwards.done > done


class _Runtime(SimulatedRuntime):
    failed = False

    def require_fence(self, fence: Fence) -> None:
        assert isinstance(fence, StreamFence)

    def wait_fence(self, stream: SimulatedStream, fence: Fence) -> None:
        stream.steps.append(fence.query)

    def _maybe_fail(self) -> None:
        try:
            super()._maybe_fail()
        except TransferError:
            self.failed = True
            raise


class _Inline(CopyThread):
    """A copy thread that submits on the caller's stack."""

    def __init__(self, turns: Turns) -> None:
        super().__init__("unused")
        super().close(10.0)
        self._turns = turns

    def submit(self, task: CopyTask) -> None:
        try:
            task.run()
        except TransferError as error:
            task.fail(error)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        self._turns.wait_for(condition)
        return True

    def close(self, timeout_s: float) -> bool:
        return True


class StreamedCopyEngine(CudaCopyEngine):
    """A replacement for `SimulatedCopyEngine`. `failed` is True once a copy has failed."""

    PATH: Literal["direct", "staged"] = "direct"

    def __init__(
        self, device: SimulatedDevicePool, host: SimulatedHostPool, numbers: random.Random, fail_rate: float,
        clock: Callable[[], float],
    ) -> None:
        self._turns = _Device(numbers.randrange(1 << 30), device.stream)
        self._simulated = _Runtime(self._turns)
        super().__init__(
            device.blocks, HostWindow(host), TransferConfig(path=self.PATH), runtime=self._simulated,
            thread=lambda name, begin: _Inline(self._turns), slot_bytes=SLOT_BYTES,
        )
        self._simulated._fail_rate = fail_rate / 4  # per call; a call has several pieces

    @property
    def failed(self) -> bool:
        return self._simulated.failed

    def close(self, timeout_s: float) -> bool:
        return super().close(max(10.0, timeout_s))

    def glance(self) -> None:
        """Advance the device in half of the calls, as time that passes between two queries."""
        if self._turns.random.random() < 0.5:
            self.tick()

    def tick(self) -> None:
        """Do one piece of the device's work: a forward or a copy."""
        self._turns.step()


class StagedCopyEngine(StreamedCopyEngine):
    """The same engine with copies through staging buffers."""

    PATH = "staged"

"""Fences of an engine that computes on the CPU in its own thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from hicache.errors import TransferError
from tests.waiting import WAIT_S


class StepCounter:
    """Counts the finished steps of an engine that computes on the CPU, and makes fences behind them.

    Any thread may call `advance`, and any may wait for a fence. Locking design: `steps` changes under `changed`.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.changed = threading.Condition()

    def advance(self) -> None:
        """Count one more finished step. Copies that waited for it can begin."""
        with self.changed:
            self.steps += 1
            self.changed.notify_all()

    def fence(self, steps: int) -> StepFence:
        """Return the fence that passes once `steps` steps have finished since the counter was made."""
        return StepFence(self, steps)


@dataclass(frozen=True, slots=True)
class StepFence:
    """A `Fence` behind a number of finished steps."""

    counter: StepCounter
    steps: int

    def query(self) -> bool:
        return self.counter.steps >= self.steps

    def synchronize(self) -> None:
        """As `Fence.synchronize`. Raises TransferError if the step does not finish in time."""
        with self.counter.changed:
            if not self.counter.changed.wait_for(self.query, WAIT_S):
                raise TransferError(f"copy: step {self.steps} did not end within {WAIT_S:.0f} s")

"""The part in a vLLM worker: copies between its blocks and its part of the shared frames, as ordered by the scheduler's
process.

It does not use pages, keys or storage. Per step, on the worker's one thread and in this order:

    flush (before anything is overwritten) -> begin_step -> start_loads -> wait_layer per layer -> start_saves
    -> collect

A load or save begins after the work that is queued on the current stream at that moment. So a load never overwrites
blocks that an earlier forward reads, and a save reads the results of the forward. Copies overlap with later forwards.

Invariant: the blocks of a save do not change until it has ended. vLLM keeps the blocks of an ended request until
`collect` returns it, and `flush` waits for the saves of a request that loses its blocks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...config import TransferConfig
from ...errors import TransferError
from ...tiers import CopyEngine, EngineBlocks, Fence, HostWindow, SharedHostPool, Transfer, create_copy_engine
from .forwards import Forward
from .jobs import CopyJob, Ended, Report, Step
from .layout import BlockLayout

logger = logging.getLogger(__name__)

# A copy that takes longer than this is stuck, and its blocks are about to be overwritten or unmapped.
_FLUSH_S_MAX = 120.0
# How long a step that computes nothing waits for a load; otherwise vLLM repeats such steps, with 1 ms between them. A
# request that arrives during the step waits for its end.
_IDLE_WAIT_S = 0.01
# Measured forwards that have not passed; more than vLLM has in flight.
_FORWARDS_MAX = 4


@dataclass(slots=True)
class Collected:
    """The ended work since the last step, for vLLM: requests whose load has ended, those of them whose load failed,
    requests whose blocks may be freed, and device blocks that a layer-wise load has not filled.
    """

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Copy:
    job: CopyJob
    transfer: Transfer | None  # None: lost, or not this rank's to save
    layerwise: bool = False

    @property
    def done(self) -> bool:
        return self.transfer is None or self.transfer.done()

    @property
    def failed(self) -> bool:
        return self.job.lost if self.transfer is None else self.transfer.error is not None

    @property
    def ended(self) -> Ended:
        seconds = None if self.transfer is None else self.transfer.seconds
        return Ended(1, seconds or 0.0, self.failed)


class WorkerSide:
    """See the module's docstring. `layers` are the regions of each layer, as `EngineBlocks` takes them.

    Raises InvalidInput for a layout in which a block is not one piece of memory, and for layers whose size does not
    match the page.
    """

    def __init__(
        self, pool: SharedHostPool, layout: BlockLayout, rank: int, layers: list[list[torch.Tensor]],
        transfer: TransferConfig | None = None,
    ) -> None:
        blocks = EngineBlocks(layers)
        first, pieces = layout.window(rank)
        self.pool = pool
        self._saves_here = layout.saves(rank)
        window = HostWindow(pool, first, pieces, layout.blocks_per_page)
        self._copies: CopyEngine = create_copy_engine(blocks, window, transfer)
        self._device = blocks.device
        self._loads: dict[int, _Copy] = {}
        self._saves: dict[int, _Copy] = {}
        self._waiting_release: set[str] = set()
        self._timer = _ForwardTimer(blocks.device)
        self._report = Report()
        self._invalid_blocks: set[int] = set()

    # Each step

    def flush(self, step: Step) -> None:
        """Block until the saves of the requests in `step.flush` have ended. Raises TransferError if one is stuck: its
        copy might contain later writes."""
        lost = set(step.flush)
        _wait(copy for copy in self._saves.values() if copy.job.rid in lost)

    def drain(self) -> None:
        """Block until all copies have ended, because vLLM gives the memory of its blocks back. Raises TransferError if
        one is stuck."""
        _wait([*self._loads.values(), *self._saves.values()])

    def begin_step(self, step: Step) -> None:
        """Start the measurement of a step's forward."""
        self._timer.begin(step.measured)

    def start_loads(self, step: Step) -> None:
        """Start the loads of a step. Does not block."""
        for job in step.loads:
            transfer = None if job.lost else self._copies.load(job.host_blocks, job.blocks, after=self._fence())
            self._loads[job.id] = _Copy(job, transfer, step.layerwise)

    def wait_layer(self, layer: int) -> None:
        """Order the forward after the layer-wise loads of `layer`; on the CPU, block until they have arrived.

        A failed load does not raise: its blocks are reported as invalid, and vLLM computes them again.
        """
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        for copy in self._loads.values():
            if copy.layerwise and copy.transfer is not None:
                try:
                    copy.transfer.wait_layer(layer, stream)
                except TransferError as error:
                    self._invalidate(copy, error)

    def start_saves(self, step: Step) -> None:
        """End the measured forward and start the saves of a step. Does not block."""
        self._timer.end()
        for job in step.saves:
            saves = self._saves_here
            transfer = self._copies.backup(job.blocks, job.host_blocks, after=self._fence()) if saves else None
            self._saves[job.id] = _Copy(job, transfer)

    def collect(self, step: Step) -> Collected:
        """Process all ended copies. In an idle step, first blocks shortly until the oldest load has ended."""
        if step.idle and self._loads and (transfer := next(iter(self._loads.values())).transfer) is not None:
            transfer.wait(_IDLE_WAIT_S)
        found = Collected()
        for copy in self._take_ended(self._loads):
            if not copy.layerwise:
                found.received.add(copy.job.rid)
                if copy.failed:
                    found.failed.add(copy.job.rid)
            elif copy.failed:
                self._invalidate(copy, None if copy.transfer is None else copy.transfer.error)
        for _ in self._take_ended(self._saves):
            pass
        self._waiting_release.update(step.release)
        busy = {copy.job.rid for copy in self._saves.values()}
        found.released = self._waiting_release - busy
        self._waiting_release &= busy
        found.invalid_blocks, self._invalid_blocks = self._invalid_blocks, set()
        return found

    def take_report(self) -> Report | None:
        """Return the report since the last call, or None."""
        measured = self._timer.take()
        if measured is not None:
            self._report.forward = measured
        if not self._report.jobs and self._report.forward is None:
            return None
        report, self._report = self._report, Report()
        return report

    def close(self, timeout_s: float) -> bool:
        """End the copies; return False if one is still running after `timeout_s`."""
        return self._copies.close(timeout_s)

    def _take_ended(self, copies: dict[int, _Copy]) -> Iterable[_Copy]:
        for number in [number for number, copy in copies.items() if copy.done]:
            copy = copies.pop(number)
            self._report.jobs[number] = copy.ended
            if copy.transfer is not None and copy.transfer.error is not None:
                logger.warning("a copy of %d blocks failed: %s", len(copy.job.blocks), copy.transfer.error)
            yield copy

    def _fence(self) -> Fence | None:
        """Return a point after all work on the current stream; None on the CPU, where the forward has already ended."""
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    def _invalidate(self, copy: _Copy, error: TransferError | None) -> None:
        self._invalid_blocks.update(copy.job.blocks.tolist())
        logger.warning("a load of %d blocks failed; they are computed again: %s", len(copy.job.blocks), error)


def _wait(copies: Iterable[_Copy]) -> None:
    for copy in copies:
        if copy.transfer is not None and not copy.transfer.wait(_FLUSH_S_MAX):
            raise TransferError(f"copy: it has not ended within {_FLUSH_S_MAX:.0f} s; restart the engine")


class _ForwardTimer:
    """Measures forwards: on CUDA with events of the stream, which are read after they have passed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._forward: Forward | None = None
        self._began: Any = None
        self._ended: deque[tuple[Forward, Any, Any]] = deque(maxlen=_FORWARDS_MAX)

    def begin(self, forward: Forward | None) -> None:
        self._forward = forward
        if forward is not None:
            self._began = self._mark()

    def end(self) -> None:
        if self._forward is not None:
            self._ended.append((self._forward, self._began, self._mark()))
            self._forward = None

    def take(self) -> tuple[Forward, float] | None:
        """Return the next forward that has passed, and its seconds."""
        if not self._ended:
            return None
        forward, began, ended = self._ended[0]
        if self._device.type == "cuda":
            if not ended.query():
                return None
            seconds = began.elapsed_time(ended) / 1e3
        else:
            seconds = ended - began
        self._ended.popleft()
        return forward, seconds

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

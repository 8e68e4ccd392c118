"""The copy engine of CUDA devices: a copy thread and streams for each direction, one event per layer.

The scheduler thread checks the ids and queues one entry. The copy thread computes all addresses and submits the copy
layer by layer; a full driver queue blocks only this thread. Layer i computes while layer i + 1 is in flight. The engine
chooses one of the two paths of `copy_paths` at start.

On CUDA, a wait for an event that is not recorded yet does nothing. So `wait_layer` first waits until the copy thread
has recorded the event of the layer. At that time the fence waits of this copy and of all earlier ones are queued too.
So an engine may then record its event again, and no copy waits for a forward that waits for the copy.

Locking design: the scheduler thread submits and polls. It owns each `StreamTransfer`, except for the fields that `run`,
`arrived` and `fail` write: the copy thread calls these, and writes under its condition. A transfer whose submission
fails ends only when the device is idle, because a queued part may still write to its pages.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

import torch

from ..arguments import whole
from ..config import TransferConfig
from ..errors import InvalidInput, TransferError
from ..types import Indices, PageIds
from ..units import format_size
from .blocks import EngineBlocks
from .copy import LAYER_WAIT_S_MAX, CopyEngine, Fence, Transfer
from .copy_paths import CopyPath, DirectPath, Pieces, StagedPath, direct_from_bytes, poll
from .copy_thread import CopyThread
from .host import HostWindow
from .memory import STAGING_SLOT_BYTES
from .runtime import WORDS, DeviceRuntime, Event

logger = logging.getLogger(__name__)

# Engines closed with copies in flight: their memory stays allocated, pinned and mapped.
_UNFINISHED: list[CopyEngine] = []

MakeThread = Callable[[str, Callable[[], None]], CopyThread]


class StreamTransfer(Transfer):
    """A copy whose layers end at events; one event may end several or all layers."""

    def __init__(
        self, direction: Direction, host_blocks: Indices, blocks: Indices, after: Fence | None, layers: int
    ) -> None:
        self._direction = direction
        self._host_blocks, self._blocks = host_blocks, blocks
        self._after = after
        self._layers = layers
        # Written by the copy thread: all events in order, and whether each is timed; the event of each submitted layer.
        self._events: list[tuple[Event, bool]] = []
        self._by_layer: list[Event] = []
        self._failure: TransferError | None = None
        self._submitted = False
        self._over = False  # written by the scheduler: the copy has ended and its events are released
        self._seconds: float | None = None

    @property
    def error(self) -> TransferError | None:
        return self._failure if self.done() else None

    @property
    def seconds(self) -> float | None:
        return self._seconds if self.done() else None

    def done(self) -> bool:
        if self._over:
            return True
        if not self._submitted or (self._failure is None and not self._passed(self._events[-1][0])):
            return False
        self._finish()
        return True

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        if not self._direction.thread.wait_for(lambda: self._submitted, timeout_s):
            return False
        return poll(self.done, deadline)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        layer = whole("layer", layer, 0, self._layers - 1)
        if not self._over:
            self._wait_layer(layer, stream)
        if self._failure is not None:
            raise self._failure

    def _wait_layer(self, layer: int, stream: torch.cuda.Stream | None) -> None:
        deadline = time.monotonic() + LAYER_WAIT_S_MAX

        def is_recorded() -> bool:
            return len(self._by_layer) > layer or self._submitted

        recorded = is_recorded() or self._direction.thread.wait_for(is_recorded, LAYER_WAIT_S_MAX)
        if self._failure is not None:
            return
        if recorded and stream is not None:
            runtime = self._direction.runtime
            runtime.wait(runtime.stream_of(stream), self._by_layer[layer])
        elif not (recorded and poll(lambda: self._passed(self._by_layer[layer]), deadline)):
            raise TransferError(f"copy: layer {layer} did not arrive within {LAYER_WAIT_S_MAX:.0f} s")

    def _passed(self, event: Event) -> bool:
        """True if the copy has failed or the device has passed `event`."""
        try:
            return self._failure is not None or self._direction.runtime.passed(event)
        except TransferError as error:
            self._failure = error  # the device has failed and runs nothing any more
            return True

    def _finish(self) -> None:
        """Read the duration and release the events."""
        runtime, self._over = self._direction.runtime, True
        if self._failure is None:
            # The next call reports a device that has failed since.
            with contextlib.suppress(TransferError):
                self._seconds = runtime.elapsed_s(self._events[0][0], self._events[-1][0])
        for event, timed in self._events:
            runtime.release(event, timed=timed)

    # Called by the copy thread

    def run(self) -> None:
        """Submit the copy."""
        try:
            self._direction.path.submit(self._host_blocks, self._blocks, self._after, self.arrived)
        except BaseException:
            self._direction.settle()
            raise
        with self._direction.thread.condition:
            self._submitted = True
            self._direction.thread.condition.notify_all()

    def arrived(self, event: Event, layers: int, timed: bool) -> None:
        """Record that the next `layers` layers end with `event`."""
        with self._direction.thread.condition:
            self._events.append((event, timed))
            self._by_layer += [event] * layers
            self._direction.thread.condition.notify_all()

    def fail(self, error: TransferError) -> None:
        with self._direction.thread.condition:
            self._failure = error
            self._submitted = True
            self._direction.thread.condition.notify_all()


class Direction:
    """One direction: its path, its thread, and the copies that may be in flight."""

    def __init__(self, runtime: DeviceRuntime, path: CopyPath, thread: CopyThread) -> None:
        self.runtime = runtime
        self.path = path
        self.thread = thread
        self._in_flight: deque[StreamTransfer] = deque()

    def submit(self, transfer: StreamTransfer) -> StreamTransfer:
        """Queue a transfer."""
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()
        self.thread.submit(transfer)
        self._in_flight.append(transfer)
        return transfer

    def settle(self) -> None:
        """Block until the queued work has ended. On a failed device nothing runs any more."""
        try:
            self.path.synchronize()
        except TransferError as error:
            logger.warning("waiting for the copies of the device failed: %s", error)

    def close(self, deadline: float) -> bool:
        """End the thread and wait for the copies. Return False if the deadline passes first."""
        ended = self.thread.close(max(0.0, deadline - time.monotonic()))
        return ended and all(one.wait(max(0.0, deadline - time.monotonic())) for one in self._in_flight)


class CudaCopyEngine(CopyEngine):
    """See the module's docstring.

    The constructor blocks for some milliseconds while it measures which path is faster. The staged path allocates
    `STAGING_BYTES` on the device. Raises InvalidInput if the host pool is not pinned, or if `transfer.path` is `staged`
    and a layer is longer than a staging slot. Tests replace `runtime`, `thread` and `slot_bytes`.
    """

    def __init__(
        self, blocks: EngineBlocks, window: HostWindow, config: TransferConfig | None = None, *,
        runtime: DeviceRuntime | None = None, thread: MakeThread = CopyThread, slot_bytes: int = STAGING_SLOT_BYTES,
    ) -> None:
        super().__init__(blocks, window)
        if runtime is None:
            from .cuda_runtime import CudaRuntime  # noqa: PLC0415  loads the driver

            if not window.host.pinned:
                raise InvalidInput("copy: the host pool is not pinned for a CUDA device; open it with `pin`")
            runtime = CudaRuntime(blocks.device)
        self._runtime = runtime
        self._pieces = Pieces(blocks, window)
        with contextlib.ExitStack() as undo, runtime.current():
            undo.callback(runtime.close)
            paths = self._make_paths(config or TransferConfig(), slot_bytes)
            undo.pop_all()
        names = "hicache-backup-copy", "hicache-load-copy"
        self._backups, self._loads = (
            Direction(runtime, path, thread(name, runtime.attach)) for path, name in zip(paths, names, strict=True)
        )

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        source, target = self._require_pairs(blocks, host_blocks, after)
        return self._submit(self._backups, target, source, after)

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        target, source = self._require_pairs(blocks, host_blocks, after)
        return self._submit(self._loads, source, target, after)

    def require_fence(self, fence: Fence) -> None:
        """Check as every engine; on a CUDA device a fence is a recorded `torch.cuda.Event`."""
        super().require_fence(fence)
        self._runtime.require_fence(fence)

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        ended = all([direction.close(deadline) for direction in (self._backups, self._loads)])
        if not ended:
            _UNFINISHED.append(self)
            return False
        try:
            self._runtime.close()
        except TransferError as error:
            logger.warning("the streams of a failed device could not be released: %s", error)
        return True

    def _submit(self, direction: Direction, host_blocks: Indices, blocks: Indices, after: Fence | None) -> Transfer:
        return direction.submit(StreamTransfer(direction, host_blocks, blocks, after, self._pieces.layers))

    def _make_paths(self, config: TransferConfig, slot_bytes: int) -> list[CopyPath]:
        """Return the paths of backups and of loads. Logs the choice and its reason."""
        pieces, runtime = self._pieces, self._runtime
        path, reason = config.path, "as configured"
        fits = max(self.blocks.layer_bytes) <= slot_bytes - slot_bytes % WORDS[0]
        if path == "auto":
            threshold = direct_from_bytes(runtime)
            path = "staged" if fits and pieces.shortest < threshold else "direct"
            reason = f"direct copies are fast from {format_size(threshold)} on"
        elif path == "staged" and not fits:
            raise InvalidInput(
                f"transfer.path: staged: a layer of a page has {format_size(max(self.blocks.layer_bytes))}, a slot of "
                f"staging {format_size(slot_bytes)}; use direct or auto"
            )
        paths: list[CopyPath] = []
        if path == "staged":
            try:
                paths = [StagedPath(runtime, pieces, load=is_load, slot_bytes=slot_bytes) for is_load in (False, True)]
            except TransferError as error:
                if config.path == "staged":
                    raise
                logger.warning("copies of short pieces are slow, because staging cannot be used: %s", error)
                path = "direct"
        shortest = format_size(pieces.shortest)
        logger.info("copies on %s are %s: the shortest piece has %s, %s", self.blocks.device, path, shortest, reason)
        self.path = path
        return paths or [DirectPath(runtime, pieces, load=is_load) for is_load in (False, True)]

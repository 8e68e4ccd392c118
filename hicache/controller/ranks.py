"""Rank groups: the ranks of one engine compute the minimum of a few integers, once per step.

The all-reduce is pipelined: a step starts one and the next step takes its result. So it runs during the forward, and
usually no rank waits for it. One is in flight at a time, and all ranks start the same all-reduces in the same order.

The deadline runs from `start`. A dead peer is detected at once, because its connection closes; a stopped or stuck peer
at the deadline. Both raise RankError and never hang. After that the group is permanently broken.

Use gloo on machines with GPUs too: the integers start and end in host memory, and a second NCCL communicator competes
with the engine's own for the device. NCCL is for machines whose ranks have no other network.

Locking design: the scheduler thread makes every call. The transport has its own threads (or stream) and touches only
the buffer of the all-reduce in flight, which is read only after its end.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..arguments import instance_or_new
from ..clock import SYSTEM_CLOCK, Clock
from ..config import RanksConfig
from ..errors import InvariantError, RankError
from ..tiers.device import known_device

Int64s: TypeAlias = npt.NDArray[np.int64]

# A wait for a device event has no time limit, so the event is polled this often.
_POLL_S = 50e-6
_SUCCESS = 0  # WorkResult.SUCCESS of torch's process groups


class RankGroup(Protocol):
    """The ranks that make the same decisions, each on its own shard. All calls are on the scheduler thread."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def start(self, values: Int64s) -> None:
        """Start one MIN all-reduce of `values`, int64 [n], which are copied. Does not block.

        REQUIRES: no all-reduce is in flight, and n is the same on all ranks. Raises RankError.
        """

    def result(self) -> Int64s:
        """Return the result of the started all-reduce, int64 [n]. Waits for it up to the deadline. Raises RankError."""

    def agree(self, values: Int64s) -> Int64s:
        """Call `start` and `result`; blocks. For start-up. Raises RankError."""

    def close(self) -> None:
        """Leave the group. Does not block. The other ranks get a RankError when they next wait for this rank."""


class Reducer(Protocol):
    """The part of a torch process group that is used here."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions) -> Any:
        """Start an all-reduce in place and return its work handle."""


class TorchRankGroup:
    """A `RankGroup` over a process group of torch: gloo if `device` is the CPU, NCCL if it is a CUDA device.

    The process group may be the engine's own, with any timeout, if only the scheduler thread uses it; a separate one
    (`torch.distributed.new_group`) is better. `close` does not destroy it.
    """

    def __init__(
        self, group: Reducer, options: RanksConfig | None = None, *, device: torch.device | str = "cpu",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._deadline_s = instance_or_new("options", options, RanksConfig).deadline
        self.rank = group.rank()
        self.size = group.size()
        device = known_device(device)
        self._reduction: _HostReduction | _DeviceReduction
        if device.type == "cpu":
            self._reduction = _HostReduction(group, self._deadline_s, clock)
        else:
            self._reduction = _DeviceReduction(group, device, clock)
        self._deadline = 0.0  # of the all-reduce in flight
        self._in_flight = False
        self._failure: RankError | None = None

    def start(self, values: Int64s) -> None:
        self._require_whole()
        if self._in_flight:
            raise InvariantError("rank group: an all-reduce is in flight; take its result first")
        self._deadline = self._clock() + self._deadline_s
        try:
            self._reduction.start(values)
        except RuntimeError as error:
            raise self._broken() from error
        self._in_flight = True

    def result(self) -> Int64s:
        self._require_whole()
        if not self._in_flight:
            raise InvariantError("rank group: no all-reduce is in flight; start one first")
        self._in_flight = False
        try:
            return self._reduction.result(self._deadline)
        except RuntimeError as error:
            raise self._broken() from error

    def agree(self, values: Int64s) -> Int64s:
        self.start(values)
        return self.result()

    def close(self) -> None:
        """See RankGroup. The transport ends an all-reduce in flight, at the deadline at the latest."""
        if self._failure is None:
            self._failure = RankError("the rank group is closed")

    def _require_whole(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _broken(self) -> RankError:
        self._failure = RankError(
            f"rank {self.rank} of {self.size}: another rank is gone or did not answer within {self._deadline_s:g} s; "
            "call `close()`, then restart all ranks"
        )
        return self._failure


def _minimum(timeout: timedelta | None = None) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    if timeout is not None:
        options.timeout = timeout
    return options


class _HostReduction:
    """All-reduces of host memory. The transport ends each by the deadline. A limit on the wait alone would leave a
    thread that keeps the process from exiting.
    """

    def __init__(self, group: Reducer, deadline_s: float, clock: Clock) -> None:
        self._clock = clock
        self._group = group
        self._options = _minimum(timedelta(seconds=deadline_s))
        self._tensor = torch.empty(0, dtype=torch.int64)
        self._work: Any = None

    def start(self, values: Int64s) -> None:
        if len(values) != len(self._tensor):
            self._tensor = torch.empty(len(values), dtype=torch.int64)
        self._tensor.numpy()[:] = values
        self._work = self._group.allreduce([self._tensor], self._options)

    def result(self, deadline: float) -> Int64s:
        work, self._work = self._work, None
        # Never 0: a result that has arrived counts, even after the deadline.
        work.wait(timedelta(seconds=max(0.001, deadline - self._clock())))
        result: Int64s = self._tensor.numpy().copy()
        return result


class _DeviceReduction:
    """All-reduces of device memory on a separate stream: neither the host nor a stream of the forward waits.

    An aborted communicator ends its kernels without a result, so the work is checked for an error before its values
    count. A kernel that is stuck at the deadline stays on the device until the watchdog of the process group or the end
    of the process stops it. REQUIRES: TORCH_NCCL_BLOCKING_WAIT is not set; it would make the host wait in `start`.
    """

    def __init__(self, group: Reducer, device: torch.device, clock: Clock) -> None:
        self._clock = clock
        self._group = group
        self._device = device
        self._options = _minimum()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._resize(0)

    def _resize(self, count: int) -> None:
        self._outgoing = torch.empty(count, dtype=torch.int64, pin_memory=True)
        self._incoming = torch.empty(count, dtype=torch.int64, pin_memory=True)
        self._tensor = torch.empty(count, dtype=torch.int64, device=self._device)
        self._work: Any = None

    def start(self, values: Int64s) -> None:
        if len(values) != len(self._tensor):
            self._resize(len(values))
        self._outgoing.numpy()[:] = values
        # At the end of the block torch sets the previous stream again, which creates a context on its device. So this
        # device must be the current one.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._tensor.copy_(self._outgoing, non_blocking=True)
            self._work = self._group.allreduce([self._tensor], self._options)
            self._work.wait()  # queues a wait on this stream; the host continues
            self._incoming.copy_(self._tensor, non_blocking=True)
            self._event.record(self._stream)

    def result(self, deadline: float) -> Int64s:
        while not (self._event.query() and self._work.is_completed()):  # type: ignore[no-untyped-call]
            if self._clock() >= deadline:
                raise RuntimeError("the device has not finished the all-reduce")
            self._clock.sleep(_POLL_S)
        # The watchdog sets this before it aborts. Neither `exception()` nor `wait()` of the handle shows an abort.
        outcome = self._work.get_future_result()
        if outcome.done() and outcome.value() != _SUCCESS:
            raise RuntimeError(f"NCCL aborted the all-reduce (WorkResult {outcome.value()})")
        result: Int64s = self._incoming.numpy().copy()
        return result


def require_equal(group: RankGroup, what: str, value: str) -> None:
    """Check at start-up that all ranks have the same `value`, such as a configuration. Blocks. Raises RankError."""
    digest = hashlib.sha256(value.encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 2  # fits an int64, and so does its negative
    lowest, highest = group.agree(np.array([number, -number], dtype=np.int64)).tolist()
    if lowest != -highest:
        raise RankError(f"the ranks differ in their {what}; start all of them with the same one")

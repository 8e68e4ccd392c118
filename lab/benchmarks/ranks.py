"""Agreement of ranks: its cost per scheduler step, over gloo on one machine.

    python -m lab.benchmarks.ranks

The reference is one blocking `torch.distributed.all_reduce` of a vector of the same length, in the same run, with the
same pause between steps; ratio = ours : reference. Only the time inside the calls counts, not the pause, which
simulates the forward pass. Results are the median per step of the slowest rank, with the 99th percentile in brackets.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from hicache.config import RanksConfig
from hicache.controller.agreement import Agreement, Progress
from hicache.controller.ranks import Reducer, TorchRankGroup

from ._table import Row, print_table, reduced

DEADLINE_S = 30.0
# A short decode step; longer ones hide more of the cost.
PAUSE_S = 0.002
STEPS = reduced(1000, 20)
PREFETCH_PLACES = 64
COUNTS = dict.fromkeys(("writes", "loads", "stores", "prefetches", "free host pages"), 0)


class _Measurer:
    """The ways to agree, on one rank. Each call is that of one step; the first call of `split` only starts."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        group = TorchRankGroup(cast(Reducer, dist.group.WORLD), RanksConfig(deadline=DEADLINE_S))
        self.agreement = Agreement(group, prefetch_places=PREFETCH_PLACES, rates=0)
        self.vector = torch.zeros(_vector_length(), dtype=torch.int64)

    def bare(self) -> None:
        dist.all_reduce(self.vector, op=dist.ReduceOp.MIN)

    def start(self) -> None:
        self.agreement.start(Progress(), COUNTS)

    def blocking(self) -> None:
        self.start()
        self.agreement.result()

    def pipelined(self) -> None:
        self.agreement.result()
        self.start()


def _vector_length() -> int:
    """Return the length of the vector that Agreement sends, measured with a group that only records it."""
    lengths: list[int] = []

    class Looking:
        rank, size = 0, 1

        def start(self, values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
            lengths.append(len(values))

    looking = cast(TorchRankGroup, Looking())
    Agreement(looking, prefetch_places=PREFETCH_PLACES, rates=0).start(Progress(), COUNTS)
    return lengths[0]


def microseconds(call: Callable[[], None]) -> list[float]:
    """Return the microseconds of each step, after a few warm-up steps."""
    times = []
    for _ in range(STEPS + reduced(50)):
        time.sleep(PAUSE_S)
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    return times[reduced(50) :]


def measure(rank: int, size: int, folder: str, results: Connection) -> None:
    """Run one rank, in a separate process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    measurer = _Measurer()
    times = {"bare": microseconds(measurer.bare), "blocking": microseconds(measurer.blocking)}
    measurer.start()
    times["pipelined"] = microseconds(measurer.pipelined)
    measurer.agreement.result()
    results.send({way: (float(np.median(t)), float(np.percentile(t, 99))) for way, t in times.items()})
    dist.barrier()
    dist.destroy_process_group()


def rows_of(size: int) -> list[Row]:
    """Return rows of all ways for one number of ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        receivers, processes = [], []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=measure, args=(rank, size, folder, sender), daemon=True)
            process.start()
            sender.close()  # the child has its own end, so the pipe closes if the child dies
            receivers.append(receiver)
            processes.append(process)
        results = [receiver.recv() for receiver in receivers]
        for process in processes:
            process.join()
    slowest = {way: max(result[way] for result in results) for way in results[0]}
    reference, _ = slowest["bare"]
    return [
        Row(f"{size} ranks, {way}", _text(slowest[way]), _text(slowest["bare"]), slowest[way][0] / reference)
        for way in ("pipelined", "blocking")
    ]


def _text(times: tuple[float, float]) -> str:
    return f"{times[0]:.0f} us ({times[1]:.0f})"


def main() -> None:
    """Command line."""
    rows = [row for size in (2, 4)[: reduced(2)] for row in rows_of(size)]
    print_table(f"Agreement per step, {_vector_length()} integers (reference: one blocking all-reduce)", rows)


if __name__ == "__main__":
    main()

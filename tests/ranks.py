"""Rank groups for tests: several ranks in one process, without a network."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import torch.distributed as dist

from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config import RanksConfig
from hicache.controller.ranks import Int64s, Reducer, TorchRankGroup


class Exchange:
    """The all-reduces of ranks in one thread, which runs one step of each rank in turn."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.started: list[list[Int64s]] = [[] for _ in range(size)]

    def ranks(self) -> list[LockstepRank]:
        return [LockstepRank(rank, self) for rank in range(self.size)]

    def disagreements(self) -> int:
        """Return the number of steps in which the ranks started with different values."""
        return sum(
            any(not np.array_equal(vector, vectors[0]) for vector in vectors)
            for vectors in zip(*self.started, strict=True)
        )


class LockstepRank:
    """A `RankGroup` without waiting. REQUIRES: all ranks have started an all-reduce before one takes its result."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank = rank
        self.size = exchange.size
        self._exchange = exchange
        self._taken = 0

    def start(self, values: Int64s) -> None:
        self._exchange.started[self.rank].append(values.copy())

    def result(self) -> Int64s:
        vectors = [started[self._taken] for started in self._exchange.started]
        self._taken += 1
        result: Int64s = np.minimum.reduce(vectors)
        return result

    def agree(self, values: Int64s) -> Int64s:
        raise NotImplementedError("one thread cannot wait for itself")

    def close(self) -> None:
        pass


def gloo_ranks(
    size: int, *, deadline_s: float | None = None, options: RanksConfig | None = None, clock: Clock = SYSTEM_CLOCK
) -> list[TorchRankGroup]:
    """Return ranks of one process over real sockets. Use each on its own thread, or all in turn."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=60)
    options = options or RanksConfig(deadline=deadline_s)
    with ThreadPoolExecutor(size) as pool:  # each call blocks until the others connect
        groups = pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, size, timeout), range(size))
    return [TorchRankGroup(cast(Reducer, group), options, clock=clock) for group in groups]

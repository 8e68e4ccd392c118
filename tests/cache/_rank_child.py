"""One rank in its own process: `python -m tests.cache._rank_child JSON`, see `Task`.

It writes a digest of its decisions after each step, and its result, to `rank-N.json` in the folder of the task.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch.distributed as dist

from hicache.config import RanksConfig
from hicache.controller.ranks import RankGroup, Reducer, TorchRankGroup
from hicache.errors import RankError
from tests.cache.random_engine import STEPS, RandomEngine, small_world
from tests.cache.ranked import LONG_S, SHORT_S, UnevenCopies, UnreliableBackend, decisions


@dataclass(frozen=True, slots=True)
class Task:
    """The task of one rank. The last rank sends `signal` to itself in the middle of the first seed."""

    folder: str
    rank: int
    size: int
    seeds: list[int]
    deadline_s: float
    signal: int = 0


@dataclass(slots=True)
class Outcome:
    """The result of a rank. `digests` has one entry per step; `error` is the RankError that ended the rank, if any."""

    digests: list[str]
    wrong_pages: int = 0
    storage_hit_tokens: int = 0
    error: str | None = None
    closed: bool = False


def steps(engine: RandomEngine) -> Iterator[None]:
    """Run an engine to its end, and yield after each step. Copies and stores may still be in flight at the end."""
    for _ in range(STEPS):
        engine.next_action()()
        yield
    while engine.waiting or engine.running:
        engine.wind_down()
        yield


def run_engine(task: Task, seed: int, backend: UnreliableBackend, timeout_s: float, outcome: Outcome) -> None:
    """Run one engine over `backend`. The pools of the ranks differ in size; all ranks use the smallest size."""
    # Each engine has its own group.
    ranks: RankGroup = TorchRankGroup(cast(Reducer, dist.group.WORLD), RanksConfig(deadline=task.deadline_s))
    device_pages, host_pages = ranks.agree(np.array([24 + 2 * task.rank, 44 - task.rank], dtype=np.int64)).tolist()
    world = small_world(
        backend, device_pages=device_pages, host_pages=host_pages, timeout_s=timeout_s,
        copies=UnevenCopies, ranks=ranks,
    )
    engine = RandomEngine(random.Random(seed), world)
    try:
        for _ in steps(engine):
            outcome.digests.append(decisions(world, [request for request, _ in engine.running]))
            if task.signal and task.rank == task.size - 1 and len(outcome.digests) == STEPS // 2:
                os.kill(os.getpid(), task.signal)
    except RankError as error:
        outcome.error = str(error)
    outcome.storage_hit_tokens += world.cache.statistics().hit_tokens.get("storage", 0)
    outcome.closed = world.cache.close()
    world.cache.check()
    outcome.wrong_pages += world.wrong_pages


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    dist.init_process_group(
        "gloo", init_method=f"file://{task.folder}/rendezvous", rank=task.rank, world_size=task.size
    )
    outcome = Outcome([])
    for seed in task.seeds:
        backend = UnreliableBackend(100 * seed + task.rank, misses=0.4 / task.size)
        run_engine(task, seed, backend, SHORT_S, outcome)
        if outcome.error is not None:
            break
        # The second engine serves the same prompts. Storage has the pages of the first, which differ between ranks.
        backend.failures = backend.misses = 0.0
        run_engine(task, seed, backend, LONG_S, outcome)
    Path(task.folder, f"rank-{task.rank}.json").write_text(json.dumps(asdict(outcome)))
    dist.destroy_process_group()


if __name__ == "__main__":
    signal.alarm(120)  # the process ends even if the test fails
    main()

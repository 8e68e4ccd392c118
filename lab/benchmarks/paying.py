"""Whether a store ever costs time: replays with the default, with `break_even.mode: always`, and without a store.

    python -m lab.benchmarks.paying [CHAT_TRACE AGENTS_TRACE] [--only chat|agents] [--waiting-max N]

Replays are in virtual time, so each one has one answer, which the machine and its load do not change. Each cell of the
matrix is a trace, an offered load, a number of I/O workers and a speed of the store, in multiples of break-even: the
bandwidth that reads KV as fast as the device computes it. At load 1, the computing of a replay without a store takes as
long as its arrivals.

The figures of a cell are the time until the last request has ended, and the mean time to first token. Ours is the
default, the reference is the better of the other two. ratio = ours : reference; goals are maximums.

Arrivals wait outside while the queue has `--waiting-max` requests, and their time to first token begins when they are
admitted. In a longer queue each lost hit delays all requests behind it, and more hits are lost while they wait: so
small differences grow, and the goals do not apply.

The traces are not part of this project; docs/traces.md says where to get them. The goals apply to Mooncake's
conversation trace and to the sessions of coding agents of kv-cache-tester. Without them a synthetic trace is replayed,
which has no goals.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from enum import StrEnum
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from hicache.cli.model_shapes import PRESETS
from hicache.config import load_config
from hicache_lab.replay.job import ReplayJob
from hicache_lab.replay.virtual.engines import VirtualEngines
from hicache_lab.speeds import ComputeSpeed, Speeds, StorageSpeed

from ._table import Row, print_table, reduced

GOAL = 1.02
REQUESTS = 400
MODEL = "llama-3.1-8b"
PREFILL_TOKENS_PER_S = 20_000
PREFILL_TOKENS_MAX = 2048
HOST_BYTES_PER_S = 20e9
STORE_FIXED_S = 200e-6
BREAK_EVEN_BYTES_PER_S = PREFILL_TOKENS_PER_S * PRESETS[MODEL].token_bytes
DEVICE_TOKENS, HOST_TOKENS = 131_072, 262_144
WAITING_MAX = 8
LOADS = (0.3, 0.7, 1.0, 1.5)
WORKERS = (1, 8)
SPEEDS = (0.5, 0.7, 1.0, 1.3, 2.0, 4.0, 8.0)
# The speed of computing without a store depends on the load, and the load on that speed: the second round is near.
CALIBRATIONS = 2


class Side(StrEnum):
    """What a replay does with the store."""

    DEFAULT = "default"
    ALWAYS = "always"  # fetch each hit
    OFF = "no store"


class Workload(NamedTuple):
    """A trace (None: the synthetic one), how many times `DEVICE_TOKENS` and `HOST_TOKENS` L1 and L2 have, and how many
    requests may wait."""

    name: str
    trace: Path | None
    size: int = 1
    waiting_max: int = WAITING_MAX


class Run(NamedTuple):
    """The arguments of one replay: `speed_up` of the arrivals, I/O workers, and the store in multiples of break-even.
    Without a store, the last two change nothing and are 0."""

    workload: Workload
    requests: int
    speed_up: float
    side: Side
    workers: int = 0
    speed: float = 0.0


class Times(NamedTuple):
    """The figures of one replay, in seconds."""

    ended_s: float
    first_token_s: float
    computed_s: float


# By title: the column of `Times`, and digits after the point.
FIGURES = {"time until the last request has ended": (0, 1), "mean time to first token": (1, 3)}


def job_of(run: Run) -> ReplayJob:
    """Return the replay of a run."""
    workload, bytes_per_s = run.workload, run.speed * BREAK_EVEN_BYTES_PER_S
    entries = {"page_size": "64", "device.tokens": str(workload.size * DEVICE_TOKENS),
               "host.tokens": str(workload.size * HOST_TOKENS)}
    speeds = Speeds(compute=ComputeSpeed(tokens_per_s=PREFILL_TOKENS_PER_S), host_bytes_per_s=HOST_BYTES_PER_S)
    if run.side is not Side.OFF:
        entries |= {"storage.type": "memory", "transfer.io_workers": str(run.workers)}
        store = StorageSpeed(read_bytes_per_s=bytes_per_s, write_bytes_per_s=bytes_per_s, fixed_s=STORE_FIXED_S)
        speeds = Speeds(compute=speeds.compute, host_bytes_per_s=HOST_BYTES_PER_S, storage=store)
    if run.side is Side.ALWAYS:
        entries["break_even.mode"] = "always"
    return ReplayJob(
        config=load_config(None, environ={}, overrides=entries), trace=workload.trace, requests=run.requests,
        preset=MODEL, prefill_tokens_max=PREFILL_TOKENS_MAX, waiting_max=workload.waiting_max, speeds=speeds,
        virtual=True, speed_up=run.speed_up,
    )


def replayed(run: Run) -> Times:
    """Replay a run in virtual time."""
    with closing(VirtualEngines(job_of(run))) as engines:
        for _ in engines.run():
            pass
        result = engines.result()
    first = result.first_token
    computed_s = result.tokens.computed / PREFILL_TOKENS_PER_S
    return Times(result.requests.last_end_s, first.total_us / 1e6 / max(1, first.count), computed_s)


def speed_up_of(workload: Workload, requests: int) -> float:
    """Return the factor by which the arrivals of a trace are faster at load 1."""
    speed_up, workload = 1.0, workload._replace(waiting_max=WAITING_MAX)
    for _ in range(CALIBRATIONS):
        run = Run(workload, requests, speed_up, Side.OFF)
        at_ms = [request.timestamp_ms for request in job_of(run).requests_of_trace()]
        speed_up = (at_ms[-1] - at_ms[0]) / 1000 / replayed(run).computed_s
    return speed_up


def without_store(run: Run) -> Run:
    """Return the same run without a store."""
    return run._replace(side=Side.OFF, workers=0, speed=0.0)


def cells(
    workload: Workload, speed_up: float, requests: int, loads: Sequence[float] = LOADS,
    workers: Sequence[int] = WORKERS, speeds: Sequence[float] = SPEEDS,
) -> dict[str, Run]:
    """Return the runs of the default by their label, for each cell of the matrix. `speed_up` is that of load 1."""
    return {
        f"load {load:g}, {each} worker{'s' * (each > 1)}, store {speed:g} x": Run(
            workload, requests, load * speed_up, Side.DEFAULT, each, speed
        )
        for load, each, speed in itertools.product(loads, workers, speeds)
    }


def all_runs(runs: Collection[Run]) -> list[Run]:
    """Return the runs of all sides, each one once."""
    return list(dict.fromkeys([*runs, *(run._replace(side=Side.ALWAYS) for run in runs), *map(without_store, runs)]))


def row(label: str, run: Run, matrix: Mapping[Run, Times], figure: str, goal: float | None) -> Row:
    """Return the row of a cell: one figure of the default beside the better of the other sides."""
    column, digits = FIGURES[figure]
    ours_s = matrix[run][column]
    others = run._replace(side=Side.ALWAYS), without_store(run)
    reference_s, side = min((matrix[other][column], other.side) for other in others)
    ratio = ours_s / reference_s if reference_s else None
    return Row(label, f"{ours_s:,.{digits}f} s", f"{reference_s:,.{digits}f} s ({side})", ratio, goal)


def worst(rows: Sequence[Row], figure: str, goal: float | None) -> Row:
    """Return the row of the largest ratio, labelled with its cell and with how many cells miss the goal."""
    found = max(rows, key=lambda each: each.ratio or 0.0)
    missed = "" if goal is None else f"; {sum((each.ratio or 0.0) > goal for each in rows)} of {len(rows)} miss it"
    return Row(f"{figure} ({found.what}{missed})", found.ours, found.reference, found.ratio, goal)


def show(workload: Workload, pool: ProcessPoolExecutor, goal: float | None) -> None:
    """Replay the matrix of one trace, and print its tables."""
    requests = reduced(REQUESTS, 20)
    speed_up = pool.submit(speed_up_of, workload, requests).result()
    runs = cells(workload, speed_up, requests, LOADS[: reduced(4)], WORKERS[: reduced(2)], SPEEDS[: reduced(7)])
    wanted = all_runs(runs.values())
    matrix = dict(zip(wanted, pool.map(replayed, wanted), strict=True))
    tables = {figure: [row(label, run, matrix, figure, goal) for label, run in runs.items()] for figure in FIGURES}
    print_table(f"The worst of the {workload.name}", [worst(rows, name, goal) for name, rows in tables.items()])
    for figure, rows in tables.items():
        print_table(f"{workload.name[0].upper()}{workload.name[1:]}: {figure}", rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="The default beside `always` and beside no store, in virtual time")
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE",
                        help="the chat trace and the agents' trace (default: a synthetic one, no goals)")
    parser.add_argument("--only", choices=("chat", "agents"), help="one of the two traces")
    parser.add_argument("--waiting-max", type=int, default=WAITING_MAX, metavar="N", help="the longest queue")
    options = parser.parse_args()
    if len(options.traces) not in (0, 2):
        parser.error("name both traces or neither")
    workloads = {"synthetic": Workload("synthetic trace", None)}
    if options.traces:
        chat, agents = options.traces
        workloads = {"chat": Workload("chats", chat), "agents": Workload("coding agents", agents, 4)}
    processes = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for name, workload in workloads.items():
            if options.only in (None, name):
                goal = GOAL if options.traces and options.waiting_max == WAITING_MAX else None
                show(workload._replace(waiting_max=options.waiting_max), pool, goal)


if __name__ == "__main__":
    main()

"""How many hits the hints of agents add: replays of the whole cache in virtual time, with hints of different quality.

    python -m lab.benchmarks.hints TRACE [--policy lru|adaptive]

Each session says after a request when it returns, or that it has ended (`hicache_lab/replay/hints.py`): exactly, with
times that are wrong by a factor of 3 in the mean, with noise, or after half of its requests only. Hits of L1 and L2 are
beside those of the optimum that knows the future, and then:

*error=3*: the hits that it adds to those without hints, of those that exact hints add. The goal is half of them.
*noise*: of the hits without hints. The goal is 0.99.

Where exact hints add less than 1 % there is nothing to gain, and the first ratio has no goal. Figures of hints with
random errors are means of several seeds. Cells are those of `eviction`: a cache has a share of the pages of the trace,
L1 a quarter of it, and only the kept pages differ, because one request runs at a time and takes almost no time. Unlike
there, requests arrive at their recorded times.

The trace is not part of this project: docs/traces.md says where to get the sessions of coding agents of
kv-cache-tester. Another one must have sessions and times.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from hicache_lab.replay.hints import HintErrors
from hicache_lab.replay.virtual.engines import VirtualEngines
from hicache_lab.traces.trace import read_trace

from ._table import Row, print_table, reduced
from .eviction import (
    AGENT_APART_MS,
    AGENT_COPIES,
    SETTINGS,
    Run,
    cells,
    copies,
    hits_row,
    in_pages,
    job_of,
    optimum,
    workload,
)
from .eviction import title as title_of

# The kinds of hints. The first is the reference of the others.
KINDS = ("no hints", "exact", "error=3", "noise", "missing=0.5")
POLICIES = ("lru", "adaptive")
SIZES = (16, 8, 4, 2)
SEEDS = 3
ERROR_GOAL, NOISE_GOAL = 0.5, 0.99
# Of the hits without hints: with less to gain, a share of it says nothing.
GAIN_MIN = 0.01

# The hits of a run with one kind of hints, in tokens.
Hits: TypeAlias = "Mapping[tuple[Run, str], int]"


def replayed(run: Run, kind: str, seed: int) -> int:
    """Return the hits, in tokens, of a replay with hints of a kind."""
    hints = None if kind == KINDS[0] else HintErrors.parse(kind)
    with closing(VirtualEngines(replace(job_of(run), hints=hints, seed=seed))) as engines:
        for _ in engines.run():
            pass
        return sum(engines.result().tokens.hits.values())


def seeds_of(kind: str) -> range:
    """Return the seeds of replays with a kind of hints: one if it has no random numbers."""
    return range(1 if kind in KINDS[:2] else reduced(SEEDS))


def hits_of(runs: Mapping[str, Run], pool: ProcessPoolExecutor) -> dict[tuple[Run, str], int]:
    """Replay each run with each kind of hints, and return the mean hits."""
    wanted = [(run, kind, seed) for run in runs.values() for kind in KINDS for seed in seeds_of(kind)]
    found: dict[tuple[Run, str], list[int]] = {}
    for (run, kind, _), hits in zip(wanted, pool.map(replayed, *zip(*wanted, strict=True)), strict=True):
        found.setdefault((run, kind), []).append(hits)
    return {key: round(fmean(hits)) for key, hits in found.items()}


def rows_of(label: str, run: Run, hits: Hits, best: int) -> Iterator[Row]:
    """Yield the rows of one size: each kind of hints beside the optimum, then those that have a goal."""
    for kind in KINDS:
        yield hits_row(f"{label}: {kind}, of the optimum", hits[run, kind], best)
    none, exact, wrong, noise = (hits[run, kind] for kind in KINDS[:4])
    goal = ERROR_GOAL if exact - none >= GAIN_MIN * none else None
    yield hits_row(f"{label}: error=3, added, of exact", wrong - none, exact - none, goal)
    yield hits_row(f"{label}: noise, of no hints", noise, none, NOISE_GOAL)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Hits with hints, in virtual time")
    parser.add_argument("trace", type=Path, metavar="TRACE", help="sessions of agents, with times")
    parser.add_argument("--policy", choices=POLICIES, help="one of the eviction policies")
    parser.add_argument("--copies", type=int, default=AGENT_COPIES, metavar="N", help="of the trace")
    options = parser.parse_args()
    agents = copies(in_pages(read_trace(options.trace)), options.copies, AGENT_APART_MS)
    with (
        tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder,
        ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool,
    ):
        of = workload("Agents", agents, Path(folder), apart_ms=None)
        lru = cells(of, SETTINGS["L1 + L2"], SIZES[-reduced(len(SIZES)) :])
        best = {label: pool.submit(optimum, of.trace, run.device_pages + run.host_pages) for label, run in lru.items()}
        for policy in POLICIES if options.policy is None else (options.policy,):
            runs = {label: run._replace(policy=policy) for label, run in lru.items()}
            hits = hits_of(runs, pool)
            print_table(title_of(of, f"L1 + L2, {policy}"), itertools.chain.from_iterable(
                rows_of(label, run, hits, best[label].result()) for label, run in runs.items()
            ))


if __name__ == "__main__":
    main()

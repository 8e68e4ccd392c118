"""Which eviction policy has the most hits: replays of the whole cache in virtual time.

    python -m lab.benchmarks.eviction [CHAT_TRACE AGENTS_TRACE] [--only tiers|store|robustness]

Replays are in virtual time, so each one has one answer, which the machine and its load do not change. The size of a
cell is a share of the pages of its trace, all of which an infinite cache would hold.

*Tiers*: each policy of L1 and L2, without storage and over a `file` store, which is adaptive with them and else LRU.
LRU is beside the optimum that knows the future (`hicache_lab/replay/ideal.py`) with as many pages as all tiers
together; the other policies are beside LRU. L1 has a quarter of the pages and L2 the rest, or L1 an eighth, L2 three
eighths and the store half. L1 has at least the longest request, and the other tiers share the rest; a cell is left out
if L2 then is smaller than half of that request. L2 and the store hold copies, so all tiers together hold fewer distinct
pages than the optimum.
*Store*: a `file` store below an L1 and an L2 with room for one request each, under each write policy: hits beside no
store, and the written bytes, in brackets for each hit token that the store adds. Other policies of the store are beside
its LRU.
*Robustness*: traces that change (`hicache_lab/traces/stress.py`). One has chats and then agents. The other has phases
that are bad for S3-FIFO and for LRU in turn, for a cache of one size; the other sizes are half and twice of it.

Only the kept pages should differ: one request runs at a time, computing and all transfers take almost no time,
`break_even.mode` is `always`, and no queue has a limit below the size of L2. So hits do not depend on queues.

A ratio is ours : reference, and goals are minimums. Policies that need a priority of requests are left out, because
traces do not have one.

The traces are not part of this project; docs/traces.md says where to get them: Mooncake's conversation trace, and the
sessions of coding agents of kv-cache-tester. Without them synthetic ones with similar statistics are replayed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeAlias

from hicache.cli.model_shapes import PRESETS
from hicache.config import load_config
from hicache.frame import frame_bytes
from hicache.keys import page_keys
from hicache_lab.replay.ideal import optimal_hits, uses_of
from hicache_lab.replay.job import ReplayJob
from hicache_lab.replay.virtual.engines import VirtualEngines
from hicache_lab.speeds import ComputeSpeed, Speeds, StorageSpeed
from hicache_lab.traces.request import TraceRequest
from hicache_lab.traces.stress import alternating_trace
from hicache_lab.traces.synthetic import synthetic_trace
from hicache_lab.traces.tokens import TokenSource
from hicache_lab.traces.trace import read_trace, write_trace

from ._table import Row, print_table, reduced

# Of L1 and L2, and of a store. The first is the reference of the others, and only those in `GOALS` have a goal.
POLICIES = ("lru", "adaptive", "lfu", "fifo", "mru", "filo", "slru")
STORE_POLICIES = ("lru", "adaptive")
WRITE_POLICIES = ("write_through", "write_through_selective")
GOALS = {"adaptive": 0.99}
ROBUST_GOALS = {"adaptive": 0.98}
# Sizes of a cache: one part of so many of the pages of the trace.
SIZES = (64, 32, 16, 8, 4, 2, 1)
CHANGING_SIZES = (64, 32, 16, 8)
# The alternating trace: the cache that it is made for, whose prompts have four blocks.
ALTERNATING_TOKENS, ALTERNATING_REQUESTS = 49_152, 4800
# Shares of L1, L2 and the store.
SETTINGS = {"L1 + L2": (0.25, 0.75, 0.0), "L1 + L2 + file": (0.125, 0.375, 0.5)}

PAGE_SIZE = 64
MODEL = "llama-3.1-8b"
FRAME_BYTES = frame_bytes(replace(PRESETS[MODEL], page_size=PAGE_SIZE).payload_bytes)
REQUESTS = 4000
# A session that reaches it ends, so that an eighth of a small cache has room for a request.
CONTEXT_TOKENS = 65_536
# So many copies of the agents' sessions, a few minutes apart, with different tokens: one alone has so few sessions that
# a small cache would not have room for a request.
AGENT_COPIES, AGENT_APART_MS = reduced(4), 300_000
# Between arrivals, far more than a request and its stores take.
APART_MS = 100
TOKENS_PER_S, BYTES_PER_S = 1e12, 1e18

Requests: TypeAlias = "list[TraceRequest]"


class Workload(NamedTuple):
    """A trace in pages, its distinct pages, and the pages of its longest request."""

    name: str
    trace: Path
    requests: int
    pages: int
    longest: int


class Run(NamedTuple):
    """The arguments of one replay. Sizes are pages; without a store, `store_pages` is 0."""

    trace: Path
    device_pages: int
    host_pages: int
    store_pages: int = 0
    policy: str = POLICIES[0]
    write_policy: str = WRITE_POLICIES[0]
    store_policy: str = STORE_POLICIES[0]


class Figures(NamedTuple):
    """The hits of all tiers of one replay, in tokens, and the bytes that the store was sent."""

    hits: int
    written_bytes: int


def in_pages(requests: Iterable[TraceRequest]) -> Requests:
    """Return a trace whose blocks are the pages of the cache, without requests above `CONTEXT_TOKENS`. Outputs are part
    of the prompts, because a step of the scheduler for each token would take most of the time. The next turn finds
    the same pages."""
    source, found = TokenSource(), list[TraceRequest]()
    numbers = defaultdict[bytes | int, int](itertools.count().__next__)
    for request in requests:
        tokens = source.take(request).kv_tokens
        if request.kv_tokens <= CONTEXT_TOKENS:
            keys: list[bytes | int] = [*page_keys(tokens, PAGE_SIZE)]
            keys += [request.index] if request.kv_tokens % PAGE_SIZE else []
            ids = tuple(numbers[key] for key in keys)
            found.append(
                TraceRequest(len(found), request.timestamp_ms, request.kv_tokens, 1, ids, PAGE_SIZE, request.session)
            )
    return found


def disjoint(traces: Iterable[Requests]) -> Requests:
    """Return all requests of some traces, one trace after the other, without common pages or sessions."""
    first, session, found = 0, 0, list[TraceRequest]()
    for requests in traces:
        found += (
            replace(each, hash_ids=tuple(first + block for block in each.hash_ids),
                    session=None if each.session is None else session + each.session)
            for each in requests
        )
        first = 1 + max(block for each in found for block in each.hash_ids)
        session = 1 + max((each.session for each in found if each.session is not None), default=0)
    return found


def copies(requests: Requests, number: int, apart_ms: float) -> Requests:
    """Return some copies of a trace at once, with different pages; each one begins `apart_ms` after the previous."""
    later = ([replace(each, timestamp_ms=each.timestamp_ms + apart_ms * copy) for each in requests]
             for copy in range(number))
    return sorted(disjoint(later), key=lambda each: each.timestamp_ms)


def workload(name: str, requests: Requests, folder: Path, apart_ms: float | None = APART_MS) -> Workload:
    """Write a trace in pages, with equal times between its requests (None: its own times), and return it."""
    path = folder / f"{name.replace(' ', '_')}.jsonl"
    write_trace(path, (replace(each, timestamp_ms=each.timestamp_ms if apart_ms is None else apart_ms * index)
                       for index, each in enumerate(requests)))
    whole = {block for each in requests for block in each.hash_ids[: each.whole_blocks]}
    longest = max(len(each.hash_ids) for each in requests)
    return Workload(name, path, len(requests), len(whole), longest)


def job_of(run: Run) -> ReplayJob:
    """Return the replay of a run."""
    entries = {
        "page_size": str(PAGE_SIZE), "device.tokens": str(run.device_pages * PAGE_SIZE),
        "host.tokens": str(run.host_pages * PAGE_SIZE), "break_even.mode": "always",
        "eviction_policy": run.policy, "write_policy": run.write_policy,
        "transfer.store_host_share": "1", "prefetch.host_share": "1",
    }
    if run.store_pages:
        entries |= {"storage.type": "file", "storage.options.path": str(run.trace.with_suffix(".store")),
                    "storage.options.capacity": f"{run.store_pages * FRAME_BYTES}B",
                    "storage.options.eviction_policy": run.store_policy}
    store = StorageSpeed(read_bytes_per_s=BYTES_PER_S, write_bytes_per_s=BYTES_PER_S)
    return ReplayJob(
        config=load_config(None, environ={}, overrides=entries), trace=run.trace, preset=MODEL, running_max=1,
        waiting_max=1, prefill_tokens_max=CONTEXT_TOKENS, virtual=True, speed_up=1.0,
        speeds=Speeds(compute=ComputeSpeed(tokens_per_s=TOKENS_PER_S), host_bytes_per_s=BYTES_PER_S, host_fixed_s=0.0,
                      storage=store),
    )


def replayed(run: Run) -> Figures:
    """Replay a run in virtual time."""
    with closing(VirtualEngines(job_of(run))) as engines:
        for _ in engines.run():
            pass
        result = engines.result()
    return Figures(sum(result.tokens.hits.values()), result.moved_bytes["host_to_storage"])


def optimum(trace: Path, pages: int) -> int:
    """Return the hits, in tokens, of a cache of so many pages that knows the future."""
    job = job_of(Run(trace, pages, pages))
    return PAGE_SIZE * sum(optimal_hits(list(uses_of(job, PAGE_SIZE, CONTEXT_TOKENS)), pages))


def divided(pages: int, longest: int, shares: tuple[float, float, float]) -> tuple[int, int, int] | None:
    """Return the pages of L1, L2 and the store, or None if they are too few for the longest request."""
    device, host, store = shares
    device_pages = max(int(pages * device), longest)
    store_pages = int((pages - device_pages) * store / (host + store))
    host_pages = pages - device_pages - store_pages
    return None if host_pages < longest // 2 else (device_pages, host_pages, store_pages)


def cells(of: Workload, shares: tuple[float, float, float], sizes: Sequence[int]) -> dict[str, Run]:
    """Return the runs of LRU by their label, for each size that is large enough."""
    found = {}
    for size in sizes:
        pages = of.pages // size
        tiers = divided(pages, of.longest, shares)
        if tiers is not None:
            found[f"1/{size} ({pages * PAGE_SIZE:,} tokens)"] = Run(of.trace, *tiers)
    return found


def under(run: Run, policy: str) -> Run:
    """Return a run of LRU under another policy, also of the store if it has that one."""
    return run._replace(policy=policy, store_policy=policy if policy in STORE_POLICIES else run.store_policy)


def hits_row(what: str, hits: int, reference: int, goal: float | None = None) -> Row:
    """Return a row of hits beside those of a reference."""
    return Row(what, f"{hits:,}", f"{reference:,}", hits / reference if reference else None, goal)


def tier_rows(
    runs: Mapping[str, Run], figures: Mapping[Run, Figures], optimums: Mapping[str, int], policies: Sequence[str],
    goals: Mapping[str, float],
) -> dict[str, list[Row]]:
    """Return the rows of each policy: LRU beside the optimum, the others beside LRU."""
    rows: dict[str, list[Row]] = {policy: [] for policy in policies}
    for label, run in runs.items():
        lru, *others = policies
        rows[lru].append(hits_row(f"{label}: {lru}, of the optimum", figures[run].hits, optimums[label]))
        for policy in others:
            hits = figures[under(run, policy)].hits
            rows[policy].append(hits_row(f"{label}: {policy}, of {lru}", hits, figures[run].hits, goals.get(policy)))
    return rows


def summary(policy: str, rows: Sequence[Row], goal: float | None) -> Row:
    """Return the row of the smallest ratio of a policy, labelled with its cell and the mean of all cells."""
    found = min(rows, key=lambda each: each.ratio or 0.0)
    mean, most = (measure(each.ratio or 0.0 for each in rows) for measure in (fmean, max))
    return Row(f"{policy}, worst of {len(rows)}; mean {mean:.3f}, best {most:.3f} ({found.what})", found.ours,
               found.reference, found.ratio, goal)


def title(of: Workload, rest: str) -> str:
    """Return the title of a table."""
    return f"{of.name}, {of.requests:,} requests with {of.pages:,} pages of {PAGE_SIZE} tokens: {rest}"


def show_tiers(
    workloads: Mapping[Workload, Sequence[int]], settings: Iterable[str], policies: Sequence[str],
    goals: Mapping[str, float], pool: ProcessPoolExecutor,
) -> None:
    """Replay each workload in each setting and each of its sizes under each policy; print a table for each, and one of
    the worst cells."""
    overall: dict[str, list[Row]] = {policy: [] for policy in policies}
    for (of, sizes), setting in itertools.product(workloads.items(), settings):
        runs = cells(of, SETTINGS[setting], sizes[-reduced(len(sizes)) :])
        best = {label: pool.submit(optimum, of.trace, run.device_pages + run.host_pages + run.store_pages)
                for label, run in runs.items()}
        wanted = [under(run, policy) for run in runs.values() for policy in policies]
        figures = dict(zip(wanted, pool.map(replayed, wanted), strict=True))
        rows = tier_rows(runs, figures, {label: each.result() for label, each in best.items()}, policies, goals)
        print_table(title(of, setting), itertools.chain.from_iterable(zip(*rows.values(), strict=True)))
        for policy, found in rows.items():
            overall[policy] += (replace(row, what=f"{of.name}, {setting}, {row.what}") for row in found)
    print_table("The worst cells of these tables",
                [summary(policy, rows, goals.get(policy)) for policy, rows in overall.items()])


def store_rows(label: str, run: Run, figures: Mapping[Run, Figures], policies: Sequence[str]) -> list[Row]:
    """Return the rows of one size of a store under one write policy."""
    first, nothing = figures[run], figures[without_store(run)]
    rows = [hits_row(f"{label}: {policies[0]}, hits, of no store", first.hits, nothing.hits),
            Row(f"{label}: {policies[0]}, written", written(first, nothing))]
    for policy in policies[1:]:
        ours, what = figures[run._replace(store_policy=policy)], f"of {policies[0]}"
        ratio = ours.written_bytes / first.written_bytes if first.written_bytes else None
        rows += [hits_row(f"{label}: {policy}, hits, {what}", ours.hits, first.hits, GOALS.get(policy)),
                 Row(f"{label}: {policy}, written, {what}", written(ours, nothing), written(first, nothing), ratio)]
    return rows


def written(ours: Figures, nothing: Figures) -> str:
    """Return the written bytes as text, and those for each hit token that the store adds."""
    gained = ours.hits - nothing.hits
    each = f"{ours.written_bytes / gained / 1024:,.0f} KiB" if gained > 0 else "nothing gained"
    return f"{ours.written_bytes / 1e9:,.0f} GB ({each})"


def without_store(run: Run) -> Run:
    """Return the same run without a store."""
    return run._replace(store_pages=0, store_policy=STORE_POLICIES[0])


def show_store(workloads: Iterable[Workload], pool: ProcessPoolExecutor) -> None:
    """Replay each workload over a store of each size, and print a table for each."""
    for of in workloads:
        runs = {
            f"{write_policy}, 1/{size} ({of.pages // size * PAGE_SIZE:,} tokens)":
                Run(of.trace, of.longest, of.longest, of.pages // size, write_policy=write_policy)
            for write_policy in WRITE_POLICIES for size in SIZES[-reduced(len(SIZES)) :]
        }
        wanted = list(dict.fromkeys([
            *(run._replace(store_policy=policy) for run in runs.values() for policy in STORE_POLICIES),
            *map(without_store, runs.values()),
        ]))
        figures = dict(zip(wanted, pool.map(replayed, wanted), strict=True))
        print_table(title(of, "a file store alone"), itertools.chain.from_iterable(
            store_rows(label, run, figures, STORE_POLICIES) for label, run in runs.items()
        ))


def changing(chat: Requests, agents: Requests, folder: Path) -> dict[Workload, Sequence[int]]:
    """Return the traces that change, with their sizes."""
    halves = chat[: len(chat) // 2], copies(agents[: len(agents) // 2], AGENT_COPIES, AGENT_APART_MS)
    requests = reduced(ALTERNATING_REQUESTS, 100)
    alternating = workload("Alternating", in_pages(alternating_trace(requests, 0, ALTERNATING_TOKENS)), folder)
    size = round(alternating.pages * PAGE_SIZE / ALTERNATING_TOKENS)
    return {workload("Chats then agents", disjoint(halves), folder): CHANGING_SIZES,
            alternating: (2 * size, size, size // 2)}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="The hits of each eviction policy, in virtual time")
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE",
                        help="the chat trace and the agents' trace (default: synthetic ones)")
    parser.add_argument("--only", choices=("tiers", "store", "robustness"), help="one of the three groups of tables")
    parser.add_argument("--requests", type=int, default=reduced(REQUESTS, 40), metavar="N", help="of each trace")
    options = parser.parse_args()
    if len(options.traces) not in (0, 2):
        parser.error("name both traces or neither")
    read = ([read_trace(path, options.requests) for path in options.traces] if options.traces
            else [synthetic_trace(options.requests, 0, service) for service in ("conversation", "agents")])
    chat, agents = (in_pages(each) for each in read)
    with (
        tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder,
        ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool,
    ):
        here = Path(folder)
        workloads = [workload("Chats", chat, here),
                     workload("Agents", copies(agents, AGENT_COPIES, AGENT_APART_MS), here)]
        if options.only in (None, "tiers"):
            show_tiers(dict.fromkeys(workloads, SIZES), SETTINGS, POLICIES[: reduced(len(POLICIES), 2)], GOALS, pool)
        if options.only in (None, "store"):
            show_store(workloads, pool)
        if options.only in (None, "robustness"):
            show_tiers(changing(chat, agents, here), list(SETTINGS)[:1], POLICIES[:2], ROBUST_GOALS, pool)


if __name__ == "__main__":
    main()

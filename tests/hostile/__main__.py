"""Run clients against hostile servers for some minutes. Memory, descriptors and threads of the process must not grow.

    python -m tests.hostile --minutes 10 --seed 1

Rounds against the hostile Redis server and the hostile S3 server alternate, each with its own seed. A round opens
stores, runs verbs on them and closes them. It fails for an untyped error, a secret in a text, or a connection to
another address. The first fifth of the time is the warm-up. After it, resident memory and the memory of Python at the
end of a round are at most `GROWTH_MAX` times the maximum of the warm-up, and descriptors and threads at most its
maximum. The exit code is 0 if these limits hold, otherwise 1.

The command restarts itself with one arena of malloc: otherwise the arenas of ended threads hide growth.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from . import redis_server, s3_server

ARENAS = "MALLOC_ARENA_MAX"
# A factor on the maximum of the warm-up, for caches of the interpreter and fragmentation of the heap.
GROWTH_MAX = 1.1
WARM_UP = 0.2
REPORT_S = 30.0


def measured() -> dict[str, int]:
    """Collect garbage. Return the resources of the process."""
    gc.collect()
    return {
        "bytes resident": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "bytes of Python": tracemalloc.get_traced_memory()[0],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def maximum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: max(value, other[name]) for name, value in one.items()}


def run(minutes: float, first_seed: int) -> list[str]:
    """Run rounds for `minutes` and print the resources of the process. Return the names of those that grew."""
    tracemalloc.start()
    counts: Counter[str] = Counter()
    began = time.monotonic()
    end_s, warm_s = 60 * minutes, 60 * minutes * WARM_UP
    warm = most = measured()
    report_s = 0.0
    for seed in itertools.count(first_seed):
        elapsed_s = time.monotonic() - began
        if elapsed_s >= end_s:
            break
        run_round = redis_server.run_round if seed % 2 else lambda number: s3_server.run_round(number // 2)
        results = run_round(seed)
        counts["rounds"] += 1
        counts["results"] += results.total()
        resources = measured()
        warming = elapsed_s < warm_s
        if warming:
            warm = maximum(warm, resources)
        most = resources if warming else maximum(most, resources)
        if elapsed_s >= report_s:
            report_s += REPORT_S
            note = "warm-up" if warming else f"most {most}"
            print(f"{elapsed_s:5.0f} s, {counts['rounds']} rounds: {resources} ({note})", flush=True)
    print(f"{counts['rounds']} rounds, {counts['results']} results, seeds {first_seed} to {seed - 1}")
    print(f"most in the warm-up: {warm}\nmost after it:       {most}")
    return [name for name, value in most.items() if value > warm[name] * (GROWTH_MAX if "bytes" in name else 1)]


def main() -> int:
    """Parse the arguments, run, and print the result. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if os.environ.get(ARENAS) != "1":
        os.execve(sys.executable, [sys.executable, "-m", "tests.hostile", *sys.argv[1:]], {**os.environ, ARENAS: "1"})
    grown = run(arguments.minutes, arguments.seed)
    print(f"grown: {', '.join(grown)}" if grown else "flat: memory, descriptors and threads stayed within their limits")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())

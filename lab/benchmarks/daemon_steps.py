"""The cost of storage for the steps of a scheduler: with a daemon, in the engine's process, and without storage.

    python -m lab.benchmarks.daemon_steps [--steps N] [--rounds N]

Three equal caches run in turns. A step polls, admits a request whose prefetch is done, and ends with a placeholder for
the forward pass: 10 ms in which the interpreter is free, as with a GPU. Requests are prompts of 8 pages of 512 KiB. A
prompt is repeated after it has left L1 and L2, so that caches with storage read as much as they store. The store is in
memory (tmpfs). Results are the whole step, and the scheduler's own part of it.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import gc
import os
import statistics
import time
from pathlib import Path

import numpy as np

from hicache.cache import HiRadixCache, create_cache
from hicache.config import HiCacheConfig
from hicache.geometry import KVGeometry
from hicache.keys import Namespace, RadixKey

from ._table import Row, print_table, reduced
from .daemon import Daemon, file_storage, folder_in

_GEOMETRY = KVGeometry(layers=4, heads=8, head_dim=64, page_size=64, dtype="float16")
_RUN_PAGES = 8
_PROMPTS = 24  # in a cycle, which is more than L1 and L2 hold
_DEVICE_RUNS, _HOST_RUNS = 6, 12
_STEPS_PER_REQUEST = 4
_FORWARD_S = 0.010
_GOAL = 1.05
_WAIT_S = 30.0


class Side:
    """A cache and its scheduler."""

    def __init__(self, sections: dict[str, object]) -> None:
        tokens = _RUN_PAGES * _GEOMETRY.page_size
        host = {"tokens": _HOST_RUNS * tokens, **sections.pop("host", {})}  # type: ignore[dict-item]
        config = HiCacheConfig.model_validate({
            "page_size": _GEOMETRY.page_size, "device": {"tokens": _DEVICE_RUNS * tokens}, "host": host,
            "break_even": {"mode": "always"}, **sections,
        })
        cache = create_cache(config, Namespace(model="benchmark", geometry=_GEOMETRY))
        assert isinstance(cache, HiRadixCache)
        self.cache = cache
        self.steps_s: list[float] = []
        self.own_s: list[float] = []
        self._waiting: dict[str, RadixKey] = {}
        self._number = 0

    def work(self, steps: int) -> None:
        """Make `steps` steps."""
        for _ in range(steps):
            began_s = time.perf_counter()
            self._step()
            own_s = time.perf_counter()
            time.sleep(_FORWARD_S)
            self.steps_s.append(time.perf_counter() - began_s)
            self.own_s.append(own_s - began_s)

    def _step(self) -> None:
        cache, number = self.cache, self._number
        self._number += 1
        cache.poll()
        ready = next((rid for rid in self._waiting if cache.check_prefetch_progress(rid)), None)
        if ready is not None:
            request = cache.begin_request(ready, self._waiting[ready])
            cache.start_loading()
            if request is not None:  # otherwise there is room in a later step
                cache.cache_finished_req(request, self._waiting.pop(ready))
        if number % _STEPS_PER_REQUEST == 0:
            key = _prompt(number // _STEPS_PER_REQUEST % _PROMPTS)
            cache.prefetch_from_storage(str(number), key)
            self._waiting[str(number)] = key

    def close(self) -> None:
        """Close the cache."""
        assert self.cache.drain(_WAIT_S)
        assert self.cache.close()


def _prompt(number: int) -> RadixKey:
    tokens = np.random.default_rng(number).integers(0, 128_000, _RUN_PAGES * _GEOMETRY.page_size + 1)
    return RadixKey.of(array.array("q", tokens.tolist()))


def steps(folder: Path, count: int, rounds: int) -> list[Row]:
    """Return all rows."""
    with Daemon(folder / "daemon", file_storage(folder / "served"), "0B") as daemon:
        shared = {"host": {"shared": {"name": f"benchmark-{os.getpid()}"}}}
        sides = {
            "none": Side({}),
            "daemon": Side({"storage": {"type": "remote", "options": {"socket": str(daemon.socket)}}, **shared}),
            "embedded": Side({"storage": file_storage(folder / "embedded")}),
        }
        for side in sides.values():  # each prompt is stored once
            side.work(_PROMPTS * _STEPS_PER_REQUEST)
            side.steps_s.clear()
            side.own_s.clear()
        for _ in range(rounds):
            for side in sides.values():
                gc.disable()
                side.work(count)
                gc.enable()
        hits = {name: side.cache.statistics().hit_tokens["storage"] for name, side in sides.items()}
        for side in sides.values():
            side.close()
    rows = []
    for name, goal in (("daemon", _GOAL), ("embedded", None)):
        for what, percent in (("step, 99th percentile", 99), ("step, median", 50)):
            ours, plain = (_percentile(sides[one].steps_s, percent) for one in (name, "none"))
            aim = goal if percent == 99 else None
            rows.append(Row(f"{name}: {what}", f"{1e3 * ours:.2f} ms", f"{1e3 * plain:.2f} ms", ours / plain, aim))
        ours, plain = (_percentile(sides[one].own_s, 99) for one in (name, "none"))
        rows.append(Row(
            f"{name}: the scheduler's own part, 99th", f"{1e6 * ours:.0f} us", f"{1e6 * plain:.0f} us", ours / plain
        ))
        rows.append(Row(f"{name}: tokens read from storage", str(hits[name])))
    return rows


def _percentile(times: list[float], percent: int) -> float:
    return statistics.quantiles(times, n=100)[percent - 1]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=reduced(40, 4), help="of each side in a round")
    parser.add_argument("--rounds", type=int, default=reduced(20))
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(folder_in("/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        rows = steps(folder, arguments.steps, arguments.rounds)
    print_table("Steps of a scheduler (reference: without storage)", rows)


if __name__ == "__main__":
    main()

"""Rounds of all verbs against hostile servers. See `redis_server` and `s3_server`."""

from __future__ import annotations

import gc
import os
import resource
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable

import pytest

from tests.hostile import redis_server, s3_server
from tests.seeds import seeds
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.long,
    pytest.mark.parametrize("run_round", [redis_server.run_round, s3_server.run_round], ids=["redis", "s3"]),
]

# Several threads at once read and parse listings of 8 MiB.
_GROWTH_MIB_MAX = 160


@pytest.mark.parametrize("seed", seeds(6))
def test_any_reply_ends_in_an_outcome_or_a_typed_error(run_round: Callable[[int], Counter[str]], seed: int) -> None:
    assert run_round(seed)


def test_rounds_leave_no_descriptor_thread_or_memory_behind(run_round: Callable[[int], Counter[str]]) -> None:
    run_round(1000)
    gc.collect()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        for seed in range(1001, 1003):
            run_round(seed)
        gc.collect()
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= files and threading.active_count() <= threads)
    assert held_bytes < 4 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < _GROWTH_MIB_MAX << 10

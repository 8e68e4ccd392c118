"""The S3 backend under rounds of hostile replies. See `s3_server`."""

from __future__ import annotations

import gc
import os
import resource
import threading

import pytest

from tests.hostile.s3_server import run_round
from tests.seeds import seeds

pytestmark = pytest.mark.long

# Several threads at once read and parse listings of 8 MiB.
_GROWTH_MIB_MAX = 160


@pytest.mark.parametrize("seed", seeds(4))
def test_any_reply_ends_in_an_outcome_or_a_typed_error(seed: int) -> None:
    counts = run_round(seed)
    assert sum(count for name, count in counts.items() if name.startswith("reply")) > 10
    print(dict(counts))


def test_hostile_replies_leave_no_descriptors_or_threads_and_use_little_memory() -> None:
    run_round(0)
    gc.collect()
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(1000, 1002):
        run_round(seed)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files
    assert threading.active_count() <= threads
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < _GROWTH_MIB_MAX << 10

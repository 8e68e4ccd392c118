"""Reads that overlap share the bandwidth of their store: however they overlap, they show the same speed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hicache.cache.break_even import WINDOW, RateEstimator
from hicache.controller.operations import ReadOperation
from hicache.controller.storage import SharedTime
from hicache_lab.replay.virtual.clock import VirtualClock
from hicache_lab.replay.virtual.machine import VirtualWorkers

PAGE_BYTES = 1_000_000
PATIENCE_S = 60.0


def read_of(pages: int) -> ReadOperation:
    nothing: Any = None
    return ReadOperation([b""] * pages, np.zeros(pages, np.int32), storage=nothing, deadline=0.0)


class SimulatedStore:
    """A store that serves the bytes of all calls in flight together, at `bytes_per_s`, after a fixed time of each call.

    `threads` reads run at once. The estimates are those of `SharedTime` and a `RateEstimator`.
    """

    def __init__(self, bytes_per_s: float, fixed_s: float = 0.0, threads: int = 8) -> None:
        self.bytes_per_s, self.fixed_s = bytes_per_s, fixed_s
        self.clock = VirtualClock()
        self.estimator = RateEstimator()
        self.divides = True
        self._time = SharedTime(self.clock, PATIENCE_S)
        self._left: dict[ReadOperation, float] = {}  # bytes
        self._counted_s = self.clock()
        self._ended = 0
        self._workers: VirtualWorkers[ReadOperation] = VirtualWorkers(
            "io", threads, handle=self._read, fail=lambda read: None, acknowledge=self._end, clock=self.clock
        )

    def read(self, *pages: int) -> None:
        """Read so many pages in each of several reads at once, and wait for all."""
        self._ended = 0
        for count in pages:
            self._workers.submit(read_of(count))
        while self._ended < len(pages):
            self.clock.sleep_until_event(self.clock() + 1000)

    def _read(self, read: ReadOperation, beat: Callable[[], None]) -> None:
        read.called_s = self.clock()
        self._time.begin(read)
        self.clock.sleep(self.fixed_s)
        self._move()
        self._left[read] = float(len(read.host_pages) * PAGE_BYTES)
        while self._left[read] > 1.0:
            others = len(self._left)
            self.clock.sleep(min(self._left.values()) * others / self.bytes_per_s)
            self._move()
        del self._left[read]
        self._time.end(read, self.clock(), len(read.host_pages))

    def _move(self) -> None:
        """Move the bytes since the last call: all that are left share the bandwidth."""
        now_s, count = self.clock(), len(self._left)
        for read in self._left:
            self._left[read] -= (now_s - self._counted_s) * self.bytes_per_s / count
        self._counted_s = now_s

    def _end(self, read: ReadOperation) -> None:
        self._ended += 1
        overlap = read.seconds / read.charged_s if self.divides else 1.0
        self.estimator.observe(overlap * len(read.host_pages) * PAGE_BYTES, read.seconds)


# Reads together, one group after the other. Seven of one size would not show the fixed time.
PATTERNS = {
    "alone": [[8], [32], [128], [64], [16], [4], [256]],
    "three at once": [[8] * 3, [64] * 3],
    "eight of different sizes at once": [[64, 96, 128, 160, 192, 224, 256, 512]],
    "alone or eight at once": [[8] * 8, [8], [64], [64] * 8],
    "a large one, then small ones": [[4096], [8] * 3],
}


def operations(store: SimulatedStore, groups: Sequence[Sequence[int]], count: int) -> None:
    """Read the groups in turn, until `count` reads have ended."""
    for group in itertools.cycle(groups):
        count -= len(group)
        store.read(*group)
        if count <= 0:
            break


@pytest.mark.parametrize("fixed_s", [0.0, 0.005])
@pytest.mark.parametrize("groups", PATTERNS.values(), ids=PATTERNS)
def test_alone_or_together_large_or_small_reads_show_the_same_bandwidth_and_latency(
    groups: Sequence[Sequence[int]], fixed_s: float
) -> None:
    store = SimulatedStore(1e9, fixed_s)
    operations(store, groups, 4 * WINDOW)
    line = store.estimator.line
    assert line is not None
    assert 1 / line.per_unit_s == pytest.approx(1e9, rel=0.05)
    shortest_s = min(sum(group) * PAGE_BYTES / 1e9 for group in groups)
    assert line.fixed_s == pytest.approx(fixed_s, abs=0.05 * shortest_s)


@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize("together", [1, 4, 8])
def test_a_store_whose_speed_changes_is_found_to_be_faster_or_slower_within_seven_operations(
    factor: float, together: int
) -> None:
    store = SimulatedStore(1e9, 0.001)
    operations(store, [[8] * together, [64] * together], 4 * WINDOW)
    store.bytes_per_s *= factor
    operations(store, [[64] * together, [8] * together], WINDOW)
    line = store.estimator.line
    assert line is not None
    assert 1 / line.per_unit_s == pytest.approx(factor * 1e9, rel=0.05)


def test_without_shares_overlapping_reads_seem_to_be_slow() -> None:
    """The control."""
    store = SimulatedStore(1e9)
    store.divides = False
    operations(store, [[8] * 8], 4 * WINDOW)
    line = store.estimator.line
    assert line is not None and 1 / line.per_unit_s == pytest.approx(1e9 / 8, rel=0.05)


def test_a_call_that_does_not_return_takes_its_share_only_until_it_counts_as_hung() -> None:
    time, hung, read = SharedTime(VirtualClock(), PATIENCE_S), read_of(1), read_of(1)
    hung.called_s = 0.0
    time.begin(hung)
    for began_s, charged_s in ((10.0, 5.0), (PATIENCE_S + 1, 10.0)):
        read.called_s, read.charged_s = began_s, 0.0
        time.begin(read)
        time.end(read, began_s + 10, 1)
        assert read.charged_s == charged_s
    time.end(hung, 1000.0, 1)
    assert hung.seconds == hung.charged_s == 1000.0
    assert not time._calls

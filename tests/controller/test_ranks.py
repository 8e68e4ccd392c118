"""Rank groups over real sockets, and the progress on which the ranks agree."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hicache.config import RanksConfig
from hicache.controller import LookupOperation, StoreOperation
from hicache.controller.agreement import COUNTERS, STORE_PLACES, Agreement, PrefetchProgress, Progress, StoreProgress
from hicache.controller.gate import OpenStore, Readiness
from hicache.controller.ranks import Int64s, TorchRankGroup, require_equal
from hicache.errors import InvariantError, RankError
from hicache.keys import PageChain, RadixKey
from hicache.types import NO_PAGES
from hicache_lab.clocks import ManualClock
from tests.ranks import Exchange, gloo_ranks

SOON_S = 0.2
NEVER_S = 60.0


def vector(*values: int) -> Int64s:
    return np.array(values, dtype=np.int64)


@pytest.fixture(params=[2, 4])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# Rank groups


def test_every_rank_gets_the_minimum_of_the_values_of_the_previous_step(size: int) -> None:
    ranks = gloo_ranks(size, deadline_s=NEVER_S)
    for step in range(5):
        for rank in ranks:
            rank.start(vector(rank.rank + step, -rank.rank))
        for rank in ranks:
            assert rank.result().tolist() == [step, 1 - size]


def test_a_missing_rank_is_a_permanent_error_after_the_deadline(size: int) -> None:
    ranks = gloo_ranks(size, deadline_s=SOON_S)
    for rank in ranks[1:]:
        rank.start(vector(1))
        with pytest.raises(RankError, match="did not answer"):
            rank.result()
        for call in (lambda rank=rank: rank.start(vector(1)), rank.result, lambda rank=rank: rank.agree(vector(1))):
            with pytest.raises(RankError):
                call()


def test_with_a_long_deadline_a_wait_lasts_longer_than_the_short_one() -> None:
    """Negative control: with a long deadline the same wait is still blocked after the short deadline."""
    first, second = gloo_ranks(2, deadline_s=NEVER_S)
    first.start(vector(1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.result)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=2 * SOON_S)
        second.start(vector(2))
        assert waiting.result(timeout=NEVER_S).tolist() == [1]


def test_an_arrived_result_counts_even_after_the_deadline() -> None:
    clock = ManualClock()
    first, second = gloo_ranks(2, deadline_s=NEVER_S, clock=clock)
    first.start(vector(1))
    second.start(vector(2))
    assert second.result().tolist() == [1]
    clock.advance(1.5 * NEVER_S)  # a step that takes longer than the deadline
    assert first.result().tolist() == [1]


def test_one_all_reduce_is_in_flight_at_a_time() -> None:
    first, second = gloo_ranks(2, deadline_s=NEVER_S)
    with pytest.raises(InvariantError):
        first.result()
    for rank in (first, second):
        rank.start(vector(1))
        with pytest.raises(InvariantError):
            rank.start(vector(1))
    assert [first.result().tolist(), second.result().tolist()] == [[1], [1]]


def test_a_closed_group_raises_and_the_other_ranks_time_out() -> None:
    first, second = gloo_ranks(2, deadline_s=SOON_S)
    first.close()
    first.close()
    with pytest.raises(RankError, match="closed"):
        first.start(vector(1))
    with pytest.raises(RankError, match="did not answer"):
        second.agree(vector(1))


@pytest.mark.parametrize("values", [("same", "same"), ("one", "two")])
def test_ranks_that_differ_in_their_configuration_do_not_start(values: tuple[str, str]) -> None:
    ranks = gloo_ranks(2, deadline_s=NEVER_S)
    with ThreadPoolExecutor(2) as pool:
        checks = [pool.submit(require_equal, *pair, value) for pair, value in zip(_named(ranks), values, strict=True)]
    failed = [isinstance(check.exception(), RankError) for check in checks]
    assert failed == [values[0] != values[1]] * 2


def _named(ranks: list[TorchRankGroup]) -> list[tuple[TorchRankGroup, str]]:
    return [(rank, "configuration") for rank in ranks]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_vector_makes_a_round_trip_through_the_device() -> None:
    """One rank, because two of NCCL need a device each."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        assert dist.group.WORLD is not None
        rank = TorchRankGroup(dist.group.WORLD, RanksConfig(deadline=NEVER_S), device="cuda")
        for count in (3, 3, 5):
            values = np.arange(count, dtype=np.int64)
            assert rank.agree(values).tolist() == values.tolist()
    finally:
        dist.destroy_process_group()


_ABORTED = """
import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from hicache.config import RanksConfig
from hicache.controller.ranks import TorchRankGroup
from hicache.errors import RankError

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=1))
rank = TorchRankGroup(dist.group.WORLD, RanksConfig(deadline=60), device="cuda")
values = np.arange(3, dtype=np.int64)
rank.agree(values)
with torch.cuda.stream(rank._reduction._stream):
    torch.cuda._sleep(8_000_000_000)  # some seconds
try:
    rank.agree(values)
except RankError as error:
    print("failed:", error.__cause__, flush=True)
os._exit(0)
"""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_all_reduce_that_nccl_aborted_is_an_error() -> None:
    """The watchdog of the process group aborts the communicator after the group's own timeout. With this setting it
    leaves the process running."""
    environment = os.environ | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    command = [sys.executable, "-c", _ABORTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "failed: NCCL aborted" in done.stdout, done.stdout + done.stderr[-2000:]


# Agreement

COUNTS = dict.fromkeys(COUNTERS, 1) | {"loads": 2}
# The agreement does not use the backend of an operation.
NO_STORAGE = cast(OpenStore, None)


def prefetch() -> LookupOperation:
    return LookupOperation(RadixKey(b""), 0, b"", storage=NO_STORAGE, deadline=0.0)


def store() -> StoreOperation:
    return StoreOperation(PageChain(b"", 1, b""), NO_PAGES, begins_prompt=True, storage=NO_STORAGE)


class Ranks:
    """The agreements of two ranks, driven in turn."""

    def __init__(self, *, places: int = 2, rates: int = 0) -> None:
        groups = Exchange(2).ranks()
        self.agreements = [Agreement(g, prefetch_places=places, rates=rates) for g in groups]

    def agree(self, first: Progress, second: Progress) -> list[Progress]:
        for agreement, progress in zip(self.agreements, (first, second), strict=True):
            agreement.start(progress, COUNTS)
        return [agreement.result() for agreement in self.agreements]


def test_before_the_first_exchange_no_operation_has_ended() -> None:
    for agreement in Ranks(rates=2).agreements:
        assert agreement.result() == Progress(rates=(0, 0))


@pytest.mark.parametrize(
    ("mine", "other", "agreed"),
    [
        (Progress(writes_done=3, loads_done=0), Progress(writes_done=1, loads_done=5), Progress(writes_done=1)),
        (Progress(), Progress(healthy=False), Progress(healthy=False)),
        (Progress(), Progress(storage=Readiness(7, read=False)), Progress(storage=Readiness(0, read=False))),
        (Progress(), Progress(storage=Readiness(0, write=False)), Progress(storage=Readiness(0, write=False))),
        (Progress(storage=Readiness(3)), Progress(storage=Readiness(2)), Progress(storage=Readiness(2))),
        (Progress(time_ms=9), Progress(time_ms=4), Progress(time_ms=4)),
    ],
)
def test_the_minimum_over_the_ranks_counts_on_all_ranks(mine: Progress, other: Progress, agreed: Progress) -> None:
    none = (0, 0)
    results = Ranks(rates=2).agree(replace(mine, rates=(5, 10)), replace(other, rates=(7, 3)))
    for result in results:
        assert replace(result, rates=none, prefetches=(), stores=()) == replace(agreed, rates=none)
        assert result.rates == (5, 3)


def test_a_prefetch_is_as_short_as_on_the_worst_rank_and_in_flight_if_it_is_on_one() -> None:
    mine, other = prefetch(), prefetch()
    results = Ranks().agree(
        Progress(prefetches=[PrefetchProgress(mine, ended=True, pages=7)]),
        Progress(prefetches=[PrefetchProgress(other, ended=False, pages=4)]),
    )
    for agreed, operation in zip(results, (mine, other), strict=True):
        assert agreed.prefetches == [PrefetchProgress(operation, ended=False, pages=4)]


def test_a_store_counts_as_stored_if_it_is_stored_on_every_rank() -> None:
    states = list(StoreProgress)
    pairs = [(a, b) for a in states for b in states]
    firsts, seconds = [store() for _ in pairs], [store() for _ in pairs]
    results = Ranks().agree(
        Progress(stores=[(operation, a) for operation, (a, _) in zip(firsts, pairs, strict=True)]),
        Progress(stores=[(operation, b) for operation, (_, b) in zip(seconds, pairs, strict=True)]),
    )
    for agreed, operations in zip(results, (firsts, seconds), strict=True):
        expected = [(operation, min(pair)) for operation, pair in zip(operations, pairs, strict=True)]
        assert agreed.stores == expected


def test_a_result_belongs_to_the_operations_at_its_start() -> None:
    ranks, old, new = Ranks(), prefetch(), prefetch()
    for agreement in ranks.agreements:
        agreement.start(Progress(prefetches=[PrefetchProgress(old, True, 1)]), COUNTS)
        assert new is not old  # submitted now; it has the slot from the next exchange on
    for agreement in ranks.agreements:
        assert [progress.operation for progress in agreement.result().prefetches] == [old]


def test_operations_beyond_the_slots_wait_for_later_steps() -> None:
    many = Progress(
        prefetches=[PrefetchProgress(prefetch(), True, i) for i in range(5)],
        stores=[(store(), StoreProgress.STORED) for _ in range(STORE_PLACES + 1)],
    )
    for agreed in Ranks(places=2).agree(many, many):
        assert list(agreed.prefetches) == list(many.prefetches[:2])
        assert list(agreed.stores) == list(many.stores[:STORE_PLACES])


def test_ranks_that_decide_differently_stop_with_the_differing_counter() -> None:
    ranks = Ranks().agreements
    ranks[0].start(Progress(), COUNTS)
    ranks[1].start(Progress(), {**COUNTS, "loads": 3})
    for agreement in ranks:
        with pytest.raises(RankError, match="between 2 and 3 loads"):
            agreement.result()
        with pytest.raises(RankError):
            agreement.start(Progress(), COUNTS)


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    assert not dist.is_initialized()

"""The history of a daemon's last hour: samples, and faults derived from two snapshots."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hicache.backends.base import Direction, SetOutcome
from hicache.backends.guard.breaker import BreakerState
from hicache.clock import Clock
from hicache.daemon.history import FAULT_GAP_S, FAULTS_MAX, KEPT_S, SAMPLES_MAX, Fault, FaultKind, History, Sample
from hicache.daemon.statistics import SharingStatistics, status_json
from hicache.ghosts import Reason
from hicache.histogram import BOUNDS_S
from tests.daemon.snapshots import DIGEST, backend, breaker, guard, latency, namespace, node, store


class WallClock(Clock):
    """A wall clock that a test sets."""

    time_s = 1000.0

    def wall_s(self) -> float:
        return self.time_s


@pytest.fixture
def clock() -> WallClock:
    return WallClock()


@pytest.fixture
def history(clock: WallClock) -> History:
    return History(clock)


def samples(history: History, since: float = 0.0) -> list[dict[str, Any]]:
    found = history.as_json(since)
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def faults(history: History) -> list[tuple[str, str, str, int]]:
    return [(f["kind"], f["store"], f["detail"], f["count"]) for f in history.as_json()["faults"]]


def test_a_sample_has_the_differences_to_the_previous_snapshot(history: History, clock: WallClock) -> None:
    full, new = (Reason.NOT_STORED, "full"), (Reason.NEW, "")
    first = namespace(sharing=SharingStatistics(10, 4, 2, 1, 0, {new: 2}), backend=backend(1000, 400),
                      stores=(store(statistics=backend(600, 300)),))
    second = namespace(sharing=SharingStatistics(15, 4, 5, 1, 0, {new: 3, full: 2}), backend=backend(1500, 400),
                       stores=(store(statistics=backend(600, 350)),))
    for uptime_s, state in ((5.0, first), (10.0, second)):
        clock.time_s += 5
        history.record(node(state, uptime_s=uptime_s))
    assert samples(history)[-1] == {
        "time": 1010, "seconds": 5, "pool_pages": 5, "shared_pages": 0, "store_pages": 0, "missed_pages": 3,
        "sent_bytes": 500, "received_bytes": 0, "store_read_bytes": 0, "store_written_bytes": 50,
        "pool_used_bytes": 40 << 20, "requests_in_flight": 2, "missed": {"new": 1, "not_stored/full": 2},
    }
    assert samples(history)[0]["pool_pages"] == 10  # counted from the start of the daemon


def test_a_reopened_store_counts_from_zero(history: History) -> None:
    for read_bytes in (900, 30):
        history.record(node(namespace(stores=(store(statistics=backend(read_bytes)),))))
    assert [sample["store_read_bytes"] for sample in samples(history)] == [900, 30]


def test_a_client_gets_only_the_samples_since_its_last(history: History, clock: WallClock) -> None:
    for _ in range(4):
        clock.time_s += 5
        history.record(node())
    assert [sample["time"] for sample in samples(history, since=1010)] == [1015, 1020]


def test_the_numbers_of_samples_and_faults_are_limited(history: History, clock: WallClock) -> None:
    for _ in range(SAMPLES_MAX + 10):
        clock.time_s += 5
        history.record(node())
    for number in range(FAULTS_MAX + 10):
        history.note(FaultKind.CLIENT, f"engine{number}")
    assert len(samples(history)) == SAMPLES_MAX
    assert len(faults(history)) == FAULTS_MAX
    assert faults(history)[0][2] == f"engine{FAULTS_MAX + 9}"
    # Each browser that opens the page downloads it.
    assert len(json.dumps(history.as_json())) < 150_000


def sample(time_s: float, pool_pages: int = 1) -> Sample:
    return Sample(time_s, 5.0, pool_pages, 0, 0, 0, 0, 0, 0, 0, 0, 0, {})


def fault(last: float) -> Fault:
    return Fault(FaultKind.LIMIT, "", "", f"at {last:g}", 1, last - 1, last)


def test_a_restored_history_goes_on_with_a_gap_and_without_the_counts_of_the_last_run(clock: WallClock) -> None:
    """The total of the new run is below that of the last one, and its first sample counts from its start."""
    clock.time_s = 10_000
    history = History(clock)
    history.restore([sample(9600, 700), sample(9605, 900)], [fault(9604)])
    history.record(node(namespace(sharing=SharingStatistics(20, 0, 0, 0, 0)), uptime_s=2.0))
    found = [(one["time"], one["seconds"], one["pool_pages"]) for one in samples(history)]
    assert found == [(9600, 5, 700), (9605, 5, 900), (10_000, 2, 20)]
    assert faults(history) == [("limit", "", "at 9604", 1)]


def test_what_is_too_old_or_in_the_future_is_not_restored(clock: WallClock) -> None:
    clock.time_s = 200_000
    history = History(clock)
    times = [200_005, 199_000, 200_000 - KEPT_S, 199_990]
    history.restore([sample(time_s) for time_s in times], [fault(time_s) for time_s in (200_001, 199_999, 100_000)])
    assert [one["time"] for one in samples(history)] == [199_000, 199_990]
    assert faults(history) == [("limit", "", "at 199999", 1)]


def test_the_samples_stay_in_order_and_their_rates_positive_if_the_clock_is_set_back(
    history: History, clock: WallClock
) -> None:
    for time_s, uptime_s in ((1000.0, 5.0), (1005.0, 10.0), (990.0, 15.0), (995.0, 20.0)):
        clock.time_s = time_s
        history.record(node(uptime_s=uptime_s))
    assert [(one["time"], one["seconds"]) for one in samples(history)] == [(990, 5), (995, 5)]


def test_samples_older_than_an_hour_leave_the_history_at_the_next_one(clock: WallClock) -> None:
    history = History(clock)
    history.restore([sample(900)], [])
    clock.time_s = 900 + KEPT_S
    history.record(node())
    assert [one["time"] for one in samples(history)] == [900 + KEPT_S]


def test_faults_are_counters_that_grew_and_breakers_that_opened(history: History) -> None:
    history.record(node(namespace()))
    assert not faults(history)
    bad = guard(breaker(BreakerState.OPEN, "error", opens=2), {(Direction.READ, "error"): 3})
    history.record(
        node(
            namespace(stores=(store(statistics=backend(corrupt={"tag": 4}), guard=bad),)),
            refused={"requests": 7},
        )
    )
    assert sorted(faults(history)) == [
        ("breaker_opened", "nvme", "read: error", 2),
        ("damage", "nvme", "tag", 4),
        ("failed_calls", "nvme", "read: error", 3),
        ("limit", "", "requests", 7),
    ]


def test_rejected_pages_are_a_fault(history: History) -> None:
    for rejected in (0, 347, 347):
        full = replace(backend(), sets={SetOutcome.REJECTED: rejected})
        history.record(node(namespace(stores=(store(statistics=full),))))
    assert faults(history) == [("rejected", "nvme", "no room", 347)]


@pytest.mark.parametrize(("gap_s", "counts"), [(FAULT_GAP_S, [2]), (FAULT_GAP_S + 1, [1, 1])])
def test_faults_in_short_succession_are_one_entry(
    history: History, clock: WallClock, gap_s: float, counts: list[int]
) -> None:
    history.record(node(refused={"requests": 1}))
    clock.time_s += gap_s
    history.record(node(refused={"requests": 2}))
    found = history.as_json()["faults"]
    assert [fault["count"] for fault in found] == counts
    assert (found[0]["last"], found[-1]["first"]) == (1000 + gap_s, 1000)


def test_the_status_has_the_fields_of_the_snapshot() -> None:
    opened = guard(breaker(BreakerState.HALF_OPEN, "probe", 1), {(Direction.READ, "error"): 3})
    status = json.loads(json.dumps(status_json(node(namespace(stores=(store(guard=opened),))))))
    assert status["state"] == "ready"
    assert status["pool"]["used_bytes"] == 40 << 20
    assert status["requests"] == {"get": {"200": 12, "503": 1}, "set": {"200": 4}}
    (found,) = status["namespaces"]
    assert (found["namespace"], found["quota_bytes"]) == (DIGEST, None)
    (leaf,) = found["stores"]
    assert leaf["guard"]["breakers"]["read"]["state"] == "half_open"
    assert leaf["guard"]["failures"] == {"read": {"error": 3}}
    assert leaf["statistics"]["gets"] == {"hit": 5}
    assert status["latency"]["get"]["counts"] == list(latency(3, 9).counts)
    assert len(status["latency_bounds_s"]) == len(BOUNDS_S)

"""Injected faults: their effects, their counts, and that equal seeds give equal faults."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.driver import Clears, FindsPrefixes, HasIncidents, Inspects, ReportsEvictions, Touches
from hicache.backends.memory import MemoryDriver
from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.store import UNGUARDED, Store
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config.guard import GuardConfig
from hicache.errors import ConfigError
from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    CORRUPT,
    HIT,
    NAMESPACE,
    PAYLOAD_BYTES,
    STORED,
    empty_frames,
    full_frames,
    holds,
    in_parts,
    make_keys,
    soon,
)
from hicache_lab.faults import INJECTED, FaultOptions, FaultyDriver
from tests.clocks import PassingClock
from tests.tuned import tuned
from tests.waiting import wait_for

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
KEYS = make_keys(20)


def faulty(
    options: FaultOptions | None = None, codec: FrameCodec = CODEC, clock: Clock = SYSTEM_CLOCK
) -> tuple[FaultyDriver, Store]:
    """Return an empty store in memory, and its driver. `test_contract.py` of the guard has the contract."""
    driver = FaultyDriver(MemoryDriver(), options, clock)
    return driver, Store(driver, codec, UNGUARDED, clock=clock)


@pytest.fixture
def full() -> Iterator[tuple[FaultyDriver, Store]]:
    faults, store = faulty()
    put(store)
    yield faults, store
    store.close()


def put(store: Store, *, deadline: float | None = None) -> list[SetOutcome]:
    return store.batch_set(KEYS, full_frames(CODEC, KEYS), parent=None, deadline=deadline or soon())


def get(store: Store, *, deadline: float | None = None) -> list[GetOutcome]:
    return store.batch_get(KEYS, empty_frames(CODEC, len(KEYS)), deadline=deadline or soon())


def test_all_calls_fail_on_request_and_are_counted(full: tuple[FaultyDriver, Store]) -> None:
    faults, store = full
    faults.fail()
    assert get(store) == [GetOutcome.ERROR] * 20 and put(store) == [SetOutcome.ERROR] * 20
    assert store.batch_exists(KEYS, deadline=soon()) == store.delete(KEYS, deadline=soon()) == 0
    assert store.batch_has(KEYS, deadline=soon()) == [False] * 20 and store.clear(deadline=soon()) == 0
    found = store.statistics()
    assert found.errors == {INJECTED: 44}
    assert found.gets[GetOutcome.ERROR] == found.sets[SetOutcome.ERROR] == 20
    faults.fail(False)
    assert get(store) == [HIT] * 20


def test_a_share_of_calls_fails() -> None:
    _, store = faulty(FaultOptions(error_share=0.25, seed=3))
    failed = sum(put(store)[0] is SetOutcome.ERROR for _ in range(400))
    assert 60 <= failed <= 140


def test_equal_seeds_draw_equal_faults() -> None:
    def history(seed: int) -> list[int]:
        _, store = faulty(FaultOptions(error_share=0.3, seed=seed))
        return [store.batch_exists(KEYS[:1], deadline=soon()) + len(store.statistics().errors) for _ in range(50)]

    assert history(5) == history(5)
    assert history(5) != history(6)


def test_a_share_of_pages_is_damaged_found_and_removed() -> None:
    _, store = faulty(FaultOptions(damage_share=0.5, seed=1))
    put(store)
    outcomes = get(store)
    damaged = outcomes.count(CORRUPT)
    assert 0 < damaged < 20 and outcomes.count(HIT) == 20 - damaged
    assert store.usage().pages == 20 - damaged
    found = store.statistics()
    assert found.corrupt == {INJECTED: damaged}
    assert (found.gets[HIT], found.gets[CORRUPT]) == (20 - damaged, damaged)


def test_a_page_read_into_parts_is_damaged_like_one_in_a_frame() -> None:
    _, store = faulty(FaultOptions(damage_share=0.5, seed=1))
    put(store)
    views = [in_parts(CODEC, frame) for frame in empty_frames(CODEC, len(KEYS))]
    outcomes = store.batch_get(KEYS, views, deadline=soon())
    assert 0 < outcomes.count(CORRUPT) < 20 and set(outcomes) == {HIT, CORRUPT}
    for key, view, outcome in zip(KEYS, views, outcomes, strict=True):
        assert holds(CODEC, key, view) is (outcome is HIT)


def test_a_delay_longer_than_the_deadline_is_an_error_by_the_deadline() -> None:
    clock = PassingClock()
    _, store = faulty(FaultOptions(latency=1000.0), clock=clock)
    deadline = clock() + 1.0
    assert get(store, deadline=deadline) == [GetOutcome.ERROR] * 20
    assert deadline <= clock() < deadline + 1e-6


def test_bandwidth_limits_the_pages_moved_in_time() -> None:
    """One batch takes a second: the first one is in time, the next one is not."""
    clock = PassingClock()
    _, store = faulty(FaultOptions(bandwidth=20 * CODEC.frame_bytes), clock=clock)
    assert put(store, deadline=clock() + 2.0) == [STORED] * 20
    assert put(store, deadline=clock() + 0.5) == [SetOutcome.ERROR] * 20
    assert store.batch_exists(KEYS, deadline=clock() + 0.1) == 0, "a small call did not wait behind a large one"
    assert store.statistics().errors == {INJECTED: 21}


def test_a_hanging_call_waits_until_it_is_released(full: tuple[FaultyDriver, Store]) -> None:
    faults, store = full
    with ThreadPoolExecutor(3) as threads:
        faults.hang()
        calls = [threads.submit(get, store) for _ in range(3)]
        wait_for(lambda: faults.hung_calls == 3)
        assert not any(call.done() for call in calls)
        faults.release()
        assert [call.result() for call in calls] == [[HIT] * 20] * 3
    assert faults.hung_calls == 0


# Where faults are injected


def test_a_wrapped_driver_shows_its_abilities_and_no_others() -> None:
    abilities = [Touches, HasIncidents, ReportsEvictions, Inspects, FindsPrefixes, Clears]
    assert [isinstance(FaultyDriver(MemoryDriver()), one) for one in abilities] == [True] * 4 + [False] * 2


def test_calls_of_optional_functions_fail_too() -> None:
    driver, store = faulty()
    driver.fail()
    assert store.batch_touch(KEYS, deadline=soon()) == []
    assert store.statistics().errors == {INJECTED: 1}


def opened(options: dict[str, Any], guard: GuardConfig) -> Store:
    store = open_spec(BackendSpec("faulty", options, guard), CODEC)
    assert isinstance(store, Store)
    return store


def test_a_configured_store_has_its_faults_below_its_guard(tmp_path: Path) -> None:
    wrapped = {"type": "file", "options": {"path": str(tmp_path / "pages"), "free_space_floor": 0}}
    store = opened({"error_share": 1, "storage": wrapped}, tuned(GuardConfig, failures=50))
    assert put(store) == [SetOutcome.ERROR] * 20
    assert store.statistics().errors.keys() == {INJECTED} and store.usage().pages == 0
    assert store.guard_statistics().failures
    store.close()
    store = opened({"storage": wrapped}, UNGUARDED)
    assert put(store) == [STORED] * 20, "the directory was released"
    store.close()


@pytest.mark.parametrize("options", [
    {"latency": -1}, {"error_share": 1.5}, {"damage_share": True}, {"seed": 1.5}, {"jitter": "soon"}, {"storage": {}}
])
def test_faults_that_are_not_valid_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        opened({"storage": {"type": "memory"}, **options}, UNGUARDED)


def test_a_composition_is_refused() -> None:
    levels = {"type": "levels", "options": {"levels": [{"type": "memory"}, {"type": "memory"}]}}
    with pytest.raises(ConfigError, match="for its parts"):
        opened({"storage": levels}, UNGUARDED)

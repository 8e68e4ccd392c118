"""How the guard of a store treats single calls: it rejects, retries and contains them, and stops a reader that finds
every page damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from hicache.backends.base import Direction, GetOutcome, SetOutcome, Usage
from hicache.backends.calls import CallResult, Refusal
from hicache.backends.compose import Levels, Part
from hicache.backends.errors import ErrorKind, StoreError
from hicache.backends.guard import Override, Verb
from hicache.backends.guard.breaker import BreakerState
from hicache.backends.memory import MemoryDriver
from hicache.backends.pages import PageReads, PageWrites
from hicache.backends.storage import Storage, store_statistics
from hicache.backends.store import Store
from hicache.config.guard import GuardConfig
from hicache.errors import BackendError
from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    CORRUPT,
    HIT,
    MISS,
    PRESENT,
    STORED,
    bare,
    empty_frames,
    full_frames,
    make_keys,
    soon,
)
from tests.backends._troubled import CODEC, Troubled
from tests.backends.guard.stores import LONG_S, PAST, guard_of, patient, refused
from tests.clocks import PassingClock
from tests.tuned import tuned

READ, WRITE = Direction.READ, Direction.WRITE
GET_ERROR, SET_ERROR = GetOutcome.ERROR, SetOutcome.ERROR


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Hide logged exceptions: their tracebacks would distract in the output of a test run."""
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def store() -> Troubled:
    return Troubled()


def put(guard: Storage, keys: list[bytes], parent: bytes | None = None) -> list[SetOutcome]:
    return guard.batch_set(keys, full_frames(guard.codec, keys), parent=parent, deadline=soon())


def get(guard: Store, keys: list[bytes]) -> list[GetOutcome]:
    outcomes = guard.batch_get(keys, empty_frames(guard.codec, len(keys)), deadline=soon())
    guard.check()
    return outcomes


def break_reads(guard: Store, store: Troubled) -> None:
    store.down = True
    for _ in range(3):
        get(guard, make_keys(1))


def test_a_call_after_its_deadline_is_not_made_and_not_a_failure(store: Troubled) -> None:
    guard, keys = guard_of(store), make_keys(2)
    for _ in range(10):
        assert guard.batch_get(keys, empty_frames(CODEC, 2), deadline=PAST) == [GET_ERROR] * 2
        assert guard.batch_set(keys, full_frames(CODEC, keys), parent=None, deadline=PAST) == [SET_ERROR] * 2
        assert guard.batch_exists(keys, deadline=PAST) == guard.delete(keys, deadline=PAST) == 0
    assert store.calls == []
    assert guard.may_pass(READ) and guard.may_pass(WRITE)
    assert guard.statistics().errors == {"deadline": 60}


def test_failed_reads_in_a_row_stop_reads_and_not_writes(store: Troubled) -> None:
    guard, keys = guard_of(store), make_keys(3)
    put(guard, keys)
    break_reads(guard, store)
    store.down = False
    before = refused(guard, READ, Refusal.OPEN)  # a probe may have ended before the third call
    assert get(guard, keys) == [GET_ERROR] * 3
    assert guard.batch_exists(keys, deadline=soon()) == 0
    assert not guard.may_pass(READ)
    assert put(guard, keys) == [PRESENT] * 3
    assert refused(guard, READ, Refusal.OPEN) == before + 2


def test_failed_writes_in_a_row_stop_writes_and_not_reads(store: Troubled) -> None:
    guard, keys = guard_of(store), make_keys(2)
    store.fail_pages = set(keys)
    for _ in range(5):  # probes use other pages, so they succeed
        assert put(guard, keys) == [SET_ERROR] * 2
    assert not guard.may_pass(WRITE) and guard.may_pass(READ)
    assert refused(guard, WRITE, Refusal.OPEN) == 2
    assert get(guard, make_keys(2, "others")) == [MISS] * 2


def test_a_call_is_a_failure_if_half_of_its_pages_failed(store: Troubled) -> None:
    """The control: a third is not enough."""
    guard, keys = guard_of(store), make_keys(6)
    store.fail_pages = set(keys[:2])
    put(guard, keys)
    assert guard.guard_statistics().failures == {}
    store.fail_pages = set(keys[:3])
    put(guard, keys)
    assert guard.guard_statistics().failures == {(WRITE, CallResult.ERROR): 1}


class Late(MemoryDriver):
    """Fails at the deadline of each call."""

    def __init__(self, clock: PassingClock) -> None:
        super().__init__()
        self._clock = clock

    def write(self, pages: PageWrites) -> None:
        self._clock.advance(pages.deadline - self._clock())
        raise StoreError(ErrorKind.TIMEOUT)


def test_a_call_that_had_too_little_time_is_not_a_failure() -> None:
    """The control: with more time it is one."""
    clock, keys = PassingClock(), make_keys(2)
    guard = guard_of(Late(clock), clock=clock)
    for seconds, failures in ((0.05, 0), (0.2, 1)):
        frames = full_frames(CODEC, keys)
        assert guard.batch_set(keys, frames, parent=None, deadline=clock() + seconds) == [SET_ERROR] * 2
        assert sum(guard.guard_statistics().failures.values()) == failures


def test_a_store_that_is_not_read_is_not_measured(store: Troubled) -> None:
    guard = guard_of(store)
    put(guard, make_keys(2))
    assert guard.usage().pages == 2
    guard.override(READ, Override.OFF)
    put(guard, make_keys(3, "more"))
    assert guard.usage().pages == 2
    guard.override(READ, Override.AUTO)
    assert guard.usage().pages == 5


@pytest.mark.parametrize("verb", ["batch_exists", "batch_has"])
def test_a_lookup_without_hits_is_a_failure_if_the_store_is_down(store: Troubled, verb: str) -> None:
    guard, keys = guard_of(store), make_keys(4)
    nothing = 0 if verb == "batch_exists" else [False] * 4

    def look_up() -> object:
        return getattr(guard, verb)(keys, deadline=soon())

    assert [look_up() for _ in range(20)] == [nothing] * 20
    assert guard.may_pass(READ) and guard.guard_statistics().failures == {}, "an empty store works"
    store.down = True
    assert [look_up() for _ in range(3)] == [nothing] * 3
    assert not guard.may_pass(READ) and guard.may_pass(WRITE)
    assert guard.guard_statistics().failures[READ, "lookup"] >= 1


@pytest.mark.parametrize("share", [0.1, 0.0])
@pytest.mark.parametrize(
    ("verb", "failed", "good"),
    [("exists", 0, 4), ("has", [False] * 4, [True] * 4), ("get", [GET_ERROR] * 4, [HIT] * 4)],
)
def test_a_failed_call_is_retried_within_the_budget(
    store: Troubled, share: float, verb: str, failed: object, good: object
) -> None:
    """Control: without a budget, the same call fails."""
    guard, keys = guard_of(store, patient(retry_share=share)), make_keys(4)
    put(guard, keys)
    store.fail_calls = 1
    calls: dict[str, Callable[[], object]] = {
        "exists": lambda: guard.batch_exists(keys, deadline=soon()),
        "has": lambda: guard.batch_has(keys, deadline=soon()),
        "get": lambda: get(guard, keys),
    }
    assert calls[verb]() == (good if share else failed)
    assert guard.guard_statistics().retried_calls.get(READ, 0) == (1 if share else 0)


def test_a_few_failed_pages_of_a_batch_are_not_a_failed_call(store: Troubled) -> None:
    guard, keys = guard_of(store), make_keys(8)
    put(guard, keys)
    store.fail_pages = set(keys[:3])
    for _ in range(10):
        assert get(guard, keys) == [GET_ERROR] * 3 + [HIT] * 5
    assert guard.may_pass(READ)


# Retries


def test_only_failed_pages_are_retried(store: Troubled) -> None:
    guard, keys = guard_of(store, patient(retry_share=0.1)), make_keys(6)
    put(guard, keys)
    get(guard, keys)
    store.fail_pages = {keys[1], keys[4]}
    store.calls.clear()
    assert get(guard, keys) == [HIT, GET_ERROR, HIT, HIT, GET_ERROR, HIT]
    assert list(map(len, store.called("get"))) == [6, 2]


def test_retried_pages_keep_their_parents(store: Troubled) -> None:
    guard, keys = guard_of(store, patient(retry_share=0.1)), make_keys(7)
    parent = make_keys(1, "before")[0]
    store.fail_pages = {keys[0], keys[3], keys[4]}
    assert put(guard, keys, parent) == [
        SET_ERROR, STORED, STORED, SET_ERROR, SET_ERROR, STORED, STORED,
    ]
    assert list(map(len, store.called("set"))) == [7, 1, 2]
    assert store.parents() == [parent, parent, keys[2]]


class StopsEarly(Troubled):
    """Stores only the first page of its first batch."""

    def write(self, pages: PageWrites) -> None:
        if self.calls:
            super().write(pages)
            return
        self.calls.append(("set", tuple(pages.keys), pages.parents[0]))
        self.poke(pages.codec.namespace, pages.keys[0], b"".join(pages.sealed(0)))
        pages.stored(0)
        raise StoreError("down")


def test_the_parent_of_retried_pages_is_never_one_of_them() -> None:
    """If a key occurs twice, the page before the failed ones can be among them."""
    store, (one, two, three) = StopsEarly(), make_keys(3)
    guard = guard_of(store, patient(retry_share=0.1))
    assert put(guard, [one, two, one, three]) == [STORED, STORED, SetOutcome.PRESENT, STORED]
    assert store.called("set") == [(one, two, three), (two,), (three,)]
    assert store.parents() == [None, one, one]


def test_retries_add_at_most_a_tenth_of_load_on_a_store_that_is_down(store: Troubled) -> None:
    guard = guard_of(store, GuardConfig(read="on", write="on"))  # otherwise the breaker would stop most calls
    keys = make_keys(4)
    get(guard, keys)
    store.calls.clear()
    store.down = True
    calls = 60
    for _ in range(calls):
        assert get(guard, keys) == [GET_ERROR] * 4
    retried = guard.guard_statistics().retried_calls[READ]
    assert 0.1 * calls + 2 <= retried <= 0.1 * calls + 4 + 1
    # The head of a batch may be read by a separate call, but no call reads more pages than the batch.
    assert sum(map(len, store.called("get"))) <= 4 * (calls + retried)


def test_a_call_is_not_retried_if_too_little_time_is_left(store: Troubled) -> None:
    """Control: with more time it is."""
    clock, keys = PassingClock(), make_keys(2)
    guard = guard_of(store, patient(retry_share=1.0, read="on"), clock=clock)
    store.down = True
    for left_s, retried in ((0.02, 0), (1.0, 1)):  # the first is less than the pause before a retry
        guard.batch_get(keys, empty_frames(CODEC, 2), deadline=clock() + left_s)
        assert guard.guard_statistics().retried_calls.get(READ, 0) == retried


def test_a_call_that_hung_is_not_retried() -> None:
    clock = PassingClock()

    class Slow(Troubled):
        def read(self, pages: PageReads[bytes]) -> None:
            clock.advance(0.5)
            raise StoreError("down")

    guard = guard_of(Slow(), tuned(GuardConfig, read="on", retry_share=1.0), clock=clock)
    guard.batch_get(make_keys(2), empty_frames(CODEC, 2), deadline=soon())
    assert guard.guard_statistics().retried_calls == {}


# Containment


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError("away"), KeyError("x"), MemoryError()])
def test_an_exception_of_the_driver_is_counted_and_becomes_an_outcome(store: Troubled, error: Exception) -> None:
    guard, keys = guard_of(store, patient(failures=100)), make_keys(2)
    store.raises = error
    assert get(guard, keys) == [GET_ERROR] * 2
    assert put(guard, keys) == [SET_ERROR] * 2
    assert guard.batch_exists(keys, deadline=soon()) == guard.delete(keys, deadline=soon()) == 0
    assert guard.statistics().errors[f"raised_{type(error).__name__}"] >= 4
    guard.check()


@pytest.mark.parametrize("error", [BackendError("still busy"), RuntimeError("a bug")])
def test_close_raises_only_errors_of_the_drivers_own_class(error: Exception) -> None:
    class Stuck(Troubled):
        def close(self) -> None:
            raise error

    guard = Store(Stuck(), CODEC, patient())
    with pytest.raises(BackendError, match="still busy") if isinstance(error, BackendError) else nullcontext():
        guard.close()
    counted = {} if isinstance(error, BackendError) else {"raised_RuntimeError": 1}
    assert guard.statistics().errors == counted


@pytest.mark.parametrize("answer", [[True, 1], [7, True], [None, None], 7, [True]])
def test_an_answer_that_breaks_the_contract_is_an_error(store: Troubled, answer: Any) -> None:
    guard = guard_of(store, patient(failures=100))
    store.answers = answer
    found = guard.batch_has(make_keys(2), deadline=soon())
    assert found in ([False] * 2, [True, False], [False, True]) and found.count(True) < 2
    assert guard.guard_statistics().failures.keys() <= {(READ, "raised"), (READ, "lookup")}
    kinds = set(guard.statistics().errors)
    assert len(kinds) == 1 and kinds <= {"raised_WrongAnswer", "raised_TypeError", ErrorKind.INTERNAL}


@pytest.mark.parametrize("answer", [-1, "many", True, [1]])
def test_a_removal_with_an_invalid_answer_or_an_exception_counts_as_failed(store: Troubled, answer: Any) -> None:
    guard = guard_of(store, patient(write="on"))  # otherwise a probe after the first failure could reject the next call
    store.answers = answer
    assert guard.delete(make_keys(1), deadline=soon()) == 0
    store.answers, store.raises = None, RuntimeError("a bug")
    assert guard.delete(make_keys(1), deadline=soon()) == 0
    assert guard.guard_statistics().failures == {(WRITE, "raised"): 2}
    store.raises = None
    assert guard.delete(make_keys(1), deadline=soon()) == 0, "the store is empty, which is not a failure"
    assert guard.guard_statistics().failures == {(WRITE, "raised"): 2}


class Unable(Troubled):
    """Its usage and incidents raise."""

    def measure(self) -> Usage:
        raise ConnectionError("away")

    def incidents(self) -> Any:
        raise ConnectionError("away")


def test_usage_and_incidents_that_raise_keep_their_last_values() -> None:
    guard = guard_of(Unable())
    assert guard.usage() == Usage(0, 0, None)
    assert set(guard.statistics().errors) == {"raised_ConnectionError"}
    assert guard.usage_sample() is None
    assert get(guard, make_keys(1)) == [MISS]


# Damage


def foreign(store: Troubled, keys: Sequence[bytes]) -> None:
    """Store pages that another engine has sealed with a different key."""
    other = FrameCodec(CODEC.namespace, CODEC.payload_bytes, mac_keys=[bytes(32)])
    for key, frame in zip(keys, full_frames(other, list(keys)), strict=True):
        other.seal(key, frame)
        store.poke(CODEC.namespace, key, bytes(frame))


def test_a_reader_with_the_wrong_key_destroys_few_pages(store: Troubled) -> None:
    """The control: without a guard it destroys all."""
    guard, keys = guard_of(store, patient(damage_backoff=LONG_S)), make_keys(300)
    foreign(store, keys)
    assert get(guard, keys) == [CORRUPT] * 16 + [GET_ERROR] * 284
    for _ in range(5):
        get(guard, keys)
    assert store.count == 284
    found = guard.guard_statistics()
    assert {d: b.reason for d, b in found.breakers.items()} == {READ: "damage", WRITE: "damage"}
    assert put(guard, make_keys(1, "new")) == [SET_ERROR], "writes stop too: the pages could not be read back"
    bare(store, CODEC).batch_get(keys, empty_frames(CODEC, 300), deadline=soon())
    assert store.count == 0


# State


def test_the_operator_switches_directions(store: Troubled) -> None:
    guard, keys = guard_of(store), make_keys(1)
    guard.override(WRITE, Override.OFF)
    assert put(guard, keys) == [SET_ERROR] and get(guard, keys) == [MISS]
    guard.override(WRITE, Override.AUTO)
    assert put(guard, keys) == [STORED]
    guard.override(READ, Override.ON)
    break_reads(guard, store)
    assert guard.may_pass(READ)
    state = guard.guard_statistics().breakers[READ]
    assert (state.override, state.state) == (Override.ON, BreakerState.CLOSED)


def test_the_latency_of_calls_is_counted_by_verb(store: Troubled) -> None:
    guard, keys = guard_of(store), make_keys(2)
    put(guard, keys)
    get(guard, keys)
    get(guard, keys)
    guard.batch_exists(keys, deadline=soon())
    guard.batch_touch(keys, deadline=soon())
    guard.delete(keys, deadline=soon())
    calls = {verb: sum(latency.counts) for verb, latency in guard.guard_statistics().latency.items()}
    assert calls == {Verb.EXISTS: 1, Verb.GET: 2, Verb.SET: 1, Verb.DELETE: 1, Verb.TOUCH: 1}


def test_storage_of_two_stores_passes_if_one_is_usable_and_shows_the_counts_of_each(store: Troubled) -> None:
    first, second = guard_of(store), guard_of(MemoryDriver())
    pair = Levels(CODEC, [Part("test", first), Part("test", second)], cascade_bytes_max=None)
    first.override(READ, Override.OFF)
    assert pair.may_pass(READ)
    second.override(READ, Override.OFF)
    assert not pair.may_pass(READ)
    assert pair.may_pass(WRITE)
    put(second, make_keys(2))
    shown = [(one.name, dict(one.statistics.sets)) for one in store_statistics(pair)]
    assert shown == [("test", {}), ("test-2", {STORED: 2})]

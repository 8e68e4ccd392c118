"""The storage gate: each reason alone closes it, and it opens again when the reason ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import pytest

from hicache.backends import store as shell
from hicache.backends.base import Direction
from hicache.backends.guard import Override
from hicache.backends.memory import MemoryDriver
from hicache.backends.slot import OpenBackend
from hicache.backends.storage import Storage
from hicache.config import TransferConfig
from hicache.config.guard import GuardConfig
from hicache.controller import LookupOperation, ReadOperation, StoreOperation
from hicache.controller.agreement import COUNTERS, Agreement, Progress
from hicache.controller.gate import (
    BACKOFF_S_MAX,
    BACKOFF_S_MIN,
    IN_SERVICE,
    RETIRED,
    OpenStore,
    Readiness,
    StorageGate,
    Until,
)
from hicache.controller.storage import StorageExecutor
from hicache.errors import InvariantError
from hicache.frame import FrameCodec
from hicache.geometry import KVGeometry
from hicache.keys import TOKEN_BYTES, PageChain, RadixKey
from hicache.supervised import SupervisedPool
from hicache.tiers import HostPool
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import memory_store
from hicache_lab.faults import FaultyDriver
from tests.ranks import Exchange
from tests.tuned import tuned
from tests.waiting import WAIT_S, wait_for

READ, WRITE = Direction.READ, Direction.WRITE
KEYS = [bytes(32)]


class Engine:
    """The scheduler's side with one guarded store; a `gate_kind` that ignores a reason is a control."""

    def __init__(self, gate_kind: Callable[..., StorageGate] = StorageGate) -> None:
        self.clock = ManualClock()
        self.gate = gate_kind(None, SupervisedPool, self.clock)
        self.use()
        self.step()

    def use(self) -> None:
        """Use a new store."""
        self.faults = FaultyDriver(MemoryDriver())
        self.guard = shell.Store(
            self.faults, FrameCodec(bytes(32), 64),
            tuned(GuardConfig, failures=1, backoff_min=0.001, backoff_max=0.001, retry_share=0.0),
        )
        self.gate.slot.start(self.guard)

    def step(self) -> None:
        """Do one step of a controller without ranks."""
        self.gate.settle(self.gate.offer())
        self.gate.check()

    def break_store(self) -> None:
        self.faults.fail()
        wait_for(lambda: not self.guard.may_pass(READ), self.look_up)

    def mend_store(self) -> None:
        self.faults.fail(False)
        wait_for(lambda: self.guard.may_pass(READ))

    def look_up(self) -> None:
        self.guard.batch_exists(KEYS, deadline=time.monotonic() + 1)

    @property
    def open(self) -> set[Direction]:
        return {direction for direction in Direction if self.gate.may(direction)}


@contextmanager
def engine(gate_kind: Callable[..., StorageGate] = StorageGate) -> Iterator[Engine]:
    one = Engine(gate_kind)
    assert one.open == {READ, WRITE}
    yield one
    assert one.gate.slot.end(WAIT_S) and one.gate.slot.close()


# Each reason: its start, the directions it closes, its end (None: never); and a gate that ignores it.


class KeepsRetired(StorageGate):
    def replace(self, open_backend: OpenBackend | None) -> None:
        pass


class NeverStops(StorageGate):
    def stop(self, direction: Direction, at: float = -math.inf) -> None:
        pass


class NeverBacksOff(StorageGate):
    def failed(self, direction: Direction) -> None:
        pass


class AsksNoGuard(StorageGate):
    def offer(self) -> Readiness:
        return Readiness(self.slot.opened)


def pass_backoff(engine: Engine) -> None:
    engine.clock.advance(BACKOFF_S_MAX)


Step: TypeAlias = Callable[[Engine], Any]
REASONS: dict[str, tuple[Step, set[Direction], Step | None, type[StorageGate]]] = {
    "retired": (
        lambda e: e.gate.replace(None), {READ, WRITE}, lambda e: e.use(), KeepsRetired,
    ),
    "breaker": (Engine.break_store, {READ}, Engine.mend_store, AsksNoGuard),
    "override": (
        lambda e: e.gate.slot.override(WRITE, Override.OFF), {WRITE},
        lambda e: e.gate.slot.override(WRITE, Override.AUTO), AsksNoGuard,
    ),
    "reads back off": (lambda e: e.gate.failed(READ), {READ}, pass_backoff, NeverBacksOff),
    "writes back off": (lambda e: e.gate.failed(WRITE), {WRITE}, lambda e: e.gate.succeeded(WRITE), NeverBacksOff),
    "reads end": (lambda e: e.gate.stop(READ), {READ}, None, NeverStops),
    "writes end": (lambda e: e.gate.stop(WRITE, at=e.clock() + 5), {WRITE}, None, NeverStops),
}


@pytest.mark.parametrize("reason", REASONS)
def test_one_reason_closes_its_direction_until_it_ends(reason: str) -> None:
    begin, closes, end, _ = REASONS[reason]
    with engine() as one:
        begin(one)
        one.step()
        assert one.open == {READ, WRITE} - closes
        if end is not None:
            end(one)
        pass_backoff(one)
        one.step()
        assert one.open == ({READ, WRITE} if end is not None else {READ, WRITE} - closes)


@pytest.mark.parametrize("reason", REASONS)
def test_a_gate_that_ignores_a_reason_stays_open(reason: str) -> None:
    """Negative control."""
    begin, _, _, ignores = REASONS[reason]
    with engine(ignores) as one:
        begin(one)
        one.gate.settle(one.gate.offer())
        assert one.open == {READ, WRITE}


@pytest.mark.parametrize("reason", REASONS)
def test_scheduler_decisions_close_at_once_and_other_reasons_in_the_next_step(reason: str) -> None:
    begin, closes, _, _ = REASONS[reason]
    with engine() as one:
        begin(one)
        assert one.open == {READ, WRITE} - (closes if reason in ("retired", "reads end", "writes end") else set())


def test_the_gate_stays_closed_until_both_reasons_end() -> None:
    with engine() as one:
        one.gate.failed(READ)
        one.gate.slot.override(READ, Override.OFF)
        one.gate.succeeded(READ)
        one.step()
        assert one.open == {WRITE}
        one.gate.slot.override(READ, Override.AUTO)
        one.gate.failed(READ)
        one.step()
        assert one.open == {WRITE}


# Stores


def test_without_a_store_the_gate_is_closed_and_nothing_is_attached() -> None:
    gate = StorageGate(None, SupervisedPool, ManualClock())
    gate.settle(gate.offer())
    gate.check()
    assert not (gate.attached or gate.may(READ) or gate.may(WRITE))
    with pytest.raises(InvariantError, match="no storage is open"):
        gate.enter()


def test_a_store_counts_as_attached_from_opening_until_detach() -> None:
    go = threading.Event()

    def open_later() -> Storage:
        go.wait(WAIT_S)
        return memory_store(FrameCodec(bytes(32), 64))

    with engine() as one:
        found = []
        for opens in (open_later, None):
            one.gate.replace(opens)
            found.append((one.gate.attached, one.gate.storage))
        assert found == [(True, None), (False, None)]
        go.set()


def test_an_override_holds_for_the_next_store() -> None:
    with engine() as one:
        one.gate.slot.override(READ, Override.OFF)
        one.gate.replace(None)
        one.use()
        one.step()
        assert one.open == {WRITE}


def test_workers_read_one_value_for_all_reasons() -> None:
    with engine() as one:
        first = one.gate.enter()
        assert first.until is IN_SERVICE
        one.gate.stop(READ)
        one.gate.stop(WRITE, at=7.0)
        assert first.until == {READ: -math.inf, WRITE: 7.0} and IN_SERVICE[READ] == math.inf
        one.gate.replace(None)
        assert first.until is RETIRED
        one.use()
        one.gate.stop(WRITE, at=8.0)
        second = one.gate.enter()
        assert second.until == {READ: -math.inf, WRITE: 8.0} and first.until is RETIRED
        for store in (first, second):
            one.gate.slot.leave(store)


@pytest.mark.parametrize("until", [IN_SERVICE, RETIRED])
def test_workers_start_no_batch_that_the_gate_has_cancelled(until: Until) -> None:
    """The open store is the control: there the workers call the backend."""
    host = HostPool(KVGeometry(layers=1, heads=1, head_dim=2, page_size=4, dtype="float32"), 1)
    with engine() as one:
        executor = StorageExecutor(None, host, TransferConfig(), SupervisedPool, one.clock)
        storage = OpenStore(one.guard, until)
        beats: list[str] = []
        late, page, key = one.clock() + 5, np.zeros(1, np.int32), RadixKey.of([1, 2, 3, 4])
        executor.look_up(LookupOperation(key, 0, b"", storage=storage, deadline=late), lambda: beats.append("look up"))
        executor.read(ReadOperation(KEYS, page, storage=storage, deadline=late), lambda: beats.append("read"))
        chain = PageChain(key.tokens, 4, b"")
        executor.store(StoreOperation(chain, page, begins_prompt=True, storage=storage), lambda: beats.append("store"))
        # A store beats again after it has given way to reads.
        assert beats == (["look up", "read", "store", "store"] if until is IN_SERVICE else [])


def test_a_store_remembers_a_limited_number_of_chains_that_it_could_not_store() -> None:
    host = HostPool(KVGeometry(layers=1, heads=1, head_dim=2, page_size=4, dtype="float32"), 1)
    with engine() as one:
        one.faults.fail()
        executor = StorageExecutor(None, host, TransferConfig(), SupervisedPool, one.clock)
        storage = OpenStore(one.guard, IN_SERVICE)
        keys = [number.to_bytes(32, "big") for number in range(4096 + 8)]
        for key in keys:
            chain = PageChain(bytes(4 * TOKEN_BYTES), 4, b"", [key])
            operation = StoreOperation(chain, np.zeros(1, np.int32), begins_prompt=True, storage=storage)
            executor.store(operation, lambda: None)
        assert list(storage.broken_chains) == keys[8:], "the oldest are forgotten"


def test_check_finds_a_retired_store_that_workers_still_use() -> None:
    with engine() as one:
        store = one.gate.enter()
        store.until = RETIRED
        with pytest.raises(InvariantError, match="stale"):
            one.gate.check()
        store.is_retired = True
        with pytest.raises(InvariantError, match="1 wrong entries"):
            one.gate.check()
        store.is_retired = False
        one.gate.slot.leave(store)


# Back-off


def backoff_s(gate: StorageGate, clock: ManualClock) -> float:
    """Return the length of the back-off that a failure starts."""
    begin = clock()
    gate.failed(READ)
    while not gate.offer().read:
        clock.advance(BACKOFF_S_MIN / 2)
    return clock() - begin


def test_each_further_failure_after_a_backoff_doubles_the_next_one_up_to_a_limit() -> None:
    with engine() as one:
        lengths = [round(backoff_s(one.gate, one.clock) / BACKOFF_S_MIN) for _ in range(12)]
    assert lengths[:4] == [1, 2, 4, 8]
    assert lengths[-1] == round(BACKOFF_S_MAX / BACKOFF_S_MIN)


def test_many_operations_that_fail_in_one_outage_count_once() -> None:
    with engine() as one:
        for _ in range(64):
            one.gate.failed(READ)
        one.clock.advance(BACKOFF_S_MIN)
        assert one.gate.offer().read


@pytest.mark.parametrize("end", ["success", "new store"])
def test_a_success_or_a_new_store_ends_the_backoff_and_makes_the_next_one_short(end: str) -> None:
    with engine() as one:
        for _ in range(6):
            one.gate.failed(READ)
            one.clock.advance(BACKOFF_S_MAX)
        one.gate.failed(READ)
        if end == "success":
            one.gate.succeeded(READ)
        else:
            one.gate.replace(None)
            one.use()
        assert one.gate.offer().read
        assert round(backoff_s(one.gate, one.clock) / BACKOFF_S_MIN) == 1


# Ranks


class Ranks:
    """Two engines that agree only on storage."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self._agreements = [Agreement(g, prefetch_places=0, rates=0) for g in Exchange(2).ranks()]
        self.step()

    def step(self) -> None:
        for agreement, one in zip(self._agreements, self.engines, strict=True):
            agreement.start(Progress(storage=one.gate.offer()), dict.fromkeys(COUNTERS, 0))
        for agreement, one in zip(self._agreements, self.engines, strict=True):
            one.gate.settle(agreement.result().storage)


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_on_one_rank_closes_the_gates_of_all(reason: str) -> None:
    begin, closes, end, _ = REASONS[reason]
    with engine() as first, engine() as second:
        ranks = Ranks([first, second])
        assert first.open == {READ, WRITE}
        begin(second)
        if reason == "retired":
            first.gate.replace(None)
            first.use()
        ranks.step()
        assert first.open == second.open == {READ, WRITE} - closes
        if end is not None:
            end(second)
            ranks.step()
            assert first.open == second.open == {READ, WRITE}


def test_a_rank_that_ignores_the_others_stays_open() -> None:
    """Negative control."""
    with engine() as first, engine() as second:
        second.gate.failed(READ)
        for one in (first, second):
            one.step()
        assert first.open != second.open

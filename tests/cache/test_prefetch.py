"""Prefetch from a backend that is late, hangs, fails, ends its thread, or has only a part of the chain."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Sequence

import pytest

from hicache.backends.base import Direction, GetOutcome, SetOutcome
from hicache.backends.calls import Call
from hicache.config import TransferConfig
from hicache.frame import PageBuffer
from hicache.keys import RadixKey, page_keys
from tests.cache.world import (
    GEOMETRY,
    LastingBackend,
    ShiftedClock,
    World,
    codec,
    every_hit,
    filled,
    memory_backend,
    prefetch,
    prompt,
)

KEY = prompt(*range(1, 9))


class TroubledBackend(LastingBackend):
    """A memory backend whose reads can wait, raise an error, or end their thread."""

    def __init__(self) -> None:
        super().__init__(codec())
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.trouble: BaseException | None = None
        self.calls = 0
        self.hold_from_call = 0

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        self.calls += 1
        if self.calls > self.hold_from_call:
            self.entered.set()
            self.gate.wait(30)
        if self.trouble is not None:
            raise self.trouble
        return super()._get(call, keys, pages)


class RejectingBackend(LastingBackend):
    """A store that answers `rejections` writes with `rejection`. It asserts that it has the parent of a later write."""

    rejections: float = 1
    rejection = SetOutcome.ERROR

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        if self.rejections > 0:
            self.rejections -= 1
            return [self.rejection] * len(keys)
        outcomes = super()._set(call, keys, pages, parent)
        assert parent is None or self.batch_exists([parent], deadline=call.deadline) == 1, "the parent is not stored"
        return outcomes


def held_backend(from_call: int = 0) -> TroubledBackend:
    """Return a backend that has KEY and hangs in each read after the first `from_call`."""
    backend = filled(TroubledBackend(), KEY)
    backend.calls, backend.hold_from_call = 0, from_call
    backend.gate.clear()
    return backend


TIMEOUT_S = 60.0


def world_with_a_late_prefetch(backend: TroubledBackend, transfer: TransferConfig | None = None) -> World:
    """Return a world in which request "a" has waited long enough for the read of KEY, in which `backend` hangs. The
    clock moves when the read hangs, so on a slow machine the prefetch is not late before."""
    clock = ShiftedClock()
    config = every_hit(prefetch=prefetch(timeout_base=TIMEOUT_S, timeout_per_1024_tokens=0))
    world = World(backend=backend, device_pages=32, config=config, transfer=transfer, clock=clock)
    assert world.cache.prefetch_from_storage("a", KEY)
    world.until(backend.entered.is_set)
    assert not world.cache.check_prefetch_progress("a")
    clock.shift_s = TIMEOUT_S + 1
    world.arrive("a")
    return world


def test_a_late_prefetch_gives_the_arrived_pages_and_keeps_its_buffers_until_the_read_ends() -> None:
    backend = held_backend(from_call=2)
    world = world_with_a_late_prefetch(backend, TransferConfig(storage_batch_pages=2))
    request = world.begin("a", KEY)
    assert request.storage_hit_tokens == 4 * GEOMETRY.page_size
    world.cache.cache_finished_req(request, KEY)
    reserved = world.controller.statistics().queues.host_pages_reserved
    assert reserved >= 8, "the read that hangs must keep its pages"
    backend.gate.set()
    world.settle()
    assert world.controller.statistics().queues.host_pages_reserved == 0


def test_a_hit_ends_at_a_hole_in_the_chain() -> None:
    backend = filled(memory_backend(), KEY)
    keys = page_keys(KEY.tokens, GEOMETRY.page_size)
    backend.delete([keys[5]], deadline=float("inf"))
    world = World(backend=backend)
    assert world.serve("a", KEY).storage_hit_tokens == 5 * GEOMETRY.page_size


def test_a_hit_ends_at_a_page_that_is_removed_between_lookup_and_read() -> None:
    class LosesPage(LastingBackend):
        def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
            self.delete([page_keys(KEY.tokens, GEOMETRY.page_size)[3]], deadline=call.deadline)
            return super()._get(call, keys, pages)

    world = World(backend=filled(LosesPage(codec()), KEY))
    assert world.serve("a", KEY).storage_hit_tokens == 3 * GEOMETRY.page_size


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("trouble", "errors", "restarts"),
    [(RuntimeError("driver bug"), {"io:RuntimeError": 1}, 0), (SystemExit("not even an Exception"), None, 1)],
    ids=["the worker continues", "the worker is replaced"],
)
def test_an_exception_in_a_backend_is_a_miss_and_the_next_request_has_a_worker(
    trouble: BaseException, errors: dict[str, int] | None, restarts: int
) -> None:
    backend = filled(TroubledBackend(), KEY)
    backend.trouble = trouble
    world = World(backend=backend, transfer=TransferConfig(io_workers=1))
    assert world.serve("a", KEY).storage_hit_tokens == 0
    world.until(lambda: world.controller.statistics().worker_restarts == restarts)
    backend.trouble = None
    world.forget()
    world.until(lambda: world.controller.gate.may(Direction.READ))
    assert world.serve("b", KEY).storage_hit_tokens == 8 * GEOMETRY.page_size
    statistics = world.controller.statistics()
    assert statistics.worker_restarts == restarts
    assert errors is None or statistics.worker_errors == errors


def test_a_worker_that_hangs_is_replaced() -> None:
    backend = held_backend()
    world = world_with_a_late_prefetch(backend, TransferConfig(io_workers=1, storage_deadline=0.1))
    assert world.attempt("a", KEY).storage_hit_tokens == 0
    world.until(lambda: world.controller.statistics().workers_stuck == 1)
    assert world.controller.statistics().workers_alive == 3
    backend.gate.set()


@pytest.mark.usefixtures("long_back_off")
def test_only_the_first_request_waits_for_a_store_that_hangs() -> None:
    backend = held_backend()
    world = world_with_a_late_prefetch(backend)
    request = world.begin("a", KEY)
    assert request.storage_hit_tokens == 0
    world.cache.cache_finished_req(request, KEY)
    other = prompt(*range(20, 28))
    assert world.cache.prefetch_from_storage("b", other)
    assert world.cache.check_prefetch_progress("b"), "the request need not wait"
    world.attempt("b", other)
    assert world.skipped["prefetch_paused"] == 1
    backend.gate.set()
    world.settle()
    assert world.serve("c", KEY).cached_tokens == 32


def test_a_request_without_room_on_l1_keeps_the_pages_that_were_read_for_it() -> None:
    backend = filled(memory_backend(), KEY)
    world = World(backend=backend, device_pages=16)
    running = world.begin("r", prompt(*range(50, 60)))
    world.prefetch("a", KEY)
    assert world.cache.begin_request("a", KEY) is None
    world.cache.cache_finished_req(running, None)
    request = world.begin("a", KEY)
    assert request.storage_hit_tokens == 8 * GEOMETRY.page_size
    world.cache.cache_finished_req(request, KEY)


def test_after_a_back_off_a_request_retries_a_failed_store(long_back_off: float) -> None:
    backend = RejectingBackend(codec())
    backend.rejection, backend.rejections = SetOutcome.REJECTED, math.inf
    clock = ShiftedClock()
    world = World(backend=backend, clock=clock)
    world.serve("a", KEY)
    world.settle()
    assert backend.usage().pages == 0
    assert world.skipped["store_incomplete"] == 1
    world.serve("b", KEY)
    world.settle()
    assert world.skipped["store_paused"] > 0
    backend.rejections = 0
    clock.shift_s += long_back_off
    rids = itertools.count()

    def stored_after_another_request() -> bool:
        world.serve(f"c{next(rids)}", KEY)
        world.settle()
        return backend.usage().pages == 8

    world.until(stored_after_another_request)


def test_a_page_is_not_stored_before_its_parent() -> None:
    backend = RejectingBackend(codec())
    world = World(backend=backend)
    rids = itertools.count()

    def whole_chain_stored() -> bool:
        request = world.begin(f"r{next(rids)}", KEY)
        for pages in range(max(1, request.shared_pages), 9):  # handed over page by page, like a chunked prefill
            world.cache.cache_unfinished_req(request, RadixKey(KEY.tokens[: pages * 16], KEY.seed))
            world.step()
        world.cache.cache_finished_req(request, KEY)
        world.settle()
        keys = page_keys(KEY.tokens, GEOMETRY.page_size)
        return backend.batch_exists(keys, deadline=time.monotonic() + 10) == 8

    world.until(whole_chain_stored)
    assert world.controller.statistics().worker_errors == {}


def test_an_engine_continues_a_chain_whose_head_another_engine_has_stored() -> None:
    """The present content of the store counts, not the earlier failed write."""

    backend = RejectingBackend(codec())
    world = World(backend=backend)
    world.serve("a", prompt(1, 2))
    world.settle()
    stored_by_another = World(backend=backend)
    stored_by_another.serve("b", prompt(1, 2))
    stored_by_another.settle()
    world.forget()
    assert world.serve("c", prompt(1, 2, 3)).storage_hit_tokens == 8
    world.until(lambda: world.controller.gate.may(Direction.WRITE))
    world.serve("d", prompt(1, 2, 3))
    world.settle()
    assert backend.batch_exists(page_keys(prompt(1, 2, 3).tokens, 4), deadline=time.monotonic() + 10) == 3

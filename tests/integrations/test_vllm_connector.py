"""The connector for vLLM, driven without vLLM: calls of its scheduler and workers, and the resulting bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hicache.integrations.vllm import worker
from hicache.integrations.vllm.forwards import Forward
from hicache.integrations.vllm.jobs import Report, Step
from hicache.integrations.vllm.scheduler import SchedulerSide
from tests.spans import HEADERS, TRACE_ID, Spans, trace_of
from tests.waiting import WAIT_S, wait_for

from .vllm_driver import Engine, engine_on
from .vllm_parts import BLOCK, Request, Scheduled, ShiftedClock, Worker

NAME = f"vllm-test-{os.getpid()}"
PROMPT = list(range(100, 122))  # five blocks and two tokens
FORMS = [
    {},
    {"page_blocks": 2},
    {"layerwise": True},
    {"batches": 2},
    {"batches": 2, "layerwise": True, "page_blocks": 3},
    {"ranks": 2, "page_blocks": 2},
    {"ranks": 2, "replicas": 2},
    {"ranks": 2, "layerwise": True},
    {"drafts": 3, "page_blocks": 2},
    {"budget": 3},
    {"caching": False},
]


def whole(options: dict[str, Any], tokens: int) -> int:
    """Return the number of tokens in whole pages."""
    page: int = BLOCK * options.get("page_blocks", 1)
    return tokens // page * page


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with engine_on(tmp_path, NAME) as made:
        yield made


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_hits_come_from_host_memory_and_after_a_restart_from_storage(options: dict[str, Any], tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME, **options) as engine:
        first = engine.serve(PROMPT, 9)
        assert first.matched == 0
        # The last token of the answer is never computed. With two batches, the step before it is not saved either.
        assert engine.pages_on_host(first) >= (len(PROMPT) + 7) // engine.layout.page_tokens - (engine.batches - 1)
        engine.forget_device()
        assert engine.serve(PROMPT, 9).matched == whole(options, 21)
    with engine_on(tmp_path, NAME, **options) as engine:
        assert engine.serve(PROMPT, 9).matched == whole(options, 21)


@pytest.mark.parametrize(("tokens", "matched"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_of_a_prompt_is_always_computed(engine: Engine, tokens: int, matched: int) -> None:
    engine.serve(PROMPT[:tokens])
    engine.forget_device()
    assert engine.serve(PROMPT[:tokens]).matched == matched


def test_a_hit_that_begins_in_the_middle_of_a_page_is_loaded_from_there(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME, page_blocks=3) as engine:
        engine.serve(PROMPT)
        engine.forget_device()
        engine.serve([*PROMPT[:4], 1])  # computes one block, less than a page
        request = engine.serve(PROMPT)
        assert request.matched == 8  # the device has the first of the three blocks of the page


def test_pages_of_an_answer_are_saved(engine: Engine) -> None:
    first = engine.serve(PROMPT, 20)
    engine.forget_device()
    again = engine.add(engine.request(first.tokens[:41]))
    engine.run(again)
    assert again.matched == 40


def test_a_prompt_that_skips_reading_is_computed_and_saved_and_not_prefetched(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME) as engine:
        engine.serve(PROMPT)
        engine.forget_device()
        assert engine.serve(PROMPT, skip_reading_prefix_cache=True).matched == 0
        fresh = engine.serve([7, *PROMPT], skip_reading_prefix_cache=True)
        assert engine.pages_on_host(fresh) == 5
    with engine_on(tmp_path, NAME) as engine:
        request = engine.serve(PROMPT, skip_reading_prefix_cache=True)
        statistics = engine.cache.statistics()
        assert request.matched == 0 and not any(statistics.lookups.values()) and not any(statistics.skipped.values())


@pytest.mark.parametrize(("name", "values"), [("adapter", ("name 1", "name 2")), ("salt", ("one", "two"))])
def test_equal_prompts_under_other_adapters_or_salts_do_not_share_pages(
    engine: Engine, name: str, values: tuple[str, str]
) -> None:
    """The two adapters have one name and different weights."""
    for value, matched in ((values[0], 0), (values[1], 0), (values[0], 20)):
        options: dict[str, Any] = {name: value}
        assert engine.serve(PROMPT, **options).matched == matched
        engine.forget_device()


def test_a_request_whose_adapter_is_being_identified_waits_and_blocks_no_other(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME) as engine:
        engine.serve(PROMPT, adapter="one 1")
    with engine_on(tmp_path, NAME) as engine:
        waiting, skipping = (
            engine.add(engine.request(prompt, adapter="one 1", identified=False, skip_reading_prefix_cache=skips))
            for prompt, skips in ((PROMPT, False), ([7, *PROMPT], True))
        )
        assert engine.serve(PROMPT).matched == 0
        engine.run(skipping)  # vLLM does not wait for it, so it is not saved
        assert engine.pages_on_host(skipping) == 0 and waiting.status == "waiting"
        assert waiting.identity is not None
        waiting.identity.set_result("one 1")
        engine.run(waiting)
        assert waiting.matched == 20


def test_a_request_whose_adapter_is_not_identified_in_time_shares_no_pages(tmp_path: Path) -> None:
    clock = ShiftedClock()
    with engine_on(tmp_path, NAME, clock=clock) as engine:
        engine.serve(PROMPT, adapter="one 1")
        engine.forget_device()
        late = engine.add(engine.request(PROMPT, adapter="one 1", identified=False))
        engine.step()
        assert late.status == "waiting"
        clock.shift_s = 10
        engine.run(late)
        assert late.matched == 0
        engine.forget_device()
        assert engine.serve(PROMPT, adapter="one 1").matched == 20


# Hints


@pytest.mark.parametrize("preempted", [False, True])
def test_hints_of_a_request_are_carried_out_when_its_last_pages_are_on_the_host(
    tmp_path: Path, preempted: bool
) -> None:
    action = {"action_id": "1", "action_type": "kv.pin", "payload": {"session_id": "an agent"}}
    with engine_on(tmp_path, NAME) as engine:
        request = engine.request(PROMPT, 12, kv_transfer_params={"kv_hints": {"actions": [action]}})
        engine.start(request)
        if preempted:
            engine.reset(weights=False)
        engine.hold("save")
        wait_for(lambda: request.status == "finished", engine.step)
        assert engine.cache.statistics().hints == {("kv.pin", "deferred"): 1}
        engine.release("save")
        engine.run(request)
        assert engine.cache.statistics().hints[("kv.pin", "accepted")] == 1
        assert engine.cache.statistics().pinned_pages == len(request.tokens) // BLOCK


def test_the_spans_of_hints_are_in_the_trace_of_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans(monkeypatch)
    actions = [{"action_id": "1", "action_type": kind} for kind in ("kv.retain", "kv.fetch")]
    with engine_on(None, NAME) as engine:
        engine.serve(PROMPT, kv_transfer_params={"kv_hint": {"actions": actions}}, trace_headers=HEADERS)
    assert spans.named("hint") == [
        {"action": "kv.retain", "outcome": "deferred", "pages": 0},
        {"action": "unknown", "outcome": "rejected", "pages": 0},
        {"action": "kv.retain", "outcome": "accepted", "pages": 5},
    ]
    assert {trace_of(span) for span in spans.ended if span.name == "hicache.hint"} == {TRACE_ID}
    spans.check()


# Loads


def test_pages_on_the_device_are_not_read_from_storage_when_host_memory_is_too_small_for_them(tmp_path: Path) -> None:
    """The first turn of a conversation is on the device and in storage, and not on L2."""
    history = list(range(60))
    with engine_on(tmp_path, NAME) as engine:
        engine.serve(history)
    with engine_on(tmp_path, NAME, pages=30) as engine:
        assert engine.serve(history).matched == 56
        engine.serve(list(range(100, 221)))  # takes L2
        before = engine.cache.statistics()
        request = engine.add(engine.request([*history, *range(200, 220)]))
        # The request is in vLLM's queue, and the thread of the idle engine polls.
        wait_for(lambda: engine.cache.statistics().lookups != before.lookups)
        wait_for(lambda: engine.cache.statistics().controller.queues.prefetch == 0)
        engine.run(request)
        assert (request.matched, engine.cache.statistics().controller.prefetched_pages) == (0, 14)
        engine.serve(list(range(300, 421)))
        engine.forget_device()
        engine.serve([*history, *range(500, 520)])
        assert engine.cache.statistics().controller.prefetched_pages > 14


def test_equal_prompts_load_their_own_copies_at_once_if_vllm_does_not_share_blocks(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME, caching=False) as engine:
        engine.serve(PROMPT)
        engine.hold("load")
        each = [engine.request(PROMPT) for _ in range(3)]
        for request in each:
            engine.add(request)
        for _ in range(2):
            engine.step()
        assert [request.status for request in each] == ["loading"] * 3
        engine.release("load")
        engine.run(*each)
        assert [request.matched for request in each] == [20] * 3


def test_equal_prompts_wait_for_the_load_of_the_first(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME) as engine:
        engine.serve(PROMPT)
        engine.forget_device()
        engine.hold("load")
        both = [engine.request(PROMPT) for _ in range(2)]
        engine.start(both[0])
        engine.add(both[1])
        for _ in range(4):
            engine.step()
        assert [one.status for one in both] == ["loading", "waiting"]
        engine.release("load")
        engine.run(*both)
        assert [one.matched for one in both] == [20, 0]


def test_a_step_that_computes_nothing_waits_for_its_load(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_IDLE_WAIT_S", WAIT_S)
    gates = engine.workers[0].gates["load"]
    engine.serve(PROMPT)
    engine.forget_device()
    engine.hold("load")
    request = engine.add(engine.request(PROMPT))

    def release() -> None:
        wait_for(lambda: bool(gates))
        engine.release("load")

    thread = threading.Thread(target=release)
    thread.start()
    engine.step()
    thread.join()
    assert request.request_id in engine.received


def test_only_steps_that_compute_nothing_are_idle_and_none_of_an_engine_in_lockstep(engine: Engine) -> None:
    orders: list[Step] = []

    def scheduled(tokens: Mapping[str, int]) -> bool:
        orders.append(engine.scheduler.build_step(Scheduled(tokens, None, [], Step()), lambda _: None))
        return orders[-1].idle

    assert scheduled({}) and not scheduled({"a request": 1})
    engine.scheduler._in_lockstep = True
    assert not scheduled({})


class CountsRests(ShiftedClock):
    """Counts the rests of the scheduler."""

    rests = 0

    def sleep(self, seconds: float) -> None:
        self.rests += 1


def test_a_step_rests_only_while_requests_wait_and_it_loads_nothing(tmp_path: Path) -> None:
    clock = CountsRests()
    with engine_on(tmp_path, NAME, clock=clock) as engine:
        engine.step()
        engine.serve(PROMPT)
        engine.forget_device()
        clock.rests = 0
        engine.hold("load")
        engine.add(engine.request(PROMPT))
        engine.step()
        assert clock.rests == 0  # loads
        engine.step()
        assert clock.rests == 1
        engine.release("load")


def test_a_request_aborted_during_its_load_keeps_its_blocks_until_the_load_ends(engine: Engine) -> None:
    engine.serve(PROMPT)
    engine.forget_device()
    engine.hold("load")
    engine.start(request := engine.request(PROMPT))
    assert request.status == "loading"
    engine.abort(request)
    engine.step()
    assert request.blocks
    engine.release("load")
    engine.run(request)
    assert not request.blocks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_load_is_computed_and_offered_to_other_requests_only(tmp_path: Path, ranks: int) -> None:
    with engine_on(tmp_path, NAME, ranks=ranks) as engine:
        engine.serve(PROMPT)
        engine.forget_device()
        engine.fail("load", rank=ranks - 1)
        engine.start(request := engine.request(PROMPT, 12))
        wait_for(lambda: request.status == "running", engine.step)
        assert request.matched == 20  # offered once
        engine.fail(rank=ranks - 1)
        engine.reset(weights=False)  # preempts it
        engine.run(request)
        assert request.matched == 20
        engine.forget_device()
        assert engine.serve(PROMPT).matched == 20
        assert engine.cache.statistics().skipped["load_failed"] == 1


class LosesPages(SchedulerSide):
    """Loses its pages on the host between `match` and `allocated`, as a poll in between could cause."""

    def allocated(self, request: Request, blocks: list[int], tokens: int) -> None:  # type: ignore[override]
        with self._called():
            if tokens:
                self.cache.clear()
        super().allocated(request, blocks, tokens)


@pytest.mark.parametrize("layerwise", [False, True])
def test_pages_lost_before_the_load_begins_are_computed(tmp_path: Path, layerwise: bool) -> None:
    with engine_on(None, NAME, layerwise=layerwise, kinds=(LosesPages, Worker)) as engine:
        engine.serve(PROMPT)
        engine.forget_device()
        engine.garbage_allowed = layerwise  # the forward that detects it computes garbage, and vLLM drops its output
        request = engine.add(engine.request(PROMPT, 12))
        engine.run(request)
        assert request.known == len(request.tokens)


class IgnoresFailures(SchedulerSide):
    """Treats failed copies as successful."""

    def report(self, report: Report) -> None:
        for ended in report.jobs.values():
            ended.failed = False
        super().report(report)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_pages_computed_after_a_failed_layerwise_load_are_not_saved(tmp_path: Path, batches: int, rank: int) -> None:
    with engine_on(tmp_path, NAME, layerwise=True, ranks=2, batches=batches) as engine:
        request = spoil(engine, rank)
        engine.pages_on_host(request)
        engine.run(request)
        engine.garbage_allowed = False
        engine.forget_device()
        assert engine.serve(request.tokens[:40]).matched >= 20
    with engine_on(tmp_path, NAME, layerwise=True, ranks=2, batches=batches) as engine:
        engine.serve(request.tokens[:40])


def spoil(engine: Engine, rank: int) -> Request:
    """Return a request whose layer-wise load fails on one rank, in the forward that computes five more pages."""
    engine.serve(PROMPT)
    engine.forget_device()
    engine.fail("load", rank=rank)
    engine.garbage_allowed = True
    engine.start(request := engine.request([*PROMPT[:20], *range(20)], 9))
    for _ in range(engine.batches):
        engine.step()
    assert request.matched == 20
    engine.fail(rank=rank)
    return request


def test_pages_computed_after_an_ignored_failed_load_are_wrong(tmp_path: Path) -> None:
    """The control of the test above."""
    kinds = (IgnoresFailures, Worker)
    with pytest.raises(AssertionError, match="is wrong"), engine_on(None, NAME, layerwise=True, kinds=kinds) as engine:
        engine.pages_on_host(spoil(engine, 0))


# Saves


@pytest.mark.parametrize("options", [{}, {"batches": 2}, {"ranks": 2}, {"drafts": 2}], ids=str)
def test_an_ended_request_keeps_its_blocks_until_they_are_saved(tmp_path: Path, options: dict[str, Any]) -> None:
    with engine_on(tmp_path, NAME, **options) as engine:
        engine.hold("save")
        request = engine.add(engine.request(PROMPT, 2))
        wait_for(lambda: request.status == "finished", engine.step)
        for _ in range(3):
            engine.step()
        assert request.blocks and engine.scheduler.frees_blocks_soon
        assert engine.pages_on_host(request) == 0
        engine.release("save")
        engine.run(request)
        assert engine.pages_on_host(request) == 5


def test_blocks_of_a_preempted_request_are_saved_before_others_write_to_them(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME, blocks=14) as engine:
        for request in preempt_while_saving(engine):
            assert engine.pages_on_host(request) >= 5


def preempt_while_saving(engine: Engine) -> list[Request]:
    """Serve two requests that do not fit together. The saves of one end after the other has taken its blocks."""
    engine.hold("save")
    requests = [engine.request([number, *PROMPT], 20) for number in range(2)]
    engine.start(*requests)
    wait_for(lambda: requests[1].status == "waiting", engine.step)
    for _ in range(6):
        engine.step()
    engine.release("save")
    engine.run(*requests)
    return requests


def test_a_request_preempted_and_aborted_in_its_second_load_frees_its_blocks_once(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME, batches=2) as engine:
        engine.serve(PROMPT)
        engine.forget_device()
        engine.hold("save")
        engine.start(request := engine.request([*PROMPT[:20], *range(20)], 9))
        wait_for(lambda: request.status == "running", engine.step)
        engine.reset(weights=False)
        engine.forget_device()
        engine.hold("load")
        engine.before_update = lambda: request.status == "loading" and engine.abort(request)
        wait_for(lambda: request.aborted, engine.step)
        engine.release("load", "save")
        engine.run(request)


class NeverDrains(Worker):
    """Gives memory back while it is copied."""

    def drain(self) -> None:
        pass


def sleep_while_saving(engine: Engine) -> int:
    """Return the pages on L2 of a request whose saves had not ended when the engine went to sleep."""
    engine.hold("save")
    request = engine.add(engine.request(PROMPT, 2))
    wait_for(lambda: request.status == "finished", engine.step)
    engine.sleep()
    engine.release("save")
    engine.run(request)
    return engine.pages_on_host(request)


@pytest.mark.parametrize("options", [{}, {"ranks": 2}], ids=str)
def test_copies_end_before_the_memory_of_the_device_is_given_back(tmp_path: Path, options: dict[str, Any]) -> None:
    with engine_on(tmp_path, NAME, **options) as engine:
        assert sleep_while_saving(engine) == 5


def test_without_a_drain_the_pages_saved_during_a_sleep_are_wrong(tmp_path: Path) -> None:
    """The control of the test above."""
    kinds = (SchedulerSide, NeverDrains)
    with pytest.raises(AssertionError, match="is wrong"), engine_on(tmp_path, NAME, kinds=kinds) as engine:
        sleep_while_saving(engine)


class NeverFlushes(SchedulerSide):
    """Never requests a flush."""

    def build_step(self, *args, **options):  # type: ignore[no-untyped-def]
        step = super().build_step(*args, **options)
        step.flush.clear()
        return step


def test_without_a_flush_the_pages_of_a_preempted_request_are_wrong(tmp_path: Path) -> None:
    """The control of the tests of preemption."""
    with (
        pytest.raises(AssertionError, match=r"is wrong|wrong bytes"),
        engine_on(tmp_path, NAME, blocks=14, kinds=(NeverFlushes, Worker)) as engine,
    ):
        for request in preempt_while_saving(engine):
            engine.pages_on_host(request)


def test_blocks_of_a_request_preempted_between_steps_and_aborted_are_saved(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME, blocks=14) as engine:
        engine.hold("save")
        engine.start(request := engine.request(PROMPT, 20))
        engine.reset(weights=False)
        engine.abort(request)
        engine.start(other := engine.request(list(range(44)), 2))
        engine.release("save")
        engine.run(request, other)
        engine.pages_on_host(request)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_on_one_rank_stays_invisible(tmp_path: Path, rank: int) -> None:
    with engine_on(tmp_path, NAME, ranks=2) as engine:
        engine.fail("save", rank=rank)
        request = engine.serve(PROMPT)
        assert engine.pages_on_host(request) == 0
        engine.fail(rank=rank)
        assert engine.pages_on_host(engine.serve([9, *PROMPT])) == 5
        assert engine.cache.statistics().skipped["backup_failed"] == 1


def test_a_failed_save_is_repeated_once_while_its_request_runs(engine: Engine) -> None:
    engine.hold("save")
    engine.fail("save")
    request = engine.add(engine.request(PROMPT[:20], 3))  # the answer does not fill a page
    wait_for(lambda: bool(engine.scheduler._jobs), engine.step)
    engine.release("save")
    wait_for(lambda: engine.cache.statistics().skipped["backup_failed"] > 0, engine.step)
    assert request.status != "finished"
    engine.fail()
    engine.run(request)
    assert engine.pages_on_host(request) == 5
    engine.fail("save")
    engine.serve([7, *PROMPT[:19]], 3)
    assert engine.cache.statistics().skipped["backup_failed"] <= 1 + 2


# The engine


def test_new_weights_invalidate_pages_on_every_tier_and_in_flight_also_after_a_restart(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME) as engine:
        engine.serve(PROMPT)
        engine.hold("save")
        engine.start(request := engine.request([1, *PROMPT], 20))
        assert engine.reset(weights=True)
        engine.release("save")
        engine.run(request)
        engine.forget_device()
        assert engine.serve(PROMPT).matched == 0  # a hit would fail the comparison with the bytes of the new weights
        engine.forget_device()
        assert engine.serve(PROMPT).matched == 20
        assert engine.serve([1, *PROMPT]).matched == 0  # it began with the old weights
    with engine_on(tmp_path, NAME) as engine:
        engine.scheduler.new_weights()
        engine.weights = 2
        assert engine.serve(PROMPT).matched == 0


def test_new_weights_get_a_higher_epoch_after_the_clock_went_back(engine: Engine) -> None:
    with engine.scheduler._called():
        engine.cache.update_weights(1 << 62)
    engine.scheduler.new_weights()
    assert engine.cache.weights_epoch > 1 << 62


def test_saved_pages_are_stored_without_another_step(engine: Engine) -> None:
    request = engine.serve(PROMPT)
    assert engine.pages_on_host(request) == 5
    wait_for(lambda: engine.cache.statistics().controller.stored_pages == 5)


def test_only_prefills_that_did_not_wait_for_a_load_are_measured(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME, layerwise=True, drafts=3) as engine:
        engine.serve(PROMPT, 9)
        assert engine.measured == [Forward(len(PROMPT), 0)]  # drafted tokens do not count
        engine.forget_device()
        engine.serve(PROMPT, 9)
        assert engine.measured == [Forward(len(PROMPT), 0)]


def test_hits_from_storage_are_counted_separately(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME) as engine:
        engine.serve(PROMPT[:9])
    with engine_on(tmp_path, NAME) as engine:
        engine.hold("load")
        request = engine.add(engine.request(PROMPT[:9]))
        wait_for(lambda: request.status == "loading", engine.step)
        assert engine.scheduler.loaded_from_storage(request) == 8


# Who waits for the device


def left(engine: Engine) -> list[tuple[int, bool]]:
    """Return the tokens that are left of each prompt in the order of the requests, and whether it still waits."""
    queue = engine.cache._queue
    return [(tokens, rid in queue._waiting) for rid, tokens in queue._left.items()]


def test_a_prompt_has_fewer_tokens_left_after_each_chunk_and_none_when_it_decodes() -> None:
    with engine_on(None, NAME, budget=10) as engine:
        for number in range(2):
            engine.add(engine.request([number, *PROMPT], 5))
        assert left(engine) == [(23, True), (23, True)]
        engine.step()
        assert left(engine) == [(13, False), (23, True)]
        engine.step()
        assert left(engine) == [(3, False), (23, True)]
        engine.step()
        assert left(engine) == [(16, False)]


def test_a_request_waits_from_its_arrival_on_also_without_a_prefetch(tmp_path: Path) -> None:
    with engine_on(None, NAME) as engine:  # no storage
        engine.add(engine.request(PROMPT))
        assert left(engine) == [(22, True)]
    with engine_on(tmp_path, NAME, budget=10) as engine:
        skips = engine.add(engine.request(PROMPT, skip_reading_prefix_cache=True))
        unknown = engine.add(engine.request([1, *PROMPT], adapter="one 1", identified=False))
        assert left(engine) == [(22, True), (23, True)]
        engine.step()
        assert left(engine) == [(12, False), (23, True)]
        assert unknown.identity is not None
        unknown.identity.set_result("one 1")
        engine.run(skips, unknown)


def test_pages_on_the_host_are_not_left_to_compute_and_a_hit_of_all_but_one_token_begins(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME) as engine:
        engine.serve(PROMPT[:21])
        engine.forget_device()
        engine.hold("load")
        engine.start(request := engine.request(PROMPT[:21], 9))
        assert request.status == "loading" and left(engine) == [(1, True)]
        engine.release("load")
        wait_for(lambda: request.status == "running", engine.step)
        assert left(engine) == []


def test_a_preempted_request_waits_before_the_others(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME, blocks=14) as engine:
        requests = [engine.request([number, *PROMPT], 20) for number in range(3)]
        engine.start(*requests[:2])
        engine.add(requests[2])
        assert left(engine) == [(20, True)]
        wait_for(lambda: requests[1].status == "waiting", engine.step)
        assert [waits for _, waits in left(engine)] == [True, True]
        assert engine.cache._queue.first(1) == [requests[1].request_id]
        engine.run(*requests)


def test_an_aborted_request_does_not_wait(engine: Engine) -> None:
    request = engine.add(engine.request(PROMPT))
    engine.abort(request)
    assert left(engine) == []


def test_no_call_is_made_for_a_request_that_decodes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    record = engine.cache.record_progress

    def counted(rid: str, left_tokens: int) -> None:
        calls.append(left_tokens)
        record(rid, left_tokens)

    monkeypatch.setattr(engine.cache, "record_progress", counted)
    engine.serve(PROMPT, 20)
    assert calls == [0]

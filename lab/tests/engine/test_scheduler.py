"""The scheduler: the order of requests, how they end, and that no page is lost."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hicache.backends.calls import Call
from hicache.cache import HiRadixCache, SessionCache
from hicache.clock import Clock
from hicache.errors import CapacityError, HiCacheError, InvalidInput, InvariantError, TransferError
from hicache.frame import FrameCodec
from hicache.tiers import EngineBlocks, FailedTransfer, Fence, HostWindow, Transfer
from hicache.tiers.copy_cpu import CpuCopyEngine
from hicache.types import PageIds
from hicache_lab.conformance import memory_store
from hicache_lab.engine import Engine, EngineOptions, FinishReason, LlamaModel, Sampling, Span
from lab.tests.engine.world import (
    TINY,
    WAIT_S,
    assert_nothing_leaked,
    drive,
    free_rows,
    generate,
    make_engine,
    plain_greedy,
    random_checkpoint,
    random_tokens,
    settle,
    tiers,
)
from tests.passing import Passing

pytestmark = pytest.mark.long

CHECKPOINT = random_checkpoint()


class GatedBackend(Passing):
    """A store that answers lookups only while its gate is open."""

    def __init__(self, codec: FrameCodec) -> None:
        super().__init__(memory_store(codec))
        self.gate = threading.Event()

    def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
        self.gate.wait(WAIT_S)
        return super()._exists(call, keys)


def gated_engine() -> tuple[Engine, GatedBackend]:
    backends: list[GatedBackend] = []

    def make(codec: FrameCodec) -> GatedBackend:
        backends.append(GatedBackend(codec))
        return backends[0]

    return make_engine(CHECKPOINT, backend=make), backends[0]


def test_a_request_gets_the_tokens_of_plain_greedy_decoding() -> None:
    prompt = random_tokens(37, seed=3)
    with make_engine(CHECKPOINT) as engine:
        record = generate(engine, prompt, 12)
        assert record.output_tokens == plain_greedy(prompt, 12)
        assert (record.reason, record.error) == (FinishReason.LENGTH, None)
        assert (record.prompt_tokens, record.computed_tokens, record.hit_tokens) == (37, 37, 0)
        assert_nothing_leaked(engine)


def test_the_next_turn_hits_all_generated_tokens_except_the_last() -> None:
    prompt = random_tokens(20, seed=5)
    with make_engine(CHECKPOINT, page_size=4) as engine:
        first = generate(engine, prompt, 8)
        # All 28 tokens would fill 7 pages, but the one that was sampled last has no KV.
        turn = [*prompt, *first.output_tokens, *random_tokens(5, seed=6)]
        second = generate(engine, turn)
        assert second.device_hit_tokens == 24 and second.output_tokens == plain_greedy(turn, 8)


def test_the_end_of_text_ends_a_request_unless_it_is_ignored() -> None:
    prompt = random_tokens(10, seed=8)
    tokens = plain_greedy(prompt, 8)
    config = dataclasses.replace(TINY, eos_tokens=frozenset({tokens[3]}))
    with make_engine(random_checkpoint(config)) as engine:
        rid = engine.submit(prompt, 8)
        record = drive(engine)[rid]
        assert record.reason is FinishReason.EOS
        assert record.output_tokens == tokens[: tokens.index(tokens[3]) + 1]
        assert generate(engine, prompt, 8).output_tokens == tokens


def test_a_full_l1_preempts_the_youngest_request_and_changes_no_token() -> None:
    prompts = [random_tokens(24, seed=seed) for seed in (10, 11, 12)]
    expected = [plain_greedy(prompt, 40) for prompt in prompts]
    with make_engine(CHECKPOINT, page_size=8, device_pages=14) as engine:
        rids = [engine.submit(prompt, 40, ignore_eos=True) for prompt in prompts]
        records = drive(engine)
        assert [records[rid].output_tokens for rid in rids] == expected
        assert records[rids[0]].preemptions == 0 and records[rids[2]].preemptions > 0
        assert engine.statistics().preemptions == sum(record.preemptions for record in records.values())
        assert_nothing_leaked(engine)


def test_a_request_that_outgrows_l1_fails_with_a_typed_error() -> None:
    with make_engine(CHECKPOINT, page_size=8, device_pages=4) as engine:
        rid = engine.submit(random_tokens(20, seed=13), 40, ignore_eos=True)
        record = drive(engine)[rid]
        assert record.reason is FinishReason.FAILED and isinstance(record.error, CapacityError)
        assert len(record.output_tokens) == 13  # 32 tokens have KV, and one more was sampled
        assert record.preemptions == 0
        assert_nothing_leaked(engine)
        assert generate(engine, random_tokens(20, seed=14)).reason is FinishReason.LENGTH


def test_a_request_waits_while_l1_is_full_and_is_retried_after_another_ends() -> None:
    with make_engine(CHECKPOINT, page_size=8, device_pages=8) as engine:
        rids = [engine.submit(random_tokens(50, seed=seed), 14, ignore_eos=True) for seed in (15, 16)]
        engine.step()
        assert (engine.running, engine.waiting) == (1, 1)
        settle_copies = tiers(engine).drain(WAIT_S)
        engine.step()  # which the copies that have ended let try again
        tried = engine.cache.statistics().skipped["no_device_room"]
        for _ in range(5):
            engine.step()
        assert settle_copies and engine.cache.statistics().skipped["no_device_room"] == tried
        assert drive(engine).keys() == set(rids)
        assert_nothing_leaked(engine)


def test_a_request_that_can_never_run_is_rejected_at_once() -> None:
    options = EngineOptions(waiting_max=1)
    with make_engine(CHECKPOINT, page_size=8, device_pages=4, options=options) as engine:
        with pytest.raises(CapacityError, match="L1 has 4"):
            engine.submit([1] * 33, 1)
        with pytest.raises(CapacityError, match="513 positions"):
            engine.submit([1], TINY.context_tokens + 1)
        engine.submit([1], 1)
        with pytest.raises(CapacityError, match="waiting"):
            engine.submit([1], 1)
        assert len(drive(engine)) == 1
        assert engine.statistics().submitted == 1
        assert_nothing_leaked(engine)


NOT_WHOLE: list[Any] = [1.5, math.nan, "x", None, True, 2**63, 10**5000, [1]]
BAD_FIELDS: list[dict[str, Any]] = [
    *({"prompt_tokens": bad} for bad in ([1.5], ["a"], [None], [True], [math.nan], [2**40], [-1], [TINY.vocab_size],
                                         [[1]], [], None, 5, "text", b"text", np.array([1.0]), torch.tensor([[1]]),
                                         {1, 2}, {1: 2}, np.ma.array([1, 2], mask=[False, True]))),
    *({"max_new_tokens": bad} for bad in (0, -1, *NOT_WHOLE)),
    *({"priority": bad} for bad in NOT_WHOLE),
    *({"ignore_eos": bad} for bad in (None, 1, "no")),
    *({"sampling": bad} for bad in (None, 0.5, "greedy", {"temperature": 1}, Sampling)),
    *({name: bad} for name in ("extra_key", "cache_salt") for bad in ("", "\ud800", 5, b"a", ["a"])),
    *({"session_id": bad} for bad in (5, b"s", ["s"], "s")),
]


@pytest.mark.parametrize("session", [False, True], ids=["plain", "sessions"])
def test_a_bad_field_of_a_request_is_rejected_and_stops_no_other_request(session: bool) -> None:
    prompt = random_tokens(20, seed=34)
    with make_engine(CHECKPOINT, kind=SessionCache if session else HiRadixCache) as engine:
        running = engine.submit(prompt, 6, ignore_eos=True)
        engine.step()
        for fields in BAD_FIELDS:
            before = engine.statistics()
            with pytest.raises(HiCacheError):
                engine.submit(**{"prompt_tokens": prompt, "max_new_tokens": 2, **fields})
            assert engine.statistics() == before
            engine.check()
        assert drive(engine)[running].output_tokens == plain_greedy(prompt, 6)
        assert_nothing_leaked(engine)


def test_other_invalid_arguments_of_an_engine_are_rejected() -> None:
    with make_engine(CHECKPOINT) as engine:
        for rid in (None, 5, ["request-0"]):
            with pytest.raises(InvalidInput, match="rid"):
                engine.abort(rid)  # type: ignore[arg-type]
        assert not engine.abort("request-0")
        for timeout_s in (math.nan, -1, "1", None, True, 10**400):
            with pytest.raises(InvalidInput, match="timeout_s"):
                engine.run_until_done(timeout_s)  # type: ignore[arg-type]
            with pytest.raises(InvalidInput, match="timeout_s"):
                engine.close(timeout_s)  # type: ignore[arg-type]
        assert generate(engine, random_tokens(10, seed=36)).reason is FinishReason.LENGTH
    with pytest.raises(InvalidInput, match="closed"):
        engine.submit([1], 1)
    assert engine.step() == []


@dataclasses.dataclass(frozen=True)
class Failing(Sampling):
    """A sampling that `submit` accepts and that fails from its `after`-th use on."""

    error: Exception = dataclasses.field(default_factory=lambda: RuntimeError("a secret of the prompt"))
    after: int = 0
    uses: list[int] = dataclasses.field(default_factory=list)

    def __getattribute__(self, name: str) -> Any:
        if name == "seed" and object.__getattribute__(self, "temperature") > 0:
            uses = object.__getattribute__(self, "uses")
            uses.append(1)
            if len(uses) > 1 + object.__getattribute__(self, "after"):  # `submit` reads it once
                raise object.__getattribute__(self, "error")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize(
    ("after", "error", "session"),
    [
        (0, RuntimeError("a secret"), False),
        (4, InvalidInput("typed"), False),
        (4, RuntimeError("a secret"), True),
        (1, MemoryError(), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_a_request_that_fails_inside_a_step_ends_alone(after: int, error: Exception, session: bool) -> None:
    prompts = [random_tokens(length, seed=length) for length in (21, 40, 33)]
    expected = [plain_greedy(prompt, 12) for prompt in prompts]
    with make_engine(CHECKPOINT, kind=SessionCache if session else HiRadixCache) as engine:
        rids = [engine.submit(prompt, 12, ignore_eos=True) for prompt in prompts[:2]]
        bad = engine.submit(random_tokens(30, seed=37), 12, sampling=Failing(1.0, error=error, after=after))
        rids.append(engine.submit(prompts[2], 12, ignore_eos=True))
        records = drive(engine)
        assert [records[rid].output_tokens for rid in rids] == expected
        assert all(records[rid].reason is FinishReason.LENGTH for rid in rids)
        failed = records[bad]
        assert failed.reason is FinishReason.FAILED and len(failed.output_tokens) == after
        assert isinstance(failed.error, HiCacheError)
        assert failed.error is error or (failed.error.__cause__ is error and "secret" not in str(failed.error))
        assert engine.statistics().finished == {FinishReason.LENGTH: 3, FinishReason.FAILED: 1}
        assert not engine.abort(bad)
        assert_nothing_leaked(engine)


def test_a_request_whose_cache_calls_fail_ends_alone_and_frees_its_pages_once() -> None:
    """The test plants an invalid key after `submit`, so that the first call to the cache fails."""
    prompt = random_tokens(40, seed=38)
    for steps in (0, 2, 4):  # the request waits, prefills, decodes
        with make_engine(CHECKPOINT, options=EngineOptions(prefill_tokens_max=30)) as engine:
            good = engine.submit(prompt, 10, ignore_eos=True)
            bad = engine.submit(random_tokens(30, seed=39), 10, ignore_eos=True)
            for _ in range(steps):
                engine.step()
            request = next(each for each in (*engine._waiting, *engine._running.values()) if each.rid == bad)
            request.seed, request._key = (b"x" * 31, None) if steps == 0 else (b"x" * 32, None)
            records = drive(engine)
            assert records[good].output_tokens == plain_greedy(prompt, 10)
            assert records[bad].reason is FinishReason.FAILED and isinstance(records[bad].error, InvalidInput)
            assert_nothing_leaked(engine)


def test_broken_counters_and_a_failed_forward_fail_the_engine() -> None:
    """Negative control: an error of shared state is raised, and does not fail a single request."""
    with make_engine(CHECKPOINT) as engine:
        broken = Failing(1.0, error=InvariantError("the books are broken"))
        engine.submit(random_tokens(20, seed=40), 4, sampling=broken)
        with pytest.raises(InvariantError, match="broken"):
            engine.step()
        assert engine.statistics().finished == {}


def test_options_and_parts_that_do_not_fit_are_rejected() -> None:
    for bad in (0, -1, *NOT_WHOLE):
        for name in ("running_max", "prefill_tokens_max", "waiting_max"):
            with pytest.raises(InvalidInput, match=name):
                EngineOptions(**{name: bad})
    with pytest.raises(InvalidInput, match="schedule"):
        EngineOptions(schedule="fcfs")  # type: ignore[arg-type]
    with make_engine(CHECKPOINT) as engine, make_engine(CHECKPOINT) as other:
        with pytest.raises(InvalidInput, match="another pool"):
            Engine(engine.model, other.cache)
        with pytest.raises(InvalidInput, match="rows"):
            Engine(engine.model, engine.cache, EngineOptions(running_max=9))


def test_requests_that_wait_for_storage_are_overtaken_and_steps_go_on() -> None:
    engine, backend = gated_engine()
    with engine:
        slow = engine.submit(random_tokens(40, seed=17), 4, ignore_eos=True)
        quick = engine.submit(random_tokens(8, seed=18), 4, ignore_eos=True)  # one page: nothing to ask storage for
        records = drive(engine, until=lambda: engine.running == 0 and engine.waiting == 1)
        assert records.keys() == {quick}
        assert [engine.step() for _ in range(50)] == [[]] * 50 and engine.waiting == 1
        backend.gate.set()
        assert drive(engine).keys() == {slow}
        assert_nothing_leaked(engine)


def test_run_until_done_stops_at_its_deadline_and_can_be_called_again() -> None:
    engine, backend = gated_engine()
    with engine:
        rid = engine.submit(random_tokens(40, seed=19), 4)
        assert engine.run_until_done(timeout_s=0.01) == {} and engine.waiting == 1
        backend.gate.set()
        assert engine.run_until_done(timeout_s=WAIT_S).keys() == {rid}


def test_a_request_may_be_aborted_while_it_waits_for_storage() -> None:
    engine, backend = gated_engine()
    with engine:
        rid = engine.submit(random_tokens(40, seed=20), 4)
        engine.step()
        assert engine.abort(rid) and not engine.abort(rid)
        record = drive(engine)[rid]
        assert (record.reason, record.first_token_s, record.output_tokens) == (FinishReason.ABORTED, None, ())
        backend.gate.set()
        assert_nothing_leaked(engine)
        assert not any(engine.cache.statistics().skipped.values())  # no request began without its pages


def test_a_request_may_be_aborted_before_in_and_after_its_prefill() -> None:
    with make_engine(CHECKPOINT, options=EngineOptions(prefill_tokens_max=10)) as engine:
        expected_outputs = []
        for steps in range(8):  # 0: waiting; 1 to 3: within the prefill of 34 tokens; then decoding
            rid = engine.submit(random_tokens(34, seed=21), 20, cache_salt=f"{steps}", ignore_eos=True)
            for _ in range(steps):
                engine.step()
                engine.check()
            assert engine.abort(rid)
            engine.check()
            record = drive(engine)[rid]
            assert record.reason is FinishReason.ABORTED
            expected_outputs.append(len(record.output_tokens))
            assert_nothing_leaked(engine)
        assert expected_outputs == [0, 0, 0, 0, 2, 3, 4, 5]
        assert engine.statistics().finished == {FinishReason.ABORTED: 8}


class FailingLoads(CpuCopyEngine):
    """A copy engine whose loads fail."""

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        return FailedTransfer(TransferError("the copy failed"))


def test_a_failed_load_fails_its_request_without_a_token() -> None:
    prompt = random_tokens(40, seed=24)
    with make_engine(CHECKPOINT, copies=FailingLoads) as engine:
        generate(engine, prompt)
        settle(engine)
        running = engine.submit(random_tokens(20, seed=25), 30, ignore_eos=True)
        engine.step()
        tiers(engine).evict(tiers(engine).tree.device_evictable_pages)
        failed = engine.submit(prompt, 4)
        later = engine.submit(prompt, 4)
        records = drive(engine)
        assert records[running].output_tokens == plain_greedy(random_tokens(20, seed=25), 30)
        for rid in (failed, later):
            assert records[rid].reason is FinishReason.FAILED and isinstance(records[rid].error, TransferError)
            assert records[rid].output_tokens == ()
        settle(engine)


class Streamed(LlamaModel):
    """A model that pretends to compute on a stream. Its fences record how many forwards they come after."""

    forwards = 0

    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        self.forwards += 1
        return super().forward(spans)

    @property
    def stream(self) -> Any:
        return self

    def record_event(self) -> PassedFence:
        return PassedFence(self.forwards)


class PassedFence(NamedTuple):
    """A fence that has always passed."""

    forwards: int

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class FencedCopies(CpuCopyEngine):
    """Records for each copy how many forwards its fence comes after, and how many were queued before it."""

    model: Streamed

    def __init__(self, blocks: EngineBlocks, window: HostWindow) -> None:
        super().__init__(blocks, window)
        self.backups: list[tuple[int, int]] = []
        self.loads: list[tuple[int, int]] = []

    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        self.backups.append((after.forwards if isinstance(after, PassedFence) else 0, self.model.forwards))
        return super().backup(blocks, host_blocks, after=after)

    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        self.loads.append((after.forwards if isinstance(after, PassedFence) else 0, self.model.forwards))
        return super().load(host_blocks, blocks, after=after)


def test_on_a_stream_backups_wait_for_all_forwards_and_loads_for_the_last_user_of_their_pages() -> None:
    prompt = random_tokens(40, seed=24)
    with make_engine(CHECKPOINT, copies=FencedCopies, model=Streamed) as engine:
        copies = tiers(engine).controller._copies
        assert isinstance(copies, FencedCopies) and isinstance(engine.model, Streamed)
        copies.model = engine.model
        generate(engine, prompt)
        settle(engine)
        used = engine.model.forwards
        engine.submit(random_tokens(20, seed=25), 30, ignore_eos=True)
        engine.step()
        tiers(engine).evict(tiers(engine).tree.device_evictable_pages)
        generate(engine, prompt)
        settle(engine)
        assert engine.statistics().hit_tokens["host"] > 0
        assert len(copies.backups) >= 2 and all(after == queued for after, queued in copies.backups)
        [(after, queued)] = copies.loads
        assert after == used < queued, "forwards are queued that do not use these pages"


def test_closing_aborts_the_remaining_requests_and_leaks_nothing() -> None:
    engine = make_engine(CHECKPOINT, options=EngineOptions(running_max=1))
    for seed in (26, 27):
        engine.submit(random_tokens(20, seed=seed), 50, ignore_eos=True)
    engine.step()
    assert engine.close()
    assert engine.running == engine.waiting == 0
    assert engine.statistics().finished == {FinishReason.ABORTED: 2}
    assert free_rows(engine) == 1
    engine.check()


def test_records_carry_the_times_of_the_engine_s_clock() -> None:
    class Ticking(Clock):
        """A clock that moves by a second whenever it is read."""

        ticks = itertools.count()

        def __call__(self) -> float:
            return float(next(self.ticks))

    with make_engine(CHECKPOINT) as made:
        engine = Engine(made.model, made.cache, clock=Ticking())
        record = generate(engine, random_tokens(5, seed=28), 3)
        assert (record.arrival_s, record.first_token_s, record.finish_s) == (0.0, 1.0, 2.0)
        assert record.time_to_first_token_s == 1.0


def test_statistics_add_up() -> None:
    with make_engine(CHECKPOINT) as engine:
        records = [generate(engine, random_tokens(40, seed=29), 5) for _ in range(3)]
        totals = engine.statistics()
        assert totals.submitted == 3 and totals.finished == {FinishReason.LENGTH: 3}
        assert totals.computed_tokens + sum(totals.hit_tokens.values()) == 3 * 40
        assert totals.hit_tokens["device"] == sum(record.device_hit_tokens for record in records) == 64
        assert totals.output_tokens == 15 and (totals.waiting, totals.running) == (0, 0)


def test_an_idle_engine_checks_its_invariants_if_configured() -> None:
    for check, found in ((True, True), (False, False)):
        with make_engine(CHECKPOINT, options=EngineOptions(check_when_idle=check)) as engine:
            generate(engine, random_tokens(40, seed=31))
            settle(engine)
            tree = tiers(engine).tree
            tree.node_count += 1
            try:
                engine.step()
                engine.rest()
                assert not found
            except InvariantError:
                assert found
            tree.node_count -= 1

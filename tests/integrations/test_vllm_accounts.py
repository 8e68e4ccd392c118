"""The accounts of prompts under vLLM's calls: each token has one source, and each attempt that ran is counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hicache.cache.explain import PromptTokens
from hicache.ghosts import Kind, Reason
from tests.spans import HEADERS, Spans
from tests.waiting import WAIT_S, wait_for

from .test_vllm_connector import FORMS, NAME, PROMPT, whole
from .vllm_driver import Engine, engine_on
from .vllm_parts import BLOCK, Request, ShiftedClock

NEW, TAIL = (Reason.NEW, ""), (Reason.TAIL, "")
UNAVAILABLE, UNSHARED = (Reason.UNAVAILABLE, ""), (Reason.UNSHARED, "")


def account_of(engine: Engine, request: Request) -> PromptTokens:
    """Return the account of a request. Its sources add up, and so do the counts of the cache."""
    engine.cache.check()
    found = engine.cache.explainer.recent[request.request_id]
    assert found.tokens == found.cached + sum(found.computed.values())
    return found


def computed(engine: Engine, request: Request) -> dict[Kind, int]:
    return {kind: tokens for kind, tokens in account_of(engine, request).computed.items() if tokens}


def sources(engine: Engine, request: Request) -> tuple[int, int, int]:
    found = account_of(engine, request)
    return found.device, found.host, found.storage


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_tokens_come_from_the_device_the_host_and_storage_or_are_new(options: dict[str, Any], tmp_path: Path) -> None:
    hit, blocks = whole(options, 21), 21 // BLOCK * BLOCK
    with engine_on(tmp_path, NAME, **options) as engine:
        first = engine.serve(PROMPT)
        assert computed(engine, first) == {NEW: hit, TAIL: 22 - hit}
        if options.get("caching", True):
            # A prompt whose last page is on the device up to a block counts it in tokens, as vLLM does.
            assert sources(engine, engine.serve(PROMPT)) == (blocks, 0, 0)
        engine.forget_device()
        second = engine.serve(PROMPT)
        assert sources(engine, second) == (0, hit, 0)
        assert computed(engine, second) == {TAIL: 22 - hit}
    with engine_on(tmp_path, NAME, **options) as engine:
        assert sources(engine, engine.serve(PROMPT)) == (0, 0, hit)


def test_a_prompt_is_new_from_the_token_that_differs(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME) as engine:
        engine.serve(PROMPT)
        other = engine.serve([*PROMPT[:10], 7, *PROMPT[11:]])
        assert sources(engine, other) == (8, 0, 0)
        assert computed(engine, other) == {NEW: 12, TAIL: 2}
        assert account_of(engine, other).diverged_at == 8  # page keys do not say where in the page


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_a_prompt_shorter_than_a_page_is_its_tail(tmp_path: Path, tokens: int) -> None:
    with engine_on(tmp_path, NAME) as engine:
        request = engine.serve(PROMPT[:tokens])
        assert computed(engine, request) == {TAIL: tokens}
        assert engine.cache.statistics().prompt_tokens == tokens


def test_a_prompt_that_skips_reading_is_unshared(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME) as engine:
        for _ in range(2):
            request = engine.serve(PROMPT, skip_reading_prefix_cache=True)
            assert computed(engine, request) == {UNSHARED: 20, TAIL: 2}


@pytest.mark.parametrize("options", [{}, {"layerwise": True}, {"ranks": 2}], ids=str)
def test_pages_whose_load_failed_were_unavailable(options: dict[str, Any], tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME, **options) as engine:
        engine.serve(PROMPT)
        engine.forget_device()
        engine.fail("load")
        engine.garbage_allowed = True
        request = engine.serve(PROMPT)
        assert computed(engine, request) == {UNAVAILABLE: 20, TAIL: 2}
        assert engine.cache.statistics().requests == 2


class _LaterClock(ShiftedClock):
    def wall_s(self) -> float:
        return super().wall_s() + self.shift_s


@pytest.mark.parametrize("shift_s", [100, 0])
def test_a_page_that_storage_removed_by_its_age_is_expired(tmp_path: Path, shift_s: float) -> None:
    """A page that is missing, and was stored a short time ago, is evicted."""
    clock = _LaterClock()
    with engine_on(tmp_path, NAME, clock=clock, max_age="60s", pages=10) as engine:
        engine.serve(PROMPT)
        for start in (500, 600):  # they take all of L2
            with engine.scheduler._called():
                assert engine.cache.drain(WAIT_S)
            engine.serve(list(range(start, start + 22)))
        engine.forget_device()
        clock.shift_s = shift_s
        for path in () if shift_s else tmp_path.glob("*/*/*"):
            path.unlink()
        reason = (Reason.EXPIRED, "") if shift_s else (Reason.EVICTED, "storage")
        assert computed(engine, engine.serve(PROMPT)) == {reason: 20, TAIL: 2}


def test_each_attempt_of_a_preempted_request_is_counted(tmp_path: Path) -> None:
    with engine_on(tmp_path, NAME) as engine:
        request = engine.request(PROMPT, 12)
        engine.start(request)
        first = account_of(engine, request)
        assert computed(engine, request) == {NEW: 20, TAIL: 2}
        engine.reset(weights=False)
        engine.run(request)
        assert account_of(engine, request) is not first
        assert sources(engine, request) == (0, 20, 0)
        state = engine.cache.statistics()
        assert state.requests == 2 and state.prompt_tokens == 22 + account_of(engine, request).tokens


@pytest.mark.parametrize("loads", [False, True])
def test_a_request_that_was_aborted_before_it_ran_is_not_counted(tmp_path: Path, loads: bool) -> None:
    with engine_on(tmp_path, NAME) as engine:
        engine.serve(PROMPT)
        engine.forget_device()
        if loads:
            engine.hold("load")
            engine.start(request := engine.request(PROMPT))
        else:
            request = engine.add(engine.request(PROMPT))
            assert engine.scheduler.match(request, 0) == 20
        engine.abort(request)
        engine.release("load")
        engine.run(request)
        assert request.request_id not in engine.cache.explainer.recent
        assert engine.cache.statistics().requests == 1
        engine.cache.check()


def test_spans_have_the_tokens_that_a_request_wrote_also_after_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = Spans(monkeypatch)
    with engine_on(tmp_path, NAME) as engine:
        engine.serve(PROMPT)
        engine.hold("save")
        request = engine.add(engine.request([*PROMPT[:8], *range(500, 520)], trace_headers=HEADERS))
        wait_for(lambda: request.status == "finished", engine.step)  # and its save is held
        engine.release("save")
        engine.run(request)
        assert account_of(engine, request).written == 20
        preempted = engine.request(list(range(700, 722)), 12, trace_headers=HEADERS)
        engine.start(preempted)
        engine.reset(weights=False)
        engine.run(preempted)
    # The second attempt computes three tokens of its input, and writes also its output.
    usage = [span.attributes for span in spans.ended if span.name == "hicache.request"]
    assert [each["gen_ai.usage.cache_creation.input_tokens"] for each in usage if each] == [20, 20, 20, 3]
    assert not spans._open

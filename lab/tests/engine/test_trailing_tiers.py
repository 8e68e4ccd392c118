"""Models with windows and states over all three tiers: their results do not depend on the source of a prefix.

The tokens of an engine without a cache, and the bits of their logits, are the reference. The controls put other content
into slots, which must change the tokens.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

from hicache.config import HiCacheConfig
from hicache.errors import CapacityError, ConfigError, TransferError
from hicache.keys import RadixKey
from hicache.tiers import FailedTransfer
from hicache.types import PageIds
from hicache_lab.engine import Batch, Engine, EngineOptions, FinishReason, Output, RequestRecord, create_engine
from hicache_lab.engine.model import _Logits
from hicache_lab.engine.scheduler import SHARED_PAGES
from lab.tests.engine.world import (
    assert_nothing_leaked,
    drive,
    generate,
    mixed,
    random_checkpoint,
    random_tokens,
    settle,
    tiers,
)
from tests.seeds import rng, seeds

pytestmark = pytest.mark.long

CHECKPOINTS = {
    "window": random_checkpoint(mixed("fwf", 11)), "state": random_checkpoint(mixed("sfs")),
    "both": random_checkpoint(mixed("sfw", 11)),
}
MODELS = list(CHECKPOINTS)
PAGE = 4
PROMPT = random_tokens(70, seed=5)
CACHED = 68  # of PROMPT: the last token is computed in any case
NEW_TOKENS = 12

# The tokens of a request, each with a digest of the logits that it was chosen by.
Results = list[tuple[int, bytes]]
_DIGESTS: WeakKeyDictionary[Engine, dict[str, list[bytes]]] = WeakKeyDictionary()


def build(
    model: str, *, device_pages: int = 100, host_pages: int = 200, slots: int | None = None, page: int = PAGE,
    running: int = 4, chunk: int = 24, store: Path | None = None, **entries: Any,
) -> Engine:
    """Return an engine that uses every hit, even if it does not pay, and whose logits are recorded for `results`."""
    values: dict[str, Any] = {
        "page_size": page, "device": {"tokens": page * device_pages}, "host": {"tokens": page * host_pages},
        "load_back_threshold_tokens": 1, "break_even": {"mode": "always"},
        "prefetch": {"policy": "wait_complete", "threshold_tokens": 1, "host_share": 1},
    }
    if store is not None:
        values["storage"] = {"type": "file", "options": {"path": str(store)}}
    options = EngineOptions(running_max=running, prefill_tokens_max=chunk, trailing_slots=slots)
    engine = create_engine(HiCacheConfig.model_validate(values | entries), CHECKPOINTS[model], options=options)
    compute, digests = engine.model.compute, _DIGESTS.setdefault(engine, {})

    def recorded(batch: Batch) -> Output:
        output = compute(batch)
        assert isinstance(output, _Logits)
        for (request, count), logits in zip(batch, output._logits, strict=True):
            if request.kv_tokens + count == len(request.tokens):
                digests.setdefault(request.rid, []).append(hashlib.sha256(logits.numpy().tobytes()).digest())
        return output

    engine.model.compute = recorded  # type: ignore[method-assign]
    return engine


def results(engine: Engine, record: RequestRecord) -> Results:
    return list(zip(record.output_tokens, _DIGESTS[engine][record.rid], strict=True))


@functools.cache
def _expected(model: str, prompt: tuple[int, ...], new_tokens: int, page: int) -> Results:
    with build(model, page=page, prefix_cache=False) as engine:
        return results(engine, generate(engine, prompt, new_tokens))


def expected(model: str, prompt: Sequence[int], new_tokens: int = NEW_TOKENS, page: int = PAGE) -> Results:
    """Return the results of an engine without a cache."""
    return _expected(model, tuple(prompt), new_tokens, page)


def expected_tokens(model: str, prompt: Sequence[int]) -> tuple[int, ...]:
    return tuple(token for token, _ in expected(model, prompt))


def serve(engine: Engine, model: str, prompt: Sequence[int], *hits: int) -> None:
    """Serve a request, and check its results and its hits on L1, L2 and storage."""
    record = generate(engine, prompt, NEW_TOKENS)
    assert (record.device_hit_tokens, record.host_hit_tokens, record.storage_hit_tokens) == hits
    assert results(engine, record) == expected(model, prompt)
    settle(engine)


def leave_device(engine: Engine) -> None:
    tiers(engine).evict(tiers(engine).tree.device_evictable_pages)
    assert tiers(engine).tree.device_evictable_pages == 0


def leave_host(engine: Engine) -> None:
    cache = tiers(engine)
    leave_device(engine)
    cache.host.free(cache.tree.evict_host(cache.host.pages))
    assert cache.tree.node_count == 0


def pages_of(engine: Engine, prompt: Sequence[int]) -> PageIds:
    """Return the pages of a prompt on L1."""
    return engine.cache.match_prefix(RadixKey.of(prompt)).device_pages[: (len(prompt) - 1) // engine.cache.page_size]


def take_slots(engine: Engine) -> None:
    """Serve other prompts until the pages of PROMPT, which stay on L1, have no slots."""
    for seed in range(100, 110):
        generate(engine, random_tokens(30, seed=seed), 1)
        settle(engine)
        pages = pages_of(engine, PROMPT)
        assert len(pages) == CACHED // PAGE
        if not any(pool.slots(pages).any() for pool in engine.model.trailing):
            return
    raise AssertionError("the pages of the prompt still have slots")


def fill_slots(engine: Engine, value: float) -> None:
    """Write `value` to all slots."""
    for pool in engine.model.trailing:
        for layer in pool.pool.blocks.layers:
            layer[0].view(torch.float32).fill_(value)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_answers_to_its_prompt(model: str) -> None:
    # Otherwise equal tokens would say little.
    outputs = {
        expected_tokens(model, prompt) for prompt in (PROMPT, [*PROMPT[:60], 9, *PROMPT[61:]], PROMPT[:60])
    }
    assert len(outputs) == 3 and all(len(set(output)) > 3 for output in outputs)


@pytest.mark.parametrize("model", MODELS)
def test_results_are_the_same_from_l1_and_l2(model: str) -> None:
    with build(model) as engine:
        serve(engine, model, PROMPT, 0, 0, 0)
        serve(engine, model, PROMPT, CACHED, 0, 0)
        leave_device(engine)
        serve(engine, model, PROMPT, 0, CACHED, 0)
        serve(engine, model, PROMPT, CACHED, 0, 0)
        assert_nothing_leaked(engine)


@pytest.mark.parametrize("model", MODELS)
def test_a_conversation_continues_after_its_own_output(model: str) -> None:
    with build(model, slots=14) as engine:
        history, cached = PROMPT, 0
        for _ in range(3):
            record = generate(engine, history, 21)
            assert results(engine, record) == expected(model, history, 21) and record.hit_tokens == cached
            settle(engine)
            cached = (len(history) + 20) // PAGE * PAGE  # the last token does not have KV
            history = [*history, *record.output_tokens, 7]


@pytest.mark.parametrize("model", MODELS)
def test_slots_that_others_have_taken_are_filled_from_l2(model: str) -> None:
    with build(model, slots=16) as engine:
        serve(engine, model, PROMPT, 0, 0, 0)
        take_slots(engine)
        serve(engine, model, PROMPT, CACHED, 0, 0)
        for pool in engine.model.trailing:
            assert pool.slots(pages_of(engine, PROMPT)[-pool.trailing_pages :]).all()
        # Now from the slots.
        serve(engine, model, PROMPT, CACHED, 0, 0)


@pytest.mark.parametrize("model", MODELS)
def test_slots_that_are_not_filled_change_the_tokens(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with build(model, slots=16) as engine:
        generate(engine, PROMPT)
        take_slots(engine)
        fill_slots(engine, 3.0)
        for pool in engine.model.trailing:
            monkeypatch.setattr(pool, "take_awaited", lambda pages: np.zeros(len(pages), np.bool_))
        record = generate(engine, PROMPT, NEW_TOKENS)
        assert record.device_hit_tokens == CACHED and record.output_tokens != expected_tokens(model, PROMPT)


@pytest.mark.parametrize("model", MODELS)
def test_changed_slots_on_l1_change_the_tokens(model: str) -> None:
    with build(model) as engine:
        generate(engine, PROMPT)
        fill_slots(engine, 3.0)
        record = generate(engine, PROMPT, NEW_TOKENS)
        assert record.device_hit_tokens == CACHED and record.output_tokens != expected_tokens(model, PROMPT)


@pytest.mark.parametrize("model", MODELS)
def test_results_are_the_same_from_storage_and_after_a_restart(model: str, tmp_path: Path) -> None:
    with build(model, store=tmp_path) as engine:
        serve(engine, model, PROMPT, 0, 0, 0)
        leave_host(engine)
        serve(engine, model, PROMPT, 0, 0, CACHED)
    branch = [*PROMPT[:50], *random_tokens(9, seed=8)]
    for prompt, hit in ((PROMPT, CACHED), (branch, 48)):
        with build(model, store=tmp_path) as engine:
            serve(engine, model, prompt, 0, 0, hit)
            assert_nothing_leaked(engine)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("slots", [16, None])
def test_a_branch_leaves_a_cached_prompt_anywhere(model: str, slots: int | None) -> None:
    # With 16 slots, most pages of the prompt have lost theirs, and those before the branch are filled from L2.
    with build(model, slots=slots, device_pages=200) as engine:
        serve(engine, model, PROMPT, 0, 0, 0)
        for cut in (3, 4, 18, 33, 48, 67):
            branch = [*PROMPT[:cut], *random_tokens(12, seed=cut)]
            serve(engine, model, branch, cut // PAGE * PAGE, 0, 0)
        assert_nothing_leaked(engine)


@pytest.mark.parametrize("model", MODELS)
def test_a_branch_without_slots_and_without_copies_is_computed(model: str) -> None:
    # Pages are copied to L2 only when L1 evicts them, and slots remain at the end of the prompt and its output.
    with build(model, slots=9, write_policy="write_back") as engine:
        serve(engine, model, PROMPT, 0, 0, 0)
        assert not any(pool.slots(pages_of(engine, PROMPT)[:8]).any() for pool in engine.model.trailing)
        serve(engine, model, [*PROMPT[:32], *random_tokens(8, seed=3)], 0, 0, 0)
        # The pages before the branch have slots again.
        serve(engine, model, PROMPT, 32, 0, 0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_long_output_does_not_keep_its_slots(model: str, prefix_cache: bool) -> None:
    with build(model, slots=9, prefix_cache=prefix_cache) as engine:
        record = generate(engine, PROMPT, 90)
        assert results(engine, record) == expected(model, PROMPT, 90) and not record.preemptions


def test_a_request_shares_its_output_before_slots_are_short() -> None:
    with build("both") as engine:
        engine.submit(PROMPT, 90, ignore_eos=True)
        most = 0
        while not any(update.record for update in engine.step()):
            assert engine.cache.drain(10)  # copies to L2 hold slots, too
            most = max(most, *(pool.holds for pool in engine.model.trailing))
        # Three trailing pages, the current one, and those of a chunk or of output that is not shared.
        assert most <= 3 + 1 + max(24 // PAGE, SHARED_PAGES)


def test_a_failed_load_ends_the_requests_that_wait_for_it_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = FailedTransfer(TransferError("the copy failed"))

    def start_loading() -> FailedTransfer:
        engine.cache.device.loading = failed
        return failed

    with build("both") as engine:
        first = engine.submit(PROMPT, NEW_TOKENS, ignore_eos=True)
        drive(engine, until=lambda: engine.statistics().output_tokens == 3)
        second = engine.submit(PROMPT[:30], NEW_TOKENS, ignore_eos=True)
        with monkeypatch.context() as patch:
            patch.setattr(engine.cache, "start_loading", start_loading)
            (ended,) = [update.record for update in engine.step() if update.record is not None]
        assert (ended.rid, ended.reason) == (second, FinishReason.FAILED)
        assert results(engine, drive(engine)[first]) == expected("both", PROMPT)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("device_pages", "slots"), [(50, None), (100, 9)])
def test_preempted_requests_have_the_same_results(model: str, device_pages: int, slots: int | None) -> None:
    prompts = [PROMPT[:40], *(random_tokens(40, seed=seed) for seed in (21, 22, 23))]
    with build(model, chunk=200, device_pages=device_pages, slots=slots) as engine:
        rids = [engine.submit(prompt, 30, ignore_eos=True) for prompt in prompts]
        records = drive(engine)
        for rid, prompt in zip(rids, prompts, strict=True):
            assert results(engine, records[rid]) == expected(model, prompt, 30)
        assert engine.statistics().preemptions > 0
        assert (engine.cache.statistics().skipped["no_slots"] > 0) is (slots is not None)
        assert_nothing_leaked(engine)


FAMILY = [[*random_tokens(64, seed=trunk)[:cut], *random_tokens(cut // 3, seed=cut)] for trunk in range(2)
          for cut in (17, 40, 64)]


@pytest.mark.parametrize("seed", seeds(4))
def test_results_are_the_same_under_random_traffic_with_few_slots(seed: int, tmp_path: Path) -> None:
    random = rng(seed)
    model, page = MODELS[seed % 3], random.choice([4, 8, 16])
    pages = 128 // page  # the longest request has 108 tokens
    with build(
        model, page=page, slots=random.randint(5, 20), device_pages=random.randint(pages, 2 * pages),
        host_pages=random.randint(pages, 3 * pages), running=random.randint(1, 5), chunk=random.choice([5, 32, 300]),
        store=tmp_path if random.random() < 0.7 else None,
        write_policy=random.choice(["write_through", "write_through", "write_back", "write_through_selective"]),
    ) as engine:
        asked: dict[str, tuple[list[int], int]] = {}
        records: dict[str, RequestRecord] = {}
        for _ in range(80):
            if random.random() < 0.3:
                prompt, new_tokens = random.choice(FAMILY), random.choice([1, 8, 24])
                asked[engine.submit(prompt, new_tokens, ignore_eos=True)] = prompt, new_tokens
            if asked and random.random() < 0.05:
                engine.abort(random.choice(list(asked)))
            records |= {update.rid: update.record for update in engine.step() if update.record is not None}
            engine.check()
        records |= drive(engine)
        assert records.keys() == asked.keys()
        for rid, record in records.items():
            prompt, new_tokens = asked[rid]
            known = expected(model, prompt, 24, page)
            if record.reason is FinishReason.LENGTH:
                assert results(engine, record) == known[:new_tokens]
            else:
                assert record.reason is FinishReason.ABORTED
                assert list(record.output_tokens) == [token for token, _ in known][: len(record.output_tokens)]
        assert sum(engine.statistics().hit_tokens.values()) > 0
        assert_nothing_leaked(engine)


def test_pools_that_are_too_small_or_cannot_be_used_are_rejected() -> None:
    with pytest.raises(CapacityError, match="window: 3 slots"):
        build("window", slots=3)
    with pytest.raises(ConfigError, match=r"sessions\.enabled"):
        build("state", sessions={"enabled": True})

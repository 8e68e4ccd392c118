"""The accounts of prompts of an engine that owns the slots of L1: each attempt that begins is counted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.cache.explain import PromptTokens
from hicache.ghosts import Kind, Reason
from hicache.keys import RadixKey

from .test_engine_cache import PAGE, Engine, Request, engine_of, tokens_of, whole

NEW, TAIL, NOT_WORTH = (Reason.NEW, ""), (Reason.TAIL, ""), (Reason.NOT_WORTH, "")


def account_of(engine: Engine, request: Request) -> PromptTokens:
    """Return the account of a request. Its sources add up, and so do the counts of the cache."""
    engine.check()
    found = engine.cache.explainer.recent[request.rid]
    assert found.tokens == found.cached + sum(found.computed.values())
    return found


def computed(engine: Engine, request: Request) -> dict[Kind, int]:
    return account_of(engine, request).computed


def test_tokens_are_new_then_from_each_tier_and_written_once(tmp_path: Path) -> None:
    storage = {"type": "file", "options": {"path": str(tmp_path), "free_space_floor": 0}}
    tokens = tokens_of(1, 4)
    with engine_of(pages=6, storage=storage) as engine:
        first = whole(engine, tokens)
        assert computed(engine, first) == {NEW: 4 * PAGE, TAIL: 1}
        assert account_of(engine, first).written == 4 * PAGE
        again = account_of(engine, whole(engine, tokens))
        assert (again.device, again.computed, again.written) == (4 * PAGE, {TAIL: 1}, 0)
        whole(engine, tokens_of(2, 4))
        assert account_of(engine, whole(engine, tokens)).host > 0
        assert engine.cache.drain(20)
    with engine_of(storage=storage) as engine:
        assert account_of(engine, whole(engine, tokens)).storage == 4 * PAGE


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE])
def test_a_prompt_shorter_than_a_page_is_its_tail(tokens: int) -> None:
    """One token is always computed."""
    with engine_of() as engine:
        assert computed(engine, whole(engine, tokens_of(1, 1)[:tokens])) == {TAIL: tokens}


def test_a_key_without_tokens_is_counted_with_the_tokens_of_the_engine() -> None:
    """SGLang's tree passes it for a prompt that it cannot hold."""
    with engine_of() as engine:
        cache, found = engine.cache, engine.cache.nothing
        cache.lock(found.end)
        key = RadixKey(b"", b"", cache.tree.position_bytes)
        assert cache.begin("short", key, found, prompt_tokens=5).computed == {TAIL: 5}
        cache.unlock(found.end)
        cache.end("short")


@pytest.mark.parametrize(("storage", "kind"), [({}, NEW), ({"type": "memory"}, (Reason.LATE, "queue"))])
def test_a_request_without_a_prefetch_does_not_know_what_storage_has(storage: dict[str, str], kind: Kind) -> None:
    with engine_of(**({"storage": storage} if storage else {})) as engine:
        cache, key = engine.cache, engine.key(tokens_of(1, 3))
        found = cache.find(key)
        cache.lock(found.end)
        assert cache.begin("r", key, found, prompt_tokens=3 * PAGE + 1).computed == {kind: 3 * PAGE, TAIL: 1}
        cache.unlock(found.end)
        cache.end("r")
        cache.check()


def test_each_attempt_of_a_retracted_request_is_counted_and_the_last_one_is_kept() -> None:
    with engine_of() as engine:
        tokens = tokens_of(1, 4)
        request = engine.begin(tokens)
        assert request is not None
        engine.compute(request, 2)
        first = account_of(engine, request)
        engine.end(request)
        engine.count -= 1  # begins under the same id
        again = engine.begin(tokens)
        assert again is not None and again.rid == request.rid
        engine.compute(again, 4)
        second = account_of(engine, again)
        assert (first.written, second.device, second.written) == (2 * PAGE, 2 * PAGE, 2 * PAGE)
        assert engine.cache.statistics().requests == 2


def test_a_prompt_that_is_not_admitted_is_not_counted() -> None:
    with engine_of(pages=6) as engine:
        running = engine.begin(tokens_of(1, 4))
        assert running is not None and engine.begin(tokens_of(2, 4)) is None
        assert engine.cache.statistics().requests == 1 and len(engine.cache.explainer.recent) == 1


def test_pages_that_are_too_few_to_load_were_not_worth_it() -> None:
    with engine_of(pages=6, load_back_threshold_tokens=100) as engine:
        whole(engine, tokens_of(1, 4))
        whole(engine, tokens_of(2, 4))
        found = account_of(engine, whole(engine, tokens_of(1, 4)))
        assert found.computed[NOT_WORTH] > 0 and set(found.computed) == {NOT_WORTH, TAIL}

"""A guard around the verbs that engines use for single pages and operators for whole namespaces."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

import pytest

from hicache.backends.guard import Direction, GuardedBackend, Refusal
from hicache.backends.testing import STORED, full_frames, make_keys, soon
from tests.backends.guard.stores import CODEC, Store, patient, refused

READ, WRITE = Direction.READ, Direction.WRITE


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def put(guard: GuardedBackend, keys: list[bytes]) -> None:
    frames = full_frames(CODEC, keys)
    assert guard.batch_set(keys, frames, parent=None, deadline=soon()) == [STORED] * len(keys)


def test_single_pages_are_asked_for_again_after_a_failed_lookup() -> None:
    store, keys = Store(), make_keys(3)
    with closing(GuardedBackend(store, patient(retry_share=0.1))) as guard:
        put(guard, keys[1:])
        store.calls.clear()
        store.fail_calls = 1
        assert guard.batch_has(keys, deadline=soon()) == [False, True, True]
        assert store.calls == [("has", 3)] * 2
        assert guard.batch_has([], deadline=soon()) == []


def test_a_store_that_is_down_when_single_pages_are_asked_for_is_left_alone() -> None:
    store, keys = Store(), make_keys(2)
    with closing(GuardedBackend(store, patient())) as guard:
        for _ in range(3):
            assert guard.batch_has(keys, deadline=soon()) == [False] * 2
        assert guard.may_pass(READ), "a store that has nothing works"
        store.down = True
        for _ in range(3):
            assert guard.batch_has(keys, deadline=soon()) == [False] * 2
        assert not guard.may_pass(READ) and guard.may_pass(WRITE)
        store.down = False
        assert guard.batch_has(keys, deadline=soon()) == [False] * 2
        assert refused(guard, READ, Refusal.OPEN) == 1


@pytest.mark.parametrize("answer", [[], [True], [True, 1], (True, True), 2, -1, True, "ab"])
def test_an_answer_of_the_wrong_kind_is_no_page(answer: Any) -> None:
    store, keys = Store(), make_keys(2)
    with closing(GuardedBackend(store, patient())) as guard:
        store.answers = answer
        assert guard.batch_has(keys, deadline=soon()) == [False] * 2
        assert guard.guard_statistics().failures == {(READ, "raised"): 1}


def test_a_namespace_is_cleared_behind_a_guard() -> None:
    store = Store()
    with closing(GuardedBackend(store, patient())) as guard:
        put(guard, make_keys(5))
        assert (guard.clear(deadline=soon(-1)), store.pages) == (0, 5)
        assert guard.statistics().errors == {"deadline": 1}
        assert (guard.clear(deadline=soon()), store.pages) == (5, 0)


@pytest.mark.parametrize("answer", [-1, "many", True, [1]])
def test_a_removal_that_answers_nonsense_or_raises_counts_as_failed(answer: Any) -> None:
    store = Store()
    with closing(GuardedBackend(store, patient())) as guard:
        store.answers = answer
        assert guard.clear(deadline=soon()) == 0
        store.answers, store.raises = None, RuntimeError("a bug")
        assert guard.clear(deadline=soon()) == 0
        assert guard.guard_statistics().failures == {(WRITE, "raised"): 2}
        store.raises = None
        assert guard.clear(deadline=soon()) == 0, "nothing is there, which is not a failure"
        assert guard.guard_statistics().failures == {(WRITE, "raised"): 2}

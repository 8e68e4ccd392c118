"""A request belongs to the cache that began it. Other caches reject it, and its own cache rejects it after its end.

The cache accepts only the object that it returned, and rejects copies.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache.cache import ChunkCache, HiRadixCache, TreeCache
from hicache.errors import InvalidInput, InvariantError
from hicache.keys import RadixKey
from tests.cache.sides import KINDS, Side
from tests.cache.world import prompt

Verb = Callable[[TreeCache, Any, RadixKey], object]
# All calls that take a request.
VERBS: dict[str, Verb] = {
    "extend": lambda cache, request, key: cache.extend(request, 24),
    "extend to what it has": lambda cache, request, key: cache.extend(request, 9),
    "share": lambda cache, request, key: cache.cache_unfinished_req(request, key),
    "finish": lambda cache, request, key: cache.cache_finished_req(request, key),
    "abort": lambda cache, request, key: cache.cache_finished_req(request, None),
}


def ended(side: Side) -> Any:
    return side.serve("ended", side.key)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("mine", "theirs"), list(itertools.pairwise([*KINDS, KINDS[0], KINDS[0]])))
def test_a_request_of_another_cache_is_rejected_and_changes_neither_cache(mine: str, theirs: str, verb: str) -> None:
    """Both caches have the same shape, the same prompt, and a request of the same id in the same pages."""
    side, other = Side(mine), Side(theirs)
    assert np.intersect1d(side.request.pages, other.request.pages).size
    before = side.image(), other.image()
    with pytest.raises(InvalidInput, match="another cache"):
        VERBS[verb](side.cache, other.request, other.key)
    assert (side.image(), other.image()) == before


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
def test_ended_requests_and_other_objects_are_rejected_and_change_nothing(kind: str, verb: str) -> None:
    side = Side(kind)
    stale = ended(side)
    aborted = side.begin("aborted", prompt(8))
    side.cache.cache_finished_req(aborted, None)
    before = side.image()
    for handle in (stale, aborted, copy.copy(stale), None, "running", 7, object(), side.key, [side.request]):
        with pytest.raises(InvalidInput, match="request"):
            VERBS[verb](side.cache, handle, side.key)
        assert side.image() == before


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_running_request_is_rejected_and_changes_nothing(kind: str, verb: str) -> None:
    side = Side(kind)
    copies = [copy.copy(side.request), dataclasses.replace(side.request)]
    before = side.image()
    for handle in copies:
        with pytest.raises(InvalidInput, match="is a copy"):
            VERBS[verb](side.cache, handle, side.key)
        assert side.image() == before


@pytest.mark.parametrize("kind", ["tiered", "chunk"])
def test_the_check_finds_pages_with_two_owners_if_a_copy_is_accepted(kind: str) -> None:
    """The control: the cache accepts the copy, as without a comparison by identity."""
    side = Side(kind)
    side.leave()
    duplicate = copy.copy(side.request)
    (side.cache._running if isinstance(side.cache, ChunkCache) else side.tiered.running).add(duplicate)
    side.cache.cache_finished_req(side.request, None)
    other = side.begin("other", prompt(5, 6, 7))
    side.cache.cache_finished_req(duplicate, None)
    third = side.begin("third", prompt(8, 9, 10))
    assert np.intersect1d(other.pages, third.pages).size
    with pytest.raises(InvariantError, match="two requests own"):
        side.cache.check()


def test_the_check_finds_shared_pages_of_a_request_that_are_not_locked() -> None:
    side = Side("tiered")
    side.leave()
    side.cache.cache_unfinished_req(side.request, side.key)
    side.world.settle()
    side.cache.check()
    side.request.tree.unlock(side.request.last_node)
    with pytest.raises(InvariantError, match="its shared pages are not"):
        side.cache.check()


@pytest.mark.parametrize("kind", KINDS)
def test_after_new_weights_requests_still_belong_to_their_cache(kind: str) -> None:
    side, other = Side(kind), Side(kind)
    side.cache.update_weights(1)
    with pytest.raises(InvalidInput, match="another cache"):
        other.cache.cache_finished_req(side.request, side.key)
    with pytest.raises(InvalidInput, match="does not continue the key"):
        side.cache.cache_finished_req(side.request, prompt(9, 4))
    assert side.cache.extend(side.request, 16)
    side.cache.cache_finished_req(side.request, side.key)


def test_releasing_an_ended_pin_does_not_end_another_pin() -> None:
    side = Side("tiered")
    cache = side.cache
    assert isinstance(cache, HiRadixCache)
    first, second = cache.pin(prompt(1, 2), 60), cache.pin(prompt(1, 2), 60)
    assert first is not None and second is not None
    for _ in range(3):
        first.release()
    assert second.active and cache.tree.pinned_pages == 2
    second.release()
    assert cache.tree.pinned_pages == 0


def test_a_copy_of_a_pin_is_not_active_and_does_not_end_another_pin() -> None:
    side = Side("tiered")
    cache = side.tiered
    first, second = cache.pin(prompt(1, 2), 60), cache.pin(prompt(1, 2), 60)
    assert first is not None and second is not None
    duplicate = copy.copy(first)
    assert (duplicate.active, duplicate.pages) == (False, 0)
    duplicate.release()
    assert (first.pages, second.pages) == (2, 2)
    first.release()
    duplicate.release()
    assert (first.pages, second.pages, cache.tree.pinned_pages) == (0, 2, 2)
    cache.check()
    second.release()
    assert cache.tree.pinned_pages == 0


@pytest.mark.parametrize("pins", [1, 2])
def test_the_check_finds_a_handle_without_its_pin_in_the_tree(pins: int) -> None:
    side = Side("tiered")
    side.leave()
    for _ in range(pins):
        assert side.tiered.pin(prompt(1, 2), 60) is not None
    side.cache.check()
    side.tiered.tree.unpin(side.tiered.match_prefix(prompt(1, 2)).node)
    with pytest.raises(InvariantError, match="pins"):
        side.cache.check()

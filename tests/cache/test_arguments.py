"""All public calls of all caches reject invalid arguments with a typed error, and change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from hicache.backends.base import Direction
from hicache.backends.guard import Override
from hicache.cache import ChunkCache, HiRadixCache
from hicache.errors import CapacityError, HiCacheError, InvalidInput
from hicache.events import EventStream
from hicache.keys import RadixKey
from tests.cache.sides import KINDS, RUNNING, Side
from tests.cache.world import World, memory_backend, prompt

HUGE = 10**5000  # `str` rejects an int of this length
NAN, INF = math.nan, math.inf
NAMES: list[Any] = [None, 5, 1.5, b"a", ["a"], {}]
KEYS: list[Any] = [None, "abcd", b"abcd", 7, [1, 2, 3], object()]
OTHER_KEYS: list[Any] = [
    prompt(9, 4), prompt(3, 4, salt="other"), prompt(3, 4, 5), RadixKey.of(range(3, 12), bigram=True)
]
COUNTS: list[Any] = [-1, 1.5, NAN, INF, "3", None, True, 2**63, -HUGE, HUGE, [1]]
PRIORITIES: list[Any] = [1.5, NAN, INF, "x", None, False, 2**63, HUGE, [1]]
TIMES: list[Any] = [-1, -0.5, NAN, -INF, 10**400, Fraction(HUGE), "1", True, [1.0], 1j]
LIMITED_TIMES = [*TIMES, INF, 1e300, None]
EPOCHS: list[Any] = [NAN, INF, 1.5, 2**64, HUGE, -1, 0, True, "2", None]
PAGES: list[Any] = [None, 3, [1, 2], np.array([1.0, 2.0]), np.array([1, 2]), np.array([[1, 2]], dtype=np.int32), "ab"]

Call = Callable[[Side, Any], object]

# Calls of all caches, each with the arguments that it must reject.
CALLS: dict[str, tuple[Call, Sequence[Any]]] = {
    "match_prefix key": (lambda side, bad: side.cache.match_prefix(bad), KEYS),
    "peek key": (lambda side, bad: side.cache.peek(bad), KEYS),
    "prefetch_from_storage rid": (lambda side, bad: side.cache.prefetch_from_storage(bad, prompt(5)), NAMES),
    "prefetch_from_storage key": (lambda side, bad: side.cache.prefetch_from_storage("a", bad), KEYS),
    "check_prefetch_progress rid": (lambda side, bad: side.cache.check_prefetch_progress(bad), NAMES),
    "abort_prefetch rid": (lambda side, bad: side.cache.abort_prefetch(bad), NAMES),
    "begin_request rid": (lambda side, bad: side.cache.begin_request(bad, prompt(5)), NAMES),
    "begin_request key": (lambda side, bad: side.cache.begin_request("a", bad), [*KEYS, RadixKey(b"")]),
    "begin_request priority": (lambda side, bad: side.cache.begin_request("a", prompt(5), priority=bad), PRIORITIES),
    "begin_request larger than L1": (lambda side, bad: side.cache.begin_request("a", bad), [prompt(*range(40))]),
    "extend total_tokens": (lambda side, bad: side.cache.extend(side.request, bad), [*COUNTS, 0, 1, 8, 2**40]),
    "cache_unfinished_req key": (
        lambda side, bad: side.cache.cache_unfinished_req(side.request, bad), [*KEYS, *OTHER_KEYS],
    ),
    "cache_finished_req key": (
        lambda side, bad: side.cache.cache_finished_req(side.request, bad), [*KEYS[1:], *OTHER_KEYS],
    ),
    "evict pages": (lambda side, bad: side.cache.evict(bad), COUNTS),
    "update_weights epoch": (lambda side, bad: side.cache.update_weights(bad), EPOCHS),
    "pin key": (lambda side, bad: side.cache.pin(bad, 60.0), KEYS),
    "pin ttl_s": (lambda side, bad: side.cache.pin(prompt(1, 2), bad), [*LIMITED_TIMES, 0, Fraction(1, HUGE)]),
    "record_events stream": (lambda side, bad: side.cache.record_events(bad), [None, 5, []]),
    "record_events in use": (lambda side, bad: side.cache.record_events(bad), [EventStream(100)]),
    "record_fence fence": (lambda side, bad: side.cache.record_fence(bad), [None, 5, "fence", object()]),
    "record_prefill tokens": (lambda side, bad: side.cache.record_prefill(bad, 0.1), COUNTS),
    "record_prefill seconds": (lambda side, bad: side.cache.record_prefill(1000, bad), LIMITED_TIMES),
    "drain timeout_s": (lambda side, bad: side.cache.drain(bad), [*TIMES, None]),
    "close timeout_s": (lambda side, bad: side.cache.close(bad), [bad for bad in LIMITED_TIMES if bad is not None]),
}
BIGRAM = RadixKey.of([1, 2, 3], bigram=True)
# Calls of a cache with tiers, and of a session cache.
TIERED: dict[str, tuple[Call, Sequence[Any]]] = {
    "match_prefix of a bigram key": (lambda side, bad: side.cache.match_prefix(bad), [BIGRAM]),
    "peek of a bigram key": (lambda side, bad: side.cache.peek(bad), [BIGRAM]),
    "prefetch of a bigram key": (lambda side, bad: side.cache.prefetch_from_storage("a", bad), [BIGRAM]),
    "begin_request of a bigram key": (lambda side, bad: side.cache.begin_request("a", bad), [BIGRAM]),
    "insert key": (lambda side, bad: side.tiered.insert(bad, np.empty(0, np.int32)), [*KEYS, BIGRAM]),
    "insert pages": (lambda side, bad: side.tiered.insert(prompt(6, 7), bad), PAGES),
    "insert too few pages": (lambda side, bad: side.tiered.insert(prompt(6, 7), bad), [np.array([3], np.int32)]),
    "insert priority": (
        lambda side, bad: side.tiered.insert(prompt(6), np.array([9], np.int32), priority=bad), PRIORITIES,
    ),
    "alloc_pages count": (lambda side, bad: side.tiered.page_source.alloc(bad), COUNTS),
    "free_pages pages": (lambda side, bad: side.tiered.page_source.free(bad), PAGES),
    "free_pages outside the pool": (
        lambda side, bad: side.tiered.page_source.free(np.array(bad, np.int32)), [[1000], [-1], [0]],
    ),
    "pin of a bigram key": (lambda side, bad: side.cache.pin(bad, 60.0), [BIGRAM]),
    "storage.attach": (
        lambda side, bad: side.tiered.storage.attach(bad), [5, 0, "", "file", [], memory_backend(), object()],
    ),
    "storage.override direction": (
        lambda side, bad: side.tiered.storage.override(bad, Override.OFF), [None, "read", 0],
    ),
    "storage.override mode": (lambda side, bad: side.tiered.storage.override(Direction.READ, bad), [None, "off", 0]),
}
SESSION: dict[str, tuple[Call, Sequence[Any]]] = {
    "open_session session_id": (lambda side, bad: side.sessions.open_session(bad), [*NAMES, "s"]),
    "open_session ttl_s": (lambda side, bad: side.sessions.open_session("t", ttl_s=bad), [*TIMES, 0]),
    "join_session rid": (lambda side, bad: side.sessions.join_session(bad, "s"), NAMES),
    "join_session session_id": (lambda side, bad: side.sessions.join_session("b", bad), [*NAMES, "s", "unknown"]),
    "close_session session_id": (lambda side, bad: side.sessions.close_session(bad), NAMES),
}
TABLE = [
    *((kind, name) for kind in KINDS for name in CALLS),
    *((kind, name) for kind in ("tiered", "session") for name in TIERED),
    *(("session", name) for name in SESSION),
]


@pytest.mark.parametrize(("kind", "name"), TABLE, ids=lambda value: str(value).replace(" ", "-"))
def test_an_invalid_argument_is_a_typed_error_and_changes_nothing(kind: str, name: str) -> None:
    call, arguments = {**CALLS, **TIERED, **SESSION}[name]
    side = Side(kind)
    before = side.image()
    for bad in arguments:
        with pytest.raises(HiCacheError):
            call(side, bad)
        assert side.image() == before, type(bad)


def test_the_image_shows_the_changes_of_a_call() -> None:
    """The control: accepted calls change the image."""
    side = Side("tiered")
    before = side.image()
    side.tiered.match_prefix(prompt(1))
    assert (after := side.image()) != before
    side.tiered.evict(1)
    assert side.image() != after


class Two:
    """An integer that has only `__index__`."""

    def __index__(self) -> int:
        return 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_increment_instead_of_the_total_is_rejected_with_both_numbers(kind: str) -> None:
    """Otherwise a caller that passes the tokens to add would get True, and write beyond its pages."""
    side = Side(kind)
    assert side.key.prompt_tokens == 9 and side.cache.extend(side.request, 9)
    with pytest.raises(InvalidInput, match="total_tokens: 1 is less than the 9 tokens"):
        side.cache.extend(side.request, 1)
    assert side.cache.extend(side.request, 13) and len(side.request.pages) == 4
    assert side.cache.extend(side.request, 10), "the tokens that are not computed yet may become fewer"
    longer = side.key.extended([1, 2, 3, 4])
    side.world.fill(longer, side.request.pages, 2)
    side.cache.cache_unfinished_req(side.request, longer)
    if kind != "chunk":  # a ChunkCache shares nothing, so only the first 9 tokens count
        with pytest.raises(InvalidInput, match="total_tokens: 11 is less than the 12 tokens"):
            side.cache.extend(side.request, 11)
    side.cache.cache_finished_req(side.request, longer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_larger_than_l1_is_rejected_with_the_numbers(kind: str) -> None:
    """None would mean that the cache is full now, and a scheduler would retry without end."""
    side = Side(kind)
    pages = side.cache.device.pages
    side.cache.cache_finished_req(side.request, None)
    with pytest.raises(CapacityError, match=rf"{4 * pages + 1} tokens needs {pages + 1} pages .* but L1 has {pages};"):
        side.cache.begin_request("a", RadixKey.of(range(4 * pages + 1)))
    request = side.cache.begin_request("a", RadixKey.of(range(4 * pages)))
    while request is None:  # idle sessions and the tree make room, perhaps after a copy
        side.world.settle()
        request = side.cache.begin_request("a", RadixKey.of(range(4 * pages)))
    with pytest.raises(CapacityError, match=rf"{4 * pages + 1} tokens needs {pages + 1} pages .* but L1 has {pages};"):
        side.cache.extend(request, 4 * pages + 1)
    assert side.cache.extend(request, 4 * pages)
    side.cache.cache_finished_req(request, None)


@pytest.mark.parametrize("integer", [np.int64(2), np.uint8(2), 2, Two()], ids=lambda value: type(value).__name__)
def test_integers_of_numpy_are_accepted(integer: Any) -> None:
    side = Side("tiered")
    request = side.cache.begin_request("a", RadixKey.of([5]), priority=integer)
    assert request is not None and type(request.priority) is int
    assert side.cache.extend(request, integer)
    side.cache.cache_finished_req(request, None)
    side.cache.update_weights(integer)
    assert type(side.tiered.weights_epoch) is int and side.tiered.weights_epoch == 2


def test_a_cache_rejects_an_epoch_that_a_frame_cannot_store() -> None:
    world = World()
    for epoch in (bad for bad in EPOCHS if bad != 0):
        with pytest.raises(InvalidInput, match="weights epoch"):
            HiRadixCache(world.device, world.host, world.controller, weights_epoch=epoch)
        with pytest.raises(InvalidInput, match="weights epoch"):
            ChunkCache(world.device, weights_epoch=epoch)


def test_the_shortest_and_the_longest_prefills_are_accepted() -> None:
    side = Side("tiered")
    for seconds in (5e-324, 5e-324, 5e-324, 0, 9e9, 1e-300, 9e9):
        side.cache.record_prefill(1000, seconds)
        side.cache.record_prefill(2**62, seconds)
        side.cache.poll()
        side.cache.check()


def test_a_rejected_turn_does_not_change_its_session() -> None:
    """An accepted turn with this prompt would release the KV of the session."""
    side = Side("session")
    side.cache.cache_finished_req(side.request, RUNNING)
    side.sessions.join_session("b", "s")
    before = side.image()
    with pytest.raises(InvalidInput):
        side.cache.begin_request("b", prompt(9), priority=1.5)  # type: ignore[arg-type]
    assert side.image() == before
    side.sessions.abort_prefetch("b")
    side.sessions.drop_all()

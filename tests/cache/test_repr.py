"""Printed, logged and raised texts contain lengths and no tokens, because tokens are prompts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hicache.cache.prefetch_states import FirstPages, Prefetch
from hicache.errors import HiCacheError
from hicache.events import EventStream
from hicache.keys import RadixKey
from hicache_lab.engine.model import Span
from hicache_lab.engine.requests import FinishReason, Request, Update
from tests.cache.sides import KINDS, Side
from tests.cache.world import World

TOKEN = 1_234_567
SECRET = RadixKey.of([TOKEN] * 9, cache_salt="a secret")


def shows_tokens(text: str) -> bool:
    """Return True if `text` contains the token, as a number or as the bytes of a key."""
    return str(TOKEN) in text or repr(TOKEN.to_bytes(4, "little"))[2:-1] in text


def test_the_comparison_finds_tokens_in_both_forms() -> None:
    """The control of the tests below."""
    assert shows_tokens(repr([TOKEN])) and shows_tokens(repr(SECRET.tokens)) and not shows_tokens(repr(b"abc"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_shows_lengths(kind: str) -> None:
    side = Side(kind)
    request = side.begin("a", SECRET)
    assert repr(request) == "RequestKV('a', 9 tokens, 0 cached, 3 pages, 0 shared)"
    side.cache.cache_finished_req(request, SECRET)
    assert repr(request) == "RequestKV('a', 9 tokens, 0 cached, 0 pages, 0 shared, ended)"


def test_pins_matches_and_events_show_lengths() -> None:
    world = World()
    stream = EventStream(1 << 20)
    world.cache.record_events(stream)
    reader = stream.subscribe()
    world.serve("a", SECRET)
    world.settle()
    pin = world.cache.pin(SECRET, 60)
    assert repr(pin) == "Pin(2 pages, active)"
    world.cache.clear()
    assert repr(pin) == "Pin(2 pages, ended)"
    events = reader.drain(100)
    assert "Stored(device, 2 pages of 4, 32 bytes of tokens)" in repr(events)
    world.serve("b", SECRET)
    for shown in (world.cache.match_prefix(SECRET), world.cache.peek(SECRET), pin, events, world.cache.tree):
        assert not shows_tokens(repr(shown))


def test_the_first_pages_of_a_prefetch_show_lengths() -> None:
    """They are the key of a table, so an error would show them."""
    assert repr(FirstPages(SECRET.seed, 3, 8, SECRET.tokens[:16])) == "FirstPages(below node 3, 16 bytes)"
    assert not shows_tokens(repr(Prefetch("a", SECRET, 1, 1.0)))


def test_requests_of_the_engine_show_lengths() -> None:
    tokens = [TOKEN] * 5
    request = Request("a", 0, tokens, 5, 3, False, SECRET.seed, 0.0)
    request.key(5)
    record = request.record(FinishReason.ABORTED, None, 1.0)
    for shown in (request, record, Update("a", (TOKEN,), record), Span(0, 0, tokens)):
        assert not shows_tokens(repr(shown)) and repr(SECRET.seed) not in repr(shown)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_errors_nor_the_log_show_tokens(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    side = Side(kind)
    request = side.begin("a", SECRET)
    other, long = RadixKey.of([TOKEN, 5] * 6), RadixKey.of([TOKEN] * 1000)
    calls: list[tuple[Any, ...]] = [
        (side.cache.begin_request, "b", [TOKEN] * 9), (side.cache.begin_request, "b", long),
        (side.cache.match_prefix, SECRET.tokens), (side.cache.peek, str(TOKEN)), (side.cache.extend, request, 1),
        (side.cache.cache_unfinished_req, request, other), (side.cache.cache_finished_req, request, long),
        (side.cache.cache_finished_req, request, [TOKEN]), (side.cache.begin_request, [TOKEN], SECRET),
        (side.cache.prefetch_from_storage, "b", (TOKEN,)), (side.cache.extend, SECRET, 9),
    ]
    for call, *arguments in calls:
        with pytest.raises(HiCacheError) as raised:
            call(*arguments)
        assert not shows_tokens(str(raised.value)), str(raised.value)
    side.cache.cache_finished_req(request, SECRET)
    side.close()
    assert not shows_tokens(caplog.text)

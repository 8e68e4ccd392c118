"""All caches have the methods and signatures of TreeCache."""

from __future__ import annotations

import inspect

import pytest

from hicache.cache import ChunkCache, HiRadixCache, SessionCache, TreeCache
from hicache.errors import InvalidInput
from hicache.events import Cleared, EventStream, Medium, PrefixIndex, PublisherStatistics
from tests.cache.world import World, prompt

CACHES = [HiRadixCache, ChunkCache, SessionCache]
OWN = {"__enter__", "__exit__"}
NAMES = sorted(name for name in vars(TreeCache) if name in OWN or not name.startswith("_"))
PROPERTIES = [name for name in NAMES if isinstance(vars(TreeCache)[name], property)]
METHODS = [name for name in NAMES if name not in PROPERTIES]


def differences(cache: type, names: list[str] = METHODS) -> list[str]:
    """Return the methods that `cache` lacks or declares differently. `__enter__` may return its own class."""
    found = []
    for name in names:
        expected, actual = inspect.signature(getattr(TreeCache, name)), getattr(cache, name, None)
        declared = None if actual is None else inspect.signature(actual)
        if name == "__enter__" and declared is not None:
            declared = declared.replace(return_annotation=expected.return_annotation)
        if declared != expected:
            found.append(name)
    return found


def test_the_interface_has_the_methods_that_an_engine_calls() -> None:
    assert PROPERTIES == ["device", "page_size", "writeback_pages"]
    expected = {
        "begin_request", "cache_finished_req", "cache_unfinished_req", "extend", "peek", "pin", "poll", "record_events",
    }
    assert expected <= set(METHODS)


@pytest.mark.parametrize("cache", CACHES)
def test_each_cache_has_all_methods_with_the_same_signatures(cache: type) -> None:
    assert differences(cache) == []


def test_the_comparison_finds_a_missing_method_and_a_different_signature() -> None:
    class Other:
        def extend(self, request: object) -> bool:
            return True

        def drain(self, timeout_s: float) -> bool:
            return True

    assert differences(Other, ["drain", "extend", "poll"]) == ["extend", "poll"]


def made(kind: type) -> tuple[World, TreeCache]:
    if kind is ChunkCache:
        world = World()
        return world, ChunkCache(world.device)
    world = World(kind=kind)
    return world, world.cache


@pytest.mark.parametrize("kind", CACHES)
def test_each_cache_has_its_pool_and_page_size(kind: type) -> None:
    world, cache = made(kind)
    assert cache.device is world.device and cache.page_size == world.device.geometry.page_size
    with cache as entered:
        assert entered is cache


class Publisher:
    """A publisher that records the timeout of its close."""

    def __init__(self) -> None:
        self.closed: list[float] = []

    def close(self, timeout_s: float) -> None:
        self.closed.append(timeout_s)

    def statistics(self) -> PublisherStatistics:
        return PublisherStatistics(
            alive=not self.closed, batches=0, events=0, slow=0, gaps=0, replays=0, refused=0, errors={}
        )


@pytest.mark.parametrize("kind", CACHES)
def test_each_cache_publishes_events_and_pins_for_the_pages_that_it_keeps(kind: type) -> None:
    """The calls are the same for all caches. A cache that keeps no pages publishes no events and has nothing to pin."""
    (world, cache), key, stream = made(kind), prompt(1, 2), EventStream(1 << 20)
    publisher, reader, index = Publisher(), stream.subscribe(), PrefixIndex()
    cache.record_events(stream, publisher)
    with pytest.raises(InvalidInput, match="before the first request"):
        cache.record_events(EventStream(100))
    request = cache.begin_request("a", key)
    assert request is not None
    world.fill(key, request.pages, 0)
    cache.cache_finished_req(request, key)
    assert cache.drain(20)
    kept = len(cache.match_prefix(key).device_pages)
    assert kept == (0 if isinstance(cache, ChunkCache) else 2)
    index.apply(reader.drain(100))
    assert index.pages()[Medium.DEVICE] == kept
    reader.request_snapshot()
    cache.poll()
    first, *stored = reader.drain(100)
    assert first == Cleared() and bool(stored) is bool(kept)
    pin = cache.pin(key, 60)
    assert pin is None if isinstance(cache, ChunkCache) else pin is not None and pin.pages == kept
    state = cache.statistics()
    assert state.events is not None and state.events.readers == 1
    assert state.publisher is not None and state.publisher.alive
    assert cache.close() and cache.close() and len(publisher.closed) == 1 and publisher.closed[0] > 0
    world.cache.close()

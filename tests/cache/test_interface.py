"""Every cache is a TreeCache: the same names, the same signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from hicache.cache import ChunkCache, HiRadixCache, SessionCache, TreeCache
from tests.cache.world import World

CACHES = [HiRadixCache, ChunkCache, SessionCache]
OWN = {"__enter__", "__exit__"}
NAMES = sorted(name for name in vars(TreeCache) if name in OWN or not name.startswith("_"))
PROPERTIES = [name for name in NAMES if isinstance(vars(TreeCache)[name], property)]
METHODS = [name for name in NAMES if name not in PROPERTIES]


def differences(cache: type, names: list[str] = METHODS) -> list[str]:
    """The methods of TreeCache that `cache` lacks or declares otherwise. What `with` binds may be its own class."""
    found = []
    for name in names:
        expected, actual = inspect.signature(getattr(TreeCache, name)), getattr(cache, name, None)
        declared = None if actual is None else inspect.signature(actual)
        if name == "__enter__" and declared is not None:
            declared = declared.replace(return_annotation=expected.return_annotation)
        if declared != expected:
            found.append(name)
    return found


def test_the_interface_has_what_an_engine_calls() -> None:
    assert PROPERTIES == ["device", "page_size", "saving_pages"]
    assert {"begin_request", "extend", "cache_unfinished_req", "cache_finished_req", "poll", "peek"} <= set(METHODS)


@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_has_every_method_with_the_same_signature(cache: type) -> None:
    assert differences(cache) == []


def test_the_comparison_finds_a_missing_method_and_another_signature() -> None:
    class Other:
        def extend(self, request: object) -> bool:
            return True

        def drain(self, timeout_s: float) -> bool:
            return True

    assert differences(Other, ["drain", "extend", "poll"]) == ["extend", "poll"]


@pytest.mark.parametrize("make", [lambda cache: cache, lambda cache: ChunkCache(cache.device), SessionCache])
def test_every_cache_tells_its_pool_and_page_size(make: Callable[[HiRadixCache], TreeCache]) -> None:
    world = World()
    cache = make(world.cache)
    assert cache.device is world.device and cache.page_size == world.device.geometry.page_size
    with cache as entered:
        assert entered is cache
    world.close()

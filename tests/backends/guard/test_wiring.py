"""From a configuration to a guarded store: which options arrive, and what gets a guard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from hicache.backends.base import StorageBackend
from hicache.backends.faults import FaultyBackend
from hicache.backends.guard import Direction, GuardedBackend, Override
from hicache.backends.memory import MemoryBackend
from hicache.backends.registry import BackendSpec, open_spec
from hicache.cache import HiRadixCache, create_cache
from hicache.config import HiCacheConfig
from hicache.frame import FrameCodec
from tests.backends._troubled import CODEC
from tests.cache.world import NAMESPACE

ENTRIES: dict[str, Any] = {"page_size": 4, "device": {"tokens": 32}, "host": {"tokens": 32}}
HERE = "tests.backends.guard.test_wiring"


@pytest.fixture
def guard() -> Iterator[GuardedBackend]:
    """The guard of a cache with a configured one."""
    section = {"failures": 7, "in_flight": "1MiB", "backoff_max": "3s", "write": False, "inject": {"latency": "1ms"}}
    config = HiCacheConfig.model_validate({**ENTRIES, "storage": {"type": "memory", "options": {}, "guard": section}})
    with create_cache(config, NAMESPACE) as cache:
        assert isinstance(cache, HiRadixCache)
        backend = cache.controller.backend
        assert isinstance(backend, GuardedBackend)
        yield backend


def test_a_cache_has_the_guard_that_is_configured(guard: GuardedBackend) -> None:
    assert (guard.name, guard.options.failures, guard.options.in_flight) == ("memory", 7, 1 << 20)
    assert guard.options.backoff_max == 3.0
    assert guard.guard_statistics().breakers[Direction.WRITE].override is Override.OFF, "YAML reads off as false"
    (inner,) = guard.parts
    assert isinstance(inner, FaultyBackend) and inner.options.latency == 0.001


class Wrapper(MemoryBackend):
    """Stands around others; its own verbs do not matter here."""

    def __init__(self, codec: FrameCodec, *parts: StorageBackend) -> None:
        super().__init__(codec)
        self.parts = parts


def around_one(codec: FrameCodec) -> StorageBackend:
    """A wrapper around one store, as a limit is."""
    return Wrapper(codec, MemoryBackend(codec))


def around_two(codec: FrameCodec) -> StorageBackend:
    """A composition whose parts have their own guards."""
    return Wrapper(codec, *(open_spec(BackendSpec("memory"), codec) for _ in range(2)))


def around_a_guard(codec: FrameCodec) -> StorageBackend:
    """A composition of which one part is there so far."""
    return Wrapper(codec, open_spec(BackendSpec("memory"), codec))


@pytest.mark.parametrize(("name", "guarded"), [("around_one", True), ("around_two", False), ("around_a_guard", False)])
def test_what_is_composed_gets_no_second_guard(name: str, guarded: bool) -> None:
    with closing(open_spec(BackendSpec(f"{HERE}:{name}"), CODEC)) as backend:
        assert isinstance(backend, GuardedBackend) is guarded

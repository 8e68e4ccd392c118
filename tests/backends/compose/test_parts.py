"""Opening and closing the parts of a composition, and their configuration."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import Direction
from hicache.backends.compose import Levels, Shards
from hicache.backends.memory import MemoryDriver
from hicache.backends.registry import BackendSpec, check_backend, open_spec, open_stored
from hicache.backends.storage import Storage
from hicache.backends.store import Store
from hicache.cache import HiRadixCache, create_cache
from hicache.config import HiCacheConfig
from hicache.config.guard import GuardConfig
from hicache.controller import TorchRankGroup
from hicache.errors import BackendUnavailable, ConfigError
from hicache.frame import FrameCodec
from hicache_lab.conformance import HIT, STORED, load, make_keys, open_backend, store_chain
from tests.backends._subjects import doorless
from tests.cache.world import NAMESPACE
from tests.ranks import gloo_ranks
from tests.waiting import wait_for

from .._files import Leftovers
from .._troubled import CODEC, Troubled
from ._parts import PAGE

OPENED: list[Troubled] = []
REFUSING = threading.Event()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that each backend that a test opened is closed exactly once."""
    OPENED.clear()
    REFUSING.clear()
    yield
    assert [backend.closes for backend in OPENED] == [1] * len(OPENED)


def open_always(codec: FrameCodec) -> Troubled:
    """A factory that records its backends."""
    OPENED.append(Troubled())
    return OPENED[-1]


def open_switched(codec: FrameCodec) -> Troubled:
    """As `open_always`, but fails while REFUSING is set."""
    if REFUSING.is_set():
        raise BackendUnavailable("this server is not up yet")
    return open_always(codec)


SWITCHED, ALWAYS = f"{__name__}:open_switched", f"{__name__}:open_always"
MEMORY: dict[str, Any] = {"type": "memory"}
ENTRIES: dict[str, Any] = {"page_size": 4, "device": {"tokens": 32}, "host": {"tokens": 32}}


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("levels", {"levels": [MEMORY, MEMORY], "promote": False, "cascade_bytes_max": 5 * PAGE}, Levels),
        ("sharded", {"parts": [{**MEMORY, "name": "a"}, {**MEMORY, "name": "b"}]}, Shards),
    ],
)
def test_a_composition_opens_by_name_with_a_guard_in_front_of_each_part(
    name: str, options: dict[str, Any], kind: type[Storage]
) -> None:
    check_backend(name, options)
    backend = open_spec(BackendSpec(name, options), CODEC)
    assert isinstance(backend, kind) and isinstance(backend, (Levels, Shards))
    assert all(isinstance(part, Store) and isinstance(part.driver, MemoryDriver) for _, part in backend.named_parts)
    assert all(store.guard == GuardConfig() for store in backend.stores)
    store = doorless(backend)
    assert store_chain(store, make_keys(3)) == [STORED] * 3
    assert load(store, make_keys(3)) == [HIT] * 3
    backend.close()


def test_a_part_takes_options_of_its_own_and_of_its_guard() -> None:
    part = {"type": "memory", "options": {"capacity": 3 * PAGE}, "guard": {"in_flight": "9MiB"}, "name": "small"}
    backend = open_backend("levels", CODEC, {"levels": [part, MEMORY]})
    assert isinstance(backend, Levels)
    small, other = backend.stores
    assert (small.name, small.guard.in_flight, other.name) == ("small", 9 << 20, "memory")
    assert small.usage().capacity_bytes == 3 * PAGE
    backend.close()


def test_compositions_nest() -> None:
    shards = [{"type": "levels", "name": name, "options": {"levels": [MEMORY, MEMORY]}} for name in "ab"]
    options = {"levels": [MEMORY, {"type": "sharded", "options": {"parts": shards}}]}
    check_backend("levels", options)
    backend = open_backend("levels", CODEC, options)
    assert len(backend.stores) == 5
    backend.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": [MEMORY]}, "levels: expected at least 2, got 1"),
        ({"levels": [MEMORY, {"type": "memroy"}]}, "part memroy: .*did you mean 'memory'"),
        ({"levels": [MEMORY, {"type": "memory", "options": {"capasity": 1}}]}, "part memory-2: .*'capacity'"),
        ({"levels": [MEMORY, {"type": "sharded", "options": {"parts": [MEMORY]}}]}, "parts: expected at least 2"),
        ({"levels": [{"type": SWITCHED}, MEMORY], "promot": False}, "did you mean promote"),
    ],
)
def test_a_wrong_list_of_parts_is_refused_before_anything_is_opened(options: dict[str, Any], message: str) -> None:
    """`test_composed_config.py` has the other errors."""
    with pytest.raises(ConfigError, match=message):
        check_backend("levels", options)
    with pytest.raises(ConfigError, match=message):
        open_backend("levels", CODEC, options)
    assert OPENED == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("levels", {"promote": 2}, "promote"),
        ("levels", {"cascade_bytes_max": 0}, "cascade_bytes_max"),
        ("levels", {"cascade_bytes_max": "much"}, "cascade_bytes_max"),
        ("levels", {"cascade_bytes_max": 1}, "less than one page"),
        ("sharded", {}, "needs a name"),
    ],
)
def test_invalid_options_are_refused_and_opened_parts_are_closed(
    name: str, options: dict[str, Any], message: str
) -> None:
    parts = [{"type": SWITCHED}] * 2
    with pytest.raises(ConfigError, match=message):
        open_backend(name, CODEC, {"levels" if name == "levels" else "parts": parts, **options})


def start_over(lower: str, group: TorchRankGroup | None) -> HiRadixCache:
    """Return a cache with two levels, as one rank of `group`."""
    storage = {"type": "levels", "options": {"levels": [MEMORY, {"type": lower}]}}
    rank: dict[str, Any] = {} if group is None else {"tp_rank": group.rank, "tp_size": group.size}
    config = HiCacheConfig.model_validate({**ENTRIES, "storage": storage})
    cache = create_cache(config, replace(NAMESPACE, **rank), ranks=group)
    assert isinstance(cache, HiRadixCache)
    return cache


def until_open(caches: list[HiRadixCache]) -> None:
    """Step all ranks in parallel until each has its storage."""

    def step() -> None:
        with ThreadPoolExecutor(len(caches)) as pool:
            list(pool.map(HiRadixCache.poll, caches))

    wait_for(lambda: all(cache.controller.gate.may(Direction.READ) for cache in caches), step)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cache_starts_without_a_part_that_is_down_and_uses_it_later(ranks: int) -> None:
    """With ranks, the part is down for one of them."""
    groups = gloo_ranks(ranks, deadline_s=60.0) if ranks > 1 else [None]
    REFUSING.set()
    with ThreadPoolExecutor(ranks) as pool:
        caches = list(pool.map(start_over, [SWITCHED, ALWAYS][:ranks], groups))
    # The other rank may have opened its parts already.
    assert all(cache.storage.attached for cache in caches) and caches[0].controller.backend is None
    REFUSING.clear()
    until_open(caches)
    assert all(isinstance(cache.controller.backend, Levels) for cache in caches)
    for cache in caches:
        cache.close()


def test_a_cache_does_not_start_if_its_single_store_is_down() -> None:
    """The control of the test above: a single store reports an error at once. No thread of the cache is left."""
    REFUSING.set()
    leftovers = Leftovers()
    with pytest.raises(BackendUnavailable):
        create_cache(HiCacheConfig.model_validate({**ENTRIES, "storage": {"type": SWITCHED}}), NAMESPACE)
    assert leftovers.found() == (0, [])


@pytest.mark.parametrize("name", ["levels", "sharded"])
def test_if_one_part_cannot_be_opened_those_before_it_are_closed(name: str) -> None:
    REFUSING.set()
    parts = [{**MEMORY, "type": ALWAYS, "name": "a"}, {"type": SWITCHED, "name": "b"}, {"type": ALWAYS, "name": "c"}]
    with pytest.raises(BackendUnavailable):
        open_backend(name, CODEC, {"levels" if name == "levels" else "parts": parts})
    assert len(OPENED) == 1


def test_memory_and_compositions_cannot_be_listed() -> None:
    for spec in (BackendSpec("memory"), BackendSpec("levels", {"levels": [MEMORY, MEMORY]})):
        with pytest.raises(ConfigError, match=f"{spec.type}: cannot be listed; use one of file, .*"):
            open_stored(spec)


@pytest.mark.parametrize("name", ["levels", "sharded"])
def test_a_closed_composition_leaves_no_thread_and_no_descriptor(name: str, tmp_path: Path) -> None:
    parts = [{"type": "file", "name": part, "options": {"path": str(tmp_path / part)}} for part in ("a", "b")]
    entry = "levels" if name == "levels" else "parts"
    leftovers = Leftovers()
    backend = open_backend(name, CODEC, {entry: parts})
    store = doorless(backend)
    assert store_chain(store, make_keys(8)) == [STORED] * 8
    assert load(store, make_keys(8)) == [HIT] * 8
    backend.close()
    assert leftovers.found() == (0, [])

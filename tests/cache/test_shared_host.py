"""L2 under a name (`host.shared`): its creation, its removal, and its reuse after a crash."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import Direction
from hicache.cache import HiRadixCache, create_cache, create_host_cache
from hicache.config import HiCacheConfig
from hicache.errors import BackendUnavailable, ConfigError, SharedMemoryError
from hicache.keys import RadixKey
from hicache.shared_memory import path_of
from hicache.tiers import SharedHostPool
from tests.backends.remote.daemon import Daemon
from tests.cache.test_factory import NAMESPACE, file_storage
from tests.leftovers import guarded
from tests.waiting import wait_for

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
TOKENS = list(range(32))
REUSABLE = 28  # the last page is computed, for the first new token
# Starts an engine, stores the pages of TOKENS, prints "stored", and waits to be killed.
ENGINE = """
import json, sys
from hicache.cache import create_cache
from hicache.config import HiCacheConfig
from hicache.keys import RadixKey
from tests.cache.test_factory import NAMESPACE
cache = create_cache(HiCacheConfig.model_validate(json.loads(sys.argv[1])), NAMESPACE)
pages = cache.page_source.alloc(8)
cache.insert(RadixKey.of(list(range(32))), pages)
assert cache.drain(30)
print("stored", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"test-engine-{os.getpid()}"
    yield chosen
    was_removed = not path_of(chosen).exists()
    path_of(chosen).unlink(missing_ok=True)
    assert was_removed


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that the test may kill."""
    with Daemon(tmp_path, {"pool": "1MiB", "staging": "8MiB"}) as made:
        yield made


def sections(name: str, *, owner: str = "engine", tokens: int = 64, **others: Any) -> dict[str, Any]:
    host = {"tokens": tokens, "shared": {"name": name, "owner": owner}}
    return {"page_size": 4, "device": {"tokens": 64}, "host": host,
            "prefetch": {"threshold_tokens": 4, "timeout_base": 30},
            "transfer": {"io_workers": 1}, **others}


def on(daemon: Daemon) -> dict[str, Any]:
    return {"storage": {"type": "remote", "options": {"socket": str(daemon.socket)}}}


def start(settings: dict[str, Any]) -> HiRadixCache:
    cache = create_cache(HiCacheConfig.model_validate(settings), NAMESPACE)
    assert isinstance(cache, HiRadixCache)
    return cache


def crash(settings: dict[str, Any], guard: contextlib.ExitStack | None = None) -> None:
    """Run an engine that stores pages, and kill it. `guard` then keeps its memory: other tests' engines and daemons
    remove dead memory."""
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, json.dumps(settings)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert engine.stdout is not None and engine.stdout.readline() == b"stored\n"
        if guard is not None:
            guard.enter_context(guarded(settings["host"]["shared"]["name"]))
    finally:
        engine.kill()
        engine.communicate()


def stored_tokens(cache: HiRadixCache) -> int:
    """Read the stored pages of TOKENS into L2; return the number of their tokens."""
    key = RadixKey.of(TOKENS)
    wait_for(lambda: cache.controller.gate.may(Direction.READ), cache.poll)  # when storage is open
    assert cache.prefetch_from_storage("r", key)
    wait_for(lambda: cache.check_prefetch_progress("r"), cache.poll)
    return cache.peek(key).host_pages * 4


def identity(name: str) -> int:
    return path_of(name).stat().st_ino


def test_the_pool_has_its_name_until_the_cache_is_closed(name: str) -> None:
    with start(sections(name)) as cache:
        assert isinstance(cache.host, SharedHostPool)
        assert path_of(name).stat().st_mode & 0o777 == 0o600
    assert not path_of(name).exists()
    with create_host_cache(HiCacheConfig.model_validate(sections(name)), NAMESPACE) as host_cache:
        assert isinstance(host_cache.host, SharedHostPool) and path_of(name).exists()
    assert not path_of(name).exists()


def test_a_start_that_fails_removes_its_memory(name: str, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(Exception, match="store"):
        start(sections(name, storage=file_storage(tmp_path / "store")))
    assert not path_of(name).exists()


def test_a_second_engine_of_the_same_name_is_rejected(name: str) -> None:
    with start(sections(name)), pytest.raises(SharedMemoryError, match="it has 16 pages, not 8"):
        start(sections(name, tokens=32))


def test_an_engine_takes_over_the_memory_of_a_crashed_one(name: str, tmp_path: Path) -> None:
    settings = sections(name, storage=file_storage(tmp_path / "pages"))
    with contextlib.ExitStack() as guard:
        crash(settings, guard)
        before = identity(name)
        with start(settings) as cache:
            assert identity(name) == before
            cache.check()


@pytest.mark.parametrize("owner", ["engine", "daemon"])
def test_an_engine_that_crashed_beside_a_daemon_starts_again_and_finds_its_pages(
    name: str, daemon: Daemon, owner: str
) -> None:
    settings = sections(name, owner=owner, **on(daemon))
    crash(settings)
    if owner == "daemon":  # owner `engine`: starts while the daemon still has the memory
        wait_for(lambda: not daemon.status()["clients"])
        assert not path_of(name).exists(), "the daemon finds that the engine has died, and removes its memory"
    with start(settings) as cache:
        (client,) = daemon.status()["clients"]
        assert (client["name"], client["pages"], client["is_alive"]) == (name, 16, True)
        before = daemon.requests()
        assert stored_tokens(cache) == REUSABLE
        after = daemon.requests()
        assert after["get"] > before.get("get", 0) and "read" not in after, "into the frames, not over the socket"
    wait_for(lambda: not daemon.status()["clients"])
    assert not path_of(name).exists()


def test_a_restarted_daemon_continues_to_use_its_memory(name: str, daemon: Daemon) -> None:
    settings = sections(name, owner="daemon", **on(daemon))
    crash(settings)
    with start(settings) as cache:
        before = identity(name)
        daemon.kill()
        daemon.start()
        assert stored_tokens(cache) == REUSABLE
        assert identity(name) == before and daemon.requests()["get"] > 0


def test_an_engine_that_starts_without_its_daemon_connects_later(name: str, daemon: Daemon) -> None:
    settings = sections(name, **on(daemon))
    crash(settings)
    daemon.kill()
    with start(settings) as cache:
        daemon.start()
        assert stored_tokens(cache) == REUSABLE
    daemon.kill()
    with pytest.raises(BackendUnavailable, match="does not create the memory"):
        start(sections(name, owner="daemon", **on(daemon)))


def test_only_a_daemon_on_this_host_can_own_the_memory(name: str, tmp_path: Path) -> None:
    for storage in ({"type": "remote", "options": {"url": "https://other:1"}}, file_storage(tmp_path / "pages"), None):
        with pytest.raises(ConfigError, match=r"owner: daemon needs storage\.type: remote"):
            HiCacheConfig(**sections(name, owner="daemon", storage=storage))

"""A Redis store as its operator sees it: listed, read, written and emptied, on one server and on a cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from hicache.backends.base import StoredPage, Usage
from hicache.backends.redis import RedisDriver
from hicache.backends.registry import BackendSpec, open_stored
from hicache.backends.store import Store
from hicache.backends.stored import StoredPages
from hicache.errors import BackendUnavailable, ConfigError
from hicache_lab.conformance import (
    NAMESPACE,
    InspectionContract,
    OpenStore,
    OpenStored,
    driver_of,
    make_keys,
    store_chain,
)
from hicache_lab.devservers import RedisCluster, RedisServer, ValkeyServer
from hicache_lab.devservers.redis import RedisLike

from .store import PAGE, fresh_prefix, grow_old, name_of, open_on, opened


@pytest.fixture(params=["server", "cluster"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    server = request.getfixturevalue("valkey" if request.param == "server" else "redis_cluster")
    assert isinstance(server, (ValkeyServer, RedisCluster))
    return server.storage(key_prefix=fresh_prefix())[1]


@contextlib.contextmanager
def raw_on(server: RedisLike, backend: Store | None = None, prefix: str | None = None) -> Iterator[StoredPages]:
    """The pages of a server as an operator sees them, those of `backend` or below `prefix`."""
    key_prefix = prefix if backend is None else driver_of(backend, RedisDriver).options.key_prefix
    options = server.storage(**({} if key_prefix is None else {"key_prefix": key_prefix}))[1]
    with contextlib.closing(open_stored(BackendSpec("redis", options))) as store:
        yield store


class TestRaw(InspectionContract):
    @pytest.fixture
    def open_store(self, options: dict[str, Any]) -> Iterator[OpenStore]:
        if "cluster" in options:
            client: Any = redis.RedisCluster.from_url(f"redis://{options['cluster'][0]}")
        else:
            client = redis.Redis.from_url(options["url"])
        with client:
            yield lambda codec: open_on(client, options, codec)

    @pytest.fixture
    def open_stored(self, options: dict[str, Any]) -> OpenStored:
        return lambda: open_stored(BackendSpec("redis", options))


def test_foreign_keys_are_not_listed_and_a_list_under_a_page_key_is(valkey: ValkeyServer) -> None:
    (key,) = make_keys(1)
    prefix = fresh_prefix()
    with raw_on(valkey, prefix=prefix) as raw, valkey.client() as client:
        for name in ("", "short:name", f"{NAMESPACE.hex()}:{key.hex()}x", f"{NAMESPACE.hex().upper()}:{key.hex()}"):
            client.set(prefix + name, b"somebody else's")
        assert not list(raw.pages())
        client.rpush(f"{prefix}{NAMESPACE.hex()}:{key.hex()}", "a")
        (page,) = raw.pages()
        assert dataclasses.replace(page, used_s=None) == StoredPage(NAMESPACE, key, 0, None)
        assert raw.read(page, PAGE) == b""
        assert raw.remove([page]) == 1


def test_inspection_does_not_count_as_a_use(valkey: ValkeyServer) -> None:
    keys = make_keys(5)
    with opened(valkey) as (backend, store), valkey.client() as client:
        store_chain(store, keys)
        names = [name_of(backend, key) for key in keys]
        grow_old(client, names)
        with raw_on(valkey, backend) as raw:
            for page in [*raw.pages(), *raw.pages()]:
                assert page.used_s is not None and 900 < time.time() - page.used_s < 1100
                assert raw.read(page, PAGE) is not None
        assert backend.usage() == Usage(5, 5 * PAGE, None)
        assert all(client.object("idletime", name) >= 1000 for name in names)


def test_an_old_server_reports_the_last_use_only_once(old_redis: RedisServer) -> None:
    """It counts inspection as a use, so only the first listing is right."""
    keys = make_keys(5)
    with opened(old_redis) as (backend, store), old_redis.client() as client:
        store_chain(store, keys)
        grow_old(client, [name_of(backend, key) for key in keys])
        with raw_on(old_redis, backend) as raw:
            ages_s = [[time.time() - (page.used_s or 0.0) for page in raw.pages()] for _ in range(2)]
        assert [age_s > 900 for age_s in ages_s[0] + ages_s[1]] == [True] * 5 + [False] * 5


@pytest.mark.parametrize("command", ["exists", "strlen"])
def test_a_user_without_rights_gets_an_error_and_not_an_empty_list(command: str) -> None:
    with ValkeyServer() as server, opened(server) as (backend, store), server.client() as client:
        store_chain(store, make_keys(3))
        with raw_on(server, backend) as raw:
            assert len(list(raw.pages())) == 3
            before = backend.usage()
            client.execute_command("ACL", "SETUSER", "default", f"-{command}")
            with pytest.raises(BackendUnavailable, match="access_denied"):
                list(raw.pages())
        assert backend.usage() == before
        assert dict(backend.statistics().errors) == ({"access_denied": 1} if command == "strlen" else {})


def test_a_server_that_evicts_by_frequency_reports_no_times() -> None:
    with ValkeyServer(maxmemory_bytes=64 << 20, policy="allkeys-lfu") as server, opened(server) as (backend, store):
        store_chain(store, make_keys(3))
        with raw_on(server, backend) as raw:
            assert [page.used_s for page in raw.pages()] == [None] * 3


def test_a_full_server_accepts_no_more_pages() -> None:
    with ValkeyServer(maxmemory_bytes=1) as server, raw_on(server) as raw:
        assert not raw.write(StoredPage(NAMESPACE, make_keys(1)[0], PAGE, None), b"x" * PAGE, None)


def test_a_failure_is_an_error_with_advice() -> None:
    page = StoredPage(NAMESPACE, make_keys(1)[0], PAGE, None)
    with ValkeyServer() as server:
        raw = open_stored(BackendSpec("redis", server.storage()[1]))
        server.kill()
        for work in (lambda: list(raw.pages()), lambda: raw.read(page, 1)):
            with pytest.raises(BackendUnavailable, match="start the server"):
                work()
        with pytest.raises(BackendUnavailable, match=r"redis store: connection_\w+: 1 of 1 pages were not removed"):
            raw.remove([page])
        with pytest.raises(BackendUnavailable, match=r"redis store: connection_\w+; try again"):
            raw.write(page, b"x", None)
        raw.close()
        with pytest.raises(BackendUnavailable, match="start the server"):
            open_stored(BackendSpec("redis", server.storage()[1]))
        with pytest.raises(ConfigError, match="unknown entry; did you mean url"):
            open_stored(BackendSpec("redis", {"urls": "redis://h"}))

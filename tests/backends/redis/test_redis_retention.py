"""Pages with a maximum age on a real server, which removes them itself."""

from __future__ import annotations

import contextlib

import pytest

from hicache.backends.base import SetOutcome, StoredPage
from hicache.backends.redis import RedisDriver
from hicache.backends.registry import BackendSpec
from hicache.backends.store import Store
from hicache.backends.stored import SealedPage
from hicache.errors import ConfigError
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import HIT, MISS, NAMESPACE, STORED, driver_of, empty_frames, sealed
from hicache_lab.devservers import ValkeyServer
from tests.backends._retention import FAR, KEYS, MAX_AGE_S, RetentionContract, Stores, codec_at, get, put, time_in
from tests.backends.redis.store import fresh_prefix, name_of
from tests.clocks import At
from tests.waiting import wait_for


class TestRedisRetention(RetentionContract):
    sweeps = False

    @pytest.fixture
    def spec(self, valkey: ValkeyServer) -> BackendSpec:
        return BackendSpec(*valkey.storage(key_prefix=fresh_prefix()))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def left_ms(server: ValkeyServer, store: Store, key: bytes) -> int:
    """Return how long the server keeps a page from now on; -1 for ever, -2 if it is missing."""
    with server.client() as client:
        return int(client.pttl(name_of(store, key)))


def test_the_server_removes_a_page_when_its_age_is_over_and_uses_do_not_prolong_it(
    valkey: ValkeyServer, clock: ManualClock
) -> None:
    with contextlib.closing(Stores(BackendSpec(*valkey.storage(key_prefix=fresh_prefix())), clock)) as stores:
        aged, plain = stores.open(MAX_AGE_S), stores.open()
        put(plain, KEYS[:1])
        assert left_ms(valkey, plain, KEYS[0]) == -1, "the control"
        put(aged, KEYS[1:])
        assert MAX_AGE_S - 60.0 < left_ms(valkey, aged, KEYS[1]) / 1000 <= MAX_AGE_S
        frames = empty_frames(aged.codec, 2)
        assert aged.batch_get(KEYS[1:], frames, deadline=FAR) == [HIT] * 2
        aged.delete(KEYS[1:], deadline=FAR)
        # A page that was first stored nearly its whole age ago, on another level.
        clock.advance(MAX_AGE_S - 2.0)
        assert aged.batch_set(KEYS[1:], frames, parent=None, deadline=FAR) == [STORED] * 2
        assert time_in(frames[0]) < clock.wall_s() - MAX_AGE_S / 2
        assert 0 < left_ms(valkey, aged, KEYS[1]) <= 2000
        aged.batch_touch(KEYS[1:], deadline=FAR)
        get(aged, KEYS[1:])
        assert left_ms(valkey, aged, KEYS[1]) <= 2000
        wait_for(lambda: left_ms(valkey, aged, KEYS[1]) == -2)
        assert aged.batch_has(KEYS, deadline=FAR) == [True, False, False], "lookups are exact"
        assert (get(aged, KEYS[1:]), aged.statistics().expired_pages) == ([MISS] * 2, 0)


@pytest.mark.parametrize("stored_s", [0.0, 1_000_000_000.0])
def test_a_copied_page_without_a_remaining_time_does_not_stay(
    valkey: ValkeyServer, clock: ManualClock, stored_s: float
) -> None:
    with contextlib.closing(Stores(BackendSpec(*valkey.storage(key_prefix=fresh_prefix())), clock)) as stores:
        aged = stores.open(MAX_AGE_S)
        (data,) = sealed(codec_at(At(stored_s)), KEYS[:1])
        copied = SealedPage(StoredPage(NAMESPACE, KEYS[0], len(data), None), data, None, FAR, clock)
        driver_of(aged, RedisDriver).write(copied)
        assert copied.finish() == [SetOutcome.STORED]
        wait_for(lambda: left_ms(valkey, aged, KEYS[0]) == -2)


def test_a_lifetime_after_the_last_use_and_an_age_exclude_each_other(valkey: ValkeyServer, clock: ManualClock) -> None:
    spec = BackendSpec(*valkey.storage(key_prefix=fresh_prefix(), ttl=60.0))
    with pytest.raises(ConfigError, match="use max_age alone"):
        Stores(spec, clock).open(MAX_AGE_S)

"""The settings of sessions, keys, ranks and workers take effect."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hicache.cache import HiRadixCache, SessionCache, create_cache, create_host_cache
from hicache.config import HiCacheConfig
from hicache.config.schema import SessionsConfig
from hicache.controller import TorchRankGroup
from hicache.errors import CapacityError, ConfigError, InvalidInput, RankError, UnknownSession
from hicache.keys import BIGRAM_BYTES, TOKEN_BYTES, RadixKey
from tests.cache.world import NAMESPACE
from tests.ranks import gloo_ranks
from tests.tuned import tuned
from tests.waiting import wait_for


def configured(**sections: Any) -> HiCacheConfig:
    return HiCacheConfig.model_validate(
        {"page_size": 4, "device": {"tokens": 32}, "host": {"tokens": 32}, **sections}
    )


def test_a_session_cache_is_created_if_configured() -> None:
    with create_cache(configured(), NAMESPACE) as cache:
        assert isinstance(cache, HiRadixCache)
    with create_cache(configured(sessions=tuned(SessionsConfig, enabled=True, sessions_max=1)), NAMESPACE) as cache:
        assert isinstance(cache, SessionCache)
        cache.open_session("a")
        with pytest.raises(CapacityError, match="1 are open"):
            cache.open_session("b")


def test_a_session_expires_after_the_configured_ttl() -> None:
    with create_cache(configured(sessions={"enabled": True, "ttl": "10ms"}), NAMESPACE) as cache:
        assert isinstance(cache, SessionCache)
        cache.open_session("a")
        wait_for(lambda: cache.session_statistics().open == 0, cache.poll)
        with pytest.raises(UnknownSession):
            cache.join_session("r", "a")


def test_sessions_without_a_prefix_cache_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"sessions\.enabled: needs prefix_cache: true"):
        HiCacheConfig(sessions={"enabled": True}, prefix_cache=False)


def test_keys_are_bigrams_if_configured() -> None:
    with create_cache(configured(bigram_keys=True), NAMESPACE) as cache:
        assert isinstance(cache, HiRadixCache) and cache.tree.position_bytes == BIGRAM_BYTES
        cache.match_prefix(RadixKey.of(range(9), bigram=True))
        with pytest.raises(InvalidInput):
            cache.match_prefix(RadixKey.of(range(9)))
    with create_cache(configured(bigram_keys=False), NAMESPACE) as cache:
        assert isinstance(cache, HiRadixCache) and cache.tree.position_bytes == TOKEN_BYTES


@pytest.mark.parametrize(("entry", "value"), [("bigram_keys", True), ("sessions", {"enabled": True})])
def test_a_host_cache_rejects_settings_that_it_does_not_support(entry: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{entry}"):
        create_host_cache(configured(**{entry: value}), NAMESPACE)


def test_options_of_a_wrong_type_are_rejected() -> None:
    with pytest.raises(InvalidInput, match="pass a RanksConfig"):
        TorchRankGroup(None, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_configured_number_of_threads_makes_lookups(workers: int) -> None:
    before = set(threading.enumerate())
    config = configured(transfer={"lookup_workers": workers}, storage={"type": "memory"})
    with create_cache(config, NAMESPACE):
        begun = [thread for thread in threading.enumerate() if thread not in before]
        assert sum(thread.name.startswith("hicache-prefetch-") for thread in begun) == workers


def test_a_rank_waits_for_the_others_until_the_configured_deadline() -> None:
    config = configured(ranks={"deadline": "50ms"})
    first, _ = gloo_ranks(2, options=config.ranks)
    with pytest.raises(RankError, match=r"within 0\.05 s"):
        first.agree(np.array([1], dtype=np.int64))

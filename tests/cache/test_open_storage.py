"""`open_storage` opens the store of a configuration without a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache import open_storage
from hicache.cache import HiRadixCache, create_cache
from hicache.errors import ConfigError, InvalidInput
from hicache.geometry import KVGeometry, PageShape, Piece
from hicache.keys import Namespace, RadixKey, page_keys
from hicache_lab.conformance import soon

from .test_factory import NAMESPACE, config, file_storage

KEY = RadixKey.of(list(range(8)))
KEYS = page_keys(KEY.tokens, 4)


def stored_pages(settings: Any, namespace: Namespace, environ: dict[str, str] | None = None) -> int:
    """Open the store; return how many of the two pages it finds."""
    store = open_storage(settings, namespace, environ=environ)
    try:
        return store.batch_exists(KEYS, deadline=soon())
    finally:
        store.close()


def store_two_pages(settings: Any, environ: dict[str, str] | None = None) -> None:
    with create_cache(settings, NAMESPACE, environ=environ) as cache:
        assert isinstance(cache, HiRadixCache)
        pages = cache.page_source.alloc(2)
        assert pages is not None
        cache.insert(KEY, pages)
        assert cache.drain(20)


def test_an_opened_store_has_only_the_pages_of_its_namespace(tmp_path: Path) -> None:
    settings = config(storage=file_storage(tmp_path / "s"))
    store_two_pages(settings)
    assert stored_pages(settings, NAMESPACE) == 2
    assert stored_pages(settings, replace(NAMESPACE, weights_epoch=1)) == 0
    assert stored_pages(settings, replace(NAMESPACE, element_order="heads_tokens_dim")) == 0


def test_keys_are_read_from_the_given_environment(tmp_path: Path) -> None:
    settings = config(storage=file_storage(tmp_path / "s"), integrity={"mac_key_env": "TEST_MAC_KEY"})
    store_two_pages(settings, {"TEST_MAC_KEY": "ab" * 32})
    assert stored_pages(settings, NAMESPACE, {"TEST_MAC_KEY": "ab" * 32}) == 2
    with pytest.raises(ConfigError, match="TEST_MAC_KEY"):
        open_storage(settings, NAMESPACE, environ={})


def test_a_configuration_without_storage_is_rejected() -> None:
    with pytest.raises(ConfigError, match="add the section `storage`"):
        open_storage(config(), NAMESPACE)


@pytest.mark.parametrize("geometry", [KVGeometry(1, 1, 8, 16), PageShape(16, (Piece("kv", 64),))])
def test_a_different_page_size_is_rejected_before_the_store_is_opened(
    tmp_path: Path, geometry: KVGeometry | PageShape
) -> None:
    with pytest.raises(ConfigError, match="page_size: 4 is configured, but the engine uses 16"):
        open_storage(config(storage=file_storage(tmp_path / "s")), Namespace("m", geometry))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("bad", [None, {}, "m"])
def test_arguments_of_a_wrong_type_are_rejected(bad: Any) -> None:
    with pytest.raises(InvalidInput, match="pass a HiCacheConfig"):
        open_storage(bad, NAMESPACE)
    with pytest.raises(InvalidInput, match="pass a Namespace"):
        open_storage(config(), bad)

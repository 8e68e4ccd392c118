"""Compositions over real servers: the contract's sample, and servers that stop, hang and restart empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import GetOutcome
from hicache.backends.compose import Levels
from hicache.config.guard import GuardConfig
from hicache.errors import BackendUnavailable
from hicache.frame import FrameCodec
from hicache_lab.conformance import (
    HIT,
    MISS,
    PRESENT,
    STORED,
    OpenStore,
    SampleContract,
    Subject,
    load,
    make_keys,
    open_backend,
    soon,
    store_chain,
)
from hicache_lab.devservers import DevService, SeaweedServer, ValkeyServer
from tests.backends._subjects import doorless
from tests.backends.redis.store import open_on
from tests.tuned import tuned
from tests.waiting import wait_for, wait_until_made

from .._files import open_file
from .._troubled import CODEC
from ._parts import levels, settle, sharded


class TestFileOverValkey(SampleContract):
    reopens = False

    @pytest.fixture
    def open_store(self, valkey: ValkeyServer, unique_prefix: str, tmp_path: Path) -> Iterator[OpenStore]:
        options = valkey.storage(key_prefix=unique_prefix)[1]
        with valkey.client() as client:
            yield lambda codec: levels(codec, open_file(tmp_path / "s", codec), open_on(client, options, codec))


class TestShardsOnValkey(SampleContract):
    """Three parts on one server: each has its own prefix, as if it were a separate server."""

    @pytest.fixture
    def open_store(self, valkey: ValkeyServer, unique_prefix: str) -> Iterator[OpenStore]:
        with valkey.client() as client:

            def open_part(codec: FrameCodec, number: int) -> Subject:
                return open_on(client, valkey.storage(key_prefix=f"{unique_prefix}{number}/")[1], codec)

            yield lambda codec: sharded(codec, open_part, 3)


def part(service: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a part on a server, with options to detect failures soon and to probe often."""
    kind, options = service
    return {"type": kind, "options": options, "guard": tuned(GuardConfig, backoff_min=0.05, backoff_max=0.2), **more}


def file_part(path: Path) -> dict[str, Any]:
    return {"type": "file", "options": {"path": str(path)}}


def open_levels(*parts: dict[str, Any], **options: Any) -> tuple[Levels, Subject]:
    chosen = {"levels": list(parts), **options}
    backend = wait_until_made(lambda: open_backend("levels", CODEC, chosen), BackendUnavailable)
    assert isinstance(backend, Levels)
    return backend, doorless(backend)


def test_a_hanging_lower_level_costs_its_own_pages_and_recovers(tmp_path: Path) -> None:
    keys, more = make_keys(6), make_keys(3, "more")
    with ValkeyServer() as server:
        backend, store = open_levels(file_part(tmp_path / "s"), part(server.storage(timeout=0.2)))
        assert store_chain(store, keys) == [STORED] * 6
        settle(backend)
        server.pause()
        assert load(store, keys) == [HIT] * 6, "the first level has them"
        assert backend.batch_exists(keys, deadline=soon()) == 6
        assert store_chain(store, more, keys[-1]) == [STORED] * 3
        lost = make_keys(2, "lost")
        assert load(store, lost) == [GetOutcome.ERROR] * 2
        server.resume()
        wait_for(lambda: load(store, lost) == [MISS] * 2)
        extra = make_keys(2, "extra")

        def arrives() -> bool:
            backend.delete(extra, deadline=soon())
            store_chain(store, extra)
            settle(backend)
            return backend.stores[1].batch_exists(extra, deadline=soon()) == 2

        wait_for(arrives)
        backend.close()


def test_a_killed_first_level_is_skipped_and_filled_again_after_its_restart(tmp_path: Path) -> None:
    keys = make_keys(6)
    with ValkeyServer() as server:
        backend, store = open_levels(part(server.storage(timeout=0.2)), file_part(tmp_path / "s"))
        assert store_chain(store, keys[:4]) == [STORED] * 4
        settle(backend)
        server.kill()
        assert load(store, keys[:4]) == [HIT] * 4
        assert store_chain(store, keys[4:], keys[3]) == [STORED] * 2, "they fall to the second level"
        assert backend.batch_exists(keys, deadline=soon()) == 6
        server.restart()

        def is_filled() -> bool:
            assert load(store, keys) == [HIT] * 6
            settle(backend)
            return backend.stores[0].batch_exists(keys, deadline=soon()) == 6

        wait_for(is_filled)
        backend.close()


def test_a_second_machine_finds_the_pages_that_the_first_stored_in_s3(
    seaweed: SeaweedServer, login: Callable[[DevService], None], unique_prefix: str, tmp_path: Path
) -> None:
    login(seaweed)
    keys = make_keys(20)
    low = part(seaweed.storage(prefix=unique_prefix))
    first, store = open_levels(file_part(tmp_path / "one"), low)
    assert store_chain(store, keys[:10]) == [STORED] * 10
    assert store_chain(store, keys[10:], keys[9]) == [STORED] * 10
    settle(first)
    first.close()
    second, store = open_levels(file_part(tmp_path / "two"), low)
    assert second.batch_exists([*keys, *make_keys(1, "none")], deadline=soon()) == 20
    assert load(store, keys) == [HIT] * 20
    settle(second)
    assert second.stores[0].batch_exists(keys, deadline=soon()) == 20, "promoted"
    assert store_chain(store, keys) == [PRESENT] * 20
    second.close()

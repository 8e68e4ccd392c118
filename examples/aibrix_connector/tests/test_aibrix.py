"""The connector through the second-level cache of the installed AIBrix, with AIBrix's own connector as the control."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from aibrix_kvcache import (
    BaseKVCacheManager,
    ExternalMemoryRegion,
    KVCacheBlockLayout,
    KVCacheBlockSpec,
    KVCacheConfig,
    KVCacheTensorSpec,
    ModelSpec,
    TokenListView,
    cache_manager,
)
from aibrix_kvcache.l2 import L2Cache
from aibrix_kvcache.l2.connectors import Connector
from aibrix_kvcache.l2.key_builders import KeyBuilder
from hicache_aibrix import HiCacheConnector, register

from hicache.errors import InvalidInput

# The connector SHFS makes tensors of bytes, which are read-only.
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")

TOKENS = 16
SPEC = KVCacheBlockSpec(TOKENS, torch.bfloat16, KVCacheBlockLayout.LCND, KVCacheTensorSpec([0, 1], [0, 1], 64))
BLOCK_BYTES = SPEC.block_nbytes
Open: TypeAlias = Callable[..., "Cache"]


class Cache:
    """An open L2 cache of AIBrix, with blocks in two slabs: `source` is stored, `target` is read into."""

    def __init__(self, backend: str, blocks: int, namespace: str = "tests") -> None:
        self._executor = ThreadPoolExecutor(4)
        self.l2 = L2Cache(
            backend, "SIMPLE", namespace, SPEC, self._executor,
            key_builder=KeyBuilder.create("ROLLING_HASH", block_size=TOKENS),
        )
        assert self.l2.open().is_ok()
        self.tokens = TokenListView(range(blocks * TOKENS))
        self.source = torch.randint(256, (blocks, BLOCK_BYTES), dtype=torch.uint8)
        self.target = torch.zeros_like(self.source)

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the value of a Status that is OK; None for one that is not found."""
        status = asyncio.run(work)
        assert status.is_ok() or status.is_not_found(), status
        return status.value

    def put(self, first: int = 0, last: int | None = None) -> Any:
        query = self.tokens[first * TOKENS : None if last is None else last * TOKENS]
        return self.call(self.l2.put(self.prefix(first), query, regions(self.source[first:last])))

    def get(self) -> Any:
        return self.call(self.l2.get(None, self.tokens, regions(self.target)))

    def exists(self) -> Any:
        return self.call(self.l2.exists(None, self.tokens))

    def delete(self, block: int) -> None:
        query = self.tokens[block * TOKENS : (block + 1) * TOKENS]
        self.call(self.l2.delete(self.prefix(block), query))

    def prefix(self, blocks: int) -> Any:
        return self.tokens[: blocks * TOKENS] if blocks else None

    def wrong_blocks(self, count: int) -> int:
        """Return how many of the first `count` blocks of the target differ from the source."""
        return int((self.source[:count] != self.target[:count]).any(dim=1).sum())

    def close(self) -> None:
        self.l2.close()
        self._executor.shutdown()


def regions(slab: torch.Tensor) -> list[ExternalMemoryRegion]:
    flat = slab.view(-1)
    return [ExternalMemoryRegion(flat, at * BLOCK_BYTES, BLOCK_BYTES) for at in range(len(slab))]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    create = Connector.create
    register()
    yield
    Connector.create = staticmethod(create)


@pytest.fixture
def open_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Open an L2 cache of AIBrix with its own connector SHFS (files), or with HICACHE."""
    text = (Path(__file__).parent.parent / "aibrix.yaml").read_text()
    (tmp_path / "aibrix.yaml").write_text(text.replace("path: pages", f"path: {tmp_path / 'pages'}"))
    monkeypatch.setenv("AIBRIX_HICACHE_CONFIG", str(tmp_path / "aibrix.yaml"))
    monkeypatch.setenv("AIBRIX_HICACHE_BLOCK_BYTES", str(BLOCK_BYTES))
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_SHFS_ROOT", str(tmp_path / "shfs"))
    caches: list[Cache] = []

    def opened(*arguments: Any) -> Cache:
        caches.append(Cache(*arguments))
        return caches[-1]

    yield opened
    for cache in caches:
        cache.close()


def test_the_registered_connector_is_created_by_name_and_the_others_too(open_cache: Open) -> None:
    assert isinstance(open_cache("HICACHE", 1).l2._backend, HiCacheConnector)
    assert open_cache("SHFS", 1).l2._backend.name == "SHFS"
    with pytest.raises(ValueError, match="Unknown connector type"):
        open_cache("OTHER", 1)


@pytest.mark.parametrize("backend", ["HICACHE", "SHFS"])
def test_blocks_are_put_found_read_and_deleted(open_cache: Open, backend: str) -> None:
    cache = open_cache(backend, 20)
    assert (cache.exists(), cache.get()) == (None, None)
    assert cache.put() == 20
    assert (cache.exists(), cache.get(), cache.wrong_blocks(20)) == (20, 20, 0)
    cache.delete(15)
    assert cache.exists() == 15
    cache.delete(0)
    assert cache.exists() is None


def test_blocks_outlive_the_cache_and_another_namespace_does_not_see_them(open_cache: Open) -> None:
    first = open_cache("HICACHE", 4)
    assert first.put() == 4
    first.close()
    again = open_cache("HICACHE", 4)
    again.source = first.source
    assert (again.exists(), again.get(), again.wrong_blocks(4)) == (4, 4, 0)
    assert open_cache("HICACHE", 4, "another").exists() is None


def test_a_second_put_of_the_same_blocks_is_ok(open_cache: Open) -> None:
    cache = open_cache("HICACHE", 4)
    assert (cache.put(0, 2), cache.put()) == (2, 4)


def flip_one_bit_in_each_file(folder: Path) -> int:
    """Return the number of changed files."""
    changed = 0
    for path in folder.rglob("*"):
        if re.fullmatch("[0-9a-f]{32,}", path.name) and path.is_file():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
            changed += 1
    return changed


@pytest.mark.parametrize(("backend", "served"), [("HICACHE", None), ("SHFS", 64)])
def test_no_block_with_a_flipped_bit_is_served_unlike_by_the_connector_of_aibrix(
    open_cache: Open, tmp_path: Path, backend: str, served: int | None
) -> None:
    cache = open_cache(backend, 64)
    assert cache.put() == 64
    assert flip_one_bit_in_each_file(tmp_path / ("pages" if backend == "HICACHE" else "shfs")) == 64
    assert cache.get() == served
    assert served is None or cache.wrong_blocks(served) == 64


@pytest.mark.parametrize(("backend", "served", "wrong"), [("HICACHE", 3, 0), ("SHFS", 19, 1)])
def test_no_block_after_a_hole_is_served_unlike_by_the_connector_of_aibrix(
    open_cache: Open, backend: str, served: int, wrong: int
) -> None:
    """The control shows why there is one batch, and no OK after a hole: AIBrix counts each block that is OK."""
    cache = open_cache(backend, 20)
    assert cache.put() == 20
    cache.delete(3)
    assert cache.get() == served
    assert cache.wrong_blocks(served) == wrong


def test_the_manager_of_aibrix_puts_blocks_and_acquires_them_again(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager has only its second level. Pinned memory needs a GPU: the switch is AIBrix's own, for tests."""
    monkeypatch.setattr(cache_manager, "TESTING_DISABLE_PIN_MEMORY", True)
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_L1_CACHE_ENABLED", "0")
    monkeypatch.setenv("AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND", "HICACHE")
    manager = BaseKVCacheManager(KVCacheConfig(SPEC, ModelSpec(1024, 512)))
    tokens = TokenListView(range(20 * TOKENS))
    handle = manager.allocate_for(None, tokens).get()
    for block in handle.to_tensors():
        block.uniform_()
    expected = [block.clone() for block in handle.to_tensors()]
    assert manager.exists(None, tokens).is_not_found()
    assert manager.put(None, tokens, handle).get() == manager.exists(None, tokens).get() == 20 * TOKENS
    count, found = manager.acquire(None, tokens).get()
    assert count == 20 * TOKENS
    assert all(torch.equal(one, other) for one, other in zip(found.to_tensors(), expected, strict=True))
    assert manager.delete(None, tokens).is_ok() and manager.exists(None, tokens).is_not_found()
    found.release()
    manager.close()


def test_a_full_store_is_one_error(open_cache: Open, tmp_path: Path) -> None:
    text = (tmp_path / "aibrix.yaml").read_text()
    (tmp_path / "aibrix.yaml").write_text(text.replace("10GiB", "1MiB"))
    cache = open_cache("HICACHE", 64)
    status = asyncio.run(cache.l2.put(None, cache.tokens, regions(cache.source)))
    assert status.is_error() and "blocks: rejected" in str(status)
    served = cache.get()
    assert 0 < served < 64 and cache.wrong_blocks(served) == 0


def test_a_block_of_another_size_is_an_error_that_names_both_sizes(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIBRIX_HICACHE_BLOCK_BYTES", str(2 * BLOCK_BYTES))
    with pytest.raises(InvalidInput, match=str(BLOCK_BYTES)):
        open_cache("HICACHE", 1).put()


def test_single_blocks_have_the_same_answers(open_cache: Open) -> None:
    cache = open_cache("HICACHE", 1)
    connector, source, target = cache.l2._backend, regions(cache.source)[0], regions(cache.target)[0]
    assert asyncio.run(connector.get(b"key", target)).is_not_found()
    assert asyncio.run(connector.put(b"key", source)).is_ok()
    assert asyncio.run(connector.get(b"key", target)).is_ok() and cache.wrong_blocks(1) == 0
    assert asyncio.run(connector.delete(b"key")).is_ok()
    assert asyncio.run(connector.delete(b"key")).is_not_found()

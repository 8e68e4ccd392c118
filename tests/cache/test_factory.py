"""`create_cache` returns a working cache for a configuration, or raises a typed error."""

from __future__ import annotations

import gc
import itertools
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache.cache import ChunkCache, HiRadixCache, TreeCache, create_cache, create_host_cache
from hicache.config import HiCacheConfig, HostConfig
from hicache.errors import CapacityError, ConfigError, InvalidInput, RankError
from hicache.frame import Encoding, FrameHeader, TagKind
from hicache.frame.header import key_id
from hicache.geometry import DTYPE_BYTES, KVGeometry
from hicache.host_memory import HostMemory
from hicache.keys import Namespace, RadixKey
from hicache.shared_memory import path_of
from hicache.tiers import KVPool, MHATokenToKVPool, TrailingPool, create_device_pool
from hicache.tiers.memory import DeviceMemory, host_is_pinned
from tests.ranks import gloo_ranks

GEOMETRY = KVGeometry(layers=1, heads=1, head_dim=8, page_size=4, dtype="float32")
NAMESPACE = Namespace(model="m", geometry=GEOMETRY)


def config(**sections: object) -> HiCacheConfig:
    return HiCacheConfig.model_validate({"page_size": 4, "device": {"tokens": 64},
                                         "prefetch": {"threshold_tokens": 4, "timeout_base": 30},
                                         "transfer": {"io_workers": 1}, **sections})


def file_storage(path: Path) -> dict[str, object]:
    return {"type": "file", "options": {"path": str(path), "capacity": "1MiB", "free_space_floor": 0}}


def test_the_sizes_and_limits_of_the_configuration_are_used() -> None:
    with create_cache(config(host={"ratio": 3}, transfer={"io_workers": 3}), NAMESPACE) as cache:
        assert isinstance(cache, HiRadixCache)
        assert (cache.device.pages, cache.host.pages) == (16, 48)
        assert cache.controller.config.transfer.io_workers == 3
        assert cache.config.prefetch.threshold_tokens == 4
        assert not cache.host.pinned


def machine_with(available: int) -> HostMemory:
    return HostMemory(1 << 40, available, None)


def test_a_share_of_memory_is_a_pool_of_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.host_memory.host_memory", lambda *_: machine_with((100 << 20) + 4095))
    with create_cache(config(host={"size": "50%"}), NAMESPACE) as cache:  # a frame has 4096 bytes
        assert isinstance(cache, HiRadixCache) and cache.host.pages == (50 << 20) // 4096
        assert cache.host.capacity_bytes == 50 << 20
    with create_host_cache(config(host={"size": "12.5%"}), NAMESPACE) as cache:
        assert cache.host.pages == 3200


def test_a_share_of_memory_below_one_page_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.host_memory.host_memory", lambda *_: machine_with(8191))
    for shared in ({}, {"name": f"test-factory-{os.getpid()}"}):
        with pytest.raises(ConfigError, match="smaller than one page"):
            create_cache(config(host={"size": "50%", "shared": shared}), NAMESPACE)
    assert not path_of(f"test-factory-{os.getpid()}").exists()


def test_kept_memory_of_a_share_has_the_same_pages_in_the_next_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"test-factory-{os.getpid()}"

    def pages(size: str, available: int) -> int:
        monkeypatch.setattr("hicache.host_memory.host_memory", lambda *_: machine_with(available))
        with create_cache(config(host={"size": size, "shared": {"name": name, "keep": True}}), NAMESPACE) as cache:
            assert isinstance(cache, HiRadixCache)
            found = cache.host.pages
        del cache
        gc.collect()  # unmaps the memory
        return found

    try:
        assert pages("50%", 8 << 20) == 1024
        assert pages("50%", 4 << 20) == 1024, "the kept memory is not available"
        assert pages("1MiB", 4 << 20) == 256, "a written size replaces it"
    finally:
        path_of(name).unlink(missing_ok=True)


def key_file(path: Path, digits: str) -> str:
    path.write_text(digits * 32)
    path.chmod(0o600)
    return str(path)


def store_two_pages(settings: HiCacheConfig, namespace: Namespace, root: Path) -> list[FrameHeader]:
    """Store two pages; return their headers."""
    with create_cache(settings, namespace) as cache:
        assert isinstance(cache, HiRadixCache)
        pages = cache.page_source.alloc(2)
        assert pages is not None
        cache.insert(RadixKey.of(list(range(8))), pages)
        assert cache.drain(20)
    stored = [path for path in root.rglob("*") if path.is_file() and len(path.name) == 64]
    headers = [FrameHeader.parse(path.read_bytes()) for path in stored]
    assert len(headers) == 2
    return [header for header in headers if header is not None]


def test_with_a_mac_key_stored_pages_have_a_keyed_tag(tmp_path: Path) -> None:
    root, keys = tmp_path / "pages", tmp_path / "mac.key"
    keys.write_text("ab" * 32 + "\n" + "cd" * 32)
    keys.chmod(0o600)
    settings = config(storage=file_storage(root), integrity={"mac_key_file": str(keys)})
    for header in store_two_pages(settings, NAMESPACE, root):
        assert header.tag_kind == TagKind.AES_256_GMAC
        assert header.key_id == key_id(TagKind.AES_256_GMAC, bytes.fromhex("ab" * 32)), "the current key seals"


def test_with_a_storage_format_stored_pages_are_compressed_and_encrypted(tmp_path: Path) -> None:
    root = tmp_path / "pages"
    settings = config(storage=file_storage(root), storage_format={
        "compression": "zstd", "encryption_key_file": key_file(tmp_path / "key", "ab"),
    })
    wide = replace(GEOMETRY, head_dim=1024)
    for header in store_two_pages(settings, replace(NAMESPACE, geometry=wide), root):
        assert header.tag_kind == TagKind.AES_256_GCM
        assert header.encoding & Encoding.ZSTD and header.stored_bytes < header.payload_bytes
        assert bool(header.encoding & Encoding.BYTE_PLANES) is (DTYPE_BYTES[wide.dtype] == 2)


@pytest.mark.parametrize(
    ("names", "sections", "shown"),
    [({"model": "a model"}, {}, "a model"), ({"label": "a name"}, {}, "a name"),
     ({"label": "/srv/llama"}, {"model_label": "our llama"}, "our llama")],
)
def test_stored_pages_have_the_configured_label_or_that_of_the_engine_or_the_name_of_the_model(
    names: dict[str, Any], sections: dict[str, str], shown: str, tmp_path: Path
) -> None:
    namespace, root = replace(NAMESPACE, weights_epoch=5, **names), tmp_path / "pages"
    for header in store_two_pages(config(storage=file_storage(root), **sections), namespace, root):
        assert (header.label, header.weights_epoch, header.namespace) == (shown, 5, namespace.digest)
    assert ("model" in names) == (namespace.digest != replace(NAMESPACE, weights_epoch=5).digest)


def test_a_model_label_that_cannot_be_shown_is_rejected() -> None:
    for bad in ("", "a/b", "/srv/llama", "a\nb", "x" * 65, " a"):
        with pytest.raises(ConfigError, match="model_label"):
            HiCacheConfig(model_label=bad)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_page_shape_is_rejected_because_l1_needs_a_geometry(prefix_cache: bool) -> None:
    with pytest.raises(InvalidInput, match="an engine with its own device cache"):
        create_cache(config(prefix_cache=prefix_cache), replace(NAMESPACE, geometry=GEOMETRY.shape))


def test_an_engine_may_set_the_size_of_l1() -> None:
    with create_cache(config(device={}), NAMESPACE, device_pages=5) as cache:
        assert cache.device.pages == 5
    with pytest.raises(ConfigError, match="L1 has no size"):
        create_cache(config(device={}), NAMESPACE)
    for bad in (5, [["a tensor"]]):
        with pytest.raises(InvalidInput, match="pass a EngineBlocks"):
            create_cache(config(device={}), NAMESPACE, device_blocks=bad)  # type: ignore[arg-type]
    with create_cache(config(device={"tokens": 24}), NAMESPACE, device_pages=5) as cache:
        assert cache.device.pages == 6, "the configuration has precedence"


def test_l1_must_fit_into_the_memory_that_the_caller_names() -> None:
    tight = DeviceMemory(available_bytes=3 * NAMESPACE.geometry.payload_bytes, total_bytes=1 << 40)
    with create_cache(config(device={"tokens": 8}), NAMESPACE, device_memory=tight) as cache:
        assert cache.device.pages == 2
    with pytest.raises(CapacityError, match="are free"):
        create_cache(config(device={"tokens": 12}), NAMESPACE, device_memory=tight)


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"page_size": 8}, ConfigError, "page_size"),
        ({"host": {"size": "1000TiB"}}, CapacityError, "available"),
        ({"device": {"size": "1000TiB"}}, CapacityError, "free"),
        ({"host": {"pin": "on"}}, ConfigError, "CUDA"),
        ({"device": {"memory_fraction": 0.5}}, ConfigError, "device.size or device.tokens"),
        ({"storage": {"type": "fil"}}, ConfigError, "file"),
        ({"storage": {"type": "memory", "options": {"nonsense": 1}}}, ConfigError, "nonsense"),
    ],
)
def test_an_invalid_configuration_is_rejected_at_the_start(
    sections: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        create_cache(config(**sections), NAMESPACE)


def test_memory_that_is_not_pinned_is_rejected_only_with_a_cuda_device() -> None:
    with pytest.raises(ConfigError, match=r"host\.pin: 'off' .* cuda; use auto or on"):
        host_is_pinned(HostConfig(pin="off"), "cuda")
    assert host_is_pinned(HostConfig(), "cuda")
    with create_cache(config(host={"pin": "off"}), NAMESPACE) as cache:
        assert isinstance(cache, HiRadixCache) and not cache.host.pinned


def test_a_store_too_small_for_one_page_is_rejected(tmp_path: Path) -> None:
    storage = {"type": "file", "options": {"path": str(tmp_path / "pages"), "capacity": 100, "free_space_floor": 0}}
    with pytest.raises((InvalidInput, ConfigError)):
        create_cache(config(storage=storage), NAMESPACE)


# Ranks

DEADLINE_S = 60.0


def started(*rank_configs: HiCacheConfig, slots: Sequence[int] = ()) -> list[TreeCache | BaseException]:
    """Start all ranks at once, with `slots`, if any, of a trailing pool in each; return the cache or the error of each.
    """
    pools = [[TrailingPool("window", MHATokenToKVPool(GEOMETRY, count), 3)] for count in slots]
    groups = gloo_ranks(len(rank_configs), deadline_s=DEADLINE_S)
    size = len(groups)
    with ThreadPoolExecutor(size) as pool:
        starts = [
            pool.submit(
                create_cache, chosen, replace(NAMESPACE, tp_rank=group.rank, tp_size=size), ranks=group,
                trailing=pools[group.rank] if slots else (),
            )
            for chosen, group in zip(rank_configs, groups, strict=True)
        ]
    return [start.exception() or start.result() for start in starts]


def test_ranks_with_different_pools_use_the_smallest_size() -> None:
    caches = started(
        config(device={"tokens": 64}, host={"tokens": 400}),
        config(device={"tokens": 80}, host={"tokens": 120}),
    )
    for cache in caches:
        assert isinstance(cache, HiRadixCache)
        assert (cache.device.pages, cache.host.pages) == (16, 30)
        cache.close()


def test_several_ranks_cannot_have_a_share_of_memory_and_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.host_memory.host_memory", lambda *_: machine_with(2 << 20))
    for error in started(*[config(host={"size": "50%"})] * 2):
        assert isinstance(error, ConfigError)
        assert "host.size: a share needs one pool per machine; with 2 ranks write a size" in str(error)
    (cache,) = started(config(host={"size": "50%"}))
    assert isinstance(cache, HiRadixCache) and cache.host.pages == 256
    cache.close()


def test_ranks_with_different_thresholds_do_not_start() -> None:
    for error in started(config(), config(load_back_threshold_tokens=99)):
        assert isinstance(error, RankError)


def test_ranks_with_trailing_pools_of_different_sizes_do_not_start() -> None:
    for error in started(config(), config(), slots=[8, 9]):
        assert isinstance(error, RankError)
        assert "differ" in str(error)
    for cache in started(config(), config(), slots=[8, 8]):
        assert isinstance(cache, HiRadixCache)
        cache.close()


def test_caches_without_reuse_start_only_if_all_ranks_have_them() -> None:
    caches = started(
        config(prefix_cache=False, device={"tokens": 80}), config(prefix_cache=False, device={"tokens": 64})
    )
    assert [cache.device.pages for cache in caches if isinstance(cache, ChunkCache)] == [16, 16]
    for error in started(config(prefix_cache=False), config()):
        assert isinstance(error, RankError) and "differ" in str(error)


def test_if_a_rank_has_no_memory_for_l1_the_others_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    created = itertools.count()

    def short_of_memory(*arguments: Any, **options: Any) -> KVPool:
        if next(created) == 1:
            raise CapacityError("no memory for L1")
        return create_device_pool(*arguments, **options)

    monkeypatch.setattr("hicache.cache.factory.create_device_pool", short_of_memory)
    errors = started(config(prefix_cache=False), config(prefix_cache=False))
    assert {type(error) for error in errors} == {RankError, CapacityError}
    assert any("another rank could not start" in str(error) for error in errors)


def test_only_one_rank_publishes_and_an_address_in_use_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        events = {"endpoint": f"tcp://127.0.0.1:{taken.getsockname()[1]}"}
        first, second = started(config(events=events), config(events=events))
    assert isinstance(first, ConfigError) and "cannot listen" in str(first)
    assert isinstance(second, RankError) and "another rank could not start" in str(second)
    caches = started(config(events=events), config(events=events))
    assert all(isinstance(cache, HiRadixCache) for cache in caches)
    streams = [cache.statistics().events for cache in caches if isinstance(cache, HiRadixCache)]
    assert streams[0] is not None and streams[1] is None
    for cache in caches:
        assert isinstance(cache, HiRadixCache)
        cache.close()


def test_a_cache_without_reuse_publishes_an_empty_cache() -> None:
    """A router that subscribes finds an engine without pages, not an address that does not answer."""
    settings = config(prefix_cache=False, events={"endpoint": "tcp://127.0.0.1:*"})
    with create_cache(settings, NAMESPACE) as cache:
        publisher = cache.statistics().publisher
        assert isinstance(cache, ChunkCache) and publisher is not None and publisher.alive
    publisher = cache.statistics().publisher
    assert publisher is not None and not publisher.alive


@pytest.mark.parametrize("name", ["config", "namespace", "device_pages", "device"])
def test_an_argument_of_a_wrong_type_is_rejected(name: str) -> None:
    arguments: dict[str, Any] = {"config": config(device={}), "namespace": NAMESPACE, "device_pages": 5}
    for bad in ("5", [5], 1.5, -1, object()):
        with pytest.raises((InvalidInput, ConfigError)):
            create_cache(**{**arguments, name: bad})


def test_a_namespace_of_given_keys_is_rejected_because_this_cache_hashes_tokens() -> None:
    with pytest.raises(InvalidInput, match="create_host_cache"):
        create_cache(config(), replace(NAMESPACE, key_hash="sha256"))


def test_if_one_rank_cannot_start_no_rank_does_and_no_rank_waits() -> None:
    first, second = started(
        config(storage={"type": "memory"}), config(storage={"type": "memory", "options": {"nonsense": 1}})
    )
    assert isinstance(first, RankError) and "another rank could not start" in str(first)
    assert isinstance(second, ConfigError)

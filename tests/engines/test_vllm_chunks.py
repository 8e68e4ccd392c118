"""HiCacheConnector's choice between pages and vLLM's offloading, and the chunks of the latter. No engine starts."""

from __future__ import annotations

import dataclasses
import os
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hicache.config import HiCacheConfig
from hicache.errors import ConfigError, SharedMemoryError

with warnings.catch_warnings():  # from vLLM and its imports
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        KVCacheTensor,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    from hicache.integrations.vllm import HiCacheConnector
    from hicache.integrations.vllm.announced import WorkerLayout, announce, announced
    from hicache.integrations.vllm.chunks import Chunk, ChunkConnector, _host_bytes, _tiers
    from hicache.integrations.vllm.connector import PageConnector
    from hicache.integrations.vllm.engine import VllmEngine, has_pages
    from hicache.integrations.vllm.figures import CopyStats

from .test_vllm_engine import vllm_config

BLOCKS = 100
ATTENTION: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=32, **ATTENTION)
WINDOW = SlidingWindowSpec(block_size=32, sliding_window=128, **ATTENTION)
STATE = MambaSpec(block_size=128, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align")
LATENT = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
INDEXER = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=132, dtype=torch.uint8)


def caches(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    tensor = KVCacheTensor(size=BLOCKS * 1000, layers=["layer 0"], layer_stride=0, block_stride=1000)
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=groups)


def uniform(*specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={f"layer {at}": one for at, one in enumerate(specs)})


@pytest.mark.parametrize("specs", [[FULL], [LATENT], [uniform(LATENT, INDEXER)]], ids=["full", "latent", "indexer"])
def test_one_group_of_full_attention_has_pages(specs: list[KVCacheSpec]) -> None:
    assert has_pages(vllm_config(), caches(*specs))


@pytest.mark.parametrize("specs", [[WINDOW], [FULL, WINDOW], [FULL, FULL], [FULL, STATE]], ids=lambda s: str(len(s)))
def test_windows_states_and_several_groups_have_chunks(specs: list[KVCacheSpec]) -> None:
    assert not has_pages(vllm_config(), caches(*specs))


DRAFT = SimpleNamespace(
    uses_draft_kv_cache=lambda: True, method="eagle", draft_model_config=SimpleNamespace(model="someone/draft")
)


def test_the_kv_of_a_draft_model_has_chunks_but_ngram_has_pages() -> None:
    ngram = SimpleNamespace(uses_draft_kv_cache=lambda: False)
    assert not has_pages(vllm_config(speculative_config=DRAFT), caches(FULL))
    assert has_pages(vllm_config(speculative_config=ngram), caches(FULL))


CHUNKS: dict[str, tuple[list[KVCacheSpec], int | None, int, int]] = {
    "the default page size": ([FULL, WINDOW], None, 2, 64),
    "a page size": ([FULL, WINDOW], 128, 4, 128),
    "a block larger than the default page": ([dataclasses.replace(WINDOW, block_size=96)], None, 1, 96),
    "blocks of two sizes": ([FULL, dataclasses.replace(WINDOW, block_size=64)], 128, 2, 64),
    "a state": ([dataclasses.replace(FULL, block_size=128), STATE], None, 1, 128),
    "a state, and a page size without effect": ([dataclasses.replace(FULL, block_size=128), STATE], 64, 1, 128),
}


@pytest.mark.parametrize("what", CHUNKS)
def test_a_chunk_has_the_page_size_in_whole_blocks_or_with_states_one_block(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, page_size, blocks, tokens = CHUNKS[what]
    if page_size is not None:
        monkeypatch.setenv("HICACHE_PAGE_SIZE", str(page_size))
    chunk = Chunk.of({}, caches(*specs))
    assert (chunk.blocks, chunk.config.page_size) == (blocks, tokens)


def test_a_page_size_that_is_not_whole_blocks_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_PAGE_SIZE", "48")
    with pytest.raises(ConfigError, match=r"page_size: 48 is not a multiple .* 32"):
        Chunk.of({}, caches(FULL, WINDOW))


def test_states_that_vllm_does_not_keep_are_rejected() -> None:
    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        Chunk.of({}, caches(FULL, dataclasses.replace(STATE, mamba_cache_mode="none")))


def host_bytes(**host: object) -> int:
    config = HiCacheConfig.model_validate({"host": host})
    vllm: Any = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    return _host_bytes(config.host, vllm, caches(FULL, WINDOW), 2)


def test_host_memory_is_a_size_for_all_workers_or_a_multiple_of_their_kv() -> None:
    assert host_bytes(size="1MiB") == 1 << 20
    assert host_bytes(ratio=3) == 3 * 2 * BLOCKS * 1000


def test_host_memory_in_tokens_or_below_one_chunk_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"host\.tokens: .* use host\.size"):
        host_bytes(tokens=4096)
    with pytest.raises(ConfigError, match="less than one chunk"):
        host_bytes(size="3000B")


def test_a_share_of_memory_is_rejected_because_each_process_would_compute_another_size() -> None:
    with pytest.raises(ConfigError, match=r"host\.size: .* write a size, such as 64GiB, instead of 12\.5%"):
        host_bytes(size="12.5%")


STORED = HiCacheConfig.model_validate({"storage": {"type": "memory"}})


def test_without_storage_vllm_gets_no_tier() -> None:
    assert _tiers(vllm_config(), HiCacheConfig()) == []


def test_engines_whose_kv_can_differ_do_not_share_chunks() -> None:
    """vLLM tells a tier neither of these settings."""
    changes: list[dict[str, Any]] = [
        {}, {"max_model_len": 131072}, {"quantization": "fp8"}, {"load_format": "dummy"}, {"dtype": torch.float16},
        {"speculative_config": DRAFT},
    ]
    assert len({_tiers(vllm_config(**change), STORED)[0]["model"] for change in changes}) == len(changes)
    assert _tiers(vllm_config(), STORED) == _tiers(vllm_config(), STORED)


def test_adapters_need_a_name_of_their_weights_if_chunks_are_stored() -> None:
    adapters = vllm_config(lora_config=object())
    with pytest.raises(ConfigError, match="set the option 'model'"):
        _tiers(adapters, STORED)
    assert _tiers(adapters, HiCacheConfig()) == []
    adapters.kv_transfer_config.kv_connector_extra_config = {"model": "version 3"}
    assert "version 3" in _tiers(adapters, STORED)[0]["model"]


def test_multi_connector_finds_the_class_by_the_name_of_both_kinds() -> None:
    for kind in (PageConnector, ChunkConnector):
        assert KVConnectorFactory.get_connector_class_by_name(kind.__name__) is HiCacheConnector


def test_statistics_of_both_kinds_are_recognized() -> None:
    chunks = OffloadingConnectorStats()
    chunks.increase_counter("vllm:kv_offload_load_bytes", 5)
    assert type(HiCacheConnector.build_kv_connector_stats(chunks.data)) is OffloadingConnectorStats
    assert type(HiCacheConnector.build_kv_connector_stats({"loaded_pages": 1})) is CopyStats
    assert type(HiCacheConnector.build_kv_connector_stats()) is CopyStats


def test_the_metrics_of_vllms_offloading_appear_with_its_first_figures() -> None:
    registry = CollectorRegistry()

    def kind(of: type) -> Any:
        return lambda *args, **named: of(*args, registry=registry, **named)

    types = {one: kind(one) for one in (Counter, Gauge, Histogram)}
    vllm = vllm_config()
    vllm.kv_transfer_config = KVTransferConfig(kv_connector="HiCacheConnector", kv_role="kv_both")
    metrics = HiCacheConnector.build_prom_metrics(vllm, types, ["engine"], {0: ["0"]})
    chunks = OffloadingConnectorStats()
    chunks.increase_counter("vllm:kv_offload_load_bytes", 5)
    assert registry.get_sample_value("vllm:hicache_loaded_pages_total", {"engine": "0"}) == 0
    for _ in range(2):
        metrics.observe(chunks.data)
    metrics.observe({"loaded_pages": 3})
    assert registry.get_sample_value("vllm:kv_offload_load_bytes_total", {"engine": "0"}) == 10
    assert registry.get_sample_value("vllm:hicache_loaded_pages_total", {"engine": "0"}) == 3


@pytest.mark.parametrize(
    ("entries", "layout"),
    [
        ({}, None),
        ({"layer_types": ["full_attention"] * 4}, None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "LBHNC"),
        ({"sliding_window": 128}, "LBHNC"),
        ({"is_hybrid": True}, "LBHNC"),
    ],
    ids=str,
)
def test_only_models_that_may_need_vllms_offloading_get_its_layout(
    entries: dict[str, Any], layout: str | None
) -> None:
    window = entries.get("sliding_window")
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(**entries), is_hybrid=bool(entries.get("is_hybrid")),
        get_sliding_window=lambda: window,
    )
    vllm: Any = SimpleNamespace(model_config=model, attention_config=SimpleNamespace(hisparse_config=None))
    assert HiCacheConnector.get_required_kvcache_layout(vllm) == layout


# Layers of different sizes: vLLM gives the workers all of them, and the scheduler the first one.


def test_the_scheduler_gets_the_sizes_of_layers_from_the_workers() -> None:
    worker = VllmEngine.of(vllm_config(), _one_group(uniform(LATENT, INDEXER, LATENT)))
    scheduler = VllmEngine.of(vllm_config(), _one_group(LATENT))
    assert worker.layout.layer_bytes == (32 * 576 * 2, 32 * 132, 32 * 576 * 2) != scheduler.layout.layer_bytes
    found = WorkerLayout("form", worker.layout.layer_bytes, worker.specs, (1, 2))
    told = scheduler.as_announced(found)
    assert told.layout.shape == worker.layout.shape and told.namespace("form") == worker.namespace("form")


def test_layers_that_a_forward_does_not_wait_for_are_first_in_a_page() -> None:
    from vllm.model_executor.layers.attention import MLAAttention  # noqa: PLC0415
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache  # noqa: PLC0415

    kinds = [MLAAttention, DeepseekV32IndexerCache, MLAAttention, DeepseekV32IndexerCache]
    vllm = vllm_config()
    vllm.compilation_config.static_forward_context.update(
        {f"layer {number}": kind.__new__(kind) for number, kind in enumerate(kinds)}
    )
    engine = VllmEngine.of(vllm, _one_group(uniform(LATENT, INDEXER, LATENT, INDEXER)))
    assert engine.layer_names == ("layer 1", "layer 3", "layer 0", "layer 2")
    assert engine.early_layers == 2 and engine.layout.layer_bytes == (32 * 132,) * 2 + (32 * 576 * 2,) * 2


def _one_group(spec: KVCacheSpec) -> KVCacheConfig:
    names = list(spec.kv_cache_specs) if isinstance(spec, UniformTypeKVCacheSpecs) else ["layer 0"]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)])


@pytest.fixture
def engine() -> Iterator[str]:
    name = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    for path in _files(name):
        path.unlink()


def _files(engine: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"hicache-layout.{engine}.*"))


LAYOUT = WorkerLayout("form", (1, 2, 3), "specs", (4, 5))


def test_the_scheduler_takes_the_layout_that_all_workers_have_announced(engine: str) -> None:
    for rank in range(2):
        announce(engine, rank, dataclasses.replace(LAYOUT, form="of an ended engine with this name"))
        announce(engine, rank, LAYOUT)
    assert announced(engine, 2) == LAYOUT
    assert _files(engine) == []


def test_a_missing_worker_or_one_with_other_blocks_or_memory_is_rejected(engine: str) -> None:
    announce(engine, 0, LAYOUT)
    with pytest.raises(ConfigError, match="only 1 of 2 workers"):
        announced(engine, 2)
    for change in ({"form": "another"}, {"layer_bytes": (1,)}, {"memory": (6, 7)}):
        announce(engine, 0, LAYOUT)
        announce(engine, 1, dataclasses.replace(LAYOUT, **change))
        with pytest.raises(ConfigError, match="different blocks or memory"):
            announced(engine, 2)


def test_a_file_that_others_can_open_is_not_believed(engine: str) -> None:
    announce(engine, 0, LAYOUT)
    (path,) = _files(engine)
    path.chmod(0o666)
    with pytest.raises(SharedMemoryError, match="mode 0666"):
        announced(engine, 1)
    with pytest.raises(SharedMemoryError, match="mode 0666"):
        announce(engine, 0, LAYOUT)

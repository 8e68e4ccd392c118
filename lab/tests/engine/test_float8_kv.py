"""KV in float8 with scales: tokens from every tier are those without a cache; other scales, other namespace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.cache import ChunkCache
from hicache.config import HiCacheConfig
from hicache.errors import ConfigError
from hicache_lab.cli.demo_run import Pair, Runner
from hicache_lab.cli.demo_workload import DemoRequest
from hicache_lab.engine import Checkpoint, Engine, LlamaConfig, RequestRecord, Sampling, create_engine, load_checkpoint
from hicache_lab.engine.checkpoint import kv_scales
from lab.tests.engine.reference import reference_logits
from lab.tests.engine.test_checkpoint import write_model
from lab.tests.engine.world import TINY, Device, generate, random_tensors, random_tokens, settle, tiers

pytestmark = pytest.mark.long

FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
PAGE_SIZE = 8
PROMPTS = [[*random_tokens(length, seed=1), *random_tokens(5, seed=length)] for length in (19, 60, 95)]
# Prompts share prefixes, and each has one token at least to compute.
WHOLE_PAGES = sum((len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE for prompt in PROMPTS)


def wide_tensors(config: LlamaConfig = TINY) -> dict[str, torch.Tensor]:
    """Return the weights of a model whose K and V are far beyond the range of float8, each by another factor, and whose
    results are those of `random_tensors`: Q and the output projection are smaller by the same factors."""
    tensors = random_tensors(config)
    for layer in range(config.layers):
        for grown, shrunk, power in (("k", "q", 16), ("v", "o", 24)):
            factor = 2.0 ** (power + 2 * layer)
            tensors[f"model.layers.{layer}.self_attn.{grown}_proj.weight"] *= factor
            tensors[f"model.layers.{layer}.self_attn.{shrunk}_proj.weight"] /= factor
    return tensors


def calibrated(tensors: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """Return `tensors` with scales that map the largest K and V of a prompt to half of the range of `dtype`."""
    device, tokens = Device(tensors=tensors), random_tokens(200, seed=9)
    row = device.row(len(tokens))
    device.forward(row, tokens)
    place, largest = device.place(row, slice(len(tokens))), torch.finfo(getattr(torch, dtype)).max
    scales = {
        name: part[place].abs().max().reshape(1) * 2 / largest
        for layer in range(TINY.layers)
        for name, part in zip(scale_names(layer), device.pool.get_kv_buffer(layer), strict=True)
    }
    return {**tensors, **scales}


def scale_names(layer: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{part}_scale" for part in "kv"]


def with_scales(factor: float, dtype: str) -> Checkpoint:
    """Return a checkpoint whose scales are `factor` times the calibrated ones. Its fingerprint is always the same."""
    tensors = calibrated(wide_tensors(), dtype)
    changed = {name: tensors[name] * factor for layer in range(TINY.layers) for name in scale_names(layer)}
    return Checkpoint(TINY, {**tensors, **changed}, "wide")


def configuration(folder: Path | None = None, **changes: Any) -> HiCacheConfig:
    """Return the configuration of an engine that uses every hit, with pages in `folder`."""
    section = {"type": "file", "options": {"path": str(folder), "capacity": "64MiB", "free_space_floor": 0}}
    return HiCacheConfig.model_validate({
        "page_size": PAGE_SIZE,
        "device": {"tokens": 64 * PAGE_SIZE},
        "host": {"tokens": 128 * PAGE_SIZE},
        "load_back_threshold_tokens": 1,
        "break_even": {"mode": "always"},
        "prefetch": {"policy": "wait_complete", "threshold_tokens": 1, "host_share": 1},
        **({} if folder is None else {"storage": section}),
        **changes,
    })


def answers(engine: Engine) -> list[RequestRecord]:
    """Serve the prompts one after the other."""
    return [generate(engine, prompt) for prompt in PROMPTS]


def tokens(records: list[RequestRecord]) -> list[tuple[int, ...]]:
    return [record.output_tokens for record in records]


def without_cache(checkpoint: Checkpoint, dtype: str) -> list[tuple[int, ...]]:
    with create_engine(configuration(prefix_cache=False), checkpoint, kv_dtype=dtype) as engine:
        assert isinstance(engine.cache, ChunkCache)
        found = answers(engine)
        assert sum(record.hit_tokens for record in found) == 0
        return tokens(found)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_tokens_from_every_tier_and_after_a_restart_are_those_without_a_cache(tmp_path: Path, dtype: str) -> None:
    checkpoint = with_scales(1.0, dtype)
    expected = without_cache(checkpoint, dtype)
    with create_engine(configuration(tmp_path), checkpoint, kv_dtype=dtype) as engine:
        cache = tiers(engine)
        assert cache.device.geometry.dtype == dtype
        assert tokens(answers(engine)) == expected
        settle(engine)
        warm = answers(engine)
        assert tokens(warm) == expected and sum(record.device_hit_tokens for record in warm) == WHOLE_PAGES
        settle(engine)
        cache.evict(cache.tree.device_evictable_pages)
        loaded = answers(engine)
        assert tokens(loaded) == expected and sum(record.host_hit_tokens for record in loaded) > 0
        settle(engine)
        cache.evict(cache.tree.device_evictable_pages)
        cache.host.free(cache.tree.evict_host(cache.host.pages))
        assert cache.tree.node_count == 0
        read = answers(engine)
        assert tokens(read) == expected and sum(record.storage_hit_tokens for record in read) > 0
        settle(engine)
    with create_engine(configuration(tmp_path), checkpoint, kv_dtype=dtype) as engine:
        again = answers(engine)
        assert tokens(again) == expected
        assert sum(record.hit_tokens for record in again) == WHOLE_PAGES and again[-1].storage_hit_tokens > 0


def test_engines_with_other_scales_or_another_kind_of_float8_find_no_pages_of_each_other(tmp_path: Path) -> None:
    """The weights have one fingerprint, so only the scales and the dtype separate the engines."""
    one, other = with_scales(1.0, "float8_e4m3fn"), with_scales(2.0, "float8_e4m3fn")
    with create_engine(configuration(tmp_path), one, kv_dtype="float8_e4m3fn") as engine:
        answers(engine)
        settle(engine)
    for checkpoint, dtype in ((other, "float8_e4m3fn"), (one, "float8_e5m2")):
        expected = without_cache(checkpoint, dtype)
        with create_engine(configuration(tmp_path), checkpoint, kv_dtype=dtype) as engine:
            found = answers(engine)
            assert found[0].hit_tokens == found[1].storage_hit_tokens == found[2].storage_hit_tokens == 0
            assert tokens(found) == expected
    with create_engine(configuration(tmp_path), one, kv_dtype="float8_e4m3fn") as engine:
        assert answers(engine)[0].storage_hit_tokens > 0, "the control: the pages of the first engine are there"


@pytest.mark.parametrize("dtype", FLOAT8)
def test_scales_keep_kv_that_float8_alone_would_cut(dtype: str) -> None:
    tokens, tensors = random_tokens(75, seed=3), wide_tensors()
    expected = reference_logits(TINY, random_tensors(TINY), tokens)[-1]

    def error(tensors: Mapping[str, torch.Tensor]) -> float:
        device = Device(dtype=dtype, tensors=tensors)
        return float((device.forward(device.row(len(tokens)), tokens).double() - expected).abs().max())

    assert error(calibrated(tensors, dtype)) < 0.5 and error(tensors) > 2


def test_reads_and_chunks_round_kv_in_float8_once() -> None:
    tensors, tokens = calibrated(wide_tensors(), "float8_e4m3fn"), random_tokens(75, seed=3)
    device = Device(dtype="float8_e4m3fn", tensors=tensors)
    first, second = device.row(75), device.row(75)
    logits = device.forward(first, tokens)
    device.forward(second, tokens[:40])
    again = device.forward(second, tokens[40:], start=40)
    assert torch.equal(logits, again) and torch.equal(device.kv(first, 75), device.kv(second, 75))


def test_replays_with_kv_in_float8_have_the_tokens_and_the_bytes_of_an_engine_without_reuse(tmp_path: Path) -> None:
    """The comparison of the demo, over conversations that grow by their answers."""
    checkpoint = with_scales(1.0, "float8_e4m3fn")
    sampling = Sampling(temperature=0.0)
    with (
        create_engine(configuration(), checkpoint, kv_dtype="float8_e4m3fn") as plain,
        create_engine(configuration(tmp_path), checkpoint, kv_dtype="float8_e4m3fn") as cached,
    ):
        pair = Pair(*(
            Runner(engine, reuse=reuse, verify=True, max_new_tokens=8, sampling=sampling)
            for engine, reuse in ((plain, False), (cached, True))
        ))
        for index in (0, 1, 2, 1, 2):
            ((computed, found),) = pair.serve([DemoRequest(f"prompt {index}", PROMPTS[index])])
            assert found.tokens == computed.tokens and found.kv_digest == computed.kv_digest is not None
            assert sum(computed.hit_tokens.values()) == 0
        assert sum(found.hit_tokens.values()) > 0
        for layer in cached.cache.device.blocks.layers:
            for region in layer:
                region[1:] ^= 1
        ((computed, found),) = pair.serve([DemoRequest("prompt 2", PROMPTS[2])])
        assert found.kv_digest != computed.kv_digest, "the control: other bytes on L1"


def test_scales_are_read_from_the_checkpoint_and_used_for_float8_only(tmp_path: Path) -> None:
    tensors = calibrated(random_tensors(TINY), "float8_e4m3fn")
    loaded = load_checkpoint(write_model(tmp_path, tensors))
    expected = [[tensors[scale_names(layer)[part]].item() for layer in range(TINY.layers)] for part in range(2)]
    assert list(kv_scales(TINY, loaded.tensors, "float8_e5m2")) == expected
    plain = [[1.0] * TINY.layers] * 2
    assert list(kv_scales(TINY, loaded.tensors, "bfloat16")) == plain
    assert list(kv_scales(TINY, random_tensors(TINY), "float8_e4m3fn")) == plain


@pytest.mark.parametrize(
    "bad", [None, torch.tensor([0.0]), torch.tensor(-1.0), torch.tensor(float("nan")), torch.ones(2), torch.tensor(1)]
)
def test_a_checkpoint_with_scales_that_cannot_be_used_is_rejected(bad: torch.Tensor | None) -> None:
    tensors = calibrated(random_tensors(TINY), "float8_e4m3fn")
    del tensors["model.layers.1.self_attn.v_scale"]
    if bad is not None:
        tensors["model.layers.1.self_attn.v_scale"] = bad
    with pytest.raises(ConfigError, match=r"model: model\.layers\.1\.self_attn\.v_scale is "):
        create_engine(configuration(), Checkpoint(TINY, tensors, "broken"), kv_dtype="float8_e4m3fn")

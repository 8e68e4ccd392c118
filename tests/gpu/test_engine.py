"""The reference engine on a CUDA device: tokens do not depend on the tier that KV came from, and KV that was zeroed
changes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hicache.config import HiCacheConfig
from hicache.engine import Engine, create_engine
from tests.engine.world import drive, random_tokens, settle, tiers

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def engine(folder: Path, path: str = "auto") -> Engine:
    config = HiCacheConfig.model_validate(
        {
            "page_size": 16,
            "device": {"tokens": 4096},
            "host": {"tokens": 8192},
            "storage": {"type": "file", "options": {"path": str(folder), "capacity": "1GiB", "free_space_floor": 0}},
            "break_even": {"mode": "always"},
            "load_back_threshold_tokens": 1,
            "prefetch": {"threshold_tokens": 1},
            "transfer": {"path": path},
        }
    )
    return create_engine(config, device="cuda")


def answer(engine: Engine, prompt: list[int]) -> tuple[list[int], tuple[int, int, int]]:
    """Tokens of one request, and how many of its prompt came from L1, L2 and L3."""
    rid = engine.submit(prompt, 16, ignore_eos=True)
    record = drive(engine)[rid]
    assert record.error is None
    return list(record.output_tokens), (record.device_hit_tokens, record.host_hit_tokens, record.storage_hit_tokens)


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_tokens_are_the_same_from_every_tier(tmp_path: Path, path: str) -> None:
    prompt = random_tokens(1500, seed=1)
    with engine(tmp_path / "store", path) as first:
        cold, hits = answer(first, prompt)
        assert hits == (0, 0, 0)
        settle(first)
        warm, hits = answer(first, prompt)
        assert warm == cold and hits[0] > 1400
        settle(first)
        tiers(first).evict(tiers(first).tree.device_evictable_pages)
        loaded, hits = answer(first, prompt)
        assert loaded == cold and hits[1] > 1400
        settle(first)
    with engine(tmp_path / "store", path) as second:
        stored, hits = answer(second, prompt)
        assert stored == cold and hits[2] > 1400


def test_zeroed_kv_changes_the_tokens(tmp_path: Path) -> None:
    prompt = random_tokens(800, seed=2)
    with engine(tmp_path / "store") as run:
        cold, _ = answer(run, prompt)
        settle(run)
        for layer in tiers(run).device.blocks.layers:
            for region in layer:
                region.zero_()
        assert answer(run, prompt)[0] != cold

"""The reference engine on a CUDA device: tokens do not depend on the tier of the KV, zeroed KV changes them, and a step
waits for the device once, for its tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hicache.config import HiCacheConfig
from hicache_lab.engine import Batch, Engine, Model, Output, RequestRecord, Sampling, create_engine
from lab.tests.engine.world import WAIT_S, drive, random_tokens, settle, tiers

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
    """Return the tokens of one request, and how many tokens of its prompt came from L1, L2 and L3."""
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


@contextmanager
def host_waits(mode: str) -> Iterator[None]:
    """Let torch raise ("error") or not ("default") if the host waits for the device."""
    before = ("default", "warn", "error")[torch.cuda.get_sync_debug_mode()]
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class OneWait:
    """A model of which only the output may wait for the device. Counts these waits."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.waits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def compute(self, batch: Batch) -> Output:
        output = self._model.compute(batch)
        wait = output.wait

        def counted() -> float | None:
            self.waits += 1
            with host_waits("default"):
                return wait()

        output.wait = counted  # type: ignore[method-assign]
        return output


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_a_step_waits_for_the_device_only_for_its_tokens(tmp_path: Path, path: str) -> None:
    prompt = random_tokens(1500, seed=3)
    with engine(tmp_path / "store", path) as run:
        cold, _ = answer(run, prompt)  # first allocations and compilations may wait
        settle(run)
        tiers(run).evict(tiers(run).tree.device_evictable_pages)
        model = OneWait(run.model)
        run.model = cast("Model", model)
        run.submit(random_tokens(700, seed=4), 16, ignore_eos=True, sampling=Sampling(0.7, top_k=40))
        loaded = run.submit(prompt, 16, ignore_eos=True)
        records: dict[str, RequestRecord] = {}
        steps, deadline = 0, time.monotonic() + WAIT_S
        with host_waits("error"):
            while run.waiting or run.running:
                records |= {update.rid: update.record for update in run.step() if update.record is not None}
                steps += run.worked
                assert time.monotonic() < deadline
        record = records[loaded]
        assert record.error is None and record.host_hit_tokens > 1400 and list(record.output_tokens) == cold
        assert steps <= model.waits <= 2 * steps  # a step has at most a prefill and a decode


def test_a_forbidden_wait_is_detected(tmp_path: Path) -> None:
    with engine(tmp_path / "store") as run, pytest.raises(RuntimeError, match="synchroniz"):
        run.submit(random_tokens(100, seed=5), 16)
        with host_waits("error"):
            while run.waiting or run.running:
                run.step()

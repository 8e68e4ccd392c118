"""An EngineCache over the memory of a CUDA device, as under SGLang.

    make gpu
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.cache.test_engine_cache import STEPS, engine_of, step
from tests.seeds import seeds

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("seed", seeds(2))
def test_random_requests_get_their_own_bytes_on_a_device(policy: str, seed: int, tmp_path: Path) -> None:
    draw = random.Random(f"cuda {policy} {seed}")
    storage = {"type": "file", "options": {"path": str(tmp_path), "free_space_floor": 0}}
    with engine_of(device="cuda", host={"tokens": 100}, write_policy=policy, storage=storage) as engine:
        for _ in range(STEPS):
            step(engine, draw)
            engine.cache.poll()
            engine.check()

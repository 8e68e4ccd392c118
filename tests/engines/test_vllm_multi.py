"""HiCacheConnector under vLLM's MultiConnector, beside a connector with a handshake of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for

from .process import EngineProcess
from .prompts import prompt, write_config
from .vllm_engine import hicache_connector, vllm_environ, vllm_options

PROMPT_TOKENS, CACHED_TOKENS = 410, 384
# A counter of copies from host memory, for each kind of model.
LOADED = {"llama": "vllm:hicache_loaded_bytes", "hybrid_model": "vllm:kv_offload_tiering_chunk_hits"}


@pytest.mark.parametrize(("model", "place"), [("llama", 0), ("hybrid_model", 1)])
def test_a_prompt_is_served_from_host_memory_in_the_second_place_and_in_the_first(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, place: int
) -> None:
    ours = hicache_connector(write_config(tmp_path / "hicache.yaml", host={"size": "64MiB"}))
    module = "tests.engines.vllm_neighbour"
    children: list[dict[str, Any]] = [ours]
    children.insert(place, {"kv_connector": "Neighbour", "kv_connector_module_path": module, "kv_role": "kv_both"})
    multi = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    options = vllm_options(request.getfixturevalue(model), kv_transfer_config=multi)
    environ = vllm_environ(processes=False, zeros=tmp_path / "zeros")
    with EngineProcess("tests.engines.vllm_engine", options, folder=tmp_path, environ=environ) as engine:
        (cold,) = engine.call("generate", prompts=[prompt("multi", PROMPT_TOKENS)])
        wait_for(lambda: bool(engine.call("reset")))
        (warm,) = engine.call("generate", prompts=[prompt("multi", PROMPT_TOKENS)])
        metrics = engine.call("metrics")
        log = engine.log.read_text()
    assert (cold["cached"], warm) == (0, {"tokens": cold["tokens"], "cached": CACHED_TOKENS})
    assert metrics[LOADED[model]] > 0
    assert "Turning off hybrid kv cache manager" not in log

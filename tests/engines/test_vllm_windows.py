"""A model that mixes sliding windows with full attention, on HiCacheConnector: vLLM keeps the KV of all its tokens."""

from __future__ import annotations

from pathlib import Path

from tests.waiting import wait_for

from .process import EngineProcess
from .prompts import prompt, write_config
from .vllm_engine import hicache_connector, vllm_environ, vllm_options


def test_a_model_with_windows_is_served_with_one_warning_that_recommends_the_tier(
    hybrid_model: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "hicache.yaml", host={"tokens": 4096})
    options = vllm_options(hybrid_model, kv_transfer_config=hicache_connector(config))
    with EngineProcess("tests.engines.vllm_engine", options, folder=tmp_path, environ=vllm_environ()) as engine:
        (cold,) = engine.call("generate", prompts=[prompt("windows")])
        wait_for(lambda: bool(engine.call("reset")))
        (warm,) = engine.call("generate", prompts=[prompt("windows")])
        log = engine.log.read_text()
    assert (cold["cached"], warm) == (0, {"tokens": cold["tokens"], "cached": 256})
    assert log.count("attend only to the last 128 tokens") == 1

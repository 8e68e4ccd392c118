"""HiCacheConnector on a model with sliding windows: what vLLM's metrics and the log say of it.

`tests/models` compares the tokens of many kinds of models from host memory, from files and with zeros.
"""

from __future__ import annotations

from pathlib import Path

from tests.waiting import wait_for

from .process import EngineProcess
from .prompts import prompt, write_config
from .vllm_engine import hicache_connector, vllm_environ, vllm_options

PROMPT_TOKENS, CACHED_TOKENS = 410, 384


def test_vllm_counts_hits_in_host_memory_and_the_log_says_once_what_was_chosen_and_what_has_no_effect(
    hybrid_model: Path, tmp_path: Path
) -> None:
    store = {"path": str(tmp_path / "pages"), "capacity": "1GiB", "free_space_floor": 0}
    config = write_config(
        tmp_path / "hicache.yaml", host={"size": "64MiB"}, storage={"type": "file", "options": store}
    )
    options = vllm_options(hybrid_model, kv_transfer_config=hicache_connector(config))
    environ = vllm_environ(zeros=tmp_path / "zeros")
    with EngineProcess("tests.engines.vllm_engine", options, folder=tmp_path, environ=environ) as engine:
        (cold,) = engine.call("generate", prompts=[prompt("windows", PROMPT_TOKENS)])
        wait_for(lambda: bool(engine.call("reset")))
        (warm,) = engine.call("generate", prompts=[prompt("windows", PROMPT_TOKENS)])
        metrics = engine.call("metrics")
        log = engine.log.read_text()
    assert (cold["cached"], warm) == (0, {"tokens": cold["tokens"], "cached": CACHED_TOKENS})
    assert metrics["vllm:prompt_tokens_cached_by_source host"] == CACHED_TOKENS
    (line,) = [line for line in log.splitlines() if "vLLM's own offloading serves this model" in line]
    assert "(3 x SlidingWindow, 1 x FullAttention): 64.0 MiB of host memory, chunks of 64 tokens" in line
    assert "storage file; entries without effect: break_even" in line


def test_without_the_hybrid_allocator_windows_are_full_attention_with_one_warning(
    hybrid_model: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "hicache.yaml", host={"tokens": 4096})
    options = vllm_options(
        hybrid_model, kv_transfer_config=hicache_connector(config), disable_hybrid_kv_cache_manager=True
    )
    environ = vllm_environ(processes=False)
    with EngineProcess("tests.engines.vllm_engine", options, folder=tmp_path, environ=environ) as engine:
        (cold,) = engine.call("generate", prompts=[prompt("windows")])
        wait_for(lambda: bool(engine.call("reset")))
        (warm,) = engine.call("generate", prompts=[prompt("windows")])
        log = engine.log.read_text()
    assert (cold["cached"], warm) == (0, {"tokens": cold["tokens"], "cached": 256})
    assert log.count("attend only to the last 128 tokens") == 1

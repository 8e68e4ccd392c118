"""HiCacheConnector on models whose layers keep the KV of different tokens: a window, a state, or a draft model's.

For each model, a first process computes prompts and serves them from its host memory; a second process over the same
files serves them from there. `test_zeroed_loads_change_the_tokens` is the control.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for

from .process import EngineProcess
from .prompts import prompt, write_config
from .vllm_engine import hicache_connector, vllm_environ, vllm_options

PROMPT_TOKENS = 410
# The whole chunks of a prompt: pages of 64 tokens with windows, and blocks of 128 that vLLM chooses for the states.
CACHED_TOKENS = 384
NAMES = ("equal", "zeroed")
# The fixture of the model, the arguments of vLLM, and the line about chunks in the log.
KINDS: dict[str, tuple[str, dict[str, object], str]] = {
    "windows": (
        "hybrid_model", {}, "(3 x SlidingWindow, 1 x FullAttention): 64.0 MiB of host memory, chunks of 64 tokens",
    ),
    "states": ("state_model", {"block_size": None, "mamba_cache_mode": "align"}, "chunks of 128 tokens (one block"),
    "draft": ("llama", {}, "chunks of 64 tokens"),
}  # fmt: skip


class Model:
    """A model, its files, and what the first process has answered and logged."""

    def __init__(self, model: Path, options: dict[str, object], chunks: str, folder: Path) -> None:
        self.zeros, self.chunks = folder / "zeros", chunks
        self._model, self._options, self._folder = model, options, folder
        store = {"path": str(folder / "pages"), "capacity": "1GiB", "free_space_floor": 0}
        self._config = write_config(
            folder / "hicache.yaml", host={"size": "64MiB"}, storage={"type": "file", "options": store}
        )
        with self.start() as engine:
            self.cold = {name: serve(engine, name) for name in NAMES}
            wait_for(lambda: bool(engine.call("reset")))
            self.host = serve(engine, "equal")
            self.metrics = engine.call("metrics")
        self.log = engine.log.read_text()

    def start(self) -> EngineProcess:
        options = vllm_options(self._model, kv_transfer_config=hicache_connector(self._config), **self._options)
        environ = vllm_environ(zeros=self.zeros)
        return EngineProcess("tests.engines.vllm_engine", options, folder=self._folder, environ=environ)


def serve(engine: EngineProcess, name: str) -> dict[str, Any]:
    answer: dict[str, Any] = engine.call("generate", prompts=[prompt(name, PROMPT_TOKENS)])[0]
    return answer


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name, options, chunks = KINDS[request.param]
    if request.param == "draft":
        head = str(request.getfixturevalue("eagle"))
        options = {"speculative_config": {"method": "eagle", "model": head, "num_speculative_tokens": 2}}
    return Model(request.getfixturevalue(name), options, chunks, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def second(model: Model) -> Iterator[EngineProcess]:
    with model.start() as engine:
        yield engine


def test_a_prompt_that_the_device_has_lost_is_served_from_host_memory(model: Model) -> None:
    assert all(answer["cached"] == 0 for answer in model.cold.values())
    assert model.host == {"tokens": model.cold["equal"]["tokens"], "cached": CACHED_TOKENS}
    assert model.metrics["vllm:prompt_tokens_cached_by_source host"] == CACHED_TOKENS


def test_the_log_says_once_which_chunks_were_chosen_and_what_has_no_effect(model: Model) -> None:
    (line,) = [line for line in model.log.splitlines() if "vLLM's own offloading serves this model" in line]
    assert model.chunks in line and "storage file; entries without effect: break_even" in line


def test_a_new_process_serves_the_prompt_from_files(model: Model, second: EngineProcess) -> None:
    assert serve(second, "equal") == {"tokens": model.cold["equal"]["tokens"], "cached": CACHED_TOKENS}
    assert second.call("metrics")["vllm:prompt_tokens_cached_by_source disk"] == CACHED_TOKENS


def test_zeroed_loads_change_the_tokens(model: Model, second: EngineProcess) -> None:
    model.zeros.touch()
    answer = serve(second, "zeroed")
    model.zeros.unlink()
    assert answer["cached"] == CACHED_TOKENS and answer["tokens"] != model.cold["zeroed"]["tokens"]


def test_without_the_hybrid_allocator_windows_are_full_attention_with_one_warning(
    hybrid_model: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "hicache.yaml", host={"tokens": 4096})
    options = vllm_options(
        hybrid_model, kv_transfer_config=hicache_connector(config), disable_hybrid_kv_cache_manager=True
    )
    with EngineProcess("tests.engines.vllm_engine", options, folder=tmp_path, environ=vllm_environ()) as engine:
        (cold,) = engine.call("generate", prompts=[prompt("windows")])
        wait_for(lambda: bool(engine.call("reset")))
        (warm,) = engine.call("generate", prompts=[prompt("windows")])
        log = engine.log.read_text()
    assert (cold["cached"], warm) == (0, {"tokens": cold["tokens"], "cached": 256})
    assert log.count("attend only to the last 128 tokens") == 1

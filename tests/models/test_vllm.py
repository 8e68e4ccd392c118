"""Each model of the table on vLLM, through HiCacheConnector and through HiCacheTier behind vLLM's own offloading.

A prompt is computed, then served from host memory, from files in a new process, and from zeroed memory. The last is the
control: with zeros in place of the stored KV the model gives other tokens, so a hit is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.process import EngineFailed, EngineProcess
from tests.engines.prompts import prompt, write_config
from tests.engines.vllm_engine import BLOCK_TOKENS, HOOKS, hicache_connector, vllm_environ, vllm_options

from .table import CACHED_TOKENS, MODELS, NOT_STARTED, PROMPT_TOKENS, Model, save_model

# A busy machine imports vLLM in a minute, and starts each of five engines in half a minute.
pytestmark = pytest.mark.timeout(900)
PLAY_TIMEOUT_S = 400.0
PAGE_TOKENS = 2 * BLOCK_TOKENS
TOKENS = 16


class Served:
    """A model, with the output tokens of vLLM alone for a computed prompt (`cold`) and for a cached one (`hit`)."""

    def __init__(self, row: Model, folder: Path, runner: EngineProcess) -> None:
        self._row, self._folder, self._runner = row, folder, runner
        self._model = folder / "model"
        save_model(row, self._model)
        self._prompt = prompt("one of the table", CACHED_TOKENS if self._row.decodes_hits else PROMPT_TOKENS)
        (answer,) = self.play(["generate"])
        self.hit = answer["tokens"]
        if self._row.decodes_hits:
            self._prompt.append(self.hit.pop(0))
            (answer,) = self.play(["generate"])
        self.cold = answer["tokens"][: len(self.hit)]

    def play(self, steps: list[str], path: str | None = None) -> list[dict[str, Any]]:
        """Run these steps in a new engine with HiCache as `path`. Return the answer to the prompt at each
        `generate`."""
        options = vllm_options(self._model, **self._row.options)
        if path is not None:
            options |= {"kv_transfer_config": getattr(self, f"_{path}")(), "worker_extension_cls": HOOKS}
        asked: dict[str, Any] = {"prompts": [self._prompt], "tokens": TOKENS}
        if self._row.has_adapter:
            asked["lora"] = str(self._model / "adapter")
        named = [(step, asked if step == "generate" else {}) for step in steps]
        answers = self._runner.call("play", engine=options, steps=named, timeout_s=PLAY_TIMEOUT_S)
        return [answer[0] for step, answer in zip(steps, answers, strict=True) if step == "generate"]

    def _connector(self) -> dict[str, object]:
        config = self._folder / "connector.yaml"
        return hicache_connector(write_config(config, host={"size": "64MiB"}, storage=self._storage("connector")))

    def _tier(self) -> dict[str, object]:
        config = self._folder / "tier.yaml"
        config.write_text(json.dumps({"storage": self._storage("tier")}))
        tier = {"type": "HiCacheTier", "module_path": "hicache.integrations.vllm_tier", "config": str(config)}
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64 << 20, "secondary_tiers": [tier]}
        if not self._row.has_states:
            extra["blocks_per_chunk"] = PAGE_TOKENS // BLOCK_TOKENS
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    def _storage(self, name: str) -> dict[str, object]:
        options = {"path": str(self._folder / name), "capacity": "1GiB", "free_space_floor": 0}
        return {"type": "file", "options": options}


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("runner")
    environ = vllm_environ(processes=False, zeros=folder / "zeros")
    with EngineProcess("tests.models.runner", {}, folder=folder, environ=environ) as runner:
        yield runner


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xdist_group(name), *([] if MODELS[name].in_ci else [pytest.mark.all_models])]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks(name)) for name in MODELS])
def served(request: pytest.FixtureRequest, runner: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(MODELS[request.param], tmp_path_factory.mktemp("model"), runner)


@pytest.mark.parametrize("path", ["connector", "tier"])
def test_tokens_are_those_of_vllm_alone_cold_from_host_memory_and_from_files_unless_they_are_zeroed(
    served: Served, path: str
) -> None:
    cold, host = served.play(["generate", "reset", "generate"], path)
    files, zeroed = served.play(["generate", "reset", "zero", "generate"], path)
    assert (cold["tokens"][: len(served.cold)], cold["cached"]) == (served.cold, 0)
    for hit in (host, files):
        assert (hit["tokens"][: len(served.hit)], hit["cached"]) == (served.hit, CACHED_TOKENS)
    assert zeroed["cached"] == CACHED_TOKENS and zeroed["tokens"][: len(served.hit)] != served.hit


@pytest.mark.all_models
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in NOT_STARTED])
def test_vllm_alone_does_not_start_the_models_that_the_page_lists_as_not_run(
    name: str, runner: EngineProcess, tmp_path: Path
) -> None:
    row, error = NOT_STARTED[name]
    with pytest.raises(EngineFailed, match=re.escape(error)):
        Served(row, tmp_path, runner)

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
import torch

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
    """A model, with the tokens of vLLM alone after a computed prompt (`cold`) and after a cached one (`hit`)."""

    def __init__(self, row: Model, folder: Path, runner: EngineProcess) -> None:
        self._row, self._folder, self._runner = row, folder, runner
        self._model, self._logged = folder / "model", len(runner.log.read_text())
        save_model(row, self._model)
        self._prompt = prompt("one of the table", CACHED_TOKENS if row.decodes_hits else PROMPT_TOKENS)
        ((self.hit, _),) = self.play(["generate"], tokens=TOKENS + row.decodes_hits)
        self.cold = self.hit
        if row.decodes_hits:
            self._prompt.append(self.hit.pop(0))
            ((self.cold, _),) = self.play(["generate"])

    def play(self, steps: list[str], path: str | None = None, tokens: int = TOKENS) -> list[tuple[list[int], int]]:
        """Run these steps in a new engine with HiCache as `path`. Return for each `generate` the output tokens and how
        many tokens of the prompt were cached."""
        options = vllm_options(self._model, **self._row.options)
        if self._row.has_head:
            head = {"method": "eagle", "model": str(self._model / "head"), "num_speculative_tokens": 2}
            options["speculative_config"] = head
        if path is not None:
            options |= {"kv_transfer_config": getattr(self, f"_{path}")(), "worker_extension_cls": HOOKS}
        asked: dict[str, Any] = {"prompts": [self._prompt], "tokens": tokens}
        if self._row.has_adapter:
            asked["lora"] = str(self._model / "adapter")
        named = [(step, asked if step == "generate" else {}) for step in steps]
        answers = self._runner.call("play", engine=options, steps=named, timeout_s=PLAY_TIMEOUT_S)
        return [(each["tokens"], each["cached"]) for (each,) in filter(None, answers)]

    def chunks(self) -> set[int]:
        """Return the sizes of chunks, in tokens, that HiCacheConnector has named in the log."""
        log = self._runner.log.read_text()[self._logged :]
        return {int(tokens) for tokens in re.findall(r"vLLM's own offloading serves .* chunks of (\d+) tokens", log)}

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


def rows() -> list[Any]:
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    lacks = pytest.mark.skipif(not has_avx512, reason="vLLM's fp8 KV needs a CPU with AVX-512")
    return [
        pytest.param(name, marks=[*[pytest.mark.all_models] * (not row.in_ci), *[lacks] * row.needs_avx512])
        for name, row in MODELS.items()
    ]


@pytest.mark.parametrize("name", rows())
def test_a_model_gives_the_tokens_of_vllm_alone_with_hits_of_each_tier_and_others_if_they_are_zeroed(
    name: str, runner: EngineProcess, tmp_path: Path
) -> None:
    served = Served(MODELS[name], tmp_path, runner)
    expected = [(served.cold, 0), (served.hit, CACHED_TOKENS), (served.hit, CACHED_TOKENS)]
    for path in ("connector", "tier"):
        cold, host = served.play(["generate", "reset", "generate"], path)
        files, zeroed = served.play(["generate", "reset", "zero", "generate"], path)
        assert [cold, host, files] == expected, path
        assert zeroed[1] == CACHED_TOKENS and zeroed[0] != served.hit, path
    assert served.chunks() == {MODELS[name].chunk_tokens} - {0}


@pytest.mark.all_models
@pytest.mark.parametrize("name", NOT_STARTED)
def test_vllm_alone_does_not_start_the_models_that_the_page_lists_as_not_run(
    name: str, runner: EngineProcess, tmp_path: Path
) -> None:
    row, error = NOT_STARTED[name]
    with pytest.raises(EngineFailed, match=re.escape(error)):
        Served(row, tmp_path, runner)

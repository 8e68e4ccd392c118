"""SGLang with HiCache as its tree, for each kind of KV that SGLang has on a CPU, with adapters and salts, with overlap
scheduling, and with two processes of tensor parallelism. Tokens of hits equal those that were computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.models.table import ADAPTER_RANK, MODELS, Model, save_adapter, save_model
from tests.waiting import wait_for

from .model import HEAD_DIM
from .prompts import prompts
from .sglang_engine import PAGE_TOKENS
from .sglang_tree import CACHED, TreeProcess, files, push_out, tiers, tokens
from .stored_pages import page_files, zero

# The pages of a prompt of 300 tokens with its output of 8, whose last token is not computed.
WRITTEN_PAGES = (300 + 8 - 1) // PAGE_TOKENS
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "original_max_position_embeddings": 4096,
         "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
_DEEPSEEK = MODELS["DeepSeek-V2"]
# What SGLang reads and transformers does not write, and the only positions that it has on a CPU.
_MORE = {"rope_parameters": _YARN, "moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "greedy"}
KINDS: dict[str, Model] = {
    "experts": MODELS["Mixtral"],
    "MLA": replace(_DEEPSEEK, entries={**_DEEPSEEK.entries, **_MORE}),
    "narrow values": replace(MODELS["Llama"], entries={"v_head_dim": HEAD_DIM // 2}),
    "overlap scheduling": MODELS["Llama"],
    "two processes": MODELS["Llama"],
}
OPTIONS: dict[str, dict[str, object]] = {
    "overlap scheduling": {"disable_overlap_schedule": False}, "two processes": {"tp_size": 2},
}
# Otherwise SGLang refuses more processes than NUMA nodes.
_TWO = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TreeProcess]:
    environ = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.engines.sglang_models"}
    with TreeProcess(tmp_path_factory.mktemp("sglang-tree-kinds"), environ) as process:
        yield process


def saved(kind: str, folder: Path) -> Path:
    save_model(KINDS[kind], folder)
    if kind == "narrow values":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NarrowValuesForCausalLM"]}))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_equal_from_each_tier(engine: TreeProcess, kind: str, tmp_path: Path) -> None:
    """The control: with zeroed pages they are not."""
    model, pages, asked = saved(kind, tmp_path / "model"), tmp_path / "pages", prompts(kind, 2)
    options: dict[str, Any] = {"environ": _TWO if kind == "two processes" else {}, **OPTIONS.get(kind, {})}
    ranks = 2 if kind == "two processes" else 1
    config = {"host": {"size": "64MiB"}, **files(pages)}

    engine.begin(model, config, **options)
    cold = engine.ask(asked)
    assert tiers(cold) == [{}] * 2
    expected = tokens(cold)
    wait_for(lambda: len(page_files(pages)) == ranks * 2 * WRITTEN_PAGES)
    found = engine.ask(asked)
    assert (tokens(found), tiers(found)) == (expected, [{"device": CACHED}] * 2)
    push_out(engine)
    found = engine.ask(asked)
    assert (tokens(found), tiers(found)) == (expected, [{"host": CACHED}] * 2)
    engine.begin(model, config, **options)
    found = engine.ask(asked)
    assert (tokens(found), tiers(found)) == (expected, [{"storage": CACHED}] * 2)

    for path in page_files(pages):
        zero(path)
    engine.begin(model, config, **options)
    found = engine.ask(asked)
    assert tiers(found) == [{"storage": CACHED}] * 2
    assert tokens(found) != expected


def test_adapters_and_salts_share_no_kv(engine: TreeProcess, tmp_path: Path) -> None:
    """Nor do other weights of an adapter under the same name."""
    model, asked = tmp_path / "model", prompts("variants", 1)[0]
    save_model(MODELS["Llama with a LoRA adapter"], model)
    options: dict[str, Any] = {
        "enable_lora": True, "lora_backend": "torch_native", "max_lora_rank": ADAPTER_RANK,
        "lora_paths": {"adapter": str(model / "adapter")}, "max_total_tokens": 2048,
    }
    variants = [{}, {"lora_path": "adapter"}, {"extra_key": "a"}, {"extra_key": "b"}, {"cache_salt": "a"}]
    requests: list[dict[str, object]] = [{"prompt": asked, **variant} for variant in variants]
    engine.begin(model, files(tmp_path / "pages"), **options)
    cold = engine.ask_together(requests)
    assert tiers(cold) == [{}] * len(variants)
    expected = tokens(cold)
    assert expected[1] != expected[0] == expected[2]
    found = engine.ask_together(requests)
    assert (tokens(found), tiers(found)) == (expected, [{"device": CACHED}] * len(variants))
    push_out(engine)
    found = engine.ask_together(requests)
    assert (tokens(found), tiers(found)) == (expected, [{"host": CACHED}] * len(variants))
    engine.begin(model, files(tmp_path / "pages"), **options)
    found = engine.ask_together(requests)
    assert (tokens(found), tiers(found)) == (expected, [{"storage": CACHED}] * len(variants))
    shutil.rmtree(model / "adapter")
    save_adapter(model / "adapter", seed=1)
    engine.begin(model, files(tmp_path / "pages"), **options)
    found = engine.ask_together(requests[:2])
    assert tokens(found)[0] == expected[0]
    assert tokens(found)[1] != expected[1]
    assert tiers(found)[1] == {}

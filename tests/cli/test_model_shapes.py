"""The KV of models: the table agrees with the published configurations, and files with those entries are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hicache.cli.model_shapes import PRESETS, model_shape
from hicache.errors import ConfigError

# Entries of the published `config.json`, and the bytes of a token in bf16.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "llama-3.1-8b": ({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                      "hidden_size": 4096, "torch_dtype": "bfloat16"}, 128 << 10),
    "qwen3-8b": ({"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                  "hidden_size": 4096, "torch_dtype": "bfloat16"}, 144 << 10),
    "gpt-oss-20b": ({"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                     "hidden_size": 2880}, 48 << 10),
    "deepseek-v3": ({"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
                     "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}, 61 * 576 * 2),
}

KIB = 1024
# KV bytes per token of one rank: 2 x layers x KV heads x head dim x 2 bytes, or layers x (512 + 64) x 2 for MLA.
KV_BYTES = {
    "tiny": 128,
    "qwen2.5-7b": 56 * KIB,
    "llama-3.1-8b": 128 * KIB,
    "llama-3.1-70b-tp8": 40 * KIB,
    "llama-3.1-70b": 320 * KIB,
    "qwen3-8b": 144 * KIB,
    "qwen3-32b": 256 * KIB,
    "gpt-oss-20b": 48 * KIB,
    "gpt-oss-120b": 72 * KIB,
    "deepseek-v3": 70_272,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_model_and_its_published_configuration_have_the_same_kv(name: str, tmp_path: Path) -> None:
    entries, token_bytes = PUBLISHED[name]
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": entries} if name == "gpt-oss-20b" else entries))
    assert model_shape(name).token_bytes == model_shape(name.upper()).token_bytes == token_bytes
    for path in (folder, folder / "config.json"):
        assert (model_shape(str(path)).name, model_shape(str(path)).token_bytes) == ("a-model", token_bytes)
    assert model_shape(name, "float8_e4m3fn").token_bytes * 2 == token_bytes


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"num_hidden_layers": "x"}', "[" * 100_000,
                                  '{"num_hidden_layers": 2, "num_attention_heads": 0, "hidden_size": 8}'])
def test_a_file_without_attention_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="does not describe attention"):
        model_shape(str(tmp_path))
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b"):
        model_shape(str(tmp_path / "none"))


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_token_has_as_many_bytes_as_in_the_model(name: str) -> None:
    assert replace(PRESETS[name], page_size=64).token_bytes == KV_BYTES[name]


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_page_is_made_of_whole_words_at_every_page_size(name: str) -> None:
    assert all(replace(PRESETS[name], page_size=size).block_bytes % 8 == 0 for size in (1, 16, 64, 256))

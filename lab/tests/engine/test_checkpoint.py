"""Checkpoints in Hugging Face format: loading, and the errors for unsupported or broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hicache.errors import ConfigError
from hicache_lab.engine import BUNDLED_MODEL, load_checkpoint, load_tokenizer
from hicache_lab.engine.checkpoint import parse_config
from lab.tests.engine.world import TINY, random_tensors

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": TINY.vocab_size,
    "hidden_size": TINY.hidden_size,
    "intermediate_size": TINY.intermediate_size,
    "num_hidden_layers": TINY.layers,
    "num_attention_heads": TINY.heads,
    "num_key_value_heads": TINY.kv_heads,
    "head_dim": TINY.head_dim,
    "max_position_embeddings": TINY.context_tokens,
    "rms_norm_eps": TINY.rms_norm_eps,
    "tie_word_embeddings": False,
    "eos_token_id": [0, 1],
}


def write_model(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: object) -> Path:
    """Write a checkpoint of one weight file. `changes` replace entries of its configuration."""
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | changes))
    save_file(tensors or random_tensors(TINY), folder / "model.safetensors")
    return folder


def shard(folder: Path) -> None:
    """Cut the weight file into two shards with an index."""
    tensors = random_tensors(TINY)
    names = sorted(tensors)
    half = len(names) // 2
    save_file({name: tensors[name] for name in names[:half]}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[half:]}, folder / "b.safetensors")
    shards = {name: "a.safetensors" if i < half else "b.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / "model.safetensors").unlink()


def test_a_checkpoint_of_one_file_is_read_whole(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_model(tmp_path))
    assert checkpoint.config.eos_tokens == {0, 1}
    assert {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()} == TINY.tensor_shapes()
    assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in random_tensors(TINY).items())


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    whole = load_checkpoint(write_model(tmp_path))
    shard(tmp_path)
    sharded = load_checkpoint(tmp_path)
    assert sharded.config == whole.config and sharded.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(sharded.tensors[name], tensor) for name, tensor in whole.tensors.items())


def test_the_fingerprint_follows_every_weight_and_the_configuration(tmp_path: Path) -> None:
    first = load_checkpoint(write_model(tmp_path)).fingerprint
    assert len(first) == 64 and load_checkpoint(tmp_path).fingerprint == first
    changed = random_tensors(TINY)
    changed["model.norm.weight"][0] += 1
    seen = {first, load_checkpoint(write_model(tmp_path, changed)).fingerprint}
    seen.add(load_checkpoint(write_model(tmp_path, rms_norm_eps=1e-6)).fingerprint)
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "mistral"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only supports LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"vocab_size": None}, "vocab_size must be an integer"),
        ({"num_hidden_layers": 0}, "layers must be a positive integer"),
        ({"num_key_value_heads": 4}, "evenly"),
        ({"head_dim": 15}, "odd"),
        ({"rope_theta": "large"}, "rope_theta must be a number"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_an_unsupported_model_is_rejected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(HF_CONFIG | changes)


def test_optional_entries_have_the_defaults_of_the_format() -> None:
    required = {name: value for name, value in HF_CONFIG.items() if name not in ("num_key_value_heads", "head_dim")}
    config = parse_config(required | {"eos_token_id": 2, "rope_parameters": {"rope_theta": 500000.0}})
    assert (config.kv_heads, config.head_dim) == (TINY.heads, TINY.hidden_size // TINY.heads)
    assert config.eos_tokens == {2} and config.rope_theta == 500000.0


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_checkpoint(tmp_path)
    write_model(tmp_path)
    shard(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors: no such file"):
        load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors and .* are missing"):
        load_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["../a.safetensors", "/a.safetensors", "a.bin"])
def test_an_index_names_only_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ConfigError, match="not the name of a safetensors file"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_a_broken_configuration_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match="JSON"):
        load_checkpoint(tmp_path)


def test_broken_weights_and_tokenizers_are_rejected(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors at all")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(TINY)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"1 tensors are missing, the first is 'model\.layers\.1\.mlp\.up_proj"):
        load_checkpoint(write_model(tmp_path, tensors))
    for bad in (torch.ones(TINY.hidden_size + 1), torch.ones(TINY.hidden_size, dtype=torch.int32)):
        with pytest.raises(ConfigError, match=r"model\.norm\.weight is"):
            load_checkpoint(write_model(tmp_path, random_tensors(TINY) | {"model.norm.weight": bad}))


def test_the_bundled_model_loads_and_its_tokenizer_round_trips() -> None:
    checkpoint, tokenizer = load_checkpoint(BUNDLED_MODEL), load_tokenizer(BUNDLED_MODEL)
    assert tokenizer.get_vocab_size() == checkpoint.config.vocab_size
    text = "The hussars rode out at dawn."
    assert tokenizer.decode(tokenizer.encode(text).ids).strip() == text

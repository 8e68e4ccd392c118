"""Small models with random weights, saved in the format that engines read.

`INITIALIZER_RANGE` is large, so that the output depends on attention. With the usual 0.02, a model generates the same
tokens with any KV, and each comparison of tokens would pass.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

INITIALIZER_RANGE = 0.15
VOCABULARY = 1024
LAYERS = 4
KV_HEADS = 2
HEAD_DIM = 32
# The sliding window of a hybrid model, in tokens.
WINDOW = 128
_HIDDEN = 128
_POSITIONS_MAX = 4096


_WINDOWS = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]
_STATES = ["conv", "full_attention"] * (LAYERS // 2)
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "windows": (
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": HEAD_DIM, "layer_types": _WINDOWS},
    ),
    "states": (
        "Lfm2Config",  # vLLM reads the names of its checkpoints
        {"layer_types": _STATES, "block_multiple_of": 32, "block_dim": _HIDDEN, "conv_dim": _HIDDEN},
    ),
}


def save_eagle(folder: Path, target: Path) -> Path:
    """Save an EAGLE head for the Llama in `target`: one of its layers with other weights. Return `folder`."""
    with warnings.catch_warnings():  # from transformers and its imports
        warnings.simplefilter("ignore")
        from safetensors.torch import save_file  # noqa: PLC0415
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

        config = AutoConfig.from_pretrained(target, num_hidden_layers=1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            layers = AutoModelForCausalLM.from_config(config, dtype=torch.float32).model.layers
            weights = {f"layers.{name}": value for name, value in layers.state_dict().items()}
            weights["fc.weight"] = torch.randn(_HIDDEN, 2 * _HIDDEN) * INITIALIZER_RANGE
    del weights["layers.0.input_layernorm.weight"]  # an EAGLE head has none
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return folder


def save_model(folder: Path, kind: str = "llama", *, seed: int = 0) -> Path:
    """Save a Llama, a Gemma 3 with a sliding window in each layer but the last (`windows`), or an LFM2 with a state in
    every other layer (`states`). Return `folder`.

    The same arguments give the same bytes, in float32; an engine converts them to its `dtype`. There is no tokenizer:
    tests use token ids.
    """
    with warnings.catch_warnings():  # from transformers and its imports
        warnings.simplefilter("ignore")
        import transformers  # noqa: PLC0415

        name, entries = _KINDS[kind]
        config = getattr(transformers, name)(
            vocab_size=VOCABULARY,
            hidden_size=_HIDDEN,
            intermediate_size=2 * _HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=2 * KV_HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=_POSITIONS_MAX,
            initializer_range=INITIALIZER_RANGE,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **entries,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    return folder

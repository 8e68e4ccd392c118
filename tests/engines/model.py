"""Small models with random weights, saved in the format that engines read.

`INITIALIZER_RANGE` is large, so that the output depends on attention. With the usual 0.02, a model generates the same
tokens with any KV, and each comparison of tokens would pass.
"""

from __future__ import annotations

import warnings
from pathlib import Path

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


def save_windowed(folder: Path) -> Path:
    """Save a Cohere 2 with a sliding window in each layer but the last, as a model for which SGLang makes two pools.
    Return `folder`. As `save_model` otherwise."""
    with warnings.catch_warnings():  # from transformers and its imports
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, Cohere2Config  # noqa: PLC0415

        config = Cohere2Config(
            vocab_size=VOCABULARY,
            hidden_size=_HIDDEN,
            intermediate_size=2 * _HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=2 * KV_HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=_POSITIONS_MAX,
            initializer_range=INITIALIZER_RANGE,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            logit_scale=1.0,
            sliding_window=WINDOW,
            layer_types=["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        )
        # SGLang reads these for models that it does not know as hybrid.
        config.is_hybrid_swa, config.hybrid_layer_pattern = True, [1] * (LAYERS - 1) + [0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    return folder


def save_model(folder: Path, *, seed: int = 0, hybrid: bool = False) -> Path:
    """Save a Llama, or with `hybrid` a Gemma 3 with a sliding window in each layer but the last. Return `folder`.

    The same arguments give the same bytes, in float32; an engine converts them to its `dtype`. There is no tokenizer:
    tests use token ids.
    """
    with warnings.catch_warnings():  # from transformers and its imports
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig  # noqa: PLC0415

        config = (Gemma3TextConfig if hybrid else LlamaConfig)(
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
            **({"sliding_window": WINDOW, "query_pre_attn_scalar": HEAD_DIM} if hybrid else {}),
        )
        if hybrid:
            config.layer_types = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    return folder

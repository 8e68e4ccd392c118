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
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "words": ("LlamaConfig", {"vocab_size": 1 << 15}),
    "windows": (
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": HEAD_DIM, "layer_types": _WINDOWS},
    ),
    # SGLang reads the last two entries for models that it does not know as hybrid.
    "pools": (
        "Cohere2Config",
        {"sliding_window": WINDOW, "layer_types": _WINDOWS, "tie_word_embeddings": True, "logit_scale": 1.0,
         "is_hybrid_swa": True, "hybrid_layer_pattern": [1] * (LAYERS - 1) + [0]},
    ),
}


def save_model(folder: Path, kind: str = "llama", *, seed: int = 0) -> Path:
    """Save a Llama, one with 32,768 token ids (`words`), a Gemma 3 with a sliding window in each layer but the last
    (`windows`), or a Cohere 2 with such windows, for which SGLang makes two pools (`pools`). Return `folder`.

    The same arguments give the same bytes, in float32; an engine converts them to its `dtype`. There is no tokenizer:
    tests use token ids.
    """
    with warnings.catch_warnings():  # from transformers and its imports
        warnings.simplefilter("ignore")
        import transformers  # noqa: PLC0415

        name, entries = _KINDS[kind]
        common = {
            "vocab_size": VOCABULARY,
            "hidden_size": _HIDDEN,
            "intermediate_size": 2 * _HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2 * KV_HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": _POSITIONS_MAX,
            "initializer_range": INITIALIZER_RANGE,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        config = getattr(transformers, name)(**common | entries)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    letters = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)

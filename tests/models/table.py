"""Small models of many kinds with random weights, one row each, and how vLLM runs them.

The rows are the table of docs/engines.md. Weights are drawn with a large deviation (see tests/engines/model.py), and
nothing is downloaded.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.engines.model import HEAD_DIM, INITIALIZER_RANGE, KV_HEADS, LAYERS, VOCABULARY, WINDOW

# Tokens that can be cached: whole pages of 64, and whole blocks of states, which are larger.
CACHED_TOKENS = 384
PROMPT_TOKENS = 410
ADAPTER_RANK = 8
_HIDDEN = 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": _HIDDEN, "intermediate_size": 2 * _HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2 * KV_HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096, "initializer_range": INITIALIZER_RANGE, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": _HIDDEN}
_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]}


@dataclass(frozen=True, slots=True)
class Model:
    """A kind of model. `config` is a class of transformers, `entries` are its arguments beyond the common ones, and
    `options` are arguments of `vllm.LLM`, to which `has_adapter` and `has_head` add a LoRA adapter and an EAGLE head.
    `chunk_tokens` are those of vLLM's offloading behind HiCacheConnector, 0 for a model that has HiCache's frames.
    `in_ci` marks the kinds of `make test-engines`.

    `decodes_hits` is for vLLM's MLA on a CPU, which gives other tokens in a decode than in a prefill, without HiCache
    too. So one token is computed after a hit, and compared with vLLM alone decoding it."""

    layers: str
    config: str
    entries: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    has_adapter: bool = False
    has_head: bool = False
    chunk_tokens: int = 0
    decodes_hits: bool = False
    in_ci: bool = False

    @property
    def has_states(self) -> bool:
        return "mamba_cache_mode" in self.options

    @property
    def needs_avx512(self) -> bool:
        """True if vLLM's kernels for this KV need a CPU with AVX-512."""
        return "kv_cache_dtype" in self.options

    @property
    def dtype(self) -> str:
        return str(self.options.get("dtype", "float32"))


# vLLM chooses the size of a block of states.
_STATES = {"mamba_cache_mode": "align", "block_size": None}
MODELS: dict[str, Model] = {
    "Llama": Model("full attention", "LlamaConfig", in_ci=True),
    "Llama with a LoRA adapter": Model(
        "full attention", "LlamaConfig", options={"enable_lora": True, "max_lora_rank": ADAPTER_RANK}, has_adapter=True
    ),
    "Llama with ngram speculation": Model(
        "full attention", "LlamaConfig",
        options={"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
    ),
    "Llama with an EAGLE head": Model(
        "full attention, and the head's", "LlamaConfig", has_head=True, chunk_tokens=64, in_ci=True
    ),
    "Llama with fp8 KV": Model("full attention", "LlamaConfig", options={"kv_cache_dtype": "fp8"}),
    "Qwen3": Model("full attention", "Qwen3Config"),
    "Mixtral": Model("full attention, experts", "MixtralConfig", {"num_local_experts": 4}),
    "Qwen3-MoE": Model("full attention, experts", "Qwen3MoeConfig", _EXPERTS),
    "DeepSeek-V2": Model(
        "MLA, experts", "DeepseekV2Config",
        {  # vLLM supports MLA of these sizes only
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": None,
            "head_dim": 64, "num_key_value_heads": 2 * KV_HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_shared_experts": 1, "moe_intermediate_size": _HIDDEN, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1,
        },
        # On a CPU with AMX, vLLM would choose a backend that fails with float32.
        {"attention_config": {"backend": "CPU_MLA"}}, decodes_hits=True, in_ci=True,
    ),
    "Gemma-3": Model(
        "full attention and sliding windows", "Gemma3TextConfig", {**_WINDOWS, "query_pre_attn_scalar": HEAD_DIM},
        chunk_tokens=64,
    ),
    "gpt-oss": Model(
        "full attention and sliding windows, experts", "GptOssConfig",
        {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}, chunk_tokens=64, in_ci=True,
    ),
    "Llama-4": Model(
        "full attention and chunks, experts", "Llama4TextConfig",
        {"attention_chunk_size": WINDOW, "num_local_experts": 4, "intermediate_size_mlp": 2 * _HIDDEN},
        chunk_tokens=64,
    ),
    "Mistral": Model("only sliding windows", "MistralConfig", {"sliding_window": WINDOW}, chunk_tokens=64),
    "Qwen3-Next": Model(
        "full attention and states, experts", "Qwen3NextConfig",
        {
            **_EXPERTS, "shared_expert_intermediate_size": _HIDDEN, "head_dim": 64, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        },
        # By default vLLM chooses the type of states, and with it the size of a block, by the features of the CPU.
        {**_STATES, "dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}, chunk_tokens=384, in_ci=True,
    ),
    "LFM2": Model(
        "full attention and states", "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention"] * (LAYERS // 2), "block_multiple_of": 32,
            "conv_dim": _HIDDEN, "block_dim": _HIDDEN,  # which transformers does not name
        },
        _STATES, chunk_tokens=128, in_ci=True,
    ),
}

# Models that vLLM's CPU build does not start, with the error that it prints.
NOT_STARTED: dict[str, tuple[Model, str]] = {
    "Jamba": (
        Model(
            "full attention and states, experts", "JambaConfig",
            {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}, _STATES,
        ),
        "'_OpNamespace' '_C' object has no attribute 'selective_scan_fwd'",
    ),
    "Granite-4": (
        Model(
            "full attention and states, experts", "GraniteMoeHybridConfig",
            {
                "layer_types": ["mamba", "attention"] * (LAYERS // 2), "mamba_n_heads": 4, "mamba_d_state": 64,
                "num_local_experts": 2, "shared_intermediate_size": _HIDDEN, "position_embedding_type": "nope",
            },
            _STATES,
        ),
        "index 1 is out of bounds for dimension 0 with size 1",
    ),
    "Falcon-H1": (
        Model(
            "full attention and states", "FalconH1Config",
            {"mamba_d_ssm": 2 * _HIDDEN, "mamba_n_heads": 4, "mamba_d_state": 64}, _STATES,
        ),
        "index 1 is out of bounds for dimension 0 with size 1",
    ),
}


def save_model(row: Model, folder: Path) -> None:
    """Save the model, and its adapter in the folder `adapter` if it has one. There is no tokenizer."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # from transformers and its imports
        import transformers  # noqa: PLC0415

        config = getattr(transformers, row.config)(**{**_COMMON, **row.entries})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():  # some classes ignore the deviation of the configuration
            if weight.dim() > 1 and weight.std() < INITIALIZER_RANGE / 2:
                torch.nn.init.normal_(weight, std=INITIALIZER_RANGE)
        model.save_pretrained(folder)
        if row.has_adapter:
            save_adapter(folder / "adapter")
        if row.has_head:
            _save_head(folder / "head", folder)


def save_adapter(folder: Path, *, seed: int = 0) -> None:
    """Save a LoRA adapter of a Llama."""
    from safetensors.torch import save_file  # noqa: PLC0415

    torch.manual_seed(seed)
    weights = {}
    heads = {"q_proj": 2 * KV_HEADS, "v_proj": KV_HEADS}  # SGLang requires one for values
    for layer, (name, count) in itertools.product(range(LAYERS), heads.items()):
        module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{module}.lora_A.weight"] = torch.randn(ADAPTER_RANK, _HIDDEN) * INITIALIZER_RANGE
        weights[f"{module}.lora_B.weight"] = torch.randn(count * HEAD_DIM, ADAPTER_RANK) * INITIALIZER_RANGE
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": ADAPTER_RANK, "lora_alpha": ADAPTER_RANK,
              "target_modules": list(heads), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _save_head(folder: Path, target: Path) -> None:
    """Save an EAGLE head for the Llama in `target`: one of its layers with other weights."""
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    config = AutoConfig.from_pretrained(target, num_hidden_layers=1)
    torch.manual_seed(1)
    layers = AutoModelForCausalLM.from_config(config, dtype=torch.float32).model.layers
    weights = {f"layers.{name}": value for name, value in layers.state_dict().items()}
    weights["fc.weight"] = torch.randn(_HIDDEN, 2 * _HIDDEN) * INITIALIZER_RANGE
    del weights["layers.0.input_layernorm.weight"]  # an EAGLE head has none
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")

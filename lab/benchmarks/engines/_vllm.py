"""One vLLM in a separate process, which reports the time to first token of each request. See `ttft`."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.process import serve

# A layer of attention has 4 KiB of KV per token in bfloat16: 8 heads of 128 elements, K and V.
BLOCK_TOKENS = 64
_LAYERS, _KV_HEADS, _HEAD_DIM = 8, 8, 128
LAYER_TOKEN_BYTES = 2 * _KV_HEADS * _HEAD_DIM * 2
_VOCABULARY = 1024


@dataclass(frozen=True, slots=True)
class Kind:
    """A shape of model: its class of configuration in transformers with the entries beyond the common ones, options of
    `vllm.LLM`, its layers of attention, and the groups of layers that vLLM makes, each with blocks of its own."""

    config: str
    entries: Mapping[str, Any]
    options: Mapping[str, Any]
    layers: int
    groups: int


def _windows(tokens: int, full_every: int) -> dict[str, Any]:
    """Return the entries of a model in which one of so many layers has full attention, and the others a window."""
    types = [*["sliding_attention"] * (full_every - 1), "full_attention"] * (_LAYERS // full_every)
    return {"sliding_window": tokens, "layer_types": types}


KINDS = {
    "llama": Kind("LlamaConfig", {}, {}, _LAYERS, 1),
    "gemma-3": Kind("Gemma3TextConfig", {**_windows(512, 4), "query_pre_attn_scalar": _HEAD_DIM}, {}, _LAYERS, 4),
    "gpt-oss": Kind(
        "GptOssConfig", {**_windows(128, 2), "num_local_experts": 4, "num_experts_per_tok": 2}, {}, _LAYERS, 2
    ),
    "qwen3-next": Kind(
        "Qwen3NextConfig",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 8, "linear_num_value_heads": 8,
        },
        # vLLM chooses the size of a block, so that a state has room in one.
        {"block_size": None, "mamba_cache_mode": "align"}, _LAYERS // 4, 4,
    ),
}
# The blocks of the device have room for so many prompts.
_DEVICE_PROMPTS = 3
_TICKS = os.sysconf("SC_CLK_TCK")


def save_model(folder: Path, kind: str) -> None:
    """Save a model of this kind with random weights (a Llama of 105 million). There is no tokenizer."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    torch.manual_seed(0)
    config = getattr(transformers, KINDS[kind].config)(
        vocab_size=_VOCABULARY, hidden_size=1024, intermediate_size=2816, num_hidden_layers=_LAYERS,
        num_attention_heads=_KV_HEADS, num_key_value_heads=_KV_HEADS, head_dim=_HEAD_DIM,
        max_position_embeddings=8192, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        **KINDS[kind].entries,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def _session_cpu_s() -> float:
    """Return the processor time so far of all processes of this session: the engine, its core and its workers."""
    total, session = 0, os.getsid(0)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session:
                total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    from vllm import LLM, SamplingParams, TokensPrompt  # noqa: PLC0415

    tokens, kind = options["tokens"], KINDS[options["kind"]]
    blocks = _DEVICE_PROMPTS * kind.groups * (tokens // BLOCK_TOKENS + 1)
    arguments: dict[str, Any] = {"block_size": BLOCK_TOKENS, **kind.options}
    llm = LLM(
        model=options["model"], skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
        num_gpu_blocks_override=blocks, max_model_len=tokens + 8, max_num_batched_tokens=tokens + 8, max_num_seqs=4,
        enable_prefix_caching=True, disable_log_stats=True, kv_transfer_config=options["connector"], **arguments,
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def ask(prompt: int) -> tuple[float, float, int]:
        """Return the seconds to the first token, the engine's processor seconds, and the cached tokens of the prompt.
        """
        ids = random.Random(prompt).choices(range(3, _VOCABULARY), k=tokens)
        cpu_s, start_s = _session_cpu_s(), time.perf_counter()
        output = llm.generate([TokensPrompt(prompt_token_ids=ids)], sampling, use_tqdm=False)[0]
        return time.perf_counter() - start_s, _session_cpu_s() - cpu_s, output.num_cached_tokens or 0

    def warm_up() -> None:
        """Touch all blocks of the device."""
        for number in range(_DEVICE_PROMPTS):
            ask(1_000_000 + number)

    def forget() -> bool:
        """Empty vLLM's own prefix cache."""
        return bool(llm.reset_prefix_cache())

    def block_tokens() -> int:
        return int(llm.llm_engine.vllm_config.cache_config.block_size)

    return {"ask": ask, "warm_up": warm_up, "forget": forget, "block_tokens": block_tokens}


if __name__ == "__main__":
    serve(start)

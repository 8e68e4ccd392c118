"""One vLLM in a separate process, which reports the time to first token of each request. See `ttft`."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.engines.process import serve

# 64 tokens have 2 MiB of KV in bfloat16: 8 layers of 8 heads of 128 elements, K and V.
BLOCK_TOKENS = 64
_LAYERS, _KV_HEADS, _HEAD_DIM = 8, 8, 128
_VOCABULARY = 1024
_WINDOW = 512
_WINDOWS: dict[str, Any] = {
    "sliding_window": _WINDOW, "query_pre_attn_scalar": _HEAD_DIM,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip
# vLLM divides the layers of a model with windows into so many groups, and each has blocks of its own.
_GROUPS = {"llama": 1, "windows": 4}
# The blocks of the device have room for so many prompts.
_DEVICE_PROMPTS = 3
_TICKS = os.sysconf("SC_CLK_TCK")


def save_model(folder: Path, kind: str = "llama") -> None:
    """Save a Llama of 105 million random weights, or with `windows` a Gemma 3 of that shape in which every fourth layer
    has full attention, and the others a window. There is no tokenizer."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    torch.manual_seed(0)
    name, entries = ("LlamaConfig", {}) if kind == "llama" else ("Gemma3TextConfig", _WINDOWS)
    config = getattr(transformers, name)(
        vocab_size=_VOCABULARY, hidden_size=1024, intermediate_size=2816, num_hidden_layers=_LAYERS,
        num_attention_heads=_KV_HEADS, num_key_value_heads=_KV_HEADS, head_dim=_HEAD_DIM,
        max_position_embeddings=8192, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        **entries,
    )  # fmt: skip
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

    tokens, connector = options["tokens"], options["connector"]
    blocks = _DEVICE_PROMPTS * _GROUPS[options["kind"]] * (tokens // BLOCK_TOKENS + 1)
    llm = LLM(
        model=options["model"], skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
        block_size=BLOCK_TOKENS, num_gpu_blocks_override=blocks,
        max_model_len=tokens + 8, max_num_batched_tokens=tokens + 8, max_num_seqs=4, enable_prefix_caching=True,
        disable_log_stats=True, **({"kv_transfer_config": connector} if connector else {}),
    )  # fmt: skip
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

    return {"ask": ask, "warm_up": warm_up, "forget": forget}


if __name__ == "__main__":
    serve(start)

"""vLLM in a process of its own: the steps that tests run in it (see process.py).

`options` are the arguments of `vllm.LLM`. The other variables of vLLM come from `vllm_environ`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .process import serve

BLOCK_TOKENS = 32


def vllm_options(model: object, **changes: object) -> dict[str, object]:
    """Arguments of `vllm.LLM` for a small model. The device has few blocks, but enough for a hybrid model too."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",  # "auto" would make bfloat16 of the model
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": 160,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        **changes,
    }


def vllm_environ(*, processes: bool = True, **more: str) -> dict[str, str]:
    """Variables of a vLLM on the CPU; without `processes` its scheduler runs in the process of the caller."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other engines run on the same cores
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **more,
    }


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    from vllm import LLM, SamplingParams, TokensPrompt  # noqa: PLC0415

    llm = LLM(**options)

    def generate(prompts: list[list[int]], tokens: int = 8, salt: str | None = None) -> list[dict[str, object]]:
        """All prompts at once; for each the tokens that followed, and how many of it were cached."""
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        for each in inputs:
            if salt is not None:
                each["cache_salt"] = salt
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        return [{"tokens": list(each.outputs[0].token_ids), "cached": each.num_cached_tokens} for each in outputs]

    def reset(connector: bool = False) -> bool:
        """Forget the blocks of the device, and with `connector` what the connector has."""
        return bool(llm.reset_prefix_cache(reset_connector=connector))

    def metrics() -> dict[str, float]:
        """Counters and gauges, those of one name summed."""
        values: dict[str, float] = {}
        for metric in llm.get_metrics():
            values[metric.name] = values.get(metric.name, 0.0) + float(getattr(metric, "value", 0.0))
        return values

    def workers(method: str, **arguments: object) -> list[object]:
        """Call a method of each worker, such as those of `worker_extension_cls`."""
        return list(llm.collective_rpc(method, kwargs=arguments))

    return {"generate": generate, "reset": reset, "metrics": metrics, "workers": workers}


if __name__ == "__main__":
    serve(start)

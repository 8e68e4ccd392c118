"""SGLang in a process of its own: the steps that tests run in it (see process.py).

`options` are the arguments of `sglang.Engine`. The variables come from `sglang_environ`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from .process import ROOT, serve

PAGE_TOKENS = 16
_ON_A_CPU = ROOT / "tests" / "engines" / "sglang_cpu"


def sglang_options(model: object, extra: Mapping[str, object] | None = None, **changes: object) -> dict[str, object]:
    """Arguments of `sglang.Engine` for a small model, with `extra` as the options of its storage backend."""
    options: dict[str, object] = {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "device": "cpu",
        "dtype": "float32",  # "auto" would make bfloat16 of the model
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "skip_server_warmup": True,
        "enable_cache_report": True,
        "page_size": PAGE_TOKENS,
        "max_total_tokens": 8192,
        "context_length": 2048,
        "max_running_requests": 4,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_write_policy": "write_through",
        "hicache_mem_layout": "page_first",
        "hicache_io_backend": "kernel",
        "hicache_storage_prefetch_policy": "wait_complete",  # or a slow machine makes a hit a miss
        "log_level": "warning",
    }
    if extra is not None:
        chosen = {
            "backend_name": "hicache", "module_path": "hicache.integrations.sglang", "class_name": "HiCacheStore",
            "interface_v1": 1, "hicache_storage_pass_prefix_keys": True, "prefetch_threshold": 2 * PAGE_TOKENS, **extra,
        }  # fmt: skip
        options["hicache_storage_backend"] = "dynamic"
        options["hicache_storage_backend_extra_config"] = json.dumps(chosen)
    return {**options, **changes}


def sglang_environ(**more: str) -> dict[str, str]:
    """Variables of an SGLang on the CPU."""
    return {"PYTHONPATH": f"{_ON_A_CPU}:{ROOT}", "SGLANG_USE_CPU_ENGINE": "1", **more}


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    from sglang import Engine  # noqa: PLC0415

    engine = Engine(**options)

    def generate(prompts: list[list[int]], tokens: int = 8) -> list[dict[str, object]]:
        """One prompt after the other; for each the tokens that followed, and how many of it were cached."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
        return [{"tokens": each["output_ids"], "cached": each["meta_info"]["cached_tokens"]} for each in answers]

    def flush() -> bool:
        """Forget device and host memory; False while a request is not quite over."""
        return bool(engine.flush_cache().success)

    def update_weights(model: str) -> str:
        """Load other weights in place, as a trainer has it done; return why it failed, or nothing."""
        success, message, *_ = engine.update_weights_from_disk(model)
        return "" if success else str(message)

    return {"generate": generate, "flush": flush, "update_weights": update_weights}


if __name__ == "__main__":
    serve(start)

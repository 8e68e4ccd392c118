"""SGLang in its own process, and the steps that tests run in it (see process.py).

`options` are the arguments of `sglang.Engine`. `sglang_environ` returns the environment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.waiting import wait_for

from .process import ROOT, EngineProcess, serve

PAGE_TOKENS = 16
# Longer than the deadline of a write.
_AGAIN_S = 10.0
_ON_A_CPU = ROOT / "tests" / "engines" / "sglang_cpu"


def sglang_options(model: object, extra: Mapping[str, object] | None = None, **changes: object) -> dict[str, object]:
    """Return arguments of `sglang.Engine` for a small model. `extra` are the options of its storage backend."""
    options: dict[str, object] = {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "device": "cpu",
        "dtype": "float32",  # "auto" would convert the model to bfloat16
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
        "hicache_storage_prefetch_policy": "wait_complete",  # otherwise a slow machine turns a hit into a miss
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
    """Return the environment of SGLang on a CPU."""
    return {"PYTHONPATH": f"{_ON_A_CPU}:{ROOT}", "SGLANG_USE_CPU_ENGINE": "1", **more}


def flush(engine: EngineProcess) -> None:
    """Empty the engine's device and host memory."""
    wait_for(lambda: engine.call("flush"), pause_s=0.05)


def wait_until_stored(engine: EngineProcess, prompts: list[list[int]], stored: Callable[[], bool]) -> None:
    """Wait until `stored()`. Compute the prompts again every few seconds: SGLang does not repeat a write that failed,
    as one does that exceeds its deadline on a busy machine."""
    next_s = time.monotonic() + _AGAIN_S

    def again() -> None:
        nonlocal next_s
        if time.monotonic() > next_s:
            flush(engine)
            engine.call("generate", prompts=prompts)
            next_s = time.monotonic() + _AGAIN_S

    wait_for(stored, again)


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    from sglang import Engine  # noqa: PLC0415
    from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash  # noqa: PLC0415

    # It is compiled at its first use: in the engine that is a lookup, which a flush awaits for 10 s only.
    get_native_hash([0], None)
    engine = Engine(**options)

    def generate(prompts: list[list[int]], tokens: int = 8) -> list[dict[str, object]]:
        """Serve prompts one after the other. Return for each the output tokens and the number of cached tokens."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
        return [{"tokens": each["output_ids"], "cached": each["meta_info"]["cached_tokens"]} for each in answers]

    def flush_cache() -> bool:
        """Empty device and host memory. Return False while a request is still in flight."""
        return bool(engine.flush_cache().success)

    def update_weights(model: str) -> str:
        """Load other weights in place, as a trainer does. Return the error message, or an empty string."""
        success, message, *_ = engine.update_weights_from_disk(model)
        return "" if success else str(message)

    return {"generate": generate, "flush": flush_cache, "update_weights": update_weights}


if __name__ == "__main__":
    serve(start)

"""vLLM in its own process, and the steps that tests run in it (see process.py).

`options` are the arguments of `vllm.LLM`, such as `vllm_options`. `vllm_environ` returns the environment.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .process import ROOT, serve

BLOCK_TOKENS = 32
# The folder of the entry point by which each process of vLLM calls `register` of vllm_cpu_spec.py.
_CPU_PLUGIN = ROOT / "tests" / "engines" / "vllm_plugin"
# The value of `worker_extension_cls` for tests that call methods inside the workers.
HOOKS = "tests.engines.vllm_hooks.Hooks"


def vllm_options(model: object, **changes: object) -> dict[str, object]:
    """Return arguments of `vllm.LLM` for a small model. The device has few blocks, but enough for a hybrid model."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",  # "auto" would convert the model to bfloat16
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": 160,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        **changes,
    }


def vllm_environ(*, processes: bool = True, zeros: Path | None = None, **more: str) -> dict[str, str]:
    """Return the environment of vLLM on a CPU. Without `processes`, its scheduler runs in the caller's process. With
    `zeros`, vLLM's offloading copies on the CPU (vllm_cpu_spec.py), and loads zeros while that file exists."""
    if zeros is not None:
        more |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(_CPU_PLUGIN)]), "TEST_ZEROS_FILE": str(zeros)}
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other engines run on the same cores
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **more,
    }


def hicache_connector(config: Path, **extra: object) -> dict[str, object]:
    """Return the value of `kv_transfer_config` for HiCache with the configuration file `config`."""
    return {
        "kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "hicache.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": str(config), **extra},
    }


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    from vllm import LLM, SamplingParams, TokensPrompt  # noqa: PLC0415
    from vllm.lora.request import LoRARequest  # noqa: PLC0415
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: PLC0415

    llm = LLM(**options)
    engine = llm.llm_engine
    in_process = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"

    numbers = itertools.count(1)
    outputs: dict[str, dict[str, object]] = {}

    def add(
        prompts: list[list[int]], tokens: int = 8, salt: str | None = None, lora: str | None = None,
        hints: dict[str, dict[str, Any]] | None = None,
    ) -> list[str]:
        """Add requests without running them, with the adapter in the folder `lora`, and `hints`: payloads by action.
        Return their names."""
        adapter = None if lora is None else LoRARequest("an adapter", 1, lora)
        actions = [KvHintAction(kind, kind, "1.0", payload) for kind, payload in (hints or {}).items()]
        envelope = KvHintsEnvelope("0.1", "", actions) if actions else None
        names = []
        for prompt in prompts:
            names.append(f"test-{next(numbers)}")
            asked = TokensPrompt(prompt_token_ids=prompt)
            if salt is not None:
                asked["cache_salt"] = salt
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            engine.add_request(names[-1], asked, sampling, lora_request=adapter, kv_hints=envelope)
        return names

    def run(names: list[str], steps_max: int | None = None) -> list[dict[str, object] | None]:
        """Step until these requests have ended, at most `steps_max` times. Return for each the output tokens and the
        number of cached tokens of its prompt; None if it has not ended."""
        steps = itertools.count() if steps_max is None else range(steps_max)
        for _ in steps:
            if outputs.keys() >= set(names) or not engine.has_unfinished_requests():
                break
            for each in engine.step():
                if each.finished:
                    tokens = list(each.outputs[0].token_ids)
                    outputs[each.request_id] = {"tokens": tokens, "cached": each.num_cached_tokens}
        # An engine in this process detects the end of a save only in a step; an engine in its own process steps itself.
        if in_process and steps_max is None:
            while engine.engine_core.engine_core.scheduler.has_finished_requests():
                engine.step()
        return [outputs.pop(name, None) for name in names]

    def generate(prompts: list[list[int]], **how: Any) -> list[dict[str, object] | None]:
        """Add all prompts, with the options of `add`, and run them together."""
        return run(add(prompts, **how))

    def abort(names: list[str]) -> None:
        engine.abort_request(names)

    def reset(connector: bool = False) -> bool:
        """Reset the blocks of the device, and with `connector` the connector. Return False if blocks are in use, for
        example by a save."""
        return bool(llm.reset_prefix_cache(reset_connector=connector))

    def metrics() -> dict[str, float]:
        """Return counters and gauges, summed by name and label `source`."""
        values: dict[str, float] = {}
        for metric in llm.get_metrics():
            name = " ".join([metric.name, *(metric.labels[label] for label in ("source",) if label in metric.labels)])
            values[name] = values.get(name, 0.0) + float(getattr(metric, "value", 0.0))
        return values

    def workers(method: str, **arguments: object) -> list[object]:
        """Call a method of each worker, such as those of `worker_extension_cls`."""
        return list(llm.collective_rpc(method, kwargs=arguments))

    return {
        "add": add, "run": run, "generate": generate, "abort": abort, "reset": reset, "metrics": metrics,
        "workers": workers, "close": engine.engine_core.shutdown,
    }


if __name__ == "__main__":
    serve(start)

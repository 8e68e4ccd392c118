"""SGLang in its own process, and the steps that tests run in it (see process.py).

`options` are the arguments of `sglang.Engine`. `sglang_environ` returns the environment.

An engine forks its processes. SGLang would spawn them, and each would import it again for 6 s; so it does only with
SPAWNS in the environment. Without options, this process waits for the step `begin`, which forks one for an engine.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from tests.waiting import wait_for

from .process import ROOT, EngineProcess, pids_of_group, serve, shared_memory_of

PAGE_TOKENS = 16
SPAWNS = "TEST_SGLANG_SPAWNS"
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
        }
        options["hicache_storage_backend"] = "dynamic"
        options["hicache_storage_backend_extra_config"] = json.dumps(chosen)
    return {**options, **changes}


# The options of SGLang's own hierarchical cache.
_OWN_TREE = (
    "hicache_ratio", "hicache_write_policy", "hicache_mem_layout", "hicache_io_backend",
    "hicache_storage_prefetch_policy",
)
# SGLang compares its free and used slots after each step, and ends if one is lost or used twice.
_LEAK_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


def tree_options(model: object, **changes: object) -> dict[str, object]:
    """Return arguments of `sglang.Engine` for a small model with HiCache as the tree. See `tree_environ`."""
    options = {name: value for name, value in sglang_options(model).items() if name not in _OWN_TREE}
    return {**options, "radix_cache_backend": "hicache", **changes}


def tree_environ(config: object, **more: str) -> dict[str, str]:
    """Return the environment of SGLang with HiCache as the tree. Both check their books in each step."""
    return sglang_environ(HICACHE_CONFIG_FILE=str(config), **_LEAK_CHECKS, **more)


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


_STEPS = ("generate", "together", "flush", "sleep", "update_weights")


class _Forked:
    """An engine in a forked process of its own process group, which `end` kills."""

    def __init__(self, options: dict[str, Any], environ: dict[str, str]) -> None:
        self._answers, theirs = multiprocessing.Pipe()
        self._group = os.fork()
        if self._group == 0:
            os.setpgid(0, 0)
            self._answers.close()
            os.environ.update(environ)
            _serve_forked(options, theirs)
        theirs.close()  # so that the end of the engine ends a wait
        self._result()

    def call(self, step: str, **arguments: object) -> object:
        self._answers.send((step, arguments))
        return self._result()

    def end(self) -> None:
        """Kill all processes of the engine, and remove their shared memory, but not HiCache's, which may be kept."""
        left = {path for pid in pids_of_group(self._group) for path in shared_memory_of(pid)}
        os.killpg(self._group, signal.SIGKILL)
        os.waitpid(self._group, 0)
        self._answers.close()  # before, it would end the engine, and its processes by and by
        for path in left:
            if not path.name.startswith("hicache."):
                path.unlink(missing_ok=True)

    def _result(self) -> object:
        try:
            error, value = self._answers.recv()
        except EOFError:
            raise RuntimeError("the engine has ended") from None
        if error:
            raise RuntimeError(error)
        return value


def _serve_forked(options: dict[str, Any], answers: Connection) -> None:
    """Run an engine, and the steps that arrive, in a forked process. Does not return."""
    from sglang.srt.utils import kill_itself_when_parent_died  # noqa: PLC0415

    kill_itself_when_parent_died()
    try:
        steps = _engine_steps(options)
        answers.send(("", None))
        while True:
            name, arguments = answers.recv()
            try:
                answer = ("", steps[name](**arguments))
            except Exception:
                answer = (traceback.format_exc(), None)
            answers.send(answer)
    except EOFError:
        os._exit(0)
    except BaseException:
        answers.send((traceback.format_exc(), None))
        os._exit(1)


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    import sglang.srt.managers.detokenizer_manager  # noqa: PLC0415
    import sglang.srt.managers.scheduler  # noqa: PLC0415
    import sglang.srt.models.registry  # noqa: F401, PLC0415

    if SPAWNS not in os.environ:
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *_, **__: None
    if options:
        return _engine_steps(options)
    current: list[_Forked] = []

    def begin(options: dict[str, Any], environ: dict[str, str]) -> None:
        """Start an engine in place of the current one."""
        end()
        current.append(_Forked(options, environ))

    def end() -> None:
        """Kill the current engine, if there is one."""
        if current:
            current.pop().end()

    def forward(step: str) -> Callable[..., object]:
        return lambda **arguments: current[-1].call(step, **arguments)

    return {"begin": begin, "end": end, **{step: forward(step) for step in _STEPS}}


def _engine_steps(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    from sglang import Engine  # noqa: PLC0415
    from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415
    from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash  # noqa: PLC0415

    if "hicache_storage_backend" in options:
        # It is compiled at its first use: in the engine that is a lookup, which a flush awaits for 10 s only.
        get_native_hash([0], None)
    engine = Engine(**options)

    def generate(prompts: list[list[int]], tokens: int = 8) -> list[dict[str, object]]:
        """Serve prompts one after the other. Return for each the output tokens and the number of cached tokens."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
        return [{"tokens": each["output_ids"], "cached": each["meta_info"]["cached_tokens"]} for each in answers]

    def together(requests: list[dict[str, Any]], tokens: int = 8) -> list[dict[str, object]]:
        """Serve requests at once. Each has a prompt, and fields of GenerateReqInput. One with `abort_after_s` is
        aborted then. Return for each the output, the reason of its end, and the numbers of tokens from each tier."""
        sampling = {"temperature": 0, "max_new_tokens": tokens}  # with `ignore_eos`, SGLang would avoid retraction

        async def serve_one(prompt: list[int], abort_after_s: float | None = None, **fields: Any) -> dict[str, object]:
            request = GenerateReqInput(input_ids=prompt, sampling_params=dict(sampling), **fields)
            answer = asyncio.ensure_future(anext(engine.tokenizer_manager.generate_request(request, None)))
            if abort_after_s is not None:
                engine.loop.call_later(abort_after_s, lambda: engine.tokenizer_manager.abort_request(fields["rid"]))
            ended = await answer
            facts = ended["meta_info"]
            details = facts.get("cached_tokens_details") or {}
            tiers = {name: details[name] for name in ("device", "host", "storage") if details.get(name)}
            reason = facts["finish_reason"]["type"]
            return {
                "tokens": ended["output_ids"], "cached": facts.get("cached_tokens", 0), "tiers": tiers, "end": reason,
                "retractions": facts.get("num_retractions", 0),
            }

        async def serve_all() -> list[dict[str, object]]:
            return await asyncio.gather(*(serve_one(**request) for request in requests))

        served: list[dict[str, object]] = engine.loop.run_until_complete(serve_all())
        return served

    def flush_cache() -> bool:
        """Empty device and host memory. Return False while a request is still in flight."""
        return bool(engine.flush_cache().success)

    def sleep() -> None:
        """Release and resume the memory of the KV cache. Without SGLang's memory saver, it is not unmapped."""
        engine.release_memory_occupation(["kv_cache"])
        engine.resume_memory_occupation(["kv_cache"])

    def update_weights(model: str) -> str:
        """Load other weights in place, as a trainer does. Return the error message, or an empty string."""
        success, message, *_ = engine.update_weights_from_disk(model)
        return "" if success else str(message)

    steps = (generate, together, flush_cache, sleep, update_weights)
    return dict(zip(_STEPS, steps, strict=True))


if __name__ == "__main__":
    serve(start)

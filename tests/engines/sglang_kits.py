"""SGLang's HTTP server, and tests of its own kits (`sglang.test.kits`) that ask it, in one process and its workers. For
test_sglang_tree_kits.py.

`options` have the arguments of the `engine`, whose model has a tokenizer, and a `folder` for the kits' data. The sizes
of the kits are for trained models on GPUs; here they are small.
"""

from __future__ import annotations

import functools
import importlib
import json
import random
import threading
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hicache_lab.devservers.ports import LOOPBACK

from .process import serve

_KITS = "sglang.test.kits."
_OUTPUT_TOKENS = 8
_PROMPTS = 4
# The number of prompts that SGLang's get_input_ids expects.
_PROMPTS_IN_FILE = 48
_PROMPT_TOKENS = 96
_SIZES: dict[str, dict[str, object]] = {
    "unified_radix_cache_kit.UnifiedRadixTreeTestMixin": {
        "max_new_tokens": _OUTPUT_TOKENS, "num_groups": 2, "branches_per_group": 2, "prefix_len": 64,
    },
    "unified_radix_cache_kit.AccuracyTwoPassMixin": {"l3_prefetch_page_size": 16},
    "kl_divergence_kit.KLDivergenceMixin": {
        "kl_div_thres": 0.003, "kl_div_max_samples": _PROMPTS, "kl_div_prefill_max_new_tokens": _OUTPUT_TOKENS,
        "kl_div_decode_max_new_tokens": 32,
    },
    "abort_timeout_kit.AbortAllMixin": {
        "abort_all_num_requests": 12, "abort_all_max_new_tokens": 2000, "abort_all_sleep": 0.5,
    },
}


def served(engine: Any) -> str:
    """Serve SGLang's own routes for the engine from a thread. Return the URL."""
    import uvicorn  # noqa: PLC0415
    from sglang.srt.entrypoints import http_server  # noqa: PLC0415

    http_server.set_global_state(
        http_server._GlobalState(
            tokenizer_manager=engine.tokenizer_manager, template_manager=engine.template_manager,
            scheduler_info=engine._scheduler_init_result.scheduler_infos[0],
        )
    )
    config = uvicorn.Config(http_server.app, host=LOOPBACK, port=0, lifespan="off", log_level="warning")
    listening = config.bind_socket()
    listening.listen()  # so that the kits can connect at once
    threading.Thread(target=uvicorn.Server(config).run, args=([listening],), daemon=True).start()
    return f"http://{LOOPBACK}:{listening.getsockname()[1]}"


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    import requests  # noqa: PLC0415
    from sglang import Engine  # noqa: PLC0415
    from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash  # noqa: PLC0415
    from sglang.test import kl_test_utils  # noqa: PLC0415
    from sglang.test.kits import cache_hit_kit, radix_cache_server_kit  # noqa: PLC0415

    get_native_hash([0], None)  # compiled at its first use
    url, model, folder = served(Engine(**options["engine"])), options["engine"]["model_path"], Path(options["folder"])
    draw = random.Random(1)
    prompts = [[draw.randint(3, 30000) for _ in range(_PROMPT_TOKENS)] for _ in range(_PROMPTS_IN_FILE)]
    # Otherwise SGLang downloads a data set for them.
    kl_test_utils._cached_input_ids[f"{model}_{kl_test_utils.DEFAULT_PROMPT_TOKENS}_{_PROMPTS_IN_FILE}"] = prompts
    turns = [{"conversations": [{"value": f"{draw.random()} " * 20}, {"value": "yes"}]} for _ in range(20)]
    conversations = folder / "conversations.json"
    conversations.write_text(json.dumps(turns))
    radix_cache_server_kit.gen_radix_tree = functools.partial(radix_cache_server_kit.gen_radix_tree, 30, 24)

    def poll() -> int | None:
        """Return None if the scheduler answers, as `Popen.poll` does for a server that runs."""
        return None if requests.get(f"{url}/server_info", timeout=30).ok else 1

    def case(kit: str, test: str) -> None:
        """Run one test of a mixin."""
        module, _, name = kit.partition(".")
        mixin = getattr(importlib.import_module(_KITS + module), name)
        common = {
            "base_url": url, "model": model, "input_ids": prompts[:_PROMPTS], "process": SimpleNamespace(poll=poll),
        }
        made: Any = type(name, (mixin, unittest.TestCase), {**common, **_SIZES[kit]})(test)
        getattr(made, test)()

    def tree() -> None:
        radix_cache_server_kit.run_radix_attention_test(url)

    def rounds() -> float:
        """Return the share of cached tokens."""
        found = cache_hit_kit.run_multiturn_cache_hit_test(
            url, model, num_clients=4, num_rounds=3, request_length=64, output_length=_OUTPUT_TOKENS,
            dataset_path=str(conversations),
        )
        return float(found["overall"]["cache_hit_rate"])

    return {"case": case, "tree": tree, "rounds": rounds}


if __name__ == "__main__":
    serve(start)

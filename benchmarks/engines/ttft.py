"""Time to first token of vLLM: computed, and hits in its own prefix cache, in host memory and in files.

    .venv-engines/bin/python -m benchmarks.engines.ttft [--path DIRECTORY] [--ways NAME ...] [--model windows]

Each way is a separate vLLM, one after another: HiCacheConnector, vLLM's OffloadingConnector over its own file tier and
over HiCacheTier. (LMCache's connector does not support CPUs.) Hits in files are those of a second process over the same
directory. The model has random weights and 2 MiB of KV in 64 tokens. With `windows`, three of four layers keep 512
tokens, so HiCacheConnector runs vLLM's offloading. An answer reports the number of its cached tokens; an answer counts
as a hit only if all its whole pages were cached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks._table import Row, print_table
from benchmarks.engines._sides import MALLOC
from benchmarks.engines._vllm import BLOCK_TOKENS, save_model
from tests.engines.process import EngineFailed, EngineProcess
from tests.engines.vllm_engine import vllm_environ

Answers: TypeAlias = "dict[str, list[tuple[float, float, int]]]"

_HOST_BYTES = 1 << 30
_CALL_S = 120.0
# Storage counts as complete once its files have not changed for this long.
_QUIET_S, _QUIET_S_MAX = 1.0, 60.0
_COMPUTED, _OWN, _HOST, _FILES = "computed", "vLLM's own prefix cache", "host memory", "files"


def _connector(name: str, extra: dict[str, Any], **more: str) -> dict[str, Any]:
    return {
        "kv_connector": name, "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra, **more,
    }  # fmt: skip


def _offloading(tier: dict[str, Any]) -> dict[str, Any]:
    """Return the options of OffloadingConnector."""
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": _HOST_BYTES, "secondary_tiers": [tier]}
    return _connector("OffloadingConnector", extra)


def _config(folder: Path) -> str:
    options = {"path": str(folder / "store"), "capacity": "8GiB"}
    config = {"host": {"size": f"{_HOST_BYTES}B"}, "storage": {"type": "file", "options": options}}
    path = folder / "hicache.yaml"
    path.write_text(json.dumps(config))
    return str(path)


def _hicache(folder: Path) -> dict[str, Any]:
    module = "hicache.integrations.vllm"
    return _connector("HiCacheConnector", {"config": _config(folder)}, kv_connector_module_path=module)


def _own_files(folder: Path) -> dict[str, Any]:
    return _offloading({"type": "fs", "root_dir": str(folder / "store")})


def _hicache_tier(folder: Path) -> dict[str, Any]:
    module = "hicache.integrations.vllm_tier"
    return _offloading({"type": "HiCacheTier", "module_path": module, "config": _config(folder)})


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "HiCacheConnector": _hicache,
    "OffloadingConnector, its files": _own_files,
    "OffloadingConnector, HiCacheTier": _hicache_tier,
}


def _open(model: Path, folder: Path, way: str, tokens: int) -> EngineProcess:
    """Start an engine. vLLM's offloading worker does not run on a CPU, so the tests' worker copies between blocks and
    primary tier."""
    cpu = vllm_environ(zeros=folder / "zeros")
    environ = {**cpu, **MALLOC, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": str(os.cpu_count())}
    options = {"model": str(model), "kind": model.name, "connector": WAYS[way](folder), "tokens": tokens}
    engine = EngineProcess("benchmarks.engines._vllm", options, folder=folder, environ=environ)
    engine.call("warm_up", timeout_s=_CALL_S)
    return engine


def _wait_until_stored(store: Path) -> None:
    end, seen, since = time.monotonic() + _QUIET_S_MAX, -1, time.monotonic()
    while time.monotonic() < end and time.monotonic() - since < _QUIET_S:
        found = sum(1 for path in store.rglob("*") if path.is_file())
        if found != seen:
            seen, since = found, time.monotonic()
        time.sleep(0.1)


def measure(model: Path, folder: Path, way: str, tokens: int, prompts: int) -> Answers:
    """Request each prompt in each state of the caches; starts the engine twice. Raises EngineFailed."""
    store = folder / "store"
    answers: Answers = {what: [] for what in (_COMPUTED, _OWN, _HOST, _FILES)}
    with _open(model, folder, way, tokens) as engine:
        for prompt in range(prompts):
            answers[_COMPUTED].append(engine.call("ask", prompt=prompt, timeout_s=_CALL_S))
            _wait_until_stored(store)
            answers[_OWN].append(engine.call("ask", prompt=prompt, timeout_s=_CALL_S))
        engine.call("forget")
        for prompt in range(prompts):
            answers[_HOST].append(engine.call("ask", prompt=prompt, timeout_s=_CALL_S))
    with _open(model, folder, way, tokens) as engine:
        _wait_until_stored(store)
        for prompt in range(prompts):
            answers[_FILES].append(engine.call("ask", prompt=prompt, timeout_s=_CALL_S))
    return answers


def rows_of(way: str, answers: Answers, tokens: int) -> list[Row]:
    """Return one row per state: milliseconds, best (median), beside computing; below 1 the state is faster."""
    rows, whole = [], tokens // BLOCK_TOKENS * BLOCK_TOKENS
    computed = [seconds for seconds, _, _ in answers[_COMPUTED]]
    for what, found in answers.items():
        hits = [one for one in found if one[2] >= whole] if what != _COMPUTED else found
        if not hits:
            rows.append(Row(f"{way}: {what}", f"{max(one[2] for one in found)} of {whole} tokens were hits"))
            continue
        seconds = [one[0] for one in hits]
        cpu_ms = statistics.median(one[1] for one in hits) * 1e3
        rows.append(Row(
            f"{way}: {what}, {len(hits)} of {len(found)} hits, {cpu_ms:.0f} ms of processor time"
            if what != _COMPUTED else f"{way}: {what}, {cpu_ms:.0f} ms of processor time",
            _ms(seconds), _ms(computed), statistics.median(seconds) / statistics.median(computed),
        ))  # fmt: skip
    return rows


def _ms(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1e3:.0f} ms ({statistics.median(seconds) * 1e3:.0f})"


def run(
    path: str | None, ways: Sequence[str], *, kind: str = "llama", tokens: int = 2049, prompts: int = 5
) -> list[Row]:
    """Measure in a temporary directory below `path` (default: the current directory)."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=path or os.getcwd()) as name:
        model = Path(name, kind)
        save_model(model, kind)
        for number, way in enumerate(ways):
            folder = Path(name, str(number))
            (folder / "store").mkdir(parents=True, mode=0o700)
            try:
                rows += rows_of(way, measure(model, folder, way, tokens, prompts), tokens)
            except EngineFailed as error:
                rows.append(Row(f"{way}: did not run", str(error).strip().splitlines()[-1][:100]))
                print(error)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to first token of vLLM on hits")
    parser.add_argument("--path", help="directory to write in (default: a temporary one below the current directory)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--model", choices=["llama", "windows"], default="llama")
    parser.add_argument("--prompts", type=int, default=5)
    options = parser.parse_args()
    rows = run(options.path, options.ways, kind=options.model, prompts=options.prompts)
    size = "64 MiB of KV" if options.model == "llama" else "up to 64 MiB of KV, windows of 512 tokens"
    print_table(f"Time to first token of a prompt of 2,049 tokens ({size}) in vLLM", rows)


if __name__ == "__main__":
    main()

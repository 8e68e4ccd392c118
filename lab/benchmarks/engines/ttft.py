"""Time to first token of vLLM: computed, and hits in its own prefix cache, in host memory and in files.

    .venv-engines/bin/python -m lab.benchmarks.engines.ttft [--path DIRECTORY] [--ways NAME ...] [--models NAME ...]

Each way is a separate vLLM, one after another: HiCacheConnector, vLLM's OffloadingConnector over its own file tier and
over HiCacheTier. (LMCache's server, which has a CPU device, is not measured.) Hits in files are those of a second
process over the same directory. An answer reports the number of its cached tokens; an answer counts as a hit only if
all its whole blocks were cached. The last rows compare the hits of the ways, and what they store.

The models have random weights and 8 layers. In `llama` all have full attention; in `gemma-3` two, and the others keep
512 tokens; in `gpt-oss` four, and the others keep 128; in `qwen3-next` two, and the others have a state. For all but
the first, HiCacheConnector is vLLM's offloading over HiCacheTier, so there is no third way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lab.benchmarks._table import Row, print_table
from lab.benchmarks.engines._sides import MALLOC, wait_until_stored
from lab.benchmarks.engines._vllm import KINDS, LAYER_TOKEN_BYTES, save_model
from tests.engines.process import EngineFailed, EngineProcess
from tests.engines.vllm_engine import vllm_environ

Answers: TypeAlias = "dict[str, list[tuple[float, float, int]]]"

_HOST_BYTES = 1 << 30
_CALL_S = 120.0
# One core is left to vLLM's scheduler, which waits for the worker in a loop. OpenMP's threads wait in a loop too, for
# the last of them: with a thread for each of two cores, forwards of 10 ms took up to 0.4 s, in each of the ways.
_THREADS = max(1, (os.cpu_count() or 1) - 1)
# Other processes of the machine delay some hits: a median needs many.
_HOST_ROUNDS = 6
# Hits in host memory cost at most so much more than those of vLLM's own offloading.
_HOST_GOAL = 1.1
_COMPUTED, _OWN, _HOST, _FILES = "computed", "vLLM's own prefix cache", "host memory", "files"


def _connector(name: str, extra: dict[str, Any], **more: str) -> dict[str, Any]:
    return {
        "kv_connector": name, "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra, **more,
    }


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


_REFERENCE, _TIER = "OffloadingConnector, its files", "OffloadingConnector, HiCacheTier"
WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "HiCacheConnector": _hicache,
    _REFERENCE: _own_files,
    _TIER: _hicache_tier,
}


def _open(model: Path, folder: Path, way: str, tokens: int) -> EngineProcess:
    """Start an engine. vLLM's offloading worker does not run on a CPU, so the tests' worker copies between blocks and
    primary tier."""
    cpu = vllm_environ(zeros=folder / "zeros")
    environ = {**cpu, **MALLOC, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": str(_THREADS)}
    options = {"model": str(model), "kind": model.name, "connector": WAYS[way](folder), "tokens": tokens}
    engine = EngineProcess("lab.benchmarks.engines._vllm", options, folder=folder, environ=environ)
    engine.call("warm_up", timeout_s=_CALL_S)
    return engine


@dataclass(frozen=True, slots=True)
class Measured:
    """The answers of an engine in each state of the caches, the cached tokens of a whole hit, and how many bytes of
    files a token added."""

    answers: Answers
    hit_tokens: int
    stored_bytes: float


def measure(model: Path, folder: Path, way: str, tokens: int, prompts: int) -> Measured:
    """Request each prompt in each state of the caches; starts the engine twice. Raises EngineFailed."""
    store = folder / "store"
    answers: Answers = {what: [] for what in (_COMPUTED, _OWN, _HOST, _FILES)}
    with _open(model, folder, way, tokens) as engine:
        block = engine.call("block_tokens")
        wait_until_stored(store)
        before = _bytes_in(store)
        for prompt in range(prompts):
            answers[_COMPUTED].append(engine.call("ask", prompt=prompt, timeout_s=_CALL_S))
            wait_until_stored(store)
            answers[_OWN].append(engine.call("ask", prompt=prompt, timeout_s=_CALL_S))
        stored = _bytes_in(store) - before
        for prompt in list(range(prompts)) * _HOST_ROUNDS:
            if prompt == 0:
                engine.call("forget")
            answers[_HOST].append(engine.call("ask", prompt=prompt, timeout_s=_CALL_S))
    with _open(model, folder, way, tokens) as engine:
        wait_until_stored(store)
        for prompt in range(prompts):
            answers[_FILES].append(engine.call("ask", prompt=prompt, timeout_s=_CALL_S))
    return Measured(answers, tokens // block * block, stored / (prompts * tokens))


def _bytes_in(store: Path) -> int:
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())


def rows_of(way: str, measured: Measured) -> list[Row]:
    """Return one row per state: milliseconds, best (median), beside computing; below 1 the state is faster."""
    rows = []
    computed = [seconds for seconds, _, _ in measured.answers[_COMPUTED]]
    for what, found in measured.answers.items():
        hits = _hits(measured, what)
        if not hits:
            most = max(one[2] for one in found)
            rows.append(Row(f"{way}: {what}", f"{most} of {measured.hit_tokens} tokens were hits"))
            continue
        seconds = [one[0] for one in hits]
        cpu_ms = statistics.median(one[1] for one in hits) * 1e3
        rows.append(Row(
            f"{way}: {what}, {len(hits)} of {len(found)} hits, {cpu_ms:.0f} ms of processor time"
            if what != _COMPUTED else f"{way}: {what}, {cpu_ms:.0f} ms of processor time",
            _ms(seconds), _ms(computed), statistics.median(seconds) / statistics.median(computed),
        ))
    return rows


def _hits(measured: Measured, what: str) -> list[tuple[float, float, int]]:
    found = measured.answers[what]
    return found if what == _COMPUTED else [one for one in found if one[2] >= measured.hit_tokens]


def compared(ways: Mapping[str, Measured], kind: str) -> list[Row]:
    """Return the medians of each way beside vLLM's own offloading, and the bytes of files per token beside the KV of a
    token in all layers of attention."""
    rows, kv_bytes = [], KINDS[kind].layers * LAYER_TOKEN_BYTES
    for way, measured in ways.items():
        for what in (_HOST, _FILES) if way != _REFERENCE and _REFERENCE in ways else ():
            ours, own = ([one[0] for one in _hits(side, what)] for side in (measured, ways[_REFERENCE]))
            if ours and own:
                ratio, goal = statistics.median(ours) / statistics.median(own), _HOST_GOAL if what == _HOST else None
                rows.append(Row(f"{way}, to vLLM's own: {what}", _ms(ours), _ms(own), ratio, goal))
        ratio = measured.stored_bytes / kv_bytes
        rows.append(Row(f"{way}: in files, to the KV of a token", _kib(measured.stored_bytes), _kib(kv_bytes), ratio))
    return rows


def _kib(count: float) -> str:
    return f"{count / 1024:.1f} KiB"


def _ms(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1e3:.0f} ms ({statistics.median(seconds) * 1e3:.0f})"


def run(
    path: str | None, ways: Sequence[str], *, kind: str, tokens: int = 2049, prompts: int = 5
) -> list[Row]:
    """Measure in a temporary directory below `path` (default: the current directory)."""
    rows: list[Row] = []
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=path or os.getcwd()) as name:
        model = Path(name, kind)
        save_model(model, kind)
        for number, way in enumerate(way for way in ways if way != _TIER or KINDS[kind].groups == 1):
            folder = Path(name, str(number))
            (folder / "store").mkdir(parents=True, mode=0o700)
            try:
                found[way] = measure(model, folder, way, tokens, prompts)
                rows += rows_of(way, found[way])
            except EngineFailed as error:
                rows.append(Row(f"{way}: did not run", str(error).strip().splitlines()[-1][:100]))
                print(error)
    return rows + compared(found, kind)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to first token of vLLM on hits")
    parser.add_argument("--path", help="directory to write in (default: a temporary one below the current directory)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--models", nargs="+", choices=list(KINDS), default=["llama"])
    parser.add_argument("--prompts", type=int, default=5)
    options = parser.parse_args()
    for kind in options.models:
        rows = run(options.path, options.ways, kind=kind, prompts=options.prompts)
        print_table(f"Time to first token of a prompt of 2,049 tokens in vLLM, {kind}", rows)


if __name__ == "__main__":
    main()

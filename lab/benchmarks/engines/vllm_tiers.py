"""Storage below vLLM's primary tier: vLLM's file tier beside HiCacheTier, over the same rows of host memory.

    .venv-engines/bin/python -m lab.benchmarks.engines.vllm_tiers [--path DIRECTORY]

Both are called as by vLLM's scheduler: promotions and cascades of 32 chunks of 2 MiB, four at a time, then polling.
vLLM's tier writes with O_DIRECT, which the file system may reject, and has neither tags nor a capacity. HiCacheTier
copies each chunk to a frame by default; with `in_place` it moves chunks without a copy; `direct_io` is an option of the
store.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lab.benchmarks._table import Row, print_table
from lab.benchmarks.engines._sides import Side, measure_cold, measure_warm, rows_of, with_malloc

CHUNK_BYTES = 2 << 20
_JOBS, _JOB_CHUNKS = 4, 32
_POLL_S = 0.0005
# Labels of HiCache's tiers, which follow vLLM's own.
OURS: tuple[dict[str, bool], ...] = ({}, {"in_place": True}, {"in_place": True, "direct_io": True})
_LABELS = ("copied", "in place", "in place, direct_io")


def _tier_options(folder: Path) -> list[dict[str, Any]]:
    tiers: list[dict[str, Any]] = [{"type": "fs", "root_dir": str(folder / "vllm")}]
    for number, ours in enumerate(OURS):
        store = {"path": str(folder / f"hicache-{number}"), "direct_io": ours.get("direct_io", False)}
        config = folder / f"hicache-{number}.yaml"
        # A limit on waiting chunks would drop some here, because this benchmark only stores.
        transfer = {"store_host_share": 1.0, "storage_deadline": "60s"}
        options = {"storage": {"type": "file", "options": {**store, "capacity": "1TiB"}}, "transfer": transfer}
        config.write_text(json.dumps(options))
        tiers.append({
            "type": "HiCacheTier", "module_path": "hicache.integrations.vllm_tier", "config": str(config),
            "model": "bench", "in_place": ours.get("in_place", False),
        })
    return tiers


def open_manager(folder: Path, chunks: int) -> Any:
    """Return vLLM's manager of a primary tier with `chunks` chunks of noise, and of the tiers below it."""
    from vllm.utils.hashing import sha256  # noqa: PLC0415
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415
    from vllm.v1.kv_offload import config as vllm  # noqa: PLC0415
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: PLC0415

    kv_cache_utils.init_none_hash(sha256)
    manager = TieringOffloadingSpec(vllm.OffloadingConfig(
        groups=(vllm.OffloadingGroupConfig(tokens_per_block=64, layer_names=("0",), group_id=0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": chunks * CHUNK_BYTES, "secondary_tiers": _tier_options(folder)},
        engine_id=f"bench-{os.getpid()}",
        model=vllm.OffloadingModelConfig(name="bench", dtype="bfloat16"),
        cache=vllm.OffloadingCacheConfig(tokens_per_hash=64, blocks_per_chunk=1),
        parallel=vllm.OffloadingParallelConfig(
            rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
            data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=True,
        ),
    )).get_manager()
    memory = np.frombuffer(manager.primary_tier.get_kv_memoryview().cast("B"), np.uint8)
    memory[:] = np.tile(np.frombuffer(os.urandom(CHUNK_BYTES), np.uint8), chunks)
    return manager


def side_of(tier: Any, store: Path) -> Side:
    """Return a side that uses one tier as vLLM's scheduler does."""
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key  # noqa: PLC0415
    from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: PLC0415

    def run(submit: Callable[[Any], None], number: int, is_promotion: bool) -> None:
        left = _JOBS
        for job in range(_JOBS):
            rows = np.arange(job * _JOB_CHUNKS, (job + 1) * _JOB_CHUNKS)
            keys = [make_offload_key(hashlib.sha256(b"%d %d" % (number, row)).digest(), 0) for row in rows]
            submit(TransferJob(job, keys, rows, is_promotion, ReqContext(str(job))))
        while left:
            for result in tier.get_finished_jobs():
                assert result.success, result
                left -= 1
            if left:
                time.sleep(_POLL_S)

    def remove(number: int) -> None:
        for path in store.rglob("*"):
            if len(path.stem) == 2 * hashlib.sha256().digest_size and path.is_file():
                path.unlink()

    return Side(
        lambda number: run(tier.submit_store, number, False), lambda number: run(tier.submit_load, number, True), remove
    )


def run(path: str | None, *, rounds: tuple[int, int] = (5, 4)) -> list[Row]:
    """Measure in these numbers of warm and cold rounds, in a temporary directory below `path` (default: the current
    directory)."""
    rows: list[Row] = []
    chunks = _JOBS * _JOB_CHUNKS
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=path or os.getcwd()) as name:
        folder = Path(name)
        manager = open_manager(folder, chunks)
        try:
            stores = [folder / "vllm", *(folder / f"hicache-{number}" for number in range(len(OURS)))]
            sides = [side_of(tier, store) for tier, store in zip(manager.secondary_tiers, stores, strict=True)]
            measure_warm(sides, rounds[0])
            measure_cold(sides, rounds[1])
        finally:
            manager.shutdown()
        for label, side in zip(_LABELS, sides[1:], strict=True):
            rows += rows_of(label, side, sides[0], CHUNK_BYTES, chunks)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="HiCacheTier beside vLLM's own file tier")
    parser.add_argument("--path", help="directory to write in (default: a temporary one below the current directory)")
    parser.add_argument("--rounds", type=int, nargs=2, default=(5, 4), metavar=("WARM", "COLD"))
    options = parser.parse_args()
    with_malloc("lab.benchmarks.engines.vllm_tiers")
    rows = run(options.path, rounds=tuple(options.rounds))
    print_table("HiCacheTier beside vLLM's file tier, 4 jobs of 32 chunks of 2 MiB", rows)


if __name__ == "__main__":
    main()

"""HiCache's tree under SGLang's own scheduler, with random traffic: shared prefixes, chunked prompts, decoded pages,
retraction, aborts, pauses, flushes, and too few slots and host pages for all of it.

After each step the cache checks itself, and SGLang checks that no slot is lost and none is used after it was freed.
Each forward compares all KV that it reads, on each layer. A seed replays requests, but not the timing of copies.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.seeds import seeds

from .process import EngineFailed, EngineProcess
from .sglang_engine import sglang_environ, sglang_options

STEPS = 300
PAGE_TOKENS = 4
# SGLang's own checks, which raise.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
COMMON = {
    "host": {"tokens": 48 * PAGE_TOKENS},
    "load_back_threshold_tokens": 0,
    "break_even": {"mode": "always"},
    "prefetch": {"threshold_tokens": PAGE_TOKENS, "policy": "wait_complete"},
}


def write_through_to_files(folder: Path) -> tuple[dict[str, object], dict[str, object]]:
    """Return the configuration of HiCache, and flags of SGLang."""
    storage = {"type": "file", "options": {"path": str(folder / "pages"), "capacity": "16MiB"}}
    return {"write_policy": "write_through", "storage": storage}, {}


def write_back_to_memory(folder: Path) -> tuple[dict[str, object], dict[str, object]]:
    """As `write_through_to_files`. Requests are served in the order of the tree."""
    storage = {"type": "memory", "options": {"capacity": "16MiB"}}
    return {"write_policy": "write_back", "storage": storage}, {"schedule_policy": "dfs-weight"}


@pytest.fixture(scope="module", params=[write_through_to_files, write_back_to_memory])
def scheduler(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("scheduler")
    cache, flags = request.param(folder)
    config = folder / "hicache.yaml"
    config.write_text(json.dumps(COMMON | cache))
    options = sglang_options(
        llama, radix_cache_backend="hicache", page_size=PAGE_TOKENS, max_total_tokens=44 * PAGE_TOKENS,
        context_length=140, chunked_prefill_size=16,
        schedule_conservativeness=0.01,  # admits too many requests, so that some are retracted
        **flags,
    )
    environ = sglang_environ(HICACHE_CONFIG_FILE=str(config), **STRICT)
    with EngineProcess("tests.engines.sglang_scheduler", options, folder=folder, environ=environ) as process:
        yield process


SEEDS = seeds(4)
TOTALS: Counter[str] = Counter()


@pytest.mark.parametrize("seed", SEEDS)
def test_no_byte_is_wrong_and_no_slot_is_lost(scheduler: EngineProcess, seed: int) -> None:
    found: dict[str, int] = scheduler.call("run", seed=seed, steps=STEPS)
    TOTALS.update(found, runs=1)
    assert found["requests"] > STEPS // 20


def test_a_wrong_byte_is_detected(scheduler: EngineProcess) -> None:
    """The last test of a process: a forward that fails ends a scheduler."""
    with pytest.raises(EngineFailed, match="WrongBytes"):
        scheduler.call("run", seed=0, steps=STEPS, overwrite=True)


def test_all_seeds_together_had_hits_on_each_tier_and_each_kind_of_trouble() -> None:
    if TOTALS["runs"] < len(SEEDS) or len(SEEDS) == 1:
        pytest.skip("not all seeds ran")
    wanted = ("device", "host", "storage", "aborts", "pauses", "retracted", "flushes", "new", "evicted", "tail")
    assert [name for name in wanted if not TOTALS[name]] == []

"""What SGLang with HiCache as its tree publishes, and what a flush and new weights leave: one engine over files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hicache.keys import page_keys, token_bytes
from tests.waiting import wait_for

from .dynamo_index import DynamoIndex
from .process import EngineProcess
from .prompts import prompt, write_config
from .sglang_engine import PAGE_TOKENS, flush, sglang_environ, sglang_options
from .test_events import replayed
from .test_routers import RoutedEngine

with warnings.catch_warnings():  # from SGLang and its imports
    warnings.simplefilter("ignore")
    from sglang.srt.disaggregation import kv_events

# The tokens of a prompt of 300 that can be cached.
CACHED = 299 // PAGE_TOKENS * PAGE_TOKENS
# The device has room for three prompts, and L2 for seven.
DEVICE_TOKENS, HOST_TOKENS = 1024, 2048


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The addresses of SGLang's publisher."""
    folder = tmp_path_factory.mktemp("ends")
    return {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}


@pytest.fixture(scope="module")
def sglang(llama: Path, ends: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("sglang-tree-events")
    files = {"path": str(folder / "store"), "capacity": "1GiB", "free_space_floor": 0}
    config = write_config(
        folder / "hicache.yaml", page_size=PAGE_TOKENS, host={"tokens": HOST_TOKENS},
        storage={"type": "file", "options": files},
    )
    options = sglang_options(
        llama, radix_cache_backend="hicache", max_total_tokens=DEVICE_TOKENS, context_length=DEVICE_TOKENS // 2,
        sleep_on_idle=True, kv_events_config=json.dumps({"publisher": "zmq", "topic": "kv-events", **ends}),
    )
    environ = sglang_environ(HICACHE_CONFIG_FILE=str(config))
    with EngineProcess("tests.engines.sglang_engine", options, folder=folder, environ=environ) as process:
        yield process


def test_a_router_scores_what_sglang_serves_from_each_tier(
    sglang: EngineProcess, ends: dict[str, str], tmp_path: Path
) -> None:
    with DynamoIndex(**ends, block_size=PAGE_TOKENS, folder=tmp_path) as index:
        engine, asked = RoutedEngine(sglang, index, PAGE_TOKENS), prompt("routed")
        assert engine.serve(asked) == 0
        assert engine.scores(asked)[0] == CACHED
        engine.fill(asked, 0)
        assert index.scores(asked) == (0, CACHED, CACHED)
        assert engine.serve(asked) == CACHED
        engine.fill(asked, 1)
        assert index.scores(asked) == (0, 0, CACHED)
        assert engine.serve(asked) == CACHED
        assert engine.scores(asked)[0] == CACHED
        for each in [asked, *engine.others]:  # on all mixtures of tiers, because each prompt evicts others
            assert engine.scores(each)[2] == engine.serve(each) == CACHED
        flush(sglang)
        assert engine.scores(asked) == (0, 0, 0)


def test_sglangs_decoder_reads_the_blocks_of_all_tiers(sglang: EngineProcess, ends: dict[str, str]) -> None:
    asked, decoder = prompt("decoded"), msgspec.msgpack.Decoder(kv_events.KVEventBatch)
    sglang.call("generate", prompts=[asked])
    keys = page_keys(token_bytes(asked), PAGE_TOKENS)
    wanted = [int.from_bytes(key[:8], "big", signed=True) for key in keys]

    def is_published(medium: str) -> bool:
        events = [event for payload in replayed(ends["replay_endpoint"]) for event in decoder.decode(payload).events]
        stored = [each for each in events if isinstance(each, kv_events.BlockStored) and each.medium == medium]
        blocks = {block: each for each in stored for block in each.block_hashes}
        return set(wanted) <= blocks.keys() and blocks[wanted[0]].token_ids[:PAGE_TOKENS] == asked[:PAGE_TOKENS]

    for medium in kv_events.StorageMedium.GPU, kv_events.StorageMedium.CPU, kv_events.StorageMedium.EXTERNAL:
        wait_for(lambda medium=medium: is_published(medium), pause_s=0.1)  # type: ignore[misc]


def test_a_flush_keeps_storage_and_new_weights_do_not(sglang: EngineProcess, llama: Path, other_llama: Path) -> None:
    asked = prompt("weights")

    def serve() -> tuple[int, list[int]]:
        (answer,) = sglang.call("generate", prompts=[asked])
        return answer["cached"], answer["tokens"]

    def update(model: Path) -> None:
        wait_for(lambda: sglang.call("update_weights", model=str(model)) == "", pause_s=0.05)

    def serve_from_storage() -> tuple[int, list[int]]:
        flush(sglang)
        return serve()

    uncached, tokens = serve()
    wait_for(lambda: serve_from_storage() == (CACHED, tokens))
    update(other_llama)
    found, others = serve()
    assert (uncached, found) == (0, 0) and others != tokens
    wait_for(lambda: serve_from_storage() == (CACHED, others))
    update(llama)  # an epoch is not used again
    assert serve() == (0, tokens)

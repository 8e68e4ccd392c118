"""vLLM's own offloading with HiCache's storage as its secondary tier: a hybrid model, on a CPU, in two processes.

The first process computes, and stores chunks in a Valkey server by copies. The second process reads these chunks in
place. vLLM has no offloading worker for CPUs, so a worker of the tests copies blocks (`vllm_cpu_spec`). The tests of
the second process depend on their order: later tests damage the pages and stop the server.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.redis import RedisDriver
from hicache.backends.stored import StoredPages
from hicache.config.redis_storage import RedisStorageOptions
from hicache_lab.devservers import ValkeyServer
from tests.waiting import wait_for

from .process import EngineProcess
from .prompts import prompt
from .vllm_engine import BLOCK_TOKENS, vllm_environ, vllm_options

# Several chunks, longer than the window, and not a whole number of blocks.
PROMPT_TOKENS = 410
TOKENS = 8
BLOCKS_PER_CHUNK = 2
# The whole chunks of a prompt.
CACHED_TOKENS = PROMPT_TOKENS // (BLOCKS_PER_CHUNK * BLOCK_TOKENS) * BLOCKS_PER_CHUNK * BLOCK_TOKENS
NAMES = ("hit", "zeroed", "damaged", "reset", "hung", "dead")
_READ = "vllm:kv_offload_tiering_read_bytes"


class Tier:
    """A store, and the answers of the first engine, whose chunks are in the store."""

    def __init__(self, server: ValkeyServer, model: Path, folder: Path) -> None:
        self.server, self.zeros, self._model, self._folder = server, folder / "zeros", model, folder
        kind, self._storage = server.storage()
        self._config = folder / "hicache.yaml"
        # Keep the breaker closed: an open one would answer in place of the store.
        guard = {"read": "on", "write": "on"}
        self._config.write_text(json.dumps({"storage": {"type": kind, "options": self._storage, "guard": guard}}))
        with self.start() as engine:
            self.cold = {name: serve(engine, name) for name in NAMES}

    def start(self, **options: object) -> EngineProcess:
        tier = {"type": "HiCacheTier", "module_path": "hicache.integrations.vllm_tier", "config": str(self._config)}
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 64 << 20, "blocks_per_chunk": BLOCKS_PER_CHUNK, "secondary_tiers": [tier | options],
        }
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return EngineProcess(
            "tests.engines.vllm_engine", vllm_options(self._model, kv_transfer_config=transfer),
            folder=self._folder, environ=vllm_environ(processes=False, zeros=self.zeros),
        )

    def damage_pages(self) -> int:
        """Flip a bit in the payload of each page. Return the number of pages."""
        client = self.server.client()
        keys = [key for key in client.scan_iter() if client.type(key) == b"string"]
        for key in keys:
            page = bytearray(client.get(key))
            page[len(page) // 2] ^= 1
            client.set(key, bytes(page))
        return len(keys)

    def namespaces(self) -> int:
        with contextlib.closing(StoredPages(RedisDriver(None, RedisStorageOptions(**self._storage)), "redis")) as raw:
            return len({page.namespace for page in raw.pages()})


def serve(engine: EngineProcess, name: str, **more: Any) -> dict[str, Any]:
    answer: dict[str, Any] = engine.call("generate", prompts=[prompt(name, PROMPT_TOKENS)], tokens=TOKENS, **more)[0]
    return answer


@pytest.fixture(scope="module")
def tier(hybrid_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    with ValkeyServer() as server:
        yield Tier(server, hybrid_model, tmp_path_factory.mktemp("tier"))


@pytest.fixture(scope="module")
def engine(tier: Tier) -> Iterator[EngineProcess]:
    """The second process."""
    with tier.start(in_place=True) as engine:
        yield engine


def test_a_new_process_reads_chunks_of_another_process(tier: Tier, engine: EngineProcess) -> None:
    assert all(answer["cached"] == 0 for answer in tier.cold.values())
    answer = serve(engine, "hit")
    assert answer == {"tokens": tier.cold["hit"]["tokens"], "cached": CACHED_TOKENS}
    metrics = engine.call("metrics")
    assert metrics[_READ] > 0 and metrics["vllm:prompt_tokens_cached_by_source disk"] == CACHED_TOKENS


def test_a_prompt_with_a_salt_does_not_share_chunks(tier: Tier, engine: EngineProcess) -> None:
    assert serve(engine, "hit", salt="tenant") == tier.cold["hit"]


def test_zeroed_loads_change_the_tokens(tier: Tier, engine: EngineProcess) -> None:
    """The control: the model uses the loaded chunks."""
    tier.zeros.touch()
    answer = serve(engine, "zeroed")
    tier.zeros.unlink()
    assert answer["cached"] == CACHED_TOKENS and answer["tokens"] != tier.cold["zeroed"]["tokens"]


def test_damaged_pages_are_misses(tier: Tier, engine: EngineProcess) -> None:
    read = engine.call("metrics")[_READ]
    assert tier.damage_pages() > 0
    assert serve(engine, "damaged") == tier.cold["damaged"]
    assert engine.call("metrics")[_READ] == read


def test_older_chunks_are_not_read_after_a_reset_of_the_connector(tier: Tier, engine: EngineProcess) -> None:
    """vLLM resets the connector for new weights."""
    assert tier.namespaces() == 1
    assert engine.call("reset", connector=True)
    assert serve(engine, "reset") == tier.cold["reset"]
    more = map(str, itertools.count())  # until the store is open again
    wait_for(lambda: tier.namespaces() == 2, lambda: serve(engine, next(more)))


def test_a_server_that_hangs_costs_only_hits(tier: Tier, engine: EngineProcess) -> None:
    tier.server.pause()
    assert serve(engine, "hung") == tier.cold["hung"]
    tier.server.resume()


def test_a_dead_server_costs_only_hits(tier: Tier, engine: EngineProcess) -> None:
    tier.server.kill()
    assert serve(engine, "dead") == tier.cold["dead"]
    assert engine.call("reset")
    again = serve(engine, "dead")
    assert again["tokens"] == tier.cold["dead"]["tokens"] and again["cached"] == CACHED_TOKENS  # vLLM's primary tier

"""vLLM on HiCache with few device blocks, and a store on the network that hangs, dies or is full.

One engine in one process. Its store is a Valkey server behind a proxy. Each test compares with tokens that were
computed without a cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_lab.devservers import ValkeyServer
from tests.proxy import Direction, Faults, Proxy
from tests.waiting import wait_for

from .process import EngineProcess
from .prompts import prompt, prompts, write_config
from .vllm_engine import HOOKS, hicache_connector, vllm_environ, vllm_options

# Room for two prompts of 300 tokens.
BLOCKS = 24
IN_PAGES = 256
PAGES = IN_PAGES // 64


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="module")
def proxy(server: ValkeyServer) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def vllm(llama: Path, proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("vllm")
    config = write_config(
        folder / "hicache.yaml",
        host={"tokens": 2048},
        prefetch={"threshold_tokens": 64, "timeout_base": "500ms"},
        storage={
            "type": "redis",
            # A shorter timeout ends the start on busy cores.
            "options": {"url": f"redis://127.0.0.1:{proxy.port}/0", "timeout": "2s"},
        },
    )
    options = vllm_options(
        llama,
        num_gpu_blocks_override=BLOCKS,
        max_model_len=512,
        kv_transfer_config=hicache_connector(config),
        worker_extension_cls=HOOKS,
    )
    with EngineProcess(
        "tests.engines.vllm_engine", options, folder=folder, environ=vllm_environ(processes=False)
    ) as engine:
        yield engine


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[Any]:
    client = server.client()
    yield client
    client.close()


def tokens_of(vllm: EngineProcess, asked: list[list[int]], **arguments: Any) -> list[list[int]]:
    return [each["tokens"] for each in vllm.call("generate", prompts=asked, **arguments)]


def cached_of(vllm: EngineProcess, asked: list[list[int]]) -> list[int]:
    return [each["cached"] for each in vllm.call("generate", prompts=asked)]


def reference(vllm: EngineProcess, asked: list[list[int]], tokens: int = 8) -> list[list[int]]:
    """Return the tokens of each prompt, served alone and without hits: a salt hides the cached pages."""
    return [tokens_of(vllm, [each], tokens=tokens, salt=f"reference {each}")[0] for each in asked]


def save(vllm: EngineProcess, asked: list[list[int]]) -> None:
    """Serve prompts, so that they are on L2, and reset the device."""
    for each in asked:
        vllm.call("generate", prompts=[each])
    assert vllm.call("reset")


def test_preempted_requests_give_the_same_tokens(vllm: EngineProcess) -> None:
    asked = prompts("preempted", 5, tokens=128)
    expected = reference(vllm, asked, tokens=96)
    before = vllm.call("metrics")["vllm:num_preemptions"]
    assert tokens_of(vllm, asked, tokens=96) == expected
    assert vllm.call("metrics")["vllm:num_preemptions"] > before


def test_failed_loads_are_computed_and_later_loads_work(vllm: EngineProcess) -> None:
    asked = prompts("failing", 4)
    expected = reference(vllm, asked)
    save(vllm, asked)
    vllm.call("workers", method="hicache_fail_loads", count=3)
    assert tokens_of(vllm, asked) == expected
    assert vllm.call("reset")
    assert cached_of(vllm, asked) == [IN_PAGES] * 4


def test_a_hit_in_host_memory_takes_two_steps(vllm: EngineProcess) -> None:
    """One loads the pages and waits for them, the next one computes. The control does not wait for a load that is
    held."""
    asked = prompts("two steps", 1)
    save(vllm, asked)
    (before,) = vllm.call("workers", method="hicache_wait_for_loads", seconds=60.0)
    try:
        names = vllm.call("add", prompts=asked, tokens=1)
        (found,) = vllm.call("run", names=names, steps_max=2)
        assert found["cached"] == IN_PAGES and vllm.call("reset")
        vllm.call("workers", method="hicache_wait_for_loads", seconds=0.0)
        vllm.call("workers", method="hicache_hold_loads")
        names = vllm.call("add", prompts=asked, tokens=1)
        assert vllm.call("run", names=names, steps_max=2) == [None]
        vllm.call("workers", method="hicache_release_loads")
        (found,) = vllm.call("run", names=names)
        assert found["cached"] == IN_PAGES
    finally:
        vllm.call("workers", method="hicache_wait_for_loads", seconds=before)


def test_a_request_aborted_during_its_load_leaves_nothing(vllm: EngineProcess) -> None:
    asked = prompts("aborted", 2)
    expected = reference(vllm, asked)
    save(vllm, asked)
    vllm.call("workers", method="hicache_hold_loads")
    names = vllm.call("add", prompts=asked)
    assert vllm.call("run", names=names, steps_max=20) == [None, None]
    vllm.call("abort", names=names[:1])
    assert vllm.call("run", names=names, steps_max=20) == [None, None]
    vllm.call("workers", method="hicache_release_loads")
    (found,) = vllm.call("run", names=names[1:])
    assert (found["tokens"], found["cached"]) == (expected[1], IN_PAGES)
    assert vllm.call("reset")  # no block is in use
    assert tokens_of(vllm, asked) == expected


def test_a_running_request_that_is_aborted_leaves_nothing(vllm: EngineProcess) -> None:
    asked = prompts("stopped", 2)
    expected = reference(vllm, asked)
    names = vllm.call("add", prompts=asked, tokens=100)
    vllm.call("run", names=names, steps_max=3)
    vllm.call("abort", names=names)
    vllm.call("run", names=names)
    assert vllm.call("reset")  # no block is in use
    assert tokens_of(vllm, asked) == expected


FAULTS = {
    "hung": lambda proxy, client: proxy.set(Faults(stall=Direction.DOWN)),
    "dead": lambda proxy, client: proxy.set(Faults(refuse=True)),
    "full": lambda proxy, client: client.config_set("maxmemory", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_store_costs_only_hits(
    vllm: EngineProcess, proxy: Proxy, client: Any, fault: str
) -> None:
    old, new = prompt(f"{fault}, old"), prompt(f"{fault}, new")
    expected = reference(vllm, [old, new])
    client.flushall()
    # Retry, because storage may still recover from the previous fault. Each use of a page on L2 stores it.
    wait_for(lambda: client.dbsize() >= PAGES, lambda: save(vllm, [old]))
    in_storage_only(vllm, fault)
    FAULTS[fault](proxy, client)
    try:
        assert tokens_of(vllm, [old, new]) == expected
        assert vllm.call("reset")
        assert cached_of(vllm, [new]) == [IN_PAGES]  # from L2
    finally:
        proxy.heal()
        client.config_set("maxmemory", 0)
    require_recovery(vllm, fault)


def in_storage_only(vllm: EngineProcess, name: str) -> None:
    """Evict earlier prompts from host memory by other prompts, and reset the device."""
    save(vllm, prompts(f"filler of {name}", 8))


def require_recovery(vllm: EngineProcess, name: str) -> None:
    """Check that prompts computed some time after the fault are stored and found."""
    numbers = itertools.count()

    def stored_and_found() -> bool:
        last = f"{name}, healed {next(numbers)}"
        save(vllm, [prompt(last)])
        in_storage_only(vllm, last)
        return cached_of(vllm, [prompt(last)]) == [IN_PAGES]

    wait_for(stored_and_found)

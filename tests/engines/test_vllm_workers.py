"""vLLM on HiCache with two tensor-parallel workers, over the files of an engine with one and with other blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_for

from .process import EngineProcess
from .prompts import prompt, prompts, write_config
from .vllm_engine import hicache_connector, vllm_environ, vllm_options

IN_PAGES = 256
PAGES = IN_PAGES // 64


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "pages"


def start(model: Path, store: Path, folder: Path, **options: object) -> EngineProcess:
    files = {"type": "file", "options": {"path": str(store), "capacity": "1GiB", "free_space_floor": 0}}
    config = write_config(folder / "hicache.yaml", host={"tokens": 1024}, storage=files)
    return EngineProcess(
        "tests.engines.vllm_engine",
        vllm_options(
            model,
            kv_transfer_config=hicache_connector(config),
            worker_extension_cls="tests.engines.vllm_hooks.Hooks",
            **options,
        ),
        folder=folder,
        environ=vllm_environ(processes=False),
    )


@pytest.fixture(scope="module")
def workers(llama: Path, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with start(llama, store, tmp_path_factory.mktemp("workers"), tensor_parallel_size=2) as engine:
        yield engine


def generate(vllm: EngineProcess, *asked: list[int]) -> tuple[list[list[int]], list[int]]:
    found = vllm.call("generate", prompts=list(asked))
    return [each["tokens"] for each in found], [each["cached"] for each in found]


def stored(vllm: EngineProcess, store: Path, asked: list[int]) -> list[int]:
    """Let the engine compute a new prompt and store it; returns the tokens."""
    before = len(list(store.glob("*/??/*")))
    ((tokens,), cached) = generate(vllm, asked)
    assert cached == [0]
    wait_for(lambda: len(list(store.glob("*/??/*"))) >= before + PAGES)
    return tokens


def test_tokens_are_equal_cold_and_from_host_and_files(workers: EngineProcess, store: Path) -> None:
    asked = prompt("workers")
    cold = stored(workers, store, asked)
    assert workers.call("reset")
    assert generate(workers, asked) == ([cold], [IN_PAGES])
    generate(workers, *prompts("workers' filler", 5))  # pushes it out of host memory
    assert workers.call("reset")
    assert generate(workers, asked) == ([cold], [IN_PAGES])


def test_zeroed_frames_of_one_worker_change_the_tokens(workers: EngineProcess, store: Path) -> None:
    asked = prompt("zeroed")
    cold = stored(workers, store, asked)
    assert workers.call("reset")
    workers.call("workers", method="hicache_zero_frames", rank=1)
    tokens, cached = generate(workers, asked)
    assert cached == [IN_PAGES] and tokens != [cold]


def test_a_load_that_fails_on_both_workers_is_computed(workers: EngineProcess, store: Path) -> None:
    asked = prompt("failing")
    cold = stored(workers, store, asked)
    assert workers.call("reset")
    workers.call("workers", method="hicache_fail_loads", count=1)
    assert generate(workers, asked) == ([cold], [0])
    assert workers.call("reset")
    assert generate(workers, asked) == ([cold], [IN_PAGES])

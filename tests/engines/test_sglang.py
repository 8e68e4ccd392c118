"""SGLang on HiCache: two engines over the same files, and one with another layout over a daemon that fails.

Each test has its own prompts and takes its reference from a cold run. `test_zeroed_pages_change_the_tokens` is the
control: it shows that engines read stored KV.
"""

from __future__ import annotations

import signal
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_lab.devservers.ports import LOOPBACK
from tests.daemon.daemons import Daemon
from tests.listening import held_ports
from tests.waiting import wait_for

from .process import EngineProcess
from .prompts import prompts, write_config
from .sglang_engine import PAGE_TOKENS, flush, sglang_environ, sglang_options, wait_until_stored
from .stored_pages import are_stored, files_of, flip, stored, swap, zero

# The tokens of a prompt of 300 that can be cached; the last token is computed.
CACHED = 299 // PAGE_TOKENS * PAGE_TOKENS

Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The first of two ports for the metrics of two engines."""
    with held_ports(2) as port:
        yield port


@pytest.fixture(scope="module")
def start(llama: Path, folder: Path) -> Callable[..., EngineProcess]:
    def begin(config: Path, *, fixed_weights: bool = True, **changes: object) -> EngineProcess:
        # Otherwise the scheduler of each idle engine uses a core.
        changes["sleep_on_idle"] = True
        options = sglang_options(llama, {"config": str(config), "fixed_weights": fixed_weights}, **changes)
        return EngineProcess("tests.engines.sglang_engine", options, folder=folder, environ=sglang_environ())

    return begin


@pytest.fixture(scope="module")
def files(folder: Path, port: int) -> Path:
    """Return the configuration of two engines. They use consecutive ports for metrics."""
    options = {"path": str(folder / "pages"), "free_space_floor": 0}
    storage = {"type": "file", "options": options}
    return write_config(folder / "files.yaml", page_size=PAGE_TOKENS, storage=storage, metrics={"port": port})


@pytest.fixture(scope="module")
def first(start: Callable[..., EngineProcess], files: Path) -> Iterator[EngineProcess]:
    with start(files) as engine:
        yield engine


@pytest.fixture(scope="module")
def second(first: EngineProcess, start: Callable[..., EngineProcess], files: Path) -> Iterator[EngineProcess]:
    with start(files, fixed_weights=False, enable_metrics=True) as engine:
        yield engine


def generate(engine: EngineProcess, asked: list[list[int]]) -> Answers:
    answers: Answers = engine.call("generate", prompts=asked)
    return answers


def update(engine: EngineProcess, model: Path) -> None:
    """Load other weights in place. Retry, because SGLang fails while a request is still in flight."""
    wait_for(lambda: engine.call("update_weights", model=str(model)) == "", pause_s=0.05)


def tokens(answers: Answers) -> list[Any]:
    return [answer["tokens"] for answer in answers]


def cached(answers: Answers) -> list[int]:
    return [answer["cached"] for answer in answers]


def cold(engine: EngineProcess, folder: Path, asked: list[list[int]]) -> Answers:
    """Compute new prompts, and wait until their pages are stored."""
    answers = generate(engine, asked)
    assert cached(answers) == [0] * len(asked)
    wait_until_stored(engine, asked, lambda: are_stored(asked, folder))
    return answers


def metric(port: int, line: str) -> float:
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=60) as answer:
        page = answer.read().decode()
    return sum(float(row.rpartition(" ")[2]) for row in page.splitlines() if row.startswith(line))


def test_tokens_are_equal_cold_and_from_storage(first: EngineProcess, folder: Path, port: int) -> None:
    asked = prompts("cold", 2)
    expected = cold(first, folder, asked)
    flush(first)
    again = generate(first, asked)
    assert tokens(again) == tokens(expected)
    assert cached(again) == [CACHED, CACHED]
    assert metric(port, 'hicache_backend_get_pages_total{backend="file",outcome="hit"}') >= 2 * CACHED // PAGE_TOKENS


def test_each_engine_reads_the_pages_of_the_other(
    first: EngineProcess, second: EngineProcess, folder: Path, port: int
) -> None:
    for writer, reader, name in ((first, second, "there"), (second, first, "back")):
        asked = prompts(name, 2)
        expected = cold(writer, folder, asked)
        found = generate(reader, asked)
        assert tokens(found) == tokens(expected)
        assert cached(found) == [CACHED, CACHED]
    assert metric(port + 1, "hicache_build_info") == 1


def test_flipped_bytes_and_swapped_pages_cost_only_hits(
    first: EngineProcess, second: EngineProcess, folder: Path, port: int
) -> None:
    asked = prompts("damaged", 2)
    expected = cold(first, folder, asked)
    flip(files_of(asked[0], folder)[4])
    swap(*files_of(asked[1], folder)[6:8])
    found = generate(second, asked)
    assert tokens(found) == tokens(expected)
    assert cached(found) == [4 * PAGE_TOKENS, 6 * PAGE_TOKENS]
    assert metric(port + 1, "hicache_backend_corrupt_pages_total") >= 2


def test_zeroed_pages_change_the_tokens(first: EngineProcess, second: EngineProcess, folder: Path) -> None:
    """The control: pages with a valid seal but wrong KV give wrong tokens."""
    asked = prompts("zeroed", 1)
    expected = cold(first, folder, asked)
    for path in files_of(asked[0], folder):
        zero(path)
    found = generate(second, asked)
    assert cached(found) == [CACHED]
    assert tokens(found) != tokens(expected)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    """Start a daemon over the files of the other engines."""
    options = {"path": str(folder / "pages"), "free_space_floor": 0}
    with (
        tempfile.TemporaryDirectory(prefix="hc-") as short,  # the path of a Unix socket has at most 107 bytes
        Daemon(Path(short), storage={"type": "file", "options": options}) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def remote(daemon: Daemon, start: Callable[..., EngineProcess], folder: Path) -> Iterator[EngineProcess]:
    """Start an engine with another layout over the daemon. It waits at most one second for storage."""
    storage = {"type": "remote", "options": {"socket": str(daemon.socket), "timeout": "500ms"}}
    config = write_config(
        folder / "remote.yaml", page_size=PAGE_TOKENS, storage=storage, transfer={"storage_deadline": "1s"}
    )
    with start(
        config, hicache_mem_layout="page_first_direct", hicache_io_backend="direct",
        hicache_storage_prefetch_policy="timeout",
    ) as engine:
        yield engine


def test_an_engine_with_another_layout_finds_no_pages_of_the_others(
    first: EngineProcess, remote: EngineProcess, folder: Path
) -> None:
    asked = prompts("layout", 1)
    expected = cold(first, folder, asked)
    found = generate(remote, asked)
    assert cached(found) == [0]
    assert tokens(found) == tokens(expected)


def test_a_daemon_that_hangs_dies_or_is_full_costs_only_hits(
    remote: EngineProcess, daemon: Daemon, folder: Path
) -> None:
    asked = prompts("faults", 2)
    expected = cold(remote, folder, asked)

    def again() -> list[int]:
        flush(remote)
        found = generate(remote, asked)
        assert tokens(found) == tokens(expected)
        return cached(found)

    wait_for(lambda: again() == [CACHED, CACHED])  # from the daemon, over HTTP
    daemon.pause()
    assert again() == [0, 0]
    daemon.signal(signal.SIGCONT)
    wait_for(lambda: again() == [CACHED, CACHED])
    daemon.kill()
    assert again() == [0, 0]
    full = {"path": str(folder / "full"), "free_space_floor": "900TiB"}
    daemon.configure(storage={"type": "file", "options": full})
    daemon.start()
    assert again() == [0, 0]
    assert generate(remote, prompts("on a full store", 1))[0]["cached"] == 0
    wait_for(lambda: again() == [CACHED, CACHED])  # from the daemon's pool: the store keeps nothing


def test_after_new_weights_storage_is_not_used(
    first: EngineProcess, second: EngineProcess, other_llama: Path, folder: Path
) -> None:
    asked = prompts("new weights", 1)
    expected = cold(first, folder, asked)
    assert tokens(generate(second, asked)) == tokens(expected)
    for engine in (second, first):
        update(engine, other_llama)
    files = len(stored(folder))
    found = generate(second, asked)
    assert cached(found) == [0]
    assert tokens(found) != tokens(expected)
    assert len(stored(folder)) == files
    # The control: with `fixed_weights`, the engine reads pages of the old weights.
    assert cached(generate(first, asked)) == [CACHED]

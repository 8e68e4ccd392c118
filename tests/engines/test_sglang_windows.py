"""An SGLang engine with a model whose layers but one have a sliding window, over files: SGLang keeps their KV in a pool
of its own, and stores only the last pages of a prompt from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .model import WINDOW, save_model
from .process import EngineProcess
from .prompts import prompts, write_config
from .sglang_engine import PAGE_TOKENS, flush, sglang_environ, sglang_options, wait_until_stored
from .stored_pages import flip, keys_of, zero

# The tokens of a prompt of 300 that can be cached; the last token is computed.
CACHED = 299 // PAGE_TOKENS * PAGE_TOKENS
WINDOW_PAGES = WINDOW // PAGE_TOKENS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang-windows")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EngineProcess]:
    storage = {"type": "file", "options": {"path": str(folder / "pages"), "free_space_floor": 0}}
    config = write_config(folder / "files.yaml", page_size=PAGE_TOKENS, storage=storage)
    extra = {"config": str(config), "fixed_weights": True}
    options = sglang_options(save_model(folder / "model", "pools"), extra, sleep_on_idle=True)
    with EngineProcess("tests.engines.sglang_engine", options, folder=folder, environ=sglang_environ()) as running:
        yield running


def generate(engine: EngineProcess, prompt: list[int]) -> tuple[list[int], int]:
    """Return the tokens, and the number of cached tokens."""
    (answer,) = engine.call("generate", prompts=[prompt])
    return answer["tokens"], answer["cached"]


def stored(folder: Path, prompt: list[int]) -> dict[bool, list[Path]]:
    """Return the stored pages of a prompt in order: True for those of windows, which are larger, as more layers have
    one."""
    files = [path for path in (folder / "pages").rglob("*") if path.is_file()]
    found: dict[bool, list[Path]] = {True: [], False: []}
    for key in keys_of(prompt):
        pages = [path for path in files if path.name.startswith(key)]
        pages.sort(key=lambda path: path.stat().st_size)
        found[False] += pages[:1]
        found[True] += pages[1:]
    return found


def cold(engine: EngineProcess, folder: Path, prompt: list[int]) -> list[int]:
    """Compute a new prompt, and wait until its pages are stored. Return the tokens."""
    tokens, cached = generate(engine, prompt)
    assert cached == 0
    expected = {False: CACHED // PAGE_TOKENS, True: WINDOW_PAGES}
    wait_until_stored(
        engine, [prompt], lambda: {kind: len(pages) for kind, pages in stored(folder, prompt).items()} == expected
    )
    flush(engine)
    return tokens


def test_tokens_are_equal_cold_and_from_storage(engine: EngineProcess, folder: Path) -> None:
    for prompt in prompts("windows", 2):
        assert (cold(engine, folder, prompt), CACHED) == generate(engine, prompt)


def test_a_damaged_page_of_a_window_costs_only_hits(engine: EngineProcess, folder: Path) -> None:
    (prompt,) = prompts("damaged window", 1)
    expected = cold(engine, folder, prompt)
    flip(stored(folder, prompt)[True][3])
    assert generate(engine, prompt) == (expected, 0)


def test_zeroed_pages_of_windows_change_the_tokens(engine: EngineProcess, folder: Path) -> None:
    """The control: the engine reads the windows from storage."""
    (prompt,) = prompts("zeroed windows", 1)
    expected = cold(engine, folder, prompt)
    for page in stored(folder, prompt)[True]:
        zero(page)
    tokens, cached = generate(engine, prompt)
    assert cached == CACHED
    assert tokens != expected

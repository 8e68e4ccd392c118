"""Caches that their engine has not closed are closed at exit, or after they were collected."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from hicache.cache import unclosed
from tests.cache.ending import PAGES, PROMPTS, engine_on, served
from tests.waiting import wait_for

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
CLOSED = "cache was not closed by its engine; closed at its end, after"


def ended(way: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an engine that ends in this way."""
    command = [sys.executable, "-W", "default::ResourceWarning", "-m", "tests.cache.ending", way, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def found(folder: Path) -> list[int]:
    """Return how many pages of each prompt the next engine finds."""
    engine = engine_on(folder)
    with closing(engine.cache):
        pages = [engine.serve(key) for key in PROMPTS]
    assert engine.wrong == 0
    return pages


SAVED, LOST = (CLOSED, ": 0 pages are lost"), f"{PAGES} pages are lost"
AT_EXIT, COLLECTED = (f"ResourceWarning: HiRadixCache {what}" for what in ("still existed at exit", "was collected"))


@pytest.mark.parametrize(
    ("way", "status", "texts"),
    [
        ("returns", 0, (*SAVED, AT_EXIT)),
        ("raises", 1, (*SAVED, AT_EXIT)),
        ("thread polls", 0, SAVED),
        ("collected", 0, (*SAVED, COLLECTED)),  # the exit waits for the close that has begun
        ("hangs", 0, (CLOSED, LOST)),
        ("thread stopped", 0, ("its thread engine did not close it", LOST)),
    ],
)
def test_a_program_that_ends_without_close_loses_only_pages_that_cannot_be_stored_and_is_told(
    way: str, status: int, texts: tuple[str, ...], tmp_path: Path
) -> None:
    end = ended(way, tmp_path / "pages")
    assert end.returncode == status
    assert all(text in end.stderr for text in texts), end.stderr
    assert end.stderr.count(AT_EXIT) == (AT_EXIT in texts or LOST in texts or way == "thread polls")
    if LOST not in texts:
        assert found(tmp_path / "pages") == [5, 5, 5]


@pytest.mark.parametrize(("way", "status"), [("with", 1), ("forks", 0)])
def test_the_end_of_a_with_block_and_the_parent_of_a_fork_close_the_cache(
    way: str, status: int, tmp_path: Path
) -> None:
    end = ended(way, tmp_path / "pages")
    assert end.returncode == status and "not closed" not in end.stderr
    assert found(tmp_path / "pages") == [5, 5, 5]


def test_a_cache_that_is_collected_is_closed_in_the_background(tmp_path: Path) -> None:
    engine = served(tmp_path / "pages")
    engine.cache.check()
    with pytest.warns(ResourceWarning, match="was collected and was not closed"):
        del engine
        gc.collect()
    wait_for(lambda: not unclosed._ending)
    assert found(tmp_path / "pages") == [5, 5, 5]


def test_a_cache_that_was_closed_is_collected_in_silence(tmp_path: Path) -> None:
    engine = served(tmp_path / "pages")
    assert engine.cache.close()
    del engine
    gc.collect()
    assert not unclosed._ending

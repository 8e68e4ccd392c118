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
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def found(folder: Path) -> list[int]:
    """Return how many pages of each prompt the next engine finds."""
    engine = engine_on(folder)
    with closing(engine.cache):
        pages = [engine.serve(key) for key in PROMPTS]
    assert engine.wrong == 0
    return pages


@pytest.mark.parametrize(("way", "status"), [("returns", 0), ("raises", 1)])
def test_a_program_that_ends_without_close_loses_no_page_and_is_told(way: str, status: int, tmp_path: Path) -> None:
    end = ended(way, tmp_path / "pages")
    assert end.returncode == status
    assert CLOSED in end.stderr and ": 0 pages are lost" in end.stderr
    assert end.stderr.count("ResourceWarning: HiRadixCache still existed at exit") == 1
    assert found(tmp_path / "pages") == [5, 5, 5]


def test_an_exception_in_a_with_block_closes_the_cache(tmp_path: Path) -> None:
    end = ended("with", tmp_path / "pages")
    assert end.returncode == 1 and "not closed" not in end.stderr
    assert found(tmp_path / "pages") == [5, 5, 5]


def test_a_store_that_hangs_does_not_hang_the_exit_and_the_lost_pages_are_counted(tmp_path: Path) -> None:
    end = ended("hangs", tmp_path / "pages")
    assert end.returncode == 0
    assert CLOSED in end.stderr and f": {PAGES} pages are lost" in end.stderr


def test_a_forked_child_leaves_the_cache_to_its_parent(tmp_path: Path) -> None:
    end = ended("forks", tmp_path / "pages")
    assert end.returncode == 0 and "not closed" not in end.stderr
    assert found(tmp_path / "pages") == [5, 5, 5]


def test_a_daemon_thread_that_polls_closes_its_cache_itself(tmp_path: Path) -> None:
    end = ended("thread polls", tmp_path / "pages")
    assert end.returncode == 0 and CLOSED in end.stderr and ": 0 pages are lost" in end.stderr
    assert found(tmp_path / "pages") == [5, 5, 5]


def test_a_daemon_thread_that_does_not_poll_keeps_its_cache_and_the_lost_pages_are_counted(tmp_path: Path) -> None:
    end = ended("thread stopped", tmp_path / "pages")
    assert end.returncode == 0
    assert "its thread engine did not close it" in end.stderr and f"{PAGES} pages are lost" in end.stderr


def test_a_program_that_ends_while_a_collected_cache_is_being_closed_waits_for_that(tmp_path: Path) -> None:
    end = ended("collected", tmp_path / "pages")
    assert "ResourceWarning: HiRadixCache was collected" in end.stderr
    assert CLOSED in end.stderr and ": 0 pages are lost" in end.stderr
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

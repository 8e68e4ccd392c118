"""The conformance table shows the results of the contract tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

TESTS = '''
"""Two drivers under contract, one of them wrong in one test, and a test that is of no contract."""

import pytest

from hicache.backends.memory import MemoryDriver
from hicache_lab.conformance import memory_subject, SoleDriverContract, Subject, bare


class TestSound(SoleDriverContract):
    @pytest.fixture
    def open_store(self):
        return lambda codec: make(MemoryDriver(), codec)

    def test_a_deadline_may_be_infinite(self):
        pytest.skip("no clock")


class Generous(MemoryDriver):
    def find(self, namespace, keys, deadline):
        found = super().find(namespace, keys, deadline)
        return [True] * len(keys) if found[0] else found


class TestWrong(SoleDriverContract):
    @pytest.fixture
    def open_store(self):
        return lambda codec: make(Generous(), codec)


def make(driver, codec):
    return memory_subject(bare(driver, codec), driver)


def test_something_else():
    raise AssertionError
'''


def rows(tmp_path: Path, repository: Path, *args: str) -> tuple[int, str, dict[str, list[str]]]:
    """Return exit code and output of pytest, and the table, in `table.md` or printed: cells by test."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text(TESTS.replace("class TestWrong", "class TestLast"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "hicache_lab.conformance.table",
         "-k", "exists or infinite or deleting or something", *args],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(repository)}, capture_output=True, text=True, timeout=300,
        check=False,
    )
    table = tmp_path / "table.md"
    lines = (table.read_text() if table.exists() else done.stdout).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return done.returncode, done.stdout, {row[0]: row[1:] for row in cells}


def test_the_table_counts_cases_and_shows_failures_and_replaced_tests(
    tmp_path: Path, repository: Path
) -> None:
    code, _, cells = rows(tmp_path, repository, "test_some.py", "test_other.py", "--conformance", "table.md")
    assert code == 1
    assert cells["test"] == ["Sound (some)", "Wrong", "Sound (other)", "Last"], "two classes of one name"
    assert cells["deleting twice counts once"] == ["1"] * 4
    assert cells["exists stops at the first hole"] == ["1", "0 **1 failed**"] * 2
    assert cells["a deadline may be infinite"] == ["0 own 1 skipped", "1"] * 2
    head = (tmp_path / "table.md").read_text().splitlines()[0]
    assert head.startswith("4 backends, ") and head.endswith("; not passed: 4.")


def test_a_dash_prints_the_table(tmp_path: Path, repository: Path) -> None:
    _, _, cells = rows(tmp_path, repository, "test_some.py", "--conformance", "-")
    assert cells["deleting twice counts once"] == ["1", "1"]

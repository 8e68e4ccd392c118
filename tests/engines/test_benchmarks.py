"""The benchmarks beside the engines' own offloading run. No test compares their figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .process import ROOT, engine_environ


@pytest.mark.parametrize(
    "command",
    [["sglang_files", "--pages", "4", "--threads", "1", "--layouts", "layer_first"], ["vllm_tiers"]],
    ids=lambda command: command[0],
)
def test_the_benchmark_compares_hicache_with_the_storage_of_the_engine(command: list[str], tmp_path: Path) -> None:
    module, *options = command
    ended = subprocess.run(
        [sys.executable, "-m", f"lab.benchmarks.engines.{module}", *options, "--path", str(tmp_path), "--rounds", "1",
         "0"],
        cwd=ROOT, env=engine_environ(), capture_output=True, text=True, timeout=300, check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rates = [line for line in ended.stdout.splitlines() if line.count(" GB/s") == 2]
    assert {line.split()[0] for line in rates} == {"read", "write"}
    assert not list(tmp_path.iterdir())


def test_the_benchmark_compares_hicache_as_the_tree_with_the_tree_of_the_engine(tmp_path: Path) -> None:
    """With the smallest sizes: each side of each row has a figure, so each of its hits was found."""
    page = tmp_path / "page.md"
    ended = subprocess.run(
        [sys.executable, "-m", "lab.benchmarks", "engines.sglang_tree", "--smallest", "--path", str(tmp_path),
         "--write", str(page)],
        cwd=ROOT, env=engine_environ(), capture_output=True, text=True, timeout=300, check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == [page.name]
    rows = page.read_text(encoding="utf-8")
    for what in ("cached tokens", "processor time of the tree's calls", "token from L2", "token from files"):
        assert what in rows

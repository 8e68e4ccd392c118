"""The example of a backend in another package: installed, found by its name, through the contract, and in use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

TIMEOUT_S = 500


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """Return a copy of the example, because building a package leaves files in its directory."""
    target = tmp_path_factory.mktemp("third-party") / "source"
    shutil.copytree(repository / "examples" / "third_party_backend", target)
    return target


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package into a directory, without a network: the environment has setuptools."""
    target = tmp_path_factory.mktemp("installed")
    run(
        source, None, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index",
        "--no-build-isolation", "--target", target, source,
    )
    return target


def run(folder: Path, installed: Path | None, *args: str | Path) -> str:
    """Run Python in `folder`, with the directory `installed` on its path. Return its output."""
    repository = Path(__file__).resolve().parent.parent
    path = os.pathsep.join(map(str, filter(None, (installed, repository))))
    done = subprocess.run(
        [sys.executable, *map(str, args)], cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=TIMEOUT_S, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_own_tests_pass_with_the_installed_package(source: Path, installed: Path, tmp_path: Path) -> None:
    shutil.copytree(source / "tests", tmp_path / "tests")
    out = run(tmp_path, installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert " passed" in out and "skipped" not in out


def test_without_the_installation_its_name_is_unknown(tmp_path: Path) -> None:
    """The control: the entry point of the installed package defines the name, not the repository."""
    code = "from hicache.backends.registry import backend_names; print(backend_names())"
    assert "sqlite" not in run(tmp_path, None, "-c", code)


def stat(folder: Path, installed: Path) -> dict[str, Any]:
    """Return the output of `hicache stat` for the store."""
    out = run(folder, installed, "-m", "hicache", "stat", "sqlite.yaml", "--chains", "--json")
    (part,) = json.loads(out)["parts"]
    assert isinstance(part, dict)
    return part


def test_the_backend_serves_pages_and_the_tools_support_it(source: Path, installed: Path, tmp_path: Path) -> None:
    shutil.copy(source / "sqlite.yaml", tmp_path)
    for _ in range(2):
        run(
            tmp_path, installed, "-m", "hicache", "replay", "-c", "sqlite.yaml", "--requests", "60",
            "--prefill-rate", "0", "--json", "report.json",
        )
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["tokens"]["hits"]["storage"] > 0 and report["wrong_bytes"] == 0
    part = stat(tmp_path, installed)
    assert part["type"] == "sqlite" and part["pages"] > 0 and part["orphans"] == part["damaged"] == 0
    assert part["capacity_bytes"] == 1 << 30
    out = run(tmp_path, installed, "-m", "hicache", "copy", "sqlite.yaml", "files")
    assert out.startswith(f"copied {part['pages']:,} pages")
    out = run(tmp_path, installed, "-m", "hicache", "verify", "sqlite.yaml")
    assert out.startswith(f"checked {part['pages']:,} pages") and "none damaged" in out
    run(tmp_path, installed, "-m", "hicache", "trim", "sqlite.yaml", "--to", "1MiB", "--yes")
    left = stat(tmp_path, installed)
    assert left["bytes"] <= 1 << 20 and left["orphans"] == 0
    out = run(tmp_path, installed, "-m", "hicache", "purge", "sqlite.yaml", "--yes")
    assert out.startswith(f"removed {left['pages']:,} page")

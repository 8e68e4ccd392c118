"""Operators' commands without PyTorch. Only caches, replays and the demo need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hicache.cli.main import COMMANDS, LAB_COMMANDS
from hicache.frame import FrameCodec
from hicache_lab.conformance import make_keys
from tests.cli.file_stores import fill

pytestmark = pytest.mark.long

# With this line, `import torch` raises the same error as without the package.
WITHOUT = "import sys; sys.modules['torch'] = None\n"
NEED_TORCH = {"demo", "replay"}
CODEC = FrameCodec(b"\x11" * 32, 3000, label="a model")


def hicache(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"{WITHOUT}from hicache.cli.main import main; main(prog_name='hicache')"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd, stdin=subprocess.DEVNULL
    )


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Store one page in `store`, write a configuration of the store, and return the page's file."""
    (key,) = make_keys(1)
    fill(tmp_path / "store", CODEC, [key])
    (tmp_path / "store.yaml").write_text("storage: {type: file, options: {path: store}}")
    (found,) = (tmp_path / "store").rglob(key.hex())
    return found


def test_every_command_is_loaded_without_torch(tmp_path: Path) -> None:
    assert failures([[name, "--help"] for name in sorted({*COMMANDS, *LAB_COMMANDS} - {"demo"})], tmp_path) == "[]"


def test_operators_commands_work_without_torch(tmp_path: Path, page: Path) -> None:
    lines = [
        "ls store", "ls store.yaml --pages", "stat store --chains", "verify store", "inspect PAGE", "copy store other",
        "trim store --to 0 --yes", "purge store --yes", "config check store.yaml", "config schema",
        "doctor -c store.yaml", "trace generate trace.jsonl --requests 2", "plan trace.jsonl --nodes 2",
    ]
    assert failures([line.replace("PAGE", str(page)).split() for line in lines], tmp_path) == "[]"


def failures(lines: list[list[str]], cwd: Path) -> str:
    """Run command lines one after another in one process without torch. Return those that fail, with their outputs."""
    code = (
        f"{WITHOUT}from click.testing import CliRunner\nfrom hicache.cli.main import main\n"
        f"results = [(line, CliRunner().invoke(main, line)) for line in {lines!r}]\n"
        "print([(line, result.output) for line, result in results if result.exit_code])"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True, cwd=cwd
    ).stdout.strip()


@pytest.mark.parametrize("name", sorted(NEED_TORCH))
def test_a_command_that_needs_torch_says_so(name: str, tmp_path: Path) -> None:
    result = hicache(tmp_path, name)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "needs the package torch; install torch" in result.stderr


def test_importing_a_cache_without_torch_raises_an_error_that_names_the_extra(tmp_path: Path) -> None:
    code = f"{WITHOUT}from hicache.errors import MissingPackage\nimport hicache, hicache.metrics, hicache.daemon\n"
    code += "try:\n    from hicache import create_cache\nexcept ImportError as error:\n    print(repr(error))\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout.startswith('MissingPackage("hicache.cache.create_cache needs PyTorch; install the extra torch')

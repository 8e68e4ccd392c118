"""The public names: all there, each its own module's, and nothing heavy imported before one is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import hicache
from hicache.cli.model_shapes import PRESETS


@pytest.mark.parametrize("name", hicache.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(hicache, name) is not None
    assert name in dir(hicache)


def test_type_checkers_see_the_same_names(repository: Path) -> None:
    tree = ast.parse((repository / "hicache/__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    seen = {alias.name for node in imports if node.module != "lazy" for alias in node.names}
    assert seen | {"__version__"} == set(hicache.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchThing"):
        getattr(hicache, "NoSuchThing")  # noqa: B009  a plain attribute would not pass the type checker


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import hicache, sys; print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout.strip() == "[]"


def test_the_sizes_of_models_in_the_readme_are_those_of_the_geometry(repository: Path) -> None:
    lines = (repository / "README.md").read_text().splitlines()
    llama, deepseek = (replace(PRESETS[name], page_size=64) for name in ("llama-3.1-8b", "deepseek-v3"))
    token = f"| KV of a token | {llama.token_bytes // 1024} KiB | {deepseek.token_bytes:,} B | |"
    page = f"| KV of a page | {llama.payload_bytes / 2**20:.1f} MiB | {deepseek.payload_bytes / 2**20:.1f} MiB | |"
    assert token in lines and page in lines

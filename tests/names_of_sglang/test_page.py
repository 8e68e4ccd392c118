"""docs/from_sglang.md: each name on its right-hand side exists."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from hicache.config import HiCacheConfig, Section

# Behind the first column of a table: names of Python, and entries of the configuration.
_PYTHON = re.compile(r"`(hicache(?:\.\w+)+)`")
_ENTRY = re.compile(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)*)(?:: \w+)?`")


def rows(page: str) -> list[list[str]]:
    """The cells of all rows of the tables of `page`, without their headings."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| there", "| SG"))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def resolve(name: str) -> Any:
    """Return the object called `name`, or the class of a field that only its objects have. Raises AttributeError."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for number, part in enumerate(parts[end:], end):
            if not hasattr(found, part) and inspect.isclass(found) and number == len(parts) - 1:
                sources = [inspect.getsource(kind) for kind in found.__mro__ if kind.__module__.startswith("hicache")]
                if any(re.search(rf"\bself\.{part}\b.* = |^    {part}: ", source, re.M) for source in sources):
                    return found
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def has_entry(name: str) -> bool:
    """True if `name` is an entry of the configuration."""
    section: Any = HiCacheConfig
    for part in name.split("."):
        kinds = [kind for kind in (section, *get_args(section)) if inspect.isclass(kind) and issubclass(kind, Section)]
        fields = [kind.model_fields[part] for kind in kinds if part in kind.model_fields]
        if not fields:
            return False
        section = fields[0].annotation
    return True


def test_each_name_of_the_page_exists(repository: Path) -> None:
    cells = [cell for row in rows((repository / "docs/from_sglang.md").read_text()) for cell in row[1:]]
    names = {name for cell in cells for name in _PYTHON.findall(cell)}
    assert len(names) > 60
    for name in sorted(names):
        resolve(name)


def test_each_entry_of_the_page_exists(repository: Path) -> None:
    names, otherwise = (repository / "docs/from_sglang.md").read_text().split("## Done otherwise")
    cells = [row[1] for row in rows(names)] + [row[2] for row in rows(otherwise)]
    entries = {name for cell in cells for name in _ENTRY.findall(cell) if not name.startswith("hicache")}
    assert {"prefetch.policy", "prefix_cache", "host.ratio", "break_even.mode", "sessions.enabled"} < entries
    assert [name for name in sorted(entries) if not has_entry(name)] == []


@pytest.mark.parametrize("name", ["hicache.tiers.Missing", "hicache.radix.Node.missing", "hicache.missing.Node"])
def test_a_missing_name_is_found(name: str) -> None:
    with pytest.raises(AttributeError):
        resolve(name)
    assert not has_entry("prefetch.missing") and not has_entry(name)

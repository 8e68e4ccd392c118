"""The documentation site: it builds without a warning, loads nothing from elsewhere, has each public name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import hicache
from hicache.cli.main import COMMANDS

pytestmark = pytest.mark.long


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a source tree, with warnings as errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(source)}
    return subprocess.run(
        command, cwd=source, env=environ, capture_output=True, text=True, timeout=500, stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.fixture(scope="module")
def site(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this source tree."""
    target = tmp_path_factory.mktemp("site")
    result = build(repository, target)
    assert result.returncode == 0, result.stdout + result.stderr
    return target


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?((?:https?:)?//[^\"'> ]+)")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert not {str(page): found for page in pages if (found := loads.findall(page.read_text(encoding="utf-8")))}
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.findall(r"url\([\"']?https?:", styles)


def test_links_of_the_repository_resolve_to_pages_of_the_site(site: Path) -> None:
    overview = (site / "readme.html").read_text(encoding="utf-8")
    assert 'href="backends/index.html"' in overview and 'href="DESIGN.html"' in overview
    assert 'id="redisyaml"' in (site / "configs/index.html").read_text(encoding="utf-8")
    assert 'href="../configs/index.html#redisyaml"' in (site / "backends/index.html").read_text(encoding="utf-8")


def test_the_reference_has_each_public_name(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    names = {line.split()[0].rpartition(".")[2] for line in zlib.decompress(inventory).decode().splitlines()}
    assert set(hicache.__all__) - {"__version__"} <= names
    assert {"TreeCache", "HostCache", "Driver", "Store", "StoreGroup", "Verbs", "StoredPages", "HiCacheConfig"} <= names


def test_the_reference_has_each_command(site: Path) -> None:
    text = (site / "commands.html").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f'id="hicache-{name}"' not in text]
    assert 'id="hicache-ctl-scrub"' in text and "--older-than" in text


def unreadable_lists(text: str) -> list[int]:
    """Return the lines at which the site would not see the list that a viewer of the repository sees: one without an
    empty line before it, or one inside another that is indented by less than four."""
    found, in_code, before = [], False, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        item = re.match(r"( *)(?:[-*]|[0-9]+\.) ", line)
        goes_on = re.match(r" *(?:[-*]|[0-9]+\.) |  ", before)
        if item is not None and not in_code and ((before and not goes_on) or len(item[1]) in (1, 2, 3)):
            found.append(number)
        before = line
    return found


def test_lists_read_the_same_on_the_site(repository: Path) -> None:
    pages = [*repository.glob("*.md"), *(repository / "docs").rglob("*.md")]
    assert not {str(page): found for page in pages if (found := unreadable_lists(page.read_text(encoding="utf-8")))}
    assert unreadable_lists("text\n- one\n- two\n\n1. three\n  - four\n") == [2, 6]


def test_an_error_in_a_page_fails_the_build(repository: Path, tmp_path: Path) -> None:
    """The control: a page that no navigation names, a dead link, a dead anchor and an unknown name of the reference."""
    for name in ("hicache", "configs", "deploy", "examples"):
        (tmp_path / name).symlink_to(repository / name)
    for name in ("mkdocs.yml", "docs_hooks.py", "README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(repository / name, tmp_path)
    shutil.copytree(repository / "docs", tmp_path / "docs")
    (tmp_path / "docs/lost.md").write_text("# Lost\n\n[page](missing.md) [heading](storage.md#no-such-heading)\n")
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode != 0
    for complaint in ("lost.md", "missing.md", "no-such-heading"):
        assert complaint in result.stdout + result.stderr
    (tmp_path / "docs/api/storage.md").write_text("# Storage\n\n::: hicache.backends.base.NoSuchClass\n")
    (tmp_path / "docs/lost.md").unlink()
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode != 0 and "NoSuchClass" in result.stdout + result.stderr

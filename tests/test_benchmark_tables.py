"""The tables of the documentation are the files that the benchmarks write."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lab.benchmarks.__main__ import ALL
from lab.benchmarks._table import PAGE_VARIABLE, Row, page_head, page_table, print_table, this_machine

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = sorted((DOCS / "benchmarks").glob("*"))
MACHINE = r"\d{4}-\d\d-\d\d, \d+ cores of .+, \d+ GiB of memory, .+, .*(load|busy|programs).*"


ROW = re.compile(r"\| .+ \| .+ \| .+ \| (-?\d+\.\d\d|-) \| (\d+\.\d\d|-) \|")


def is_written(page: Path) -> bool:
    """True if the page is exactly as its benchmark would write the same figures."""
    text = page.read_text(encoding="utf-8")
    measured = re.search(rf": ({MACHINE})\.\n", text)
    tables = re.findall(r"^\*\*(.*)\*\*\n\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    rows = [lines.splitlines()[2:] for _, lines in tables]
    if measured is None or not tables or not all(ROW.fullmatch(row) for lines in rows for row in lines):
        return False
    cells = [[row[2:-2].split(" | ") for row in lines] for lines in rows]
    again = (page_table(title, found) for (title, _), found in zip(tables, cells, strict=True))
    return text == page_head(page.stem, measured[1]) + "".join(again)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_of_tables_is_as_its_benchmark_writes_it(page: Path) -> None:
    assert is_written(page)
    assert (DOCS.parent / "lab/benchmarks" / f"{page.stem.replace('.', '/')}.py").is_file()


def test_the_page_about_benchmarks_links_to_each_page_of_tables_and_each_benchmark_has_one() -> None:
    linked = set(re.findall(r"\(benchmarks/([a-z0-9_.]+)\.md\)", (DOCS / "benchmarks.md").read_text(encoding="utf-8")))
    assert linked == {page.stem for page in PAGES} >= set(ALL)


def test_a_benchmark_writes_its_tables_as_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "tree.md"
    page.write_text(page_head("tree", this_machine()), encoding="utf-8")
    monkeypatch.setenv(PAGE_VARIABLE, str(page))
    print_table("one", [Row("a  b", "1 us", "2 us", 0.5, 1.0)])
    print_table("two", [Row("c", "3 us"), Row("d", "4 us")])
    assert is_written(page)
    assert "| a  b | 1 us | 2 us | 0.50 | 1.00 |\n\n**two**" in page.read_text(encoding="utf-8")


@pytest.mark.long
def test_the_option_writes_a_page(repository: Path, tmp_path: Path) -> None:
    page = tmp_path / "allocators.md"
    command = [sys.executable, "-m", "lab.benchmarks", "allocators", "--write", str(page)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert is_written(page)
    assert page.read_text(encoding="utf-8").count("\n| ") == len(done.stdout.splitlines()) - 2


@pytest.mark.parametrize(
    ("written", "by_hand"),
    [
        ("| 1 us | - | - | - |", "| 1 us | - | - |"), ("| 1 us | - | - | - |", "| 1 us | - | about 2 | - |"),
        ("|---|---:", "|---|---"), ("\n\n**one**", "\nSome words.\n\n**one**"), (" cores of", " CPUs:"),
    ],
)
def test_a_page_that_was_written_by_hand_is_noticed(tmp_path: Path, written: str, by_hand: str) -> None:
    """The control: a missing cell, a ratio in words, other columns, text between tables, no machine."""
    page = tmp_path / "tree.md"
    text = page_head("tree", this_machine()) + page_table("one", [("a", "1 us", "-", "-", "-")])
    assert text.count(written) == 1
    page.write_text(text, encoding="utf-8")
    assert is_written(page)
    page.write_text(text.replace(written, by_hand), encoding="utf-8")
    assert not is_written(page)


@pytest.mark.long
@pytest.mark.servers
@pytest.mark.parametrize("name", ALL)
def test_each_benchmark_can_make_each_of_its_tables(repository: Path, tmp_path: Path, name: str) -> None:
    """With the smallest sizes: the figures mean nothing, but a table that cannot be made any more is noticed."""
    page = tmp_path / f"{name}.md"
    command = [sys.executable, "-m", "lab.benchmarks", name, "--smallest", "--write", str(page)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert is_written(page)

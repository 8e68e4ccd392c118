"""A pytest plugin that shows which store passes which test of the contracts, as a Markdown table.

    python -m pytest -q -p hicache_lab.conformance.table tests/backends --conformance conformance.md

With `--conformance` only contract tests run, those of all collected subclasses; `-` instead of a file prints the table.
A cell counts the cases of a test that passed. `own` marks a test that the subclass has replaced because its store
cannot meet the contract or meets it in another way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from .pages import ContractFixtures

# pytest's names for its lists of reports, the worst last: a test that failed in any phase has failed.
_OUTCOMES = {"passed": "passed", "skipped": "skipped", "failed": "failed", "error": "failed"}
_OWN = ("own", "True")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--conformance`."""
    group = parser.getgroup("hicache")
    group.addoption("--conformance", metavar="FILE", help="run only contract tests of backends; write a table to FILE")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only contract tests, and mark those that a subclass has replaced."""
    if config.getoption("--conformance") is None:
        return
    kept: list[pytest.Item] = []
    for item in items:
        cls = item.cls if isinstance(item, pytest.Function) else None
        if isinstance(item, pytest.Function) and cls is not None and issubclass(cls, ContractFixtures):
            kept.append(item)
            if item.originalname in vars(cls):
                item.user_properties.append(_OWN)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the table."""
    target = config.getoption("--conformance")
    if target is None:
        return
    reports = {
        report.nodeid: (outcome, _OWN in map(tuple, report.user_properties))
        for category, outcome in _OUTCOMES.items()
        for report in terminalreporter.stats.get(category, ()) if report.nodeid.count("::") > 1
    }
    text = "\n".join(_table(reports))
    if target == "-":
        terminalreporter.write_line(text)
    else:
        Path(target).write_text(text + "\n")
        terminalreporter.write_line(f"wrote {target}")


def _table(reports: dict[str, tuple[str, bool]]) -> Iterable[str]:
    """Return the lines of the table; `reports` holds outcomes by pytest's names of cases."""
    cells: dict[tuple[str, str], dict[str, list[tuple[str, bool]]]] = defaultdict(lambda: defaultdict(list))
    for case, report in reports.items():
        module, cls, test = case.split("[")[0].split("::")[-3:]
        cells[module, cls][test].append(report)
    tests = list(dict.fromkeys(test for column in cells.values() for test in column))
    bad = sum(outcome != "passed" for outcome, _ in reports.values())
    yield f"{len(cells)} backends, {len(tests)} tests, {len(reports)} cases; not passed: {bad or 'none'}."
    yield ""
    shared = Counter(cls for _, cls in cells)
    names = [
        cls.removeprefix("Test") + (f" ({Path(module).stem.removeprefix('test_')})" if shared[cls] > 1 else "")
        for module, cls in cells
    ]
    yield f"| test | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"
    for test in tests:
        row = " | ".join(_cell(column.get(test, [])) for column in cells.values())
        yield f"| {test.removeprefix('test_').replace('_', ' ')} | {row} |"


def _cell(cases: list[tuple[str, bool]]) -> str:
    if not cases:
        return ""
    counts = Counter(outcome for outcome, _ in cases)
    own = " own" if any(is_own for _, is_own in cases) else ""
    skipped = f" {counts['skipped']} skipped" if counts["skipped"] else ""
    failed = f" **{counts['failed']} failed**" if counts["failed"] else ""
    return f"{counts['passed']}{own}{skipped}{failed}"

"""A pytest plugin that shows which backend passes which test of the contracts, as a Markdown table.

    python -m pytest -q -p hicache.backends.testing.table tests/backends --conformance conformance.md

With `--conformance` only the tests of contracts run, of all their subclasses that are collected; `-` in place of a file
prints the table. A cell counts the cases of a test that passed; `own` marks a test that the subclass has replaced,
because its store cannot do what the contract asks, or does it in another way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest

from .pages import ContractFixtures

# The name of a test, and the class that has it.
Cell: TypeAlias = tuple[str, type]


@dataclass(slots=True)
class _Results:
    """Outcomes by cell, each case of a test on its own; `own` are the cells that a subclass has replaced."""

    outcomes: dict[Cell, list[str]] = field(default_factory=lambda: defaultdict(list))
    cells: dict[str, Cell] = field(default_factory=dict)
    own: set[Cell] = field(default_factory=set)


_RESULTS = pytest.StashKey[_Results]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--conformance`."""
    group = parser.getgroup("hicache")
    group.addoption("--conformance", metavar="FILE", help="run only contracts of backends, and write a table of them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of contracts, and note which cell each of them belongs to."""
    if config.getoption("--conformance") is None:
        return
    results = config.stash.setdefault(_RESULTS, _Results())
    kept: list[pytest.Item] = []
    for item in items:
        cls = item.cls if isinstance(item, pytest.Function) else None
        if isinstance(item, pytest.Function) and cls is not None and issubclass(cls, ContractFixtures):
            kept.append(item)
            name = item.originalname
            cell = (name, cls)
            results.cells[item.nodeid] = cell
            if name in vars(cls):
                results.own.add(cell)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


class _Recorder:
    """Takes down the outcomes: a test has failed if any part of it has."""

    def __init__(self, results: _Results) -> None:
        self._results = results
        self._worst: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See pytest."""
        if report.when == "setup" or report.outcome != "passed":
            before = self._worst.get(report.nodeid, "passed")
            self._worst[report.nodeid] = before if before == "failed" else report.outcome
        if report.when == "teardown" and report.nodeid in self._results.cells:
            self._results.outcomes[self._results.cells[report.nodeid]].append(self._worst[report.nodeid])


def pytest_configure(config: pytest.Config) -> None:
    """See pytest."""
    if config.getoption("--conformance") is not None:
        config.pluginmanager.register(_Recorder(config.stash.setdefault(_RESULTS, _Results())))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the table."""
    target = config.getoption("--conformance")
    if target is None:
        return
    results = config.stash[_RESULTS]
    text = "\n".join(_table(results))
    if target == "-":
        terminalreporter.write_line(text)
    else:
        Path(target).write_text(text + "\n")
        terminalreporter.write_line(f"wrote {target}")


def _table(results: _Results) -> Iterable[str]:
    tests = list(dict.fromkeys(test for test, _ in results.outcomes))
    backends = list(dict.fromkeys(backend for _, backend in results.outcomes))
    bad = sum(outcome != "passed" for cases in results.outcomes.values() for outcome in cases)
    cases = sum(map(len, results.outcomes.values()))
    yield f"{len(backends)} backends, {len(tests)} tests, {cases} cases, {bad or 'none'} of them not passed."
    yield ""
    yield f"| test | {' | '.join(_names(backends))} |"
    yield f"|---|{'---|' * len(backends)}"
    for test in tests:
        cells = [_cell(results, (test, backend)) for backend in backends]
        yield f"| {test.removeprefix('test_').replace('_', ' ')} | {' | '.join(cells)} |"


def _names(backends: Sequence[type]) -> Iterable[str]:
    """What each column is called: by its class, and by the module as well if another class is called so."""
    shared = Counter(cls.__name__ for cls in backends)
    for cls in backends:
        module = cls.__module__.rpartition(".")[2].removeprefix("test_")
        name = cls.__name__.removeprefix("Test")
        yield f"{name} ({module})" if shared[cls.__name__] > 1 else name


def _cell(results: _Results, cell: Cell) -> str:
    cases = results.outcomes.get(cell)
    if cases is None:
        return ""
    passed = cases.count("passed")
    own = " own" if cell in results.own else ""
    skipped = f" {cases.count('skipped')} skipped" if "skipped" in cases else ""
    failed = f" **{cases.count('failed')} failed**" if "failed" in cases else ""
    return f"{passed}{own}{skipped}{failed}"

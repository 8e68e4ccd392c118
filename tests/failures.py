"""A pytest plugin that names the failed tests of a complete run, so that `.ci/run` can repeat them.

`-p tests.failures --failures FILE` writes their node ids to FILE, one a line. Without a failure, and after a run that
was interrupted or broken, or in which a module could not be collected, FILE is not written: then repeating the failed
tests would prove nothing about the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--failures", type=Path, metavar="FILE", help="write the node ids of failed tests to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Start to record, except in the workers of pytest-xdist: their reports reach the main process."""
    path: Path | None = config.getoption("--failures")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(path))


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: dict[str, None] = {}
        self._is_complete = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that cannot be collected. With pytest-xdist the run goes on without it."""
        self._is_complete &= not report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test whose setup, call or teardown failed, or whose worker died."""
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the names if all tests were run."""
        if exitstatus == pytest.ExitCode.TESTS_FAILED and self._is_complete and self._failed:
            self._path.write_text("".join(f"{test}\n" for test in self._failed))

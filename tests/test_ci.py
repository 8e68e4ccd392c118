"""`.ci/run` on a small project: one failure of a test is repeated, two fail the run, and other faults fail it at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

# The real Makefile passes PYTEST_ARGS in the same way.
MAKEFILE = """
test:
\t.venv/bin/python -m pytest -p xdist -n 1 -p no:cacheprovider $(PYTEST_ARGS)
test-engines:
\t.venv-engines/bin/python -m pytest -p no:cacheprovider tests/test_passes.py $(PYTEST_ARGS)
check .venv-engines/.stamp:
\ttrue
"""
PASSES = "def test_passes() -> None:\n    assert True\n"
ALWAYS_FAILS = "def test_always_fails() -> None:\n    assert False\n"
# Fails until it has failed as often as this.
FAILS = """
import pathlib
TRIED = pathlib.Path(__file__).with_name("tried")
def test_fails_at_first() -> None:
    tried = len(TRIED.read_text()) if TRIED.exists() else 0
    TRIED.write_text("." * (tried + 1))
    assert tried >= {times}
"""


@pytest.fixture
def project(tmp_path: Path, repository: Path) -> Path:
    """Create a project with the real `.ci/run` and one test that passes."""
    (tmp_path / "tests").mkdir()
    shutil.copytree(repository / ".ci", tmp_path / ".ci")
    shutil.copy(repository / "tests" / "failures.py", tmp_path / "tests")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "tests" / "test_passes.py").write_text(PASSES)
    for environment in (".venv", ".venv-engines"):
        (tmp_path / environment / "bin").mkdir(parents=True)
        script = f'#!/bin/sh\nexec {sys.executable} "$@"\n'  # a link would not find the packages of its environment
        (tmp_path / environment / "bin" / "python").write_text(script)
        (tmp_path / environment / "bin" / "python").chmod(0o755)
    return tmp_path


def run(project: Path, **extra: str) -> tuple[int, str]:
    """Return the status and the output of `.ci/run` with `extra` variables."""
    # Importing plugins would take most of the time.
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **extra}
    ended = subprocess.run(
        ["bash", ".ci/run"], cwd=project, env=environ, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout


def test_a_run_without_a_failure_passes_and_repeats_nothing(project: Path) -> None:
    status, printed = run(project)
    assert status == 0 and "make test passed: " in printed and "make test-engines passed: " in printed
    assert "alone" not in printed


def test_files_that_tests_leave_are_named(project: Path) -> None:
    path = project / "hicache-left"
    (project / "tests" / "test_leaves.py").write_text(f"def test_leaves() -> None:\n    open({str(path)!r}, 'w')\n")
    (project / "hc-old").touch()
    status, printed = run(project, TMPDIR=str(project))
    left = printed.partition("left behind, by these tests or by others")[2].splitlines()
    assert status == 0 and str(path) in left and str(project / "hc-old") not in left


def test_a_test_that_fails_once_passes_and_is_named_last(project: Path) -> None:
    (project / "tests" / "test_flaky.py").write_text(FAILS.format(times=1))
    status, printed = run(project)
    assert status == 0
    last = printed.splitlines()[-2:]
    assert last == ["failed at first, and passed alone; mend them first:", "  tests/test_flaky.py::test_fails_at_first"]


def test_a_test_that_fails_two_times_of_two_fails_the_run(project: Path) -> None:
    (project / "tests" / "test_flaky.py").write_text(FAILS.format(times=2))
    status, printed = run(project)
    assert status != 0 and "make test failed with status" in printed


def test_a_test_that_always_fails_fails_the_run_beside_one_that_fails_once(project: Path) -> None:
    (project / "tests" / "test_flaky.py").write_text(FAILS.format(times=1))
    (project / "tests" / "test_broken.py").write_text(ALWAYS_FAILS)
    status, printed = run(project)
    assert status != 0 and "FAILED tests/test_broken.py::test_always_fails" in printed


def test_more_failures_than_bad_luck_explains_are_not_repeated(project: Path) -> None:
    many = "".join(f"def test_{number}() -> None:\n    assert False\n" for number in range(11))
    (project / "tests" / "test_many.py").write_text(many)
    status, printed = run(project)
    assert status != 0 and "once more, alone" not in printed


@pytest.mark.parametrize("fault", ["import nowhere\n", "import os\ndef test_ends() -> None:\n    os._exit(3)\n"])
def test_a_module_that_cannot_be_imported_or_that_ends_its_process_fails_the_run(project: Path, fault: str) -> None:
    """Also beside a test that fails once."""
    (project / "tests" / "test_flaky.py").write_text(FAILS.format(times=1))
    (project / "tests" / "test_fault.py").write_text(fault)
    assert run(project)[0] != 0


def test_an_interrupted_run_fails_although_its_only_failed_test_would_pass(project: Path) -> None:
    (project / "tests" / "test_flaky.py").write_text(FAILS.format(times=1))
    (project / "tests" / "conftest.py").write_text(
        "def pytest_runtest_logreport(report):\n    if report.failed:\n        raise KeyboardInterrupt\n"
    )
    status, printed = run(project)
    assert status != 0 and "once more, alone" not in printed

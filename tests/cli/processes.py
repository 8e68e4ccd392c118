"""The command as a user runs it: in its own process, with one output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 500
# The limit of a demo, which takes ten seconds on two idle processors. `demo_timeout` is the limit of a test that runs
# two of them.
DEMO_TIMEOUT_S = 500
demo_timeout = pytest.mark.timeout(2 * DEMO_TIMEOUT_S + 20)


def start(repository: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a command from the sources in `repository`, with wide lines that are not wrapped."""
    environ = {**os.environ, "PYTHONPATH": str(repository), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "hicache", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)


def finish(process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Wait for the end of a command. Return its exit code and its unread output. Kill it after `timeout_s`."""
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return process.returncode, output


def hicache(repository: Path, *arguments: str, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Run a command to its end. Return its exit code and its output."""
    return finish(start(repository, *arguments), timeout_s)

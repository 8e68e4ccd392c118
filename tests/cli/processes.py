"""The command as a user runs it: a process of its own, with one output for all that it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 170
# Of a whole demo, which takes ten seconds of two processors that it may have to share; with a limit of its own for the
# test, `demo_timeout`.
DEMO_TIMEOUT_S = 280
demo_timeout = pytest.mark.timeout(2 * DEMO_TIMEOUT_S + 20)


def start(repository: Path, *arguments: str) -> subprocess.Popen[str]:
    """A command that runs, from the sources in `repository`, with lines too wide to be broken."""
    environ = {**os.environ, "PYTHONPATH": str(repository), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "hicache", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)


def finish(process: subprocess.Popen[str], timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Wait for its end; its exit code and what it has said since it was last read. Kills it after `timeout_s`."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, output


def hicache(repository: Path, *arguments: str, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Run a command to its end."""
    return finish(start(repository, *arguments), timeout_s)

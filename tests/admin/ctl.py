"""`hicache ctl` in a separate process, as a user runs it, or, for variants of a command, within this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from hicache.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return its standard output, parsed as one JSON document."""
        return json.loads(self.out)


@dataclass(frozen=True)
class Ctl:
    """Runs commands with the options `address`."""

    address: tuple[str, ...]

    def start(self, *arguments: str, columns: int = 120, **pipes: Any) -> subprocess.Popen[str]:
        """Start a command in a separate process."""
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns)}
        command = [sys.executable, "-m", "hicache", "ctl", *self.address, *arguments]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
        return subprocess.Popen(command, text=True, env=environ, **streams)

    def __call__(self, *arguments: str, columns: int = 120, code: int = 0, **pipes: Any) -> Ended:
        """Run a command to its end. Fails if its exit code is not `code`."""
        with self.start(*arguments, columns=columns, **pipes) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
        ended = Ended(process.returncode, out or "", err or "")
        assert ended.code == code, ended
        return ended

    def quick(self, *arguments: str, columns: int = 120, code: int = 0) -> Ended:
        """Run a command within this process, which saves half a second. Fails if its exit code is not `code`."""
        result = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, ["ctl", *self.address, *arguments])
        ended = Ended(result.exit_code, result.stdout, result.stderr)
        assert ended.code == code, ended
        return ended

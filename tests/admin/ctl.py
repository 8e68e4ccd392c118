"""`hicache ctl` as a user runs it, a process of its own; and, for variants of a command, within this process."""

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
TIMEOUT_S = 60


@dataclass(frozen=True)
class Ended:
    """How a command has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its standard output, which is one document."""
        return json.loads(self.out)


@dataclass(frozen=True)
class Ctl:
    """Commands with the options `address`."""

    address: tuple[str, ...]

    def start(self, *arguments: str, columns: int = 120, **pipes: Any) -> subprocess.Popen[str]:
        """A command that runs."""
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns)}
        command = [sys.executable, "-m", "hicache", "ctl", *self.address, *arguments]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
        return subprocess.Popen(command, text=True, env=environ, **streams)

    def __call__(self, *arguments: str, columns: int = 120, code: int = 0, **pipes: Any) -> Ended:
        """A command to its end, which has to be that exit code."""
        with self.start(*arguments, columns=columns, **pipes) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT_S)
            finally:
                process.kill()
        ended = Ended(process.returncode, out or "", err or "")
        assert ended.code == code, ended
        return ended

    def quick(self, *arguments: str, columns: int = 120, code: int = 0) -> Ended:
        """The same within this process, which saves half a second."""
        result = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, ["ctl", *self.address, *arguments])
        ended = Ended(result.exit_code, result.stdout, result.stderr)
        assert ended.code == code, ended
        return ended

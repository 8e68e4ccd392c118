"""Runs a module of this folder in a separate process, which Triton's interpreter and compiler need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_child(repository: Path, module: str, *arguments: str, **environ: str) -> str:
    """Return the output of `module`. Raises AssertionError with its stderr if it fails or warns."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"tests.tiers.{module}", *arguments],
        cwd=repository, env=os.environ | environ, capture_output=True, text=True, timeout=500, check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout

"""Runs a module of this folder in a process of its own, as Triton's interpreter and its compiler need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_child(repository: Path, module: str, *arguments: str, **environ: str) -> str:
    """What `module` prints. Raises AssertionError with what it wrote to stderr if it fails or warns."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"tests.tiers.{module}", *arguments],
        cwd=repository, env=os.environ | environ, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout

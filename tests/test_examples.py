"""The examples run as they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 120


def test_embedding_hits_the_device_and_after_a_restart_storage(repository: Path, tmp_path: Path) -> None:
    outputs = [
        subprocess.run(
            [sys.executable, str(repository / "examples" / "embed.py"), str(tmp_path)],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        ).stdout
        for _ in range(2)
    ]  # fmt: skip
    hits = [
        [tuple(map(int, re.findall(r"(\d+)(?: tokens)? from", line))) for line in out.splitlines()] for out in outputs
    ]
    assert hits[0] == [(0, 0, 0), (0, 0, 0), (496, 0, 0), (496, 0, 0)]
    assert hits[1] == [(0, 0, 496), (0, 0, 496), (496, 0, 0), (496, 0, 0)]

"""A process that fails in the ways of an engine, without an engine. For test_process.py."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from .process import serve


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    for path in options.get("leaves", ()):
        Path(path).touch()
    if "error" in options:
        raise ValueError(options["error"])
    left = shared_memory.SharedMemory(create=True, size=4096)
    child = subprocess.Popen(["sleep", "600"])
    print("some text on stdout")
    return {
        "left": lambda: [left.name, child.pid],
        "raise": lambda: 1 // 0,
        "die": lambda: os._exit(9),
        "hang": lambda: time.sleep(600),
    }


if __name__ == "__main__":
    serve(start)

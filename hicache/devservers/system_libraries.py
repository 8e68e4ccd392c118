"""System libraries that some programs need, from the system or unpacked beside this Python without root."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError

# What Mooncake is linked against: library, and the Debian package that has it.
MOONCAKE_LIBRARIES: Mapping[str, str] = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1"}


def unpacked_libraries() -> Path:
    """Where the Makefile unpacks Debian packages if it may not install them; need not exist."""
    return Path(sys.prefix) / "lib" / "hicache-system"


def library_path(libraries: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with which a program finds `libraries`; none are needed if the system has them.

    Raises ConfigError that names the Debian packages of those which are nowhere.
    """
    absent = [name for name in libraries if not _loads(name)]
    if not absent:
        return {}
    folder = unpacked_libraries()
    nowhere = [name for name in absent if not (folder / name).exists()]
    if nowhere:
        packages = " ".join(libraries[name] for name in nowhere)
        raise ConfigError(f"{', '.join(nowhere)} not found: sudo apt-get install {packages}")
    before = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{folder}:{before}" if before else str(folder)}


def preload(libraries: Mapping[str, str]) -> None:
    """Load those of `libraries` that only the unpacked packages have into this process, for modules linked to them.

    Raises ConfigError as `library_path`.
    """
    if library_path(libraries):
        for name in libraries:
            if not _loads(name):
                ctypes.CDLL(str(unpacked_libraries() / name), mode=ctypes.RTLD_GLOBAL)


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True

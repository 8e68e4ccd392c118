"""System libraries that storage clients and servers need: the system's own, or unpacked beside this Python.

`python -m hicache.devservers.install_libraries` installs or unpacks them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError

# What Mooncake is linked against: library, and the Debian package that has it.
MOONCAKE_LIBRARIES: Mapping[str, str] = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


def unpacked_libraries() -> Path:
    """Where packages are unpacked that may not be installed; need not exist."""
    return Path(sys.prefix) / "lib" / "hicache-system"


def absent_libraries(libraries: Mapping[str, str]) -> list[str]:
    """Those of `libraries` that the system does not have."""
    return [name for name in libraries if not _loads(name)]


def library_path(libraries: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with which a program finds `libraries`; none are needed if the system has them.

    Raises ConfigError that names the Debian packages of those which are nowhere.
    """
    if not _unpacked(libraries):
        return {}
    folder, before = str(unpacked_libraries()), os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{folder}:{before}" if before else folder}


def preload(libraries: Mapping[str, str]) -> None:
    """Load those of `libraries` that only the unpacked packages have into this process, for modules linked to them.

    Raises ConfigError as `library_path` does, also if what was unpacked does not load.
    """
    if not _unpacked(libraries):
        return
    # Two copies of one library in a process do not get along: those that the system has stay out.
    left = [path for path in sorted(unpacked_libraries().iterdir()) if not _loads(path.name)]
    # They need each other in an order that only the loader knows: load what can be loaded until nothing is left.
    while left:
        still = [path for path in left if not _loads(str(path))]
        if len(still) == len(left):
            raise ConfigError(
                f"{still[0].name}: was unpacked into {unpacked_libraries()} and does not load; remove that folder, and "
                f"run: sudo apt-get install {' '.join(libraries.values())}"
            )
        left = still


def _unpacked(libraries: Mapping[str, str]) -> list[str]:
    """Those of `libraries` that are only unpacked."""
    absent = absent_libraries(libraries)
    nowhere = [name for name in absent if not (unpacked_libraries() / name).exists()]
    if nowhere:
        packages = " ".join(libraries[name] for name in nowhere)
        raise ConfigError(f"{', '.join(nowhere)} not found: sudo apt-get install {packages}")
    return absent


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True

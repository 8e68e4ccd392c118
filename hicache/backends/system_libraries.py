"""System libraries that storage clients and servers need: the system's own, or unpacked beside this Python.

`python -m hicache_lab.devservers.install_libraries` installs or unpacks them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError

# The libraries that Mooncake is linked with, and their Debian packages.
MOONCAKE_LIBRARIES: Mapping[str, str] = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


def unpacked_libraries() -> Path:
    """Return the folder of unpacked packages; it may not exist."""
    return Path(sys.prefix) / "lib" / "hicache-system"


def absent_libraries(libraries: Mapping[str, str]) -> list[str]:
    """Return those of `libraries` that the system does not have."""
    return [name for name in libraries if not _loads(name)]


def library_path(libraries: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which a program finds `libraries`; empty if the system has them.

    Raises ConfigError that names the Debian packages of missing libraries.
    """
    if not _unpacked(libraries):
        return {}
    folder, before = str(unpacked_libraries()), os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{folder}:{before}" if before else folder}


def preload(libraries: Mapping[str, str]) -> None:
    """Load those of `libraries` that are only in the unpacked packages, for modules linked with them.

    Raises ConfigError as `library_path` does, and if an unpacked library cannot be loaded.
    """
    if not _unpacked(libraries):
        return
    # Two copies of one library in a process conflict, so the system's libraries are not loaded here.
    left = [path for path in sorted(unpacked_libraries().iterdir()) if not _loads(path.name)]
    # Only the loader knows the order of their dependencies: repeat until all are loaded or none can be.
    while left:
        still = [path for path in left if not _loads(str(path))]
        if len(still) == len(left):
            raise ConfigError(
                f"{still[0].name}: was unpacked into {unpacked_libraries()} and does not load; remove that folder, and "
                f"run: sudo apt-get install {' '.join(libraries.values())}"
            )
        left = still


def _unpacked(libraries: Mapping[str, str]) -> list[str]:
    """Return those of `libraries` that are only unpacked."""
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

"""System libraries that are unpacked beside this Python, because they may not be installed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from pathlib import Path

from hicache.errors import ConfigError

# In the folder of packages: Python runs the lines of such a file when it starts.
START_FILE = "hicache-system.pth"


def unpacked_libraries() -> Path:
    """Return the folder of unpacked packages; it may not exist."""
    return Path(sys.prefix) / "lib" / "hicache-system"


def absent_libraries(libraries: Mapping[str, str]) -> list[str]:
    """Return those of `libraries` that the system does not have."""
    return [name for name in libraries if not _loads(name)]


def only_unpacked(libraries: Mapping[str, str]) -> list[str]:
    """Return those of `libraries` that are only unpacked. Raises ConfigError for missing ones."""
    absent = absent_libraries(libraries)
    nowhere = [name for name in absent if not (unpacked_libraries() / name).exists()]
    if nowhere:
        packages = " ".join(libraries[name] for name in nowhere)
        raise ConfigError(f"{', '.join(nowhere)} not found: sudo apt-get install {packages}")
    return absent


def load_at_start(libraries: Mapping[str, str], packages: Path) -> None:
    """Let each Python whose folder of packages is `packages` load those of `libraries` that are only unpacked, for
    modules linked with them.

    Raises ConfigError that names the Debian packages of missing libraries, or if an unpacked library cannot be loaded.
    """
    if not only_unpacked(libraries):
        return
    # Two copies of one library in a process conflict, so the system's libraries are not loaded here.
    left = [path for path in sorted(unpacked_libraries().iterdir()) if not _loads(path.name)]
    loaded: list[str] = []
    # Only the loader knows the order of their dependencies: repeat until all are loaded or none can be.
    while left:
        still = [path for path in left if not _loads(str(path))]
        if len(still) == len(left):
            raise ConfigError(
                f"{still[0].name}: was unpacked into {unpacked_libraries()} and does not load; remove that folder, and "
                f"run: sudo apt-get install {' '.join(libraries.values())}"
            )
        loaded += [str(path) for path in left if path not in still]
        left = still
    there = f"filter(os.path.exists, {loaded!r})"
    (packages / START_FILE).write_text(
        f"import ctypes, os; list(map(ctypes.CDLL, {there}, [ctypes.RTLD_GLOBAL] * {len(loaded)}))\n"
    )


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True

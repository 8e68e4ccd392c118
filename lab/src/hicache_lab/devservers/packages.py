"""Finds the servers' programs, in Python packages or on the system."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from hicache.errors import MissingPackage, install_hint

# The programs of Debian's package `prometheus`.
PROMETHEUS_PROGRAMS = ("prometheus", "promtool")


def package_file(module: str, *parts: str, extra: str) -> Path:
    """Return the path of a file of an installed package. Raises MissingPackage if it does not exist."""
    spec = importlib.util.find_spec(module)
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(root, *parts)
        if path.is_file():
            return _executable(path)
    raise MissingPackage(f"the program {parts[-1]} is not installed; {install_hint(extra, 'lab')}")


def program(name: str, *, extra: str) -> Path:
    """Return the path of a program beside this Python or on PATH. Raises MissingPackage if it does not exist."""
    return _program(name, install_hint(extra, "lab"))


def prometheus_program(name: str) -> Path:
    """Return the path of one of `PROMETHEUS_PROGRAMS`, beside this Python or on the path. Raises MissingPackage."""
    return _program(name, "run python -m hicache_lab.devservers.install_libraries, or sudo apt-get install prometheus")


def _program(name: str, hint: str) -> Path:
    # Links are not resolved: Debian's redis-server is a link to a program that depends on its own name.
    beside = Path(sys.executable).parent / name
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        raise MissingPackage(f"the program {name} is not installed; {hint}")
    return Path(found).absolute()


def _executable(path: Path) -> Path:
    """Make a file executable: some installers drop the mode of a wheel's data files."""
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | 0o111)
    return path

"""Get the system libraries that Mooncake needs: `python -m hicache.devservers.install_libraries`.

As root on Debian or Ubuntu they are installed; otherwise their packages are fetched and unpacked beside this Python,
which takes no rights. Ends with 0 if all are there, with 1 after saying which packages to install by hand.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ..backends.system_libraries import MOONCAKE_LIBRARIES, absent_libraries, unpacked_libraries

# What these packages need in turn and a bare system lacks.
_COMPANIONS = {"libibverbs1": ("libnl-3-200", "libnl-route-3-200")}
_TIMEOUT_S = 300


def install() -> None:
    """Install the missing packages. Raises OSError or SubprocessError."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", *missing_packages()]):
        _run(["apt-get", *command], environ=environ)


def unpack(packages: list[str], target: Path) -> None:
    """Fetch `packages` and what they need, and put their libraries into `target`. Raises OSError or SubprocessError."""
    wanted = [name for package in packages for name in (package, *_COMPANIONS.get(package, ()))]
    with tempfile.TemporaryDirectory() as folder:
        _run(["apt-get", "download", "-qq", *wanted], directory=folder)
        for archive in Path(folder).glob("*.deb"):
            _run(["dpkg-deb", "-x", str(archive), f"{folder}/unpacked"])
        target.mkdir(parents=True, exist_ok=True)
        # Under the name that programs ask for; drivers of network cards, in folders below, are of no use here.
        for place in ("lib", "usr/lib"):
            for library in Path(folder, "unpacked", place).glob("*/lib*.so.*"):
                if library.is_symlink():
                    shutil.copyfile(library, target / library.name)


def missing_packages() -> list[str]:
    """The packages of the libraries that the system does not have."""
    return [MOONCAKE_LIBRARIES[name] for name in absent_libraries(MOONCAKE_LIBRARIES)]


def _run(command: list[str], *, directory: str | None = None, environ: dict[str, str] | None = None) -> None:
    subprocess.run(
        command, cwd=directory, env=environ, check=True, timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def main() -> int:
    """The exit code."""
    missing = missing_packages()
    try:
        if missing and os.geteuid() == 0:
            install()
        elif missing:
            unpack(missing, unpacked_libraries())
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{error}\nMooncake needs system libraries; run: sudo apt-get install {' '.join(missing)}",
              file=sys.stderr)  # fmt: skip
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

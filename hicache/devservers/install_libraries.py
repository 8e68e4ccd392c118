"""Get the system libraries that Mooncake needs: `python -m hicache.devservers.install_libraries`.

As root on Debian or Ubuntu they are installed; otherwise their packages are fetched and unpacked beside this Python,
which takes no rights. Ends with 0 if all are there, with 1 after saying which packages to install by hand.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ..backends.system_libraries import MOONCAKE_LIBRARIES, absent_libraries, preload, unpacked_libraries
from ..errors import ConfigError

_TIMEOUT_S = 300


def install() -> None:
    """Install the missing packages. Raises OSError or SubprocessError."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", *missing_packages()]):
        _run(["apt-get", *command], environ=environ)


def unpack(packages: list[str], target: Path) -> None:
    """Fetch `packages` and what they need, and put their libraries into `target`. Raises OSError or SubprocessError."""
    with tempfile.TemporaryDirectory() as folder:
        _run(["apt-get", "download", "-qq", *_with_dependencies(packages)], directory=folder)
        for archive in Path(folder).glob("*.deb"):
            _run(["dpkg-deb", "-x", str(archive), f"{folder}/unpacked"])
        target.mkdir(parents=True, exist_ok=True)
        # Under the name that programs ask for, mostly a link; drivers of network cards, in folders below, stay out.
        for place in ("lib", "usr/lib"):
            for library in Path(folder, "unpacked", place).glob("*/lib*.so.*"):
                if re.fullmatch(r".*\.so\.[0-9]+", library.name):
                    shutil.copyfile(library, target / library.name)


def _with_dependencies(packages: list[str]) -> list[str]:
    """`packages`, and what they need that is not installed. To ask takes no rights."""
    plan = _run(["apt-get", "install", "--simulate", "--no-install-recommends", *packages])
    # A line for each package; what is only brought up to date has its old version in brackets before the new one.
    return list(dict.fromkeys([*packages, *re.findall(r"^Inst (\S+) \(", plan, flags=re.MULTILINE)]))


def missing_packages() -> list[str]:
    """The packages of the libraries that the system does not have."""
    return [MOONCAKE_LIBRARIES[name] for name in absent_libraries(MOONCAKE_LIBRARIES)]


def _run(command: list[str], *, directory: str | None = None, environ: dict[str, str] | None = None) -> str:
    """What the command prints; its errors go where ours do."""
    done = subprocess.run(
        command, cwd=directory, env=environ, check=True, timeout=_TIMEOUT_S,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.stdout


def main() -> int:
    """The exit code."""
    missing = missing_packages()
    try:
        if missing and os.geteuid() == 0:
            install()
        elif missing:
            unpack(missing, unpacked_libraries())
        preload(MOONCAKE_LIBRARIES)
    except (OSError, subprocess.SubprocessError, ConfigError) as error:
        print(f"{error}\nMooncake needs system libraries; run: sudo apt-get install {' '.join(missing)}",
              file=sys.stderr)  # fmt: skip
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
